"""YAML that anybody may have written: looked through before it is built.

Nine lines of aliases of aliases are a list of a thousand million entries to whoever copies or writes it, and a loader
of pure Python takes half a minute for 20,000 opening brackets.
"""

from typing import Any

import yaml

MAX_DEPTH = 32

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
