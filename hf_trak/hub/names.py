"""Names of repos and revisions on the Hub, checked before they are used: they come from untrusted indexes."""

import re
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_trak.hub.foreign_json import shown

_SOURCE = re.compile(r"hf://(?P<repo>[^@/]+/[^@/]+)@(?P<revision>[^@]+)")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}")


@dataclass(frozen=True)
class HubSource:
    """Weights in a model repo of the Hub, at one revision."""

    repo_id: str
    revision: str

    def __str__(self) -> str:
        return f"hf://{self.repo_id}@{self.revision}"

    @classmethod
    def parse(cls, text: Any, what: str) -> "HubSource":
        """Read `hf://user/model@revision`. Raises `ValueError` for any other text; `what` names it in the message."""
        match = _SOURCE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(f"{what} is {text!r}. Expected 'hf://user/model@revision'.")
        return cls(checked_repo(match["repo"], what), checked_revision(match["revision"], what))


def checked_repo(name: Any, what: str) -> str:
    """Return the name of a repo, `user/name` or `name`. Raises `ValueError` for other texts, such as paths."""
    try:
        validate_repo_id(name)
    except (HFValidationError, TypeError) as error:
        raise ValueError(f"{what} names the repo {shown(name)}, which is not a valid name ({error})") from error
    return str(name)


def checked_revision(revision: Any, what: str) -> str:
    """Return the name of a branch, tag or commit. Raises `ValueError` for texts that cannot be one."""
    if not isinstance(revision, str) or not _REVISION.fullmatch(revision) or ".." in revision:
        raise ValueError(f"{what} names the revision {shown(revision)}, which is not a valid branch, tag or commit")
    return revision
