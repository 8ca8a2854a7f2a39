"""Routes of the service itself and its cluster."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse

from dike._version import __version__
from dike.exceptions import BadInputError
from framework.scheduler.agents import AgentFacts
from framework.scheduler.amounts import total
from framework.scheduler.mesos_access import this_machine
from framework.scheduler.offer_pool import LastOffer
from framework.scheduler.records import TaskRecord
from framework.service.api.backend import MaybeSignedIn, Service, SignedIn
from framework.service.api.cluster_schemas import AgentView, ClusterView, Health, UsageList, UsageView
from framework.service.api.schemas import Me, Problem, SignIn

LOOP_TIMEOUT_S = 60.0
"""A loop without an iteration for this time hangs: it normally makes many a second."""

router = APIRouter(tags=["service"])
open_router = APIRouter(tags=["service"])


@router.get("/me")
def get_me(service: Service, user: SignedIn) -> Me:
    """The user of the token."""
    return Me(user=user.name, admin=user.admin, read_only=service.is_read_only)


@router.get("/cluster")
def get_cluster(service: Service, user: SignedIn) -> ClusterView:
    """The service and the agents of its cluster."""
    if service.master is None:
        raise HTTPException(404, "This page shows stored searches; it has no cluster.")
    snapshot = service.snapshot()
    live: dict[str, list[TaskRecord]] = {}
    for task in service.store.tasks(live_only=True):
        live.setdefault(task.agent_id, []).append(task)
    agents = None
    if snapshot.agents is not None:
        known = sorted([*snapshot.agents, *snapshot.gone], key=lambda agent: agent.node)
        agents = [_agent(one, snapshot.offers.get(one.agent_id), live.get(one.agent_id, [])) for one in known]
    return ClusterView(
        version=__version__,
        started_s=service.metrics.started_s,
        framework_id=service.store.framework_id(),
        connected=service.metrics.is_connected,
        master=service.master.address,
        mesos_version=service.master.version,
        agents=agents,
        machine=this_machine() if service.master.is_here and not service.submissions.has_containers else "",
        private=service.master.is_private,
    )


@router.get("/usage")
def get_usage(service: Service, user: SignedIn, weeks: Annotated[int, Query(ge=1, le=520)] = 4) -> UsageList:
    """What the jobs of each user have used in the last weeks, this one included; of others for administrators only."""
    rows = service.store.usage(weeks, None if user.admin else user.name)
    return UsageList(usage=[UsageView.model_validate(row) for row in rows])


@open_router.get("/sign-in")
def get_sign_in(service: Service, request: Request) -> SignIn:
    """Whether a proxy has signed you in; otherwise a token is needed."""
    return SignIn(proxy=service.proxy is not None and service.proxy.has_sent(request))


@open_router.get("/healthz", responses={200: {"model": Health}, 503: {"model": Health}})
def get_health(service: Service) -> Response:
    """Whether the service works; a lost Mesos master does not make it unhealthy."""
    status, age_s = "ok", service.metrics.loop_age_s
    if age_s > LOOP_TIMEOUT_S:
        status = f"The service's loop has made no iteration for {age_s:.0f} s."
    try:
        service.store.framework_id()
    except BadInputError:
        status = "The service's database cannot be reached."
    health = Health(status=status, connected=service.metrics.is_connected, loop_age_s=round(age_s, 3))
    return JSONResponse(health.model_dump(), 200 if status == "ok" else 503)


@open_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, 401: {"model": Problem, "description": "The token is invalid."}},
    # FastAPI documents the token; this adds that none is accepted, too.
    openapi_extra={"security": [{}]},
)
def get_metrics(service: Service, user: MaybeSignedIn) -> Response:
    """The service's metrics in Prometheus' text format; those by user only with a token."""
    text = service.metrics.text(by_user=user is not None)
    return Response(text, media_type="text/plain; version=1.0.0; charset=utf-8")


def _agent(facts: AgentFacts, offer: LastOffer | None, tasks: list[TaskRecord]) -> AgentView:
    return AgentView(
        id=facts.agent_id,
        node=facts.node,
        active=facts.is_registered,
        attributes=facts.attributes,
        total=dict(facts.total),
        used=dict(facts.used),
        offered=None if offer is None else dict(offer.free),
        offered_s=None if offer is None else offer.time_s,
        held=total(task.resources for task in tasks),
        tasks=tasks,
    )
