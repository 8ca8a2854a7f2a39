"""Figures of well-known models, against TensorFlow's own profiler and what was published."""

from __future__ import annotations

import json
import sys

import pytest

from dike.profile import ModelProfile
from tests import warm
from tests.warm import WarmTensorFlow

pytestmark = pytest.mark.tensorflow

# keras.applications name -> trainable parameters, forward GFLOPs (1 multiply-add = 2), longest path's share.
# From TensorFlow's profiler on the frozen inference graph of one sample.
FIGURES = {
    "ResNet50": (25_583_592, 7.755, 0.907),
    "ResNet152": (60_268_520, 22.646, 0.968),
    "InceptionV3": (23_817_352, 11.469, 0.6615),
    "MobileNet": (4_231_976, 1.148, 1.0),
    "VGG16": (138_357_544, 30.96, 1.0),
}

CODE = """
import json, math, sys
import tensorflow as tf
from dike.profiling.graph_flops import FlopsReader
from dike.profiling.keras_application import application_profile
from dike.profiling.keras_profile import forward_cost

print("PROFILE", json.dumps(application_profile("ResNet50", batch_size=4).to_json()))
for name in sys.argv[1:]:
    model = getattr(tf.keras.applications, name)(weights=None)
    reader = FlopsReader(batch_size=4)
    cost = forward_cost(model, tf.TensorSpec((4, *model.input_shape[1:])), reader)
    figures = {
        "name": f"keras:{name}",
        "parameters": sum(math.prod(weight.shape) for weight in model.trainable_weights),
        "flops_forward_per_sample": cost.total / 4,
        "longest_path_share": cost.longest / cost.total,
        "uncounted_ops": reader.uncounted,
    }
    print("PROFILE", json.dumps(figures))
"""


@pytest.fixture(scope="module")
def profiles() -> dict[str, dict[str, object]]:
    command = [sys.executable, "-P", "-c", CODE, *list(FIGURES)[1:]]
    done = warm.run(command, timeout=500, process_class=WarmTensorFlow)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line.removeprefix("PROFILE ")) for line in done.stdout.splitlines() if "PROFILE" in line]
    return {profile["name"]: profile for profile in lines}


@pytest.mark.parametrize("name", FIGURES)
def test_figures(profiles: dict[str, dict[str, object]], name: str) -> None:
    parameters, gflops, share = FIGURES[name]
    profile = profiles[f"keras:{name}"]
    assert profile["parameters"] == parameters
    assert profile["flops_forward_per_sample"] == pytest.approx(gflops * 1e9, rel=0.02)
    assert profile["longest_path_share"] == pytest.approx(share, rel=0.02)
    assert profile["uncounted_ops"] == {}


def test_whole_profile_of_resnet50(profiles: dict[str, dict[str, object]]) -> None:
    profile = ModelProfile.from_json(profiles["keras:ResNet50"])
    assert profile.flops_step_per_sample / profile.flops_forward_per_sample == pytest.approx(3.02, rel=0.02)
    assert profile.parameter_bytes == 4 * profile.parameters
    assert profile.variable_bytes == 4 * 25_636_712
    assert (profile.batch_size, profile.sample_bytes) == (4, 224 * 224 * 3 * 4)
    assert (profile.optimizer, profile.optimizer_slots, profile.dtype) == ("SGD", 0, "float32")
    assert len({variable.name for variable in profile.variables}) == len(profile.variables) == 320


def test_layers_of_resnet50(profiles: dict[str, dict[str, object]]) -> None:
    layers = profiles["keras:ResNet50"]["layers"]
    assert isinstance(layers, dict)
    assert (layers["Conv2D"], layers["BatchNormalization"], layers["Dense"]) == (53, 53, 1)
    assert "InputLayer" not in layers
