"""`load_profile` and `dike profile`: from a model's name, a script or a file to its numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dike.exceptions import BadInputError
from dike.profile import Api, ModelProfile, VariableSpec
from framework.project import tensorflow_noise
from framework.project.profiling import load_profile
from tests.waiting import is_alive, wait_until
from tests.warm import WarmTensorFlow

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
PROFILE = ModelProfile(
    name="small",
    api=Api.KERAS,
    parameters=6,
    parameter_bytes=24,
    variables=(VariableSpec("w", (2, 3), "float32", 24),),
    flops_forward_per_sample=12e6,
    flops_step_per_sample=36e6,
    longest_path_flops=10e6,
    batch_size=8,
    layers={"Dense": 1},
    uncounted_ops={"Strange": 2},
)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are read in forks of a process that has imported TensorFlow, as those of jobs are."""
    monkeypatch.setattr("framework.project.profiling.subprocess.Popen", WarmTensorFlow)


def dike_profile(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "framework", "profile", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, cwd=cwd)


@pytest.mark.tensorflow
def test_a_script_among_files_named_like_our_packages(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("solver", "executor", "framework"):
        (tmp_path / f"{name}.py").write_text(f"VALUE = {name!r}\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "os.environ['TF_USE_LEGACY_KERAS'] = '1'\n"
        "import solver, executor, framework\n"
        "print(solver.VALUE, executor.VALUE, framework.VALUE, os.environ.get('DIKE_MASTER'), flush=True)\n"
        "import dike as tf\n"
        "model = tf.keras.Sequential([tf.keras.layers.Dense(3)])\n"
        "model.compile('sgd', 'mse')\n"
        "model.fit(tf.zeros((8, 5)), tf.zeros((8, 3)), batch_size=4)\n"
    )
    profile = load_profile(str(script), timeout_s=200)
    assert (profile.api, profile.batch_size, profile.parameters) == (Api.TF_KERAS, 4, 18)
    prints = capfd.readouterr()
    assert "solver executor framework None" in prints.err
    assert not prints.out, "standard output may be wanted for JSON"


@pytest.mark.tensorflow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("example", "api", "batch_size", "slots"),
    [
        ("digits_cnn.py", Api.KERAS, 48, 1),
        ("digits_v1.py", Api.GRAPH, 48, 2),
        ("plain_tensorflow.py", Api.KERAS, 32, 1),
    ],
)
def test_examples(example: str, api: Api, batch_size: int, slots: int) -> None:
    arguments = {"digits_cnn.py": ["--batch-size", "48", "--optimizer", "sgd"], "digits_v1.py": ["--batch-size", "48"]}
    profile = load_profile(str(EXAMPLES / example), arguments.get(example, ()), timeout_s=200)
    assert (profile.name, profile.api, profile.batch_size) == (example, api, batch_size)
    assert profile.optimizer_slots == slots
    assert profile.flops_step_per_sample > 2 * profile.flops_forward_per_sample > 0
    assert 0.5 < profile.longest_path_share <= 1
    assert not profile.uncounted_ops


def test_a_saved_profile_is_read_back(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(PROFILE.dumps())
    assert load_profile(str(saved)) == PROFILE
    assert load_profile(str(saved), batch_size=64) == PROFILE.with_batch_size(64)


def test_a_script_that_never_comes_to_its_training(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time\nwhile True:\n    time.sleep(0.1)\n")
    with pytest.raises(BadInputError, match=r"slow\.py did not begin to train within 1 s\."):
        load_profile(str(script), timeout_s=1)


def test_processes_that_a_script_started_end_with_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    )
    with pytest.raises(BadInputError, match="ended without a training session"):
        load_profile(str(script), timeout_s=60)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(pid), "the end of a killed process")


BAD = [
    ("missing.py", None, r"There is no file .*missing\.py; give a training script"),
    ("folder", "", r"is a folder; give the training script in it"),
    ("binary.py", b"\xff\xfe\x00", r"is not UTF-8 text"),
    ("syntax.py", b"print('x'\n", r"syntax\.py has a syntax error in line 1"),
    ("dies.py", b"import os\nos._exit(7)\n", r"dies\.py ended its own process .*exit code 7"),
    (
        "raises.py",
        b"raise ValueError('no\\ndata')\n",
        r"raises\.py failed \(ValueError: no\) before its training began; see",
    ),
    ("empty.py", b"", r"empty\.py ended without a training session or a call of fit"),
    ("broken.json", b"{", r"broken\.json: A saved model profile must be JSON"),
    ("other.json", b'{"name": "x"}', r"other\.json: This is not a model profile of Dike"),
]


@pytest.mark.parametrize(("name", "content", "sentence"), BAD, ids=[name for name, _, _ in BAD])
def test_bad_input_is_one_sentence(tmp_path: Path, name: str, content: bytes | str | None, sentence: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(BadInputError, match=sentence) as raised:
        load_profile(str(path), timeout_s=60)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_script(tmp_path: Path) -> None:
    script = tmp_path / "secret.py"
    script.touch(mode=0)
    with pytest.raises(BadInputError, match="cannot be read: Permission denied"):
        load_profile(str(script))


def test_batch_size_must_be_above_zero() -> None:
    with pytest.raises(BadInputError, match="at least 1, not 0"):
        load_profile("keras:ResNet50", batch_size=0)


@pytest.mark.tensorflow
@pytest.mark.usefixtures("forked")
def test_unknown_keras_model_suggests_the_nearest() -> None:
    with pytest.raises(BadInputError, match=r"no model 'keras:resnet5'.*did you mean 'keras:ResNet50'\?"):
        load_profile("keras:resnet5", timeout_s=200)


def test_command_prints_json_alone_and_warns_of_what_it_could_not_count(tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text(PROFILE.dumps())
    done = dike_profile("saved.json", "--format", "json", "--batch-size", "16", "-o", "copy.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    keys = {"parameters", "parameter_bytes", "flops_forward_per_sample", "flops_step_per_sample", "layers"}
    assert keys | {"longest_path_flops", "batch_size", "uncounted_ops"} <= set(printed)
    assert printed["batch_size"] == 16
    assert "not counted: Strange x 2." in done.stderr
    assert ModelProfile.loads((tmp_path / "copy.json").read_text()) == PROFILE.with_batch_size(16)


def test_command_prints_a_table(tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text(PROFILE.dumps())
    done = dike_profile("saved.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("small", "keras", "12", "36", "83%", "Strange"):
        assert text in done.stdout


@pytest.mark.parametrize("arguments", [("missing.py",), ("saved.json", "-o", "no/such/folder.json")])
def test_command_ends_bad_input_with_2_and_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "saved.json").write_text(PROFILE.dumps(), encoding="utf-8")
    done = dike_profile(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("dike: ")


def test_the_command_itself_never_imports_tensorflow() -> None:
    code = (
        "import sys, framework.cli, framework.project.profiling\n"
        "assert not {'tensorflow', 'keras', 'tf_keras'} & set(sys.modules), 'imported'"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_only_tensorflows_own_noise_is_dropped() -> None:
    noise = b"I0000 00:00:1795220120.584404    1043 cudart_stub.cc:31] Could not find cuda drivers on your machine\n"
    assert tensorflow_noise.is_noise(noise)
    assert tensorflow_noise.is_noise(
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    )
    for line in (b"WARNING: the data is gone\n", b"I0000 lines\n", b"step 50: loss 0.1\n", b""):
        assert not tensorflow_noise.is_noise(line)
