"""Shows docstrings in the form of doc-builder as mkdocstrings expects them; mkdocs.yml names this file."""

import re
from typing import Any

from griffe import Extension, Object

_REFERENCE = re.compile(r"\[`~?([^`\]]+)`\](?![\[(])")
"""[`TrakConfig`] or [`~TrakConfig.to_dict`], outside of a link."""

_ARGUMENT_TYPE = re.compile(r"^(\s+\w[\w, ]*) \(`[^\n]*\):(?=\s|$)", re.MULTILINE)
"""The type and the default after the name of an argument, which the signature shows already."""


class DocBuilderForm(Extension):
    """Turns references into code, and leaves types to signatures."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _REFERENCE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _ARGUMENT_TYPE.sub(r"\1:", text)
