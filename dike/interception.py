"""Acts on TensorFlow the moment a script imports it, and not before.

TensorFlow reads some settings (`TF_USE_LEGACY_KERAS`) when it is imported, and scripts set them on their first lines;
so Dike must not import it ahead of the script.
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


# Modules whose actions are due: an action may ask for another one on the same module, which Python still calls loading.
_executed: set[str] = set()


def after_import(name: str, action: Action) -> None:
    """Calls `action(module)` as soon as the module `name` has been imported; at once if it already is."""
    module = sys.modules.get(name)
    if module is not None and (name in _executed or not _is_loading(module)):
        action(module)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


def _is_loading(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module the ordinary way and hands it out with a loader that calls the action afterwards."""

    def __init__(self, name: str, action: Action) -> None:
        self._name = name
        self._action = action
        self._is_asking_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._is_asking_others:
            return None
        self._is_asking_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking_others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def loaded(self, module: ModuleType) -> None:
        """The module has been imported. Being found is not enough: some only look whether a module is there."""
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
        # The module keeps its own loader: resources and pickling look it up.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with _no_collections():
            self._loader.exec_module(module)
        self._finder.loaded(module)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """For an import: nothing of it is garbage, and to look for some again and again takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
