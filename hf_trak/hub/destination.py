"""The dataset repo that an index or scores are published in."""

from dataclasses import dataclass
from typing import Any

from huggingface_hub import CommitInfo, HfApi

from hf_trak.hub.access import REPO_TYPE

_COMMIT_FIELDS = ("commit_url", "commit_message", "commit_description", "oid", "pr_url")


@dataclass(frozen=True)
class Destination:
    """A dataset repo, and how to commit to it.

    Attributes:
        repo_id: name of the repo, created if need be.
        private: visibility of a repo that is created; `None` leaves it to the Hub's default.
        token: as in `huggingface_hub`; needs the right to write.
        revision: the branch; `None` is the main branch.
        create_pr: open a pull request instead of committing.
        commit_message: message of the commit; `None` is a default of the library.
    """

    repo_id: str
    private: bool | None = None
    token: str | bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None


def create_repo(api: HfApi, destination: Destination) -> str:
    """Create the repo unless it exists, and return its full name, `user/name`.

    Raises:
        ValueError: the repo exists and is public, but `private=True` was given.
    """
    private = destination.private
    repo_id = api.create_repo(destination.repo_id, repo_type=REPO_TYPE, private=private, exist_ok=True).repo_id
    if private and not api.dataset_info(repo_id).private:
        raise ValueError(
            f"The dataset repo {repo_id!r} exists and is public, but `private=True` was given. Nothing was "
            "uploaded. Expected a private repo: change its visibility in its settings, or push to another one."
        )
    return repo_id


def commit_fields(commit: CommitInfo) -> dict[str, Any]:
    """Return the arguments of `CommitInfo` as plain JSON, which the main process sends to the others."""
    return {name: getattr(commit, name) for name in _COMMIT_FIELDS}
