"""Requests made up from the OpenAPI document, and jobs made up from real ones: nothing breaks, nothing is lost."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from framework.scheduler.records import JobRecord
from tests.properties import examples
from tests.search.stored_search import SPEC
from tests.service.api_stage import BUNDLE, DEADLINE_S, TOKENS, ApiStage, api_stage, form, training

pytestmark = pytest.mark.integration

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
PROFILE = {
    "suppress_health_check": list(hypothesis.HealthCheck),
    "phases": (hypothesis.Phase.explicit, hypothesis.Phase.generate),
}
CHANGES_WITH_TIME = ("state", "started_s", "ended_s", "kill_requested", "waiting", "failure", "result", "state_data")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiStage]:
    with api_stage(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def kept(stage: ApiStage) -> Iterator[list[JobRecord]]:
    """Jobs from before the requests; they must be unchanged afterwards."""
    ids = [stage.submit(user, arguments=["--lr", "0.1"]) for user in ("alice", "bob")]
    ids.append(submit_search(stage))
    stage.store.history.add_output(ids[0], [("worker:0", "stdout", "hello\n")])
    records = [record for job_id in ids if (record := stage.store.job(job_id)) is not None]
    yield records
    for before in records:
        after = stage.store.job(before.id)
        assert after is not None
        constant = {name: getattr(before, name) for name in CHANGES_WITH_TIME}
        assert dataclasses.replace(after, **constant) == before
        assert stage.store.bundle(before.bundle_token) == BUNDLE


def search() -> dict[str, Any]:
    spec = dataclasses.asdict(dataclasses.replace(SPEC, script="train.py"))
    return {"kind": "search", "spec": json.loads(json.dumps(spec))}


def submit_search(stage: ApiStage) -> str:
    with stage.client() as client:
        answer = client.post("/api/v1/jobs", files=form(search()))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
def test_every_answer_is_as_the_document_says(
    stage: ApiStage, kept: list[JobRecord], mode: schemathesis.GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{stage.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == 27
    if mode is schemathesis.GenerationMode.NEGATIVE:
        # Without parameters there is nothing to get wrong.
        operations = [one for one in operations if list(one.iter_parameters())]
    ids = st.sampled_from([record.id for record in kept])
    statuses: set[int] = set()
    for operation in operations:

        @examples(40, **PROFILE)
        @hypothesis.given(
            case=operation.as_strategy(generation_mode=mode),
            job_id=st.one_of(st.none(), ids),
            user=st.sampled_from(list(TOKENS)),
        )
        def ask(case: schemathesis.Case, job_id: str | None, user: str) -> None:
            if job_id is not None and "job_id" in (case.path_parameters or {}):
                case.path_parameters["job_id"] = job_id
            if case.path.endswith("/logs"):
                # To follow a job that never ends would be right, and take for ever.
                case.query = {**(case.query or {}), "follow": "false"}
            headers = {"Authorization": f"Bearer {TOKENS[user]}"}
            answer = case.call_and_validate(headers=headers, checks=CHECKS, timeout=DEADLINE_S)
            statuses.add(answer.status_code)
            if answer.status_code >= 400 and not case.path.startswith(("/healthz", "/metrics")):
                assert list(answer.json()) == ["detail"]
                assert "Traceback" not in answer.text

        ask()
    # Requests for jobs of other users are left to chance.
    assert {200, 404, 422} <= statuses, statuses


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [2**31, 2**63, 2**64, -1, 0, 10**400, 1e308, 5e-324, "", "\0", "../..", "a" * 5000, [], {}, [[]], {"": {}}]
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
REMOVED = object()


@st.composite
def odd_requests(draw: st.DrawFn) -> dict[str, Any]:
    """A real request of which one or two things are something else, or gone, or more."""
    request = copy.deepcopy(draw(st.sampled_from([training(plan=None), search()])))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(sorted(places(request), key=repr)))
        parent = request
        for key in path[:-1]:
            parent = parent[key]
        value = draw(st.one_of(st.just(REMOVED), ODD))
        if value is REMOVED:
            del parent[path[-1]]
        else:
            parent[path[-1]] = value
    return request


def test_odd_jobs_are_refused_or_taken_in_and_end_for_themselves(stage: ApiStage, kept: list[JobRecord]) -> None:
    accepted: list[str] = []
    refused: set[str] = set()
    numbers = itertools.count()

    # At least one is taken, whatever the seed.
    @hypothesis.example(request=search())
    @examples(375, **PROFILE)
    @hypothesis.given(request=odd_requests())
    def submit(request: dict[str, Any]) -> None:
        spec = request.get("spec")
        if isinstance(spec, dict) and spec.get("name") == SPEC.name:
            spec["name"] += f"-{next(numbers)}"  # nothing is odd about it, and each is taken once
        with stage.client("bob") as client:
            answer = client.post("/api/v1/jobs", files=form(json.dumps(request)))
        assert answer.status_code in (201, 400, 422), (answer.text, request)
        if answer.status_code == 201:
            accepted.append(answer.json()["id"])
        else:
            sentence = answer.json()["detail"]
            assert "\n" not in sentence
            assert len(sentence) < 10_000
            refused.add(sentence)

    submit()
    assert accepted
    assert len(refused) > 10
    with stage.client("bob") as client:
        for job_id in accepted:
            assert client.get(f"/api/v1/jobs/{job_id}").status_code == 200
        # The loop goes round, whatever was submitted.
        assert client.get("/healthz").json()["status"] == "ok"
    assert stage.is_alive
