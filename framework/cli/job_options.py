"""The options of a training job, for `dike run` and `dike submit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dike.described import values_of
from dike.exceptions import BadInputError
from framework.cli import OPTIONS_ENDED
from framework.project.entry_point import EntryPoint, environment_for_tasks, find_entry_point
from framework.training.options import TrainingOptions
from solver.cli.option_groups import merged_panels, options_of, panels_of, with_options
from solver.cli.plan import module_option, refresh_profile_option
from solver.cli.planning_options import PLAN_PANELS
from solver.settings import PlanSettings
from solver.text_files import read_text

Logs = Literal["chief", "all"]

if TYPE_CHECKING:
    from dike.profile import ModelProfile
    from framework.scheduler.mesos_access import MesosAccess
    from framework.training.run import RunRequest


@dataclass(frozen=True, kw_only=True)
class JobOptions(TrainingOptions):
    """The options of a training job; its script has not been read yet.

    Attributes:
        script, is_module, arguments: the script, or the name of a module, and its own arguments.
        plan_file: plan to follow; None to make one.
        stream_all_logs: see `JobSpec`.
        batch_size: samples per step to plan for; None for the script's own.
        outputs_limit: value of `--outputs-limit`; None for the default.
        saved_profile: profile of the script; None to make one.
        refresh_profile: whether to make a profile even if one is cached.
    """

    script: Path
    is_module: bool
    arguments: tuple[str, ...]
    plan_file: Path | None
    stream_all_logs: bool
    batch_size: int | None
    outputs_limit: str | None
    saved_profile: Path | None
    refresh_profile: bool

    def request(
        self,
        planning: PlanSettings,
        *,
        on_this_machine: bool,
        notify: Callable[[str], None],
        handed_over: Path | None = None,
        zygotes: Callable[[], str] = lambda: "",
    ) -> RunRequest:
        """Reads the plan, packs the script's bundle, gets its profile, and makes the request.

        Args:
            planning: how to plan.
            on_this_machine: whether the script's processes run on this machine.
            notify: called with one line about the source of the profile.
            handed_over: file with a profile for this request only; it is deleted.
            zygotes: called once the script is known to exist; returns the socket of a zygote server, or an empty text.

        Raises:
            BadInputError: if an option, the script or a file cannot be used.
        """
        from framework.project.profiling import JobZygotes, load_profile, profile_of_job, profile_unread

        self._check(planning)
        plan_text = None if self.plan_file is None else read_text(self.plan_file, "plan")
        entry = self._entry_point()
        environment = {
            **environment_for_tasks(entry, on_this_machine=on_this_machine),
            **outputs_environment(self.outputs_limit),
            **entry.environment,
            **self.environment,
        }
        server = zygotes()
        forks = JobZygotes.warm_up(server, entry, environment) if server else None
        from dike.checkpoints import check_folder, fingerprint
        from framework.project import bundle
        from framework.training.run import RunRequest
        from framework.training.spec import check_can_run
        from solver import Plan

        plan = None if plan_text is None else Plan.loads(plan_text)
        if plan is not None:
            check_can_run(plan)
        archive = bundle.pack(entry.script, entry.folder)

        def check_plan(profile: ModelProfile) -> None:
            planned = profile if plan is None else plan.profile
            if planned.api != profile.api or fingerprint(planned) != fingerprint(profile):
                raise BadInputError(
                    f"The plan {self.plan_file} is for another model than that of {self.script}; make a new one with "
                    "--plan-only."
                )

        def is_usable(cached: ModelProfile) -> bool:
            try:
                check_plan(cached)
                if self.checkpoint_dir is not None:
                    check_folder(self.checkpoint_dir, cached)
            except BadInputError:
                return False
            return cached.api.compares_variables

        saved, known = handed_over or self.saved_profile, None
        unread = None if saved else profile_unread(entry, self.batch_size, planning.strategy)
        if unread is not None:
            profile = unread
        elif saved is None:
            known = profile_of_job(
                entry,
                archive,
                self.arguments,
                environment,
                self.batch_size,
                self.checkpoint_dir,
                forks,
                refresh=self.refresh_profile,
                is_acceptable=is_usable,
                notify=notify,
            )
            profile = known.profile
        else:
            profile = load_profile(str(saved), (), self.batch_size)
        if handed_over is not None:
            handed_over.unlink(missing_ok=True)
        check_plan(profile)
        return RunRequest(
            **{**values_of(TrainingOptions, self), "environment": environment},
            entry=entry,
            archive=archive,
            arguments=self.arguments,
            profile=profile,
            cached_profile=known if known is not None and known.is_cached else None,
            planning=planning,
            plan=plan,
            stream_all_logs=self.stream_all_logs,
        )

    def _check(self, planning: PlanSettings) -> None:
        if self.plan_file is not None and planning != PlanSettings():
            raise BadInputError(
                f"--plan {self.plan_file} is a finished plan; leave it out, or leave out the options for making one: "
                f"{', '.join('--' + name.replace('_', '-') for name in (*PLAN_PANELS['The plan'], 'network'))}."
            )
        planning.check_live()

    def _entry_point(self) -> EntryPoint:
        name = str(self.script)
        if self.script.suffix == ".json" or name.startswith("keras:"):
            raise BadInputError(f"'{name}' is not a training script; use 'dike plan {name}' to plan without running.")
        entry = find_entry_point(name, is_module=self.is_module)
        read_text(entry.script, "training script")
        return entry


JOB_PANELS = merged_panels(
    {
        "The script": ("module", "outputs_limit", "batch_size", "saved_profile", "refresh_profile"),
        "The plan": ("plan",),
    },
    panels_of(TrainingOptions),
    PLAN_PANELS,
)
"""Title in `--help` -> options of a training job."""


def outputs_limit_option() -> Any:
    """Declares `--outputs-limit`."""
    return typer.Option(
        metavar="SIZE",
        help="Maximum size of all output files of the script that are kept, such as 500M, 20G or none.",
        show_default="1G; no limit for dike run and dike tune on a private Mesos",
    )


def script_arguments(
    context: typer.Context, script: Path, arguments: Sequence[str], *, is_module: bool
) -> tuple[str, ...]:
    """Returns the script's own arguments.

    An option after the script that Dike has, and that the script's source does not define, is refused as misplaced.
    After `--` all arguments are the script's.

    Args:
        context: the command's context.
        script: the script, or the name of a module.
        arguments: what follows the script on the command line.
        is_module: whether `script` is a module.

    Raises:
        BadInputError: if an option is misplaced, or the script cannot be read.
    """
    if arguments and arguments[0] == "--":
        return tuple(arguments[1:])
    options = {name for parameter in context.command.params for name in parameter.opts if name.startswith("-")}
    ours = [word for word in takewhile(lambda word: word != "--", arguments) if word.partition("=")[0] in options]
    if ours and not context.meta[OPTIONS_ENDED]:
        # Imported late: few command lines need it.
        from framework.project.script_facts import script_flags

        shown = script_flags(find_entry_point(script, is_module=is_module))
        for word in ours:
            option = word.partition("=")[0]
            if not shown.defines(option):
                command = f"dike {context.info_name}"
                name = f"-m {script}" if is_module else str(script)
                raise BadInputError(
                    f"{option} follows {script}, which has no such option itself; write {command} {option} "
                    f"... {name} for Dike's option, or {command} {name} -- {option} ... to pass it to the script."
                )
    return tuple(arguments)


@with_options(options=options_of(TrainingOptions))
def job_options(
    *,
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="The training script.", show_default=False)],
    module: Annotated[bool, module_option("SCRIPT")] = False,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="The script's own arguments. Put options of Dike before the script.", show_default=False),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Follow this plan (JSON) instead of making one.")] = None,
    options: TrainingOptions,
    logs: Annotated[Logs, typer.Option(help="Show the output of the chief task, or of all tasks.")] = "chief",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Batch size to plan for, samples per step.", show_default="the script's own"),
    ] = None,
    outputs_limit: Annotated[str | None, outputs_limit_option()] = None,
    saved_profile: Annotated[
        Path | None,
        typer.Option("--profile", help="Use this saved profile (JSON) instead of reading the script's model."),
    ] = None,
    refresh_profile: Annotated[bool, refresh_profile_option()] = False,
) -> JobOptions:
    """Checks the options of a training job.

    Raises:
        BadInputError: if they contradict each other or cannot be used.
    """
    if str(script).startswith("-"):
        # Unknown options are passed to the script, so this one was parsed as SCRIPT.
        option = str(script).partition("=")[0]
        raise BadInputError(f"There is no option {option}; see dike {context.info_name} --help.")
    if refresh_profile and saved_profile is not None:
        raise BadInputError(
            f"--refresh-profile reads the model again, and --profile uses {saved_profile}; leave one of them out."
        )
    own_arguments = script_arguments(context, script, arguments or (), is_module=module)
    options.check(has_plan=plan is not None)
    return JobOptions(
        **values_of(TrainingOptions, options),
        script=script,
        is_module=module,
        arguments=own_arguments,
        plan_file=plan,
        stream_all_logs=logs == "all",
        batch_size=batch_size,
        outputs_limit=outputs_limit,
        saved_profile=saved_profile,
        refresh_profile=refresh_profile,
    )


def outputs_limit_for(limit: str | None, mesos: MesosAccess, checkpoint_dir: str | None) -> str | None:
    """Returns the given limit; by default `none` on a private Mesos, where outputs are on this disk already."""
    is_private = mesos.master is None and "://" not in (checkpoint_dir or "")
    return limit or ("none" if is_private else None)


def outputs_environment(limit: str | None) -> dict[str, str]:
    """Returns the environment variable that passes `--outputs-limit` to executors; empty for the default.

    Raises:
        BadInputError: if it is not a size.
    """
    from executor.outputs import LIMIT_VARIABLE, read_limit

    if limit is None:
        return {}
    try:
        read_limit(limit)
    except ValueError as error:
        raise BadInputError(f"'{limit}' is not a value of --outputs-limit: {error}.") from None
    return {LIMIT_VARIABLE: limit}
