"""What Dike is compared with: the paper's baselines, tfmesos and Optimus, under the same step-time model."""

from __future__ import annotations

from solver.baselines.comparison import Comparison, Row, compare
from solver.baselines.methods import PLANNERS, plan_with

__all__ = ["PLANNERS", "Comparison", "Row", "compare", "plan_with"]
