"""Checking YAML from untrusted sources before it is loaded.

Nine lines of aliases that refer to aliases expand to a list of 10⁹ entries when they are copied or written, and a
loader in pure Python takes half a minute for 20,000 opening brackets.
"""

from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

MAX_DEPTH = 32
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
    for event in yaml.parse(text, Loader=_LOADER):
        line = 1 if event.start_mark is None else event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"line {line} refers to another place (`*{event.anchor}`); write the value out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"line {line} is nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


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
