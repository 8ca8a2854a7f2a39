"""Reasons for a plan: a few sentences for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from solver.evaluation import RatedPlan
from solver.options import Pruning
from solver.units import SPEED_TIE_SHARE

_GUESS = "The speed of GPU model "


def reasons(
    best: RatedPlan,
    fastest: RatedPlan,
    prunings: Sequence[Pruning],
    max_workers: int | None,
    unknown_gpus: Sequence[str],
    objective: str = "throughput",
) -> tuple[str, ...]:
    """Sentences on the numbers of workers and parameter servers, the worker's CPUs and the bottleneck.

    `fastest`: the fastest placement that was found.
    """
    if objective == "traffic":
        numbers = ["The objective is Eq. 1 alone: least traffic per step, regardless of speed."]
    else:
        numbers = _numbers(best, fastest, max_workers)
    ratio = [pruning.why for pruning in prunings if pruning.rule == "cpu_gpu_ratio"]
    return (*numbers, _limit(best), *ratio, *guesses(unknown_gpus))


def guesses(unknown_gpus: Sequence[str]) -> tuple[str, ...]:
    what = "is not known; a P100's is assumed (solver/hardware.yaml)."
    return tuple(f"{_GUESS}'{model}' {what}" for model in unknown_gpus)


def _numbers(best: RatedPlan, fastest: RatedPlan, max_workers: int | None) -> list[str]:
    """Numbers of tasks, and what more of them would bring."""
    sizes = Counter(shape.gpus for shape in best.assignment.shapes_of_workers(best.shape))
    of_sizes = " and ".join(
        f"{number} {'without GPUs' if not gpus else 'with ' + count_of(gpus, 'GPU')}"
        for gpus, number in sorted(sizes.items(), reverse=True)
    )
    workers = len(best.assignment.workers)
    limit = ", the most that --max-workers allows" if workers == max_workers else ""
    sentences = [f"{count_of(workers, 'worker')}{f': {of_sizes}' if len(sizes) > 1 else ''}{limit}."]
    ps = f"{count_of(len(best.assignment.ps), 'parameter server')}"
    more = fastest.samples_per_s / best.samples_per_s - 1
    if more > SPEED_TIE_SHARE:
        counts = f"{count_of(len(fastest.assignment.workers), 'worker')} and {len(fastest.assignment.ps)} ps"
        sentences.append(f"{ps}: {counts} would be {more:.0%} faster; a plan within 5% of the fastest is enough.")
    else:
        sentences.append(f"{ps}: no plan with fewer tasks was found within 5% of the fastest.")
    return sentences


def guesses_in(why: Sequence[str]) -> list[str]:
    """Sentences about assumed GPU speeds among a plan's reasons."""
    return [sentence for sentence in why if sentence.startswith(_GUESS)]


def count_of(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _limit(best: RatedPlan) -> str:
    model, step_time = best.scenario.model(best.shape), best.worth.step_time
    terms = {
        "the workers' own rounds (compute, input, transfer)": best.worth.cycle_s,
        "the busiest network link": step_time.network,
        "the busiest parameter server": step_time.update,
        "the chief handing out steps": step_time.dispatch,
    }
    if model.profile.synchronous:
        name = max(terms, key=lambda term: terms[term])
        return f"The largest part of a step is {name}: {terms[name] / step_time.total:.0%} of it."
    return f"The speed is limited by {max(terms, key=lambda term: terms[term])}."
