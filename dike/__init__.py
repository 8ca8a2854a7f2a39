"""TensorFlow under the name `dike`: `import dike as tf` gives TensorFlow's own objects.

TensorFlow is imported when its first name is used. `dike.__version__` is TensorFlow's, so that `dike` is a drop-in
replacement; Dike's own version is in `dike._version`. Dike's own modules, such as `dike.profile`, do not import
TensorFlow; neither do `params`, `report`, `checkpoint`, `tune`, `grid_search` and `Client`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dike import namespace as _namespace

if TYPE_CHECKING:
    from framework.service.client import Client as Client


def __getattr__(name: str) -> Any:
    return _namespace.attribute(name)


def __dir__() -> list[str]:
    return _namespace.names()


_namespace.install()
