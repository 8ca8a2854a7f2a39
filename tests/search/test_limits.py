"""Limits of searches and of their trials: `--budget`, `--max-steps`, `--max-epochs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dike.exceptions import BadInputError
from framework.search.limits import Budget, FailureRule
from framework.search.records import TrialRecord
from tests.running import run_dike

KERAS = """
import keras, numpy as np
keras.utils.set_random_seed(int(dike.params()["seed"]))
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((40, 2), "float32")
history = model.fit(x, x[:, :1], epochs=9, batch_size=10, validation_split=0.25, validation_freq=2, verbose=0)
print("EPOCHS", len(history.history["loss"]))
"""
REPORTS = """
seed = dike.params()["seed"]
done = []
def save(folder): open(f"{folder}/done", "w").write(str(len(done)))
def restore(folder): done.extend(range(int(open(f"{folder}/done").read())))
for step in range(dike.checkpoint(save, restore), 9):
    done.append(step)
    dike.report(3 * (step + 1), loss=seed / (step + 1))
print("END")
"""
SESSION = """
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
seed = dike.params()["seed"]
weight = tf.get_variable("weight", initializer=float(seed))
train = tf.train.GradientDescentOptimizer(0.1).minimize(weight ** 2, tf.train.get_or_create_global_step())
loop = {loop}
print("END", loop)
"""
MONITORED = """0
with tf.train.MonitoredTrainingSession() as session:
    while not session.should_stop() and loop < 30:
        session.run(train)
        loop += 1"""
PLAIN = """0
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    while loop < 30:
        session.run(train)
        loop += 1"""


@pytest.mark.mesos
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("script", "option", "step", "ends"),
    [
        (KERAS, "--max-epochs=2", 6, "EPOCHS 2"),
        (KERAS, "--max-steps=7", 7, "EPOCHS 3"),
        (KERAS, "--max-steps=99", 27, "EPOCHS 9"),
        (REPORTS, "--max-epochs=4", 12, "this trial ends here, after step 12"),
        (REPORTS, "--max-steps=10", 12, "this trial ends here, after step 12"),
        (SESSION.format(loop=MONITORED), "--max-steps=5", 5, "END 5"),
        (SESSION.format(loop=PLAIN), "--max-steps=5", 5, "this trial ends here, after step 5"),
    ],
    ids=["epochs", "steps", "unlimited", "reports", "reported-steps", "monitored", "session"],
)
def test_a_trial_ends_at_its_limit(tmp_path: Path, script: str, option: str, step: int, ends: str) -> None:
    (tmp_path / "train.py").write_text(f"import dike\n{script}")
    options = ("--name", "limited", "--slot-mem", "256", "--format", "json", "--metric", "loss")
    done = run_dike("tune", "train.py", "--param", "seed=1", option, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [trial] = json.loads(done.stdout)["trials"]
    assert (trial["state"], trial["step"]) == ("finished", step)
    assert trial["checkpoint"].endswith(f"-step-{step}")
    output = run_dike("logs", "limited", "--trial", "0", cwd=tmp_path).stdout
    assert ends in output
    assert ("END" in output) == ends.startswith("END")


@pytest.mark.parametrize(
    ("text", "budget"),
    [("40gpuh", Budget(40.0, "gpu")), (" 1.5 CPUh", Budget(1.5, "cpu")), (".25cpuh", Budget(0.25, "cpu"))],
)
def test_a_budget_is_hours_of_gpus_or_cpus(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize("text", ["40", "40h", "0gpuh", "-1gpuh", "1e3gpuh", "gpuh", "nancpuh"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(BadInputError, match=r"--budget is '.*'; write hours of GPUs or CPUs, such as 40gpuh"):
        Budget.parse(text)


def test_a_budget_counts_the_time_in_slots() -> None:
    trials: list[Any] = [TrialRecord(number, {}, slot_s=1800.0) for number in range(2)]
    assert Budget(1.0, "cpu").is_used_up(trials, 0.0, gpus=0, cpus=1.0)
    assert not Budget(1.1, "cpu").is_used_up(trials, 0.0, gpus=0, cpus=1.0)
    assert Budget(4.0, "gpu").is_used_up(trials, 0.0, gpus=4, cpus=1.0)
    with pytest.raises(BadInputError, match="have no GPU"):
        Budget(1.0, "gpu").is_used_up(trials, 0.0, gpus=0, cpus=1.0)


def test_failures_have_rules() -> None:
    assert FailureRule.parse("continue") == FailureRule()
    assert FailureRule.parse("abort, retry=0") == FailureRule(aborts=True, retries=0)
    assert FailureRule.parse("larger-gpu").needs_larger_gpu
    assert [FailureRule.parse(text).max_failures for text in ("continue", "retry=0", "retry=7")] == [3, 1, 8]


@pytest.mark.parametrize("text", ["", "retry", "retry=-1", "retry=x", "stop", "abort=1"])
def test_what_is_no_rule_of_failures(text: str) -> None:
    with pytest.raises(BadInputError, match="write continue, abort, retry=N or larger-gpu"):
        FailureRule.parse(text)
