"""Public names of a package that are imported on first use, so that importing the package is quick."""

import importlib
from collections.abc import Callable, Mapping
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
