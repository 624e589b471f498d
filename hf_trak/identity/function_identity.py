"""The identity of a user's function or object in a store: its name, and a digest of its code.

The digest does not cover names that are looked up by text (`getattr`, `globals()[name]`), modules that are imported
inside a function, data that code reads from files, attributes of objects of libraries other than plain public ones
(the rows of a `DataFrame`), and code of libraries that changes under the same name (their versions are recorded
elsewhere).
"""

import enum
import functools
import json
import logging
import math
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import PreTrainedConfig

from hf_trak.identity.config_identity import config_identity
from hf_trak.identity.own_code import (
    BUILT_IN,
    assigned_attributes,
    code_content,
    global_references,
    is_library,
    is_named,
    is_own_class,
    name_of,
)
from hf_trak.identity.row_digest import update_digest

MAX_OBJECTS = 20_000

MAX_ITEMS = 50_000

MAX_DEPTH = 20

"""Limits on functions, classes and objects; on items of containers that hold such; and on levels of containers. What
exceeds them is not compared."""


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)})

_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})

_NAMES = frozenset({"function", "class", "built-in", "module"})

_BY_CLASS = (logging.Logger, logging.LoggerAdapter, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)

"""Types of objects that are compared by class alone: levels and handlers of a logger do not influence features, and
the contents of weak dictionaries change by themselves."""

_OF_PLACE = frozenset({"__name__", "__file__", "__doc__", "__spec__", "__package__", "__builtins__"})

_OF_CLASS = frozenset(
    {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__abstractmethods__"}
    | {"__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__"}
    | {"__static_attributes__", "__parameters__", "__orig_bases__", "__type_params__", "__match_args__", "_abc_impl"}
    | {"__dataclass_fields__", "__dataclass_params__"}
)

"""Entries of a class that describe its place, or follow from the other entries."""


class CodeDigest:
    """The digest of a value and of everything that it refers to.

    Functions, classes and objects are numbered in the order in which they are found, and described one after the
    other, each by its own content and the numbers of those that it refers to. So references may form cycles, and the
    digest does not depend on addresses in memory.
    """

    def __init__(self, value: Any, model: torch.nn.Module | None = None) -> None:
        """
        Args:
            value: a function, class, or any object.
            model: the model that is attributed. It, its parts and its tensors are identified by their classes alone.
        """
        self.has_bytecode = False
        """Whether the digest depends on the version of Python."""
        digest = xxhash.xxh3_128()
        parts = [] if model is None else [*model.modules(), *model.parameters(), *model.buffers()]
        self._parts = frozenset(map(id, parts))
        self._numbers: dict[int, int] = {}
        self._met: list[tuple[Any, Callable[[Any], Any]]] = []
        self._items = 0
        self._kinds = self._references()
        first = self._refer(value, 0)
        self.is_name = isinstance(first, tuple) and len(first) == 2 and first[0] in _NAMES
        """Whether the value belongs to a library, so that its name identifies it."""
        update_digest(digest, first)
        described = 0
        while described < min(len(self._met), MAX_OBJECTS):  # the list grows in the loop
            met, describe = self._met[described]
            update_digest(digest, describe(met))
            described += 1
        self.hexdigest: str = digest.hexdigest()
        """32 hex digits."""

    def _number(self, value: Any, describe: Callable[[Any], Any]) -> tuple[str, int]:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._met)
            self._met.append((value, describe))  # kept alive, so that no other object gets its address
        return "number", self._numbers[id(value)]

    def _refer(self, value: Any, depth: int) -> Any:
        """Describe a value as another one refers to it: plain values and names as they are, others by number."""
        self._items += 1
        if depth > MAX_DEPTH or self._items > MAX_ITEMS:
            return "not compared", name_of(type(value))
        if type(value) in _PLAIN:
            return value
        if id(value) in self._parts:
            return "the model", name_of(type(value))
        for kinds, refer in self._kinds:
            if isinstance(value, kinds):
                return refer(value, depth + 1)
        if is_named(value):
            return "built-in", name_of(value)
        if callable(value) and (wrapped := getattr(value, "__wrapped__", None)) is not None:  # `functools.cache`
            return "wrapped", name_of(type(value)), self._refer(wrapped, depth + 1)
        return self._number(value, self._object) if hasattr(value, "__dict__") else _hashed(value)

    def _references(self) -> tuple[tuple[Any, Callable[[Any, int], Any]], ...]:
        """Return pairs of types and the function that describes a reference to them; the first match counts."""

        def name(kind: str) -> Callable[[Any, int], Any]:
            return lambda value, depth: (kind, name_of(value))

        def parts(kind: str, *names: str) -> Callable[[Any, int], Any]:
            return lambda value, depth: (kind, *self._each((getattr(value, each) for each in names), depth))

        return (
            (types.FunctionType, self._function_reference),
            (type, lambda value, depth: self._class_reference(value)),
            (types.MethodType, parts("method", "__func__", "__self__")),
            (functools.partial, parts("partial", "func", "args", "keywords")),
            (BUILT_IN, self._built_in),
            (np.ufunc | torch._ops.OpOverload | torch._ops.OpOverloadPacket, name("built-in")),
            (types.ModuleType, name("module")),
            (staticmethod, parts("static method", "__func__")),
            (classmethod, parts("class method", "__func__")),
            (property, parts("property", "fget", "fset", "fdel")),
            (
                enum.Enum,
                lambda value, depth: ("enum", name_of(type(value)), value.name, self._refer(value.value, depth)),
            ),
            (torch.Tensor | np.ndarray | np.generic | str | bytes | int | float | complex, _hashed),
            (_BY_CLASS, lambda value, depth: ("class", name_of(type(value)))),
            (Mapping | list | tuple | set | frozenset, self._container),
            (torch.nn.Module, lambda value, depth: self._number(value, self._module)),
        )

    def _each(self, values: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self._refer(value, depth) for value in values)

    def _function_reference(self, value: types.FunctionType, depth: int) -> tuple[Any, ...]:
        # Decorators replace `__module__` with that of the decorated function; the globals name the real module.
        module = value.__globals__.get("__name__")
        if not is_library(module):
            return self._number(value, self._function)
        name = ("function", f"{module}.{value.__code__.co_qualname}")
        return (*name, self._number(value, self._closure)) if value.__closure__ else name

    def _class_reference(self, value: type) -> tuple[str, Any]:
        return self._number(value, self._class) if is_own_class(value) else ("class", name_of(value))

    def _built_in(self, value: Any, depth: int) -> tuple[Any, ...]:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType | type) or is_named(value):
            return "built-in", name_of(value)
        return "built-in", name_of(value), self._refer(owner, depth)

    def _container(self, value: Any, depth: int) -> tuple[Any, ...]:
        if _holds_plain_values(value):  # such as a table: hashed as a whole, whatever its length
            return _hashed(value)
        kind = name_of(type(value))
        if isinstance(value, Mapping):
            pairs = sorted(((key, value[key]) for key in value), key=lambda pair: _order(pair[0]))
            return kind, *(self._each(pair, depth) for pair in pairs[:MAX_ITEMS])
        items = sorted(value, key=_order) if isinstance(value, set | frozenset) else value
        return kind, len(items), *self._each(items[:MAX_ITEMS], depth)

    def _closure(self, value: types.FunctionType) -> tuple[Any, ...]:
        return tuple(self._cell(cell) for cell in value.__closure__ or ())

    def _cell(self, cell: types.CellType) -> Any:
        try:
            content = cell.cell_contents
        except ValueError:
            return "empty cell"
        return "cell", self._refer(content, 0)

    def _function(self, value: types.FunctionType) -> tuple[Any, ...]:
        self.has_bytecode = True
        attributes = {name: item for name, item in vars(value).items() if name != "__wrapped__"}
        return (
            code_content(value.__code__),
            *self._each((value.__defaults__, value.__kwdefaults__, attributes), 0),
            self._closure(value),
            tuple((path, self._refer(item, 0)) for path, item in _global_values(value)),
        )

    def _class(self, value: type) -> tuple[Any, ...]:
        members = {name: member for name, member in vars(value).items() if name not in _OF_CLASS}
        return (
            value.__name__,
            self._each(value.__bases__, 0),
            tuple((name, self._refer(member, 0)) for name, member in sorted(members.items())),
        )

    def _object(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, PreTrainedConfig):
            return name_of(type(value)), self._refer(config_identity(value), 0)
        attributes = sorted(_attributes(value).items())
        return self._class_reference(type(value)), tuple((name, self._refer(item, 0)) for name, item in attributes)

    def _module(self, value: torch.nn.Module) -> tuple[Any, ...]:
        tensors = [*value.named_parameters(), *value.named_buffers()]
        return (
            tuple((name, _hashed(tensor)) for name, tensor in tensors),
            tuple(
                (name, self._class_reference(type(module)), self._refer(_public_settings(module), 0))
                for name, module in value.named_modules()
            ),
        )


def _hashed(value: Any, depth: int = 0) -> tuple[str, ...]:
    digest = xxhash.xxh3_128()
    try:
        update_digest(digest, value)
    except TypeError:  # for example an open file or a lock: only its class can be compared
        return "class", name_of(type(value))
    return "content", name_of(type(value)), digest.hexdigest()


def _holds_plain_values(value: Any, within: tuple[int, ...] = ()) -> bool:
    """Tell whether a container holds only numbers, texts and containers of them and not itself."""
    if type(value) not in _CONTAINERS or id(value) in within or len(within) > MAX_DEPTH:
        return False
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if set(map(type, items)) <= _PLAIN:
        return True
    within = (*within, id(value))
    return all(type(item) in _PLAIN or _holds_plain_values(item, within) for item in items)


def _order(value: Any) -> tuple[str, str]:
    return name_of(type(value)), repr(value) if type(value) in _PLAIN else name_of(value)


def _attributes(value: Any) -> dict[str, Any]:
    """Collect the attributes of an object. Of those that a library's class assigns, only plain public ones are taken,
    since others are often caches."""
    cls: Any = type(value)
    if not is_own_class(cls):
        return _public_settings(value)
    libraries = [base for base in cls.__mro__ if base is not object and not is_own_class(base)]
    if any("__init__" in vars(base) for base in libraries):
        assigned = {name: item for name, item in vars(value).items() if name in assigned_attributes(cls)}
        return _public_settings(value) | assigned
    slots = [name for base in cls.__mro__ for name in _slots(base) if hasattr(value, name)]
    return {**vars(value), **{name: getattr(value, name) for name in slots}}


def _slots(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def _public_settings(value: Any) -> dict[str, Any]:
    return {
        name: item
        for name, item in vars(value).items()
        if name[:1] != "_" and name != "training" and _is_setting(item)
    }


def _is_setting(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return set(map(type, value)) <= _PLAIN
    return type(value) in _PLAIN or isinstance(value, types.FunctionType | torch.dtype)


def _global_values(function: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Look up the globals that a function loads.

    A module of the user, or an object of a library, is replaced by the attribute that is read from it at once:
    `losses.focal` gives that function, `arguments.alpha` that number.
    """
    values = []
    for path in global_references(function.__code__):
        if path[0] in _OF_PLACE:
            continue
        value = function.__globals__.get(path[0], function.__builtins__.get(path[0]))
        depth = 1
        for name in path[1:]:
            if isinstance(value, types.ModuleType) and not is_library(value.__name__):
                value = getattr(value, name, None)
            elif name in (held := _held(value)) and type(held[name]) in _PLAIN:
                value = held[name]
            else:
                break
            depth += 1
        values.append((path[:depth], value))
    return values


def _held(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a library that is not a class, module or function."""
    cls: Any = type(value)
    others = type | types.ModuleType | types.FunctionType | torch.nn.Module
    if is_own_class(cls) or isinstance(value, others):
        return {}
    return getattr(value, "__dict__", {})


PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

"""The minor version of Python. Bytecode changes with it."""


def function_identity(value: Any, model: torch.nn.Module | None = None) -> dict[str, str]:
    """Identify a function, class, or object by its name and, unless it belongs to a library, by its content.

    Args:
        value: a function, method, partial, class, callable object, tensor, or any other object.
        model: the model that is attributed. References to it, to a part or a tensor of it are identified by the class
            alone, since its weights change from checkpoint to checkpoint and have an identity of their own.

    Returns:
        `{"name": "module.function", "code": "<32 hex digits>", "python": "3.11"}`, without `python` if the digest
        covers no bytecode, and without `code` if the name says everything. Compare with [`same_function`].
    """
    digest = CodeDigest(value, model)
    identity = {"name": name_of(value)}
    if not digest.is_name:
        identity["code"] = digest.hexdigest
        if digest.has_bytecode:
            identity["python"] = PYTHON_VERSION
    return identity


def identity_of(value: Any, model: torch.nn.Module | None = None) -> Any:
    """Return `None`, numbers and texts as they are, and the [`function_identity`] of anything else."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    return function_identity(value, model)


def same_function(saved: Any, given: Any) -> bool | None:
    """Tell whether two identities are of the same function, or two JSON values with identities in them are the same.

    Functions with the same code are the same, whatever their names.

    Returns:
        `None` if the answer is unknown, since two versions of Python compiled the code of that name.
    """
    if isinstance(saved, dict) and isinstance(given, dict):
        if "name" in saved and "name" in given and ("code" in saved or "code" in given):
            return _same_code(saved, given)
        if saved.keys() != given.keys():
            return False
        return _all_same([same_function(value, given[key]) for key, value in saved.items()])
    if isinstance(saved, list | tuple) and isinstance(given, list | tuple):
        if len(saved) != len(given):
            return False
        return _all_same([same_function(a, b) for a, b in zip(saved, given, strict=True)])
    if isinstance(saved, str) and isinstance(given, str) and saved[:1] == given[:1] == "{" and saved != given:
        try:
            return same_function(json.loads(saved), json.loads(given))  # the task inside `loss`
        except ValueError:
            return False
    return type(saved) is type(given) and bool(saved == given)


def _same_code(saved: Mapping[str, Any], given: Mapping[str, Any]) -> bool | None:
    if "code" in saved and saved["code"] == given.get("code"):
        return True
    versions = saved.get("python"), given.get("python")
    cannot_say = None not in versions and versions[0] != versions[1] and saved["name"] == given["name"]
    return None if cannot_say else False


def _all_same(answers: list[bool | None]) -> bool | None:
    return False if False in answers else None if None in answers else True
