"""The Prometheus metrics of a service: counters of its loop and API, and counts from its database."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dike._version import __version__
from framework.mesos.tasks import TaskState
from framework.scheduler.metrics import Metrics
from framework.scheduler.records import INTENDED, JobKind, JobState
from framework.search.records import TrialState
from framework.service import queries
from framework.service.store import ServiceStore
from framework.service.usage import totals

WAIT_BUCKETS_S = (0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 3600, 6 * 3600, 24 * 3600, 7 * 24 * 3600)
_SLOT_STATES = (INTENDED, *(str(state) for state in TaskState if not state.is_terminal()))
_ALL_WEEKS = 5200
WORK_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)


class ServiceMetrics(Metrics):
    """The metrics of one service. Thread-safe. Those labelled by user have a registry of their own."""

    def __init__(self, store: ServiceStore) -> None:
        # Creation times of series are not used, and would double their number.
        disable_created_metrics()
        self.registry = registry = CollectorRegistry()
        self.started_s = time.time()
        self.is_connected = False
        self._last_iteration_s = time.monotonic()
        self._loop = Histogram(
            "dike_loop_seconds",
            "Duration of one iteration of the service's loop.",
            buckets=WORK_BUCKETS_S,
            registry=registry,
        )
        self._connected = Gauge(
            "dike_connected", "Whether the service is subscribed with the Mesos master.", registry=registry
        )
        self._received = Counter("dike_offers_received", "Offers received from Mesos.", registry=registry)
        self._unused = Gauge("dike_offers_held", "Unused offers.", registry=registry)
        self._launches = Counter("dike_launches", "Tasks launched.", registry=registry)
        self._failures = Counter(
            "dike_task_failures", "Tasks that failed without being asked to stop.", registry=registry
        )
        self._waits = Histogram(
            "dike_queue_wait_seconds",
            "Time from a job's submission to its first launch.",
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self._placements = Histogram(
            "dike_placement_seconds",
            "Time for one job to match offers, plan and launch.",
            buckets=WORK_BUCKETS_S,
            registry=registry,
        )
        self._requests = Counter(
            "dike_http_requests",
            "Requests to the API.",
            labelnames=("method", "route", "status"),
            registry=registry,
        )
        self._request_times = Histogram(
            "dike_http_request_seconds",
            "Time from a request to the beginning of its answer.",
            labelnames=("route",),
            registry=registry,
        )
        Gauge("dike_info", "The version.", labelnames=("version",), registry=registry).labels(__version__).set(1)
        Gauge("dike_start_time_seconds", "When the service started.", registry=registry).set(self.started_s)
        ProcessCollector(registry=registry)
        registry.register(_DatabaseCollector(store))
        self.registry_by_user = CollectorRegistry()
        self.registry_by_user.register(_UserCollector(store))

    @property
    def loop_age_s(self) -> float:
        """Seconds since the last iteration of the loop."""
        return time.monotonic() - self._last_iteration_s

    def text(self, *, by_user: bool = False) -> bytes:
        return generate_latest(self.registry) + (generate_latest(self.registry_by_user) if by_user else b"")

    def loop_iteration(self, seconds: float) -> None:
        self._last_iteration_s = time.monotonic()
        self._loop.observe(seconds)

    def connected(self, is_connected: bool) -> None:
        self.is_connected = is_connected
        self._connected.set(is_connected)

    def offers_received(self, count: int) -> None:
        self._received.inc(count)

    def unused_offers(self, count: int) -> None:
        self._unused.set(count)

    def launched(self, count: int) -> None:
        self._launches.inc(count)

    def task_failed(self) -> None:
        self._failures.inc()

    def job_waited(self, seconds: float) -> None:
        self._waits.observe(max(0.0, seconds))

    def placed(self, seconds: float) -> None:
        self._placements.observe(seconds)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts a request whose answer begins; `route` is the template of its path, and `method` not a client's own
        string.
        """
        self._requests.labels(method, route, str(status)).inc()
        self._request_times.labels(route).observe(seconds)


class _DatabaseCollector(Collector):
    def __init__(self, store: ServiceStore) -> None:
        self._store = store
        self._collect_lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        # Called on registration: must not need the database.
        return self._families()

    def collect(self) -> Iterable[Metric]:
        jobs, tasks, trials, slots, oldest, size, bundles = families = self._families()
        with self._collect_lock, self._store.database.reading() as connection:
            job_counts = queries.job_counts(connection)
            task_counts = queries.task_counts(connection)
            trial_counts = queries.trial_counts(connection)
            slot_counts = queries.slot_counts(connection)
            oldest_s = queries.oldest_queued_s(connection)
            bundle_bytes = queries.bundle_bytes(connection)
        for kind in JobKind:
            for state in JobState:
                jobs.add_metric([state, kind], job_counts.get((kind, state), 0))
        for name, count in sorted(task_counts.items()):
            tasks.add_metric([name], count)
        for trial_state in TrialState:
            trials.add_metric([trial_state], trial_counts.get(trial_state, 0))
        for name in sorted({*_SLOT_STATES, *slot_counts}):
            slots.add_metric([name], slot_counts.get(name, 0))
        oldest.add_metric([], 0.0 if oldest_s is None else max(0.0, time.time() - oldest_s))
        size.add_metric([], self._store.database.size_bytes())
        bundles.add_metric([], bundle_bytes)
        return families

    @staticmethod
    def _families() -> list[GaugeMetricFamily]:
        return [
            GaugeMetricFamily("dike_jobs", "Jobs in the database.", labels=["state", "kind"]),
            GaugeMetricFamily("dike_tasks", "Tasks in the database.", labels=["state"]),
            GaugeMetricFamily("dike_trials", "Trials of searches in the database.", labels=["state"]),
            GaugeMetricFamily("dike_slots", "Slots of searches, by the state of their tasks.", labels=["state"]),
            GaugeMetricFamily(
                "dike_oldest_queued_seconds",
                "Time since the submission of the job that waits longest to run for the first time.",
                labels=[],
            ),
            GaugeMetricFamily("dike_database_bytes", "Size of the database.", labels=[]),
            GaugeMetricFamily("dike_bundle_bytes", "Size of the jobs' bundles in the database.", labels=[]),
        ]


class _UserCollector(Collector):
    def __init__(self, store: ServiceStore) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        return [self._family(), *self._usage_families()]

    def collect(self) -> Iterable[Metric]:
        family = self._family()
        gpus, cpus, waits = families = self._usage_families()
        for user, sums in sorted(totals(self._store.usage(weeks=_ALL_WEEKS)).items()):
            gpus.add_metric([user], sums.gpu_hours * 3600)
            cpus.add_metric([user], sums.cpu_hours * 3600)
            waits.add_metric([user], sums.waited_hours * 3600)
        with self._store.database.reading() as connection:
            counts = queries.open_job_counts(connection)
        for user in sorted({user for user, _ in counts}):
            for state in JobState:
                if not state.has_ended():
                    family.add_metric([user, state], counts.get((user, state), 0))
        return [family, *families]

    @staticmethod
    def _family() -> GaugeMetricFamily:
        return GaugeMetricFamily("dike_open_jobs", "Jobs that have not ended.", labels=["user", "state"])

    @staticmethod
    def _usage_families() -> list[CounterMetricFamily]:
        return [
            CounterMetricFamily(f"dike_user_{name}_seconds", text, labels=["user"])
            for name, text in (
                ("gpu", "Seconds of GPUs that the user's tasks have had."),
                ("cpu", "Seconds of CPUs that the user's tasks have had."),
                ("wait", "Time from the submission of the user's jobs to their first task."),
            )
        ]
