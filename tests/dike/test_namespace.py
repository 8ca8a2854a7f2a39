"""`import dike as tf` is `import tensorflow as tf`, in every spelling."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dike
from tests import warm
from tests.warm import WarmTensorFlow

pytestmark = pytest.mark.tensorflow


def python(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a Python of its own."""
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


SPELLINGS = """
import pickle, sys
import dike as tf
import dike.compat.v1 as v1
import dike.keras
import dike.nn
from dike.compat import v1 as from_compat
from dike.compat.v1 import train
from dike.keras import layers
from dike.keras.layers import Dense
from dike.nn import conv2d
from dike.python.framework import ops
import dike.profile
from dike import exceptions
import tensorflow as real
import tensorflow.compat.v1 as real_v1
from tensorflow.python.framework import ops as real_ops

assert tf.constant is real.constant and tf.Variable is real.Variable
assert dike.keras is real.keras and dike.nn is real.nn and tf.keras is real.keras
assert v1 is real_v1 and from_compat is real_v1 and tf.compat.v1 is real_v1
assert train.MonitoredTrainingSession is real_v1.train.MonitoredTrainingSession
assert layers.Conv2D is real.keras.layers.Conv2D and Dense is real.keras.layers.Dense
assert conv2d is real.nn.conv2d
assert ops is real_ops
assert dike.__version__ == real.__version__
assert set(dir(real)) == set(dir(dike))

star = {}
exec("from dike import *", star)
assert star["constant"] is real.constant and star["keras"] is real.keras and "dike" not in star
exec("from dike.keras.layers import *", star)
assert star["Dense"] is Dense

layer = Dense(3, name="small")
assert isinstance(layer, real.keras.layers.Layer) and type(layer).__module__.startswith("keras.")
assert pickle.loads(pickle.dumps(Dense)) is real.keras.layers.Dense
assert pickle.loads(pickle.dumps(tf.float32)) is real.float32

# TensorFlow's modules stay what they were; ours win where both could be meant.
assert (real.__name__, real.__spec__.name, real_v1.__name__) == ("tensorflow", "tensorflow", "tensorflow.compat.v1")
assert dike.profile.ModelProfile and exceptions.DikeError
assert not [name for name in vars(dike) if type(vars(dike)[name]).__name__ == "_Proxy"]

for wrong in ("dike.nothing", "dike.keras.nothing", "dike.constant"):
    try:
        __import__(wrong)
    except ModuleNotFoundError:
        continue
    raise AssertionError(wrong)
try:
    dike.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
dike.mine = 1
assert dike.mine == 1 and not hasattr(real, "mine")
"""


def test_all_spellings_give_tensorflows_own_objects() -> None:
    done = python(SPELLINGS)
    assert done.returncode == 0, done.stderr


def test_dike_alone_does_not_import_tensorflow() -> None:
    code = """
import sys
import dike, dike.exceptions, dike.profile, dike.task, dike.interception, dike.capture
from dike import profile
import inspect, doctest
assert not hasattr(dike, "__wrapped__") and not hasattr(dike, "_mock_name")
inspect.unwrap(dike)
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_no_module_of_ours_hides_a_name_of_tensorflow() -> None:
    own = {module.name for module in pkgutil.iter_modules(dike.__path__)}
    assert {"profile", "capture", "namespace"} <= own
    code = "import tensorflow as tf; from tensorflow.compat import v1; print(*dir(tf), *dir(v1))"
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "0"}
    done = warm.run([sys.executable, "-c", code], timeout=120, env=environment, process_class=WarmTensorFlow)
    assert done.returncode == 0, done.stderr
    names = set(done.stdout.split())
    assert "keras" in names
    assert not own & names


def test_settings_made_before_the_import_still_work() -> None:
    code = "import os, dike as tf; os.environ['TF_USE_LEGACY_KERAS'] = '1'; print(tf.keras.Model.__module__)"
    done = python(code)
    assert done.stdout.startswith("tf_keras"), done.stderr


LOCAL = """
from pathlib import Path
import dike as tf
import numpy as np
from tensorflow.python.client import session
fit = tf.keras.Model.fit
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(np.zeros((8, 2)), np.zeros(8), epochs=2, verbose=0)
assert len(history.history["loss"]) == 2
for function in (fit, session.BaseSession.run, tf.compat.v1.train.Optimizer.minimize):
    assert not Path(function.__code__.co_filename).is_relative_to(Path(tf.__file__).parent), function
print("trained")
"""


def test_without_a_run_around_it_training_is_local_and_nothing_is_wrapped() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DIKE_")}
    done = warm.run([sys.executable, "-c", LOCAL], timeout=120, env=environment, process_class=WarmTensorFlow)
    assert done.stdout == "trained\n", done.stderr


HANDED_OVER = """
import sys
import dike as tf
import numpy as np
model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
sys.argv.append("--changed")
print("before")
model.fit(np.zeros((8, 2 * UNITS)), np.zeros(8), verbose=0)
print("after")
"""


@pytest.fixture
def stub_command(tmp_path: Path) -> Path:
    """A package in the place of `framework` that shows how it was called: what follows needs a whole Mesos."""
    package = tmp_path / "stub" / "framework"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, pathlib, sys\n"
        "profile = pathlib.Path(sys.argv[sys.argv.index('--handed-over') + 1])\n"
        "parameters = json.loads(profile.read_text())['parameters']\n"
        "profile.unlink()\n"
        "print(json.dumps([a for a in sys.argv[1:] if a != str(profile)] + [parameters]))\n"
    )
    return package.parent


def run_with_master(tmp_path: Path, stub: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(text)
    variables = {**os.environ, "DIKE_MASTER": "host:5050", "PYTHONPATH": str(stub), **environment}
    command = [sys.executable, script, "--epochs", "3"]
    return warm.run(command, timeout=120, env=variables, process_class=WarmTensorFlow)


def test_with_a_master_plain_python_hands_over_to_the_command(tmp_path: Path, stub_command: Path) -> None:
    done = run_with_master(tmp_path, stub_command, HANDED_OVER.replace("UNITS", "2"))
    before, command = done.stdout.splitlines()
    assert before == "before", done.stderr
    expected = ["run", "--master", "host:5050", "--handed-over", str(tmp_path / "train.py"), "--epochs", "3", 5]
    assert command == str(expected).replace("'", '"')
    assert done.returncode == 0


def test_with_a_master_a_script_whose_first_fit_trains_nothing_is_handed_over_too(
    tmp_path: Path, stub_command: Path
) -> None:
    text = HANDED_OVER.replace("UNITS", "2").replace("model.compile", "model.trainable = False\nmodel.compile")
    done = run_with_master(tmp_path, stub_command, text)
    before, command = done.stdout.splitlines()
    assert before == "before", done.stderr
    assert json.loads(command)[-1] == 0  # parameters: it runs as one plain task
    assert done.returncode == 0


def test_in_a_task_nothing_of_capture_is_installed(tmp_path: Path, stub_command: Path) -> None:
    done = run_with_master(tmp_path, stub_command, HANDED_OVER.replace("UNITS", "2"), DIKE_TASK="{}")
    assert done.stdout == "before\nafter\n", done.stderr
