"""Keras' `fit` on several workers that compute what one process computes.

Every worker runs the whole script and reads every batch, but computes a part of it. All that depends on the whole batch
is exchanged: gradients before the optimizer applies them, metrics, the divisors of masked and weighted losses, and the
statistics of batch normalization. Random numbers are drawn for the whole batch. So all variables stay equal on all
workers, and equal to those of `python`, up to rounding.

Within a step, `loss` means: the number whose mean over the workers, weighted with their shares of the batch, is the
loss of the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from keras.src import metrics as keras_metrics
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow import core, trainer
from keras.src.backend.tensorflow import random as keras_random
from keras.src.losses import loss as keras_losses
from keras.src.metrics.metric import Metric
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from dike import process
from dike.exceptions import JobFailedError
from dike.keras3.model import metric_variables, named_values, without_function
from dike.main_script import one_line
from dike.reporting import reporter
from dike.roles.gang import Gang

CHECKED_VALUES = 512
"""Number of values at the beginning and the end of each tensor of a batch that are compared over the workers."""
WEIGHTS_TOLERANCE = 1e-3
"""Relative difference of a variable on two workers that ends the job. Unlike processors round differently."""
SPLIT_TOLERANCE, HALF_SPLIT_TOLERANCE = 2e-3, 5e-2
"""Relative difference, of the gradient of a batch and that of its parts, beyond which the batch cannot be split; with
float32 and with 16-bit computation."""
_MEANS = (keras_metrics.Mean, keras_metrics.Sum)
"""Metrics that a step of the user's own may update with anything."""
_SHAPED = ("normal", "uniform", "randint", "truncated_normal", "gamma", "binomial", "beta")
"""Functions of Keras' backend that draw a tensor of a given shape."""

_working_part: _Part | None = None
"""The part of the batch in the step that is being traced or run; None outside of steps."""


def install(gang: Gang) -> None:
    """Makes `fit`, `evaluate` and `train_on_batch` of every Keras model synchronous."""
    own = trainer.TensorFlowTrainer._make_function

    @functools.wraps(own)
    def make_function(model: Any, step_function: Any) -> Any:
        # Collectives cannot be compiled by XLA.
        compiled, model.jit_compile = model.jit_compile, False
        try:
            if step_function != model.train_step and _has_own_step_of_tests(model):
                return own(model, step_function)  # each worker computes whole batches
            return _Steps(gang, model, step_function).function(own)
        finally:
            model.jit_compile = compiled

    trainer.TensorFlowTrainer._make_function = make_function
    for owner, name, make in (
        (BaseOptimizer, "apply", _apply),
        (LossScaleOptimizer, "apply", _apply),
        (keras_losses, "reduce_values", _reduce_values),
        (keras_losses, "apply_mask", _apply_mask),
        (keras.layers.BatchNormalization, "_moments", _moments),
        (keras_random, "dropout", _dropout),
        *((keras_random, name, _drawn) for name in _SHAPED),
    ):
        setattr(owner, name, make(getattr(owner, name)))


class _Part:
    """A worker's part of a batch, in one step.

    Attributes:
        start, end: its samples. A worker without samples computes the last one, which does not count.
        whole: number of samples of the batch.
        length: number of its samples.
        known_whole: number of samples of the batch, if known when the step is traced; else None.
        shares, share: part / whole, of all workers and of this one.
    """

    def __init__(self, gang: Gang | None, data: Any, model: Any) -> None:
        """Without a gang, the part is the whole batch."""
        self._output_losses = [] if model._compile_loss is None else model._compile_loss.metrics
        self.gang = gang
        tensors = [each for each in tf.nest.flatten(data) if each is not None]
        rank, size = (gang.rank, gang.size) if gang else (0, 1)
        self.whole = tf.shape(tensors[0])[0]
        if not tf.executing_eagerly():
            # Hidden from shape inference: by its unknown length, a tensor of this part's samples is recognized.
            self.whole = tf.compat.v1.placeholder_with_default(self.whole, [])
        self.known_whole = tensors[0].shape[0]
        self.start, end = self.whole * rank // size, self.whole * (rank + 1) // size
        self._counts = end > self.start
        self.length = end - self.start
        bounds = self.whole * tf.range(size + 1) // size
        self.shares = tf.cast(bounds[1:] - bounds[:-1], tf.float32) / tf.cast(self.whole, tf.float32)
        self.share = self.shares[rank]
        self.start = tf.minimum(self.start, self.whole - 1)
        self.end = tf.maximum(end, self.start + 1)
        self.inputs = tensors
        self.gradients: list[Any] | None = None
        """If not None, gradients are added to it instead of being applied."""
        self.is_applying = False
        self._updated: dict[int, tuple[Any, list[Any]]] = {}
        self._is_checked = gang is None
        self._results: dict[int, Any] = {}

    def of(self, data: Any) -> Any:
        return tf.nest.map_structure(lambda each: None if each is None else each[self.start : self.end], data)

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        return list(tensors) if self.gang is None else self.gang.sum(tensors)

    def counted(self, tensor: Any) -> Any:
        """The tensor, or zeros for a worker without samples."""
        return tf.where(self._counts, tensor, tf.zeros_like(tensor))

    def mean(self, tensors: Sequence[Any]) -> list[Any]:
        """Means over the workers, weighted with their shares."""
        return self.sum([self.counted(each) * tf.cast(self.share, each.dtype) for each in tensors])

    def gathered(self, structure: Any) -> Any:
        """The whole batch of everything that has this part's samples along its first axis."""
        if self.gang is None:
            return structure
        flat = tf.nest.flatten(structure)
        places = [place for place, each in enumerate(flat) if self._is_of_samples(each)]
        tensors = [tf.convert_to_tensor(flat[place])[: self.length] for place in places]
        padded = [_padded(tensor, self.whole, self.start) for tensor in tensors]
        for place, whole in zip(places, self.sum(padded), strict=True):
            flat[place] = whole
        return tf.nest.pack_sequence_as(structure, flat)

    def _is_of_samples(self, value: Any) -> bool:
        if not (tf.is_tensor(value) and value.shape.rank):
            return False
        length = value.shape[0]
        return length is None or (tf.executing_eagerly() and length == int(self.end - self.start))

    def scaled(self, length: Any) -> tuple[Any, Any] | None:
        """Number of rows in the whole batch, and before this part, of a tensor with `length` rows for this part.

        None if the rows do not belong to samples.
        """
        if self.gang is None:
            return None
        own = self.end - self.start
        # Only the number of samples is unknown when a step is traced.
        is_of_samples = tf.is_tensor(length) or (
            tf.executing_eagerly() and length is not None and not length % int(own)
        )
        if not is_of_samples:
            return None
        each = length // own
        return each * self.whole, each * self.start

    # Metrics.

    def update(self, metric: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Updates a metric; `merge` adds up the workers' updates."""
        if in_stateless_scope():
            return own(*args, **kwargs)  # Keras builds a model: nothing is computed
        if not _adds_up(metric, args, kwargs):
            args, kwargs = self.gathered((args, kwargs))
            return own(*args, **kwargs)
        if id(metric) not in self._updated:
            self._updated[id(metric)] = metric, [tf.convert_to_tensor(each) for each in metric.variables]
            for variable in metric.variables:
                variable.assign(tf.zeros_like(variable))
        if type(metric) is keras_metrics.Mean:
            return self._update_mean(metric, own, *args, **kwargs)
        return own(*args, **kwargs)

    def _update_mean(self, metric: Any, own: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            # A number of the batch, not of each sample. Keras weights its outputs' losses if the batch size is known.
            weight = self.known_whole if any(metric is each for each in self._output_losses) else None
            sample_weight = self.share * (weight or 1)
        return own(values, sample_weight=sample_weight)

    def merge(self) -> None:
        """Adds up the workers' updates of metrics; the first time in a step, also compares their batches."""
        if self._is_checked and not self._updated:
            return
        variables = [each for metric, _ in self._updated.values() for each in metric.variables]
        before = [each for _, values in self._updated.values() for each in values]
        self._updated.clear()
        updates = [self.counted(tf.convert_to_tensor(each)) for each in variables]
        inputs = [] if self._is_checked else [self._input_sums()]
        sums = self.sum([*updates, *inputs])
        for variable, value, added in zip(variables, before, sums, strict=False):
            variable.assign(value + added)
        if not self._is_checked:
            self._is_checked = True
            self._check_inputs(sums[-1])

    def result(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if in_stateless_scope():
            return own(*args, **kwargs)
        self.merge()
        result = own(*args, **kwargs)
        self._results |= {id(each): each for each in tf.nest.flatten(result)}
        return result

    def logs(self, logs: Any) -> Any:
        """Means of the numbers that are no metrics."""
        self.merge()
        flat = tf.nest.flatten(logs)
        places = [place for place, each in enumerate(flat) if each is not None and id(each) not in self._results]
        means = self.mean([tf.cast(flat[place], tf.float32) for place in places])
        for place, mean in zip(places, means, strict=True):
            flat[place] = tf.cast(mean, tf.convert_to_tensor(flat[place]).dtype)
        return tf.nest.pack_sequence_as(logs, flat)

    # Equality of the workers' data.

    def _input_sums(self) -> Any:
        """Sums of some values of the batch, in the row of this worker."""
        assert self.gang is not None
        ends = [tf.reshape(each, [-1]) for each in self.inputs if each.dtype.is_floating or each.dtype.is_integer]
        ends = [tf.cast(part, tf.float32) for each in ends for part in (each[:CHECKED_VALUES], each[-CHECKED_VALUES:])]
        sums = [tf.cast(self.whole, tf.float32), *(tf.reduce_sum(each) for each in ends)]
        return self.gang.row(tf.stack(sums))

    def _check_inputs(self, rows: Any) -> None:
        """Raises InvalidArgumentError if the rows of the workers differ, because they read different batches."""
        spread = tf.reduce_max(tf.abs(rows - rows[0]))
        limit = 1e-3 + 1e-4 * tf.reduce_max(tf.abs(rows))
        is_equal = tf.logical_or(spread <= limit, tf.logical_not(tf.math.is_finite(spread)))
        tf.debugging.Assert(is_equal, [_OTHER_DATA])


_OTHER_DATA = (
    "The workers of this job read different batches. Make the order of the data the same in every process: sort "
    "lists of files, and seed what shuffles them."
)


@contextlib.contextmanager
def _working_on(part: _Part) -> Iterator[None]:
    global _working_part
    outer, _working_part = _working_part, part
    try:
        yield
    finally:
        _working_part = outer


class _Steps:
    """The train or test function of a model."""

    def __init__(self, gang: Gang, model: Any, step_function: Any) -> None:
        self._gang = gang
        self._model = model
        self._own_step = without_function(step_function)
        self._trains = step_function == model.train_step

    def function(self, make: Callable[..., Any]) -> Callable[[Any], Any]:
        function = make(self._model, self._step)
        is_checked = not self._trains

        def run(iterator: Any) -> Any:
            nonlocal is_checked
            with ending_if_peer_lost(self._gang):
                if is_checked:
                    return function(iterator)
                is_checked = True
                batches = list(itertools.islice(iterator, self._model.steps_per_execution))
                if not batches:
                    raise StopIteration
                self._check_splitting(batches[0])
                return function(_iterator_of(batches, iterator))

        return run

    def _step(self, data: Any) -> Any:
        data = _tensors_of(data)
        return self._computed(data, _Part(self._gang, data, self._model))

    def _computed(self, data: Any, part: _Part) -> Any:
        with _working_on(part), _watched(self._model, part):
            return part.logs(self._own_step(part.of(data)))

    def _try_step(self, few: Any, data: Any, part: _Part) -> None:
        """Computes the gradients of a few samples; if only the whole batch works, it cannot be split."""
        part.gradients = []
        try:
            self._computed(few, part)
        except Exception as error:
            is_of_script = not isinstance(error, tf.errors.OpError) or isinstance(error, tf.errors.InvalidArgumentError)
            if not is_of_script or self._gang.failure is not None or _OTHER_DATA in str(error):
                raise
            whole = _Part(None, data, self._model)
            whole.gradients = []
            self._computed(data, whole)  # raises the script's own error, if it is one
            _end_unsplit(f"it trains on whole batches only ({one_line(error)})")

    def _check_splitting(self, data: Any) -> None:
        """Compares the gradients and metrics of some samples with those of their parts.

        Losses, metrics and steps of the user's own may compute anything, so that only a comparison shows whether
        workers can share a batch. Runs the step without compiling it, and restores all variables.
        """
        data = self._model._autoconvert_optionals(lambda each: each)(data)
        data = _tensors_of(data)
        count = 2 * self._gang.size + 1
        few = tf.nest.map_structure(lambda each: None if each is None else each[:count], data)
        before = [(variable, np.asarray(variable)) for variable in named_values(self._model).values()]
        found = []
        for gang in (None, self._gang):
            part = _Part(gang, few, self._model)
            with _created(before):
                self._try_step(few, data, part)
            gradients = [np.asarray(each) for each in part.gradients or ()]
            found.append((gradients, {id(each): np.asarray(each) for each in named_values(self._model).values()}))
            self._model.reset_metrics()  # some were unknown before
            for variable, value in before:
                variable.assign(value)
        policy = keras.config.dtype_policy().compute_dtype
        limit = HALF_SPLIT_TOLERANCE if policy in ("float16", "bfloat16") else SPLIT_TOLERANCE
        (gradient, whole), (parts_gradient, parts) = found
        differences = {"gradient": _difference(gradient, parts_gradient)}
        # Others add up, or are computed from the whole batch. Rounding may move a sample to another of their bins.
        own_means = [metric for metric in flat_metrics(self._model) if type(metric) in _MEANS]
        compared = own_means if _has_own_step(self._model) else []
        ignored = {id(each) for each in metric_variables(self._model)}
        ignored -= {id(each) for metric in compared for each in metric.variables}
        for name, variable in named_values(self._model).items():
            if id(variable) not in ignored:
                differences[f"variable '{name}'"] = _difference([whole[id(variable)]], [parts[id(variable)]])
        name, difference = max(differences.items(), key=lambda each: each[1])
        # All decide alike, also if processors round differently.
        if float(self._gang.rows(tf.constant([difference])).numpy().max()) > limit:
            _end_unsplit(f"the {name} of some samples differs from that of their parts by {difference:.1%}")


def _tensors_of(data: Any) -> Any:
    return tf.nest.map_structure(lambda each: None if each is None else tf.convert_to_tensor(each), data)


def _has_own_step_of_tests(model: Any) -> bool:
    return _has_own_step(model) or type(model).test_step is not keras.Model.test_step


def _has_own_step(model: Any) -> bool:
    own = ("train_step", "compute_loss", "compute_metrics")
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in own)


@contextlib.contextmanager
def _created(values: list[tuple[Any, Any]]) -> Iterator[None]:
    """Adds all variables that Keras creates meanwhile, with their first values."""
    own = core.Variable._initialize

    @functools.wraps(own)
    def initialize(variable: Any, value: Any) -> None:
        own(variable, value)
        values.append((variable, np.asarray(variable._value)))

    core.Variable._initialize = initialize
    try:
        yield
    finally:
        core.Variable._initialize = own


def _iterator_of(batches: Sequence[Any], iterator: Any) -> Any:
    """An iterator over batches that were read from another one, of the same type, as a step is traced by type."""
    spec = getattr(iterator, "element_spec", None)
    flat = tf.nest.flatten(spec)
    if not isinstance(iterator, tf.data.Iterator) or not all(isinstance(each, tf.TensorSpec) for each in flat):
        return batches
    is_fixed = flat[0].shape[0] is not None
    parts = [tf.data.Dataset.from_tensor_slices(each) for each in batches]
    joined, *others = [part.batch(len(part), drop_remainder=is_fixed) for part in parts]
    for other in others:
        joined = joined.concatenate(other)
    return iter(joined)


def _difference(whole: Sequence[Any], parts: Sequence[Any]) -> float:
    """Relative difference of two lists of arrays."""
    if len(whole) != len(parts):
        return 1.0
    norms = [np.linalg.norm(np.ravel(each).astype(np.float64)) for each in whole]
    apart = [
        np.linalg.norm(np.ravel(one).astype(np.float64) - np.ravel(other).astype(np.float64))
        for one, other in zip(whole, parts, strict=True)
    ]
    size = float(np.linalg.norm(norms))
    found = float(np.linalg.norm(apart))
    # A script whose numbers are not finite is not ours to judge.
    return found / size if size and np.isfinite(found) else 0.0


def _end_unsplit(why: str) -> NoReturn:
    print(f"dike: several workers cannot share a batch of this model: {why}.", file=sys.stderr, flush=True)
    reporter().send({"type": "cannot_split", "why": why}, wait_s=5.0)
    reporter().close()
    process.end_process(process.EXIT_CODE_CANNOT_SPLIT)


@contextlib.contextmanager
def ending_if_peer_lost(gang: Gang) -> Iterator[None]:
    """Ends the process if a step fails because another worker has ended."""
    try:
        yield
    except tf.errors.OpError as error:
        if isinstance(error, tf.errors.InvalidArgumentError) and _OTHER_DATA in str(error):
            raise JobFailedError(_OTHER_DATA) from None
        if gang.failure is not None:
            raise gang.failure from None
        gang.end_if_peer_lost()
        raise


# Equal variables on all workers.


def compare_values(gang: Gang, model: Any, step: int, *, is_first: bool) -> None:
    """Checks that the workers have the same variables. Before the first epoch, unequal ones become the chief's.

    Raises:
        JobFailedError: they have not, or have resumed from different checkpoints. `step` is that of this one.
    """
    with ending_if_peer_lost(gang):
        steps = gang.rows(tf.constant([step], tf.int32)).numpy()
        if len(set(steps.ravel())) > 1:
            raise JobFailedError(f"The workers have resumed from different steps: {sorted(set(steps.ravel()))}.")
        name = _unequal(gang, model)
        if not name:
            return
        if not is_first:
            raise JobFailedError(
                f"The variable '{name}' differs between the workers, so that they do not train one model; run the job "
                "with --strategy one."
            )
        for variable in named_values(model).values():
            value = tf.convert_to_tensor(variable)
            variable.assign(gang.sum([value if gang.rank == 0 else tf.zeros_like(value)])[0])


def _unequal(gang: Gang, model: Any) -> str:
    """Returns the name of a variable that differs between the workers; empty if there is none."""
    values = {name: np.asarray(variable, np.float64) for name, variable in named_values(model).items()}
    sums = [number for value in values.values() for number in (value.sum(), np.abs(value).sum())]
    rows = gang.rows(tf.constant(sums, tf.float64)).numpy()
    apart = np.abs(rows - rows[0]).max(axis=0).reshape(-1, 2).max(axis=1)
    sizes = np.abs(rows).max(axis=0).reshape(-1, 2).max(axis=1)
    unequal = apart > WEIGHTS_TOLERANCE * sizes
    return next((name for name, differs in zip(values, unequal, strict=True) if differs), "")


# Replacements of Keras' functions. Each acts on the working part only.


def _apply(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        part = _working_part
        if part is None or part.is_applying:
            return own(optimizer, grads, trainable_variables)
        grads = list(grads)
        places = [place for place, each in enumerate(grads) if each is not None]
        means = part.mean([tf.convert_to_tensor(grads[place]) for place in places])
        for place, mean in zip(places, means, strict=True):
            grads[place] = mean
        if part.gradients is not None:
            part.gradients += means
            return None
        part.is_applying = True
        try:
            return own(optimizer, grads, trainable_variables)
        finally:
            part.is_applying = False

    return apply


def _reduce_values(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        part = _working_part
        if part is None or part.gang is None or values.shape.rank == 0:
            return own(values, sample_weight, reduction)
        if reduction == "sum":
            return tf.math.divide_no_nan(tf.reduce_sum(values), tf.cast(part.share, values.dtype))
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            weights = part.counted(tf.stop_gradient(tf.reduce_sum(sample_weight)))
            divisor = tf.cast(part.sum([weights])[0], values.dtype) * tf.cast(part.share, values.dtype)
            return tf.math.divide_no_nan(tf.reduce_sum(values), divisor)
        return own(values, sample_weight, reduction)

    return reduce_values


def _apply_mask(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        part = _working_part
        weights = own(sample_weight, mask, dtype, reduction)
        if part is None or part.gang is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        # Keras has multiplied by total / valid of this part.
        total, valid = tf.cast(tf.size(mask), dtype), tf.reduce_sum(tf.cast(mask, dtype))
        whole_total, whole_valid = part.sum([part.counted(total), part.counted(valid)])
        return weights * tf.math.divide_no_nan(whole_total * valid, whole_valid * total)

    return apply_mask


def _moments(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def moments(layer: Any, inputs: Any, mask: Any) -> Any:
        part = _working_part
        if part is None or part.gang is None or mask is not None or 0 not in layer._reduction_axes:
            return own(layer, inputs, mask)
        kind = tf.float32 if inputs.dtype.size == 2 else inputs.dtype
        axes = layer._reduction_axes
        mean, variance = tf.nn.moments(tf.cast(inputs, kind), axes)
        # The parts' means and variances, combined without cancellation (Chan, Golub, LeVeque 1979).
        rows = part.gang.sum_through(part.gang.row(tf.stack([mean, variance])), part.share)
        shares = tf.cast(part.shares, kind)[:, tf.newaxis]
        whole_mean = tf.reduce_sum(shares * rows[:, 0], axis=0)
        whole = tf.reduce_sum(shares * (rows[:, 1] + tf.square(rows[:, 0] - whole_mean)), axis=0)
        return tf.cast(whole_mean, inputs.dtype), tf.cast(whole, inputs.dtype)

    return moments


def _dropout(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def dropout(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        part, inputs = _working_part, tf.convert_to_tensor(inputs)
        length = None if inputs.shape.rank == 0 else inputs.shape[0]
        rows = None if part is None else part.scaled(tf.shape(inputs)[0] if length is None else length)
        if rows is None:
            return own(inputs, rate, noise_shape, seed)
        if noise_shape is not None and not (isinstance(noise_shape[0], int) and noise_shape[0] == 1):
            noise_shape = (None, *noise_shape[1:])
        dropped = own(_padded(inputs, *rows), rate, noise_shape, seed)[rows[1] : rows[1] + tf.shape(inputs)[0]]
        return tf.ensure_shape(dropped, inputs.shape)

    return dropout


def _padded(tensor: Any, count: Any, before: Any) -> Any:
    """The tensor with rows of zeros `before` it, and after it up to `count` rows."""
    after = count - before - tf.shape(tensor)[0]
    return tf.pad(tensor, [[before, after], *[[0, 0]] * (tensor.shape.rank - 1)])


def _drawn(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def drawn(shape: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = tf.unstack(shape) if tf.is_tensor(shape) else list(shape)
        part = _working_part
        rows = None if part is None or not sizes else part.scaled(sizes[0])
        if rows is None:
            return own(shape, *args, **kwargs)
        return own((rows[0], *sizes[1:]), *args, **kwargs)[rows[1] : rows[1] + sizes[0]]

    return drawn


def _adds_up(metric: Any, args: Any, kwargs: Any) -> bool:
    """Whether the updates of a metric by parts of a batch add up to that by the batch."""
    if not isinstance(metric, keras_metrics.MeanMetricWrapper):
        return type(metric).__module__.startswith("keras.")
    if not getattr(metric._fn, "__module__", "").startswith("keras."):
        return False
    given = dict(zip(("y_true", "y_pred"), args, strict=False)) | kwargs
    given = {name: tf.cast(given[name], metric.dtype) for name in ("y_true", "y_pred")}
    # One number for all samples, if they are numbers themselves.
    return bool(tf.convert_to_tensor(metric._fn(**given, **metric._fn_kwargs)).shape.rank)


@contextlib.contextmanager
def _watched(model: Any, part: _Part) -> Iterator[None]:
    """Has the part do the updates and results of a model's metrics."""
    watched: list[Metric] = flat_metrics(model)
    for metric in watched:
        update, result = metric.update_state, metric.result
        vars(metric)["update_state"] = functools.wraps(update)(functools.partial(part.update, metric, update))
        vars(metric)["result"] = functools.wraps(result)(functools.partial(part.result, result))
    try:
        yield
    finally:
        for metric in watched:
            del vars(metric)["update_state"], vars(metric)["result"]


def flat_metrics(model: Any) -> list[Metric]:
    """All metrics that a step may update, those inside of Keras' lists instead of the lists."""
    found = [*model.metrics, *(metric for layer in model._flatten_layers() for metric in layer._metrics)]
    flat = [inner for metric in found for inner in getattr(metric, "metrics", [metric])]
    return list({id(metric): metric for metric in flat}.values())
