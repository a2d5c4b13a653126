"""The program of a step, its compiler options, and its copy on disk.

A compiled step is stored in a file. The file's name contains a hash of the step's text.
The file also has the other facts that the compiled step depends on. It is used only if
all of these are the same. Because the file contains code, it is not used if another
user can write to it or to its directory. If a file is not used, the step is compiled,
and the reason is logged.

By default a TPU's TensorCore waits while parameters are gathered and gradients are
summed. The compiler can overlap these transfers with other work. `TABLE` has the
options that turn this on, each with its reason and its source. Options that the
installed compiler refuses are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental import serialize_executable
from jax.sharding import Mesh, SingleDeviceSharding

from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import ParallelWarning, kind_of, warn_user
from nnx_parallel.files import open_private, parse_object
from nnx_parallel.sharding.constrain import in_context
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.partitioner import partition_correctly

Options = Mapping[str, bool | int | float | str]

ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables with options of XLA and of the TPU compiler."""


@dataclass(frozen=True, kw_only=True)
class CompilerOption:
    """An option of a compiler.

    Attributes:
        name: The name of the option.
        value: The value that the option is set to.
        kinds: Prefixes of ``device.device_kind`` of the devices that gain from the
            option, or ``"gpu"`` for all GPUs, because their kinds have many names.
        reason: The effect of the option, and the known facts about its gain.
        source: The source of these facts.
    """

    name: str
    value: bool | int | str
    kinds: tuple[str, ...]
    reason: str
    source: str


# The options are for v5p and v6e. On v7x they are on by default: the program is the
# same with and without them. v5e has no SparseCores. Nothing was measured on v4.
_SPARSE_CORES = ("TPU v5", "TPU v6")
_NONE = ("TPU v5 lite", "TPU v5e")
_MEASURED = "docs/benchmarks.md, Compiler options; MaxText's xla_flags_library.py"
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"


def _on_sparse_cores(name: str, reason: str, *, value: bool = True) -> CompilerOption:
    return CompilerOption(
        name=name, value=value, kinds=_SPARSE_CORES, reason=reason, source=_MEASURED
    )


TABLE: tuple[CompilerOption, ...] = (
    _on_sparse_cores(
        f"{_OFFLOAD}all_gather",
        "SparseCores gather parameters while the TensorCore multiplies. Under "
        "FSDP(64) on v5p, 86.5 % of the bytes are hidden with all six options, and "
        "39.2 % without this one.",
    ),
    _on_sparse_cores(
        f"{_OFFLOAD}2d_all_gather",
        "The same for gathers over two dims of the torus: on v6e, 84.1 % of the bytes "
        "are hidden, and 40.1 % without this option.",
    ),
    _on_sparse_cores(
        f"{_OFFLOAD}3d_all_gather",
        "The same for gathers over three dims of the torus, which an axis of 64 chips "
        "spans: 41.2 % of the bytes are hidden without this option.",
    ),
    _on_sparse_cores(
        f"{_OFFLOAD}reduce_scatter",
        "SparseCores add up and scatter gradients: 67.3 % of the bytes are hidden "
        "without this option.",
    ),
    _on_sparse_cores(
        f"{_OFFLOAD}nd_reduce_scatter",
        "The same over several dims of the torus. Without this option, the compiler "
        "uses all-reduces, which send twice the bytes.",
    ),
    _on_sparse_cores(
        f"{_OFFLOAD}all_reduce",
        "SparseCores add up arrays that are not scattered, such as activations under "
        "tensor parallelism. Under FSDP(64), 47.4 % of the bytes are hidden without "
        "this option.",
    ),
    CompilerOption(
        name="xla_jf_spmd_threshold_for_windowed_einsum_mib",
        value=1_000_000,
        kinds=_SPARSE_CORES,
        reason="Keeps the compiler from splitting products into rings of smaller "
        "products with transfers in between. The step then takes fewer estimated "
        "cycles, although fewer bytes are hidden: for TensorParallel(4, sequence=True) "
        "and FSDP(16) on v5p, 2,054 million cycles and 32 % of the bytes, against "
        "2,426 million cycles and 53 % with rings.",
        source="docs/benchmarks.md, Beside MaxText",
    ),
    CompilerOption(
        name="xla_tpu_enable_async_ragged_all_to_all",
        value=True,
        kinds=_SPARSE_CORES,
        reason="Sends rows to experts on other devices while products are computed. "
        "Without this option, the compiler of jax 0.10 (libtpu 0.0.42) sends all rows "
        "between products. The compiler of jax 0.12 (libtpu 0.0.50) sets it itself.",
        source="tests/test_ragged.py",
    ),
    CompilerOption(
        name="xla_gpu_enable_latency_hiding_scheduler",
        value=True,
        kinds=("gpu",),
        reason="Orders the program so that transfers overlap with computation.",
        source="https://docs.jax.dev/en/latest/gpu_performance_tips.html",
    ),
)
"""All options that the library sets. For other devices it sets no options."""


def compiler_options(
    mesh: Mesh, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the options with which a step on a mesh is compiled.

    These are the options of `TABLE` for the mesh's devices. A single device gets no
    options, because it sends nothing. If ``XLA_FLAGS`` or ``LIBTPU_INIT_ARGS`` sets an
    option, the option is left out here.

    Args:
        mesh: Mesh of devices, which need not exist on this machine.
        overrides: Further options, or other values for these options. The value
            ``None`` removes an option.

    Raises:
        ValueError: If a name or a value cannot belong to a compiler option.

    Example:
        >>> from nnx_parallel import make_mesh
        >>> compiler_options(make_mesh({"fsdp": None}))  # of CPUs
        {}
    """
    check_compiler_options(overrides)
    device = mesh.devices.flat[0]
    given = " ".join(os.environ.get(name, "") for name in ENVIRONMENT)
    found = {
        option.name: option.value
        for option in TABLE
        if mesh.size > 1
        and _is_for(option, device.platform, device.device_kind)
        and not re.search(rf"\b{option.name}\b", given)
    }
    found |= overrides or {}
    return {name: value for name, value in found.items() if value is not None}


def _is_for(option: CompilerOption, platform: str, kind: str) -> bool:
    if platform in option.kinds:
        return True
    return kind.startswith(option.kinds) and not kind.startswith(_NONE)


def check_compiler_options(options: Mapping[str, Any] | None) -> None:
    """Raises an error for invalid names or values before a compiler is asked."""
    for name, value in (options or {}).items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name):
            bare = re.match(r"-*([A-Za-z]\w*)", str(name))
            example = f": {bare[1]!r}" if bare else ""
            raise ValueError(
                f"compiler_options has the name {name!r}. It must be the name of an "
                f"option of XLA, without dashes and without its value{example}."
            )
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ValueError(
                f"compiler_options[{name!r}] is {kind_of(value)}. It must be a bool, a "
                "number or a string, or None, which leaves the option out."
            )


def accepted_options(
    mesh: Mesh, overrides: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the accepted `compiler_options`, and the errors about refused options.

    Warns once about options in ``overrides`` that the compiler refuses.
    """
    options = compiler_options(mesh, overrides)
    if not options:
        return {}, {}
    here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    device = (here or [*mesh.devices.flat])[0]
    refused = _refused(device, tuple(options.items()), frozenset(overrides or ()))
    return {k: v for k, v in options.items() if k not in refused}, dict(refused)


@cache
def _refused(
    device: Any, options: tuple[tuple[str, Any], ...], given: frozenset[str]
) -> Mapping[str, str]:
    """Returns the reasons why a device's compiler refuses options, by name."""
    if _why_refused(device, dict(options)) is None:
        return {}
    reasons = {name: _why_refused(device, {name: value}) for name, value in options}
    refused = {name: why for name, why in reasons.items() if why is not None}
    if mistakes := [f"{name}: {refused[name]}" for name in refused.keys() & given]:
        warn_user(
            "The compiler refuses compiler_options, which are left out: "
            f"{'; '.join(sorted(mistakes))}. Options of another platform have no "
            "effect here; other names may belong to another version.",
            ParallelWarning,
        )
    return refused


def _why_refused(device: Any, options: dict[str, Any]) -> str | None:
    """Returns a compiler's error about options, found with a trivial program."""
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(x).compile()
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    return None


def format_options(options: Options, refused: Mapping[str, str]) -> str:
    """Formats options as a line of compiler flags, with the refused options."""
    shown = [f"{name}={str(value).lower()}" for name, value in options.items()]
    if refused:
        shown.append(f"(refused by this compiler: {', '.join(refused)})")
    return " ".join(shown)


def jit_step(
    layout: Layout,
    function: Callable[..., Any],
    overrides: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Returns ``jax.jit`` of a function, with the options that the compiler accepts.

    Every program of a Trainer is compiled through this function. The result's
    ``lower(...).compile()`` uses the options too.

    Args:
        layout: Layout with the mesh that runs the function. It is active while the
            function is traced.
        function: The function to compile.
        overrides: Options that override the library's, as in `compiler_options`.
        arguments: Other arguments of ``jax.jit``.
    """
    function = partition_correctly(layout, in_context(layout, function))
    jit = partial(jax.jit, function, **arguments)
    options, _ = accepted_options(layout.mesh, overrides)
    return _Optioned(jit(), jit(compiler_options=options)) if options else jit()


class _Optioned:
    """A function compiled with options, which other compiled functions can call too.

    Inside another compiled function, JAX refuses options, because the entire program is
    compiled with the options of the outermost function.
    """

    def __init__(self, plain: Any, optioned: Any) -> None:
        self._plain, self._optioned = plain, optioned

    def __call__(self, *args: Any) -> Any:
        try:
            return self._optioned(*args)
        except ValueError:
            if not _is_traced(args):
                raise
        return self._plain(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optioned, name)


def _is_traced(args: Sequence[Any]) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(args))


_MAX_HEAD_BYTES = 2**20

_CONFIG = (
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
)


def check_warm_start(found: object) -> None:
    """Raises a `ValueError` for anything but a path or ``None``.

    The directory need not exist.
    """
    if found is not None and not isinstance(found, str | os.PathLike):
        raise ValueError(
            f"warm_start={found!r} is not a path. It must be the directory where "
            "`plan` keeps compiled steps, by default '~/.cache/nnx_parallel/plan', or "
            "None."
        )


def program_hash(lowered: jax.stages.Lowered) -> str:
    """Returns a hash of a program's text, which does not contain names of devices."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:32]


def facts_of(
    devices: Sequence[Any], options: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Returns the facts that a compiled program depends on besides its text, by name.

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
    # These options control how a program is compiled. Some versions of jax do not have
    # all of them.
    facts |= {name: str(jax.config.values.get(name)) for name in _CONFIG}
    places = [
        (d.id, getattr(d, "coords", None), getattr(d, "slice_index", 0))
        for d in devices
    ]
    facts["devices"] = f"{len(devices)} x {first.device_kind}"
    facts["order of the devices"] = _short(places)
    facts["compiler options"] = _short(sorted((options or {}).items()))
    if first.platform == "cpu":
        # Code for a CPU runs only on the kind of machine that compiled it.
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
    """Writes a compiled program to a file, which `start_program` can read.

    Returns the file, or ``None`` if JAX cannot serialize the program.

    Args:
        directory: Directory for the file; it must exist.
        lowered: The program.
        compiled: The same program, compiled.
        facts: The facts from `facts_of`.
        seconds: Duration of the compilation in seconds.
    """
    try:
        payload, _, _ = serialize_executable.serialize(compiled)
    except ValueError:  # the program calls back into Python
        return None
    head = json.dumps({"facts": dict(facts), "seconds": seconds}).encode()
    file = directory / f"{program_hash(lowered)}-{_short(dict(facts))}.step"
    # The file gets its name once it is complete, because another process may read it.
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as new:
        new.write(head + b"\n" + payload)
    Path(new.name).replace(file)
    return file


@dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
        compiled: The program.
        is_read: True if the program was read instead of compiled.
        note: A sentence for the user: either that the program was read, or why it was
            compiled although there was a plan. It is empty if there was no plan.
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

    Either all processes read the program, or all compile it.

    Args:
        lowered: The program.
        mesh: Mesh with the devices that run it.
        warm_start: The plan's directory, or ``None`` to compile.
        options: Options of the compiler. ``lowered`` was made with them.
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
    """Returns a program and its compile seconds, or the reason why it is not read."""
    if not directory.is_dir():
        return "the directory does not exist"
    name = program_hash(lowered)
    file = directory / f"{name}-{_short(dict(facts))}.step"
    if not file.exists():
        if others := sorted(directory.glob(f"{name}-*.step")):
            return f"the same program was compiled for {_differences(others, facts)}"
        count = len([*directory.glob("*.step")])
        return f"this program is not one of the {count} that were compiled there"
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
    """Describes the differences of the file with the fewest different facts."""
    differences = []
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
        differences.append([*dict.fromkeys(pairs)])
    return "; ".join(min(differences, key=len))
