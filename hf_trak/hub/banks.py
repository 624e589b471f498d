"""Publish banks of retrained models' outputs ([`~hf_trak.evaluation.Bank`]), and open those of others."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, DatasetInfo, HfApi

from hf_trak.errors import IncompleteStoreError, RefusedIndexError, StoreError
from hf_trak.evaluation.bank import BANK, Bank, BankPart
from hf_trak.evaluation.intervals import RESAMPLES
from hf_trak.evaluation.retraining_files import CONFIG, OUTPUTS, SUBSETS
from hf_trak.hub.access import without_secrets
from hf_trak.hub.cards import card_operations, render_card
from hf_trak.hub.files import MAX_HEADER_BYTES, Bounds, HubFiles, IndexFiles, LocalFiles, check_file
from hf_trak.hub.manifest import MAX_JSON_BYTES
from hf_trak.hub.names import shown, too_large
from hf_trak.hub.push import CommitOperation, Destination, commit, in_main_process
from hf_trak.store.atomic import safe_name
from hf_trak.store.sealed import content_digest, sealed_bytes

_FEWEST_SUBSETS = 3

"""Subsets that the agreement of repeats can be measured with."""


def bank_facts(bank: Bank, names: Sequence[str]) -> dict[str, Any]:
    """Collect what the card says of a bank, the highest possible scores included.

    Args:
        bank: the bank.
        names: the parts that are published, all of them complete.

    Raises:
        ImportError: scipy is not installed.
        StoreError: a file is damaged.
    """
    return {
        "rows": f"{bank.n_train:,}",
        "rows_fingerprint": bank.described["rows_fingerprint"],
        "targets": f"{bank.n_targets:,}",
        "targets_fingerprint": bank.described["targets_fingerprint"],
        "recipe": [[name, without_secrets(_text(value))] for name, value in sorted(bank.recipe.items())],
        "parts": [_part_row(bank, bank.part(name), names) for name in names],
        "about": bank.recipe.get("title"),
    }


def bank_card(repo_id: str, facts: Mapping[str, Any]) -> str:
    """Write the card of a bank.

    Args:
        repo_id: the dataset repo, for the examples in the card.
        facts: the result of [`bank_facts`].
    """
    about = facts["about"]
    title = f"Bank of retrained models: {about}" if isinstance(about, str) and about else "Bank of retrained models"
    usage = "\n".join(
        [
            "import numpy as np",
            "from hf_trak.evaluation import evaluate_bank",
            "from hf_trak.hub import load_bank",
            "",
            f'bank = load_bank("{repo_id}")',
            'scores = np.load("scores.npy")  # (training rows, targets); higher means more helpful',
            'for result in evaluate_bank(bank, {"mine": scores}):',
            "    print(result.part, result.lds, result.ceilings)",
        ]
    )
    values = {**facts, "repo_id": repo_id, "cite_as": repo_id.replace("/", "-")}
    # The files hold tensors, which the Hub's viewer of rows cannot show.
    return render_card("bank", title, usage, values, {"pretty_name": title, "viewer": False})


def _part_row(bank: Bank, part: BankPart, names: Sequence[str]) -> dict[str, Any]:
    repeats, subsets = part.outputs.shape[:2]
    if part.repeat_of is not None:
        purpose = f"repeats {part.repeat_of}"
    else:
        purpose = "judges scores" if part.removal is None else "removals"
    return {
        "name": part.name,
        "purpose": purpose,
        "subsets": subsets,
        "repeats": repeats,
        "dropped": _dropped(part.masks),
        "protocol": ", ".join(f"{key} {_text(value)}" for key, value in sorted(part.protocol.items())) or "not told",
        "ceilings": "; ".join(_ceilings(bank, part, names)) or "not measured",
    }


def _dropped(masks: np.ndarray) -> str:
    """Say the share of rows that the subsets lack, or its range."""
    shares = 100 * (1 - masks.mean(axis=1))
    ends = list(dict.fromkeys(f"{end:.3g}" for end in (shares.min(), shares.max())))
    return f"{' to '.join(ends)} %"


def _ceilings(bank: Bank, part: BankPart, names: Sequence[str]) -> list[str]:
    """List the highest possible scores on a part, by the published parts that tell the noise."""
    if part.repeat_of is not None or part.removal is not None:
        return []
    repeats = [name for name in bank.parts if bank.description(name)["repeat_of"] == part.name]
    if any(bank.description(name)["subsets"] < _FEWEST_SUBSETS for name in (part.name, *repeats)):
        return []
    found = bank.reliability(part.name, resamples=RESAMPLES)
    own = [f"{found[part.name].ceiling} by its own repeats"] if part.name in found else []
    return own + [f"{found[name].ceiling_of_one} by {name}" for name in repeats if name in found and name in names]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


PARTS = "parts.json"

PART_FILES = (CONFIG, SUBSETS, OUTPUTS)

PART_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+=-]{0,98}[A-Za-z0-9])?")

"""Names of published parts: file names on every system, and plain text in a terminal."""


MAX_SUBSETS_BYTES = 256 << 20

"""Maximum bytes of the subsets of a part: 1,000 of two million rows. In memory they take eight times as much."""

MAX_OUTPUTS_BYTES = 1 << 30

"""Maximum bytes of the outputs of a part: 10 repeats of 1,000 subsets with 13,000 targets."""


_KIND = "published bank"

_WANTED = "a bank that `push_bank` has published"

_LISTED_PART = re.compile(rf"(?P<name>[^/]+)/{CONFIG}", re.DOTALL)


def most_bytes(path: str) -> int:
    """Return the maximum bytes of a file, by its path in the bank."""
    return {SUBSETS: MAX_SUBSETS_BYTES, OUTPUTS: MAX_OUTPUTS_BYTES}.get(path.rpartition("/")[2], MAX_JSON_BYTES)


def is_part_file(path: str) -> bool:
    """Tell whether a path in a repo is that of a file of a part."""
    name, _, file = path.partition("/")
    return file in PART_FILES and PART_NAME.fullmatch(name) is not None


def open_checked(files: IndexFiles) -> Bank:
    """Fetch and check all files of a bank, and open it.

    Args:
        files: the files, in a repo or in a directory. A directory may lack `parts.json`, files of parts that are being
            built, and may have more parts than `parts.json` names.

    Raises:
        HubAccessError: a file cannot be fetched.
        IncompleteStoreError: a directory holds no bank.
        RefusedIndexError: a file is missing, damaged or too large, is a link, or belongs to another bank.
        StoreError: a file in a directory is damaged.
    """
    listed = files.names()  # refuses links in a directory
    published = isinstance(files, HubFiles)
    names = _named_parts(files) if published or files.size(PARTS) is not None else []
    listed_parts = {match["name"] for path in listed or () if (match := _LISTED_PART.fullmatch(path))}
    if published:
        _refuse_others(files, listed_parts, names)
    with _discarded_if_refused(files, BANK):
        if published or files.size(BANK) is not None:  # where it is missing, `Bank` says so
            _read_json(files, BANK)
        bank = Bank(files.root)
    if names:
        with _discarded_if_refused(files, PARTS, BANK):
            if _read_json(files, PARTS).get("bank") != content_digest(bank.described):
                raise files.refused(f"{PARTS} of {files.name}", f"it belongs to another {BANK} than the one beside it")
    for name in names if published else sorted({*names, *bank.parts}):
        _check_part(files, bank, name)
    if published:
        _refuse_others(files, set(bank.parts), names)  # another program may have put files into the cache
    for name in bank.parts:
        _check_repeat(files, bank, name)
    return bank


def _named_parts(files: IndexFiles) -> list[str]:
    """Read the names in `parts.json`."""
    where = f"{PARTS} of {files.name}"
    with _discarded_if_refused(files, PARTS):
        content = _read_json(files, PARTS)
        names = content.get("parts")
        if content.get("kind") != _KIND or not isinstance(names, list) or not names:
            raise files.refused(where, "it does not name the parts of a bank")
        for name in names:
            if not isinstance(name, str) or not PART_NAME.fullmatch(name):
                raise files.refused(where, f"it names the part {shown(name)}, which is no plain name of a directory")
        if len(set(names)) < len(names):
            raise files.refused(where, "it names a part twice")
        return names


def _refuse_others(files: IndexFiles, found: set[str], names: list[str]) -> None:
    if others := sorted(found - set(names)):
        raise files.refused(f"The bank {files.name}", f"it has a part {shown(others[0])}, which {PARTS} does not name")


def _check_part(files: IndexFiles, bank: Bank, name: str) -> None:
    """Fetch and check the files of a part. In a directory it may be unfinished."""
    paths = [f"{name}/{file}" for file in PART_FILES]
    with _discarded_if_refused(files, *paths):
        try:
            safe_name(name)
        except ValueError as error:
            raise files.refused(f"The bank {files.name}", str(error)) from error
        content = _read_json(files, paths[0])
        repeated, removal = content.get("repeat_of"), content.get("removal")
        right = isinstance(content.get("bank"), str) and (repeated is None or isinstance(repeated, str))
        if not right or not (removal is None or isinstance(removal, dict)):
            raise files.refused(f"{paths[0]} of {files.name}", "`bank`, `repeat_of` or `removal` is of another type")
        part = bank.description(name)
        subsets, repeats = part["subsets"], part["repeats"]
        sizes = {paths[1]: subsets * -(-bank.n_train // 8), paths[2]: 8 * repeats * subsets * (bank.n_targets + 1)}
        unfinished = not isinstance(files, HubFiles) and files.size(paths[2]) is None
        for path, data in sizes.items():
            if not (unfinished and files.size(path) is None):
                _fetch_tensors(files, path, data)
        if not unfinished:
            bank.part(name)


def _check_repeat(files: IndexFiles, bank: Bank, name: str) -> None:
    """Check that the subsets of a repeat are those of the part that it repeats."""
    original = bank.description(name)["repeat_of"]
    if original is None or not (bank.is_complete(name) and original in bank.parts and bank.is_complete(original)):
        return
    repeat, repeated = bank.part(name), bank.part(original)
    if len(repeated.outputs) != 1 or not np.array_equal(repeated.masks[: len(repeat.masks)], repeat.masks):
        raise files.refused(
            f"The part {name!r} of {files.name}", f"it does not repeat subsets of {original!r}, as it says"
        )


def _fetch_tensors(files: IndexFiles, path: str, data: int) -> None:
    """Fetch a file of tensors that has `data` bytes besides its header."""
    if data > most_bytes(path):
        raise files.refused(f"{path} of {files.name}", too_large(data, most_bytes(path)))
    with files.refused_if_damaged(path):
        check_file(files.fetch_bounded(path, bounds := Bounds(data + 8, data + 8 + MAX_HEADER_BYTES)), bounds)


@contextlib.contextmanager
def _discarded_if_refused(files: IndexFiles, *paths: str) -> Iterator[None]:
    """Turn damage of downloaded files into a refusal, and discard them. Errors of a directory stay as they are."""
    if not isinstance(files, HubFiles):
        yield
        return
    with files.refused_if_damaged(*paths):
        try:
            yield
        except RefusedIndexError:
            raise
        except StoreError as error:  # without advice on files of one's own
            raise StoreError(re.split(r"\. (?:Expected|Delete)\b", str(error))[0]) from error


def _read_json(files: IndexFiles, path: str) -> dict[str, Any]:
    """Fetch a sealed JSON file, and check its size, its values and its checksum."""
    with files.refused_if_damaged(path):
        return files.read_json(path, most_bytes(path))


def push_bank(
    bank: Bank,
    repo_id: str,
    *,
    parts: Sequence[str] | None = None,
    private: bool = True,
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
        private (`bool`, *optional*, defaults to `True`):
            Create a private repo, and refuse a public one. `False` creates a public repo.
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
    return in_main_process(lambda: _push(bank, destination, parts))


def _push(bank: Bank, destination: Destination, parts: Sequence[str] | None) -> CommitInfo:
    names = _parts_to_push(bank, parts)
    files = {path: bank.directory / path for path in (BANK, *(f"{name}/{f}" for name in names for f in PART_FILES))}
    for path, local in files.items():
        _check_publishable(path, local)
    facts = bank_facts(bank, names)
    listed = sealed_bytes({"kind": _KIND, "bank": content_digest(bank.described), "parts": names})

    def changes(api: HfApi, repo_id: str, info: DatasetInfo) -> list[CommitOperation]:
        present = {file.rfilename for file in info.siblings or []}
        # Without `parts.json` the repo holds no bank, so files of such names have another purpose.
        stale = [path for path in sorted(present - set(files)) if is_part_file(path)] if PARTS in present else []
        return [
            CommitOperationAdd(PARTS, listed),
            *(CommitOperationAdd(path, local) for path, local in files.items()),
            *card_operations(api, repo_id, info, bank_card(repo_id, facts), "bank"),
            *(CommitOperationDelete(path) for path in stale),
        ]

    return commit(destination, "Upload a bank of retrained models with hf_trak", changes)


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
        return open_checked(LocalFiles(Path(repo_or_path), _WANTED))
    return open_checked(HubFiles(os.fspath(repo_or_path), PARTS, revision, token, local_files_only, _WANTED))
