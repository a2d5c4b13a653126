"""Compiles candidates for devices that may be absent, each in a separate process.

A failed check in a compiler ends its process, so no candidate is compiled in the user's
process. The figures of a program that was compiled before are read from disk.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from nnx_parallel.audit.collectives import Collective, axes_of_groups
from nnx_parallel.audit.report import audit
from nnx_parallel.audit.transfers import compile_with_text
from nnx_parallel.distributed.agreement import versions
from nnx_parallel.errors import PlanError
from nnx_parallel.files import read_object
from nnx_parallel.plan.candidates import Candidate
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.parts import Parts
from nnx_parallel.plan.roofline import EXACT, Costs, Schedule, Traffic
from nnx_parallel.plan.timeline import read_schedule
from nnx_parallel.training.compilation import (
    ENVIRONMENT,
    accepted_options,
    compiler_options,
    facts_of,
    keep_program,
)
from nnx_parallel.training.step import StepOptions, make_train_step

CACHE = Path("~/.cache/nnx_parallel/plan")
"""Directory of results, unless `plan` is given another directory."""

_VERSION = 3  # version of the results' format on disk


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Figures of a compiled candidate, with the times of the run that compiled it.

    Attributes:
        memory: XLA's ``memory_analysis`` on one device, in bytes, by name: arguments,
            outputs, temporaries, aliased, code, host.
        flops: FLOPs of a step on one device, as `audit` counts them.
        traffic: ``[axes, bytes sent, bytes overlapped, kind]`` for each group of
            transfers.
        num_collectives: Collectives that a step executes.
        seconds: Seconds of tracing, compiling and reading the program.
        processor_seconds: CPU seconds of all threads of the process.
        is_cached: True if the figures were read from disk.
        schedule: Attributes of the program's `Schedule`, if the compiler prints its
            estimates.
        error: The reason why the candidate was not compiled; empty if it was.
    """

    memory: Mapping[str, int] = field(default_factory=dict)
    flops: float = 0.0
    traffic: Sequence[Sequence[Any]] = ()
    num_collectives: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    processor_seconds: float = 0.0
    is_cached: bool = False
    error: str = ""
    schedule: Mapping[str, Any] | None = None

    def costs(self, estimate: Costs) -> Costs:
        """Returns the costs, with the compiler's figures in place of estimates."""
        memory = {name: estimate.memory[name] for name in EXACT}
        # A TPU lays arrays out in tiles, which pads them.
        padding = self.memory["arguments"] - sum(memory.values())
        new = self.memory["outputs"] - self.memory["aliased"]
        memory |= {
            "padding": max(0, padding),
            "temporaries": self.memory["temporaries"],
            "new outputs": max(0, new),
            "code": self.memory["code"],
        }
        traffic = tuple(
            Traffic(
                axes=tuple(axes),
                sent_bytes=sent,
                hidden=(overlapped / sent, overlapped / sent),
                source=kind,
            )
            for axes, sent, overlapped, kind in self.traffic
            if sent
        )
        return Costs(
            memory=memory,
            flops=self.flops or estimate.flops,
            model_flops=estimate.model_flops,
            moved_bytes=estimate.moved_bytes,
            traffic=traffic,
            bubble=estimate.bubble,
            is_compiled=True,
            compile_seconds=sum(self.seconds.values()),
            schedule=Schedule(**self.schedule) if self.schedule else None,
            host_bytes=estimate.host_bytes,
        )


def missing_compiler(topology: Topology) -> str:
    """Returns the reason why a topology has no compiler here; empty if it has one."""
    hardware = topology.hardware
    if importlib.util.find_spec("cloudpickle") is None:
        return "cloudpickle is not installed (pip install 'nnx-parallel[tpu-compiler]')"
    if not hardware.compiler:
        return f"the compiler for {hardware.name} needs such a device in the machine"
    if hardware.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed (pip install 'nnx-parallel[tpu-compiler]')"
    return ""


def compile_candidates(
    parts: Parts,
    candidates: Sequence[Candidate],
    topology: Topology,
    *,
    cache: str | os.PathLike | None = None,
    num_processes: int = 1,
    timeout: float = 1800.0,
    on_done: Callable[[Candidate, Compiled], None] = lambda candidate, found: None,
) -> list[Compiled]:
    """Compiles candidates, each in a separate process.

    Args:
        parts: The model, its loss and the batch.
        candidates: The candidates.
        topology: The devices to compile for.
        cache: Directory of earlier results; by default `CACHE`.
        num_processes: Number of processes that compile at the same time.
        timeout: Seconds after which a compilation is abandoned.
        on_done: Called with each candidate and its result, when it is done.

    Raises:
        PlanError: If a model or loss cannot be sent to another process.
    """
    import cloudpickle

    where = Path(cache or CACHE).expanduser()
    # Only this user may write here, because compiled programs are code.
    where.mkdir(parents=True, exist_ok=True, mode=0o700)

    def run(candidate: Candidate) -> Compiled:
        try:
            sent = cloudpickle.dumps((parts, candidate, topology, str(where)))
        except Exception as error:
            raise PlanError(
                f"The model, optimizer or loss cannot be sent to the process that "
                f"compiles: {error}. Define them at the top of a module, without open "
                "files or locks; or use plan(..., compile=0), which needs only the "
                "formulas."
            ) from error
        found = _run_child(sent, topology, timeout)
        on_done(candidate, found)
        return found

    with concurrent.futures.ThreadPoolExecutor(max(1, num_processes)) as pool:
        return list(pool.map(run, candidates))


def _run_child(sent: bytes, topology: Topology, timeout: float) -> Compiled:
    environment = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    if topology.hardware.platform == "cpu":
        environment["JAX_NUM_CPU_DEVICES"] = str(topology.num_devices)
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "answer.json"
        command = [sys.executable, "-m", "nnx_parallel.plan.compiled", str(answer)]
        try:
            done = subprocess.run(
                command,
                input=sent,
                capture_output=True,
                check=False,
                timeout=timeout,
                env=os.environ | environment,
            )
        except subprocess.TimeoutExpired:
            return Compiled(error=f"not compiled within {timeout:.0f} s")
        if answer.exists():
            return Compiled(**read_object(answer))
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    last = next((x for x in reversed(lines) if x.strip()), "nothing was printed")
    return Compiled(error=f"the compiler's process ended ({done.returncode}): {last}")


def options_of(parts: Parts, candidate: Candidate) -> StepOptions:
    """Returns the Trainer's step options, with a candidate's microbatches and remat."""
    return replace(
        parts.options,
        num_microbatches=candidate.num_microbatches,
        remat=candidate.remat,
    )


def compile_here(
    parts: Parts, candidate: Candidate, topology: Topology, cache: Path
) -> Compiled:
    """Compiles in this process, unless ``cache`` has results of the same program."""
    start = time.monotonic()
    # The compiler describes devices of absent machines as real device objects.
    is_tpu = topology.hardware.platform == "tpu"
    devices = topology.described() if is_tpu else jax.devices()[: topology.num_devices]
    layout = candidate.strategy.layout(candidate.strategy.make_mesh(devices))
    parts = parts.with_precision(candidate.precision).named_on(layout)
    candidate.strategy.check(parts.rebuilt(), layout.mesh)
    plan = parts.on(layout, candidate.offload)
    batch = parts.batch_on(layout, candidate.num_microbatches)
    options = options_of(parts, candidate)
    step: Any = make_train_step(plan, parts.loss, options)
    lowered = step.lower(plan.whole.abstract, batch)
    seconds = {"trace": time.monotonic() - start}
    given = options.compiler_options
    file = cache / f"{_key(lowered, topology, layout.mesh, given)}.json"
    # If the file is missing or damaged, the program is compiled again.
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        return Compiled(**{**read_object(file), "is_cached": True})
    start = time.monotonic()
    compiled, text = compile_with_text(lowered)
    seconds["compile"] = time.monotonic() - start
    accepted, _ = accepted_options(layout.mesh, given)
    facts = facts_of([*layout.mesh.devices.flat], accepted)
    keep_program(cache, lowered, compiled, facts, seconds["compile"])
    start = time.monotonic()
    report, memory = audit(text), compiled.memory_analysis()
    sent = (*report.collectives, *report.unread)
    schedule = _schedule_of(text, topology, layout.mesh, parts.compute_dtype)
    found = Compiled(
        memory={
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
            "host": memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes,
        },
        flops=report.flops,
        traffic=traffic_by_axes(sent, dict(layout.mesh.shape)),
        num_collectives=report.count(),
        seconds=seconds | {"read": time.monotonic() - start},
        processor_seconds=time.process_time(),
        schedule=schedule,
    )
    # The file is renamed into place, because another process may be reading it.
    with tempfile.NamedTemporaryFile("w", dir=cache, delete=False) as new:
        json.dump(vars(found), new)
    Path(new.name).replace(file)
    return found


def _schedule_of(
    text: str, topology: Topology, mesh: Mesh, dtype: str
) -> dict[str, Any] | None:
    """Reads the timed schedule of a program for TPUs.

    Returns ``None`` if the text cannot be read, or has no estimates of cycles; formulas
    then give the time. The compiler's dump has no estimates, because the compiler makes
    them later.
    """
    if not topology.hardware.clock or "estimated_cycles" not in text:
        return None
    devices, sizes = [*mesh.devices.flat], dict(mesh.shape)
    with contextlib.suppress(KeyError, IndexError, ValueError):
        return vars(read_schedule(text, topology, devices, sizes, dtype))
    return None


def _key(
    lowered: Any, topology: Topology, mesh: Mesh, given: Mapping[str, Any] | None
) -> str:
    """Returns a key for a program, its compiler with the options, and its devices."""
    packages = versions()
    if importlib.util.find_spec("libtpu") is not None:
        packages["libtpu"] = importlib.metadata.version("libtpu")
    flags = [os.environ.get(name, "") for name in ENVIRONMENT]
    options = compiler_options(mesh, given)
    facts = json.dumps([_VERSION, topology.name, packages, flags, options])
    text = lowered.as_text() + facts
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def traffic_by_axes(
    sent: Sequence[Collective], sizes: Mapping[str, int]
) -> list[list[Any]]:
    """Sums the bytes sent in a step, and the hidden bytes, by axes and kind."""
    sums: dict[tuple[tuple[str, ...], str], list[float]] = {}
    for each in sent:
        axes = axes_of_groups(each.groups, sizes)
        entry = sums.setdefault((axes, each.kind), [0.0, 0.0])
        entry[0] += each.sent_bytes
        entry[1] += each.sent_bytes * bool(each.is_hidden)
    return [[list(axes), *entry, kind] for (axes, kind), entry in sums.items()]


def _main(answer: Path) -> None:
    import cloudpickle

    parts, candidate, topology, cache = cloudpickle.loads(sys.stdin.buffer.read())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = compile_here(parts, candidate, topology, Path(cache))
        except Exception as error:
            # Only the first line is kept, because JAX adds pages of advice, and XLA
            # adds the whole program.
            text = str(error).strip().splitlines()
            first = text[0][:400] if text else ""
            found = Compiled(error=f"{type(error).__name__}: {first}")
    answer.write_text(json.dumps(vars(found)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
