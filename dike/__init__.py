"""TensorFlow under the name `dike`: `import dike as tf` gives TensorFlow's own objects.

TensorFlow is imported when its first name is asked for. `dike.__version__` is TensorFlow's, as a drop-in's must be;
Dike's own is in `dike._version`. Dike's own modules, such as `dike.profile`, do not import TensorFlow, nor do the
functions for hyper-parameter searches - `params`, `report`, `checkpoint`, `tune`, `grid_search` - and `Client`, which
asks a service.
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
