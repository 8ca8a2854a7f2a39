"""TensorFlow under the name `dike`: `import dike as tf` gives TensorFlow's own objects.

TensorFlow is imported when its first name is asked for. `dike.__version__` is TensorFlow's, as a drop-in's must be;
Dike's own is in `dike._version`. Dike's own modules, such as `dike.profile`, do not import TensorFlow, nor do the
functions for hyper-parameter searches: `params`, `report`, `checkpoint`, `tune`, `grid_search`.
"""

from __future__ import annotations

from typing import Any

from dike import namespace as _namespace


def __getattr__(name: str) -> Any:
    return _namespace.attribute(name)


def __dir__() -> list[str]:
    return _namespace.names()


_namespace.install()
