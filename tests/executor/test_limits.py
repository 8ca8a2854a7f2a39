"""Resource limits of a run: the kernel's control groups, and the message for a run that exceeds its limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor import limits
from executor.limits import LIMITS_VARIABLE, PROCESSES_VARIABLE, ControlGroup, ControlGroups, RunLimits

LIMITS = RunLimits(processes=40, mem_mib=192.0, cpus=1.5, more_memory="--slot-mem")


def _written(folder: Path, *names: str) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in names}


def test_a_group_of_version_2_gets_its_limits_and_says_what_was_exceeded(tmp_path: Path) -> None:
    for name in ("pids.max", "memory.max", "cpu.max"):
        (tmp_path / name).write_text("max")
    group = ControlGroup(dict.fromkeys(("pids", "memory", "cpu"), tmp_path), LIMITS)
    assert group.folders == [str(tmp_path)]
    assert _written(tmp_path, "pids.max", "memory.max", "cpu.max") == {
        "pids.max": "40",
        "memory.max": str(192 << 20),
        "cpu.max": "150000 100000",
    }
    assert group.exceeded_limit() == ""
    (tmp_path / "memory.events").write_text("low 0\nmax 7\noom 1\noom_kill 0\n")
    (tmp_path / "pids.events").write_text("max 0\n")
    assert group.exceeded_limit() == ""
    (tmp_path / "memory.events").write_text("low 0\nmax 7\noom 1\noom_kill 1\n")
    assert group.exceeded_limit() == "it exceeded its memory of 192 MiB; raise --slot-mem MIB"
    (tmp_path / "pids.events").write_text("max 3\n")
    assert group.exceeded_limit().startswith("it exceeded its limit of 40 processes and threads")


def test_a_group_of_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("pids", "memory", "cpu")}
    names = {"pids": "pids.max", "memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us"}
    for controller, folder in folders.items():
        folder.mkdir()
        (folder / names[controller]).write_text("-1")
    group = ControlGroup(folders, LIMITS)
    assert group.folders == sorted(map(str, folders.values()))
    assert {each: (folders[each] / name).read_text() for each, name in names.items()} == {
        "pids": "40",
        "memory": str(192 << 20),
        "cpu": "150000",
    }
    (folders["memory"] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert "192 MiB" in group.exceeded_limit()


USER = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope"


@pytest.mark.parametrize(
    ("mounts", "own", "writable", "parents"),
    [
        # root, version 2
        ("/ /sys/fs/cgroup - cgroup2 cgroup2 rw", f"0::{USER}", "/sys", [("all", "/sys/fs/cgroup")]),
        # a session of systemd's
        (
            "/ /sys/fs/cgroup - cgroup2 cgroup2 rw",
            f"0::{USER}",
            "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service",
            [("all", "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service")],
        ),
        # a login by SSH: nothing below belongs to the account
        ("/ /sys/fs/cgroup - cgroup2 cgroup2 rw", "0::/user.slice/session-1.scope", "/home", []),
        # version 1, in a container whose own group is mounted as the root
        (
            "/docker/1 /sys/fs/cgroup/pids - cgroup cgroup rw,pids",
            "4:pids:/docker/1/2",
            "/sys",
            [("pids", "/sys/fs/cgroup/pids/2")],
        ),
    ],
)
def test_groups_are_made_where_the_account_may(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mounts: str,
    own: str,
    writable: str,
    parents: list[tuple[str, str]],
) -> None:
    (tmp_path / "mounts").write_text(f"25 24 0:22 {mounts.replace(' - ', ' rw shared:4 - ')}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(limits, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(limits, "_OWN", tmp_path / "own")
    monkeypatch.setattr("os.access", lambda path, _: str(path).startswith(writable))
    found = [("all" if len(names) == 3 else names[0], str(path)) for names, path in limits._parents()]
    assert found == parents


def test_a_machine_without_groups_limits_nothing_but_by_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMITS_VARIABLE, raising=False)
    monkeypatch.delenv(PROCESSES_VARIABLE, raising=False)
    groups = ControlGroups(LIMITS)
    group = groups.make()
    assert (group.folders, group.exceeded_limit(), group.max_processes) == ([], "", None)
    monkeypatch.setenv(PROCESSES_VARIABLE, "300")
    assert groups.make().max_processes == 300
    assert RunLimits.of_slot(0, 0.25, "--slot-mem") == RunLimits(300, 0, 1.0, "--slot-mem")
