"""Names of repos and revisions on the Hub, checked before they are used: they come from untrusted indexes."""

import json
import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import REGEX_COMMIT_HASH
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id

MAX_DEPTH = 64

"""Maximum nesting of lists and objects. Files of hf_trak and transformers have less than ten levels."""


MAX_DIGITS = 64

"""Maximum number of digits of an integer. Tokenizers write 10³⁰ if they have no maximum length."""


_ALWAYS_ALLOWED_VALUES = 1024


def read_foreign_object(
    path: Path, max_bytes: int, bytes_per_value: int = 4, max_digits: int = MAX_DIGITS
) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.
        max_bytes: maximum size of the file.
        bytes_per_value: a file of n bytes may have up to n / `bytes_per_value` + 1,024 values.
        max_digits: maximum number of digits of an integer.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is too large, or is not a JSON object. The message begins with "it", so that the caller
            can put the name of the file in front.
    """
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(too_large(size, max_bytes))
    return parse_foreign_object(path.read_bytes(), bytes_per_value, max_digits)


def parse_foreign_object(data: bytes, bytes_per_value: int = 4, max_digits: int = MAX_DIGITS) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        data: its bytes.
        bytes_per_value, max_digits: see [`read_foreign_object`].

    Raises:
        ValueError: it is not a JSON object, or holds too much. The message begins with "it".
    """
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if values > _ALWAYS_ALLOWED_VALUES + len(data) // bytes_per_value:
        raise ValueError(f"it has up to {values} values in {len(data)} bytes, more than such a file can need")
    try:
        content = json.loads(
            data, parse_constant=_not_json, parse_float=_finite, parse_int=partial(_integer, max_digits=max_digits)
        )
    except RecursionError as error:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({type(error).__name__}: {shown(str(error))})") from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds a JSON {type(content).__name__}, not an object")
    _check_depth(content)
    return content


def too_large(size: int, most: int) -> str:
    """Say why a file of this size is refused."""
    return f"it has {size} bytes, more than the {most} that such a file can need"


def shown(value: Any) -> str:
    """Show a value in a message, in at most 120 characters."""
    text = f"a {type(value).__name__} of {len(value)}" if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"


def expect(right: bool, what: str, value: Any, wanted: str) -> None:
    """Raise `ValueError` unless a value is right.

    Args:
        right: whether it is.
        what: name of the value. The message begins with it, so that the caller can put the name of the file in front.
        value: the value.
        wanted: what is expected.
    """
    if not right:
        raise ValueError(f"{what} is {shown(value)}, not {wanted}")


def _check_depth(content: dict[str, Any]) -> None:
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _not_json(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _integer(text: str, max_digits: int) -> int:
    if len(text.lstrip("-")) > max_digits:
        raise ValueError(f"{text[:40]}… has {len(text)} digits")
    return int(text)


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


MAX_YAML_DEPTH = 32

MAX_CARD_BYTES = 1 << 20

"""Maximum size of a card. Cards of datasets with hundreds of configurations have some 100 kB."""


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_yaml(text: str, max_bytes: int) -> None:
    """Refuse YAML that is too large, is nested too deeply, or uses aliases.

    Args:
        text: the document.
        max_bytes: maximum size in UTF-8.

    Raises:
        ValueError: the document is refused; says why.
        yaml.YAMLError: the text is not YAML.
    """
    _check_size(text, max_bytes, "such a document")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            line = 1 if event.start_mark is None else event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"line {line} refers to another place (`*{event.anchor}`); write the value out")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_YAML_DEPTH:
                    raise ValueError(f"line {line} is nested more than {MAX_YAML_DEPTH} deep")
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
    except yaml.YAMLError as error:
        if "nesting depth" in str(error):  # libyaml 0.2.6 looks ahead of the events, and has a bound of its own
            raise ValueError(f"it is nested more than {MAX_YAML_DEPTH} deep") from error
        raise


def check_card(text: str, max_yaml_bytes: int = MAX_CARD_BYTES) -> None:
    """Refuse a card with a YAML block that [`check_yaml`] refuses.

    `huggingface_hub` and `datasets` cut the block out by different rules, so both results are checked.

    Args:
        text: the card.
        max_yaml_bytes: maximum size of its YAML.

    Raises:
        ValueError: the card is refused; says why.
        yaml.YAMLError: its block is not YAML.
    """
    _check_size(text, MAX_CARD_BYTES, "a card")
    # As `huggingface_hub` finds the block:
    if (match := REGEX_YAML_BLOCK.search(text)) is not None:
        check_yaml(match[2], max_yaml_bytes)
    # As `datasets` finds it:
    first, *others = text.splitlines() or [""]
    if first == "---" and "---" in others:
        check_yaml("\n".join(others[: others.index("---")]), max_yaml_bytes)


def _check_size(text: str, most: int, what: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise ValueError(f"it has {size} bytes, more than the {most} that {what} can need")


def is_commit(revision: Any) -> bool:
    """Test for the hash of a commit, whose content never changes."""
    return isinstance(revision, str) and REGEX_COMMIT_HASH.fullmatch(revision) is not None
