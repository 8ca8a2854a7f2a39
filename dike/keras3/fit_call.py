"""Arguments and logs of a call of `fit`, of Keras 3 or tf_keras. Imports neither."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dike.exceptions import BadInputError


def arguments_of(fit: Callable[..., Any], model: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(fit).bind(model, *args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name != "self"}


def checked_arguments_of(fit: Callable[..., Any], model: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Raises BadInputError for an argument that `fit` does not have."""
    unknown = [name for name in kwargs if name not in inspect.signature(fit).parameters]
    if unknown:
        raise BadInputError(f"Argument '{unknown[0]}' of Model.fit is not supported; remove it.")
    return arguments_of(fit, model, args, kwargs)


def validates(arguments: Mapping[str, Any]) -> bool:
    return arguments["validation_data"] is not None or bool(arguments["validation_split"])


def loss_of(logs: Any) -> Any:
    return logs.get("loss") if isinstance(logs, dict) else None


def scalar_logs(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the logs of an epoch that are single numbers."""
    return {name: float(value) for name, value in (logs or {}).items() if getattr(value, "ndim", 0) == 0}
