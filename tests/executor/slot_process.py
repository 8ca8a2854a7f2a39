"""Slots in a process of their own: `python slot_process.py SANDBOX ORDER ZYGOTE...`.

Standard input, a line each: `wanted BASE64 [TASK]`, `kill SECONDS [TASK]`, `launch TASK`; without TASK the first slot
is meant. Standard output, a JSON object a line: the slot's messages to
its driver, and at last how its task ended. What its processes write to their standard output is in SANDBOX/stdout.

STOP_GRACE_S, PEER_LOST_TIMEOUT_S, ACKNOWLEDGE_TIMEOUT_S and OFFLOAD_TIMEOUT_S in the environment replace those of the
product. As long as there is a file HELD_SAVE, what runs have written is still being brought back.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from dike import process
from executor import attempt, job_slot, run_memory, slot_process, streams, trial_slot
from executor.channel import TaskChannel, TaskSlot
from executor.environment import process_environment
from executor.job_slot import JobSlot
from executor.slot_order import decode_order
from executor.trial_run import SlotRun
from executor.trial_slot import TrialSlots
from executor.zygote import Zygote
from tests.executor import fake_gpu

TASK = "slot-task"
DRAIN_TIMEOUT_S = 60.0
"""In the place of the product's: nothing is to be missing because the machine has stood still for a moment."""


class FakeDriver:
    """Stands where Mesos' driver would."""

    def __init__(self, descriptor: int) -> None:
        self._lock = threading.Lock()
        self._out = os.fdopen(descriptor, "w")

    def sendStatusUpdate(self, status: dict[str, Any]) -> None:  # noqa: N802
        self.write({"update": status})

    def sendFrameworkMessage(self, data: str) -> None:  # noqa: N802
        self.write({"message": data})

    def processStarted(self, pid: int) -> None:  # noqa: N802
        self.write({"group": pid})

    def processEnded(self, pid: int) -> None:  # noqa: N802
        self.write({"over": pid})

    def write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()


def obey(driver: FakeDriver, sandbox: Path, holder: JobSlot | TrialSlots, slots: dict[str, TaskSlot]) -> None:
    for line in sys.stdin:
        word, rest, *task = line.split()
        slot = slots[task[0] if task else TASK]
        if word == "launch":
            assert isinstance(holder, TrialSlots)
            (sandbox / rest).mkdir()
            slots[rest] = holder.add(TaskChannel(driver, rest, sandbox / rest))
        elif word == "wanted":
            slot.receive(rest)
        else:
            slot.kill(float(rest))


def make_slot(channel: TaskChannel, order: str, zygote: list[str]) -> tuple[JobSlot | TrialSlots, TaskSlot]:
    for module in (attempt, streams):
        assert hasattr(module, "DRAIN_TIMEOUT_S")
        module.DRAIN_TIMEOUT_S = DRAIN_TIMEOUT_S
    run_memory.OFFLOAD_TIMEOUT_S = float(os.environ.get("OFFLOAD_TIMEOUT_S", run_memory.OFFLOAD_TIMEOUT_S))
    trial_slot.ACKNOWLEDGE_TIMEOUT_S = float(os.environ.get("ACKNOWLEDGE_TIMEOUT_S", trial_slot.ACKNOWLEDGE_TIMEOUT_S))
    job_slot.STOP_GRACE_S = float(os.environ.get("STOP_GRACE_S", job_slot.STOP_GRACE_S))
    job_slot.PEER_LOST_TIMEOUT_S = float(os.environ.get("PEER_LOST_TIMEOUT_S", job_slot.PEER_LOST_TIMEOUT_S))
    decoded = decode_order(order)
    setup = decoded.setup
    own = Zygote(setup.preload, process_environment(setup), channel.sandbox / "zygote.out", zygote)
    return slot_process.make_slot(channel, decoded, own)


def main() -> None:
    sandbox, order, *zygote = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    process.adopt_orphans()
    if held := os.environ.get("HELD_SAVE"):
        save_outputs = SlotRun.save_outputs
        SlotRun.save_outputs = lambda self: save_outputs(self) and not os.path.exists(held)  # type: ignore[method-assign]
    if "FAKE_GPU" in os.environ:
        fake_gpu.install()
    driver = FakeDriver(os.dup(1))
    # Where Mesos puts what its executors write.
    os.dup2(os.open(f"{sandbox}/stdout", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    channel = TaskChannel(driver, TASK, Path(sandbox))
    holder, slot = make_slot(channel, order, zygote)
    threading.Thread(target=obey, args=(driver, Path(sandbox), holder, {TASK: slot}), daemon=True).start()
    holder.run()


if __name__ == "__main__":
    main()
