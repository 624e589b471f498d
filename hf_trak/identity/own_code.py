"""Tell code of a user from that of installed packages, the standard library, and this library; and name it."""

import functools
import site
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_trak.identity.bytecode import attribute_names, stored_attributes
from hf_trak.identity.recorded_names import recorded_name

BUILT_IN = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
"""Types of functions and descriptors that are compiled into an interpreter or library."""


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether a module, by its name, belongs to an installed package, the standard library, or this library."""
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
    """Whether a class belongs to a user rather than a library."""
    return not is_library(cls.__module__)


def own_classes(cls: type) -> list[type]:
    """List the classes of a user among a class and its bases, most derived first."""
    return [each for each in cls.__mro__ if is_own_class(each)]


def is_named(value: Any) -> bool:
    """Whether a module of a library holds a value under the value's own name."""
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
    """Return module and qualified name of a function, class or module, and those of the class of any other object.

    Names of hf_trak are those of [`~hf_trak.identity.recorded_names`].
    """
    if isinstance(value, functools.partial):
        return f"functools.partial({name_of(value.func)})"
    if isinstance(value, types.MethodType):
        owner = value.__self__ if isinstance(value.__self__, type) else type(value.__self__)
        return f"{name_of(owner)}.{value.__func__.__name__}"
    if isinstance(value, types.ModuleType):
        return recorded_name(_module_name(value.__name__))
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{value}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, BUILT_IN) and not isinstance(module, str):  # a method of a built-in type, bound or not
        owner = getattr(value, "__objclass__", None) or type(getattr(value, "__self__", None))
        return f"{owner.__module__}.{name}"
    if isinstance(name, str) and isinstance(module, str) and (callable(value) or isinstance(value, np.ufunc)):
        return recorded_name(f"{_module_name(module)}.{name}")
    return recorded_name(f"{_module_name(type(value).__module__)}.{type(value).__qualname__}")


@functools.cache
def assigned_attributes(cls: type) -> frozenset[str]:
    """List the attributes assigned by methods of a user's classes, among a class and its bases."""
    return frozenset().union(*(_stored(each) for each in own_classes(cls)))


@functools.cache
def assigned_in_init(cls: type) -> frozenset[str]:
    """List those of [`assigned_attributes`] that `__init__`, or a method that it mentions, assigns."""
    return assigned_by(cls, frozenset({"__init__", "__post_init__"}))


@functools.cache
def assigned_by(cls: type, methods: frozenset[str]) -> frozenset[str]:
    """List the attributes assigned by some methods of a user's classes, and by other methods that these mention."""
    functions: dict[str, list[types.FunctionType]] = {}
    for each in own_classes(cls):
        for name, member in vars(each).items():
            if isinstance(member, types.FunctionType):
                functions.setdefault(name, []).append(member)
    names, todo = set(methods), list(methods)
    while todo:
        for function in functions.get(todo.pop(), ()):
            mentioned = set(functions).intersection(attribute_names(function.__code__)) - names
            names |= mentioned
            todo += mentioned
    stored = (stored_attributes(function.__code__) for name in names for function in functions.get(name, ()))
    return frozenset().union(*stored)


def _stored(cls: type) -> frozenset[str]:
    functions = (member for member in vars(cls).values() if isinstance(member, types.FunctionType))
    return frozenset().union(*(stored_attributes(function.__code__) for function in functions))
