"""Reasons for a plan: a few sentences for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from solver.options import Pruning
from solver.placement.fastest import OutOfTimeError
from solver.scenario import Scenario
from solver.search.option_search import SPEED_TIE_SHARE, OptionResults, OptionSearch
from solver.search.placer import Solved

_GUESS = "The speed of GPU model "


def reasons(
    search: OptionSearch | None,
    scenario: Scenario,
    found: OptionResults,
    prunings: Sequence[Pruning],
    max_workers: int | None,
    unknown_gpus: Sequence[str],
    objective: str = "throughput",
) -> tuple[str, ...]:
    """Sentences on the numbers of workers and parameter servers, the worker's CPUs and the bottleneck.

    Places neighbours of the best option with `search`, which is None if none compared the options.
    """
    best = found.best
    if objective == "traffic":
        numbers = ["The objective is Eq. 1 alone: least traffic per step, regardless of speed."]
    elif search is None or not search.placements_are_simple or best.candidate.mixed:
        numbers = _numbers(best, found.others)
    else:
        numbers = [_workers(search, best, max_workers), _parameter_servers(search, best)]
    ratio = [pruning.why for pruning in prunings if pruning.rule == "cpu_gpu_ratio"]
    return (*numbers, _limit(scenario, best), *ratio, *guesses(unknown_gpus))


def guesses(unknown_gpus: Sequence[str]) -> tuple[str, ...]:
    what = "is not known; a P100's is assumed (solver/hardware.yaml)."
    return tuple(f"{_GUESS}'{model}' {what}" for model in unknown_gpus)


def _numbers(best: Solved, others: Sequence[Solved]) -> list[str]:
    """Numbers of tasks, and the speed of plans with identical workers and one ps per machine."""
    sizes = Counter(shape.gpus for shape in best.assignment.shapes_of_workers(best.shape))
    of_sizes = " and ".join(
        f"{number} {'without GPUs' if not gpus else 'with ' + count_of(gpus, 'GPU')}"
        for gpus, number in sorted(sizes.items(), reverse=True)
    )
    machines = len(set(best.assignment.ps))
    on = f" on {count_of(machines, 'machine')}" if machines < best.candidate.ps else ""
    sentences = [
        f"{count_of(best.candidate.workers, 'worker')}{f': {of_sizes}' if len(sizes) > 1 else ''}.",
        f"{count_of(best.candidate.ps, 'parameter server')}{on}.",
    ]
    alike = max((other.samples_per_s for other in others if not other.candidate.mixed), default=0.0)
    if alike:
        share = alike / best.samples_per_s
        sentences.append(f"With identical workers and one ps per machine (--rules paper): {share:.0%} of the speed.")
    return sentences


def guesses_in(why: Sequence[str]) -> list[str]:
    """Sentences about assumed GPU speeds among a plan's reasons."""
    return [sentence for sentence in why if sentence.startswith(_GUESS)]


def count_of(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _compared(other: Solved, best: Solved) -> str:
    share = other.samples_per_s / best.samples_per_s
    if abs(share - 1) < SPEED_TIE_SHARE:
        return "would be as fast, within 1%, "
    return f"would reach {share:.0%} of the speed"


def _workers(search: OptionSearch, best: Solved, max_workers: int | None) -> str:
    workers, ps = best.candidate.workers, best.candidate.ps
    text = count_of(workers, "worker")
    if workers == max_workers:
        return f"{text}: the most that --max-workers allows."
    try:
        more = search.neighbour(best, workers + 1, ps)
    except OutOfTimeError:
        return f"{text}: there was no time to try {workers + 1}."
    if more is None:
        of_size = "" if best.candidate.mixed else " of this size"
        return f"{text}{of_size}: no more fit beside the other tasks."
    outcome = _compared(more, best)
    if outcome.endswith(", "):
        return f"{text}: {workers + 1} {outcome}with more traffic."
    return f"{text}: {workers + 1} {outcome}."


def _parameter_servers(search: OptionSearch, best: Solved) -> str:
    workers, ps = best.candidate.workers, best.candidate.ps
    clauses = []
    for other_count in (ps - 1, ps + 1):
        try:
            other = search.neighbour(best, workers, other_count)
        except OutOfTimeError:
            clauses.append(f"there was no time to try {other_count}")
            continue
        if other is not None:
            outcome = _compared(other, best)
            clauses.append(f"{other_count} {outcome.removesuffix(', ')}")
    text = count_of(ps, "parameter server")
    if not clauses:
        return f"{text}: no other number fits or changes the largest shard."
    return f"{text}: {', '.join(clauses)}."


def _limit(scenario: Scenario, best: Solved) -> str:
    model = scenario.model(best.shape)
    workers = best.candidate.workers
    load = model.load(scenario.shards(best.candidate.ps))
    terms = {
        "the workers' own rounds (compute, input, transfer)": best.cycle_s,
        "the busiest network link": best.network_s,
        "the busiest parameter server": model.update_s(load, workers),
        "the chief handing out steps": model.dispatch_s(workers),
    }
    if model.profile.synchronous:
        name = max(terms, key=lambda term: terms[term])
        return f"The largest part of a step is {name}: {terms[name] / best.round_s:.0%} of it."
    return f"The speed is limited by {max(terms, key=lambda term: terms[term])}."
