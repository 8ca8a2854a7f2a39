"""Runs an action as soon as a script imports a module, such as TensorFlow.

TensorFlow reads some settings (`TF_USE_LEGACY_KERAS`) at import, and scripts set them on their first lines, so Dike
must not import it first.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

Action = Callable[[ModuleType], None]


# Modules whose actions have started: an action may add another one for the same module, which still counts as loading.
_executed: set[str] = set()


def after_import(name: str, action: Action) -> None:
    """Calls `action(module)` as soon as the module `name` has been imported, or immediately if it already is."""
    module = sys.modules.get(name)
    if module is not None and (name in _executed or not _is_loading(module)):
        action(module)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


def _is_loading(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module through the other finders, with a loader that calls the action after the import."""

    def __init__(self, name: str, action: Action) -> None:
        self._name = name
        self._action = action
        self._is_delegating = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._is_delegating:
            return None
        self._is_delegating = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_delegating = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def run_action(self, module: ModuleType) -> None:
        """Called after the import, since a found spec does not mean that the module gets imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _executed.add(self._name)
            self._action(module)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Resources and pickling look up the module's own loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with _gc_paused():
            self._loader.exec_module(module)
        self._finder.run_action(module)


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """An import leaves no garbage, and collections take a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
