"""The cost of wrong estimates of convergence and speed."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.jobs.cases import FEWER_SEEDS, ratio, run, table
from benchmarks.simulation.jobs.estimates import EstimateSettings

TITLE = "Errors of the two models"
CASES = ("all-reduce", "ps")
POLICIES = ("optimus", "dike")
CONVERGENCE = (0.2, 0.4, 0.8)
SPEED = (0.1, 0.2, 0.4)


def measure() -> Iterator[str]:
    yield "Mean completion time as a multiple of what the policy does if it knows both exactly. Errors are put into the"
    yield "truth: a job's length is too long or too short by that share (less with progress), each speed of each"
    yield "number of tasks is too high or too low by it. *Fitted*: from noisy losses and speeds, as in other tables."
    yield f"{len(FEWER_SEEDS)} seeds."
    yield ""
    settings = {
        "fitted": EstimateSettings(),
        "convergence fitted": EstimateSettings(None, 0.0),
        "speed fitted": EstimateSettings(0.0, None),
        **{f"convergence {error:.0%}": EstimateSettings(error, 0.0) for error in CONVERGENCE},
        **{f"speed {error:.0%}": EstimateSettings(0.0, error) for error in SPEED},
    }
    known = {case: run(case, POLICIES, EstimateSettings(0.0, 0.0), FEWER_SEEDS) for case in CASES}
    rows = []
    for name, estimates in settings.items():
        cells = [
            ratio(result, unit)
            for case in CASES
            for result, unit in zip(run(case, POLICIES, estimates, FEWER_SEEDS), known[case], strict=True)
        ]
        rows.append((name, *cells))
    yield from table(("error", *(f"{case}: {policy}" for case in CASES for policy in POLICIES)), rows)
