"""A slot of a search with real processes: it runs the wanted trial, and reports each end until it is acknowledged."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from dike.trial.spec import TrialSpec
from executor import limits
from executor.limits import PROCESSES_VARIABLE
from executor.slot_order import LAUNCHER, SlotOrder
from executor.trial_messages import (
    AcknowledgedOutput,
    AcknowledgedReports,
    Losses,
    RunEnd,
    RunKey,
    SlotStatus,
    TrialOutput,
    TrialRun,
    Wanted,
    decode_slot_message,
)
from executor.zygote import PROGRAM
from framework.project import bundle
from tests.executor.slot_process import TASK
from tests.executor.slot_stage import (
    DEADLINE_S,
    FAKE_ZYGOTE,
    HERE,
    LIMITED,
    ROOT,
    SlotStage,
    skip_without_groups,
    wait_gone,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

TOKEN = "t" * 32
SUSPEND_TIMEOUT_S = DEADLINE_S


class TrialSlotStage(SlotStage[SlotStatus]):
    """A search's slot."""

    def __init__(
        self,
        folder: Path,
        order: SlotOrder,
        zygote: Sequence[str] = FAKE_ZYGOTE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.losses: list[Losses] = []
        self.output: list[TrialOutput] = []
        self._numbers: Counter[str] = Counter()
        super().__init__(folder, order.encode(), zygote, environment)

    def take(self, message: str) -> None:
        said = decode_slot_message(message)
        if isinstance(said, SlotStatus):
            self.statuses.append(said)
        elif isinstance(said, TrialOutput):
            self.output.append(said)
        else:
            self.losses.append(said)

    def wants(
        self,
        run: TrialRun | None,
        *,
        leave: bool = False,
        known: tuple[RunKey, ...] = (),
        reports: tuple[AcknowledgedReports, ...] = (),
        output: tuple[AcknowledgedOutput, ...] = (),
        stop: bool = False,
        number: int | None = None,
        memory_bytes: int = 0,
        task: str = TASK,
        **more: tuple[RunKey, ...],
    ) -> None:
        self._numbers[task] += number is None
        wish = Wanted(number or self._numbers[task], run, leave, known, reports, output, stop, memory_bytes, **more)
        self.say(f"wanted {wish.encode()} {task}")

    def launch(self, task: str) -> None:
        """A slot more, in the same process."""
        self.say(f"launch {task}")
        self.wait_for(lambda: self.states(task), lambda: self.updates)

    def states(self, task: str) -> list[str]:
        return [update["state"] for update in self.updates if update["task_id"]["value"] == task]

    def children(self, output: str, *, recursive: bool = True) -> list[psutil.Process]:
        """Trials are the children of supervisors."""
        return super().children(output, recursive=recursive)

    def end_of(self, trial: int, run: int = 0) -> RunEnd:
        status = self.status_when(lambda status: any(end.key == (trial, run) for end in status.ends))
        return next(end for end in status.ends if end.key == (trial, run))

    def trains(self, trial: int, run: int = 0, task: str = TASK) -> SlotStatus:
        return self.status_when(
            lambda status: status.task_id == task and status.run == (trial, run) and status.training and status.step > 0
        )

    def task_end(self) -> tuple[str, SlotStatus]:
        """State and last words of the slot's task, whose process has ended."""
        last = self.ended()
        status = decode_slot_message(last["data"])
        assert isinstance(status, SlotStatus)
        return last["state"], status


@pytest.fixture(scope="module")
def bundle_url() -> Iterator[str]:
    with bundle.BundleServer({TOKEN: bundle.pack(HERE / "trial_script.py")}.get, "127.0.0.1") as server:
        yield server.url(TOKEN)


@pytest.fixture
def order(bundle_url: str) -> SlotOrder:
    return SlotOrder("search", bundle_url, "trial_script.py", gpu_devices=(), suspend_timeout_s=SUSPEND_TIMEOUT_S)


@pytest.fixture
def slot(tmp_path: Path, order: SlotOrder) -> Iterator[TrialSlotStage]:
    process = TrialSlotStage(tmp_path, order)
    yield process
    process.close()


CHECKPOINTS = "/proc/checkpoints"
"""Not writable by any process."""


def trial(number: int, way: str, run: int = 0, resume_from: str | None = None) -> TrialRun:
    spec = TrialSpec("search", number, run, {"lr": 0.1}, f"{CHECKPOINTS}/{number}", resume_from)
    return TrialRun(spec, (way,))


def test_a_run_that_does_nothing_for_too_long_is_ended_as_a_failure(tmp_path: Path, order: SlotOrder) -> None:
    process = TrialSlotStage(tmp_path, dataclasses.replace(order, stall_timeout_s=2.0))
    try:
        process.wants(trial(0, "hang"))
        end = process.end_of(0)
        assert (end.outcome, end.message) == (
            "timed_out",
            "it stalled: no report, no output and no CPU use for 2 s (--stall-timeout)",
        )
        assert end.last["step"] == 5
        process.wants(trial(1, "finish"), known=((0, 0),))
        assert process.end_of(1).outcome == "finished", "the slot continues with the next run"
    finally:
        process.close()


def test_a_run_that_takes_too_long_is_ended_as_a_failure(slot: TrialSlotStage) -> None:
    slot.wants(dataclasses.replace(trial(0, "stubborn"), limit_s=1.5))
    end = slot.end_of(0)
    assert (end.outcome, end.message) == ("timed_out", "it exceeded the maximum duration of a trial (--trial-timeout)")


def test_a_run_that_ends_by_itself_is_told_until_that_is_known(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "finish"))
    end = slot.end_of(0)
    assert (end.outcome, end.exit_code, end.message, end.suspend_s) == ("finished", 0, "", None)
    assert end.preemptible
    assert end.last == {
        "type": "progress",
        "step": 3,
        "loss": 1 / 3,
        "value": 0.25,
        "metrics": {"accuracy": 0.3, "f1": 0.75},
    }
    assert "parameters {'lr': 0.1}" in end.tail
    assert end.seconds > 0
    assert end.usage.rss_bytes is not None
    assert end.usage.rss_bytes > 1 << 20
    assert end.usage.cpu is not None
    assert [report["step"] for losses in slot.losses for report in losses.reports] == [1, 2, 3]
    assert (slot.sandbox / "trial-0-run-0.out").read_text() == end.tail
    assert not slot.groups
    # Said again though nothing has changed, and not started again though it is still wanted.
    told = len(slot.statuses)
    slot.status_when(lambda _: len(slot.statuses) > told)
    assert slot.statuses[-1].ends == (end,)
    slot.wants(None, known=((0, 0),))
    assert slot.status_when(lambda status: status.number == 2).ends == ()
    assert [update["state"] for update in slot.updates] == ["TASK_RUNNING"]


def test_reports_are_sent_again_until_they_are_known(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "finish"))
    assert slot.end_of(0).reports == 3
    sent = len(slot.losses)
    slot.wants(None, reports=((0, 0, 1),))
    slot.wait_for(lambda: len(slot.losses) > sent, lambda: slot.losses)
    again = slot.losses[-1]
    assert (again.first, again.oldest, [report["step"] for report in again.reports]) == (1, 1, [2, 3])
    # The end was not acknowledged: the slot's last status contains all reports that were not acknowledged.
    slot.wants(None, leave=True)
    _, status = slot.task_end()
    (last,) = status.losses
    assert (last.trial, last.run, last.first) == (0, 0, 1)
    assert last.reports == again.reports


def test_output_is_sent_as_it_comes_and_again_until_it_is_known(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "chatty"))
    slot.trains(0)
    # While it runs: the beginning, then more output than is sent in one piece, so its middle is left out.
    slot.wait_for(lambda: any(b"all said" in piece.data for piece in slot.output), lambda: slot.output[-1:])
    first, *others = slot.output
    assert first.data.startswith(b"parameters {'lr': 0.1}\n")
    assert any(piece.skipped for piece in others)
    slot.wants(None)
    end = slot.end_of(0)
    printed = (slot.sandbox / "trial-0-run-0.out").read_bytes()
    assert end.output == len(printed)
    whole = b"".join(b"." * piece.skipped + piece.data for piece in slot.output)
    assert len(whole) == len(printed)
    assert all(printed[piece.offset : piece.end] == piece.data for piece in slot.output)
    assert all(piece.data.decode() for piece in slot.output), "characters are not cut"
    # A receiver that misses output sends the offset of the gap.
    sent = len(slot.output)
    slot.wants(None, output=((0, 0, end.output - 8),))
    slot.wait_for(lambda: len(slot.output) > sent, lambda: slot.output[sent:])
    assert (slot.output[-1].offset, slot.output[-1].data) == (end.output - 8, printed[-8:])
    # The end was not acknowledged: the last status contains the end of the output.
    slot.wants(None, leave=True)
    _, status = slot.task_end()
    assert (status.output[-1].end, status.ends[0].output) == (len(printed), len(printed))


def test_a_suspended_run_frees_its_slot_and_resumes_later(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "train"))
    slot.trains(0)
    slot.wants(trial(1, "train"))
    first = slot.end_of(0)
    assert (first.outcome, first.exit_code, first.message) == ("suspended", 75, "")
    assert first.checkpoint == f"{CHECKPOINTS}/0/run-0-step-{first.step}"
    assert first.suspend_s is not None
    assert 0 < first.suspend_s < SUSPEND_TIMEOUT_S
    slot.trains(1)
    slot.wants(trial(0, "train", 1, first.checkpoint), known=((0, 0),))
    assert slot.end_of(1).outcome == "suspended"
    slot.status_when(lambda status: status.run == (0, 1) and status.step > first.step)
    slot.wants(None)
    second = slot.end_of(0, 1)
    assert second.step > first.step
    steps = [report["step"] for losses in slot.losses if losses.trial == 0 for report in losses.reports]
    assert steps == list(range(1, second.step + 1))
    # One run at a time: a run stays in the slot until its end is reported.
    for status in slot.statuses:
        assert status.run not in [end.key for end in status.ends]
    assert slot.status_when(lambda status: status.run is None).zygote_ready


MEMORY_BYTES = 1 << 40
"""Enough for any number of runs."""


def family_of(slot: TrialSlotStage, trial: int) -> set[psutil.Process]:
    """The processes of a trial."""
    return set(slot.children(f"trial-{trial}"))


def is_still(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def test_a_run_suspended_in_memory_continues_in_the_same_process(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "family"), memory_bytes=MEMORY_BYTES)
    slot.trains(0)
    family = family_of(slot, 0)
    slot.wants(trial(1, "train"), memory_bytes=MEMORY_BYTES)
    first = slot.end_of(0)
    assert (first.outcome, first.exit_code, first.message) == ("suspended", None, "")
    assert first.checkpoint == f"{CHECKPOINTS}/0/run-0-step-{first.step}"
    assert first.suspend_s is not None
    status = slot.trains(1)
    assert (status.paused, status.continued) == (((0, 0),), False)
    assert len(family) == 3
    assert all(map(is_still, family))
    slot.wants(trial(0, "family", 1, first.checkpoint), known=((0, 0),), memory_bytes=MEMORY_BYTES)
    second = slot.end_of(1)
    status = slot.status_when(lambda status: status.run == (0, 1) and status.training and status.step > first.step)
    assert (status.paused, status.continued) == (((1, 0),), True)
    assert family_of(slot, 0) == family
    assert not any(map(is_still, family))
    assert is_still(slot.children("trial-1")[0])
    # Each run has its own reports and its own output.
    slot.wants(trial(1, "train", 1, second.checkpoint), known=((0, 0), (1, 0)), memory_bytes=MEMORY_BYTES)
    again = slot.end_of(0, 1)
    assert again.checkpoint == f"{CHECKPOINTS}/0/run-1-step-{again.step}"
    steps = {
        number: [
            report["step"] for each in slot.losses if (each.trial, each.run) == (0, number) for report in each.reports
        ]
        for number in (0, 1)
    }
    assert steps[0] == list(range(1, first.step + 1))
    assert steps[1] == list(range(first.step + 1, again.step + 1))
    slot.wait_for(lambda: any((piece.trial, piece.run) == (0, 1) for piece in slot.output), lambda: slot.output)
    printed = {piece.run: (piece.offset, piece.data) for piece in slot.output if piece.trial == 0}
    assert printed == {0: (0, b"parameters {'lr': 0.1}\n"), 1: (0, b"run 1\n")}
    assert again.usage.cpu is not None
    assert again.usage.cpu < 64
    slot.status_when(lambda status: status.run == (1, 1) and status.training)
    # When the slot ends, its paused processes end too.
    slot.wants(None, leave=True, known=((0, 1), (1, 0)), memory_bytes=MEMORY_BYTES)
    slot.task_end()
    assert not any(each.is_running() for each in family)
    assert not (slot.sandbox / "trial-0").exists()


def test_a_run_that_cannot_be_saved_is_suspended_in_memory_alone(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "unsaved"), memory_bytes=MEMORY_BYTES)
    before = slot.status_when(lambda status: status.run == (0, 0) and status.pausable)
    assert not before.preemptible
    (process,) = slot.children("trial-0")
    slot.wants(trial(1, "train"), memory_bytes=MEMORY_BYTES)
    first = slot.end_of(0)
    assert (first.outcome, first.exit_code, first.checkpoint, first.message) == ("suspended", None, None, "")
    status = slot.trains(1)
    assert status.paused == status.unsaved == ((0, 0),)
    assert is_still(process)
    slot.wants(trial(0, "unsaved", 1), known=((0, 0),), memory_bytes=MEMORY_BYTES)
    status = slot.status_when(lambda status: status.run == (0, 1) and status.training)
    assert (status.paused, status.unsaved, status.continued) == (((1, 0),), (), True)
    slot.status_when(lambda status: status.run == (0, 1) and status.pausable)
    slot.wants(trial(2, "train"), known=((0, 0), (1, 0)), memory_bytes=MEMORY_BYTES)
    again = slot.end_of(0, 1)
    steps = [report["step"] for each in slot.losses if each.trial == 0 for report in each.reports]
    assert steps == list(range(1, len(steps) + 1))
    assert (again.outcome, again.checkpoint) == ("suspended", None)
    # An unsaved run is evicted last, regardless of its rank.
    slot.wants(trial(3, "train"), known=((0, 1),), memory_bytes=MEMORY_BYTES, resume_order=((1, 0), (2, 0), (0, 1)))
    slot.status_when(lambda status: status.run == (3, 0) and status.training)
    slot.wants(trial(3, "train"), memory_bytes=1, resume_order=((1, 0), (2, 0), (0, 1)))
    left = slot.status_when(lambda status: not status.paused).paused
    assert left == ()
    seen = [status.paused for status in slot.statuses if status.run == (3, 0)]
    assert all((0, 1) in paused for paused in seen if paused)
    slot.wait_for(lambda: not process.is_running(), lambda: slot.statuses[-1])


def test_a_run_that_cannot_be_saved_keeps_its_slot_where_another_has_no_room_beside_it(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "unsaved"), memory_bytes=1 << 20)
    before = slot.trains(0)
    slot.wants(trial(1, "finish"), memory_bytes=1 << 20)
    slot.status_when(lambda status: status.number == 2)
    beats = len(slot.statuses)
    slot.wait_for(lambda: len(slot.statuses) > beats + 2, lambda: slot.statuses[-1])
    after = slot.statuses[-1]
    assert (after.run, after.pausable, after.suspending) == ((0, 0), False, False)
    assert after.step > before.step


OTHER = "other"
"""A slot beside the first."""


def give_way_beside(slot: TrialSlotStage, way: str) -> tuple[set[psutil.Process], RunEnd]:
    """Preempts trial 0 by trial 1 in a slot that has a neighbor; returns its processes and the end of its run."""
    slot.launch(OTHER)
    slot.wants(None, memory_bytes=MEMORY_BYTES, task=OTHER)
    slot.wants(trial(0, way), memory_bytes=MEMORY_BYTES)
    slot.trains(0)
    slot.status_when(lambda status: status.run == (0, 0) and (status.preemptible or status.pausable))
    family = family_of(slot, 0)
    slot.wants(trial(1, "train"), memory_bytes=MEMORY_BYTES)
    end = slot.end_of(0)
    slot.trains(1)
    return family, end


@pytest.mark.parametrize("way", ["family", "unsaved"])
def test_a_run_suspended_in_memory_continues_in_a_neighbor_slot(slot: TrialSlotStage, way: str) -> None:
    family, first = give_way_beside(slot, way)
    assert all(map(is_still, family))
    seen = slot.status_when(lambda status: status.task_id == OTHER and status.paused)
    assert (seen.paused, bool(seen.unsaved)) == (((0, 0),), way == "unsaved")
    slot.wants(trial(0, way, 1, first.checkpoint), memory_bytes=MEMORY_BYTES, task=OTHER)
    status = slot.trains(0, 1, OTHER)
    assert (status.continued, status.paused) == (True, ())
    assert family_of(slot, 0) == family
    assert not any(map(is_still, family))
    # Both run at a time, each in its slot.
    now = len(slot.statuses)
    slot.status_when(lambda status: status.run == (1, 0), now)
    slot.status_when(lambda status: status.run == (0, 1), now)
    # The slot that it came from ends: that is nothing to it.
    slot.wants(None, leave=True, memory_bytes=MEMORY_BYTES)
    slot.wait_for(lambda: "TASK_FINISHED" in slot.states(TASK), lambda: slot.updates)
    after = slot.status_when(lambda status: status.run == (0, 1) and status.step > first.last["step"] + 10)
    # The process that ran there is paused now.
    assert after.paused == ((1, 0),)
    assert after.unsaved_bytes == 0
    slot.wants(None, leave=True, memory_bytes=MEMORY_BYTES, task=OTHER)
    slot.ended()
    assert slot.states(OTHER) == ["TASK_RUNNING", "TASK_FINISHED"]
    assert not any(each.is_running() for each in family)


def test_a_slot_that_is_killed_leaves_those_beside_it_alone(slot: TrialSlotStage) -> None:
    family, first = give_way_beside(slot, "unsaved")
    slot.wants(trial(2, "train"), memory_bytes=MEMORY_BYTES, task=OTHER)
    slot.trains(2, task=OTHER)
    (killed,) = slot.children("trial-1")
    slot.kill(5.0)
    slot.wait_for(lambda: "TASK_KILLED" in slot.states(TASK), lambda: slot.updates)
    assert not killed.is_running()
    assert all(map(is_still, family))
    slot.wants(trial(0, "unsaved", 1), known=((2, 0),), memory_bytes=MEMORY_BYTES, task=OTHER)
    assert slot.trains(0, 1, OTHER).step > first.last["step"]


def test_the_memory_of_all_slots_is_one(slot: TrialSlotStage) -> None:
    slot.launch(OTHER)
    slot.wants(None)
    slot.status_when(lambda status: status.zygote_ready)
    (zygote,) = slot.children("zygote")
    # Each has room for one and a half.
    memory_bytes = int((zygote.memory_info().rss + 3 * (72 << 20)) / 0.9 / 2)
    slot.wants(trial(0, "large"), memory_bytes=memory_bytes)
    slot.wants(trial(1, "large"), memory_bytes=memory_bytes, task=OTHER)
    slot.trains(0)
    slot.trains(1, task=OTHER)
    slot.wants(trial(2, "large"), memory_bytes=memory_bytes)
    slot.trains(2)
    assert slot.status_when(lambda status: status.task_id == OTHER and status.paused).paused == ((0, 0),)
    # The fourth one does not fit.
    slot.wants(trial(3, "large"), memory_bytes=memory_bytes, task=OTHER)
    slot.trains(3, task=OTHER)
    slot.status_when(lambda status: len(status.paused) == 1 and status.run == (3, 0))


def test_a_run_whose_supervisor_is_killed_ends_with_all_that_it_has_started(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "family"))
    slot.trains(0)
    family = family_of(slot, 0)
    (process,) = [each for each in family if each.cmdline()[0] != "sleep"]
    supervisor = process.parent()
    assert supervisor is not None
    assert supervisor.pid != slot.process.pid
    supervisor.kill()
    end = slot.end_of(0)
    assert (end.outcome, end.exit_code) == ("failed", -9)
    assert not any(each.is_running() for each in family)


class GpuSlotStage(TrialSlotStage):
    """A slot with a GPU that is fake.

    Args:
        folder, order: as `TrialSlotStage`.
        fails, hangs: what its driver refuses, and what it never ends.
        held_bytes: GPU memory of each trial.
        always_pause: see `SlotOrder`.
        is_seen: whether NVIDIA's library shows the GPU.
        offload_timeout_s: in the place of the product's.
        slots_per_gpu: see `SlotOrder`.
    """

    def __init__(
        self,
        folder: Path,
        order: SlotOrder,
        fails: str = "",
        hangs: str = "",
        held_bytes: int = 1 << 30,
        always_pause: bool = True,
        is_seen: bool = True,
        offload_timeout_s: float | None = None,
        slots_per_gpu: int = 1,
    ) -> None:
        self._diary = folder / "driver.txt"
        fake = {"FAKE_GPU": str(self._diary), "FAKE_GPU_FAILS": fails, "FAKE_GPU_HANGS": hangs}
        fake["FAKE_GPU_BYTES"] = str(held_bytes)
        fake["FAKE_GPU_UNSEEN"] = "" if is_seen else "1"
        if offload_timeout_s is not None:
            fake["OFFLOAD_TIMEOUT_S"] = str(offload_timeout_s)
        own = dataclasses.replace(order, gpu_devices=(0,), always_pause=always_pause, slots_per_gpu=slots_per_gpu)
        super().__init__(folder, own, environment=fake)

    @property
    def log(self) -> str:
        return (self.sandbox.parent / "slot.log").read_text()

    @property
    def asked(self) -> list[str]:
        """What the driver has done."""
        return self._diary.read_text().split() if self._diary.exists() else []


def give_way(gpu_slot: GpuSlotStage, way: str) -> tuple[psutil.Process, RunEnd]:
    """Trial 0 trains in memory until trial 1 wants the slot; its process, and the end of its first run."""
    gpu_slot.wants(trial(0, "train"), memory_bytes=MEMORY_BYTES)
    gpu_slot.trains(0)
    (process,) = gpu_slot.children("trial-0")
    gpu_slot.wants(trial(1, way), memory_bytes=MEMORY_BYTES)
    return process, gpu_slot.end_of(0)


@pytest.fixture
def gpu_slot(tmp_path: Path, order: SlotOrder, request: pytest.FixtureRequest) -> Iterator[GpuSlotStage]:
    given = getattr(request, "param", {})
    process = GpuSlotStage(tmp_path, order, **(given if isinstance(given, dict) else {"fails": given}))
    yield process
    process.close()


def test_gpu_memory_is_offloaded_while_a_process_is_paused(gpu_slot: GpuSlotStage) -> None:
    process, first = give_way(gpu_slot, "train")
    assert gpu_slot.asked == ["lock", "checkpoint"]
    assert (first.outcome, first.exit_code) == ("suspended", None)
    assert gpu_slot.trains(1).paused == ((0, 0),)
    assert is_still(process)
    gpu_slot.wants(trial(0, "train", 1, first.checkpoint), known=((0, 0),), memory_bytes=MEMORY_BYTES)
    status = gpu_slot.status_when(lambda status: status.run == (0, 1) and status.training)
    assert (status.paused, status.continued) == (((1, 0),), True)
    assert gpu_slot.asked == ["lock", "checkpoint", "lock", "checkpoint", "restore", "unlock"]


@pytest.mark.parametrize(
    ("gpu_slot", "stays"),
    [({"slots_per_gpu": 2}, True), ({"slots_per_gpu": 2, "held_bytes": 0}, False), ({"held_bytes": 0}, True)],
    indirect=["gpu_slot"],
)
def test_a_trial_on_a_shared_gpu_is_paused_only_if_its_gpu_memory_is_known(gpu_slot: GpuSlotStage, stays: bool) -> None:
    _, end = give_way(gpu_slot, "train")
    assert end.exit_code == (None if stays else 75)


@pytest.mark.parametrize(("gpu_slot", "limit"), [({"slots_per_gpu": 4}, "3584"), ({}, "None")], indirect=["gpu_slot"])
def test_a_trial_that_shares_its_gpu_has_a_limit(gpu_slot: GpuSlotStage, limit: str) -> None:
    gpu_slot.wants(trial(0, "gpu memory"))
    assert f"MEMORY {limit}\n" in gpu_slot.end_of(0).tail


@pytest.mark.parametrize("gpu_slot", ["lock", "checkpoint", "restore", "unlock"], indirect=True)
def test_a_run_that_the_driver_cannot_restore_resumes_from_its_checkpoint(gpu_slot: GpuSlotStage) -> None:
    process, first = give_way(gpu_slot, "finish")
    assert (first.outcome, first.message) == ("suspended", "")
    assert first.checkpoint == f"{CHECKPOINTS}/0/run-0-step-{first.step}"
    gpu_slot.end_of(1)
    gpu_slot.wants(trial(0, "train", 1, first.checkpoint), known=((0, 0), (1, 0)), memory_bytes=MEMORY_BYTES)
    status = gpu_slot.status_when(lambda status: status.run == (0, 1) and status.training)
    assert (status.paused, status.continued) == ((), False)
    assert not process.is_running()


@pytest.mark.parametrize("gpu_slot", ["state"], indirect=True)
def test_a_driver_that_cannot_do_it_leaves_checkpoints(gpu_slot: GpuSlotStage) -> None:
    gpu_slot.wants(trial(0, "train"), memory_bytes=MEMORY_BYTES)
    gpu_slot.trains(0)
    gpu_slot.wants(None, memory_bytes=MEMORY_BYTES)
    assert gpu_slot.end_of(0).exit_code == 75
    assert gpu_slot.asked == []
    assert "not paused: the driver is too old" in gpu_slot.log


@pytest.mark.parametrize(
    ("gpu_slot", "stays"),
    [({"always_pause": False, "held_bytes": 1}, True), ({"always_pause": False, "held_bytes": 1 << 40}, False)],
    indirect=["gpu_slot"],
)
def test_gpu_memory_is_moved_where_that_is_sooner_than_a_new_process(gpu_slot: GpuSlotStage, stays: bool) -> None:
    _, first = give_way(gpu_slot, "train")
    assert first.exit_code == (None if stays else 75)
    assert gpu_slot.asked == (["lock", "checkpoint"] if stays else [])
    assert ("takes longer than a new process" in gpu_slot.log) == (not stays)


@pytest.mark.parametrize("gpu_slot", [{"held_bytes": 0}], indirect=True)
def test_a_process_that_holds_no_gpu_memory_stays_without_the_driver(gpu_slot: GpuSlotStage) -> None:
    process, first = give_way(gpu_slot, "train")
    assert (first.exit_code, gpu_slot.asked) == (None, [])
    assert is_still(process)


@pytest.mark.parametrize("gpu_slot", [{"held_bytes": 0, "is_seen": False}], indirect=True)
def test_no_process_stays_on_a_gpu_that_nobody_sees(gpu_slot: GpuSlotStage) -> None:
    _, first = give_way(gpu_slot, "train")
    assert (first.exit_code, gpu_slot.asked) == (75, [])
    assert "does not show the slot's GPUs" in gpu_slot.log


@pytest.mark.parametrize(
    "gpu_slot",
    [{"always_pause": False, "held_bytes": 1, "fails": fails} for fails in ("checkpoint", "restore")],
    indirect=True,
)
def test_gpu_memory_is_not_moved_again_where_the_driver_has_failed(gpu_slot: GpuSlotStage) -> None:
    process, first = give_way(gpu_slot, "finish")
    gpu_slot.end_of(1)
    gpu_slot.wants(trial(0, "train", 1, first.checkpoint), known=((0, 0), (1, 0)), memory_bytes=MEMORY_BYTES)
    status = gpu_slot.status_when(lambda status: status.run == (0, 1) and status.training and status.step)
    assert not status.continued
    assert not process.is_running()
    before = gpu_slot.asked
    gpu_slot.wants(trial(2, "train"), memory_bytes=MEMORY_BYTES)
    assert gpu_slot.end_of(0, 1).exit_code == 75
    assert gpu_slot.asked == before
    assert "the GPU's driver has failed before" in gpu_slot.log


def test_gpu_memory_that_has_no_room_on_the_host_stays_with_its_process(gpu_slot: GpuSlotStage) -> None:
    gpu_slot.wants(trial(0, "train"), memory_bytes=1 << 30)
    gpu_slot.trains(0)
    gpu_slot.status_when(lambda status: status.usage.gpu_mem_bytes == 1 << 30)
    gpu_slot.wants(trial(1, "train"), memory_bytes=1 << 30)
    assert gpu_slot.end_of(0).exit_code == 75
    assert gpu_slot.asked == []


def begin_to_move(gpu_slot: GpuSlotStage) -> psutil.Process:
    """Preempts trial 0 by trial 1; the offload of its GPU memory never completes. Returns its process."""
    gpu_slot.wants(trial(0, "train"), memory_bytes=MEMORY_BYTES)
    gpu_slot.trains(0)
    (process,) = gpu_slot.children("trial-0")
    gpu_slot.wants(trial(1, "train"), memory_bytes=MEMORY_BYTES)
    gpu_slot.wait_for(lambda: gpu_slot.asked == ["lock"], lambda: gpu_slot.asked)
    return process


@pytest.mark.parametrize("gpu_slot", [{"hangs": "checkpoint"}], indirect=True)
@pytest.mark.parametrize("leave", [False, True])
def test_a_slot_beats_while_gpu_memory_is_moved_and_can_be_ended(gpu_slot: GpuSlotStage, leave: bool) -> None:
    process = begin_to_move(gpu_slot)
    beats = len(gpu_slot.statuses)
    gpu_slot.wait_for(lambda: len(gpu_slot.statuses) > beats + 1, lambda: gpu_slot.statuses[-1])
    if leave:
        gpu_slot.wants(None, leave=True, memory_bytes=MEMORY_BYTES)
    else:
        gpu_slot.say("kill 1")
    state, status = gpu_slot.task_end()
    assert state == ("TASK_FINISHED" if leave else "TASK_KILLED")
    (end,) = status.ends
    assert (end.outcome, end.checkpoint) == ("suspended", f"{CHECKPOINTS}/0/run-0-step-{end.step}")
    assert not process.is_running()


@pytest.mark.parametrize("gpu_slot", [{"hangs": "checkpoint", "offload_timeout_s": 0.5}], indirect=True)
def test_a_driver_that_does_not_end_is_not_asked_again(gpu_slot: GpuSlotStage) -> None:
    process = begin_to_move(gpu_slot)
    assert gpu_slot.end_of(0).outcome == "suspended"
    assert not process.is_running()
    gpu_slot.trains(1)
    gpu_slot.wants(trial(2, "train"), memory_bytes=MEMORY_BYTES)
    assert gpu_slot.end_of(1).exit_code == 75
    assert gpu_slot.asked == ["lock"]


@pytest.mark.parametrize("gpu_slot", [{"hangs": "checkpoint"}], indirect=True)
def test_a_process_that_dies_while_its_gpu_memory_is_moved_costs_nothing_more(gpu_slot: GpuSlotStage) -> None:
    begin_to_move(gpu_slot).kill()
    end = gpu_slot.end_of(0)
    assert (end.outcome, end.checkpoint) == ("suspended", f"{CHECKPOINTS}/0/run-0-step-{end.step}")
    assert gpu_slot.trains(1).paused == ()


def test_a_paused_process_without_use_is_evicted(slot: TrialSlotStage) -> None:
    checkpoints = {}
    for number in range(4):
        slot.wants(trial(number, "train"), known=tuple((each, 0) for each in range(number - 1)), memory_bytes=1 << 40)
        if number:
            checkpoints[number - 1] = slot.end_of(number - 1).checkpoint
        slot.trains(number)
    paused = {number: slot.children(f"trial-{number}")[0] for number in range(3)}
    # Its process is killed from outside: the trial resumes from its checkpoint.
    assert len(slot.groups) == 4
    paused[0].kill()
    slot.status_when(lambda status: status.paused == ((1, 0), (2, 0)))
    slot.wait_for(lambda: len(slot.groups) == 3, lambda: slot.groups)
    # Its trial was resumed in another slot.
    slot.wants(trial(3, "train"), memory_bytes=MEMORY_BYTES, evict=((1, 0), (7, 0)))
    slot.status_when(lambda status: status.paused == ((2, 0),))
    wait_gone(paused[1].pid)
    # It comes back from there.
    slot.wants(trial(2, "train", 2, f"{CHECKPOINTS}/2/run-1-step-900"), memory_bytes=MEMORY_BYTES)
    status = slot.status_when(lambda status: status.run == (2, 2) and status.step > 900)
    assert (status.continued, status.paused) == (False, ((3, 0),))
    wait_gone(paused[2].pid)
    checkpoint = slot.end_of(3).checkpoint
    # The search is resumed with `--suspend checkpoint`.
    (last,) = slot.children("trial-3")
    slot.wants(trial(3, "train", 1, checkpoint))
    wait_gone(last.pid)
    end = slot.end_of(2, 2)
    assert (end.outcome, end.exit_code) == ("suspended", 75)
    assert slot.status_when(lambda status: status.run == (3, 1) and status.training).paused == ()


def test_a_process_that_dies_while_its_files_are_brought_back_is_not_kept(tmp_path: Path, order: SlotOrder) -> None:
    held = tmp_path / "held_save"
    held.touch()
    with contextlib.closing(TrialSlotStage(tmp_path, order, environment={"HELD_SAVE": str(held)})) as slot:
        slot.wants(trial(0, "train"), memory_bytes=MEMORY_BYTES)
        slot.trains(0)
        (process,) = slot.children("trial-0")
        slot.wants(trial(1, "train"), memory_bytes=MEMORY_BYTES)
        slot.status_when(lambda _: is_still(process))
        process.kill()
        slot.wait_for(lambda: not process.is_running(), lambda: slot.statuses[-1])
        held.unlink()
        first = slot.end_of(0)
        assert (first.outcome, first.checkpoint) == ("suspended", f"{CHECKPOINTS}/0/run-0-step-{first.step}")
        assert slot.trains(1).paused == ()
        slot.wants(trial(0, "train", 1, first.checkpoint), known=((0, 0),), memory_bytes=MEMORY_BYTES)
        assert not slot.trains(0, 1).continued


def test_the_least_likely_to_resume_is_evicted_when_memory_is_short(slot: TrialSlotStage) -> None:
    slot.wants(None)
    slot.status_when(lambda status: status.zygote_ready)
    (zygote,) = slot.children("zygote")
    zygote_bytes = zygote.memory_info().rss
    # Room for two and a half.
    memory_bytes = int((zygote_bytes + 2.5 * (72 << 20)) / 0.9)
    for number in range(3):
        slot.wants(trial(number, "large"), memory_bytes=memory_bytes, resume_order=((1, 0), (0, 0)))
        slot.trains(number)
    first, second = slot.end_of(0), slot.end_of(1)
    slot.status_when(lambda status: status.run == (2, 0) and status.paused == ((1, 0),))
    # The trial resumes anyway. The run that was preempted last has no rank.
    slot.wants(
        trial(0, "large", 1, first.checkpoint),
        known=((0, 0), (1, 0)),
        memory_bytes=memory_bytes,
        resume_order=((1, 0),),
    )
    status = slot.status_when(lambda status: status.run == (0, 1) and status.step > first.step)
    assert not status.continued
    assert (second.outcome, status.paused) == ("suspended", ((1, 0),))


def test_paused_processes_end_with_their_slot(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "train"), memory_bytes=MEMORY_BYTES)
    slot.trains(0)
    (process,) = slot.children("trial")
    slot.wants(None, memory_bytes=MEMORY_BYTES)
    slot.status_when(lambda status: status.paused == ((0, 0),))
    assert is_still(process)
    slot.process.kill()
    wait_gone(process.pid)


def test_paused_processes_end_with_a_killed_slot(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "family"), memory_bytes=MEMORY_BYTES)
    slot.trains(0)
    family = family_of(slot, 0)
    slot.wants(trial(1, "train"), memory_bytes=MEMORY_BYTES)
    slot.end_of(0)
    # Its forks begin as it does.
    zygote = min(slot.children("zygote"), key=psutil.Process.create_time)
    # The zygote's death is nothing to it.
    zygote.kill()
    slot.trains(1)
    assert all(map(is_still, family))
    slot.kill(5.0)
    state, _ = slot.task_end()
    assert state == "TASK_KILLED"
    assert not any(each.is_running() for each in family)


def test_a_run_that_does_not_suspend_in_time_is_stopped(tmp_path: Path, order: SlotOrder) -> None:
    slot = TrialSlotStage(tmp_path, dataclasses.replace(order, suspend_timeout_s=0.3))
    slot.wants(trial(0, "deaf"))
    slot.status_when(lambda status: status.checkpoint_step == 3)
    told = len(slot.statuses)
    slot.wants(trial(1, "finish"))
    assert slot.status_when(lambda status: status.suspending, told).run == (0, 0)
    end = slot.end_of(0)
    assert (end.outcome, end.exit_code, end.checkpoint, end.step) == ("killed", -9, f"{CHECKPOINTS}/0/run-0-step-3", 3)
    assert "0.3 s" in end.message
    assert slot.end_of(1).outcome == "finished"
    slot.close()
    assert "is killed" in (tmp_path / "slot.log").read_text()


@pytest.mark.parametrize(
    ("way", "outcome", "exit_code", "message"),
    [
        ("fail", "failed", 1, "ValueError: negative learning rate"),
        ("refuse", "bad_input", 2, "The script has no flag --lr."),
        ("vanish", "failed", -9, "ended by signal 9 (SIGKILL)"),
    ],
)
def test_a_run_that_fails_says_why(slot: TrialSlotStage, way: str, outcome: str, exit_code: int, message: str) -> None:
    slot.wants(trial(0, way, 2, f"{CHECKPOINTS}/0/run-1-step-40"))
    end = slot.end_of(0, 2)
    assert (end.outcome, end.exit_code, end.message) == (outcome, exit_code, message)
    assert (end.checkpoint, end.step) == (f"{CHECKPOINTS}/0/run-1-step-40", 40)
    if way == "fail":
        assert "about to fail" in end.tail
    # Where the trials' folders cannot be written the output stays in the sandbox.
    assert Path(end.log) == slot.sandbox / "trial-0-run-2.out"


def test_the_output_of_a_failed_run_is_kept_beside_its_checkpoints(slot: TrialSlotStage, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "trial-0"
    slot.wants(TrialRun(TrialSpec("search", 0, 2, {"lr": 0.1}, str(folder)), ("fail",)))
    end = slot.end_of(0, 2)
    assert Path(end.log) == folder / "run-2.log"
    assert "about to fail" in Path(end.log).read_text()


def test_the_newest_wish_counts(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "train"))
    slot.trains(0)
    (process,) = slot.children("trial")
    # It makes place only when all wishes have come.
    process.suspend()
    slot.wants(trial(1, "finish"))
    slot.wants(trial(2, "train"))
    slot.status_when(lambda status: status.number == 3)
    slot.wants(trial(1, "finish"), number=2)
    process.resume()
    slot.trains(2)
    slot.wants(None)
    assert slot.end_of(2).outcome == "suspended"
    assert {end.trial for status in slot.statuses for end in status.ends} == {0, 2}


def test_a_run_that_cannot_be_suspended_stays_unless_the_slot_is_to_leave(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "fixed"))
    before = slot.trains(0)
    slot.wants(trial(1, "finish"))
    slot.status_when(lambda status: status.number == 2)
    after = slot.status_when(lambda status: status.step > before.step + 10)
    assert after.run == (0, 0)
    assert not after.suspending
    # Its trial is stopped for good.
    slot.wants(trial(1, "finish"), stop=True)
    end = slot.end_of(0)
    assert (end.outcome, end.preemptible) == ("killed", False)
    slot.end_of(1)
    slot.wants(trial(2, "fixed"), known=((0, 0), (1, 0)))
    slot.trains(2)
    slot.wants(None, leave=True)
    state, status = slot.task_end()
    assert state == "TASK_FINISHED"
    (end,) = status.ends
    assert (end.outcome, end.preemptible) == ("killed", False)
    assert "cannot be suspended" in end.message


def test_the_last_slot_ends_what_only_another_could_have_kept(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "unsaved"), memory_bytes=MEMORY_BYTES)
    slot.status_when(lambda status: status.run == (0, 0) and status.pausable)
    slot.wants(None, leave=True, memory_bytes=MEMORY_BYTES)
    state, status = slot.task_end()
    assert state == "TASK_FINISHED"
    (end,) = status.ends
    assert (end.outcome, end.checkpoint) == ("killed", None)
    assert "it cannot be suspended" in end.message


def test_a_trial_is_told_to_end_wherever_it_has_gone(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "signals"))
    slot.trains(0)
    slot.kill(DEADLINE_S)
    _, status = slot.task_end()
    assert (status.ends[0].outcome, status.ends[0].exit_code) == ("killed", 7)


def test_a_slot_that_leaves_suspends_first_and_ends_at_once_when_its_ends_are_known(
    tmp_path: Path, order: SlotOrder
) -> None:
    # Longer than is waited for its end here.
    with contextlib.closing(TrialSlotStage(tmp_path, order, environment={"ACKNOWLEDGE_TIMEOUT_S": "600"})) as slot:
        slot.wants(trial(0, "train"))
        slot.trains(0)
        slot.wants(None, leave=True)
        assert slot.end_of(0).outcome == "suspended"
        slot.wants(None, leave=True, known=((0, 0),))
        state, status = slot.task_end()
    assert (state, status.ends, status.run) == ("TASK_FINISHED", (), None)


def test_a_killed_slot_kills_even_the_stubborn_and_tells_their_end(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "stubborn"))
    slot.trains(0)
    (process,) = slot.children("trial")
    slot.kill(0.2)
    state, status = slot.task_end()
    assert state == "TASK_KILLED"
    assert (status.ends[0].outcome, status.ends[0].exit_code) == ("killed", -9)
    assert not psutil.pid_exists(process.pid)


def test_trials_die_with_their_executor(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "train"))
    slot.trains(0)
    (process,) = slot.children("trial")
    slot.process.kill()
    wait_gone(process.pid)


def test_the_death_of_the_zygote_is_nothing_to_a_running_trial(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "train"))
    step = slot.trains(0).step
    (zygote,) = slot.children("zygote")
    told = len(slot.statuses)
    zygote.kill()
    slot.status_when(lambda status: not status.zygote_ready, told)
    slot.status_when(lambda status: status.zygote_ready and status.step > step)
    slot.wants(trial(1, "finish"))
    assert slot.end_of(0).outcome == "suspended"
    assert slot.end_of(1).outcome == "finished"


def test_a_zygote_that_dies_over_a_request_is_replaced_and_asked_again(slot: TrialSlotStage, tmp_path: Path) -> None:
    (tmp_path / "frail").touch()
    slot.wants(trial(0, "finish"))
    assert slot.end_of(0).outcome == "finished"
    assert not (tmp_path / "frail").exists()


def test_a_zygote_that_cannot_start_fails_the_slot_with_its_last_words(tmp_path: Path, order: SlotOrder) -> None:
    (tmp_path / "mute").touch()
    # The slot fails only after it has received an order.
    (tmp_path / "held").touch()
    slot = TrialSlotStage(tmp_path, order)
    slot.wants(trial(0, "finish"))
    slot.status_when(lambda status: status.run == (0, 0))
    (tmp_path / "held").unlink()
    state, status = slot.task_end()
    slot.close()
    assert state == "TASK_FAILED"
    assert "no module named nothing" in slot.updates[-1]["message"]
    assert [end.outcome for end in status.ends] == ["killed"]


def test_a_run_that_cannot_have_its_files_fails_alone(slot: TrialSlotStage) -> None:
    (slot.sandbox / "trial-0-run-0.out").mkdir()
    slot.wants(trial(0, "finish"))
    end = slot.end_of(0)
    assert (end.outcome, end.exit_code) == ("failed", None)
    assert "cannot be started: [Errno 21]" in end.message
    slot.wants(trial(1, "finish"), known=((0, 0),))
    assert slot.end_of(1).outcome == "finished"


def test_a_process_that_cannot_be_forked_is_a_failed_run(slot: TrialSlotStage, tmp_path: Path) -> None:
    (tmp_path / "refuses").touch()
    slot.wants(trial(0, "finish"))
    end = slot.end_of(0)
    assert (end.outcome, end.exit_code) == ("failed", None)
    assert "no memory" in end.message


def test_what_a_trial_leaves_behind_is_gone_before_its_end_is_told(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "litter"))
    end = slot.end_of(0)
    assert end.outcome == "finished"
    assert not psutil.pid_exists(int(end.last["loss"]))


def test_figures_of_a_running_trial_are_told(slot: TrialSlotStage) -> None:
    slot.wants(trial(0, "train"))
    usage = slot.status_when(lambda status: status.usage.rss_bytes is not None).usage
    assert usage.rss_bytes is not None
    assert usage.rss_bytes > 1 << 20
    assert usage.cpu is not None
    assert 0 <= usage.cpu < 64
    assert usage.gpu_mem_bytes is None


def test_a_bundle_that_cannot_be_fetched_fails_the_slot(tmp_path: Path, order: SlotOrder) -> None:
    slot = TrialSlotStage(tmp_path, dataclasses.replace(order, bundle_url=order.bundle_url + "x"))
    slot.process.wait(DEADLINE_S)
    slot.close()
    assert slot.updates[-1]["state"] == "TASK_FAILED"
    assert "HTTP 404" in slot.updates[-1]["message"]


def test_with_the_real_zygote_a_trial_resumes_as_if_never_interrupted(tmp_path: Path, order: SlotOrder) -> None:
    order = dataclasses.replace(order, script="api_script.py", preload=("decimal", "no_such_module"))
    slot = TrialSlotStage(tmp_path, order, (*PROGRAM, LAUNCHER))
    spec = TrialSpec("search", 0, 0, {"seed": 7}, str(tmp_path / "checkpoints"))
    slot.wants(TrialRun(spec, ("wait",)))
    slot.status_when(lambda status: status.run == (0, 0) and status.preemptible)
    slot.wants(None)
    first = slot.end_of(0)
    assert (first.outcome, first.message) == ("suspended", "")
    assert first.step < 60
    slot.wants(TrialRun(dataclasses.replace(spec, run=1, resume_from=first.checkpoint)), known=((0, 0),))
    second = slot.end_of(0, 1)
    assert (second.outcome, second.last["step"]) == ("finished", 60)
    numbers, total = random.Random(7), 0.0
    for _ in range(60):
        total += numbers.random()
    assert f"sum {total!r}\n" in second.tail
    (process,) = slot.children("zygote")
    slot.close()
    wait_gone(process.pid)
    assert "no_such_module is not preloaded" in (slot.sandbox / "zygote.out").read_text()


def test_relative_folders_of_modules_are_those_of_the_trials_own_copy(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "lib").mkdir(parents=True)
    (project / "lib" / "helping.py").write_text("")
    (project / "train.py").write_text("import helping, os, dike; dike.report(1, loss=1.0); print(helping.__file__)")
    environment = {"PYTHONPATH": f"lib{os.pathsep}{ROOT}"}
    with bundle.BundleServer({TOKEN: bundle.pack(project / "train.py")}.get, "127.0.0.1") as server:
        order = SlotOrder("search", server.url(TOKEN), "train.py", environment=environment, gpu_devices=())
        with contextlib.closing(TrialSlotStage(tmp_path, order, (*PROGRAM, LAUNCHER))) as slot:
            for number in (0, 1):
                slot.wants(TrialRun(TrialSpec("search", number, 0, {}, str(tmp_path / f"checkpoints-{number}"))))
                end = slot.end_of(number)
                assert (end.outcome, end.tail.strip()) == (
                    "finished",
                    str(slot.sandbox / f"trial-{number}" / "lib" / "helping.py"),
                )


@pytest.fixture
def limited(tmp_path: Path, order: SlotOrder) -> Iterator[TrialSlotStage]:
    skip_without_groups()
    process = TrialSlotStage(tmp_path, dataclasses.replace(order, most_mem_mib=192.0), environment=LIMITED)
    yield process
    process.close()


def test_a_fork_bomb_ends_its_own_trial_and_no_other(limited: TrialSlotStage) -> None:
    limited.launch("other")
    limited.wants(trial(1, "train"), task="other")
    limited.trains(1, task="other")
    limited.wants(trial(0, "bomb"))
    end = limited.end_of(0)
    assert (end.outcome, end.message) == (
        "failed",
        "it exceeded its limit of 40 processes and threads; raise DIKE_MOST_PROCESSES of the agent's executors",
    )
    limited.wants(trial(2, "finish"), known=((0, 0),))
    assert limited.end_of(2).outcome == "finished", "the slot continues with the next run"
    limited.trains(1, task="other")


def test_a_trial_that_takes_more_memory_than_its_slot_has_ends_and_names_the_option(limited: TrialSlotStage) -> None:
    limited.wants(trial(0, "hungry"))
    end = limited.end_of(0)
    assert (end.outcome, end.message) == (
        "failed",
        "it exceeded its memory of 192 MiB; raise --slot-mem MIB",
    )


def test_no_group_stays_behind(limited: TrialSlotStage) -> None:
    limited.wants(trial(0, "train"))
    limited.trains(0)
    places = [parent / f"dike-{limited.process.pid}" for _, parent in limits._parents()]
    homes = [place for place in places if place.is_dir()]
    assert homes
    limited.close()

    def are_removed() -> bool:
        skip_without_groups()  # as the next slot process it removes those of dead ones
        return not any(home.exists() for home in homes)

    # The kernel keeps a group until its last process is reaped.
    wait_until(are_removed, "the removal of the groups")


def test_where_there_are_no_groups_processes_are_limited_by_account(tmp_path: Path, order: SlotOrder) -> None:
    process = TrialSlotStage(tmp_path, order, environment={PROCESSES_VARIABLE: "5000"})
    try:
        process.wants(trial(0, "limits"))
        assert "processes 5000" in process.end_of(0).tail
    finally:
        process.close()
