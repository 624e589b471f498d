"""Tell code of a user from that of installed packages, the standard library, and this library; and name it."""

import dis
import functools
import inspect
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

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

_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})  # Python 3.11 loads methods by the latter


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
    return {
        int(load.arg or 0)
        for load, store in pairwise(dis.get_instructions(code))
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


_CHANGING_METHODS = frozenset(
    {"append", "appendleft", "extend", "insert", "pop", "popleft", "remove", "clear", "add", "discard", "update"}
    | {"setdefault", "popitem"}
)


_INDICES = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_CONST", "LOAD_SMALL_INT"})
"""Instructions that load one value, such as the name of an entry."""


def stored_attributes(code: types.CodeType) -> set[str]:
    """List the attributes that code assigns, of any object, nested code included.

    Attributes whose list, dict or set it changes are among them: by a method (`self.seen.append(…)`), in an entry
    (`self.parts["loss"] = …`), or in an entry by a method (`self.stored[name].append(…)`).
    """
    found = set()
    for each in _nested(code):
        instructions = list(dis.get_instructions(each))
        found |= {one.argval for one in instructions if one.opname == "STORE_ATTR"}
        found |= {
            one.argval
            for place, one in enumerate(instructions)
            if one.opname == "LOAD_ATTR" and _is_changed(instructions[place + 1 :])
        }
    return found


def _is_changed(rest: list[dis.Instruction]) -> bool:
    """Tell whether an object that code has just loaded is changed by what comes next, or an entry of it."""
    while len(rest) > 1 and rest[0].opname in _INDICES:
        if rest[1].opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "COPY"):  # the last of `self.parts[name] += …`
            return True
        if rest[1].opname != "BINARY_SUBSCR" and rest[1].argrepr != "[]":  # that of Python 3.14
            return False
        rest = rest[2:]
    return bool(rest) and rest[0].opname in _ATTRIBUTES and rest[0].argval in _CHANGING_METHODS


def attribute_names(code: types.CodeType) -> set[str]:
    """List the names of attributes, methods and globals that code mentions, nested code included."""
    return {name for each in _nested(code) for name in each.co_names}


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _nested(value)


BUILT_IN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip

"""Types of functions and descriptors that are compiled into an interpreter or library."""


@functools.cache
def is_library(module: str | None) -> bool:
    """Tell by its name whether a module belongs to an installed package, the standard library or this library."""
    if not module:
        return False
    top = module.partition(".")[0]
    if top == "hf_trak" or top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    loaded = sys.modules.get(module) or sys.modules.get(top)
    file = getattr(loaded, "__file__", None)
    if file is None:
        paths = [str(path) for path in getattr(loaded, "__path__", ())]
        return bool(paths) and all(_is_installed(path) for path in paths)
    return _is_installed(file)


def _is_installed(path: str) -> bool:
    place = Path(path).resolve()
    return bool({"site-packages", "dist-packages"} & set(place.parts)) or any(
        place.is_relative_to(root) for root in _installed()
    )


@functools.cache
def _installed() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(Path(root).resolve() for root in [*roots, *site.getsitepackages()])


@functools.cache
def is_own_class(cls: type) -> bool:
    """Tell whether a class belongs to a user rather than a library."""
    return not is_library(cls.__module__)


def is_named(value: Any) -> bool:
    """Tell whether a module of a library holds a value under the value's own name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not is_library(module):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _module_name(module: str) -> str:
    """Return the name under which other code imports a module.

    A script has that of its file, and remote code of the Hub that of its file without the folder of its revision.
    """
    if module.startswith("transformers_modules."):
        return f"transformers_modules.{module.rpartition('.')[2]}"
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec is not None else Path(file).stem if file else module


def name_of(value: Any) -> str:
    """Return module and qualified name of a function, class or module, and those of the class of any other object."""
    if isinstance(value, functools.partial):
        return f"functools.partial({name_of(value.func)})"
    if isinstance(value, types.MethodType):
        owner = value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
        return f"{name_of(owner)}.{value.__func__.__name__}"
    if isinstance(value, types.ModuleType):
        return _module_name(value.__name__)
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{value}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, BUILT_IN) and not isinstance(module, str):  # a method of a built-in type, bound or not
        owner = getattr(value, "__objclass__", None) or type(getattr(value, "__self__", None))
        return f"{owner.__module__}.{name}"
    if isinstance(name, str) and isinstance(module, str) and (callable(value) or isinstance(value, np.ufunc)):
        return f"{_module_name(module)}.{name}"
    return f"{_module_name(type(value).__module__)}.{type(value).__qualname__}"


@functools.cache
def assigned_attributes(cls: type) -> frozenset[str]:
    """List the attributes assigned by methods of a user's classes, among a class and its bases."""
    return frozenset().union(*(stored_attributes(function.__code__) for _, function in _own_methods(cls)))


@functools.cache
def assigned_in_init(cls: type) -> frozenset[str]:
    """List those of [`assigned_attributes`] that `__init__`, or a method that it mentions, assigns."""
    return assigned_by(cls, frozenset({"__init__", "__post_init__"}))


@functools.cache
def assigned_by(cls: type, methods: frozenset[str]) -> frozenset[str]:
    """List the attributes assigned by some methods of a user's classes, and by other methods that these mention."""
    functions: dict[str, list[types.FunctionType]] = {}
    for name, function in _own_methods(cls):
        functions.setdefault(name, []).append(function)
    names, todo = set(methods), list(methods)
    while todo:
        for function in functions.get(todo.pop(), ()):
            mentioned = set(functions).intersection(attribute_names(function.__code__)) - names
            names |= mentioned
            todo += mentioned
    stored = (stored_attributes(function.__code__) for name in names for function in functions.get(name, ()))
    return frozenset().union(*stored)


def _own_methods(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the methods of a user's classes among a class and its bases, the most derived class first."""
    for each in filter(is_own_class, cls.__mro__):
        yield from ((name, one) for name, one in vars(each).items() if isinstance(one, types.FunctionType))
