"""What operators of a cluster copy from `deploy/` and `examples/slurm/`: known options, and what schemas allow."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from framework.cli import app
from framework.cluster.machine import DEFAULT_LISTEN, DRAIN_TIMEOUT_S

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
KUBERNETES = ROOT / "deploy" / "kubernetes.yaml"
SBATCH = ROOT / "examples" / "slurm" / "cluster.sbatch"
PORT = DEFAULT_LISTEN.rpartition(":")[2]


def check_options(words: list[str]) -> None:
    """Whether `dike WORDS` names a command and options that there are."""
    assert words[0] == "cluster"
    helps = CliRunner().invoke(app, [*words[:2], "--help"], env={"COLUMNS": "200"})
    assert helps.exit_code == 0
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z][a-z-]+", helps.stdout))


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8")))


def containers() -> dict[str, dict[str, Any]]:
    sets = [one["spec"]["template"]["spec"] for one in manifests() if one["kind"] == "StatefulSet"]
    return {one["containers"][0]["name"]: {**one["containers"][0], "pod": one} for one in sets}


@pytest.mark.parametrize("manifest", manifests(), ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_kubernetes_allows_it(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_the_schemas_find_a_mistake() -> None:
    wrong = manifests()[1]
    wrong["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_the_parts_on_kubernetes_match() -> None:
    head, member = containers()["head"], containers()["member"]
    for container in (head, member):
        check_options(container["args"])
        assert {one["name"] for one in container["volumeMounts"]} <= {"state", "token", "memory"}
    services = {one["metadata"]["name"]: one["spec"] for one in manifests() if one["kind"] == "Service"}
    assert member["args"][2] == f"dike-head:{PORT}"
    assert services["dike-head"]["ports"][0]["port"] == head["ports"][0]["containerPort"] == int(PORT)
    mount = next(one for one in member["volumeMounts"] if one["name"] == "token")
    assert f"{mount['mountPath']}/token" in member["args"]
    assert member["pod"]["terminationGracePeriodSeconds"] > DRAIN_TIMEOUT_S
    for manifest in manifests():
        if manifest["kind"] == "StatefulSet":
            spec = manifest["spec"]
            assert spec["serviceName"] in services
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
            assert services[spec["serviceName"]]["selector"] == spec["selector"]["matchLabels"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_units_start_what_there_is(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    [start] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, *words = shlex.split(start)
    assert program == "/opt/dike/bin/dike"
    check_options(words)
    assert "--foreground" in words
    # With the default, systemd would end the tasks before they are saved.
    assert "\nKillMode=mixed\n" in text
    if unit.stem == "dike-member":
        assert float(re.findall(r"^TimeoutStopSec=(.*)$", text, re.MULTILINE)[0]) > DRAIN_TIMEOUT_S
    else:
        assert f":{PORT} " in start


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_understands_the_units(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    # It looks whether what is started is there.
    copy.write_text(unit.read_text(encoding="utf-8").replace("/opt/dike/bin/dike ", f"{sys.executable} "))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.integration
def test_the_batch_script_is_bash_that_calls_what_there_is() -> None:
    done = subprocess.run(["bash", "-n", SBATCH], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    text = SBATCH.read_text(encoding="utf-8").replace('"${names[@]}"', "--name x --machine-name y")
    commands = re.findall(r"dike (cluster .*?)(?:\)| <| *$)", text, re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["start", "join"]
    for command in commands:
        check_options(shlex.split(command))
    signal_s = int(re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.MULTILINE)[0])
    assert signal_s > DRAIN_TIMEOUT_S
