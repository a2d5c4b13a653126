"""The command line ``nnx-parallel``, with one file for each command.

``python -m nnx_parallel`` is the same command line.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nnx_parallel.cli.doctor import doctor
from nnx_parallel.cli.inspect import inspect
from nnx_parallel.cli.launch import MANIFESTS, Job, gke_hosts, launch
from nnx_parallel.cli.plan import add_options, run_plan
from nnx_parallel.cli.verify import verify
from nnx_parallel.distributed.agreement import versions
from nnx_parallel.errors import ParallelError, PlanError, suggest
from nnx_parallel.plan.hardware import Topology


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``launch``, ``plan``, ``verify``, ``inspect`` or ``doctor``.

    Args:
        arguments: The arguments after the program's name; by default the arguments of
            this process.

    Returns:
        The exit code; 2 if the run cannot be started.
    """
    parser, commands = _parsers()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and not given[0].startswith("-") and given[0] not in commands:
        near = suggest(given[0], commands)
        parser.error(
            f"there is no command {given[0]!r}.{near} Commands: {', '.join(commands)}."
        )
    rest: list[str] = []
    if given[:1] in (["plan"], ["launch"]) and "--" in given:
        at = given.index("--")
        given, rest = given[:at], given[at + 1 :]
    options, unknown = parser.parse_known_args(given)
    if unknown:
        command = commands[options.command]
        known = [x for x in command._option_string_actions if x.startswith("--")]
        command.error(
            f"unrecognized arguments: {' '.join(unknown)}.{suggest(unknown[0], known)} "
            f"Options: {', '.join(known)}."
        )
    if options.command == "inspect":
        return inspect(options.directory, verify=options.verify, arrays=options.arrays)
    if options.command == "doctor":
        return doctor(options.directory)
    if options.command == "verify":
        return verify(options.script, options.arguments)
    if options.command == "plan":
        options.arguments = rest
        return run_plan(options)
    options = _read_after_script(commands["launch"], options, rest)
    job = _job_of(commands["launch"], options)
    if options.print:  # nothing is started, so this machine needs no devices
        sys.stdout.write(MANIFESTS[options.print](job))
        return 0
    try:
        return launch(job)
    except ParallelError as error:
        # The message explains the mistake in the command, so no traceback is printed.
        sys.stderr.write(f"{error}\n")
        return 2


def _job_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Job:
    """Checks the options of ``launch``, and returns the job that they describe."""
    topology = _topology(parser, options)
    if options.processes < 1 or options.max_restarts < 0:
        parser.error("--processes must be at least 1 and --max-restarts at least 0")
    least = options.min_processes
    if least is not None and not 1 <= least <= options.processes:
        parser.error("--min-processes must be from 1 to --processes")
    if options.spares < 0:
        parser.error("--spares must be at least 0")
    has_groups = options.devices_per_process is not None and not options.cpu
    if options.spares and not (has_groups or options.print):
        parser.error("--spares needs --devices-per-process, and cannot use --cpu")
    if (least or options.spares) and options.print not in (None, "slurm"):
        parser.error(
            "--min-processes and --spares work only if this launcher starts the "
            "processes, or with --print slurm"
        )
    return Job(
        command=(options.script, *options.arguments),
        num_processes=options.processes,
        devices_per_process=options.devices_per_process,
        max_restarts=options.max_restarts,
        min_processes=options.min_processes,
        spares=options.spares,
        cpu=options.cpu,
        host=options.host,
        topology=topology,
    )


def _topology(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> Topology | None:
    """Reads ``--topology``, and sets the number of processes that it implies."""
    if (options.print == "gke") != (options.topology is not None):
        parser.error("--print gke and --topology are used together")
    if options.topology is None:
        return None
    try:
        found = Topology.parse(options.topology)
        hosts, chips = gke_hosts(found)
    except (PlanError, ValueError) as error:
        parser.error(str(error))
    for name, given, needed in (
        ("--processes", options.processes, hosts),
        ("--devices-per-process", options.devices_per_process, chips),
    ):
        if given not in (None, needed):
            parser.error(
                f"{name} is {given}, but {found.name} has {hosts} hosts with {chips} "
                f"chips each. Leave {name} out."
            )
    if options.cpu:
        parser.error("--cpu and --topology exclude each other")
    options.processes = hosts
    return found


def _read_after_script(
    parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str]
) -> argparse.Namespace:
    """Reads options of ``launch`` that follow the script.

    They are read only if ``--processes`` also follows the script. In
    ``launch --processes 2 train.py --cpu``, the option ``--cpu`` could belong to either
    program, so it is an error.

    Args:
        parser: The parser of ``launch``.
        options: The options before the script, the script, and the arguments after it.
        rest: The arguments after ``--``, which belong to the script.
    """
    after = options.arguments
    if options.processes is None and options.topology is None:
        kind = argparse.ArgumentParser
        reader = kind(prog=parser.prog, add_help=False, allow_abbrev=False)
        _add_launch_options(reader)
        options, after = reader.parse_known_args(after, options)
        if options.processes is None and options.topology is None:
            parser.error("the following arguments are required: --processes")
    else:
        names = parser._option_string_actions
        for word in after:
            if word.startswith("--") and word.partition("=")[0] in names:
                parser.error(
                    f"{word} follows the script, and both launch and the script may "
                    f"have this option. For launch, write it before {options.script}. "
                    f"For the script, write it after --: {options.script} -- {word}"
                )
    options.arguments = [*after, *rest]
    return options


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of the command line, and the parser of each command."""
    parser = _root_parser()
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    starting = commands.add_parser(
        "launch",
        help="start the processes of a run",
        description="Starts the processes of a run on this machine; the script must "
        "call nnx_parallel.initialize(). When one process fails, all are stopped, and "
        "started again up to --max-restarts times.",
    )
    planning = commands.add_parser(
        "plan",
        help="find the best strategy for a script on given devices",
        description="Runs a script up to its training, and finds the fastest strategy "
        "that fits the devices. Nothing is trained or allocated, and the "
        "devices need not be present. The exit code is 1 if nothing fits, "
        "2 if there is no plan.",
    )
    verifying = commands.add_parser(
        "verify",
        help="compare a step of a script with one device",
        description="Runs a script up to Trainer.fit, on the devices of this machine, "
        "and compares one step with three other runs of it: a repetition, a run "
        "without compiler options and overlap, and a run on one device. Nothing is "
        "trained. The exit code is 1 if an array differs, 2 if there is no step to "
        "verify.",
    )
    listing = commands.add_parser(
        "inspect",
        help="list a run's checkpoints",
        description="Lists the checkpoints of a run, with date, size and loss, and "
        "the contents of the newest one. Nothing is written, and the run may continue "
        "meanwhile. The exit code is 1 if one is damaged, 2 if the run has no "
        "checkpoint.",
    )
    checking = commands.add_parser(
        "doctor",
        help="check the installation and its devices",
        description="Prints versions, devices and JAX's variables, and a line for each "
        "problem. The exit code is 1 if there is a problem.",
    )
    _add_launch_options(starting)
    starting.add_argument("script", help="the Python script that each process runs")
    # `_read_after_script` divides these between `launch` and the script.
    about = "arguments of the script"
    starting.add_argument("arguments", nargs=argparse.REMAINDER, help=about)
    add_options(planning)
    _add_verify_options(verifying)
    _add_inspect_options(listing)
    where = "a directory for checkpoints, which must be writable (default: .)"
    checking.add_argument("directory", nargs="?", default=".", help=where)
    return parser, dict(commands.choices)


def _root_parser() -> argparse.ArgumentParser:
    is_script = Path(sys.argv[0]).stem == "nnx-parallel"
    parser = argparse.ArgumentParser(
        prog="nnx-parallel" if is_script else "python -m nnx_parallel",
        description="Starts the processes of a run, plans a run for devices that are "
        "not present, verifies its numbers, lists its checkpoints, or checks the "
        "installation.",
    )
    package = sys.modules[__name__.partition(".")[0]]
    found = ", ".join(f"{name} {number}" for name, number in versions().items())
    text = f"nnx-parallel {getattr(package, '__version__', '?')} ({found})"
    about = "print the versions of the library, JAX and related packages, and exit"
    parser.add_argument("--version", action="version", version=text, help=about)
    return parser


def _add_verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", help="the Python script that calls Trainer.fit")
    about = "arguments of the script"
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=about)


def _add_inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="the run's checkpoint directory")
    verify = "read every array of every step and compare its checksum"
    parser.add_argument("--verify", action="store_true", help=verify)
    arrays = "list each array of the newest step, with shape, dtype and checksum"
    parser.add_argument("--arrays", action="store_true", help=arrays)


def _add_launch_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--processes",
        type=int,
        metavar="N",
        help="number of processes to start (required)",
    )
    of_each = (
        "devices of each process: GPUs of this machine, or simulated ones with --cpu "
        "(default: as JAX finds them; 1 with --cpu)"
    )
    add("--devices-per-process", type=int, metavar="K", help=of_each)
    restarts = "restarts of all processes after a failure (default: %(default)s)"
    add("--max-restarts", type=int, default=0, metavar="R", help=restarts)
    fewer = "if a restart fails within a minute, try it with fewer, but at least M"
    add("--min-processes", type=int, metavar="M", help=fewer)
    spares = (
        "groups of K devices, or nodes under Slurm, that stay idle until a group that "
        "is in use fails (default: %(default)s)"
    )
    add("--spares", type=int, default=0, metavar="S", help=spares)
    add("--cpu", action="store_true", help="simulate the devices on CPU")
    host = "address of the coordinator (default: %(default)s, for this machine only)"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    manifest = "write a script or manifest for a cluster's scheduler instead"
    add("--print", choices=MANIFESTS, help=manifest)
    topology = (
        "kind and shape of a TPU slice for --print gke, such as v5p:2x2x4; it replaces "
        "--processes"
    )
    add("--topology", metavar="KIND:SHAPE", help=topology)
