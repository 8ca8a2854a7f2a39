"""Prints a model's profile for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dike.profile import ModelProfile

_MOST_LAYERS = 8


def print_profile(console: Console, profile: ModelProfile) -> None:
    """Prints the profile as a table of two columns."""
    table = Table(title=f"Model of {profile.name}", show_header=False, title_justify="left")
    rows = {
        "trains by": str(profile.api) + (", synchronous" if profile.synchronous else ""),
        "trainable parameters": f"{profile.parameters:,} ({_bytes(profile.parameter_bytes)}, {profile.dtype})",
        "variables": f"{len(profile.variables):,} ({_bytes(profile.variable_bytes)})",
        "forward pass": f"{_flops(profile.flops_forward_per_sample)} per sample",
        "training step": f"{_flops(profile.flops_step_per_sample)} per sample",
        "longest path": f"{_flops(profile.longest_path_flops)} ({profile.longest_path_share:.1%} of the forward pass)",
        "batch": f"{profile.batch_size:,} samples"
        + (f" of {_bytes(profile.sample_bytes)}" * bool(profile.sample_bytes)),
        "optimizer": f"{profile.optimizer or 'unknown'}, {profile.optimizer_slots} slots per parameter",
        "layers": _counts(profile.layers),
    }
    if profile.uncounted_ops:
        rows["not counted"] = _counts(profile.uncounted_ops)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def uncounted_warning(profile: ModelProfile) -> str | None:
    """One sentence about ops whose FLOPs are not known, or None if all are."""
    if not profile.uncounted_ops:
        return None
    return (
        f"The FLOPs of {sum(profile.uncounted_ops.values())} ops of {profile.name} are not known and not counted: "
        f"{_counts(profile.uncounted_ops)}."
    )


def _counts(counts: dict[str, int]) -> str:
    shown = [f"{count} {name}" for name, count in list(counts.items())[:_MOST_LAYERS]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} more types" if more else "")


def _flops(flops: float) -> str:
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3)):
        if flops >= size:
            return f"{flops / size:.4g} {unit}"
    return f"{flops:.4g} FLOP"


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"
