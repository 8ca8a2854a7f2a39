"""Reads measured step times from a CSV file with a header.

    placement,cpus,gpus,seconds
    k80-0:p0+4w|k80-1:4w,1.5,1,0.812
    k80-0:p0|k80-1:p1+4w|k80-2:4w,1.5,1,0.655

A placement lists the machines, each with its tasks: `p0` is ps 0, `4w` are four workers; `chief` is optional. `cpus`
and `gpus` are each worker's. Instead of a placement a row can name a plan file:

    plan,samples_per_s
    first-plan.json,1280

`seconds` is the time in which every worker makes one step; `samples_per_s` of the whole job may replace it.
"""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

from dike.exceptions import BadInputError
from solver.calibration.measured_rows import Measurement
from solver.placement.naming import Assignment
from solver.plan import Plan
from solver.resources import WorkerShape

COLUMNS = ("plan", "placement", "workers", "ps", "cpus", "gpus", "ps_cpus", "batch_size", "seconds", "samples_per_s")
_PS = re.compile(r"p([0-9]{1,6})")
_WORKERS = re.compile(r"([0-9]{1,6})w")


def read_measurements(path: Path) -> tuple[Measurement, ...]:
    """Reads the rows of a file.

    Args:
        path: a CSV file; paths of plans in it are relative to its folder.

    Raises:
        BadInputError: if the file or a plan is unreadable or invalid; names the file and the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, skipinitialspace=True, strict=True)
            _check_header(path, reader.fieldnames or ())
            rows = [(f"{path}, line {reader.line_num}", row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInputError(f"The measurements '{path}' cannot be read as CSV: {reason}.") from error
    if not rows:
        raise BadInputError(f"The measurements '{path}' have no rows; give at least one below the header.")
    return tuple(_Reader(where, path.parent, row).measurement() for where, row in rows)


def _check_header(path: Path, names: object) -> None:
    given = [str(name).strip() for name in names] if isinstance(names, list) else []
    for name in given:
        if name not in COLUMNS:
            raise BadInputError(f"{path}, line 1: '{name}' is not a column; columns are {', '.join(COLUMNS)}.")
    if len(set(given)) != len(given):
        raise BadInputError(f"{path}, line 1: a column is named twice.")


MIN_VALUE, MAX_VALUE = 1e-7, 1e9


class _Reader:
    """Reads one row."""

    def __init__(self, where: str, folder: Path, row: dict[str, str | None]) -> None:
        self._where = where
        self._folder = folder
        if None in row:
            raise BadInputError(f"{where}: there are more values than columns.")
        self._row = {name.strip(): (value or "").strip() for name, value in row.items()}

    def measurement(self) -> Measurement:
        """Converts the row.

        Raises:
            BadInputError: if it is invalid.
        """
        seconds, samples_per_s = self._number("seconds"), self._number("samples_per_s")
        batch_size = self._whole_number("batch_size", least=1)
        if bool(self._text("plan")) == bool(self._text("placement")):
            raise BadInputError(f"{self._where}: give either a 'placement' or a 'plan'.")
        shard_bytes, ps_cpus = None, self._number("ps_cpus")
        if self._text("plan"):
            plan = self._plan()
            nodes = {role: tuple(t.node for t in plan.tasks if t.role == role) for role in ("ps", "worker")}
            assignment = Assignment(nodes["ps"], nodes["worker"], None)
            shapes = {WorkerShape(task.gpus, task.cpus) for task in plan.tasks if task.role == "worker"}
            if len(shapes) > 1:
                raise BadInputError(
                    f"{self._where}: the plan's workers differ; measure one whose workers are all alike."
                )
            shape = shapes.pop()
            batch_size, shard_bytes = batch_size or plan.profile.batch_size, plan.ps_bytes
            ps_cpus = plan.option.ps_task.cpus or None
        else:
            assignment = self._assignment()
            cpus = self._number("cpus")
            if cpus is None:
                raise BadInputError(f"{self._where}: 'cpus' is missing; give each worker's CPUs.")
            shape = WorkerShape(self._whole_number("gpus", least=0) or 0, cpus)
        for name, tasks in (("workers", assignment.workers), ("ps", assignment.ps)):
            expected = self._whole_number(name, least=1)
            if expected not in (None, len(tasks)):
                raise BadInputError(f"{self._where}: '{name}' is {expected}, but {len(tasks)} are placed.")
        return Measurement(shape, assignment, seconds, samples_per_s, batch_size, shard_bytes, self._where, ps_cpus)

    def _text(self, column: str) -> str:
        return self._row.get(column, "")

    def _number(self, column: str) -> float | None:
        text = self._text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise BadInputError(f"{self._where}: '{column}' is '{text}'; it must be a number above 0.")
        if not MIN_VALUE <= value <= MAX_VALUE:
            raise BadInputError(f"{self._where}: '{column}' is '{text}', which is out of range; check the unit.")
        return value

    def _whole_number(self, column: str, least: int) -> int | None:
        text = self._text(column)
        if not text:
            return None
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise BadInputError(
                f"{self._where}: '{column}' is '{text}'; it must be a whole number of at least {least}."
            )
        return int(text)

    def _plan(self) -> Plan:
        path = self._folder / self._text("plan")
        try:
            return Plan.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadInputError(f"{self._where}: the plan '{path}' cannot be read: {reason}.") from error
        except BadInputError as error:
            raise BadInputError(f"{self._where}: '{path}': {error}") from error

    def _assignment(self) -> Assignment:
        ps: dict[int, str] = {}
        workers: list[str] = []
        for part in self._text("placement").split("|"):
            node, colon, tasks = part.strip().rpartition(":")
            if not colon or not node:
                raise self._placement_error(part)
            for task in tasks.split("+"):
                if (match := _PS.fullmatch(task.strip())) is not None:
                    if int(match[1]) in ps:
                        raise BadInputError(f"{self._where}: ps {int(match[1])} is placed twice.")
                    ps[int(match[1])] = node.strip()
                elif (match := _WORKERS.fullmatch(task.strip())) is not None:
                    workers += [node.strip()] * int(match[1])
                elif task.strip() != "chief":
                    raise self._placement_error(part)
        if sorted(ps) != list(range(len(ps))):
            raise BadInputError(f"{self._where}: the parameter servers must be p0, p1 and so on, without a gap.")
        return Assignment(tuple(ps[index] for index in sorted(ps)), tuple(workers), None)

    def _placement_error(self, part: str) -> BadInputError:
        return BadInputError(f"{self._where}: '{part.strip()}' is not part of a placement; write it as 'k80-0:p0+4w'.")
