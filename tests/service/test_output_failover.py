"""What a job prints while no service runs is not missing: real Mesos, real processes, a real database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from framework.scheduler.records import JobState
from tests.service.counting_script import LAST
from tests.service.dying_service import NEVER
from tests.service.failover_stage import FailoverStage, staged
from tests.waiting import wait_until

pytestmark = [pytest.mark.mesos]
LINES = 20
"""How many are written at least while no service is there, and while one is."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[FailoverStage]:
    with staged(tmp_path) as made:
        yield made


def test_all_that_was_written_is_there_once_and_in_its_order(stage: FailoverStage) -> None:
    def output(stream: str) -> str:
        return "".join(chunk.text for chunk in stage.store.history.output(job.id) if chunk.stream == stream)

    def written() -> int:
        found = stage.folder / "written"
        return int(found.read_text() or 0) if found.exists() else 0

    def wait_for_lines(what: str) -> None:
        enough = written() + LINES
        wait_until(lambda: written() >= enough, what, said=lambda: stage.logs)

    def wait_for_output(number: int) -> None:
        lines = f"line {number} é\n", f"aside {number}\n"
        stage.wait_until(lambda: lines[0] in output("stdout") and lines[1] in output("stderr"), f"line {number}")

    job = stage.submit([str(stage.folder)], "counting_script.py")
    # Once while the script writes on, and once while it ends.
    for is_last in (False, True):
        service = stage.serve(NEVER)
        wait_for_lines("lines written")
        wait_for_output(written())
        service.kill()
        service.wait()
        before = len(output("stdout"))
        wait_for_lines("lines while the service is down")
        assert len(output("stdout")) == before
        if is_last:
            (stage.folder / "enough").touch()
            wait_until((stage.folder / "over").exists, "the script's end")
    stage.serve(NEVER)
    stage.wait_until(lambda: stage.job(job.id).state.has_ended(), "the job's end")
    assert stage.job(job.id).state is JobState.FINISHED, stage.job(job.id).failure
    count = written()
    assert output("stdout") == "".join(f"line {number} é\n" for number in range(count)) + LAST
    assert output("stderr") == "".join(f"aside {number}\n" for number in range(count))
    assert not [event.text for event in stage.store.history.events(job.id) if "sandbox" in event.text]
