"""The operator's pack in `deploy/` matches the current service: its options, its metrics, the files it names."""

from __future__ import annotations

import configparser
import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from framework.cli import app
from framework.scheduler.records import JobKind, JobRecord, TaskRecord
from framework.service.metrics import ServiceMetrics
from framework.service.store import ServiceStore

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "dike.service"
PROMETHEUS_OWN = {"up"}
"""What Prometheus itself adds."""


def options_of_serve() -> set[str]:
    helps = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    return set(re.findall(r"--[a-z][a-z-]+", helps))


def options_in(command: str) -> set[str]:
    return {word.partition("=")[0] for word in shlex.split(command) if word.startswith("--")}


@pytest.fixture(scope="module")
def unit() -> dict[str, dict[str, list[str]]]:
    """Section -> key -> its values."""
    found: dict[str, dict[str, list[str]]] = {}
    values: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if section := re.fullmatch(r"\[(\w+)\]", line):
            values = found.setdefault(section[1], {})
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            values.setdefault(key, []).append(value)
    return found


def test_the_unit_starts_what_there_is(unit: dict[str, dict[str, list[str]]]) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]  # as systemd has them
    parser.read_string(UNIT.read_text(encoding="utf-8").replace("\\\n", " "))
    assert parser.sections() == list(unit) == ["Unit", "Service", "Install"]
    service = unit["Service"]
    [start] = service["ExecStart"]
    program, command = shlex.split(start)[:2]
    assert (program, command) == ("/opt/dike/bin/dike", "serve")
    assert options_in(start)
    assert options_in(start) <= options_of_serve()
    # SIGHUP is what `Users.auto_reload` waits for.
    assert service["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    # Without these, the service could not write to its configured folders.
    root = re.search(r"--checkpoint-root (\S+)", start)
    assert root is not None
    assert service["ReadWritePaths"] == [f"-{root[1]}"]
    assert f"/var/lib/{service['StateDirectory'][0]}" == service["WorkingDirectory"][0]
    assert f"DIKE_STATE=sqlite:///{service['WorkingDirectory'][0]}/service.db" in service["Environment"]
    assert service["User"] == ["dike"]
    assert service["ProtectSystem"] == ["strict"]


def test_the_unit_gives_the_service_time_to_end(unit: dict[str, dict[str, list[str]]]) -> None:
    from framework.service import retention
    from framework.service import serve as serving
    from framework.service.api import front

    longest_s = front.SHUTDOWN_TIMEOUT_S + serving.CANCEL_TIMEOUT_S + retention.SHUTDOWN_TIMEOUT_S
    assert float(unit["Service"]["TimeoutStopSec"][0]) >= 2 * longest_s


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / "dike.service"
    # It looks whether what is started is there.
    copy.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/dike/bin/dike ", f"{sys.executable} "))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all series that a service has which has run a job."""
    folder = tmp_path_factory.mktemp("database")
    with contextlib.closing(ServiceStore(f"sqlite:///{folder}/service.db")) as store:
        store.add_job(JobRecord("job", JobKind.TRAINING, "ann", "train.py", {}, bundle_token="token"), b"bundle")
        store.save([TaskRecord("T-0", "job", "S-0", "node", "127.0.0.1", "worker:0", "running", executor_id="E")], {})
        metrics = ServiceMetrics(store)
        metrics.answered("GET", "/", 200, 0.1)
        return set(re.findall(r"^(\w+)[{ ]", metrics.text(by_user=True).decode(), re.MULTILINE))


def names_in(expression: str) -> set[str]:
    """The metrics in an expression of PromQL."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) \([^)]*\)", "", expression)
    words = set(re.findall(r"(?<!\w)[a-z_]\w*(?!\w*\()", bare))
    functions = set(re.findall(r"(\w+)\s*\(", bare))
    return words - functions - {"and", "or", "by", "on"}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_names_in_an_expression_are_found() -> None:
    assert names_in('sum by (le) (rate(a_bucket{state=~"b|c"}[5m])) > 6 * 3600 or on (d) e / f') == {
        *("a_bucket", "e", "f")
    }


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_rule_is_about_a_metric_there_is(rule: dict[str, Any], exported: set[str]) -> None:
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"].endswith((".", "?"))
    named = names_in(rule["expr"])
    assert named
    assert named <= exported | PROMETHEUS_OWN


def test_every_panel_shows_a_metric_there_is(exported: set[str]) -> None:
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for expression in expressions for name in names_in(expression)}
    assert asked <= exported
    # What the service counts is on the dashboard, or in a rule.
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in exported if name.startswith("dike_")}
    used = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in asked}
    used |= {re.sub(r"_(bucket|sum|count|total)$", "", name) for rule in rules() for name in names_in(rule["expr"])}
    assert families - used == {"dike_info"}
    assert "label_values(dike_info" in json.dumps(dashboard["templating"])
    # No two lie on each other.
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in panels]
    cells = [(column, row) for x, y, w, h in places for column in range(x, x + w) for row in range(y, y + h)]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24


def test_the_image_is_made_of_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if re.match(r"[A-Z]+ ", line)]
    instructions = [line.split(maxsplit=1) for line in lines]
    of = dict(instructions)
    assert of["FROM"] == "python:3.11-slim"
    assert of["USER"] == "dike"
    assert instructions.index(["USER", "dike"]) > max(n for n, (name, _) in enumerate(instructions) if name == "RUN")
    # What the comment says to do before: its sources are there, and make what is copied.
    built = re.search(r"pip wheel --no-deps --wheel-dir dist (.*)", text)
    assert built is not None
    assert all((ROOT / source / "pyproject.toml").is_file() for source in built[1].split())
    build = re.search(r"docker build --file (\S+) --tag dike dist\n", text)
    assert build is not None
    assert ROOT / build[1] == DEPLOY / "Dockerfile"
    assert of["COPY"] == "*.whl /tmp/wheels/"
    assert json.loads(of["ENTRYPOINT"]) == ["dike"]
    command, *options = json.loads(of["CMD"])
    assert command == "serve"
    started = re.search(r"dike (serve --master .*)", text)
    assert started is not None
    assert {*options, *options_in(started[1])} <= options_of_serve()
    assert re.findall(r"://([\w.]+)[:/]", text.replace("sqlite:////", "")) == ["127.0.0.1"], "no names of hosts"


def test_the_pack_s_ports_are_the_service_s(unit: dict[str, dict[str, list[str]]]) -> None:
    from framework.service.access import DEFAULT_LISTEN

    port = DEFAULT_LISTEN.rpartition(":")[2]
    assert f":{port} " in unit["Service"]["ExecStart"][0]
    assert f"EXPOSE {port} " in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert f"127.0.0.1:{port}/healthz" in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
