"""Advises on an out-of-memory error: finds steps that would fit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from nnx_parallel.layers.stack.scan import Level, Remat
from nnx_parallel.plan.candidates import Candidate, own_candidate
from nnx_parallel.plan.costs import Facts
from nnx_parallel.plan.estimate import Estimate, state_bytes
from nnx_parallel.plan.hardware import HARDWARE, Hardware, Topology, hardware_of
from nnx_parallel.plan.parts import ModelFacts, Parts
from nnx_parallel.plan.report import Entry, order, owners_of
from nnx_parallel.plan.roofline import EXACT
from nnx_parallel.plan.search import plan
from nnx_parallel.precision import format_bytes
from nnx_parallel.sharding.offload import HOST
from nnx_parallel.strategies.base import Composite, Strategy
from nnx_parallel.strategies.data_parallel import DataParallel
from nnx_parallel.strategies.fsdp import FSDP
from nnx_parallel.training.auto_remat import rank_with
from nnx_parallel.training.diagnostics import Refusal, advise_with


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A device's memory limit, and the memory that a step would have needed.

    Attributes:
        limit: Bytes that a program gets.
        used: Bytes that the step needs; ``None`` if the error does not say.
    """

    limit: float
    used: float | None

    @classmethod
    def of(
        cls, text: str, device: Any, hardware: Hardware | None, state: float
    ) -> Shortage | None:
        """Reads the limit from an error's text or a device; ``None`` if it is unknown.

        ``state`` is the bytes of the step's arguments. They are added to the
        temporaries, because the TPU compiler reports only the temporaries.
        """
        if found := Refusal.of(text):
            more = 0.0 if found.has_arguments else state
            return cls(limit=found.limit, used=found.used + more)
        try:
            stats = device.memory_stats() or {}
        except (AttributeError, NotImplementedError, RuntimeError):
            stats = {}  # a CPU, another process's device, or an absent device
        limit = stats.get("bytes_limit") or (hardware and hardware.usable_bytes)
        return cls(limit=float(limit), used=None) if limit else None

    def scaled(self, failed: Mapping[str, float], other: Mapping[str, float]) -> float:
        """Estimates the bytes of another step, corrected by the error for this step.

        Args:
            failed: Bytes of the failed step by owner, from the formulas.
            other: Bytes of the other step by owner, from the formulas.
        """
        exact, doubt = _split(failed)
        # The step did not fit, so it needs more than the limit, even if formulas give
        # less.
        used = self.used or max(self.limit, exact + doubt)
        factor = max(1.0, (used - exact) / doubt) if doubt else 1.0
        other_exact, other_doubt = _split(other)
        return other_exact + factor * other_doubt


def _split(memory: Mapping[str, float]) -> tuple[float, float]:
    exact = sum(memory[name] for name in EXACT)
    return exact, sum(memory.values()) - exact


def find_remedies(trainer: Any, batch: Any, text: str) -> str:
    """Writes advice for a step that needs more memory than a device has.

    The advice has the bytes by owner, and the three fastest changes that fit according
    to the formulas of `plan`. Changes of one or two arguments are tried first, then all
    candidates that divide the batch over the devices.

    Args:
        trainer: The Trainer.
        batch: The global batch.
        text: The text of the error.

    Raises:
        LookupError: If the memory of a device is unknown.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about parts that the plan leaves out
        parts = Parts.of(trainer, batch)
        devices = [*trainer.mesh.devices.flat]
        hardware = hardware_of(devices[0])
        state = sum(state_bytes(parts.on(trainer.layout), ()).values())
        short = Shortage.of(text, devices[0], hardware, state)
        if short is None:
            raise LookupError(devices[0].device_kind)
        # For unknown hardware the speeds do not matter, because candidates are only
        # compared with each other.
        known = hardware or HARDWARE["a100"]
        where = Topology(
            hardware=replace(known, memory_bytes=short.limit, usable=1.0),
            num_devices=len(devices),
        )
        own = own_candidate(parts)
        found = plan(parts, topology=where, candidates=[own, *_near(parts)], compile=0)
        mine = next(e for e in found.entries if e.candidate == own)
        fitting = [*_fitting(found.entries, mine, short, where)]
        if len(fitting) < 3 and _can_offload(trainer, devices[0]):
            # Offload comes last, because its arrays cross the host's link in every
            # step.
            waiting = _fitting(found.entries, mine, short, where, offloads=True)
            fitting += [each for each in waiting if each not in fitting]
        if not fitting:
            found = plan(parts, topology=where, compile=0)
            fitting = [*_fitting(found.entries, mine, short, where)]
    lines = [
        f"A program gets {format_bytes(short.limit)} of a device's memory. By the "
        f"formulas of plan, this step needs: {owners_of(mine.costs)}."
    ]
    if not fitting:
        lines.append(
            f"Nothing that plan knows fits on {len(devices)} devices: take more "
            "devices, or fewer rows in a batch."
        )
        return "\n".join(lines)
    lines.append("Changes that fit by the same formulas, the fastest first:")
    lines += [
        f"  Trainer(..., {code})  # {format_bytes(size)} of memory"
        for code, size in fitting[:3]
    ]
    return "\n".join(lines)


def _can_offload(trainer: Any, device: Any) -> bool:
    """Returns True if the optimizer's arrays can be offloaded, but are not yet."""
    try:
        kinds = {memory.kind for memory in device.addressable_memories()}
    except (AttributeError, NotImplementedError, RuntimeError):
        return False  # an absent device
    return HOST in kinds and vars(trainer)["_run"].plan.offload is None


def _fitting(
    entries: tuple[Entry, ...],
    mine: Entry,
    short: Shortage,
    where: Topology,
    *,
    offloads: bool = False,
) -> Iterator[tuple[str, float]]:
    """Yields the arguments and bytes of each step that fits, the fastest step first."""
    if mine.costs is None:
        return
    for entry in order(entries, where):
        is_same = entry.candidate == mine.candidate and not offloads
        if entry.costs is None or is_same:
            continue
        memory = dict(entry.costs.memory)
        if offloads:
            memory["optimizer state"] = 0.0  # one layer stays on the device
        size = short.scaled(mine.costs.memory, memory)
        if size <= short.limit:
            more = ", backend=Backend(offload=Offload())" if offloads else ""
            yield entry.candidate.code + more, size


def _near(parts: Parts) -> list[Candidate]:
    """Returns changes of one to three arguments that need less memory on a device."""
    own = own_candidate(parts)
    kinds: list[Remat] = [*get_args(Level)]  # each keeps less than the one before
    at = kinds.index(own.remat) if own.remat in kinds else -1
    less = kinds[at:] if at >= 0 else [own.remat, "full"]
    remats = less if ModelFacts.of(parts).has_remat else less[:1]
    return [
        Candidate(
            strategy=strategy,
            num_microbatches=own.num_microbatches * times,
            remat=remat,
        )
        for strategy in (own.strategy, *_sharded(own.strategy))
        for remat in remats
        for times in (1, 2, 4, 8, 16)
        if (strategy, remat, times) != (own.strategy, own.remat, 1)
    ]


def _sharded(strategy: Strategy) -> list[Strategy]:
    """Returns the strategy with its state split over all devices of the batch."""
    given = strategy.parts if isinstance(strategy, Composite) else (strategy,)
    kept = [part for part in given if not isinstance(part, DataParallel | FSDP)]
    if all(isinstance(part, FSDP) and part.shard == "params" for part in given):
        return []
    sharded = FSDP()
    return [Composite(sharded, *kept) if kept else sharded]


def rank_remats(trainer: Any, batch: Any, player: str) -> dict[Remat, float]:
    """Estimates the bytes of a Trainer's step on a device for every remat policy.

    The policy with the fewest FLOPs comes first. Each further policy needs fewer bytes.

    Args:
        trainer: The Trainer.
        batch: The global batch.
        player: The player whose step it is; empty without `Players`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step shows these warnings
        parts = Parts.of(trainer, batch)
        parts = parts.of_player(player) if player else parts
        devices = [*trainer.mesh.devices.flat]
        hardware = hardware_of(devices[0]) or HARDWARE["a100"]
        platform = devices[0].platform
        has_remat = ModelFacts.of(parts).has_remat
        levels: list[Remat] = [*get_args(Level)] if has_remat else ["none"]
        facts = Facts.of(parts, levels, platform)
        if parts.offload is not None and parts.offload.activations:
            levels.remove("none")  # it does not keep the inputs of blocks separately
        where = Topology(hardware=hardware, num_devices=len(devices))
        state, own = parts.on(trainer.layout, parts.offload), own_candidate(parts)
        policies = [*levels, *(facts.saves if has_remat else ())]
        found = {
            remat: Estimate(facts, replace(own, remat=remat), where, state).costs
            for remat in policies
        }
    ranked: dict[Remat, float] = {}
    # The level with the least remat comes first, even if others need as few FLOPs.
    first, *rest = policies
    for remat in (first, *sorted(rest, key=lambda remat: facts.row(remat).flops)):
        if found[remat].total_bytes < min(ranked.values(), default=math.inf):
            ranked[remat] = found[remat].total_bytes
    return ranked


advise_with(find_remedies)
rank_with(rank_remats)
