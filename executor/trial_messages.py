"""What the framework and a slot of a search say to each other.

Mesos promises nothing for framework messages, so both sides say what is, not what happened: the framework repeats what
it wants the slot to hold until the slot has said that it knows (`Wanted.number`), and the slot repeats how its last
runs ended until the framework has said that it knows (`Wanted.known_ends`). What a run reports is numbered, and kept by
the slot until the framework has written it down (`Wanted.known_reports`), however long that is away. What a run prints
stays in a file of the slot, and is sent from wherever the framework wants it (`Wanted.known_output`).
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
    """A run that a slot is to hold.

    Attributes:
        trial: what the process has to know; file descriptors are the executor's to fill in.
        arguments: the script's arguments.
        limit_s: seconds that it may run; None for no limit.
    """

    trial: TrialSpec
    arguments: tuple[str, ...] = ()
    limit_s: float | None = None

    @property
    def key(self) -> RunKey:
        return (self.trial.number, self.trial.run)


FULL_SHARE = 0.9
"""The memory of slots is short above this share of it; then processes of suspended runs are ended."""
RunKey = tuple[int, int]
"""Number of a trial and of its run."""
KnownReports = tuple[int, int, int]
"""Number of a trial, of its run, and how many of that run's reports are written down."""
KnownOutput = tuple[int, int, int]
"""Number of a trial, of its run, and how many bytes of that run's output are written down."""


@dataclass(frozen=True)
class Wanted:
    """What the framework wants a slot to hold; sent to the executor, repeated until answered.

    Attributes:
        number: grows with each change; an executor ignores what is older than it knows.
        run: the run to hold. One that has ended already is not started again. Any other run in the slot is suspended
            first. None: nothing.
        leave: whether the executor is to end once nothing runs; its task is then finished.
        known_ends: runs whose end the framework has recorded.
        known_reports: runs of which the framework wants to hear what comes after the reports it has written down.
        known_output: runs of which it wants what they print, from there on.
        stop: whether the trial of the run that is in the slot and not wanted will never run again: it is ended even if
            it cannot be suspended.
        memory_bytes: how much memory the slot has, its part of the suspended runs that stay in memory included; 0 if
            none are to stay.
        let_go: suspended runs whose processes nobody will go on with.
        likely: those whose processes stay, the likeliest to go on first; empty: as was said last.
    """

    number: int
    run: TrialRun | None = None
    leave: bool = False
    known_ends: tuple[RunKey, ...] = ()
    known_reports: tuple[KnownReports, ...] = ()
    known_output: tuple[KnownOutput, ...] = ()
    stop: bool = False
    memory_bytes: int = 0
    let_go: tuple[RunKey, ...] = ()
    likely: tuple[RunKey, ...] = ()

    def encode(self) -> str:
        """The message as base64 text."""
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
                "known_ends": [list(key) for key in self.known_ends],
                "known_reports": [list(known) for known in self.known_reports],
                "known_output": [list(known) for known in self.known_output],
                "stop": self.stop,
                "memory_bytes": self.memory_bytes,
                "let_go": [list(key) for key in self.let_go],
                "likely": [list(key) for key in self.likely],
            }
        )

    @classmethod
    def decode(cls, data: str) -> Wanted:
        """Reads what `encode` wrote.

        Raises:
            ValueError: if it is something else.
        """
        values = decode(data)
        try:
            if values["kind"] != "wanted":
                raise ValueError(f"not what a slot is told: {values['kind']!r}")
            run = values["run"]
            return cls(
                number=int(values["number"]),
                run=None if run is None else _run(run),
                leave=bool(values["leave"]),
                known_ends=tuple((int(trial), int(number)) for trial, number in values["known_ends"]),
                known_reports=tuple(
                    (int(trial), int(number), int(count)) for trial, number, count in values["known_reports"]
                ),
                known_output=tuple(
                    (int(trial), int(number), int(size)) for trial, number, size in values["known_output"]
                ),
                stop=bool(values["stop"]),
                memory_bytes=int(values["memory_bytes"]),
                let_go=tuple((int(trial), int(number)) for trial, number in values["let_go"]),
                likely=tuple((int(trial), int(number)) for trial, number in values["likely"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed message to a slot: {error}") from error


def _run(values: Mapping[str, Any]) -> TrialRun:
    limit_s = values["limit_s"]
    arguments = tuple(values["arguments"])
    return TrialRun(TrialSpec.loads(values["trial"]), arguments, None if limit_s is None else float(limit_s))


@dataclass(frozen=True)
class Usage:
    """What a run uses of its machine; None where nobody could tell.

    Attributes:
        rss_bytes: resident memory of its processes.
        cpu: CPUs it keeps busy, such as 1.7, since the last look.
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
        trial, run: which.
        outcome: `finished` (the script ran to its end), `suspended` (state saved), `stopped` (killed because it did not
            save in time; it goes on from its last checkpoint), `bad_input` (the script refused its arguments or Dike
            its input; a retry would not help), `timed_out` (it ran, or did nothing, for longer than it may), `failed`.
        exit_code: minus the signal's number if one ended it; None if it never started, or is suspended in memory.
        checkpoint: the newest checkpoint the trial has, of this or an earlier run; None if there is none.
        step: steps done at that checkpoint.
        message: one sentence about a failure; else empty.
        tail: the end of its output, both streams.
        last: content of its last `progress` report; empty if there was none.
        preemptible: whether it ever could have been suspended.
        suspend_s: seconds from the request to the slot being free; None without request.
        seconds: how long its process lived, or ran for it.
        usage: the greatest of each figure.
        log: the file on the agent that holds its output, or the end of it if it has failed.
        reports: how many `progress` reports it has made.
        output: how many bytes of output are to come in all.
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
    """How a slot is; sent at every change, and every second so that a lost message does no harm.

    Attributes:
        task_id: the slot's Mesos task.
        number: the newest `Wanted.number` it knows; 0 before the first.
        run: the run in the slot, from the decision to start it until its end; None if it is empty.
        training: whether that run has taken its first step in this run.
        preemptible: whether it can be saved, and so suspended.
        pausable: whether it can at least be suspended in memory, without a checkpoint.
        suspending: whether it has been asked to.
        step: its last step.
        checkpoint: its newest checkpoint, and
        checkpoint_step: the step of that.
        batch_size: samples of one of its steps; None where its process cannot tell.
        ends: runs that have ended and that the framework may not know of, oldest first.
        usage: what the run uses at the moment.
        zygote_ready: whether the zygote has imported what it should.
        losses: in the last words of a slot, what the framework may not know of its ended runs.
        output: likewise the end of what they have printed.
        paused: suspended runs whose processes stay, and that the slot can go on with, least recently suspended first.
            Slots of one process list the same.
        unsaved: those of them that no checkpoint holds: they go on in a slot that lists them, or from the beginning.
        unsaved_bytes: memory that is theirs alone.
        continued: whether the run goes on in the process of the one before.
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
        """The message as base64 text."""
        values = dataclasses.asdict(dataclasses.replace(self, output=()))
        values["output"] = [output.to_json() for output in self.output]
        return encode({"kind": "slot_status", **values})


@dataclass(frozen=True)
class Losses:
    """What a run reported of its training: the content of its report lines, oldest first.

    Attributes:
        task_id: the slot's Mesos task.
        trial, run: which.
        reports: contents of `progress` reports (see `dike.trial.reports`).
        first: number of the first of them; the run's first report is 0.
        oldest: number of the oldest that the slot still has.
    """

    task_id: str
    trial: int
    run: int
    reports: tuple[dict[str, Any], ...]
    first: int = 0
    oldest: int = 0

    def encode(self) -> str:
        """The message as base64 text."""
        return encode({"kind": "losses", **dataclasses.asdict(self)})


@dataclass(frozen=True)
class TrialOutput(OutputPiece):
    """A piece of what a run has printed, both streams in one.

    Attributes:
        task_id: the slot's Mesos task.
        trial, run: which.
        offset: how many bytes of the run's output came before it.
        data: the bytes; whole characters, where they are UTF-8.
        skipped: how many bytes right before it the slot leaves out for good.
    """

    task_id: str
    trial: int
    run: int
    offset: int
    data: bytes
    skipped: int = 0

    def encode(self) -> str:
        """The message as base64 text."""
        return encode({"kind": "trial_output", **self.to_json()})

    @classmethod
    def from_json(cls, values: Any) -> TrialOutput:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if it is something else, or there can be no such piece.
        """
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
    """Reads what a slot sent.

    Raises:
        ValueError: if it is none of these.
    """
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
