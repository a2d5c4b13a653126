"""Command line: ``python -m nnx_parallel``, with ``launch`` and ``inspect``."""

import argparse
import sys
from collections.abc import Sequence

from nnx_parallel.cli.inspect import inspect
from nnx_parallel.cli.launch import MANIFESTS, Job, launch
from nnx_parallel.errors import ParallelError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``launch`` or ``inspect``.

    Args:
        arguments: The command line after the program; by default the process's own.

    Returns:
        The exit code; 2 if the run cannot be started.
    """
    parser = argparse.ArgumentParser(
        prog="python -m nnx_parallel",
        description="Starts the processes of a run, or lists its checkpoints.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser(
        "launch",
        help="start the processes of a run",
        description="Starts the processes of a run on this machine; the script calls "
        "nnx_parallel.initialize(). When one fails, all are stopped, and started "
        "again up to --max-restarts times.",
    )
    starting.add_argument("--processes", type=int, required=True, metavar="N")
    starting.add_argument("--devices-per-process", type=int, metavar="K")
    starting.add_argument("--max-restarts", type=int, default=0, metavar="R")
    starting.add_argument("--cpu", action="store_true", help="simulate devices on CPU")
    host = "address of the coordinator (default: %(default)s, for this machine only)"
    starting.add_argument("--host", default="127.0.0.1", help=host)
    manifest = "write a script or manifest for a cluster's scheduler instead"
    starting.add_argument("--print", choices=MANIFESTS, help=manifest)
    starting.add_argument("script")
    # Options behind the script are the script's, also those of the same name as ours.
    starting.add_argument("arguments", nargs=argparse.REMAINDER)
    listing = commands.add_parser(
        "inspect",
        help="list a run's checkpoints",
        description="Lists what a run's checkpoint directory holds. Writes nothing.",
    )
    listing.add_argument("directory", help="a run's checkpoint directory")
    verify = "read every array and check it"
    listing.add_argument("--verify", action="store_true", help=verify)
    options = parser.parse_args(arguments)
    if options.command == "inspect":
        return inspect(options.directory, verify=options.verify)
    if options.processes < 1 or options.max_restarts < 0:
        parser.error("--processes is at least 1 and --max-restarts at least 0")
    job = Job(
        command=(options.script, *options.arguments),
        num_processes=options.processes,
        devices_per_process=options.devices_per_process,
        max_restarts=options.max_restarts,
        cpu=options.cpu,
        host=options.host,
    )
    if options.print:  # nothing is started, so that no device need be here
        sys.stdout.write(MANIFESTS[options.print](job))
        return 0
    try:
        return launch(job)
    except ParallelError as error:
        # A mistake in the command, which its message explains: no traceback.
        sys.stderr.write(f"{error}\n")
        return 2
