"""`dike cluster`: several machines as one Mesos."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dike.exceptions import BadInputError, DikeError
from solver.cli.output import Format, console, new_table, print_json
from solver.text_files import read_text

if TYPE_CHECKING:
    from framework.cluster.machine import ClusterMachine

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

NameOption = Annotated[
    str, typer.Option("--name", help="Name of this machine in the cluster.", show_default="its host name")
]
ResourcesOption = Annotated[
    str,
    typer.Option(
        help="What this machine contributes, such as 'cpus:4;mem:4096;gpus:1' (mem in MiB).",
        show_default="all that is found",
    ),
]
AttributesOption = Annotated[
    str, typer.Option(help="Attributes of this machine's agent, such as 'rack:r1;network_gbps:25'.")
]
ForegroundOption = Annotated[
    bool, typer.Option("--foreground", help="Keep running in the foreground, for systemd, Slurm and containers.")
]


@app.callback()
def cluster() -> None:
    """Makes one cluster out of several machines."""


@app.command()
def start(
    cluster_name: Annotated[str, typer.Option("--name", help="Name of the cluster.")] = "cluster",
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address at which the other machines join.")
    ] = "0.0.0.0:8690",
    no_agent: Annotated[bool, typer.Option("--no-agent", help="Run no tasks on this machine.")] = False,
    machine_name: Annotated[
        str, typer.Option("--machine-name", help="Name of this machine in the cluster.", show_default="its host name")
    ] = "",
    resources: ResourcesOption = "",
    attributes: AttributesOption = "",
    foreground: ForegroundOption = False,
) -> None:
    """Starts a cluster with this machine as its head, and prints how other machines join."""
    from framework.cluster.machine import MachineOptions, create_head

    options = MachineOptions(machine_name, resources, attributes, has_agent=not no_agent)
    machine = create_head(options, cluster_name, listen)

    def announce() -> None:
        _say(f"cluster '{machine.cluster.name}' is up at {machine.cluster.head}; on each other machine:")
        print(f"    dike cluster join {machine.cluster.head} --token {machine.folder.new_token()}", flush=True)

    _run(machine, announce, foreground=foreground)


@app.command()
def join(
    head: Annotated[
        str | None,
        typer.Argument(metavar="HOST:PORT", help="Address of the head.", show_default="the cluster joined last"),
    ] = None,
    token: Annotated[str | None, typer.Option(help="The token that `dike cluster token` prints on the head.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token.")] = None,
    name: NameOption = "",
    resources: ResourcesOption = "",
    attributes: AttributesOption = "",
    foreground: ForegroundOption = False,
    end_with_stdin: Annotated[
        bool, typer.Option("--end-with-stdin", help="With --foreground: leave when standard input is closed.")
    ] = False,
) -> None:
    """Joins this machine to a cluster. Without an address, rejoins the one that it has joined before."""
    from framework.cluster.machine import MachineOptions, join_cluster, known_member

    if end_with_stdin and not foreground:
        raise BadInputError("--end-with-stdin needs --foreground.")
    if token is not None and token_file is not None:
        raise BadInputError("--token and --token-file both name a token; leave one of them out.")
    if token_file is not None:
        token = read_text(token_file, "token file").strip()
    if (head is None) != (token is None):
        raise BadInputError(
            "To join, name the head's address and a token; `dike cluster token` on the head prints both."
        )
    options = MachineOptions(name, resources, attributes)
    if head is None or token is None:
        machine = known_member(options)
    else:
        machine, warnings = join_cluster(options, head, token)
        for warning in warnings:
            _say(f"warning: {warning}")
    _run(machine, lambda: _say(_joined(machine)), foreground=foreground, end_with_stdin=end_with_stdin)


def _joined(machine: ClusterMachine) -> str:
    return f"joined '{machine.cluster.name}' as {machine.membership.name}: {machine.describe_resources()}"


@app.command()
def status(
    output_format: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TABLE,
) -> None:
    """Shows the machines of the cluster: resources, tasks, and when each was last seen."""
    description = _own_machine().describe()
    if output_format is Format.JSON:
        print_json(description)
        return
    table = new_table(
        "", "machine", "address", "state", "CPUs", "memory MiB", "GPUs", "attributes", "tasks", "last seen"
    )
    for one in description["machines"]:
        table.add_row(*_row(one, description["this_machine"]))
    console().print(f"cluster '{description['name']}', head {description['head']}", table, sep="\n")


def _row(one: dict[str, Any], here: str) -> list[str]:
    total, used = one["resources"], one["used"]
    amounts = [
        f"{used.get(name, 0):g} of {total[name]:g}" if total.get(name) else "-" for name in ("cpus", "mem", "gpus")
    ]
    attributes = ";".join(f"{name}:{value}" for name, value in one["attributes"].items())
    name = f"{one['name']} (this machine)" if one["name"] == here else one["name"]
    seen = "-" if one["silent_s"] is None else f"{one['silent_s']:.0f} s ago"
    tasks = ", ".join(one["tasks"]) or "-"
    return [name, one["host"] or "-", "up" if one["active"] else "lost", *amounts, attributes or "-", tasks, seen]


@app.command()
def token(
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="How long it can be used, such as 30m, 24h or 7d.")
    ] = "24h",
    revoke: Annotated[
        str | None, typer.Option(metavar="ID", help="Make the token with this id (the part before the dot) unusable.")
    ] = None,
    list_tokens: Annotated[bool, typer.Option("--list", help="List the ids of usable tokens.")] = False,
) -> None:
    """Prints a new token for machines that join; runs on the head."""
    import time

    machine = _own_machine()
    if not machine.is_head:
        raise BadInputError(f"Tokens are made on the head of the cluster, {machine.cluster.head}.")
    if revoke is not None:
        identifier = revoke.partition(".")[0]
        machine.folder.revoke_token(identifier)
        _say(f"token {identifier} is revoked; machines that have joined with it stay (dike cluster remove NAME)")
    elif list_tokens:
        for identifier, known in machine.folder.tokens().items():
            print(f"{identifier}  expires in {(known.expires_s - time.time()) / 3600:.1f} h")
    else:
        print(f"dike cluster join {machine.cluster.head} --token {machine.folder.new_token(_seconds(expires))}")


@app.command()
def remove(name: Annotated[str, typer.Argument(help="Name of the machine.")]) -> None:
    """Removes a machine that has joined; its certificate is not accepted any more. Runs on the head."""
    from framework.cluster.machine import remove_member

    machine = _own_machine()
    if not machine.is_head:
        raise BadInputError(f"Machines are removed on the head of the cluster, {machine.cluster.head}.")
    remove_member(machine, name)
    _say(f"{name} is removed; its tasks restart elsewhere")


@app.command()
def leave() -> None:
    """Saves and ends the tasks on this machine, then leaves the cluster."""
    from framework.cluster.machine import leave_cluster, own_frameworks, own_machines

    stopped = [one for one in own_machines() if not one.is_head and not one.is_up()]
    machine = stopped[0] if stopped and not any(one.is_up() for one in own_machines()) else _own_machine()
    if machine.is_head:
        raise BadInputError("This machine is the head of the cluster: end the whole cluster with `dike cluster stop`.")
    if commands := own_frameworks(machine):
        raise BadInputError(f"End what uses the cluster on this machine first: {'; '.join(commands)}.")
    leave_cluster(machine, _say)
    _say(f"left '{machine.cluster.name}'")


@app.command()
def slurm(
    sbatch: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SBATCH_OPTIONS",
            help="After --, options of sbatch, such as -- --partition=gpu --gres=gpu:4 --time=8:00:00.",
            show_default=False,
        ),
    ] = None,
    minimum: Annotated[int, typer.Option("--min", min=0, help="Number of Slurm jobs that always run.")] = 0,
    maximum: Annotated[int, typer.Option("--max", min=1, help="Maximum number of Slurm jobs.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes of each Slurm job.")] = 1,
    idle: Annotated[str, typer.Option(metavar="TIME", help="Time after which an unused Slurm job is ended.")] = "5m",
    drain: Annotated[
        str, typer.Option(metavar="TIME", help="Time before the time limit at which tasks are saved.")
    ] = "3m",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the Slurm jobs running when this command ends.")] = False,
) -> None:
    """Submits Slurm jobs that join this cluster while jobs and trials wait, and ends unused ones. Runs on the head."""
    from framework.cluster.pilots import PilotController, PilotOptions, run

    if minimum > maximum:
        raise BadInputError(f"--min {minimum} is more than --max {maximum}.")
    options = PilotOptions(minimum, maximum, nodes, _seconds(idle), _seconds(drain), tuple(sbatch or ()))
    machine = _own_machine()
    if not machine.is_head:
        raise BadInputError(f"Run this on the head of the cluster, {machine.cluster.head}.")
    controller = PilotController(machine, options, _say)
    controller.start()
    _say(f"submits {minimum} to {maximum} Slurm jobs as work waits; Ctrl-C ends them")
    ended = threading.Event()
    _set_on_signals(ended)
    try:
        run(controller, ended.wait)
    finally:
        if keep:
            _say("the Slurm jobs stay; the same command manages them again")
        elif controller.pilots:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            _say("ending the Slurm jobs: tasks are saved first (Ctrl-C again leaves that to them)")
            if not controller.end(wait_s=options.drain_s):
                _say("some Slurm jobs have not ended yet; squeue --me lists them")


@app.command()
def stop() -> None:
    """Ends the cluster, or this machine's part of it, with all tasks. Nothing is saved first; see `leave`."""
    from framework.cluster.machine import own_machines

    stopped = [machine for machine in own_machines() if machine.stop()]
    for machine in stopped:
        _say(f"'{machine.cluster.name}' is stopped on this machine")
    if not stopped:
        print("No cluster was up on this machine.", file=sys.stderr)


def _own_machine() -> ClusterMachine:
    from framework.cluster.machine import running_machine

    machine = running_machine()
    if machine is None:
        raise DikeError(
            "This machine is in no cluster: start one with `dike cluster start`, or join one with `dike cluster join`."
        )
    return machine


def _set_at_end(ended: threading.Event) -> None:
    """Waits for the end of standard input."""
    while sys.stdin.buffer.read(1 << 16):
        continue
    ended.set()


def _set_before_limit(ended: threading.Event) -> None:
    """In an allocation of Slurm, waits until shortly before its time limit."""
    import time

    from framework.cluster.machine import DRAIN_TIMEOUT_S
    from framework.cluster.slurm import allocation

    slurm = allocation()
    if slurm is None:
        return
    started_s = time.time()
    # The limit may have been changed meanwhile.
    while (end_s := slurm.end_s()) is not None:
        left_s = end_s - time.time() - min(1.5 * DRAIN_TIMEOUT_S, (end_s - started_s) / 4)
        if left_s <= 0:
            ended.set()
        if ended.wait(left_s):
            return


def _run(machine: ClusterMachine, announce: Any, *, foreground: bool, end_with_stdin: bool = False) -> None:
    from framework.cli.mesos_options import warn
    from framework.cluster.machine import leave_cluster
    from framework.cluster.slurm import allocation
    from framework.embedded.access import exposure_warning

    if warning := exposure_warning():
        warn(warning)
    if not foreground:
        machine.start()
        announce()
        return
    ended = threading.Event()
    _set_on_signals(ended)
    if end_with_stdin:
        threading.Thread(target=_set_at_end, args=(ended,), name="standard input", daemon=True).start()
    with machine.running() as daemons:
        announce()
        if not end_with_stdin and not machine.is_head:
            threading.Thread(target=_set_before_limit, args=(ended,), name="time limit", daemon=True).start()
        while not ended.wait(0.5):
            if daemons.failure:
                raise DikeError(daemons.failure)
        if not machine.is_head:
            _say("ending: tasks are saved first")
            # A machine of an allocation has a name of its own, under which it never rejoins.
            leave_cluster(machine, _say, forget=allocation() is not None)


def _set_on_signals(ended: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())


def _seconds(text: str) -> float:
    from framework.cluster.records import parse_duration

    return parse_duration(text)


def _say(text: str) -> None:
    print(f"dike: {text}", flush=True)
