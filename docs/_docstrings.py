"""Shows docstrings in the form of doc-builder as mkdocstrings expects them; mkdocs.yml names this file."""

import re
from typing import Any

from griffe import Extension, Object

_REFERENCE = re.compile(r"\[`~?([^`\]]+)`\](?![\[(])")
"""[`TrakConfig`] or [`~TrakConfig.to_dict`], outside of a link."""

_ARGUMENT = re.compile(r"^(?P<name>\s+\w[\w, ]*) \((?P<type>`[^\n]*)\):(?=\s|$)", re.MULTILINE)
"""An argument with its type, such as "proj_dim (`int`, *optional*, defaults to 4096):"."""

_DEFAULT = re.compile(r", \*optional\*|, defaults to .*")
"""What the signature shows already."""


class DocBuilderForm(Extension):
    """Turns references into code, and types of arguments into plain text."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _REFERENCE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _ARGUMENT.sub(_plain, text)


def _plain(match: re.Match[str]) -> str:
    return f"{match['name']} ({_DEFAULT.sub('', match['type']).replace('`', '')}):"
