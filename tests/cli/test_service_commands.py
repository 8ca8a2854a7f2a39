"""`dike serve` and its users' commands from outside: real processes, a real Mesos."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

import dike
from dike.exceptions import BadInputError, DikeError
from dike.profile import Api
from framework.cli.job_tables import jobs_table, remarks
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.scheduler.records import JobKind, JobState
from framework.service.api.schemas import JobView
from tests import warm
from tests.cli.service_stage import DEADLINE_S, ServiceStage
from tests.running import dike_command
from tests.training.job_stage import profile
from tests.waiting import wait_until, whole_lines
from tests.warm import Warm

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
COUNTING = ROOT / "tests" / "search" / "scripts" / "counting.py"
DOCUMENT = ROOT / "docs" / "api.md"
SHORT_SCRIPT = """
import sys
from pathlib import Path
import dike.compat.v1 as tf

tf.disable_v2_behavior()
x = tf.get_variable('x', [10, 10], initializer=tf.ones_initializer())
step = tf.train.get_or_create_global_step()
train = tf.train.GradientDescentOptimizer(0.01).minimize(tf.reduce_mean(tf.square(x)), global_step=step)
epochs = int(sys.argv[sys.argv.index('--epochs') + 1])
with tf.train.MonitoredTrainingSession() as session:
    for _ in range(epochs):
        session.run(train)
Path('model.txt').write_text(str(epochs))
print(f'trained {epochs} epochs', flush=True)
"""
SCRIPT = """
import pathlib, sys, time
import dike.compat.v1 as tf

tf.disable_v2_behavior()
x = tf.get_variable('x', [100, 100], initializer=tf.ones_initializer())
loss = tf.reduce_mean(tf.square(x))
step = tf.train.get_or_create_global_step()
train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=step)
go_on, end = map(pathlib.Path, sys.argv[1:])
with tf.train.MonitoredTrainingSession() as session:
    for number in range(20):
        session.run(train)
        print('before', number, flush=True)
    while not go_on.exists():
        session.run(train)
        time.sleep(0.02)
    for number in range(20):
        session.run(train)
        print('after', number, flush=True)
    while not end.exists():
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceStage]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "profile.json").write_text(profile(Api.GRAPH).dumps())
    with EmbeddedCluster([AgentSpec(resources="cpus:2;mem:4096;disk:4096")]) as cluster:
        cluster.wait_for_agents(60)
        running = ServiceStage(folder, cluster.master)
        running.start()
        try:
            yield running
        finally:
            running.end(signal.SIGKILL)


SUBMIT = ("submit", "--profile", "profile.json", "--constraint", "rack:IS:nowhere", "train.py")


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Asserts the form of a refusal and what its sentence says."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (sentence,) = done.stderr.strip().splitlines()
    assert sentence.startswith("dike: ")
    for part in parts:
        assert part in sentence


def submitted(service: ServiceStage, *options: str, user: str = "ann") -> str:
    """Submits a job of which nothing can start, and returns its name."""
    done = service.dike(*SUBMIT[:-1], *options, SUBMIT[-1], user=user)
    assert done.returncode == 0, done.stderr
    return re.findall(r"submitted (\S+)", done.stdout)[0]


def test_wrong_addresses_and_tokens(service: ServiceStage, tmp_path: Path) -> None:
    refused(service.dike("jobs", "--service", "http://127.0.0.1:1"), "http://127.0.0.1:1", "dike serve", "--service")
    refused(service.dike("jobs", "--service", "127.0.0.1"), "'127.0.0.1'", "http://HOST:PORT")
    refused(service.dike("jobs", DIKE_TOKEN="somebody-else-has-this"), "does not know this token", "--token-file")
    refused(service.dike("jobs", DIKE_TOKEN=""), "wants a token", "--token-file")
    refused(service.dike("jobs", "--token-file", "nothing"), "nothing", "No such file")
    refused(service.dike("submit", "train.py", DIKE_TOKEN="somebody-else-has-this"), "does not know this token")
    (tmp_path / "token").write_text("bob-has-that-token-of-his\n")
    assert service.dike("jobs", "--token-file", tmp_path / "token").returncode == 0


def test_users_come_and_go_while_the_service_runs(service: ServiceStage) -> None:
    def users(*arguments: str) -> str:
        done = service.dike("users", *arguments, "--users", "users.yaml")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def jobs(token: str) -> subprocess.CompletedProcess[str]:
        return service.dike("jobs", DIKE_TOKEN=token)

    first = users("add", "dan", "--expires", "7d")
    try:
        wait_until(lambda: jobs(first).returncode == 0, "the new user", said=service.said)
        second = users("rotate", "dan")
        wait_until(lambda: jobs(second).returncode == 0, "the second token", said=service.said)
        refused(jobs(first), "does not know this token")
        text = (service.folder / "users.yaml").read_text()
        (service.folder / "users.yaml").write_text(re.sub(r"expires: \S+", "expires: 2001-02-03", text))
        wait_until(lambda: "valid until 2001-02-03" in jobs(second).stderr, "the end of the token", said=service.said)
        refused(jobs(second), "This token was valid until 2001-02-03; the service's operator gives dan a new one.")
        (service.folder / "users.yaml").write_text(text.replace("  expires", "  limits: {open_jobs: 0}\n  expires"))
        wait_until(lambda: jobs(second).returncode == 0, "the token again", said=service.said)
        over = service.dike("submit", "--profile", "profile.json", "train.py", DIKE_TOKEN=second)
        refused(over, "The limit of open jobs that the service's operator has set for dan is 0, and 0 are open")
    finally:
        users("remove", "dan")
    wait_until(lambda: jobs(second).returncode == 2, "the user's going", said=service.said)
    refused(jobs(second), "does not know this token")


def test_a_job_that_waits_is_explained_and_killed(service: ServiceStage) -> None:
    done = service.dike(*SUBMIT)
    job = re.findall(r"submitted (\S+)", done.stdout)[0]
    assert [line.split(": ", 2)[-1].split() for line in done.stdout.splitlines()[-4:]] == [
        ["dike", "logs", "-f", job],
        ["dike", "explain", job],
        ["dike", "kill", job],
        [f"{service.url}/#/jobs/{job}"],
    ]
    assert [(one["id"], one["state"], one["user"]) for one in service.asked("jobs", "--user", "ann")["jobs"]] == [
        (job, "queued", "ann")
    ]
    assert service.asked("jobs", "last")["constraints"] == ["rack:IS:nowhere"]
    explanation = wait_until(
        lambda: (found := service.asked("explain", job))["verdict"] == "constraints" and found, "the explanation"
    )
    assert explanation["job_id"] == job
    (agent,) = explanation["agents"]
    assert "rack:IS:nowhere" in " ".join(agent["obstacles"])
    shown = service.dike("explain", job[:-2], user="bob")
    assert explanation["sentence"] in shown.stdout.replace("\n", " ")
    wait_until(lambda: service.asked("jobs", job)["queue_position"] == 1, "its place in the queue")
    listed = service.dike("jobs", COLUMNS="200").stdout
    cells = ["ann", "queued", "1", r"[\d.:]+( s)?", "training", r"20\d\d-"]
    assert re.search(rf"{job} │ {' +│ '.join(cells)}", listed), listed
    assert listed.splitlines()[-1] == "1 queued"
    assert "queued, position 1 in the queue" in service.dike("jobs", job).stdout
    refused(service.dike("kill", job, user="bob"), job)
    followed = Warm(
        dike_command("logs", "-f", job),
        env=service.environment("ann"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killed = service.dike("kill", "--wait", job, user="eve")
    assert killed.returncode == 0, killed.stderr
    assert f"{job} was killed" in killed.stdout
    assert followed.communicate(timeout=DEADLINE_S)[1] == f"dike: The job {job} was killed.\n"
    assert followed.returncode == 1
    assert "ended already: killed" in service.dike("kill", job).stdout
    assert service.asked("jobs") == {"jobs": [], "counts": {"killed": 1}}
    assert service.dike("jobs", "--all", "--user", "nobody").stdout == "No job matches.\n"
    assert "--all" in service.dike("jobs").stdout
    refused(service.dike("logs", job, "--task", "foo"), f"{job} has no task foo; it has none yet")
    assert [one["id"] for one in service.asked("jobs", "--all", "--state", "killed")["jobs"]] == [job]


def test_names_of_jobs(service: ServiceStage) -> None:
    jobs = [submitted(service), submitted(service)]
    refused(service.dike("jobs", "train"), "Several jobs start with 'train'", *jobs)
    refused(service.dike("logs", jobs[0].replace("train", "tarin")), "has no job", jobs[0])
    refused(service.dike("explain", "last", user="bob"), "bob has no job")
    assert service.asked("jobs", "last")["id"] == jobs[1]
    jobs.append(submitted(service, "--name", "mine"))
    assert jobs[2] == "mine"
    refused(service.dike("submit", "--profile", "profile.json", "--name", "mine", "train.py"), "'mine'", "--name")
    assert service.dike("kill", "--wait", *jobs).returncode == 0


def test_what_cannot_be_submitted(service: ServiceStage) -> None:
    options = ("--profile", "profile.json")
    refused(service.dike("submit", *options, "nothing.py"), "nothing.py")
    refused(service.dike("submit", *options, "--constraint", "rack=r1", "train.py"), "rack=r1", "FIELD:OPERATOR:VALUE")
    refused(service.dike("submit", *options, "--elastic", "3:1", "train.py"), "--elastic 3:1")
    refused(service.dike("tune", "--detach", "--master", "a:1", "--param", "lr=1,2", COUNTING), "--detach", "--master")


def test_a_run_of_its_own_heeds_constraints(service: ServiceStage) -> None:
    options = (
        "--master",
        service.master,
        "--profile",
        "profile.json",
        "--plan-only",
        "--constraint",
        "rack:IS:nowhere",
    )
    done = service.dike("run", *options, "train.py")
    assert done.returncode == 2
    assert done.stderr.endswith("dike: No agent meets --constraint rack:IS:nowhere.\n")


def test_the_agents_are_shown(service: ServiceStage) -> None:
    agents = wait_until(lambda: service.asked("agents")["agents"], "the agents")
    assert [agent["total"]["mem"] for agent in agents] == [4096]
    shown = service.dike("agents", COLUMNS="200").stdout
    assert agents[0]["node"] in shown
    assert "4.0 GiB" in shown


def test_one_service_at_a_time(service: ServiceStage) -> None:
    options = ("--master", service.master, "--listen", "127.0.0.1:0", "--state", "sqlite:///service.db")
    command = dike_command("serve", *options, "--users", "users.yaml")
    done = warm.run(command, cwd=service.folder, timeout=DEADLINE_S)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dike: The service of this database is being run by process ")
    assert "--standby" in last
    assert "web page at" not in done.stderr
    assert service.said().index("listening at") < service.said().index("web page at")


def test_a_search_is_handed_over(service: ServiceStage, tmp_path: Path) -> None:
    script = tmp_path / "listening.py"
    # The service is ours and on this machine, so libraries find their folders.
    heard = f"import os\n\nassert os.environ['KERAS_HOME'] == '{tmp_path}'\nopen(os.environ['HEARD'], 'a').write('.')\n"
    wrote = "Path('models').mkdir()\nPath('models/model.txt').write_text(str(arguments.lr))\n"
    script.write_text(heard + COUNTING.read_text() + wrote)
    arguments = ("--param", "lr=0.01,0.02", "--name", "handed-over", "--policy", "fifo", "--slots", "1")
    options = ("--follow", "--env", f"HEARD={tmp_path / 'heard'}", "--slot-mem", "256")
    detached = ("tune", "--detach", *arguments, *options, script, "--", "--steps", "5")
    done = service.dike(*detached, user="bob", KERAS_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["dike: submitted handed-over", "dike: handed-over finished"]
    assert (tmp_path / "heard").read_text() == ".."
    refused(service.dike("tune", "--detach", *arguments, COUNTING), "handed-over", "--name")
    followed = service.dike("logs", "-f", "handed-over", user="bob")
    assert followed.returncode == 0, followed.stderr
    job = service.asked("jobs", "handed-over", user="bob")
    assert job["state"] == "finished"
    assert job["trials"]["finished"] == 2
    assert job["result"]["best"]["parameters"] == {"lr": 0.02}
    assert str(job["result"]["checkpoint_dir"]).startswith(f"{service.folder}/dike-runs/handed-over-20")
    best, other = job["best_trials"]
    assert (best["parameters"], other["parameters"]) == ({"lr": 0.02}, {"lr": 0.01})
    shown = service.dike("jobs", "handed-over", user="bob", COLUMNS="300").stdout
    # A long path has a line of its own.
    words = " ".join(shown.replace("│", " ").split())
    assert f"{best['value']:.5g}; lr=0.02; {best['checkpoint']}" in words
    assert "Best trials" in shown
    everything = " ".join(service.dike("jobs", "--all", COLUMNS="300").stdout.replace("│", " ").split())
    assert f"2 finished, best {best['value']:.4g}" in everything
    outputs = service.asked("outputs", "handed-over", user="bob")
    assert [file["path"] for file in outputs["files"]] == ["trial-0/models/model.txt", "trial-1/models/model.txt"]
    copied = service.dike("outputs", "handed-over", "-o", tmp_path / "copied", "--trial", "1", user="bob")
    assert copied.stdout.splitlines() == [f"dike: 1 file copied to {tmp_path / 'copied'}"], copied.stderr
    assert [path.name for path in (tmp_path / "copied").rglob("*") if path.is_file()] == ["model.txt"]
    assert (tmp_path / "copied/trial-1/models/model.txt").read_text() == "0.02"
    refused(service.dike("outputs", "handed-over", user="ann"), "belongs to bob")
    # `counting.py` is saved by its own functions.
    exported = service.dike("export", "handed-over", "-o", tmp_path / "exported", user="bob")
    assert "trial 1 at step 5, loss" in exported.stdout, exported.stderr
    assert json.loads((tmp_path / "exported" / "state.json").read_text()) == {"loss": pytest.approx(0.98**5)}
    refused(service.dike("export", "handed-over", "-o", tmp_path / "exported", user="bob"), "exists already")
    refused(service.dike("export", "handed-over", "-o", tmp_path / "best.keras", user="bob"), "name a folder")
    refused(service.dike("export", "handed-over", "--trial", "7", user="bob"), "has no trial 7")
    refused(service.dike("export", "handed-over", user="ann"), "belongs to bob")
    refused(service.dike("trials", "handed-over", "--storage", "sqlite:///searches.db"), "dike jobs")
    refused(service.dike("logs", "handed-over", "--task", "foo", user="bob"), "has no task foo", "trials")
    printed = service.dike("logs", "handed-over", "--trial", "1", "-f", user="bob")
    assert printed.returncode == 0, printed.stderr
    header, *lines = printed.stdout.splitlines()
    assert header.startswith("--- run 0 on ")
    assert lines == [f"loss {0.98**step:.9f}" for step in range(1, 6)]
    assert "dike logs handed-over --trial N" in followed.stderr
    refused(service.dike("logs", "handed-over", "--trial", "1", user="ann"), "belongs to bob")
    refused(service.dike("logs", "handed-over", "--trial", "2", user="bob"), "no trial 2; its trials are 0 to 1")
    failed = service.dike("tune", "--detach", "--follow", "--param", "steps=5", "--name", "failing", COUNTING)
    assert failed.returncode == 1, failed.stderr
    assert "required: --lr" in failed.stderr
    assert "The job failing failed: " in failed.stderr


def test_a_killed_search_resumes(service: ServiceStage, tmp_path: Path) -> None:
    diary = tmp_path / "diary"

    def trained(lr: str) -> list[tuple[str, int]]:
        """The process and the number of each step of a trial."""
        return [(process, int(step)) for of_lr, process, step, _ in whole_lines(diary) if of_lr == lr]

    def processes() -> int:
        return len({process for process, _ in trained("0.02")})

    # A trial that saves too slowly when it is suspended starts over.
    patience = ("--suspend-timeout", "150")
    options = ("--param", "lr=0.01,0.02", "--policy", "fifo", "--slots", "1", "--slot-mem", "256", *patience)
    script = (COUNTING, "--", "--steps", "100000", "--pause", "0.02", "--diary", diary)
    done = service.dike("tune", "--detach", "--name", "resumed", *options, *script)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: len(trained("0.01")) > 1, "the first trial", said=service.said)
    (tmp_path / "end-0.01").touch()
    wait_until(lambda: trained("0.02"), "the second trial", said=service.said)
    assert "resume with" not in service.dike("jobs", "resumed", COLUMNS="200").stdout
    assert service.dike("kill", "--wait", "resumed").returncode == 0
    assert "dike tune --resume resumed --detach" in service.dike("jobs", "resumed", COLUMNS="200").stdout
    refused(service.dike("tune", "--detach", "--resume", "resumed", user="bob"), "resumed", "belongs to ann")
    done = service.dike("tune", "--detach", "--resume", "resum")
    assert done.returncode == 0, done.stderr
    assert "dike: resumed resumed" in done.stdout
    wait_until(lambda: processes() == 2, "another process of the trial", said=service.said)
    (tmp_path / "end-0.02").touch()
    followed = service.dike("logs", "-f", "resumed")
    assert followed.returncode == 0, followed.stderr
    job = service.asked("jobs", "resumed")
    assert (job["state"], job["trials"]["finished"]) == ("finished", 2)
    steps = [step for _, step in trained("0.02")]
    assert steps == list(range(1, len(steps) + 1))
    printed = service.dike("logs", "resumed", "--trial", "1").stdout.splitlines()
    assert [line.partition(" on ")[0] for line in printed if line.startswith("---")] == ["--- run 0", "--- run 1"]
    assert len([line for line in printed if line.startswith("loss ")]) == len(steps)
    refused(service.dike("tune", "--detach", "--resume", "resumed"), "complete")


@pytest.mark.tensorflow
def test_the_python_of_the_document_runs(service: ServiceStage, tmp_path: Path) -> None:
    (program,) = re.findall(r"## From Python\n\n((?:(?:    .*)?\n)+)", DOCUMENT.read_text(encoding="utf-8"))
    (tmp_path / "train.py").write_text(SHORT_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env=service.environment("ann"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    *output, state, copies, jobs = done.stdout.splitlines()
    assert "trained 3 epochs" in output
    assert state == "finished "
    assert "results/model.txt" in copies
    assert (tmp_path / "results" / "model.txt").read_text() == "3"
    assert "finished" in jobs


def test_the_client_from_python(service: ServiceStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIKE_SERVICE", "DIKE_TOKEN"):
        monkeypatch.setenv(name, service.environment("ann")[name])
    script = shutil.copy(COUNTING, tmp_path)
    with pytest.raises(BadInputError, match="No Dike service answers at"):
        dike.Client("http://127.0.0.1:1").me()
    with pytest.raises(BadInputError, match="does not know this token"):
        dike.Client(token="somebody-else-has-this").me()
    with dike.Client() as client:
        assert client.me().user == "ann"
        with pytest.raises(BadInputError, match="nothing"):
            client.submit(tmp_path / "nothing.py")
        with pytest.raises(BadInputError, match="--max-worker"):
            client.submit(script, max_worker=1)
        with pytest.raises(BadInputError, match="'follow' belongs to the command"):
            client.submit(script, follow=True)
        with pytest.raises(BadInputError, match="The range of 'lr'"):
            client.tune(script, {"lr": (1,)})
        job = client.tune(
            script, {"lr": [0.1, 0.3]}, ["--steps", 3], slot_mem=256, env={"PYTHONPATH": str(ROOT)}, slots=1
        )
        ended = client.wait(job.id, timeout_s=DEADLINE_S)
        assert ended.state == "finished", ended.failure
        assert {trial.parameters["lr"] for trial in client.trials(job.id).trials} == {0.1, 0.3}
        waiting = client.tune(script, {"lr": [0.1]}, name="waits", constraint=["rack:IS:nowhere"])
        with pytest.raises(DikeError, match="has not ended within"):
            client.wait(waiting.id, timeout_s=0)
        client.kill(waiting.id)
        assert client.wait(waiting.id).state == "killed"
        assert {job.id, waiting.id} <= {one.id for one in client.jobs(user="ann")}


@pytest.mark.tensorflow
def test_output_is_followed_over_a_restart_of_the_service(service: ServiceStage, tmp_path: Path) -> None:
    go_on, end = tmp_path / "go-on", tmp_path / "end"
    output, said = tmp_path / "output", tmp_path / "said"
    with output.open("w") as stdout, said.open("w") as stderr:
        follower = Warm(
            dike_command(
                *("submit", "--follow", "--profile", "profile.json", "--strategy", "ps", "--max-workers", "1"),
                *("train.py", str(go_on), str(end)),
            ),
            cwd=service.folder,
            env=service.environment("ann"),
            stdout=stdout,
            stderr=stderr,
        )

    def everything() -> str:
        return "\n".join([output.read_text(), said.read_text(), service.said()])

    wait_until(lambda: "before 19\n" in output.read_text(), "the first half of the output", said=everything)
    job = re.findall(r"submitted (\S+)", said.read_text())[0]
    before = service.asked("jobs", job)
    assert before["state"] == "running"
    assert {task["name"] for task in before["tasks"]} == {task_name(one) for one in before["plan"]["tasks"]}
    assert service.end(signal.SIGTERM) == 0
    wait_until(lambda: "trying again" in said.read_text(), "the loss of the connection", said=everything)
    service.start()
    first, *_, last = service.framework_ids()
    assert first == last
    go_on.touch()
    wait_until(lambda: "after 19\n" in output.read_text(), "the second half of the output", said=everything)
    end.touch()
    assert follower.wait(DEADLINE_S) == 0, everything()
    lines = [line for line in output.read_text().splitlines() if line.startswith(("before", "after"))]
    assert lines == [f"{half} {number}" for half in ("before", "after") for number in range(20)]
    after = service.asked("jobs", job)
    assert after["state"] == "finished"
    assert [task["task_id"] for task in after["tasks"]] == [task["task_id"] for task in before["tasks"]]
    refused(service.dike("logs", "--task", "worker:9", job), f"{job} has no task worker:9; it has", "worker:0")
    assert service.dike("logs", "--task", "worker:0", "--tail", "2", job).stdout == "after 18\nafter 19\n"
    logs = service.dike("logs", "--task", "worker:0", job)
    assert [line for line in logs.stdout.splitlines() if line.startswith(("before", "after"))] == lines
    refused(service.dike("logs", job, user="bob"), job)
    shown = service.dike("jobs", job, user="bob").stdout
    assert all(part in shown for part in ("finished", "worker:0", "ps:0", "agent-0", "killed"))
    assert job in service.dike("jobs", "--all").stdout


def task_name(planned: dict[str, object]) -> str:
    return f"{planned['role']}:{planned['index']}"


@pytest.mark.parametrize("width", [100, 140])
def test_jobs_fit_a_terminal_and_remarks_have_lines_of_their_own(width: int) -> None:
    waiting = "A worker needs 1 CPU and 3.1 GiB of memory; agent-0, which comes nearest, is 2.1 GiB short. " * 3
    job = JobView(
        id="train-20261128-031510-00c7ae",
        kind=JobKind.TRAINING,
        user="alice",
        script="train.py",
        constraints=[],
        state=JobState.QUEUED,
        submitted_s=1e9,
        started_s=None,
        ended_s=None,
        kill_requested=False,
        waiting=waiting,
        failure="",
        live_tasks=0,
        progress=None,
        trials=None,
        best=None,
        yours=True,
        queue_position=1,
        waiting_s=3.0,
    )
    out = Console(file=io.StringIO(), width=width)
    out.print(jobs_table([job], width))
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    assert len(lines) <= 7
    assert max(map(len, lines)) <= width
    assert remarks([job]) == [f"{job.id}: {waiting}"]
