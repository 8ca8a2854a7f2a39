"""TensorFlow under the name `dike`: `import dike as tf` gives TensorFlow's own objects.

TensorFlow is imported when its first name is used; Dike's modules, `params`, `report`, `checkpoint`, `tune`,
`grid_search` and `Client` do not need it. `dike.__version__` is TensorFlow's; Dike's is in `dike._version`.
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
