"""What others get of a search of `dike tune`: MLflow, and what `--on-end` names."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.running import run_dike

pytestmark = [pytest.mark.mesos, pytest.mark.timeout(300)]

SCRIPT = """
import dike
lr = dike.params()["lr"]
for step in range(1, 4):
    dike.report(step, loss=lr / step)
if lr == 3:
    raise ValueError("three")
"""


def tune(folder: Path, *options: str) -> Any:
    (folder / "train.py").write_text(SCRIPT)
    return run_dike("tune", "train.py", "--name", "s", "--slot-mem", "256", *options, cwd=folder)


def test_mlflow_has_a_run_for_each_trial(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra 'mlflow' is not installed")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    done = tune(tmp_path, "--param", "lr=1,3", "--on-failure", "retry=0", "--mlflow", uri)
    assert done.returncode == 0, done.stderr
    done = run_dike("tune", "--resume", "s", "--param", "lr=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("s")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {name: (run.info.status, run.data.params) for name, run in runs.items()} == {
        "trial-0": ("FINISHED", {"lr": "1"}),
        "trial-1": ("FAILED", {"lr": "3"}),
        "trial-2": ("FINISHED", {"lr": "2"}),
    }
    assert "ValueError: three" in runs["trial-1"].data.tags["dike.error"]
    history = client.get_metric_history(runs["trial-0"].info.run_id, "loss")
    assert max(one.step for one in history) == 3
    assert runs["trial-0"].data.metrics["objective.loss"] == pytest.approx(1 / 3)


def test_mlflow_that_cannot_be_reached(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="the extra 'mlflow' is not installed")
    done = tune(tmp_path, "--param", "lr=1", "--mlflow", "nothing://here")
    assert done.returncode == 2
    assert "dike: MLflow at nothing://here cannot be used" in done.stderr


def test_a_command_gets_the_result(tmp_path: Path) -> None:
    done = tune(tmp_path, "--param", "lr=1,2", "--on-end", "cat > result.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["name"], result["best"]["parameters"]) == ("s", {"lr": 1})


def test_a_url_gets_the_result(tmp_path: Path) -> None:
    posted: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = tune(tmp_path, "--param", "lr=1", "--on-end", f"http://127.0.0.1:{server.server_port}/hook")
        server.shutdown()
    assert posted[0]["complete"]
    # It is not worth a failure of a search that has ended well.
    assert done.returncode == 0
    assert "could not be announced (--on-end): Server error '500" in done.stderr
