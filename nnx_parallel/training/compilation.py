"""The program of a step: read where a plan has compiled it, compiled everywhere else.

A compiled step is kept under a hash of its text and the facts that it depends on. It is
read only where all of them are the same, and only from a file and a directory that no
other user can write to, for it is code: else the step is compiled, and the reason is
logged.
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
    """Raises a `ValueError` if it is no path; the directory need not exist."""
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
    """What a compiled program depends on besides its text, by name.

    Args:
        devices: In the order of the mesh; those of a described topology too.
        options: Of the compiler.
    """
    packages = ["jax", "jaxlib"]
    first = devices[0]
    if first.platform == "tpu" and importlib.util.find_spec("libtpu") is not None:
        packages.append("libtpu")
    facts = {name: importlib.metadata.version(name) for name in packages}
    facts |= {name: os.environ.get(name, "") for name in ENVIRONMENT}
    # Those that say how to compile; a version of jax may lack some.
    facts |= {name: str(jax.config.values.get(name)) for name in _CONFIG}
    places = [
        (d.id, getattr(d, "coords", None), getattr(d, "slice_index", 0))
        for d in devices
    ]
    facts["devices"] = f"{len(devices)} x {first.device_kind}"
    facts["order of the devices"] = _short(places)
    facts["compiler options"] = _short(sorted((options or {}).items()))
    if first.platform == "cpu":
        # Code for a CPU is that of the machine which compiled it.
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
        directory: Where to; it exists.
        lowered: The program.
        compiled: The same, compiled.
        facts: As of `facts_of`.
        seconds: That its compilation took.
    """
    try:
        payload, _, _ = serialize_executable.serialize(compiled)
    except ValueError:  # it calls back into Python
        return None
    head = json.dumps({"facts": dict(facts), "seconds": seconds}).encode()
    file = directory / f"{program_hash(lowered)}-{_short(dict(facts))}.step"
    # Renamed into place: another process may be reading.
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
        note: Where it comes from, or why it was compiled all the same; else empty.
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

    All processes read it, or none does.

    Args:
        lowered: The program.
        mesh: Whose devices run it.
        warm_start: The plan's directory, or ``None`` to compile.
        options: Of the compiler, which the program has already.
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
    """The program and the seconds of its compilation, or why there is none."""
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
    except Exception as error:  # whatever unpickling and the runtime may raise
        text = str(error).strip().splitlines()
        return f"{file.name} cannot be read ({(text or [type(error).__name__])[0]})"


def _differences(files: Sequence[Path], facts: Mapping[str, str]) -> str:
    """In what the file that differs in the least does."""
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
