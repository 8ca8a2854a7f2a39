"""`dike plan MODEL`: plan a training job without Mesos and without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from framework.cli.output import Format, console, print_json
from framework.cli.planning_tables import print_plan, print_profile
from framework.profiling import load_profile
from solver import Cluster, Objective, PlanRequest, make_plan


def plan(
    model: Annotated[
        str, typer.Argument(help="A training script, keras:NAME or a saved profile (.json).", show_default=False)
    ],
    cluster: Annotated[Path, typer.Option(help="The cluster file (YAML).", show_default=False)],
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per worker and step.")] = None,
    objective: Annotated[
        Objective, typer.Option(help="What to plan for: speed, or the paper's Eq. 1 (traffic).")
    ] = "throughput",
    max_workers: Annotated[int | None, typer.Option(min=1, help="At most this many workers.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also draw the plan into this .png or .svg file.")] = None,
    output_format: Annotated[Format, typer.Option("--format", help="How to print the plan.")] = Format.TABLE,
) -> None:
    """Shows which tasks a training job would get on a cluster, where, and how fast they would be."""
    if picture is not None:
        # matplotlib takes a while to load, and most runs draw nothing.
        from solver.picture import check_picture_path, draw_plan

        check_picture_path(picture)
    # The quick check of a small file comes before the slow look at a model.
    machines = Cluster.from_yaml(cluster)
    profile = load_profile(model, (), batch_size)
    request = PlanRequest(profile, machines, objective=objective, max_workers=max_workers)
    made = make_plan(request)
    if picture is not None:
        draw_plan(made, picture)
    if output_format is Format.JSON:
        print_json(made.to_json())
        return
    out = console()
    print_profile(out, profile)
    print_plan(out, made)
    if picture is not None:
        out.print(f"The picture is in {picture}.")
