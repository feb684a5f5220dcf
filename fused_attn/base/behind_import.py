"""Import hook that runs a callback after another module is imported."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def behind_import(name: str, action: Action) -> None:
    """Call action(module) now if the module is imported already, otherwise right after its import.

    This function does not trigger the import. If the module is executed again (reloaded), the
    action is called again.

    Args:
        name: full name of the module, such as "torch.utils.flop_counter".
        action: callback, which receives the module.
    """
    if name in sys.modules:
        action(importlib.import_module(name))  # blocks while another thread is importing it
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that wraps the loader of one module, to call the action after its execution."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """Loader that executes a module with its original loader, and then calls the action.

    The executed module has the original loader as its `__loader__` and `__spec__.loader`.
    """

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder.action(module)
