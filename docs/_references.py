"""Shows docstrings in the form of doc-builder as mkdocstrings expects them; mkdocs.yml names this file."""

import ast
import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

_REFERENCE = re.compile(r"\[`~?([^`\]]+)`\](?![\[(])")
"""[`TrakConfig`] or [`~TrakConfig.to_dict`], outside of a link."""

_ARGUMENT_TYPE = re.compile(r"^(\s+\w[\w, ]*) \((`[^\n]*)\):(?=\s|$)", re.MULTILINE)
"""The type and the default after the name of an argument, which the signature shows already."""


class DocBuilderForm(Extension):
    """Turns references into code, leaves types to signatures, takes the help of configuration fields as their text."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _REFERENCE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _ARGUMENT_TYPE.sub(r"\1:", text)

    def on_attribute_instance(self, *, node: Any, attr: Attribute, **kwargs: Any) -> None:
        """Give `field(metadata={"help": …})` of a dataclass its help as a docstring."""
        value = getattr(node, "value", None)
        if attr.docstring is not None or not isinstance(value, ast.Call):
            return
        for keyword in value.keywords:
            if keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
                text = ast.literal_eval(keyword.value).get("help")
                attr.docstring = None if text is None else Docstring(text, parent=attr)
