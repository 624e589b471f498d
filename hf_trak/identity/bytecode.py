"""The behaviour of a compiled function, regardless of its place: bytecode, constants, and the names it refers to."""

import dis
import inspect
import itertools
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

_CODE_FLAGS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_HAS_DOCSTRING = 0x4000000  # since Python 3.13; before, the first constant of a function is its docstring or None
_NO_FUNCTIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_OF_PLACE = frozenset({"__doc__", "__firstlineno__", "__qualname__", "__static_attributes__"})
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


def code_content(code: types.CodeType) -> tuple[Any, ...]:
    """Describe the behaviour of a code object, as nested tuples of plain values.

    The description has bytecode and exception table, constants with nested code, and the names of globals, attributes
    and arguments. Line numbers, file names, docstrings, and the names of the function and of its local variables are
    left out.
    """
    unread = _unread_constants(code)
    constants = tuple(
        None if index in unread else code_content(value) if isinstance(value, types.CodeType) else value
        for index, value in enumerate(code.co_consts)
    )
    named = code.co_argcount + code.co_kwonlyargcount
    return (
        code.co_code,
        code.co_exceptiontable,
        constants,
        code.co_names,
        (code.co_posonlyargcount, code.co_argcount, code.co_varnames[:named]),
        (len(code.co_cellvars), len(code.co_freevars), code.co_flags & _CODE_FLAGS),
    )


def _unread_constants(code: types.CodeType) -> set[int]:
    """Find constants without influence on behaviour: the docstring, and place and name in the body of a class."""
    if code.co_flags & inspect.CO_OPTIMIZED:
        documented = bool(code.co_flags & _HAS_DOCSTRING) or (
            not hasattr(inspect, "CO_HAS_DOCSTRING") and code.co_name not in _NO_FUNCTIONS
        )
        return {0} if documented and code.co_consts and isinstance(code.co_consts[0], str) else set()
    instructions = list(dis.get_instructions(code))
    pairs = itertools.pairwise(instructions)
    return {
        int(load.arg or 0)
        for load, store in pairs
        if store.opname == "STORE_NAME" and store.argval in _OF_PLACE and load.opname == "LOAD_CONST"
    }


def global_references(code: types.CodeType) -> dict[tuple[str, ...], None]:
    """List the global names that code loads, nested code included, in the order of their first use.

    Each name comes with the attributes that are read from it at once: `losses.focal` gives `("losses", "focal")`.
    Names that the code itself assigns with `global` are left out, since they are its state.
    """
    found: dict[tuple[str, ...], None] = {}
    assigned: set[str] = set()
    for each in _nested(code):
        instructions = list(dis.get_instructions(each))
        for place, instruction in enumerate(instructions):
            if instruction.opname == "STORE_GLOBAL":
                assigned.add(instruction.argval)
            if instruction.opname in _LOADS:
                path = [instruction.argval]
                for following in instructions[place + 1 :]:
                    if following.opname not in _ATTRIBUTES:
                        break
                    path.append(following.argval)
                found[tuple(path)] = None
    return {path: None for path in found if path[0] not in assigned}


_METHOD_LOADS = ("LOAD_METHOD", "LOAD_ATTR")  # the latter from Python 3.12 on
_CHANGING_METHODS = frozenset(
    {"append", "appendleft", "extend", "insert", "pop", "popleft", "remove", "clear", "add", "discard", "update"}
    | {"setdefault", "popitem"}
)


def stored_attributes(code: types.CodeType) -> set[str]:
    """List the attributes that code assigns, of any object, nested code included.

    Attributes whose list, dict or set it changes by a method (`self.seen.append(…)`) are among them.
    """
    found = set()
    for each in _nested(code):
        instructions = list(dis.get_instructions(each))
        found |= {one.argval for one in instructions if one.opname == "STORE_ATTR"}
        found |= {
            one.argval
            for one, after in pairwise(instructions)
            if one.opname == "LOAD_ATTR" and after.opname in _METHOD_LOADS and after.argval in _CHANGING_METHODS
        }
    return found


def attribute_names(code: types.CodeType) -> set[str]:
    """List the names of attributes, methods and globals that code mentions, nested code included."""
    return {name for each in _nested(code) for name in each.co_names}


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _nested(value)
