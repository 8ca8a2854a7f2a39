"""`dike run` from outside: a real Mesos, real TensorFlow processes, the command as a user types it."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from solver import Plan
from tests.running import DEADLINE_S, Running, run_dike
from tests.task_processes import executors, roles
from tests.waiting import wait_until

pytestmark = [pytest.mark.mesos, pytest.mark.tensorflow, pytest.mark.timeout(600)]

AGENT = "cpus:2;mem:6144;disk:4096"
V1_SCRIPT = """
import os
import sys
import time
import numpy as np
import dike.compat.v1 as tf

tf.disable_v2_behavior()
steps = int(sys.argv[1])
# Who is only there to be ended leaves the machine to the others.
pause_s = 0.02 if steps > 1000 else 0.0
rng = np.random.RandomState(0)
data = rng.rand(256, 8).astype('f')
goal = data @ rng.rand(8, 1).astype('f')
x = tf.placeholder(tf.float32, [None, 8])
y = tf.placeholder(tf.float32, [None, 1])
w = tf.get_variable('w', [8, 1])
b = tf.get_variable('b', [1], initializer=tf.zeros_initializer())
loss = tf.reduce_mean(tf.square(tf.matmul(x, w) + b - y))
step = tf.train.get_or_create_global_step()
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
value = None
hooks = [tf.train.StopAtStepHook(last_step=steps)]
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    while not (session.should_stop() or any(map(os.path.exists, sys.argv[2:]))):
        value, now, _ = session.run([loss, step, train], {x: data[:32], y: goal[:32]})
        time.sleep(pause_s)
print('last loss', value, flush=True)
"""

PACKAGE_SCRIPT = """
import os
import sys
import numpy as np
import tensorflow.compat.v1 as tf
import helpers

from .data import rows

tf.disable_v2_behavior()
assert helpers.__file__ == os.path.abspath('lib/helpers.py')
assert os.environ['MY_TOKEN'] == 'secret', 'the variable has another value'
with open('notes.txt', 'a') as notes:
    notes.write('attempt\\n')
attempts = len(open('notes.txt').readlines())
data = np.array(rows(), 'f')
w = tf.get_variable('w', [data.shape[1], 1])
loss = tf.reduce_mean(tf.square(tf.matmul(tf.constant(data), w) - 1.0))
step = tf.train.get_or_create_global_step()
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
with tf.train.MonitoredTrainingSession(hooks=[tf.train.StopAtStepHook(last_step=int(sys.argv[1]))]) as session:
    while not session.should_stop():
        session.run([loss, train])
os.makedirs('results', exist_ok=True)
np.save('results/weights.npy', np.zeros(3))
with open(os.path.join(os.environ['DIKE_OUTPUT_DIR'], 'large'), 'wb') as file:
    file.write(bytes(100_000))
if attempts == 1:
    raise ConnectionError('this may pass')
print('the end of attempt', attempts, flush=True)
"""

OUTSIDE_SCRIPT = """
import sys
import keras
import numpy as np

width = int(open(sys.argv[1]).read())
print('width', width, flush=True)
model = keras.Sequential([keras.layers.Dense(width), keras.layers.Dense(1)])
model.compile('sgd', 'mse')
model.fit(np.zeros((64, 4), 'f'), np.zeros((64, 1), 'f'), epochs=1, verbose=0)
print('fit', model.count_params(), flush=True)
"""

Result = dict[str, Any]


@pytest.fixture(scope="module")
def mesos() -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster([AgentSpec(resources=AGENT)] * 2) as cluster:
        cluster.wait_for_agents(60)
        yield cluster


@pytest.fixture(autouse=True)
def runs_end() -> Iterator[None]:
    yield
    Running.end_all()


def test_a_model_that_has_changed_behind_the_scripts_back_is_planned_again(
    mesos: EmbeddedCluster, tmp_path: Path
) -> None:
    width, folder = tmp_path / "width", tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(OUTSIDE_SCRIPT)

    def run() -> tuple[list[str], str]:
        ended = run_dike(
            "run", "--master", mesos.master, "--strategy", "ps", "--max-workers", "1", "train.py", width, cwd=folder
        )
        assert ended.returncode == 0, ended.stderr
        return re.findall(r"^(?:width|fit) \d+", ended.stdout, re.MULTILINE), ended.stdout + ended.stderr

    width.write_text("3")
    first, said = run()
    assert first == ["width 3", "fit 19"]
    assert "reading the model of train.py" in said
    # Once more in the chief, to read it, and once to train it.
    width.write_text("5")
    again, said = run()
    assert again == ["width 5", "width 5", "width 5", "fit 31"]
    assert "using the profile of train.py read on" in said
    assert "planning again" in said
    assert "0 restarts" in said
    third, said = run()
    assert third == ["width 5", "fit 31"]
    assert "using the profile of train.py read on" in said
    assert "planning again" not in said


def dike_run(folder: Path, *arguments: str | Path) -> Running:
    """With parameter servers: one plain task would be faster in all of these."""
    workers = () if "--plan" in arguments else ("--strategy", "ps")
    return Running(folder, "run", "--format", "json", *workers, *arguments)


def checkpoints_below(folder: Path) -> list[Path]:
    return list((folder / "dike-runs").rglob("*.index"))


def variables_are_where_planned(result: Result) -> None:
    plan = Plan.from_json(result["plan"])
    assert result["placement"], "the chief reported no placement"
    for variable, ps in plan.variables.items():
        assert re.match(rf"/job:ps/(replica:0/)?task:{ps}/", result["placement"][variable]), variable


@pytest.fixture
def v1_script(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(V1_SCRIPT)
    # A user's project may hold files named like our packages.
    for name in ("solver", "executor", "framework"):
        (folder / f"{name}.py").write_text("raise SystemExit('the wrong module was imported')\n")
    return script


@pytest.fixture(scope="module")
def v1_profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `dike profile` reads of that script, once for all tests that are about something else."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "train.py").write_text(V1_SCRIPT)
    read = run_dike("profile", "--output", "v1.json", "train.py", "100", cwd=folder)
    assert read.returncode == 0, read.stderr
    return folder / "v1.json"


def test_the_keras_example_on_a_private_mesos(tmp_path: Path, examples: Path) -> None:
    run = dike_run(
        tmp_path,
        "--agents",
        "2",
        "--resources",
        AGENT,
        "--max-workers",
        "2",
        examples / "digits_cnn.py",
        "--epochs",
        "6",
    )
    result = run.result()
    log = run.log
    plan = Plan.from_json(result["plan"])
    assert sorted({task.role for task in plan.tasks}) == ["chief", "ps", "worker"]
    assert (plan.option.workers, plan.option.ps) == (2, 1)
    assert float(re.findall(r"test accuracy:? (0\.\d+)", log)[-1]) > 0.95
    losses = [float(text) for text in re.findall(r" - loss: (\d+\.\d+)", log)]
    assert losses[-1] < losses[0] / 2
    variables_are_where_planned(result)
    assert list(Path(result["checkpoint_dir"]).rglob("*.index"))
    assert result["restarts"] == 0
    exported = run_dike("export", result["checkpoint_dir"], "-o", "model.keras", cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    assert "newer checkpoint" not in exported.stdout
    assert "model.weights.h5" in zipfile.ZipFile(tmp_path / "model.keras").namelist()


def test_the_v1_example_and_its_continuation(tmp_path: Path, examples: Path, mesos: EmbeddedCluster) -> None:
    arguments = ["--master", mesos.master, "--max-workers", "2", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    run = dike_run(tmp_path, *arguments, "--logs", "all", examples / "digits_v1.py", "--steps", "200")
    result = run.result()
    assert result["succeeded"]
    variables_are_where_planned(result)
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", run.log)]
    # Either worker may come so late that it prints its first line only, so guessing among ten digits is the start.
    assert min(losses) < math.log(10) / 2
    # The second run resumes where the first one ended; it may be too short to print progress.
    saved = checkpoints_of(tmp_path)
    assert max(saved) >= 200
    exported = run_dike("export", "checkpoints", "-o", "exported", cwd=tmp_path)
    assert f"of step {max(saved)}, to exported" in exported.stdout, exported.stderr
    assert (tmp_path / "exported" / "model.ckpt.index").is_file()
    (tmp_path / "again").mkdir()
    again = dike_run(tmp_path / "again", *arguments, examples / "digits_v1.py", "--steps", "260")
    continued = again.result()
    assert continued["succeeded"]
    assert continued["steps"] >= 260
    # A job that starts anew would save its step 0 over the first one's.
    assert checkpoints_of(tmp_path)[0] == saved[0]


def has_trained_since(run: Running, begun: int = 0) -> bool:
    """Whether the job was restarted, and has made steps since, in the log from character `begun` on."""
    return re.search(r"dike: worker:\d step \d", run.log[begun:].partition("; restart ")[2]) is not None


def checkpoints_of(folder: Path) -> dict[int, int]:
    """Step of each checkpoint in the folder -> when it was written, in nanoseconds."""
    found = (folder / "checkpoints").rglob("*.index")
    return {int(path.stem.rpartition("-")[2]): path.stat().st_mtime_ns for path in found}


def test_a_killed_worker_rejoins_and_killed_executors_restart_the_job(
    tmp_path: Path, v1_script: Path, v1_profile: Path, mesos: EmbeddedCluster
) -> None:
    run = dike_run(
        tmp_path,
        *("--master", mesos.master, "--max-workers", "2", "--checkpoint-interval", "1"),
        *("--profile", v1_profile, v1_script, "1000000", tmp_path / "end"),
    )
    run.wait_for(lambda: checkpoints_below(tmp_path), "a first checkpoint")
    # Before the first step, a lost worker is not restarted alone.
    run.wait_for(lambda: re.search(r"dike: worker:\d step \d", run.log), "a first step")
    run.wait_for(lambda: roles(mesos).get("worker:1"), "the second worker").kill()
    run.wait_for_text("worker:1 failed: ended by signal 9 (SIGKILL)")
    run.wait_for(lambda: "worker:1" in roles(mesos), "the worker's return")
    begun = len(run.log)
    for executor in executors(mesos):
        executor.kill()
    run.wait_for(lambda: has_trained_since(run, begun), "steps after the restart")
    (tmp_path / "end").touch()
    result = run.result()
    assert result["succeeded"]
    assert result["restarts"] >= 2
    assert roles(mesos) == {}


def test_a_killed_agent_is_survived(tmp_path: Path, v1_script: Path, v1_profile: Path) -> None:
    with EmbeddedCluster([AgentSpec(resources=AGENT)] * 2) as cluster:
        cluster.wait_for_agents(60)
        run = dike_run(
            tmp_path,
            *("--master", cluster.master, "--max-workers", "2", "--checkpoint-interval", "1"),
            *("--profile", v1_profile, v1_script, "1000000", tmp_path / "end"),
        )
        run.wait_for_text("worker:0 running")
        node = re.findall(r"worker:0 on agent-(\d)", run.log)[0]
        run.wait_for(lambda: checkpoints_below(tmp_path), "a first checkpoint")
        cluster.kill_agent(int(node))
        run.wait_for(lambda: has_trained_since(run), "steps after the restart")
        (tmp_path / "end").touch()
        result = run.result()
        assert result["succeeded"]
        assert result["restarts"] >= 1
        # The new plan had to do without the lost agent.
        assert {task["node"] for task in result["plan"]["tasks"]} == {f"agent-{1 - int(node)}"}


def test_a_master_that_is_restarted_is_found_again(tmp_path: Path, v1_script: Path, v1_profile: Path) -> None:
    with EmbeddedCluster([AgentSpec(resources=AGENT)]) as cluster:
        arguments = ("--master", cluster.master, "--max-workers", "1", "--profile", v1_profile)
        run = dike_run(tmp_path, *arguments, v1_script, "1000000", tmp_path / "end")
        run.wait_for(lambda: checkpoints_below(tmp_path), "a first checkpoint")
        before = {name: process.pid for name, process in roles(cluster).items()}
        cluster.kill_master()
        run.wait_for_text("the connection to the Mesos master is lost")
        cluster.restart_master()
        run.wait_for_text("connected to the Mesos master again")
        during = {name: process.pid for name, process in roles(cluster).items()}
        (tmp_path / "end").touch()
        result = run.result()
        assert result["succeeded"]
        assert result["restarts"] == 0
        assert during == before


def test_ctrl_c_ends_everything(tmp_path: Path, v1_script: Path, v1_profile: Path, mesos: EmbeddedCluster) -> None:
    arguments = ("--master", mesos.master, "--max-workers", "1", "--profile", v1_profile)
    run = dike_run(tmp_path, *arguments, v1_script, "1000000")
    run.wait_for_text("worker:0 running")
    assert "left alone: 1 (in use)" in run_dike("clean", "--older-than", "0s", cwd=tmp_path).stdout
    run.process.send_signal(signal.SIGINT)
    run.result(exit_code=130)
    assert re.search(
        "dike: Interrupted; all tasks were stopped. "
        "(No checkpoint was saved yet, so the same command starts again from the beginning; --checkpoint-interval 10 "
        r"|The checkpoint of step \d+ is in (\S+); the same command with --checkpoint-dir \2 resumes from it\.)",
        run.log,
    ), run.log
    # It does not wait for ever: an import of TensorFlow may outlast its patience, but not Mesos'.
    wait_until(lambda: roles(mesos) == {}, "the end of all tasks' processes")
    wait_until(lambda: not any(one["active"] for one in mesos.state()["frameworks"]), "the framework's end")


def test_a_failing_script_names_task_agent_and_log(
    tmp_path: Path, v1_script: Path, v1_profile: Path, mesos: EmbeddedCluster
) -> None:
    broken = "        if now > 5:\n            raise ValueError('broken on purpose')\n"
    v1_script.write_text(V1_SCRIPT.replace("print('last loss'", broken + "print('last loss'"))
    arguments = ("--master", mesos.master, "--max-workers", "1", "--profile", v1_profile)
    run = dike_run(tmp_path, *arguments, v1_script, "100")
    result = run.result(exit_code=1)
    assert re.search(r"worker:0 failed on agent-\d: exited with status 1", result["failure"])
    assert re.search(r"The job failed: ValueError: broken on purpose \(\S+\.py, line \d+\); worker:0 failed", run.log)
    assert "Traceback (most recent call last)" in run.log


def test_a_plan_can_be_saved_and_followed(
    tmp_path: Path, v1_script: Path, v1_profile: Path, mesos: EmbeddedCluster
) -> None:
    run = dike_run(tmp_path, "--master", mesos.master, "--max-workers", "1", "--plan-only", v1_script, "100")
    plan = run.result()
    assert plan["option"]["workers"] == 1
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    planned = ("--profile", v1_profile, "--plan", tmp_path / "plan.json")
    isolated = ("--master", mesos.master, *planned, "--isolate-tasks")
    run = dike_run(tmp_path, *isolated, v1_script, "100")
    result = run.result()
    assert result["succeeded"]
    assert result["plan"]["tasks"] == plan["tasks"]
    tasks = mesos.state()["completed_frameworks"][-1]["completed_tasks"]
    assert {task["id"] for task in tasks} == {task["executor_id"] for task in tasks}
    assert len(tasks) == len(plan["tasks"])


def test_too_little_on_offer_is_waited_for(
    tmp_path: Path, v1_script: Path, v1_profile: Path, mesos: EmbeddedCluster
) -> None:
    arguments = ("--master", mesos.master, "--max-workers", "2", "--profile", v1_profile)
    plan = dike_run(tmp_path, *arguments, "--plan-only", v1_script, "100").result()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    holder = dike_run(tmp_path, *arguments, v1_script, "1000000")
    holder.wait_for_text("worker:0 running")
    (tmp_path / "second").mkdir()
    waiter = dike_run(
        tmp_path / "second",
        *("--master", mesos.master, "--profile", v1_profile, "--plan", tmp_path / "plan.json", "--plan-only"),
        *(v1_script, "100"),
    )
    # What the other agent offers may come a little later.
    reason = r"waiting: agent agent-\d: [\d.]+ cpus wanted, [\d.]+ left"
    waiter.wait_for(lambda: re.search(reason, waiter.log), "what it waits for")
    holder.process.send_signal(signal.SIGTERM)
    holder.result(exit_code=130)
    assert waiter.result()["tasks"] == plan["tasks"]


def test_plain_python_with_dike_master_set(tmp_path: Path, v1_script: Path, mesos: EmbeddedCluster) -> None:
    done = subprocess.run(
        [sys.executable, v1_script, "60"],
        cwd=tmp_path,
        env={**os.environ, "DIKE_MASTER": mesos.master, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "launched worker:0" in done.stdout
    assert "last loss" in done.stdout
    assert list(tmp_path.glob("dike-profile-*")) == []


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose module imports from beside it, reads data of the project and wants a variable."""
    project = tmp_path / "my project"
    for folder in ("trainer", "data", "lib"):
        (project / folder).mkdir(parents=True)
    (project / "lib" / "helpers.py").write_text("")
    (project / "trainer" / "__init__.py").write_text("")
    (project / "trainer" / "task.py").write_text(PACKAGE_SCRIPT)
    (project / "trainer" / "data.py").write_text(
        "def rows():\n    return [[float(value) for value in line.split(',')] for line in open('data/values.csv')]\n"
    )
    (project / "data" / "values.csv").write_text("1,2,3\n4,5,6\n")
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["lib", *filter(None, [os.environ.get("PYTHONPATH")])]))
    return project


def test_a_module_finds_its_package_its_data_and_what_it_wrote_before_a_restart(
    package: Path, mesos: EmbeddedCluster
) -> None:
    arguments = ("--master", mesos.master, "--max-workers", "1", "--env", "MY_TOKEN", "--outputs-limit", "50K")
    run = dike_run(package, *arguments, "-m", "trainer.task", "100")
    result = run.result()
    assert result["restarts"] == 1
    assert "the end of attempt 2" in run.log
    outputs = Path(result["checkpoint_dir"]) / "outputs"
    brought_back = {path.relative_to(outputs).as_posix() for path in outputs.rglob("*") if path.is_file()}
    assert brought_back == {"notes.txt", "results/weights.npy"}
    assert (outputs / "notes.txt").read_text() == "attempt\nattempt\n"
    assert f"outputs are in {outputs} (2 files" in run.log
    assert "outputs left behind (--outputs-limit is 50.0 KiB): large: 100000 bytes, over the limit" in run.log
    cleaned = run_dike("clean", "--older-than", "0s", "--yes", cwd=package)
    assert cleaned.stdout.splitlines()[-1].startswith("dike: removed: ")
    assert checkpoints_below(package) == []
    assert (outputs / "notes.txt").is_file()
    # The reading of the model left nothing in the user's folder.
    assert sorted(path.name for path in package.iterdir()) == [
        *("data", "dike-runs", "lib", "stderr", "stdout", "trainer")
    ]


@pytest.mark.parametrize(
    ("spoil", "options", "told"),
    [
        (lambda project: None, (), "add --env MY_TOKEN"),
        (lambda project: (project / ".dikeignore").write_text("*.csv"), ("--env", "MY_TOKEN"), ".dikeignore"),
    ],
)
def test_what_the_tasks_would_miss_is_missed_when_the_model_is_read(
    package: Path, mesos: EmbeddedCluster, spoil: Callable[[Path], object], options: tuple[str, ...], told: str
) -> None:
    spoil(package)
    run = dike_run(package, "--master", mesos.master, *options, "-m", "trainer.task", "100")
    run.result(exit_code=2)
    assert told in run.log.splitlines()[-1]
    assert "Traceback" in run.log
    # Tracebacks name the user's files, not those of the copy in which the model was read.
    assert "dike-world-" not in run.log
