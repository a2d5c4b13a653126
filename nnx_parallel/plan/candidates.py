"""Enumerates the strategies, microbatches and remat policies that could be tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args

import jax

from nnx_parallel.errors import PlanError, suggest
from nnx_parallel.layers.stack.scan import Level, Remat, is_remat
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.parts import ModelFacts, Parts
from nnx_parallel.precision import Precision
from nnx_parallel.schedules.schedules import (
    GPipe,
    Interleaved,
    OneFOneB,
    Schedule,
    ZeroBubble,
)
from nnx_parallel.sharding.offload import Offload
from nnx_parallel.sharding.rules import ZeroKind
from nnx_parallel.strategies.base import Composite, Strategy
from nnx_parallel.strategies.context_parallel import ContextParallel
from nnx_parallel.strategies.data_parallel import DataParallel
from nnx_parallel.strategies.expert_parallel import ExpertParallel
from nnx_parallel.strategies.fsdp import FSDP
from nnx_parallel.strategies.pipeline import Pipeline
from nnx_parallel.strategies.tensor_parallel import TENSOR_NAMES, TensorParallel

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "interleaved": Interleaved,
    "zero_bubble": ZeroBubble,
}
"""Schedules that ``fix`` can select, by name."""

MIXED = Precision.mixed_bfloat16()

AXES = ("data", "fsdp", "tensor", "context", "expert", "pipe")

# A ring hides its hops behind products if a device has a few thousand tokens.
_RING_TOKENS = 2048
_MOST_STAGES = 16
# A device's rows are divided by powers of two up to 2^7.
_MICROBATCHES = [2**i for i in range(8)]
# Largest share of the time that stages may wait for stages with one more layer.
_MOST_IDLE = 0.25


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run a step.

    Attributes:
        strategy: The strategy.
        num_microbatches: The Trainer's ``num_microbatches``.
        remat: The Trainer's ``remat``.
        offload: ``Backend.offload`` of the Trainer.
        precision: The Trainer's ``precision``; ``None`` does not change it.

    Example:
        >>> Candidate(strategy=FSDP(8), remat="full").code
        "strategy=FSDP(size=8), remat='full'"
    """

    strategy: Strategy
    num_microbatches: int = 1
    remat: Remat = "none"
    offload: Offload | None = None
    precision: Precision | None = None

    @property
    def code(self) -> str:
        """The arguments of a Trainer for this candidate, as Python code."""
        changed = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        texts = {name: f"{name}={value!r}" for name, value in changed.items()}
        if callable(self.remat):
            texts["remat"] = f"remat={_name_of(self.remat)}"
        if self.offload is not None:
            texts["offload"] = f"backend=Backend(offload={self.offload!r})"
        if self.precision == MIXED:
            texts["precision"] = "precision=Precision.mixed_bfloat16()"
        return ", ".join(texts.values())


def _name_of(policy: Callable) -> str:
    """Returns the name of a policy in JAX, or ``policy`` for another function."""
    known = vars(jax.checkpoint_policies).items()
    # A policy may also have an older name, `checkpoint_...`, which comes first.
    name = max((name for name, each in known if each is policy), default=None)
    return f"jax.checkpoint_policies.{name}" if name else "policy"


def check_fix(fix: Mapping[str, Any]) -> None:
    """Refuses names that cannot be fixed, and invalid values.

    Raises:
        PlanError: If a name or a value is invalid. The message lists the valid ones.
    """
    values: dict[str, tuple[Any, ...]] = {
        "shard": ("params", "gradients", "optimizer"),
        "schedule": tuple(SCHEDULES),
        "sequence": (False, True, "ring", "halves"),
        "offload": (False, True),
        "precision": ("own", "mixed_bfloat16"),
    }
    numbers = (*AXES, "microbatches")
    names = [*numbers, "remat", *values, "stack"]
    for name, value in fix.items():
        if name not in names:
            raise PlanError(
                f"fix has {name!r}.{suggest(name, names)} Names that can be fixed: "
                f"sizes of {', '.join(AXES)}; microbatches; remat; "
                f"{', '.join(values)}; stack."
            )
        if name in values and value not in values[name]:
            raise PlanError(
                f"fix has {name}={value!r}. Valid values: {list(values[name])}."
            )
        if name == "remat" and not is_remat(value):
            raise PlanError(
                f"fix has {name}={value!r}. Valid values: {list(get_args(Level))}, "
                "Save(*names), or a policy of jax.checkpoint_policies."
            )
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if name in numbers and (not is_number or value < 1):
            raise PlanError(
                f"fix has {name}={value!r}. It must be an integer of at least 1."
            )


def enumerate_candidates(
    parts: Parts, topology: Topology, fix: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Lists every candidate whose sizes divide devices, model and batch.

    Args:
        parts: The model and the batch.
        topology: The devices.
        fix: Fixed values: sizes of mesh axes by name, ``microbatches``, ``remat``,
            ``shard`` (of `FSDP`), ``schedule`` (of a pipeline, by name), ``stack`` (the
            path of the stack that a pipeline cuts), ``sequence`` (of tensor
            parallelism: False, True, or the overlap ``"ring"`` or ``"halves"``;
            ``"halves"`` is tried only if it is fixed), ``offload``, and ``precision``
            (``"own"`` or ``"mixed_bfloat16"``).

    Raises:
        PlanError: If ``fix`` has an invalid name or value, or if no strategy divides
            the rows over the devices.
    """
    fix = dict(fix or {})
    check_fix(fix)
    facts = ModelFacts.of(parts)
    _check_sizes(fix, facts, topology)
    found = [
        Candidate(
            strategy=strategy,
            num_microbatches=count,
            remat=remat,
            offload=_offload(parts, fix),
            precision=precision,
        )
        for strategy, pipe in _strategies(parts, topology, facts, fix)
        for count in _microbatches(parts, strategy, topology, pipe, fix)
        for remat in _remats(facts, fix)
        for precision in _precisions(parts, topology, fix)
    ]
    if not found:
        raise PlanError(
            f"No strategy divides {parts.num_rows} rows over {topology.num_devices} "
            f"devices of {topology.name}{f' with {fix}' if fix else ''}. Fix fewer "
            "values, or choose a number of rows with more divisors."
        )
    # Duplicates are removed: sizes of 1 leave techniques out, so several combinations
    # give the same candidate.
    return list(dict.fromkeys(found))


def _check_sizes(fix: Mapping[str, Any], facts: ModelFacts, topology: Topology) -> None:
    """Refuses sizes of axes that do not divide the devices or do not suit the model."""
    experts, layers = facts.num_experts, max(facts.stacks.values(), default=0)
    layers = facts.stacks.get(fix.get("stack", ""), layers)
    has_names = not {*TENSOR_NAMES}.isdisjoint(facts.named)
    # For each axis: a test of whether a size is useful, and the model's facts in words.
    uses: dict[str, tuple[Callable[[int], bool], str]] = {
        "expert": (lambda n: experts > 0 and experts % n == 0, f"{experts} experts"),
        "pipe": (lambda n: n <= layers, f"{layers} layers in a Stack"),
        "tensor": (lambda _: has_names, f"no dim with a name in {TENSOR_NAMES}"),
    }
    sizes = _divisors(topology.num_devices)
    for name, size in ((n, fix[n]) for n in AXES if n in fix):
        is_used, has = uses.get(name, (lambda _: True, ""))
        valid = [n for n in sizes if n == 1 or is_used(n)]
        why = f"and the model has {has}"
        if size not in sizes:
            why = f"which does not divide the {sizes[-1]} devices of {topology.name}"
        if size not in valid:
            raise PlanError(f"fix has {name}={size}, {why}. Valid values: {valid}.")
    fixed = {name: fix[name] for name in AXES if name in fix}
    if sizes[-1] % (product := math.prod(fixed.values())):
        raise PlanError(
            f"fix has {fixed}. The product of these sizes, {product}, does not divide "
            f"the {sizes[-1]} devices of {topology.name}. Make a size smaller."
        )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _sizes(
    name: str, count: int, fix: Mapping[str, Any], fits: Mapping[str, Callable]
) -> list[int]:
    """Returns the divisors of a number of devices that may be the size of an axis."""
    if name in fix:
        return [fix[name]] if count % fix[name] == 0 else []
    return [n for n in _divisors(count) if n == 1 or fits[name](n)]


def _strategies(
    parts: Parts, topology: Topology, facts: ModelFacts, fix: Mapping[str, Any]
) -> Iterator[tuple[Strategy, int]]:
    """Yields strategies over all devices, each with its number of stages."""
    devices = topology.num_devices
    # Tensor parallelism waits for its links in each layer, so it stays inside a
    # machine.
    most = min(topology.machine_size, 16)
    tokens = max((x.shape[1] for x in _sequences(parts)), default=0)

    layers, experts = max(facts.stacks.values(), default=0), facts.num_experts
    fits: dict[str, Callable[[int], bool]] = {
        "tensor": lambda n: n <= most and facts.tensor_divides(n),
        "pipe": lambda n: n <= min(_MOST_STAGES, layers),
        "context": lambda n: n <= topology.machine_size and tokens >= _RING_TOKENS * n,
        "expert": lambda n: experts > 0 and experts % n == 0,
    }
    for tensor in _sizes("tensor", devices, fix, fits):
        after_tensor = devices // tensor
        for pipe in _sizes("pipe", after_tensor, fix, fits):
            after_pipe = after_tensor // pipe
            for context in _sizes("context", after_pipe, fix, fits):
                after_context = after_pipe // context
                for expert in _sizes("expert", after_context, fix, fits):
                    kinds: list[list[Strategy | None]] = [
                        # In stages rows are not halved, so "halves" adds no candidate
                        # there.
                        _tensor_kinds(tensor, facts, fix)
                        if pipe == 1 or fix.get("sequence") != "halves"
                        else [],
                        _pipe_kinds(pipe, facts, fix),
                        [ContextParallel(context) if context > 1 else None],
                        [ExpertParallel(expert) if expert > 1 else None],
                    ]
                    rest = after_context // expert
                    outer = _state_kinds(rest, topology, tensor * context, fix)
                    for state in outer:
                        for more in itertools.product(*kinds):
                            given = [*state, *filter(None, more)]
                            yield _joined(given or [DataParallel(1)]), pipe


def _joined(parts: list[Strategy]) -> Strategy:
    return parts[0] if len(parts) == 1 else Composite(*parts)


def _sequences(parts: Parts) -> Iterator[Any]:
    yield from (x for x in jax.tree.leaves(parts.batch) if len(x.shape) == 2)


def _tensor_kinds(
    size: int, facts: ModelFacts, fix: Mapping[str, Any]
) -> list[Strategy | None]:
    if size == 1:
        return [None]
    # If activations are split along the sequence, a step sends the same bytes and takes
    # less memory. Only this library's layers name their activations for this.
    kinds: list[Any] = [True, "ring"] if facts.has_dense else [False]
    kinds = [fix["sequence"]] if "sequence" in fix else kinds
    return [
        TensorParallel(size, overlap=kind)
        if kind in ("ring", "halves")
        else TensorParallel(size, sequence=kind)
        for kind in kinds
    ]


def _pipe_kinds(
    size: int, facts: ModelFacts, fix: Mapping[str, Any]
) -> list[Strategy | None]:
    if size == 1:
        return [None]
    names = [fix["schedule"]] if "schedule" in fix else list(SCHEDULES)[1:]
    schedules = [SCHEDULES[name]() for name in names]
    # By default a pipeline cuts the first stack.
    first = next(iter(facts.stacks), None)
    if (wanted := fix.get("stack")) is not None and wanted not in facts.stacks:
        raise PlanError(f"fix has stack={wanted!r}. Valid values: {[*facts.stacks]}.")
    return [
        Pipeline(size, schedule=each, stack=None if path == first else path)
        for path, layers in facts.stacks.items()
        for each in schedules
        if wanted in (None, path) and _is_shared(layers, size * each.chunks)
    ]


def _is_shared(layers: int, chunks: int) -> bool:
    """Returns True if each chunk has a layer and waits little for the longest chunk."""
    longest = -(-layers // chunks)
    return layers >= chunks and layers / chunks >= (1 - _MOST_IDLE) * longest


def _state_kinds(
    count: int, topology: Topology, inner: int, fix: Mapping[str, Any]
) -> Iterator[list[Strategy]]:
    """Yields ways in which the remaining devices split batch and training state."""
    shards: list[ZeroKind] = ["params", "gradients"]
    shards = [fix["shard"]] if "shard" in fix else shards
    across = {1, count, topology.num_slices, count * inner // topology.machine_size}
    sizes = [fix["data"]] if "data" in fix else sorted(across)
    if "fsdp" in fix and "data" not in fix:
        sizes = [count // fix["fsdp"]]
    for data in sizes:
        if data < 1 or data * fix.get("fsdp", count // data) != count:
            continue
        replicas: list[Strategy] = [DataParallel(data)] if data > 1 else []
        if (fsdp := count // data) == 1:
            yield replicas
            continue
        for shard in shards:
            yield [*replicas, FSDP(fsdp, shard=shard)]


def _microbatches(
    parts: Parts,
    strategy: Strategy,
    topology: Topology,
    pipe: int,
    fix: Mapping[str, Any],
) -> list[int]:
    """Returns numbers of microbatches that divide each device's rows."""
    sizes = strategy.make_mesh(topology.devices).shape
    shards = 1
    for axis in strategy.claims().batch:
        shards *= sizes[axis]
    if parts.num_rows % shards:
        return []
    rows = parts.num_rows // shards
    if "microbatches" in fix:
        return [fix["microbatches"]] if rows % fix["microbatches"] == 0 else []
    return [n * pipe for n in _MICROBATCHES if rows % (n * pipe) == 0]


def _remats(facts: ModelFacts, fix: Mapping[str, Any]) -> list[Remat]:
    if "remat" in fix:
        return [fix["remat"]]
    return [*get_args(Level)] if facts.has_remat else ["none"]


def _offload(parts: Parts, fix: Mapping[str, Any]) -> Offload | None:
    # Offload is slower if a state fits without it. A search adds offload only to
    # candidates that do not fit.
    own = parts.offload
    return (own or Offload()) if fix.get("offload", own is not None) else None


def _precisions(
    parts: Parts, topology: Topology, fix: Mapping[str, Any]
) -> list[Precision | None]:
    """Returns the precisions to try: the Trainer's, and bfloat16 if it sets none."""
    if "precision" in fix:
        return [None if fix["precision"] == "own" else MIXED]
    is_open = parts.precision == Precision() and parts.compute_dtype == "float32"
    # CPUs have no units for bfloat16.
    is_fast = topology.hardware.platform != "cpu"
    return [None, MIXED] if is_open and is_fast else [None]


def own_candidate(parts: Parts) -> Candidate:
    """Returns the Trainer's strategy and options as a candidate.

    In place of ``remat="auto"`` it has ``"full"``, which needs the least memory.
    """
    remat = parts.options.remat
    return Candidate(
        strategy=parts.strategy,
        num_microbatches=parts.options.num_microbatches,
        remat="full" if remat == "auto" else remat,
        offload=parts.offload,
    )
