"""The program of a step: read if a plan has compiled it, compiled otherwise.

A compiled step is kept under a hash of its text and the facts that it depends on. It is
read only if all of them are the same, and only from a file and a directory that no
other user can write to, because it is code. Otherwise the step is compiled, and the
reason is logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.files import open_private, parse_object
from nnx_parallel.training.compiler_options import ENVIRONMENT

_MAX_HEAD_BYTES = 2**20

_CONFIG = (
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
)


def check_warm_start(found: object) -> None:
    """Raises a `ValueError` if it is not a path; the directory need not exist."""
    if found is not None and not isinstance(found, str | os.PathLike):
        raise ValueError(
            f"warm_start={found!r} is no path. It is the directory where `plan` keeps "
            "compiled steps, by default '~/.cache/nnx_parallel/plan', or None."
        )


def program_hash(lowered: jax.stages.Lowered) -> str:
    """A name for the text of a program, which holds no devices."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:32]


def facts_of(
    devices: Sequence[Any], options: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The facts that a compiled program depends on besides its text, by name.

    Args:
        devices: Devices in the order of the mesh; they may belong to a described
            topology.
        options: Options of the compiler.
    """
    packages = ["jax", "jaxlib"]
    first = devices[0]
    if first.platform == "tpu" and importlib.util.find_spec("libtpu") is not None:
        packages.append("libtpu")
    facts = {name: importlib.metadata.version(name) for name in packages}
    facts |= {name: os.environ.get(name, "") for name in ENVIRONMENT}
    # These options say how to compile; a version of jax may lack some.
    facts |= {name: str(jax.config.values.get(name)) for name in _CONFIG}
    places = [
        (d.id, getattr(d, "coords", None), getattr(d, "slice_index", 0))
        for d in devices
    ]
    facts["devices"] = f"{len(devices)} x {first.device_kind}"
    facts["order of the devices"] = _short(places)
    facts["compiler options"] = _short(sorted((options or {}).items()))
    if first.platform == "cpu":
        # Code for a CPU is specific to the machine that compiled it.
        facts["machine"] = platform.node()
    return facts


def _short(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:12]


def keep_program(
    directory: Path,
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    facts: Mapping[str, str],
    seconds: float,
) -> Path | None:
    """Writes a compiled program, for `start_program`; ``None`` if JAX cannot.

    Args:
        directory: Directory for the file; it exists.
        lowered: The program.
        compiled: The same program, compiled.
        facts: The facts from `facts_of`.
        seconds: Duration of the compilation in seconds.
    """
    try:
        payload, _, _ = serialize_executable.serialize(compiled)
    except ValueError:  # it calls back into Python
        return None
    head = json.dumps({"facts": dict(facts), "seconds": seconds}).encode()
    file = directory / f"{program_hash(lowered)}-{_short(dict(facts))}.step"
    # The file is renamed into place, since another process may be reading.
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as new:
        new.write(head + b"\n" + payload)
    Path(new.name).replace(file)
    return file


@dataclass(frozen=True)
class Program:
    """A step that can run.

    Attributes:
        compiled: The program.
        is_read: True if it was read, and not compiled.
        note: The file that it comes from, or the reason why it was compiled although
            there was a plan; otherwise empty.
    """

    compiled: jax.stages.Compiled
    is_read: bool = False
    note: str = ""


def start_program(
    lowered: jax.stages.Lowered,
    mesh: Mesh,
    warm_start: str | os.PathLike | None,
    options: Mapping[str, Any] | None = None,
) -> Program:
    """Reads a program that a plan has compiled, or compiles it.

    Either all processes read it, or all compile it.

    Args:
        lowered: The program.
        mesh: Mesh with the devices that run it.
        warm_start: The plan's directory, or ``None`` to compile.
        options: Options of the compiler, which the program has already.
    """
    if warm_start is None:
        return Program(lowered.compile())
    start = time.perf_counter()
    facts = facts_of([*mesh.devices.flat], options)
    found = _read(Path(warm_start).expanduser(), lowered, facts)
    if jax.process_count() > 1:
        mine = found if isinstance(found, str) else ""
        reasons = allgather_object("compiled step to start with", mine)
        found = next(filter(None, reasons), found)
    if isinstance(found, str):
        note = f"warm_start={os.fspath(warm_start)!r}: {found}. The step was compiled."
        return Program(lowered.compile(), note=note)
    compiled, seconds = found
    spent = time.perf_counter() - start
    note = (
        f"The step was read from {os.fspath(warm_start)!r} in {spent:.1f} s, and not "
        f"compiled: a plan has compiled the same program in {seconds:.1f} s."
    )
    return Program(compiled, is_read=True, note=note)


def _read(
    directory: Path, lowered: jax.stages.Lowered, facts: Mapping[str, str]
) -> tuple[jax.stages.Compiled, float] | str:
    """The program and its compilation time in seconds, or why it cannot be read."""
    if not directory.is_dir():
        return "there is no such directory"
    name = program_hash(lowered)
    file = directory / f"{name}-{_short(dict(facts))}.step"
    if not file.exists():
        if others := sorted(directory.glob(f"{name}-*.step")):
            return f"the same program was compiled for {_differences(others, facts)}"
        count = len([*directory.glob("*.step")])
        return f"this program is none of the {count} that were compiled there"
    try:
        with open(open_private(directory, file.name), "rb") as stream:
            head = parse_object(stream.readline(_MAX_HEAD_BYTES), file.name)
            payload = stream.read()
        compiled = serialize_executable.deserialize_and_load(
            payload, lowered.in_tree, lowered.out_tree
        )
        return compiled, float(head["seconds"])
    except Exception as error:  # unpickling and the runtime may raise any error
        text = str(error).strip().splitlines()
        return f"{file.name} cannot be read ({(text or [type(error).__name__])[0]})"


def _differences(files: Sequence[Path], facts: Mapping[str, str]) -> str:
    """The differences of the file that differs in the fewest facts."""
    told = []
    for file in files:
        other: dict[str, Any] = {}
        with (
            contextlib.suppress(OSError, ValueError),
            open(open_private(file.parent, file.name), "rb") as stream,
        ):
            head = parse_object(stream.readline(_MAX_HEAD_BYTES), file.name)
            other = head["facts"] if isinstance(head.get("facts"), dict) else {}
        names = [n for n in (*facts, *other) if facts.get(n) != other.get(n)]
        pairs = (f"{n} {other.get(n)!r}, not {facts.get(n)!r}" for n in names)
        told.append([*dict.fromkeys(pairs)])
    return "; ".join(min(told, key=len))
