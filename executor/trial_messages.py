"""Messages between the framework and a slot of a search.

The protocol is level-triggered, since Mesos may lose framework messages: each side repeats its full state, not events,
until the other has acknowledged it. The framework repeats the desired state (`Wanted.number`); the slot repeats the
ends of its runs (`Wanted.acknowledged_ends`), stores numbered reports until the framework has recorded them
(`Wanted.acknowledged_reports`), however long that is disconnected, and stores output in a file, from which it sends
any part (`Wanted.acknowledged_output`).
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dike import typed
from dike.trial.spec import TrialSpec
from executor.messages import OutputPiece, decode, encode, read_message


@dataclass(frozen=True)
class TrialRun:
    """A run for a slot, of at most `limit_s` seconds. The executor fills in the trial's file descriptors."""

    trial: TrialSpec
    arguments: tuple[str, ...] = ()
    limit_s: float | None = None

    @property
    def key(self) -> RunKey:
        return (self.trial.number, self.trial.run)


FULL_SHARE = 0.9
"""Above this share the slots' memory is short, and paused runs are evicted."""
RunKey = tuple[int, int]
"""Number of a trial, and of its run."""
AcknowledgedReports = tuple[int, int, int]
"""Number of a trial, of its run, and of that run's reports that the framework has recorded."""
AcknowledgedOutput = tuple[int, int, int]
"""Number of a trial, of its run, and of the bytes of its output that the framework has recorded."""


@dataclass(frozen=True)
class Wanted:
    """The desired state of a slot; sent to the executor until acknowledged.

    Attributes:
        number: grows with each change; executors ignore smaller ones than their newest.
        run: the run to hold. A run that has ended is not started again. Any other run in the slot is suspended first.
            None: no run.
        leave: whether the slot's task is to finish once nothing runs.
        acknowledged_ends: runs whose end the framework has recorded.
        acknowledged_reports: runs whose later reports the framework requests.
        acknowledged_output: runs whose later output the framework requests.
        stop: whether the trial that loses the slot will never resume: it is ended even if it cannot be suspended.
        memory_bytes: memory of the slot, including its part of the paused runs; 0 if no run may be paused.
        evict: paused runs that will not be resumed.
        resume_order: paused runs, most likely to be resumed first; empty: unchanged.
    """

    number: int
    run: TrialRun | None = None
    leave: bool = False
    acknowledged_ends: tuple[RunKey, ...] = ()
    acknowledged_reports: tuple[AcknowledgedReports, ...] = ()
    acknowledged_output: tuple[AcknowledgedOutput, ...] = ()
    stop: bool = False
    memory_bytes: int = 0
    evict: tuple[RunKey, ...] = ()
    resume_order: tuple[RunKey, ...] = ()

    def encode(self) -> str:
        run = None
        if self.run is not None:
            run = {
                "trial": self.run.trial.dumps(),
                "arguments": list(self.run.arguments),
                "limit_s": self.run.limit_s,
            }
        return encode(
            {
                "kind": "wanted",
                "number": self.number,
                "run": run,
                "leave": self.leave,
                "acknowledged_ends": [list(key) for key in self.acknowledged_ends],
                "acknowledged_reports": [list(known) for known in self.acknowledged_reports],
                "acknowledged_output": [list(known) for known in self.acknowledged_output],
                "stop": self.stop,
                "memory_bytes": self.memory_bytes,
                "evict": [list(key) for key in self.evict],
                "resume_order": [list(key) for key in self.resume_order],
            }
        )

    @classmethod
    def decode(cls, data: str) -> Wanted:
        """Raises ValueError if it is another or a malformed message."""
        values = decode(data)
        try:
            if values["kind"] != "wanted":
                raise ValueError(f"unknown message kind for a slot: {values['kind']!r}")
            run = values["run"]
            return cls(
                number=int(values["number"]),
                run=None if run is None else _run(run),
                leave=bool(values["leave"]),
                acknowledged_ends=tuple((int(trial), int(number)) for trial, number in values["acknowledged_ends"]),
                acknowledged_reports=tuple(
                    (int(trial), int(number), int(count)) for trial, number, count in values["acknowledged_reports"]
                ),
                acknowledged_output=tuple(
                    (int(trial), int(number), int(size)) for trial, number, size in values["acknowledged_output"]
                ),
                stop=bool(values["stop"]),
                memory_bytes=int(values["memory_bytes"]),
                evict=tuple((int(trial), int(number)) for trial, number in values["evict"]),
                resume_order=tuple((int(trial), int(number)) for trial, number in values["resume_order"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed message to a slot: {error}") from error


def _run(values: Mapping[str, Any]) -> TrialRun:
    limit_s = values["limit_s"]
    arguments = tuple(values["arguments"])
    return TrialRun(TrialSpec.loads(values["trial"]), arguments, None if limit_s is None else float(limit_s))


@dataclass(frozen=True)
class Usage:
    """A run's use of its machine; None if unknown.

    Attributes:
        rss_bytes: resident memory of its processes.
        cpu: CPUs it keeps busy, such as 1.7, since the previous sample.
        gpu_mem_bytes: GPU memory of its processes.
        gpu_utilisation: busy share of its GPUs, 0 to 1.
    """

    rss_bytes: int | None = None
    cpu: float | None = None
    gpu_mem_bytes: int | None = None
    gpu_utilisation: float | None = None


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        trial, run: the run's key.
        outcome: `finished` (the script ran to its end), `suspended` (state saved), `killed` (because it did not
            save in time; resumes from its last checkpoint), `bad_input` (the script refused its arguments or Dike its
            input; a retry would not help), `timed_out` (it exceeded its duration, or stalled), `failed`.
        exit_code: minus the signal's number if one ended it; None if it never started, or is paused.
        checkpoint: the newest checkpoint of the trial, of this or an earlier run; None if there is none.
        step: steps done at that checkpoint.
        message: one sentence about a failure; else empty.
        tail: the end of its output, both streams.
        last: content of its last `progress` report; empty if there was none.
        preemptible: whether it could be checkpointed at any time.
        suspend_s: seconds from the request to the free slot; None without request.
        seconds: seconds that its process lived, or ran for it.
        usage: the maximum of each figure.
        log: the file on the agent with its output, or with the end of it if it has failed.
        reports: number of its `progress` reports.
        output: number of bytes of its output, in all.
    """

    trial: int
    run: int
    outcome: str
    exit_code: int | None = None
    checkpoint: str | None = None
    step: int = 0
    message: str = ""
    tail: str = ""
    last: dict[str, Any] = field(default_factory=dict)
    preemptible: bool = False
    suspend_s: float | None = None
    seconds: float = 0.0
    usage: Usage = Usage()
    log: str = ""
    reports: int = 0
    output: int = 0

    @property
    def key(self) -> RunKey:
        return (self.trial, self.run)


@dataclass(frozen=True)
class SlotStatus:
    """State of a slot; sent on every change, and every second since messages may get lost.

    Attributes:
        task_id: the slot's Mesos task.
        number: of the newest `Wanted` received; 0 before the first.
        run: the run in the slot, from the decision to start it until its end; None if it is empty.
        training: whether that run has done its first step.
        preemptible: whether it can be checkpointed, and so suspended.
        pausable: whether it can at least be paused, without a checkpoint.
        suspending: whether it has been asked to suspend or end.
        step: its last step.
        checkpoint: its newest checkpoint.
        checkpoint_step: step of that checkpoint.
        batch_size: samples per step; None if unknown.
        ends: ended runs that the framework has not acknowledged, oldest first.
        usage: the run's current figures.
        zygote_ready: whether the zygote has imported its modules.
        losses: in the last message of a slot: unacknowledged reports of its ended runs.
        output: likewise the end of their output.
        paused: paused runs that the slot can resume, least recently suspended first. Slots of a process share them.
        unsaved: those without a checkpoint: they resume in a slot that lists them, or start over.
        unsaved_bytes: private memory of those.
        continued: whether the run resumed the paused process of the previous run.
    """

    task_id: str
    number: int = 0
    run: RunKey | None = None
    training: bool = False
    preemptible: bool = False
    pausable: bool = False
    suspending: bool = False
    step: int = 0
    checkpoint: str | None = None
    checkpoint_step: int = 0
    batch_size: float | None = None
    ends: tuple[RunEnd, ...] = ()
    usage: Usage = Usage()
    zygote_ready: bool = False
    losses: tuple[Losses, ...] = ()
    output: tuple[TrialOutput, ...] = ()
    paused: tuple[RunKey, ...] = ()
    unsaved: tuple[RunKey, ...] = ()
    unsaved_bytes: int = 0
    continued: bool = False

    def encode(self) -> str:
        values = dataclasses.asdict(dataclasses.replace(self, output=()))
        values["output"] = [output.to_json() for output in self.output]
        return encode({"kind": "slot_status", **values})


@dataclass(frozen=True)
class Losses:
    """Contents of `progress` reports of a run (`dike.trial.reports`), oldest first.

    Attributes:
        first: number of the first of them; a run's first report is 0.
        oldest: number of the oldest that the slot still stores.
    """

    task_id: str
    trial: int
    run: int
    reports: tuple[dict[str, Any], ...]
    first: int = 0
    oldest: int = 0

    def encode(self) -> str:
        return encode({"kind": "losses", **dataclasses.asdict(self)})


@dataclass(frozen=True)
class TrialOutput(OutputPiece):
    """A piece of a run's output, both streams in one; whole characters, if it is UTF-8.

    Attributes:
        offset: number of bytes of the run's output before it.
        skipped: number of bytes directly before it that are never sent.
    """

    task_id: str
    trial: int
    run: int
    offset: int
    data: bytes
    skipped: int = 0

    def encode(self) -> str:
        return encode({"kind": "trial_output", **self.to_json()})

    @classmethod
    def from_json(cls, values: Any) -> TrialOutput:
        """Reads what `to_json` wrote; raises ValueError."""
        read = read_message(_EncodedOutput, values)
        piece = cls(**{**vars(read), "data": base64.b64decode(read.data)})
        if not 0 <= piece.skipped <= piece.offset or piece.end > typed.MAX_INT:
            raise ValueError(f"malformed message: output at {piece.offset}, {piece.skipped} bytes left out")
        return piece


@dataclass(frozen=True)
class _EncodedOutput:
    task_id: str
    trial: int
    run: int
    offset: int
    data: str
    skipped: int


def decode_slot_message(data: str) -> SlotStatus | Losses | TrialOutput:
    """Reads a message of a slot; raises ValueError."""
    values = decode(data)
    kind = values.pop("kind", None) if isinstance(values, dict) else None
    if kind == "losses":
        return read_message(Losses, values)
    if kind == "trial_output":
        return TrialOutput.from_json(values)
    if kind == "slot_status":
        last = values.pop("output", ())
        if not isinstance(last, list | tuple):
            raise ValueError("malformed message: output is no list")
        output = tuple(TrialOutput.from_json(piece) for piece in last)
        return dataclasses.replace(read_message(SlotStatus, values), output=output)
    raise ValueError(f"unknown message kind {kind!r}")
