"""Profiles of imaginary models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dike.profile import Api, ModelProfile, VariableSpec

_FLOAT32_BYTES = 4


def made_up_profile(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    flops: float,
    api: Api = Api.GRAPH,
    name: str = "train.py",
    batch_size: int = 8,
    **others: Any,
) -> ModelProfile:
    """A model in which nothing can be computed in parallel.

    Args:
        shapes: variable -> its shape.
        flops: of one sample's forward pass.
        api: the model's.
        name: the script.
        batch_size: samples per worker and step.
        others: further fields of the profile.
    """
    variables = tuple(
        VariableSpec(name, shape, "float32", _FLOAT32_BYTES * math.prod(shape)) for name, shape in shapes.items()
    )
    size_bytes = sum(variable.size_bytes for variable in variables)
    values: dict[str, Any] = {
        "name": name,
        "api": api,
        "parameters": size_bytes // _FLOAT32_BYTES,
        "parameter_bytes": size_bytes,
        "variables": variables,
        "flops_forward_per_sample": flops,
        "flops_step_per_sample": 3 * flops,
        "longest_path_flops": flops,
        "batch_size": batch_size,
    }
    return ModelProfile(**{**values, **others})
