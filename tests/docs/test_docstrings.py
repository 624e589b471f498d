"""Docstrings: the errors that public functions raise, typed arguments, and sentences that begin with a verb."""

import ast
import inspect
import re
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hf_trak
import hf_trak.evaluation
import hf_trak.hub
import hf_trak.modelout_functions
import hf_trak.projectors
import hf_trak.savers
import hf_trak.score_computers

PACKAGE = Path(__file__).parents[2] / "hf_trak"


@cache
def modules() -> dict[str, ast.Module]:
    """Parse the modules of the library, by path."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def statements(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from statements(child)


def functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Yield public functions, public methods of public classes, and their constructors."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node.body)
        if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
            yield node


@pytest.mark.slow
def test_functions_that_raise_say_so() -> None:
    """A function with a `raise` statement has a `Raises` section in its docstring."""
    silent, looked_at = [], 0
    for place, module in modules().items():
        for function in functions(module.body):
            raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in statements(function))
            text = ast.get_docstring(function)
            looked_at += raises
            if raises and text and "Raise" not in text:
                silent.append(f"{place}:{function.lineno} {function.name}")
    assert looked_at > 80
    assert not silent


def entries(text: str) -> list[str]:
    """The entries of the section `Args` of a docstring: its lines with the least indentation."""
    lines = text.split("Args:\n", 1)[1].splitlines() if "Args:\n" in text else []
    found: list[str] = []
    indentation = None
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        indentation = depth if indentation is None else indentation
        if depth < indentation:
            break
        if depth == indentation:
            found.append(line.strip())
    return found


def public() -> list[type | types.FunctionType]:
    """What users call by name: the exports of the library, tasks, projectors, and the `trak` API's classes."""
    exports = [getattr(hf_trak, name) for name in hf_trak.__all__ if name != "__version__"]
    rooms = [hf_trak.modelout_functions, hf_trak.projectors, hf_trak.savers, hf_trak.score_computers]
    rooms += [hf_trak.evaluation, hf_trak.hub]
    named = [getattr(room, name) for room in rooms for name in room.__all__]
    functions = [getattr(hf_trak.TrakAttributor, name) for name in ("from_trainer", "from_pretrained", "featurize")]
    functions += [getattr(hf_trak.TrakAttributor, name) for name in ("attribute", "select", "group_scores", "extend")]
    found = [one for one in (*exports, *named, *functions) if inspect.isclass(one) or inspect.isroutine(one)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("one", public(), ids=lambda one: one.__qualname__)
def test_arguments_of_public_names_are_typed(one: Any) -> None:
    """In doc-builder form: name and type on one line, what it means below."""
    constructor = vars(one).get("__init__") if inspect.isclass(one) else None
    texts = [one.__doc__, getattr(constructor, "__doc__", None)]
    for text in texts:
        for entry in entries(inspect.cleandoc(text or "")):
            assert re.fullmatch(r"[\w*, ]+( \(.+\))?:", entry), entry


NO_VERB = (
    "An?|All|As|Each|Every|For|How|If|In|Its|No|Of|On|One|Some|That|The|Their|These|This|Two|What|When|Where|Whether|"
    "Which|Who|Whose|With"
)
VERB = re.compile(rf"Args:|(?!({NO_VERB})\b|\S+ of\b)[A-Z][a-z]")
"""Beginnings of docstrings of functions. A word before "of" is a noun, as in "Number of rows"."""

PHRASES = re.compile(r"\b(of which|with which|where there (is|are))\b")


def docstrings(kinds: tuple[type[ast.AST], ...]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of the docstrings of such definitions, private and nested ones included."""
    for place, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{place}:{getattr(node, 'lineno', 1)}", " ".join(text.split())


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """Those of constructors may begin with their arguments."""
    found = list(docstrings((ast.FunctionDef, ast.AsyncFunctionDef)))
    assert len(found) > 2000
    assert not [f"{place}: {text[:80]}" for place, text in found if not VERB.match(text)]


def test_docstrings_have_no_clause_in_place_of_a_sentence() -> None:
    """A relative clause such as "of which" becomes a sentence with a subject and a verb."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    assert not [f"{place}: {match[0]}" for place, text in docstrings(kinds) if (match := PHRASES.search(text))]
