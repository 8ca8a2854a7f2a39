"""Checks that public scripts do the same under Dike as under `python`.

The scripts are not part of Dike. A copy of each, with its files, is in a folder of its name in one of the `--scripts`
folders. `KERAS_HOME` names a folder with `datasets/mnist.npz`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TITLE = "Public scripts"
RUN_TIMEOUT_S = 900.0
TERMINATE_TIMEOUT_S = 60.0
"""Time for Dike to clean up after SIGTERM."""
TOLERANCE = 0.1
"""Maximum relative difference of results of scripts that are not deterministic."""
SHARED_TOLERANCE = 0.01
"""The same for scripts whose batches two workers share: rounding differs, as between two numbers of threads."""
METRICS = r"\b(?:loss|accuracy|acc|auc|cost|mae)\w*\b.*\d"
"""Default pattern of the line of a result."""
KERAS = "keras-team/keras v3.0.0 : examples/keras_io/"
GUIDES = "keras-team/keras : guides/"
EXAMPLES = "aymericdamien/TensorFlow-Examples : examples/3_NeuralNetworks/"
TUTORIALS = "MorvanZhou/Tensorflow-Tutorial : tutorial-contents/"
OWN = "written for this page"

Changes = tuple[tuple[str, str], ...]
SEEDED: Changes = ((r"(?m)^import keras$", "import keras; keras.utils.set_random_seed(1)"),)
"""Makes runs deterministic."""
SEEDED_LAYERS: Changes = (("(?m)^L=tf.keras.layers$", "tf.keras.utils.set_random_seed(1); L=tf.keras.layers"),)
OLD_TENSORFLOW: Changes = (
    (
        "import tensorflow as tf",
        "import tensorflow.compat.v1 as tf; tf.disable_v2_behavior(); tf.set_random_seed(1)",
    ),
    ("from tensorflow.examples.tutorials.mnist import", "import"),
)
"""Ports code from TensorFlow 1; a module `input_data` is beside the copy."""
FEWER_DIGITS: Changes = (("60000, 784", "-1, 784"), ("10000, 784", "-1, 784"), (r"\b10000\b", "300"))
"""For a `mnist.npz` of 1,500 images for training."""


class Expected(enum.Enum):
    SAME = "same"
    """It prints and writes the same as under `python`, or fails with the same error."""
    REFUSED = "refused"
    """Dike explains in one sentence, before any training, why it does not run it."""


@dataclass(frozen=True)
class Script:
    """A script and how it is run.

    Attributes:
        source: repository and path.
        path: path in its folder; a module's name if `is_module`.
        expected: the correct behaviour.
        message: pattern of the sentence of a refusal.
        result: pattern of the compared line; the last match counts.
        is_exact: whether it is deterministic; then every digit must be the same.
        changes: (pattern, replacement) for scripts that cannot be run unchanged.
        parameter: a flag to search over, as in `dike tune --param`; the script's result is then the metric to minimise.
        needs_cluster: whether it cannot be run by `python` alone.
        writes: files that it writes to its working folder.
        shares_batches: whether several workers can share its batches, so that `--strategy allreduce` gives the same.
    """

    name: str
    source: str
    path: str
    arguments: tuple[str, ...] = ()
    expected: Expected = Expected.SAME
    message: str = ""
    result: str = METRICS
    is_exact: bool = True
    changes: Changes = ()
    parameter: str = ""
    needs_cluster: bool = False
    is_module: bool = False
    writes: tuple[str, ...] = ()
    shares_batches: bool = False


SCRIPTS = (
    Script(
        "mnist_convnet",
        KERAS + "vision/",
        "mnist_convnet.py",
        result="^Test accuracy",
        changes=SEEDED,
        shares_batches=True,
    ),
    Script(
        "vae",
        KERAS + "tensorflow/generative/",
        "vae.py",
        # The order in which threads sum decides about the last digit.
        is_exact=False,
        changes=(*SEEDED, ("epochs=30", "epochs=3"), ("n=30", "n=3")),
    ),
    Script(
        "trainer_pattern",
        KERAS + "tensorflow/keras_recipes/",
        "trainer_pattern.py",
        result="val_sparse_categorical_accuracy",
        changes=SEEDED,
        shares_batches=True,
    ),
    Script(
        "endpoint_layer_pattern",
        KERAS + "tensorflow/keras_recipes/",
        "endpoint_layer_pattern.py",
        changes=SEEDED,
        shares_batches=True,
    ),
    Script(
        "addition_rnn",
        KERAS + "nlp/",
        "addition_rnn.py",
        changes=(*SEEDED, ("TRAINING_SIZE = 50000", "TRAINING_SIZE = 3000"), ("epochs = 30", "epochs = 4")),
        shares_batches=True,
    ),
    Script(
        "training_with_built_in_methods",
        GUIDES,
        "training_with_built_in_methods.py",
        changes=(
            *SEEDED,
            *FEWER_DIGITS,
            ("steps_per_epoch=100", "steps_per_epoch=10"),
            ("(?m)^import torch$", ""),
            (r"(?s)class ExampleTorchDataset.*?evaluate\(val_dataloader\)", ""),
            (r"(?s)keras\.utils\.plot_model\(.*?\n\)", ""),
        ),
    ),
    Script(
        "writing_a_custom_training_loop_in_tensorflow",
        GUIDES,
        "writing_a_custom_training_loop_in_tensorflow.py",
        expected=Expected.REFUSED,
        result=r"^Training loss",
        changes=FEWER_DIGITS[2:],
    ),
    Script(
        "distributed_training_with_tensorflow",
        GUIDES,
        "distributed_training_with_tensorflow.py",
        expected=Expected.REFUSED,
        changes=FEWER_DIGITS[2:],
    ),
    Script(
        "mnist_keras_distributed",
        "tony-framework/TonY : tony-examples/mnist-tensorflow/",
        "mnist_keras_distributed.py",
        ("--working-dir", "work"),
    ),
    Script(
        "mnist_estimator_distributed",
        "tony-framework/TonY : tony-examples/mnist-tensorflow/",
        "mnist_estimator_distributed.py",
        expected=Expected.REFUSED,
        message=r"2\.16",
    ),
    Script(
        "hogwild",
        "tmulc18/Distributed-TensorFlow-Guide : Hogwild/",
        "Hogwild.py",
        ("--job_name", "worker"),
        Expected.REFUSED,
        "MonitoredTrainingSession",
        r"^\[",
        changes=OLD_TENSORFLOW[:1],
        needs_cluster=True,
    ),
    Script(
        "ssgd",
        "tmulc18/Distributed-TensorFlow-Guide : Synchronous-SGD/",
        "ssgd.py",
        ("--job_name", "worker"),
        result=r"closed cleanly$",
        changes=OLD_TENSORFLOW[:1],
        needs_cluster=True,
    ),
    *(
        Script(name, EXAMPLES, f"{name}.py", result=r"Accuracy: \S+$", changes=OLD_TENSORFLOW)
        for name in ("multilayer_perceptron", "neural_network_raw", "convolutional_network_raw")
    ),
    *(
        Script(
            name,
            TUTORIALS,
            f"{name}.py",
            expected=Expected.REFUSED,
            message="TF_USE_LEGACY_KERAS|keras.layers",
            changes=OLD_TENSORFLOW[:1],
        )
        for name in ("302_simple_classification", "306_dataset")
    ),
    Script(
        "mnist_acgan",
        "keras-team/keras 2.3.1 : examples/",
        "mnist_acgan.py",
        expected=Expected.REFUSED,
        message="train_on_batch",
        result=r"^discriminator \(test\)",
        changes=(
            (r"(?m)^from keras(?!\.datasets)", "from tf_keras"),
            (r"layers\.(advanced_activations|convolutional) import", "layers import"),
            (r"utils\.generic_utils", "utils"),
            (r"\)\(image_class\)", ")(image_class)[:, 0]"),
            ("epochs = 100", "epochs = 1"),
        ),
    ),
    Script("lstm_stateful", "keras-team/keras 2.3.1 : examples/", "lstm_stateful.py"),
    Script(
        "cloudml_census",
        "GoogleCloudPlatform/cloudml-samples : census/tf-keras/",
        "trainer.task",
        ("--job-dir", "job"),
        is_module=True,
    ),
    Script("tensorflowonspark", "yahoo/TensorFlowOnSpark : examples/mnist/keras/", "mnist_tf.py"),
    Script("ecosystem_mnist", "tensorflow/ecosystem : docker/", "mnist.py", ("--data_dir=.", "--train_dir=train")),
    Script(
        "tfkeras_simple",
        "optuna/optuna-examples : tfkeras/",
        "tfkeras_simple.py",
        result=r"^ +Value:",
        is_exact=False,
        changes=(("n_trials=100", "n_trials=3"),),
    ),
    Script("absl", OWN, "t.py", ("--epochs", "2"), result="^final", parameter="lr=0.1,0.01"),
    Script("auc", OWN, "t.py", result="^HIST", shares_batches=True),
    Script(
        "callbacks", OWN, "t.py", result="^best eval", writes=("best.keras", "log.csv", "final.keras", "saved_model")
    ),
    Script("click", OWN, "t.py", ("--epochs", "2", "a"), result="^final", parameter="lr=0.1,0.01"),
    Script("coord", OWN, "t.py", result="^epoch", needs_cluster=True),
    Script("crash", OWN, "t.py"),
    Script("env", OWN, "env.py", writes=("out.keras", "results.csv", "sub/log.txt")),
    Script("exit3", OWN, "t.py"),
    Script("frozen", OWN, "t.py", changes=SEEDED_LAYERS, shares_batches=True),
    Script("gen", OWN, "t.py", result=r"^p ", shares_batches=True),
    Script("kfold", OWN, "t.py", result="^mean", shares_batches=True),
    Script("lstm", OWN, "t.py", changes=SEEDED_LAYERS, shares_batches=True),
    Script("multi", OWN, "t.py", result="^eval"),
    Script("names", OWN, "train.py", result="^own modules"),
    Script("print", OWN, "t.py", result="^THE END"),
    Script("root", OWN, "src/train.py", result="^ok", writes=("models_out.keras",)),
    Script("tape", OWN, "t.py", expected=Expected.REFUSED, message="apply_gradients", result="^step"),
    Script("text", OWN, "t.py", result=r"^p "),
)


@dataclass(frozen=True)
class Run:
    """The outcome of a run.

    Attributes:
        code: exit status; None after a timeout.
        result: the line of the result, or empty.
        error: the last line that describes an error.
        missing: expected files that were not written.
    """

    code: int | None
    output: str
    result: str
    error: str
    missing: tuple[str, ...]
    seconds: float


def measure(folders: Sequence[Path], only: Sequence[str] = ()) -> Iterator[str]:
    """Runs the scripts, or only those named by `only`; reports a row for each."""
    yield (
        "Each script is run by `python` and by `dike run --strategy ps --max-workers 1`, in a new copy of its "
        "folder; where it has flags, also by `dike tune`, each of whose trials is compared with a run by `python` "
        "with the same flags. A result is the last line of its kind that the script prints. It is the same if it "
        "has the same digits, or, "
        f"where the script has other numbers in every run, (≈), if no number differs by more than {TOLERANCE:.0%}. "
        "An error of the script's own is the same if the run ends with the same message; `dike run` then ends with "
        "status 1, or with 2 where the script came to it before anything was launched. A refusal is a sentence of "
        "Dike's before the script has trained."
    )
    yield ""
    yield "| script | repository : path | `python` | under Dike | verdict | seconds |"
    yield "|---|---|---|---|---|---|"
    chosen = [script for script in SCRIPTS if not only or script.name in only]
    right = rows = 0
    for script in chosen:
        for row in _rows(script, folders):
            print(row.line, file=sys.stderr, flush=True)
            yield row.line
            rows += 1
            right += row.is_right
    yield ""
    yield f"{right} of {rows} are as wanted."
    yield ""
    yield "Replacements in copies that cannot be run unchanged:"
    yield ""
    for script in chosen:
        if script.changes:
            replaced = "; ".join(f"`{old}` by {f'`{new}`' if new else 'nothing'}" for old, new in script.changes)
            yield f"- {script.name}: {replaced}"


@dataclass(frozen=True)
class _Row:
    line: str
    is_right: bool


def _rows(script: Script, folders: Sequence[Path]) -> Iterator[_Row]:
    where = script.source if script.source == OWN else f"{script.source}{script.path}"
    origin = next((folder / script.name for folder in folders if (folder / script.name).is_dir()), None)
    if origin is None:
        yield _Row(f"| {script.name} | {where} | - | - | not run: there is no copy | - |", False)
        return
    bare = None if script.needs_cluster else _run(script, origin, _python(script))
    found = _run(script, origin, _dike(script))
    verdict, is_right = _judge(script, bare, found)
    yield _row(script.name, where, bare, found, verdict, is_right)
    if script.shares_batches:
        shared = _run(script, origin, _dike(script, "--strategy", "allreduce", "--min-workers", "2"))
        verdict, is_right = _judge(dataclasses.replace(script, is_exact=False), bare, shared, SHARED_TOLERANCE)
        yield _row(f"{script.name}, 2 workers", where, bare, shared, verdict, is_right)
    if script.parameter:
        yield _compare_search(script, where, origin)


def _row(name: str, where: str, bare: Run | None, found: Run, verdict: str, is_right: bool) -> _Row:
    seconds = f"{bare.seconds if bare else 0:.0f} / {found.seconds:.0f}"
    mark = "" if is_right else "**no**: "
    cells = (name, where, _shown(bare), _shown(found), mark + verdict, seconds)
    return _Row("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |", is_right)


def _shown(run: Run | None) -> str:
    if run is None:
        return "-"
    if run.code == 0:
        return f"`{run.result[:120]}`" if run.result else "no result"
    return f"status {run.code}" if run.code is not None else "not done"


# Runs.

_FRAMEWORK = (sys.executable, "-P", "-m", "framework")


def _python(script: Script) -> list[str]:
    return [sys.executable, *_target(script), *script.arguments]


def _dike(script: Script, *options: str) -> list[str]:
    how = options or ("--strategy", "ps", "--max-workers", "1")
    return [*_FRAMEWORK, "run", *how, *_target(script), *script.arguments]


def _target(script: Script) -> list[str]:
    return ["-m", script.path] if script.is_module else [script.path]


def _run(script: Script, origin: Path, command: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory(prefix=f"{script.name}-") as temporary:
        folder = Path(temporary) / script.name
        _copy(script, origin, folder)
        is_ours = "framework" in command
        code, output, seconds = _run_command(command, folder)
        written = folder.glob("dike-runs/*/outputs") if is_ours else [folder]
        outputs = list(written)
        missing = tuple(name for name in script.writes if not any((one / name).exists() for one in outputs))
        return Run(code, output, _result(script, output), _error(output), missing, seconds)


def _copy(script: Script, origin: Path, folder: Path) -> None:
    shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("__pycache__", "dike-runs"))
    if script.changes:
        path = folder / (f"{script.path.replace('.', '/')}.py" if script.is_module else script.path)
        text = path.read_text(encoding="utf-8")
        for old, new in script.changes:
            text, count = re.subn(old, new, text)
            if not count:
                raise ValueError(f"{path}: there is no '{old}' to replace; is this the right version?")
        path.write_text(text, encoding="utf-8")


def _run_command(command: Sequence[str], folder: Path) -> tuple[int | None, str, float]:
    """Runs a command; returns exit status (None after a timeout), output and seconds."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "MPLBACKEND": "agg"}
    start = time.monotonic()
    with (
        (folder.parent / "output").open("w+", encoding="utf-8", errors="replace") as output,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            code: int | None = process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            try:
                process.wait(TERMINATE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        output.seek(0)
        return code, output.read(), time.monotonic() - start


def _compare_search(script: Script, where: str, origin: Path) -> _Row:
    """Compares the values of a search over one flag with the results of plain runs."""
    name, _, values = script.parameter.partition("=")
    with tempfile.TemporaryDirectory(prefix=f"{script.name}-") as temporary:
        folder = Path(temporary) / script.name
        _copy(script, origin, folder)
        tune = [*_FRAMEWORK, "tune", "--name", "wild", "--param", script.parameter, script.path]
        code, output, seconds = _run_command([*tune, "--", *script.arguments], folder)
        shown = subprocess.run(
            [*_FRAMEWORK, "trials", "wild", "--format", "json"], cwd=folder, capture_output=True, text=True, check=False
        ).stdout
    trials = json.loads(shown or "{}").get("trials", ())
    found = {str(trial["parameters"][name]): trial["value"] for trial in trials}
    bare = {
        value: _run(script, origin, [*_python(script)[:2], f"--{name}", value, *script.arguments])
        for value in values.split(",")
    }
    is_right = code == 0 and all(_numbers(run.result)[-1:] == [found.get(value)] for value, run in bare.items())
    verdict = "same" if is_right else "differs" if code == 0 else f"fails: {_error(output)}"
    bare_seconds = sum(run.seconds for run in bare.values())
    results = ("; ".join(run.result for run in bare.values()), "; ".join(str(value) for value in found.values()))
    cells = (f"{script.name}, `dike tune`", where, *results, "" if is_right else "**no**: ")
    return _Row(f"| {' | '.join(cells)}{verdict} | {bare_seconds:.0f} / {seconds:.0f} |", is_right)


# Verdicts.


def _result(script: Script, output: str) -> str:
    lines = re.sub(r"\x1b\[[0-9;]*m|\x08", "", output).splitlines()
    found = [line for line in lines if re.search(script.result, line) and not line.startswith("dike: ")]
    # Strips Keras' progress bar and times, which vary.
    line = re.sub(r"^\s*\d+/\d+ .*?\d+(us|ms|s)/(step|epoch) - ", "", found[-1]) if found else ""
    return line.strip()


def _error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (own or lines or [""])[-1]


def _judge(script: Script, bare: Run | None, found: Run, tolerance: float = TOLERANCE) -> tuple[str, bool]:
    """Returns the verdict, and whether the behaviour is correct."""
    if found.code is None:
        return f"not done in {RUN_TIMEOUT_S:.0f} s", False
    sentence = _refusal(found)
    if script.expected is Expected.REFUSED:
        if not sentence:
            return f"not refused: {found.error}", False
        if found.result:
            return f"refused after it was trained: {sentence}", False
        is_said = bool(re.search(script.message, sentence))
        return f"refused{'' if is_said else f', but says nothing of {script.message}'}: {sentence}", is_said
    if bare is not None and bare.code != 0:
        is_same = found.code != 0 and bare.error in found.output
        status = "" if found.code == bare.code else f", status {found.code} for {bare.code}"
        return (f"the same error{status}: {bare.error}", True) if is_same else (f"another error: {found.error}", False)
    if found.code != 0:
        return f"refused: {sentence}" if sentence else f"fails: {found.error}", False
    if found.missing:
        return f"{', '.join(found.missing)} lost", False
    if not found.result:
        return "no result", False
    if bare is None:
        return "runs", True
    if found.result == bare.result:
        return "same", True
    if not script.is_exact and _is_near(bare.result, found.result, tolerance):
        return "≈", True
    return "differs", False


def _refusal(run: Run) -> str:
    """Dike's error sentence if it ended with status 2 (bad input); empty otherwise."""
    lines = run.output.strip().splitlines()
    is_said = run.code == 2 and lines and lines[-1].startswith("dike: ")
    return lines[-1].removeprefix("dike: ") if is_said else ""


def _is_near(one: str, other: str, tolerance: float) -> bool:
    mine, others = _numbers(one), _numbers(other)
    return len(mine) == len(others) and all(
        abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in zip(mine, others, strict=True)
    )


def _numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:[eE][-+]?\d+)?", line)]
