"""The gain of each part of Optimus alone."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.jobs.cases import FEWER_SEEDS, ratio, run, table

TITLE = "Each part alone"
CASES = ("all-reduce", "ps", "ps, 1 Gb/s")
NOTHING = "drf/spread/in-turn"
ALL = "gain/fewest/paa"
ALONE = {
    "allocation": "gain/spread/in-turn",
    "placement": "drf/fewest/in-turn",
    "ps balance": "drf/spread/paa",
}
WITHOUT = {
    "allocation": "drf/fewest/paa",
    "placement": "gain/spread/paa",
    "ps balance": "gain/fewest/in-turn",
}


def measure() -> Iterator[str]:
    yield "Mean completion time with one part of Optimus put into drf (which is drf's allocation, tasks spread over"
    yield "the machines, variables dealt out to the ps in turn), as a multiple of drf's; and with one part of drf put"
    yield "into Optimus, as a multiple of Optimus'. All-reduce has no ps to balance. In the paper allocation gains 62%,"
    yield f"placement 17% and ps balance 20% (here by its rule, PAA). {len(FEWER_SEEDS)} seeds."
    yield ""
    columns = ["", *(f"{part} alone" for part in ALONE), "all", *(f"without {part}" for part in WITHOUT)]
    rows = []
    for case in CASES:
        nothing, every, *others = run(case, (NOTHING, ALL, *ALONE.values(), *WITHOUT.values()), seeds=FEWER_SEEDS)
        alone, without = others[: len(ALONE)], others[len(ALONE) :]
        rows.append(
            (
                case,
                *(ratio(result, nothing) for result in alone),
                ratio(every, nothing),
                *(ratio(result, every) for result in without),
            )
        )
    yield from table(columns, rows)
