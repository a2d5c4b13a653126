"""Plans a script's training: runs the script up to its training, in a new process.

Training begins at the call of `Trainer.fit`, at the call of ``trainer.train_step`` in a
loop of the script, or at the first update of an optimizer.

Nothing is allocated. The Trainer gets stand-ins for the devices of the topology. It
would build its state only in `fit`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel.cli.names import Names, scopes_of
from nnx_parallel.cli.script import Reached, line_of, main_module, run_script
from nnx_parallel.errors import ParallelError, PlanError
from nnx_parallel.layers.stack.scan import Save
from nnx_parallel.plan.calibration import calibrate
from nnx_parallel.plan.candidates import check_fix
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.parts import PLANNED_OFFLOAD, Parts
from nnx_parallel.plan.pictures import save
from nnx_parallel.plan.search import plan
from nnx_parallel.strategies.data_parallel import DataParallel
from nnx_parallel.training.arguments import Backend
from nnx_parallel.training.trainer import Trainer

_CHILD = """
import json, sys
from nnx_parallel.cli.plan import plan_script
sys.exit(plan_script(json.loads(sys.argv[1])))
"""
_NETWORK = {
    "socket.connect": "opens a network connection to",
    "socket.getaddrinfo": "opens a network connection to",
    "socket.sendto": "sends over the network to",
    "socket.sendmsg": "sends over the network to",
}
_DELETIONS = ("os.remove", "os.rmdir", "shutil.rmtree")
_TEMPORARY = Path(tempfile.gettempdir()).resolve()
_BATCH = re.compile(r"(\w+)=(\w+)\[(\d+(?:,\d+)*)\]")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``plan``."""
    add = parser.add_argument
    where = "devices to plan for, such as v5p:4x4x4 or v5p-128, 2*v5e:16x16, h100:64"
    add("--topology", metavar="NAME", help=where)
    measures = "measure the speeds of this machine's devices for later plans, and end"
    add("--calibrate", action="store_true", help=measures)
    joined = "number of GPUs that fast links join, if it differs from the maker's"
    add("--machine-size", type=int, metavar="N", help=joined)
    speed = "GB/s of a device's network, one way, if they differ from the maker's"
    add("--network", type=float, metavar="GB/s", help=speed)
    fixed = "fixed values, such as tensor=8, remat=full or microbatches=4"
    add("--fix", action="append", default=[], metavar="NAME=VALUE", help=fixed)
    shapes = "an array of the global batch, such as 'tokens=int32[512,8193]'; by "
    shapes += "default the shapes of the first batch of the data; or, for a script "
    shapes += "without a Trainer, the name of a batch in the script"
    add(
        "--batch", action="append", default=[], metavar="NAME=DTYPE[SHAPE]", help=shapes
    )
    add("--player", metavar="NAME", help="the player whose steps are planned")
    plain = "for a script without a Trainer: the name of its "
    add("--model", metavar="NAME", help=f"{plain}model, or of the model's class")
    add("--tx", metavar="NAME", help=f"{plain}optimizer")
    add("--loss", metavar="NAME", help=f"{plain}loss, a function of model and batch")
    how_many = "number of best candidates to compile, or all (default: %(default)s)"
    add("--compile", default="4", metavar="N", help=how_many)
    at_once = "number of simultaneous compilations (default: %(default)s)"
    add("--processes", type=int, default=1, metavar="N", help=at_once)
    add("--cache", metavar="DIRECTORY", help="directory for results of the compiler")
    add("--json", metavar="FILE", help="write the plan as JSON too")
    add("--html", metavar="FILE", help="write the plan as an HTML page too")
    add("script", nargs="?", help="the Python script that trains")
    # `main` stores the arguments after `--` here, so that options may follow the
    # script.
    parser.set_defaults(arguments=[])
    parser.epilog = "Give the arguments of the script after --."


def run_plan(options: argparse.Namespace) -> int:
    """Plans in a child process, which writes to the output of this process.

    Returns:
        0 if a candidate fits, 1 if none fits, 2 if planning failed.
    """
    needed = {"--topology": options.topology, "script": options.script}
    if options.calibrate:
        return _calibrate(options.cache, needed)
    if missing := [name for name, value in needed.items() if value is None]:
        text = " and ".join(missing)
        sys.stderr.write(f"plan needs {text}. `plan --calibrate` needs neither.\n")
        return 2
    settings = {k: v for k, v in vars(options).items() if k != "command"}
    environment = {
        # The plan is for other devices, so the memory of this machine's devices stays
        # free.
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", _CHILD, json.dumps(settings)]
    return subprocess.run(command, check=False, env=os.environ | environment).returncode


def _calibrate(cache: str | None, others: dict[str, str | None]) -> int:
    """Measures this machine's devices; returns 0, or 2 after a mistake."""
    if given := [name for name, value in others.items() if value is not None]:
        text = " and ".join(given)
        sys.stderr.write(
            "plan --calibrate measures this machine's devices, and plans nothing: "
            f"leave out {text}.\n"
        )
        return 2
    try:
        lines = calibrate(cache=cache).lines()
    except ParallelError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join((*lines, "")))
    return 0


def parse_fix(words: Sequence[str]) -> dict[str, Any]:
    """Parses values such as ``["tensor=8", "remat=Save(mlp_up)"]`` to a dict.

    Raises:
        PlanError: If a word is not ``NAME=VALUE``.
    """
    fix: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise PlanError(f"--fix {word!r}: write NAME=VALUE, such as tensor=8.")
        known = {"true": True, "false": False}
        if found := re.fullmatch(r"Save\((.+)\)", value):
            fix[name] = Save(*(each.strip(" '\"") for each in found[1].split(",")))
            continue
        fix[name] = int(value) if value.isdigit() else known.get(value.lower(), value)
    return fix


def parse_batch(words: Sequence[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Parses arrays such as ``["tokens=int32[512,8193]"]`` to shapes by name.

    Raises:
        PlanError: If a word is not ``NAME=DTYPE[SHAPE]``.
    """
    batch = {}
    for word in words:
        found = _BATCH.fullmatch(word.replace(" ", ""))
        try:
            if found is None:
                raise TypeError(word)
            shape = tuple(map(int, found[3].split(",")))
            batch[found[1]] = jax.ShapeDtypeStruct(shape, np.dtype(found[2]))
        except TypeError as error:
            raise PlanError(
                f"--batch {word!r}: write NAME=DTYPE[SHAPE], such as "
                "'tokens=int32[512,8193]'."
            ) from error
    return batch


class Refused(BaseException):
    """The script does something that a plan must not do."""


def parts_of_script(
    script: str,
    arguments: Sequence[str],
    topology: Topology,
    batch: Any = None,
    names: Names | None = None,
) -> Parts:
    """Runs a script up to its training; returns the parts of a step.

    Args:
        script: Path of the script.
        arguments: Arguments of the script.
        topology: The Trainer's devices.
        batch: Shapes of a global batch; ``None`` uses the shapes of the first batch of
            the script's data.
        names: Names of variables in a script without a Trainer.

    Raises:
        PlanError: If the script does not exist or fails. If it has no Trainer and
            ``names`` is ``None``. If it has a Trainer and ``batch`` is ``None``, and it
            ends, trains in another way, or opens a connection before it trains with
            the Trainer.
    """
    path = Path(script)
    if not path.is_file():
        raise PlanError(f"Script {script!r} does not exist.")
    built: list[Trainer] = []
    module, stopped = main_module(path), None
    try:
        with _watching(topology, built):
            run_script(path, arguments, module)
    except Reached as reached:
        return _with_batch(reached, batch, script)
    except Refused as refused:
        stopped = refused
    except SystemExit as error:
        stopped = error
    except Exception as error:
        where = line_of(error, path)
        raise PlanError(
            f"'{script}' failed before it trained{where}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if names is not None and not built:
        return names.parts_in(
            scopes_of(vars(module), stopped, path), topology, batch, script
        )
    if built and batch is not None:
        return Parts.of(built[-1], batch)
    raise PlanError(_why_not(script, stopped, path, is_built=bool(built)))


def _why_not(
    script: str, stopped: BaseException | None, path: Path, *, is_built: bool
) -> str:
    """Explains why a script cannot be planned."""
    if isinstance(stopped, Refused):
        return (
            f"'{script}' {stopped}{line_of(stopped, path)} before it calls "
            "Trainer.fit. A plan runs the script up to that call, to see its Trainer, "
            "and the script must do nothing else before it: move this after "
            "`trainer.fit(...)`, or put the Trainer into another script. For a script "
            "without a Trainer, name its variables: --model, --tx, --loss, --batch."
        )
    found = "ran to its end"
    if isinstance(stopped, SystemExit):
        found = f"exited with code {stopped.code}{line_of(stopped, path)}"
    has = "built a Trainer and did not call fit" if is_built else "built no Trainer"
    return (
        f"'{script}' {found}, and {has}. plan needs a script that calls "
        "Trainer(...).fit(...) when it is run; pass the script's arguments after --"
        f"{'; for a loop that you write, pass --batch' if is_built else ''}."
    )


def _with_batch(reached: Reached, batch: Any, script: str) -> Parts:
    trainer = reached.trainer
    if batch is None:
        try:
            batch = next(iter(reached.data))
        except Exception as error:
            raise PlanError(
                f"The data of '{script}' gives no batch here: {type(error).__name__}: "
                f"{error}. Describe its arrays: --batch 'tokens=int32[512,8193]'."
            ) from error
    parts = Parts.of(trainer, batch)
    rows = vars(trainer)["_programs"].global_batch_size
    return parts if rows is None else parts.with_rows(rows)


@contextlib.contextmanager
def _watching(topology: Topology, built: list[Trainer]) -> Iterator[None]:
    """Keeps a script from computing, and makes `fit` end it.

    It is not a sandbox. It does not see child processes or libraries that call the
    system directly, and it lets the script write files.
    """
    is_active = True

    def listen(event: str, arguments: tuple) -> None:
        if not is_active:
            return
        if event in _NETWORK:
            address = arguments[:2] if event == "socket.getaddrinfo" else arguments[1]
            # Only an address that is a pair of host and port is on a network; a socket
            # within this machine has another kind of address.
            if isinstance(address, tuple):
                host, port = address[:2]
                raise Refused(f"{_NETWORK[event]} {host}:{port}")
        elif event in _DELETIONS and arguments[-1] in (None, -1):
            # With a `dir_fd` the path would be relative to that directory, so such
            # calls are not checked. If the path is a link, the link is deleted and not
            # its target, so the last part is not resolved.
            path = Path(os.path.abspath(os.fsdecode(arguments[0])))
            path = path.parent.resolve() / path.name
            # Libraries keep locks and caches in hidden directories.
            is_hidden = any(part.startswith(".") for part in path.parts)
            if not (is_hidden or path.is_relative_to(_TEMPORARY)):
                raise Refused(f"deletes '{path}'")

    sys.addaudithook(listen)
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements(topology, built):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        try:
            yield
        finally:
            is_active = False  # a hook cannot be removed


def _replacements(
    topology: Topology, built: list[Trainer]
) -> Iterator[tuple[Any, str, Any]]:
    """Yields owner, name and new value of each attribute to replace."""
    construct = Trainer.__init__

    @functools.wraps(construct)
    def init(self: Trainer, *args: Any, **kwargs: Any) -> None:
        # These arguments write files or count real devices, which a plan does not need.
        for name in ("checkpoint", "callbacks", "debugging"):
            kwargs.pop(name, None)
        given = kwargs.get("backend") or Backend()
        if isinstance(given, Backend):  # the Trainer refuses any other value
            # Stand-ins for devices cannot say which memory they reach.
            vars(self)[PLANNED_OFFLOAD] = given.offload
            kwargs["backend"] = replace(given, mesh=None, offload=None)
        kwargs |= {"loggers": (), "devices": topology.devices}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                construct(self, *args, **kwargs)
        except ParallelError:
            # The strategy is for a different number of devices. The plan finds a
            # strategy for the topology's devices.
            one = {"strategy": DataParallel(1), "devices": topology.devices[:1]}
            construct(self, *args, **kwargs | one)
        built.append(self)

    def fit(self: Trainer, data: Any = None, *args: Any, **kwargs: Any) -> None:
        raise Reached(self, data)

    def skip(*args: Any, **kwargs: Any) -> None:
        """Does nothing, because a checkpoint's values do not matter and take memory."""

    yield Trainer, "__init__", init
    yield Trainer, "fit", fit
    # The script may have a loop of its own.
    yield Trainer, "train_step", property(_PlannedStep)
    yield Trainer, "state", property(lambda self: vars(self)["_run"].plan.abstract)
    yield Trainer, "shard_batch", lambda self, batch: batch
    for name in ("restore", "load_weights"):
        yield Trainer, name, skip
    for name in ("evaluate", "predict"):
        yield Trainer, name, _refusing(f"calls trainer.{name}")
    for name in ("model", "ema_model", "eval_model"):
        yield Trainer, name, property(_refusing(f"reads trainer.{name}"))
    yield jax.distributed, "initialize", skip
    yield nnx.Optimizer, "update", _refusing("trains by nnx.Optimizer.update")
    yield optax, "apply_updates", _refusing("trains by optax.apply_updates")


class _PlannedStep:
    """Replaces ``trainer.train_step``; a call ends the script."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, state: Any, batch: Any, *rest: Any) -> None:
        raise Reached(self._trainer, [batch])

    lower = trace = __call__


def _refusing(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Refused(what)

    return refuse


def _check_settings(settings: dict[str, Any]) -> int | Literal["all"]:
    """Returns the number of candidates to compile; refuses invalid settings."""
    for name in ("json", "html"):
        path = settings[name]
        if path and Path(path).suffix != f".{name}":
            raise PlanError(f"--{name} {path!r}: the file's name must end in .{name}.")
    count = settings["compile"]
    if count == "all":
        return "all"
    if not count.isdigit():
        raise PlanError(f"--compile {count!r}: it must be a number, or all.")
    return int(count)


def plan_script(settings: dict[str, Any]) -> int:
    """Plans in this process, which `run_plan` has started."""
    try:
        # Settings are checked before minutes are spent on a result that cannot be
        # written.
        count = _check_settings(settings)
        speed = settings.get("network")
        topology = Topology.parse(
            settings["topology"],
            machine_size=settings.get("machine_size"),
            network_bandwidth=None if speed is None else speed * 1e9,
        )
        names = Names.of(settings)
        is_named = names is not None and names.batch is not None
        batch = None if is_named else parse_batch(settings["batch"]) or None
        check_fix(fix := parse_fix(settings["fix"]))
        given = settings["script"], settings["arguments"]
        parts = parts_of_script(*given, topology, batch, names)
        found = plan(
            parts,
            topology=topology,
            player=settings["player"],
            fix=fix,
            compile=count,
            num_processes=settings["processes"],
            cache=settings["cache"],
            on_progress=lambda text: print(text, file=sys.stderr, flush=True),  # noqa: T201
        )
    except ParallelError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{found}\n")
    for path in filter(None, (settings["json"], settings["html"])):
        save(found, path)
    return 0 if found.best else 1
