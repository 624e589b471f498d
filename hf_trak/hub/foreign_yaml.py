"""YAML that anybody may have written: looked through before it is built.

Nine lines of aliases of aliases are a list of a thousand million entries to whoever copies or writes it, and a loader
of pure Python takes half a minute for 20,000 opening brackets.
"""

from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

MAX_DEPTH = 32
MAX_CARD_BYTES = 1 << 20
"""Largest card that is read; those of datasets with hundreds of configurations have some 100 kB."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_yaml(text: str, max_bytes: int) -> None:
    """Refuse YAML that is too large, nested too deeply, or that refers to itself.

    Args:
        text: the document.
        max_bytes: its largest size in UTF-8.

    Raises:
        ValueError: it is refused; says why.
        yaml.YAMLError: it is no YAML.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise ValueError(f"it has {size} bytes, more than the {max_bytes} that such a document can need")
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
    """Refuse a card whose YAML is refused, whether `huggingface_hub` or `datasets` cuts it out.

    Args:
        text: the card.
        max_yaml_bytes: the largest size of its YAML.

    Raises:
        ValueError: it is refused; says why.
        yaml.YAMLError: its YAML is none.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_CARD_BYTES:
        raise ValueError(f"it has {size} bytes, more than the {MAX_CARD_BYTES} that a card can need")
    if (match := REGEX_YAML_BLOCK.search(text)) is not None:
        check_yaml(match[2], max_yaml_bytes)
    first, *others = text.splitlines() or [""]
    if first == "---" and "---" in others:
        check_yaml("\n".join(others[: others.index("---")]), max_yaml_bytes)
