"""Names of a Keras model's variables that are the same in every process that builds the same model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


def named_variables(model: Any) -> list[tuple[str, Any]]:
    """Each variable of a Keras or tf_keras model with its unique name, in the order of `model.variables`.

    The name is Keras' path (`conv2d/kernel`), in tf_keras the name without `:0`. Where several variables have
    the same, the second and later ones get `#1`, `#2`, ...
    """
    return unique_names(model.variables)


def unique_names(variables: Iterable[Any]) -> list[tuple[str, Any]]:
    """As `named_variables`, for any variables in a stable order."""
    seen: Counter[str] = Counter()
    named = []
    for variable in variables:
        path = getattr(variable, "path", None) or variable.name.partition(":")[0]
        named.append((f"{path}#{seen[path]}" if seen[path] else path, variable))
        seen[path] += 1
    return named
