"""Builds a `ModelProfile` from what was read of a model, for all APIs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dike.exceptions import BadInputError
from dike.profile import Api, ModelProfile, VariableSpec
from dike.profiling.graph_flops import Cost


@dataclass
class Findings:
    """What was read of one model.

    Attributes:
        forward: cost of the forward pass of one batch.
        step_flops: FLOPs of the whole training step of one batch.
        variables: unique names and variables of TensorFlow or Keras, without optimizer slots.
        trainable: the trained ones.
    """

    name: str
    api: Api
    batch_size: int
    forward: Cost
    step_flops: float
    variables: Sequence[tuple[str, Any]]
    trainable: Iterable[Any]
    layers: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    sample_bytes: int = 0
    optimizer: str = ""
    optimizer_slots: int = 0
    synchronous: bool = False

    def profile(self) -> ModelProfile:
        """Raises BadInputError if nothing is trainable."""
        trainable_ids = {id(variable) for variable in self.trainable}
        specs = [
            VariableSpec.of(name, variable, is_trained=id(variable) in trainable_ids)
            for name, variable in self.variables
        ]
        trained = [spec for spec in specs if spec.trainable]
        parameters = sum(math.prod(spec.shape) for spec in trained)
        if not parameters:
            raise BadInputError(
                f"The model of {self.name} has no trainable parameters, so there is nothing to train; "
                "give it at least one trainable layer or variable."
            )
        return ModelProfile(
            name=self.name,
            api=self.api,
            parameters=parameters,
            parameter_bytes=sum(spec.size_bytes for spec in trained),
            variables=tuple(sorted(specs, key=lambda spec: -spec.size_bytes)),
            flops_forward_per_sample=self.forward.total / self.batch_size,
            flops_step_per_sample=max(self.step_flops, self.forward.total) / self.batch_size,
            longest_path_flops=self.forward.longest / self.batch_size,
            batch_size=self.batch_size,
            sample_bytes=self.sample_bytes,
            layers=dict(self.layers.most_common()),
            optimizer=self.optimizer,
            optimizer_slots=self.optimizer_slots,
            dtype=_commonest_dtype(trained),
            synchronous=self.synchronous,
            uncounted_ops=dict(self.uncounted.most_common()),
        )


def _commonest_dtype(specs: Sequence[VariableSpec]) -> str:
    sizes: Counter[str] = Counter()
    for spec in specs:
        sizes[spec.dtype] += math.prod(spec.shape)
    return sizes.most_common(1)[0][0]
