"""What a service gives to its jobs, where nothing of it is real but the database."""

from __future__ import annotations

from framework.service.job_factory import JobContext
from framework.service.store import ServiceStore


def fake_context(store: ServiceStore, checkpoint_root: str) -> JobContext:
    return JobContext(
        store=store,
        bundle_url="http://127.0.0.1:1/bundle/{}".format,
        python="python3",
        image=None,
        hand_out_gpus=False,
        checkpoint_root=checkpoint_root,
        agents=lambda constraints: lambda: None,
        demand=lambda framework_id: None,
    )
