"""Saves the random state of a trial's process with its checkpoints, and restores it when the trial resumes.

Covered are Python's `random`, NumPy's global state, generators made with `random.Random`, `numpy.random.default_rng` or
`numpy.random.RandomState`, TensorFlow's eager global seed and global generator, PyTorch's default generators, and
Python functions behind `tf.data` (`dike.data_functions`). A resumed run recognises a generator by the line that made it
and the number that this line had made before.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

from dike.interception import after_import

State = dict[str, Any]

_IGNORED_MODULES = ("tempfile", "tensorflow.python.eager.context")
"""Modules whose generators are ignored: the first names files, the second's is part of TensorFlow's own state."""


class _Generators:
    def __init__(self) -> None:
        self._living: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._counts: Counter[str] = Counter()
        self._data_places: set[str] = set()
        self._pending: dict[str, Any] = {}

    def add(self, generator: Any, maker: FrameType | None) -> None:
        """Registers a new generator, and sets its state if a restored state contains one for it."""
        place = f"{maker.f_globals.get('__name__')}:{maker.f_lineno}" if maker is not None else ""
        key = f"{place}:{self._counts[place]}"
        self._counts[place] += 1
        if threading.current_thread() is not threading.main_thread():
            self._data_places.add(place)
        self._living[key] = generator
        if key in self._pending:
            _set_state(generator, self._pending.pop(key))

    def states(self) -> State:
        """States of all generators, including restored ones that the script has not made yet."""
        living = {key: _state_of(generator) for key, generator in sorted(self._living.items())}
        return {**self._pending, **living}

    @property
    def made(self) -> dict[str, int]:
        """Number of generators made by each place in code behind `tf.data`, which runs in other threads.

        In a resumed run, those of earlier epochs are not made again; those of other places are.
        """
        return {place: self._counts[place] for place in sorted(self._data_places)}

    def restore(self, states: State, made: dict[str, int]) -> None:
        """Restores generators now or when they are made; `made` are the counts to continue from."""
        self._data_places.update(made)
        self._counts = Counter({**self._counts, **made})
        self._pending = dict(states)
        for key, generator in sorted(self._living.items()):
            if key in self._pending:
                _set_state(generator, self._pending.pop(key))


_generators = _Generators()
_tensorflow_seeds: list[int] = []


@functools.cache
def install(seed: int) -> None:
    """Tracks all generators made from now on. Must be called before the script runs.

    `seed`, at least 0, seeds everything that the script does not seed, so that a resumed run splits its data as before.
    """
    random.seed(seed)
    _watch_python()
    after_import("numpy.random", functools.partial(_watch_numpy, seed))
    after_import("tensorflow.python.eager.context", functools.partial(_seed_tensorflow, seed))
    after_import("tensorflow.python.ops.script_ops", _watch_functions)


def _watch_functions(module: ModuleType) -> None:
    from dike import data_functions

    data_functions.watch(module)


def is_tensorflow_seeded() -> bool:
    """Whether the script has set TensorFlow's global seed."""
    from tensorflow.python.eager import context

    return context.global_seed() not in (None, *_tensorflow_seeds)


def _seed_tensorflow(seed: int, module: ModuleType) -> None:
    """Without a seed, data would be shuffled in another order in each process."""
    _tensorflow_seeds.append(seed)
    module.set_global_seed(seed)


def _watch_python() -> None:
    initialise = random.Random.__init__

    def own_initialise(self: random.Random, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        maker = sys._getframe(1)
        # Exactly this class: SystemRandom has no state.
        if type(self) is random.Random and maker.f_globals.get("__name__") not in _IGNORED_MODULES:
            _generators.add(self, maker)

    random.Random.__init__ = own_initialise  # type: ignore[method-assign]


def _watch_numpy(own_seed: int, module: ModuleType) -> None:
    """Makes generators instances of subclasses: NumPy's own classes cannot be referenced weakly."""
    numpy_random: Any = module
    seeds = itertools.count(own_seed)
    # Without a seed, all forks of a zygote would share one global state.
    numpy_random.seed(next(seeds) % 2**32)
    make = numpy_random.default_rng
    generator = type("Generator", (numpy_random.Generator,), {"__module__": "numpy.random"})
    original = numpy_random.RandomState

    @functools.wraps(make)
    def default_rng(seed: Any = None) -> Any:
        made = make(next(seeds) if seed is None else seed)
        if made is seed:
            return made
        tracked = generator(made.bit_generator)
        _generators.add(tracked, sys._getframe(1))
        return tracked

    class Meta(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    def initialise(self: Any, seed: Any = None) -> None:
        original.__init__(self, next(seeds) % 2**32 if seed is None else seed)
        _generators.add(self, sys._getframe(1))

    numpy_random.default_rng = default_rng
    numpy_random.RandomState = Meta(
        "RandomState", (original,), {"__init__": initialise, "__module__": "numpy.random", "__doc__": original.__doc__}
    )


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return _python_state(generator)
    if hasattr(generator, "bit_generator"):
        return _encode(generator.bit_generator.state)
    return _encode(generator.get_state(legacy=False))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        _set_python_state(generator, state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = _decode(state)
    else:
        generator.set_state(_decode(state))


def _python_state(generator: random.Random) -> list[Any]:
    version, numbers, gauss = generator.getstate()
    return [version, list(numbers), gauss]


def _set_python_state(generator: random.Random, state: list[Any]) -> None:
    version, numbers, gauss = state
    generator.setstate((version, tuple(numbers), gauss))


def _encode(value: Any) -> Any:
    """Converts NumPy's state dictionaries to JSON values."""
    if isinstance(value, dict):
        return {key: _encode(inner) for key, inner in value.items()}
    return {"dtype": value.dtype.name, "values": value.tolist()} if hasattr(value, "dtype") else value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        import numpy as np

        return np.array(value["values"], dtype=value["dtype"])
    return {key: _decode(inner) for key, inner in value.items()}


def _default_python_state() -> Any:
    return _python_state(random._inst)


def _set_default_python_state(state: Any) -> None:
    _set_python_state(random._inst, state)


def _numpy_state() -> Any:
    return _encode(sys.modules["numpy.random"].get_state(legacy=False))


def _set_numpy_state(state: Any) -> None:
    sys.modules["numpy.random"].set_state(_decode(state))


def _tensorflow_state() -> Any:
    from tensorflow.python.eager import context
    from tensorflow.python.ops import stateful_random_ops

    current = context.context_safe()
    state: State = {}
    if current is not None and current._seed is not None:
        state["eager"] = {"seed": int(current._seed), "operations": _python_state(current._rng)}
    generator = stateful_random_ops.global_generator
    if generator is not None and context.executing_eagerly():
        state["generator"] = {"state": generator.state.numpy().tolist(), "algorithm": int(generator.algorithm)}
    return state


def _set_tensorflow_state(state: Any) -> None:
    from tensorflow.python.eager import context
    from tensorflow.python.ops import stateful_random_ops

    if "eager" in state:
        context.set_global_seed(state["eager"]["seed"])
        _set_python_state(context.context()._rng, state["eager"]["operations"])
    if "generator" in state:
        saved = state["generator"]
        stateful_random_ops.set_global_generator(
            stateful_random_ops.Generator.from_state(saved["state"], saved["algorithm"])
        )


def _torch_state() -> Any:
    torch = sys.modules["torch"]
    tensors = {"cpu": [torch.get_rng_state()]}
    if torch.cuda.is_initialized():
        tensors["cuda"] = torch.cuda.get_rng_state_all()
    return {
        device: [base64.b64encode(bytes(tensor.tolist())).decode("ascii") for tensor in each]
        for device, each in tensors.items()
    }


def _set_torch_state(state: Any) -> None:
    torch = sys.modules["torch"]
    tensors = {
        device: [torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8) for text in each]
        for device, each in state.items()
    }
    torch.set_rng_state(tensors["cpu"][0])
    for index, tensor in enumerate(tensors.get("cuda", ())):
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(tensor, index)


_SOURCES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "random": (_default_python_state, _set_default_python_state),
    "numpy.random": (_numpy_state, _set_numpy_state),
    "tensorflow": (_tensorflow_state, _set_tensorflow_state),
    "torch": (_torch_state, _set_torch_state),
}
"""Module -> functions to read and set its global state."""


def state() -> State:
    return {
        **_global_states(),
        "generators": _generators.states(),
        "made": _generators.made,
        "functions": _functions().state() if "tensorflow" in sys.modules else {},
    }


def has_data_functions() -> bool:
    return "tensorflow" in sys.modules and bool(_functions())


@contextlib.contextmanager
def watch_data_draws() -> Iterator[Callable[[], set[str]]]:
    """Yields a function that returns which global states the Python functions behind the data use.

    A state counts as used if at least half of the calls change it: a shuffle as an epoch starts is a call or two.
    """
    calls = 0
    changed: Counter[str] = Counter()

    @contextlib.contextmanager
    def around_call() -> Iterator[None]:
        nonlocal calls
        before = _global_states()
        try:
            yield
        finally:
            after = _global_states()
            calls += 1
            changed.update(name for name, value in after.items() if before.get(name) != value)

    if "tensorflow" not in sys.modules:
        yield set
        return
    _functions().around_calls = around_call
    try:
        yield lambda: {name for name, count in list(changed.items()) if count > 1 and 2 * count >= calls}
    finally:
        _functions().around_calls = None


def _global_states() -> State:
    return {name: read() for name, (read, _) in _SOURCES.items() if name in sys.modules}


def unsaved() -> list[str]:
    """Names of variables of Python functions behind the data that `state` leaves out."""
    return _functions().unsaved() if "tensorflow" in sys.modules else []


def restore(saved: State) -> None:
    """Restores what `state` returned, now or when the script makes a generator."""
    for name, (_, write) in _SOURCES.items():
        if name in saved and name in sys.modules:
            write(saved[name])
    _generators.restore(saved["generators"], saved["made"])
    if "tensorflow" in sys.modules:
        _functions().restore(saved["functions"])


def _functions() -> Any:
    from dike.data_functions import functions

    return functions
