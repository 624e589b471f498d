"""Imports that are quick: names of a package that are imported on first use, and a module without its package."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_exports(
    package: str, table: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of a package.

    Type checkers do not see these names: the package imports them under `TYPE_CHECKING` as well.

    Args:
        package: `__name__` of the package.
        table: public names, separated by blanks, by the module that defines them.
    """
    modules = {name: module for module, names in table.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get, lambda: sorted(modules), sorted(modules)


def module_alone(package: str, name: str) -> ModuleType:
    """Import a module without the `__init__` of its package, which may take a second.

    Args:
        package: name of the package.
        name: name of a module in it. If it imports from its package, that is imported, too.

    Raises:
        ModuleNotFoundError: there is no such package, or no such module in it.
    """
    found = importlib.util.find_spec(package)
    path = Path(found.origin).with_name(f"{name}.py") if found and found.origin else None
    if package in sys.modules or path is None or not path.is_file():
        return importlib.import_module(f"{package}.{name}")
    spec = importlib.util.spec_from_file_location(f"{package}.{name}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
