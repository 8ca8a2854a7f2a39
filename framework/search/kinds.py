"""Kinds of slots: what a slot computes on, as policies compare it. Slots of one kind are equally fast."""

from __future__ import annotations

from collections.abc import Mapping

from solver.hardware import known_hardware

GPU_MODEL = "gpu_model"
"""The agent's attribute that says what its GPUs are."""
SLOT_KIND = "slot_kind"
"""The attribute that tells agents apart whose slots are shares of CPUs, or whose GPUs have no model."""


def kind_of(attributes: Mapping[str, str], gpus: int) -> str:
    """What a slot on an agent computes on; empty where the agent does not say.

    Models of GPUs are read as the solver reads them, so that `Tesla V100-SXM2-16GB` and `v100` are one.

    Args:
        attributes: the agent's, as text.
        gpus: GPUs of the slot; without any their model says nothing of it.
    """
    model = attributes.get(GPU_MODEL, "").strip() if gpus else ""
    if model:
        hardware = known_hardware()
        return (hardware.gpu(model).model if hardware.knows(model) else model).lower()
    return attributes.get(SLOT_KIND, "").strip().lower()


def is_unknown_model(attributes: Mapping[str, str]) -> bool:
    """Whether an agent's GPUs are of a model whose speed is in no table of ours."""
    model = attributes.get(GPU_MODEL, "").strip()
    return bool(model) and not known_hardware().knows(model)
