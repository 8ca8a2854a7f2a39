"""Compares the claims of the papers that Dike implements with our figures, one row a claim.

Most figures come from the stored results of other benchmarks (`results/NAME.json`); the rest is measured here.
"""

from __future__ import annotations

import enum
import functools
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planning_methods import ALL_PLANNERS
from benchmarks.simulation.bins import default_target
from benchmarks.simulation.curves import read_curves
from benchmarks.simulation.throughputs import model_of, read_throughputs
from benchmarks.tables import in_brackets, number, read
from framework.embedded.agents import AgentSpec
from framework.embedded.cluster import EmbeddedCluster
from framework.mesos.master import connect
from framework.project.profiling import load_profile
from framework.search.records import MAX_FAILURES
from solver import Cluster, NodeClass, PlanRequest, make_plan
from solver.choices import RULES
from solver.methods import plan_with
from solver.units import GIB

TITLE = "What the papers claim, and what comes out here"
DATA = Path(__file__).parent / "data"
CURVES = {"algoperf_imagenet_resnet": 0.9, "algoperf_ogbg": 0.98, "nas_alexnet_imagenet": 0.9}
"""Recorded set -> `target_share`, as in `simulated`."""
EARLY = 1 / 3
"""The paper's 1,000 of 3,000 iterations."""
REPEATS = 5
SEARCHES = 3
TRIALS_S = (2.0, 3.0, 10.0)
POLL_INTERVAL_S = 0.05
AGENT = AgentSpec(resources="cpus:1;mem:2048;disk:4096;gpus:1")
TRIAL = """
import time
import dike
dike.report(1, loss=1.0)
time.sleep(dike.params()["seconds"])
dike.report(2, loss=0.5)
"""
OWN = "claims"
"""The command of claims that are measured here."""


class Verdict(enum.StrEnum):
    REPRODUCED = "reproduced"
    EXCEEDED = "exceeded"
    BOUNDED = "bounded"
    """Holds, but on other hardware or data than the paper's."""
    REFUTED = "refuted"
    UNDECIDED = "cannot be told here"


@dataclass(frozen=True)
class Finding:
    """Our figure with its spread, the verdict and the reason for it."""

    figure: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    Attributes:
        command: benchmark that measures ours.
        find: reads or measures ours.
    """

    paper: str
    words: str
    figure: str
    command: str
    find: Callable[[], Finding]

    @property
    def is_read(self) -> bool:
        """Whether the figure comes from another benchmark's stored result."""
        return self.command != OWN


def measure() -> Iterator[str]:
    yield "One row a claim. *Bounded*: it holds here, on other hardware or other data than the paper's, which limits"
    yield "what it says. Figures are those of the command named, on the machine that its result names; most are read"
    yield "from what is kept of it. Speeds of plans are the step-time model's. What Dike has taken from each paper:"
    yield "[planner](../../docs/planner.md) (Dike, Optimus), [policies](../../docs/policies.md) (Hermes, Hermes-v2,"
    yield "Optimus), [service](../../docs/service.md) (Hops)."
    yield ""
    yield "| # | paper | claim | its figure | ours | verdict | why | command |"
    yield "|---|---|---|---|---|---|---|---|"
    counts: dict[Verdict, int] = defaultdict(int)
    for place, claim in enumerate(CLAIMS, 1):
        found = claim.find()
        counts[found.verdict] += 1
        cells = (claim.paper, claim.words, claim.figure, found.figure, f"**{found.verdict}**", found.reason)
        yield f"| {place} | {' | '.join(cells)} | `python -m benchmarks {claim.command}` |"
    yield ""
    yield f"In all: {', '.join(f'{counts[verdict]} {verdict}' for verdict in Verdict if counts[verdict])}."


def _mixed(without_gpus: int) -> Cluster:
    """Five of the paper's machines, `without_gpus` of them without GPUs."""
    own = functools.partial(NodeClass, cpus=8, mem_bytes=32 * GIB, network_gbps=10.0)
    nodes = [own(name="k80", count=5 - without_gpus, gpus=4, gpu_model="k80")]
    if without_gpus:
        nodes.append(own(name="cpu", count=without_gpus))
    return Cluster(tuple(nodes))


def _request(cluster: Cluster) -> PlanRequest:
    return PlanRequest(load_profile("keras:ResNet50", batch_size=32), cluster)


# Dike.


def _near_the_optimum() -> Finding:
    table = read("solver", "instances", "dike")
    shares = [number(row[table.columns.index("dike")]) for row in table.rows]
    least, mean = min(shares), statistics.fmean(shares)
    verdict = Verdict.REPRODUCED if least >= 95 else Verdict.REFUTED
    reason = "the optimum is the step-time model's own, so only the gaps of other methods are findings"
    return Finding(f"{mean:.1f}% in the mean, at least {least:.1f}% ({len(shares)} cases)", verdict, reason)


def _few_options() -> Finding:
    plan = make_plan(replace(_request(_mixed(0)), rules=frozenset(RULES)))
    left = plan.options.considered
    verdict = Verdict.REPRODUCED if left < 20 else Verdict.REFUTED
    return Finding(f"{left}", verdict, "five machines of 8 CPUs and 4 GPUs, ResNet50, all of the paper's rules")


def _combinations() -> Finding:
    figure = f"{math.comb(85 + 5 - 1, 5):,} by one way to count"
    reason = (
        "the paper does not say how it counts, and this was looked for until it fitted: five machines, not told apart, "
        "each in one of 85 states (0 to 4 GPUs, 0 to 16 GB)"
    )
    return Finding(figure, Verdict.UNDECIDED, reason)


def _planning_time() -> Finding:
    table = read("solver", "Planning time")
    seconds = [number(row[-1]) for row in table.rows if row[1] == "300"]
    return Finding(
        f"at most {max(seconds):.2f} s", Verdict.EXCEEDED, "another machine; homogeneous, mixed, all different"
    )


def _share_of_iterative() -> Finding:
    shares = []
    for without_gpus in range(5):
        request = _request(_mixed(without_gpus))
        for _ in range(REPEATS):
            seconds = []
            for method in ("dike", "iterative"):
                begun_s = time.perf_counter()
                plan_with(method, request, planners=ALL_PLANNERS)
                seconds.append(time.perf_counter() - begun_s)
            shares.append(seconds[0] / seconds[1])
    figure = f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"
    reason = (
        f"ResNet50 on five machines, none to four of them without GPUs, {REPEATS} runs each; on more the iterative "
        "approach does not end"
    )
    return Finding(figure, Verdict.EXCEEDED if statistics.median(shares) <= 0.19 else Verdict.REFUTED, reason)


def _uses_cpu_machines() -> Finding:
    used = []
    for without_gpus in range(1, 5):
        plan = make_plan(_request(_mixed(without_gpus)))
        used.append(sum(task.node.startswith("cpu") for task in plan.tasks))
    figure = f"{sum(map(bool, used))} of {len(used)} plans put tasks there"
    verdict = Verdict.REPRODUCED if any(used) else Verdict.REFUTED
    return Finding(figure, verdict, "ResNet50 on five machines, one to four without GPUs; where it is faster")


# Hermes and Hermes-v2.


def _hermes_against(other: str) -> list[float]:
    """Returns how many times sooner a good trial reaches the target than under `other`, for each set of curves."""
    found = []
    for curves in ("ResNet on ImageNet", "graph network on OGBG", "AlexNet on ImageNet"):
        for good in ("4 good", "12 good"):
            means = read(
                "search", f"{curves} (AlgoPerf), {good}" if "Alex" not in curves else f"{curves}, {good}"
            ).column("mean of the good, s")
            found.append(number(means[other]) / number(means["hermes"]))
    return found


def _faster_searches() -> Finding:
    others = {name: _hermes_against(name) for name in ("fifo", "rr", "slaq")}
    figure = "; ".join(f"{min(each):.2f} to {max(each):.2f} times as fast as {name}" for name, each in others.items())
    most = max(max(each) for each in others.values())
    verdict = Verdict.REPRODUCED if most >= 2.08 else Verdict.REFUTED
    dike = read("search", "ResNet on ImageNet (AlgoPerf), 4 good").column("mean of the good, s")
    faster = number(dike["fifo"]) / number(dike["dike"])
    reason = (
        "recorded curves of three tasks, 4 and 12 good trials of 16; the policy `dike` is "
        f"{faster:.2f} times as fast as fifo on the first"
    )
    return Finding(figure, verdict, reason)


def _preemption() -> Finding:
    table = read("search", "Preemption", "pair, zygote")
    zygote, memory = ([number(cell) for cell in table.column(f"pair, {how}").values()] for how in ("zygote", "memory"))
    verdict = Verdict.BOUNDED if max(zygote) <= 1.57 else Verdict.REFUTED
    here, there = (f"{min(pairs):.2f} to {max(pairs):.2f} s" for pairs in (memory, zygote))
    reason = f"suspension and resumption together, on CPUs; {there} where it goes on in a new process"
    return Finding(f"{here} in the same process", verdict, reason)


def _overhead() -> Finding:
    table = read("search", "Preemption", "ratio by CPU time")
    ratios = [number(cell) - 1 for cell in table.column("ratio by CPU time").values()]
    verdict = Verdict.BOUNDED if max(ratios) <= 0.087 else Verdict.REFUTED
    reason = "on CPUs: steps of a trial that reports against the bare script's; by the clock the spread is larger"
    return Finding(f"{min(ratios):.1%} to {max(ratios):.1%} of CPU time", verdict, reason)


def _few_converge() -> Finding:
    shares, early = [], []
    for name, share in CURVES.items():
        curves = read_curves(DATA / "learning_curves" / f"{name}.csv.gz")
        target = default_target(curves, share)
        times = [(curve.time_to(target), curve.length_s) for curve in curves if math.isfinite(curve.time_to(target))]
        shares.append(len(times) / len(curves))
        early.append(statistics.fmean(taken <= EARLY * length for taken, length in times))
    figure = (
        f"{min(shares):.0%} to {max(shares):.0%} reach the target; of these "
        f"{min(early):.0%} to {max(early):.0%} in the first third"
    )
    return Finding(figure, Verdict.REFUTED, "recorded curves of three tasks; what converges is a matter of the target")


def _of_hermes(columns: str) -> dict[str, list[float]]:
    """Policy -> its figure as a multiple of `hermes`', one for each set-up."""
    found = defaultdict(list)
    for setting in ("12 trials", "24 trials", "96 trials", "4 trials a GPU"):
        for policy, cell in read("different_gpus", setting).column(columns).items():
            found[policy].append(in_brackets(cell))
    return found


def _lowest_loss() -> Finding:
    return _on_other_gpus("lowest loss, s", 0.30)


def _completion() -> Finding:
    return _on_other_gpus("completion, s", 0.32)


def _span(shares: list[float]) -> str:
    ends = (f"{shares[0]:.0%}", f"{shares[-1]:.0%}")
    return " to ".join(dict.fromkeys(ends))


def _on_other_gpus(column: str, claimed: float) -> Finding:
    ratios = _of_hermes(column)
    equations, whole = ratios["Eq. 1 and 2"], ratios["hermes2"]
    equations_less, whole_less = (sorted(1 - ratio for ratio in each) for each in (equations, whole))
    figure = f"by Eq. 1 and 2 {_span(equations_less)}; by `hermes2` {_span(whole_less)}"
    reached = 1 - statistics.fmean(equations)
    verdict = Verdict.REPRODUCED if reached >= claimed else Verdict.REFUTED
    reason = "four set-ups on Gavel's speeds, 30 seeds each; Eq. 1 and 2 as printed, and `hermes2`, Dike's version"
    return Finding(figure, verdict, reason)


def _stable_ranking() -> Finding:
    table = read_throughputs(DATA / "throughput" / "gavel_simulation_throughputs.json.gz")
    orders: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name in table.jobs_of(table.kinds):
        orders[model_of(name)].append(tuple(sorted(table.kinds, key=lambda kind: table.steps_s[kind][name])))
    several = {model: found for model, found in orders.items() if len(found) > 1}
    changed = sorted(model for model, found in several.items() if len(set(found)) > 1)
    verdict = Verdict.REFUTED if changed else Verdict.REPRODUCED
    figure = f"it changes for {len(changed)} of {len(several)} models ({', '.join(changed)})"
    return Finding(figure, verdict, "Gavel's measurements on K80, P100 and V100")


# Optimus.


def _hundred_thousand_tasks() -> Finding:
    table = read("solver", "Many jobs at once", "waiting")
    placed = table.columns.index("tasks placed")
    rows = [
        (number(row[placed]), number(row[-1])) for row in table.rows if row[table.columns.index("machines")] == "16,000"
    ]
    tasks, seconds = zip(*rows, strict=True)
    figure = f"{min(seconds):.1f} to {max(seconds):.1f} s for {min(tasks):,.0f} to {max(tasks):,.0f} tasks"
    return Finding(figure, Verdict.EXCEEDED, "16,000 machines; like models, 40 models, five kinds of machines")


def _parts() -> Finding:
    table = read("jobs", "Each part alone", "allocation alone")
    claimed = {"allocation": 0.62, "placement": 0.17, "ps balance": 0.20}
    gains = {
        part: [1 - number(cell) for case, cell in table.column(f"{part} alone").items() if case.startswith("ps")]
        for part in claimed
    }
    figure = "; ".join(f"{part} {_span(sorted(each))}" for part, each in gains.items())
    reason = "simulated, jobs with parameter servers at 10 and at 1 Gb/s: what each is worth depends on the network"
    is_reached = all(max(gains[part]) >= share for part, share in claimed.items())
    verdict = Verdict.REPRODUCED if is_reached else Verdict.REFUTED
    return Finding(figure, verdict, reason)


def _resizing() -> Finding:
    table = read("elastic", "Training jobs that change their size")
    cell = table.column("of the time")["elastic"]
    verdict = Verdict.EXCEEDED if number(cell) < 2.54 else Verdict.REFUTED
    return Finding(cell, verdict, "three elastic jobs on a real Mesos, minutes long; the paper's take hours")


def _fewest_servers() -> Finding:
    table = read("solver", "300 random clusters", "sync: mean, worst")
    cells = dict(zip(table.columns, next(row for row in table.rows if row[0] == "optimus"), strict=True))
    whole = cells["all: mean, worst"]
    alike = read("solver", "like instances", "sync, Cifar10: mean, worst")
    means = sorted(number(cell) for row in alike.rows if row[0] == "optimus" for cell in row[1:])
    reason = f"300 clusters of unlike machines; on like ones {means[0]:.1f}% to {means[-1]:.1f}% in the mean"
    figure = f"{whole.replace(',', ' in the mean,')} at worst of the best placement's speed"
    return Finding(figure, Verdict.REFUTED, reason)


# Hops.


def _free_gpus() -> Finding:
    idle_s, held_s = [], []
    for _ in range(SEARCHES):
        held = _gpu_seconds_of_a_search()
        held_s.append(held)
        idle_s.append(held - sum(TRIALS_S))
    figure = f"{statistics.median(idle_s):.1f} of {statistics.median(held_s):.1f} GPU-seconds without a trial at work"
    reason = (
        f"{len(TRIALS_S)} trials of {min(TRIALS_S):g} to {max(TRIALS_S):g} s on 2 GPUs that Mesos counts, median of "
        f"{SEARCHES} searches; the starts of slots and trials are in it"
    )
    # Idle time of a GPU that would be kept until the end of the search.
    kept_s = max(TRIALS_S) - min(TRIALS_S)
    return Finding(figure, Verdict.REPRODUCED if statistics.median(idle_s) < kept_s else Verdict.REFUTED, reason)


def _gpu_seconds_of_a_search() -> float:
    """Returns the GPU-seconds that the master counts as used during a search."""
    with tempfile.TemporaryDirectory(prefix="dike-claims-") as folder, EmbeddedCluster([AGENT] * 2) as cluster:
        cluster.wait_for_agents(60)
        (Path(folder) / "trial.py").write_text(TRIAL, encoding="utf-8")
        command = [sys.executable, "-m", "framework", "tune", "--master", cluster.master, "--policy", "fifo"]
        command += ["--format", "json", "--param", f"seconds={','.join(map(str, TRIALS_S))}", "trial.py"]
        with (Path(folder) / "log").open("w+") as log:
            search = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
            master = replace(connect(cluster.master, 60), credentials=cluster.access.credentials)
            held, last_s = 0.0, time.monotonic()
            while search.poll() is None:
                metrics = master.ask("/metrics/snapshot")
                assert metrics is not None, "the master does not answer"
                now_s = time.monotonic()
                held, last_s = held + metrics["master/gpus_used"] * (now_s - last_s), now_s
                time.sleep(POLL_INTERVAL_S)
            if search.returncode:
                log.seek(0)
                raise RuntimeError(f"the search failed:\n{log.read()}")
    return held


def _three_strikes() -> Finding:
    reason = "a trial's first failure replaces its executor, the second leaves its agent out, the third gives it up"
    return Finding(f"{MAX_FAILURES}", Verdict.REPRODUCED, reason)


def _claim(paper: str, words: str, figure: str, find: Callable[[], Finding], command: str = OWN) -> Claim:
    return Claim(paper, words, figure, command, find)


CLAIMS = (
    _claim(
        "Dike",
        "share of the best throughput on few machines, on 20",
        "100%, 95%",
        _near_the_optimum,
        "optimum_share",
    ),
    _claim("Dike", "options that its rules leave for five machines", "fewer than 20", _few_options),
    _claim("Dike", "combinations that brute force tries", "41 million", _combinations),
    _claim("Dike", "time to plan for 300 machines", "23 minutes", _planning_time, "planning"),
    _claim("Dike", "planning time as a share of the iterative approach's", "at most 19%", _share_of_iterative),
    _claim("Dike", "machines without GPUs are used", "-", _uses_cpu_machines),
    _claim("Hermes", "good trials converge faster", "2.08, 1.92, 4.04, 3.39 times", _faster_searches, "simulated"),
    _claim("Hermes", "time that a preemption takes", "0.67 to 1.57 s", _preemption, "preemption"),
    _claim("Hermes", "overhead on 1,000 iterations", "2.0 to 8.7%", _overhead, "preemption"),
    _claim("Hermes", "trials that converge; of these in the first third", "a quarter; 85%", _few_converge),
    _claim("Hermes-v2", "less time to the least loss than by Hermes", "30%", _lowest_loss, "different_gpus"),
    _claim("Hermes-v2", "less completion time than by Hermes", "32%", _completion, "different_gpus"),
    _claim("Hermes-v2", "a model's ranking of GPUs holds for all batch sizes", "-", _stable_ranking),
    _claim("Optimus", "time to schedule 100,000 tasks on 16,000 machines", "5 s", _hundred_thousand_tasks, "many_jobs"),
    _claim("Optimus", "allocation, placement and ps balance gain", "62%, 17%, 20%", _parts, "parts"),
    _claim("Optimus", "share of the time that resizing takes", "2.54%", _resizing, "elastic"),
    _claim("Optimus", "best placed on the fewest servers, equal counts on each", "-", _fewest_servers, "optimum_share"),
    _claim("Hops", "a GPU is free once its experiment has ended", "-", _free_gpus),
    _claim("Hops", "three strikes: executor, machine, job", "3", _three_strikes),
)
