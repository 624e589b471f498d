"""Publishing banks of retrained models' outputs ([`~hf_trak.evaluation.Bank`]), and opening those of others.

`bank_checks.py` describes the files of a published bank and checks them, `bank_card.py` writes its card.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete

from hf_trak.errors import IncompleteStoreError
from hf_trak.evaluation.bank import Bank
from hf_trak.evaluation.bank_files import BANK, read_bank
from hf_trak.hub.access import REPO_TYPE, access_errors, hub_api
from hf_trak.hub.bank_card import bank_card, bank_facts
from hf_trak.hub.bank_checks import (
    MAX_JSON_BYTES,
    PART_FILES,
    PART_NAME,
    PARTS,
    is_part_file,
    most_bytes,
    open_checked,
    parts_file,
    refused,
)
from hf_trak.hub.cards import card_operations
from hf_trak.hub.destination import Destination, commit_fields, create_repo
from hf_trak.hub.files import HubFiles, LocalFiles
from hf_trak.hub.foreign_json import too_large
from hf_trak.hub.redaction import without_secrets
from hf_trak.runtime.processes import Processes


def push_bank(
    bank: Bank,
    repo_id: str,
    *,
    parts: Sequence[str] | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
) -> CommitInfo:
    """Publish a bank as a dataset repo: subsets, outputs, and a card that says how to judge a method on it.

    All files become visible together, in one commit. After it the repo has the parts that were pushed and no others;
    other files of the repo stay as they are, and an existing card is updated (see `hf_trak.hub.cards`). After an
    interruption the same call uploads only the files that have not arrived. Single trainings are not published. In a
    distributed run every process calls this function, and the main process pushes.

    Args:
        bank ([`~hf_trak.evaluation.Bank`]):
            The bank.
        repo_id (`str`):
            The dataset repo, created if need be.
        parts (`Sequence[str]`, *optional*):
            Names of the parts to publish. By default all, which then have to be complete.
        private (`bool`, *optional*):
            Visibility of a repo that is created. By default the Hub decides. `True` with a public repo is refused.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`; needs the right to write.
        revision (`str`, *optional*):
            The branch, created if need be. By default the main branch.
        create_pr (`bool`, *optional*, defaults to `False`):
            Open a pull request instead of committing.
        commit_message (`str`, *optional*):
            Message of the commit.

    Returns:
        `huggingface_hub.CommitInfo`: the commit.

    Raises:
        IncompleteStoreError: a part does not exist, or trainings of it are missing.
        StoreError: a file of the bank is damaged.
        ValueError: there is no part to publish; a part has a name or a size that readers refuse, repeats a part that
            is not published, or holds a token or a password in its description; an argument is not a valid name of a
            repo or revision; or the repo is public and `private=True` was given.
        ImportError: scipy is not installed, which the highest possible scores in the card are computed with.
        HubAccessError: the repo cannot be written to, or the connection failed; the same call resumes.
        PeerProcessError: the main process failed.
    """
    destination = Destination(repo_id, private, token, revision, create_pr, commit_message)

    def push() -> dict[str, Any]:
        return commit_fields(_push(bank, destination, parts))

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return CommitInfo(**(Processes().broadcast_from_main(push) if distributed else push()))


def _push(bank: Bank, destination: Destination, parts: Sequence[str] | None) -> CommitInfo:
    names = _parts_to_push(bank, parts)
    files = {path: bank.directory / path for path in (BANK, *(f"{name}/{f}" for name in names for f in PART_FILES))}
    for path, local in files.items():
        _check_publishable(path, local)
    described = read_bank(bank.directory)
    facts = bank_facts(bank, described, names)

    api, revision = hub_api(destination.token), destination.revision
    with access_errors(destination.repo_id, revision):
        repo_id = create_repo(api, destination)
        if revision is not None and not revision.startswith("refs/pr/"):
            api.create_branch(repo_id, branch=revision, repo_type=REPO_TYPE, exist_ok=True)
        info = api.dataset_info(repo_id, revision=revision)
        present = {file.rfilename for file in info.siblings or []}
        # Without `parts.json` the repo holds no bank, so files of such names have another purpose.
        stale = [path for path in sorted(present - set(files)) if is_part_file(path)] if PARTS in present else []
        return api.create_commit(
            repo_id,
            [
                CommitOperationAdd(PARTS, parts_file(described, names)),
                *(CommitOperationAdd(path, local) for path, local in files.items()),
                *card_operations(api, repo_id, info, bank_card(repo_id, facts), "bank"),
                *(CommitOperationDelete(path) for path in stale),
            ],
            commit_message=destination.commit_message or "Upload a bank of retrained models with hf_trak",
            repo_type=REPO_TYPE,
            revision=revision,
            create_pr=destination.create_pr,
            parent_commit=info.sha,
        )


def _parts_to_push(bank: Bank, parts: Sequence[str] | None) -> list[str]:
    """Return the names of the parts, sorted, after reading and checking each of them."""
    names = bank.parts if parts is None else sorted(set(parts))
    if not names:
        raise ValueError(
            f"The bank {bank.directory} has no part to publish. Expected at least one. Add parts with "
            "`Bank.add_part`, and call `Bank.build`."
        )
    if parts is None and (unfinished := [name for name in names if not bank.is_complete(name)]):
        raise IncompleteStoreError(
            f"The parts {unfinished} of the bank {bank.directory} lack trainings. Expected complete parts. Call "
            "`Bank.build` again, or name those to publish with `parts`."
        )
    for name in names:
        original = bank.part(name).repeat_of
        if original is not None and original not in names:
            raise ValueError(
                f"The part {name!r} repeats {original!r}, which is not among the parts to publish: {names}. Expected "
                "both. Add it to `parts`."
            )
        if not PART_NAME.fullmatch(name):
            raise ValueError(
                f"A part to publish is called {name!r}. Expected letters, digits and `._+=-`, first and last a letter "
                "or digit. Give its directory such a name."
            )
    return names


def _check_publishable(path: str, local: Path) -> None:
    """Refuse a file that readers would refuse, or that holds secrets. Raises `ValueError`."""
    size = local.stat().st_size
    if size > most_bytes(path):
        raise ValueError(
            f"{local} has {size} bytes, and readers take at most {most_bytes(path)}. Expected smaller parts. Divide "
            "its subsets among several parts."
        )
    if local.suffix == ".json":
        text = re.sub("[?#]", " ", local.read_text(encoding="utf-8"))  # a query in an address is no secret of itself
        if without_secrets(text) != text:
            raise ValueError(
                f"{local} holds a token of the Hub, or an address with a user name. Expected no secrets in what is "
                "published. Make the bank, or the part, again without it."
            )


def load_bank(
    repo_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Bank:
    """Open a bank from the Hub or from a directory, and check every file of it.

    Files from the Hub are kept in its cache, where the bank is there to be read. To add parts to it, copy
    `bank.directory` with `shutil.copytree`, and open the copy.

    Args:
        repo_or_path (`str` or `os.PathLike`):
            The dataset repo, or a directory, where parts may be unfinished.
        revision (`str`, *optional*):
            Branch, tag or commit. By default the main branch.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`.
        local_files_only (`bool`, *optional*, defaults to `False`):
            Use only what is in the Hub's cache.

    Returns:
        [`~hf_trak.evaluation.Bank`]: the bank.

    Raises:
        HubAccessError: the repo or revision does not exist or cannot be reached.
        IncompleteStoreError: the directory holds no bank.
        RefusedIndexError: a file is missing or too large, is a link, or belongs to another bank, or a downloaded file
            is damaged.
        StoreError: a file in the directory is damaged.
    """
    if Path(repo_or_path).is_dir():
        return open_checked(LocalFiles(Path(repo_or_path)))
    repo_id = os.fspath(repo_or_path)

    def check_size(name: str, size: int) -> None:
        if size > MAX_JSON_BYTES:
            raise refused(f"{name} of {repo_id}", too_large(size, MAX_JSON_BYTES))

    return open_checked(HubFiles(repo_id, PARTS, revision, token, local_files_only, check_size))
