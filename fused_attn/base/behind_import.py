"""Import hook that runs a callback after another module is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def behind_import(name: str, action: Action) -> None:
    """Call action(module) now if the module is imported already, otherwise right after its import.

    This function does not trigger the import.

    Args:
        name: full name of the module, such as "torch.utils.flop_counter".
        action: callback, which receives the module.
    """
    if name in sys.modules:
        action(importlib.import_module(name))  # blocks while another thread is importing it
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Import finder that calls an action after one module has been executed."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self.action(module)

            loader.exec_module = exec_module
        return spec
