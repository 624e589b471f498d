"""Real text that ships with Python: its language reference, and the documentation strings of its library."""

import ast
import os
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

PACKAGES = ("asyncio", "email", "importlib", "logging", "unittest")
"""Packages of the standard library with at least a hundred documentation strings each."""

_LEAST_CHARACTERS = 60
_LEAST_WORDS = 12


def python_packages() -> DatasetDict:
    """Load documentation strings of the standard library, labelled with the package that they are from.

    Columns `text` and `label`; a fifth of each package is held out as `test`.

    Raises:
        FileNotFoundError: this Python was installed without the source of its library.
    """
    texts: list[str] = []
    labels: list[int] = []
    for label, package in enumerate(PACKAGES):
        found = docstrings(Path(os.__file__).parent / package)
        texts += found
        labels += [label] * len(found)
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(PACKAGES))})
    rows = Dataset.from_dict({"text": texts, "label": labels}, features=features)
    return rows.train_test_split(0.2, seed=0, stratify_by_column="label")


def docstrings(directory: Path) -> list[str]:
    """List the distinct documentation strings of some length in the source files of a package, in the order of files.

    Raises:
        FileNotFoundError: there are no source files in the directory.
    """
    files = sorted(directory.rglob("*.py"))
    if not files:
        raise FileNotFoundError(
            f"{directory} holds no Python files. Expected the source of the standard library. Install it, or name "
            "another dataset."
        )
    found: dict[str, None] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                if len(text) >= _LEAST_CHARACTERS:
                    found[text] = None
    return list(found)


def python_reference() -> DatasetDict:
    """Load the paragraphs of Python's language reference, as `help()` shows them.

    Columns `topic` and `text`; a twentieth is held out as `test`.
    """
    from pydoc_data.topics import topics

    rows = {
        " ".join(paragraph.split()): topic
        for topic, content in sorted(topics.items())
        for paragraph in content.split("\n\n")
        if len(paragraph.split()) >= _LEAST_WORDS and not paragraph.startswith("   ")  # no examples
    }
    return Dataset.from_dict({"topic": list(rows.values()), "text": list(rows)}).train_test_split(0.05, seed=0)
