"""Public functions document the errors that they raise."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hf_trak"


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


def test_functions_that_raise_say_so() -> None:
    """A function with a `raise` statement has a `Raises` section in its docstring."""
    silent, looked_at = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for function in functions(ast.parse(path.read_text(encoding="utf-8")).body):
            raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in statements(function))
            text = ast.get_docstring(function)
            looked_at += raises
            if raises and text and "Raise" not in text:
                silent.append(f"{path.relative_to(PACKAGE)}:{function.lineno} {function.name}")
    assert looked_at > 80
    assert not silent
