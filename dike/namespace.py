"""Makes every spelling of a TensorFlow import work under the name `dike`.

Attributes come from TensorFlow by PEP 562. Submodules (`import dike.keras`, `from dike.compat.v1 import train`) are
proxies: the import machinery would overwrite name and spec of TensorFlow's own modules.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from dike.interception import after_import

_PACKAGE = "dike"
_TENSORFLOW = "tensorflow"
_FUNCTIONS = {
    "params": "dike.trial.script_api",
    "report": "dike.trial.script_api",
    "checkpoint": "dike.trial.script_api",
    "tune": "dike.trial.tuning",
    "grid_search": "dike.trial.tuning",
    "Client": "framework.service.client",
}
"""Dike's own names -> their modules. TensorFlow has none of these names. Only use of `Client` imports `framework`."""

# Tools look up names such as `__wrapped__` (pytest: `_mock_name`) on any module; that must not import TensorFlow.
_TENSORFLOW_DUNDERS = frozenset(
    {
        "__version__",
        "__git_version__",
        "__compiler_version__",
        "__cxx11_abi_flag__",
        "__cxx_version__",
        "__monolithic_build__",
    }
)


def install() -> None:
    """Called once, when `dike` is imported."""
    sys.modules[_PACKAGE].__class__ = _Package
    sys.meta_path.insert(0, _Finder())
    if os.environ.get("DIKE_MASTER") and not (os.environ.get("DIKE_TASK") or os.environ.get("DIKE_TRIAL")):
        after_import(_TENSORFLOW, _hand_over_to_cluster)


def attribute(name: str) -> Any:
    """`dike.NAME`: our own function or module of that name, else TensorFlow's attribute."""
    if name == "__all__":
        return [public for public in names() if not public.startswith("_")]
    if name == "_mock_name" or (name.startswith("__") and name not in _TENSORFLOW_DUNDERS):
        raise AttributeError(f"module '{_PACKAGE}' has no attribute '{name}'")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if _is_own_module(name):
        return importlib.import_module(f"{_PACKAGE}.{name}")
    try:
        return getattr(importlib.import_module(_TENSORFLOW), name)
    except AttributeError:
        raise AttributeError(f"module '{_PACKAGE}' has no attribute '{name}', nor has {_TENSORFLOW}") from None


def names() -> list[str]:
    return dir(importlib.import_module(_TENSORFLOW))


@functools.cache
def _is_own_module(name: str) -> bool:
    search = list(sys.modules[_PACKAGE].__path__)
    return importlib.machinery.PathFinder.find_spec(f"{_PACKAGE}.{name}", search) is not None


def _hand_over_to_cluster(_: ModuleType) -> None:
    if os.environ.get("DIKE_MASTER"):  # a zygote removes it
        from dike.capture.client import hand_over

        hand_over()


class _Package(ModuleType):
    """Keeps proxies out of its attributes, so that `dike.keras` is TensorFlow's own module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, _Proxy):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by name, as modules are."""
        return importlib.import_module, (self.__name__,)


class _Proxy(ModuleType):
    """Entry of `sys.modules` for `dike.X`: a proxy of TensorFlow's X."""

    def __init__(self, name: str, real: ModuleType) -> None:
        super().__init__(name, real.__doc__)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        real = self.__dict__["_real"]
        if name == "__all__" and not hasattr(real, "__all__"):
            return [public for public in dir(real) if not public.startswith("_")]
        return getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") and name.endswith("__"):
            super().__setattr__(name, value)
        elif not isinstance(value, _Proxy):
            setattr(self.__dict__["_real"], name, value)

    def __dir__(self) -> list[str]:
        return dir(self.__dict__["_real"])


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `dike.X` where X is a module of TensorFlow and not one of Dike's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != _PACKAGE or not rest or _belongs_to_dike(rest):
            return None
        real = _tensorflow_module(rest)
        if real is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, loader_state=real, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Proxy(spec.name, spec.loader_state)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: TensorFlow's module is already loaded."""


def _belongs_to_dike(rest: str) -> bool:
    return _is_own_module(rest.partition(".")[0])


def _tensorflow_module(rest: str) -> ModuleType | None:
    """The result of `import tensorflow.REST`, or a module that is only an attribute of TensorFlow."""
    full_name = f"{_TENSORFLOW}.{rest}"
    try:
        return importlib.import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (full_name + ".").startswith(error.name + "."):
            raise
    found: Any = importlib.import_module(_TENSORFLOW)
    for part in rest.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, ModuleType) else None
