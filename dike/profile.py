"""Model profiles: what the planner knows of a training script (paper 'Dike', section 3.1); without TensorFlow."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from dataclasses import dataclass, field
from typing import Any

from dike import typed
from dike.exceptions import BadInputError


class Api(enum.StrEnum):
    """How the script trains, which decides the processes of its job."""

    GRAPH = "graph"
    """TensorFlow 1 sessions: every worker runs the script; worker 0 is the chief."""
    KERAS = "keras"
    """Keras 3 `fit`: the chief runs the script and hands steps to the workers, which run a TensorFlow server."""
    TF_KERAS = "tf_keras"
    """tf_keras `fit` (`TF_USE_LEGACY_KERAS=1`): as KERAS, by tf_keras' own coordinator."""
    COORDINATOR = "coordinator"
    """The script's own `ClusterCoordinator` loop: as KERAS, by the script."""
    LOOP = "loop"
    """A training loop of the script's own, of which at most the variables are known: one plain task."""

    @property
    def has_separate_chief(self) -> bool:
        """Whether the chief is a task of its own that computes no steps."""
        return self not in (Api.GRAPH, Api.LOOP)

    @property
    def compares_variables(self) -> bool:
        """Whether a job's chief can compare the model's variables with the planned ones before its first step."""
        return self in (Api.GRAPH, Api.KERAS)


@dataclass(frozen=True)
class VariableSpec:
    """A variable that lives on a parameter server.

    Attributes:
        name: unique in the model, without the `:0`.
        dtype: TensorFlow's name of the type, such as `float32`.
        size_bytes: without optimizer slots.
        trainable: whether gradients are computed for it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    trainable: bool = True

    @classmethod
    def of(cls, name: str, variable: Any, *, is_trained: bool) -> VariableSpec:
        """Describes a variable of TensorFlow or Keras. Imports TensorFlow."""
        import tensorflow as tf

        dtype = tf.as_dtype(variable.dtype).base_dtype
        # A dimension that is known only at run time counts as one.
        shape = tuple(dim or 1 for dim in tf.TensorShape(variable.shape).as_list())
        return cls(name, shape, dtype.name, math.prod(shape) * dtype.size, is_trained)


@dataclass(frozen=True)
class ModelProfile:
    """What the planner needs to know of a model and its training script.

    Attributes:
        name: a script's file name or `keras:NAME`.
        parameters: number of trainable parameters.
        parameter_bytes: their size.
        variables: all that have to live on a parameter server, trainable or not, largest first.
        flops_forward_per_sample: FLOPs of one forward pass for one sample; a multiply-add counts as two.
        flops_step_per_sample: FLOPs of one training step (forward, backward, update) divided by the batch size.
        longest_path_flops: largest sum of forward FLOPs per sample along one path of the graph.
        batch_size: samples per step of one worker.
        sample_bytes: size of one input sample; 0 if unknown.
        layers: layer (or op) type -> count.
        optimizer: empty if there is none.
        optimizer_slots: variables the optimizer keeps per trainable parameter (SGD 0, momentum 1, Adam 2).
        dtype: most frequent type of the parameters.
        synchronous: whether the script aggregates the workers' gradients before each update.
        uncounted_ops: types of ops in the graph whose FLOPs are unknown -> count.
        why_alone: why the script cannot be distributed and is one plain task, as a sentence; empty if it can be.
        counts_own_steps: whether each worker would run all steps, as the script's loop ignores the global step.
        needs_servers: whether the script waits for the parameter servers of a cluster that it names itself.
        why_not_split: why several workers cannot share its batches, as a clause; empty if they can.
        synced_layers: number of layers for which all workers exchange statistics of the batch in each step.
        own_distribution: library with which the script distributes itself, such as `torch.distributed`; empty if none.
    """

    name: str
    api: Api
    parameters: int
    parameter_bytes: int
    variables: tuple[VariableSpec, ...]
    flops_forward_per_sample: float
    flops_step_per_sample: float
    longest_path_flops: float
    batch_size: int
    sample_bytes: int = 0
    layers: dict[str, int] = field(default_factory=dict, hash=False)
    optimizer: str = ""
    optimizer_slots: int = 0
    dtype: str = "float32"
    synchronous: bool = False
    uncounted_ops: dict[str, int] = field(default_factory=dict, hash=False)
    why_alone: str = ""
    why_not_split: str = "its profile does not say that it can be"
    counts_own_steps: bool = False
    needs_servers: bool = False
    synced_layers: int = 0
    own_distribution: str = ""

    @property
    def is_measurable(self) -> bool:
        """Whether the FLOPs of a step are known, so that its speed can be predicted."""
        return self.api is not Api.LOOP

    @property
    def can_split(self) -> bool:
        """Whether several workers can share its batches, so that they compute what one computes."""
        return not self.why_not_split

    @property
    def longest_path_share(self) -> float:
        """The longest path's share of the forward FLOPs, 0 to 1: the part that cannot run in parallel."""
        return self.longest_path_flops / self.flops_forward_per_sample if self.flops_forward_per_sample else 1.0

    @property
    def variable_bytes(self) -> int:
        """Trainable or not, without optimizer slots."""
        return sum(variable.size_bytes for variable in self.variables)

    def with_batch_size(self, batch_size: int) -> ModelProfile:
        """FLOPs are per sample and stay unchanged."""
        return dataclasses.replace(self, batch_size=batch_size)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "longest_path_share": self.longest_path_share}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelProfile:
        """Raises BadInputError if a key is missing or unknown, or a value is invalid."""
        try:
            profile = typed.read(cls, {key: value for key, value in data.items() if key != "longest_path_share"})
            minimum = 1 if profile.is_measurable else 0
            for name in ("parameters", "parameter_bytes", "batch_size"):
                if getattr(profile, name) < minimum:
                    raise ValueError(f"'{name}' must be a whole number of at least {minimum}")
            if not profile.is_measurable and not profile.why_alone:
                raise ValueError("'why_alone' must say why a script with a loop of its own is one task")
            for name in ("flops_forward_per_sample", "flops_step_per_sample", "longest_path_flops"):
                if not 0 <= getattr(profile, name) < math.inf:
                    raise ValueError(f"'{name}' must be a number of at least 0")
            sizes = [profile.sample_bytes, profile.optimizer_slots, *(one.size_bytes for one in profile.variables)]
            if min(sizes) < 0 or profile.variable_bytes > typed.MAX_INT:
                raise ValueError("a size is negative, or their sum is too large")
        except (ValueError, AttributeError) as error:
            raise BadInputError(f"This is not a model profile of Dike: {error}.") from error
        return profile

    @classmethod
    def loads(cls, text: str) -> ModelProfile:
        """Raises BadInputError if the text is not the JSON of a profile."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"A saved model profile must be JSON: {error}.") from error
        return cls.from_json(data)

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=2)
