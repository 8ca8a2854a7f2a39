"""All integer programs of the placement problem by name: the paper's, the planner's and min-max programs."""

from __future__ import annotations

from solver.formulations.auto import PREFERRED
from solver.formulations.instance import Formulation

from benchmarks.programs.literal import Literal
from benchmarks.programs.min_max import MinMaxCounts, MinMaxShards

FORMULATIONS: dict[str, Formulation] = {
    formulation.name: formulation
    for formulation in (
        Literal(),
        Literal(strengthened=True),
        *PREFERRED,
        MinMaxCounts(),
        MinMaxShards(),
    )
}
