"""Costs of a candidate, without compiling it: state exactly, the rest estimated.

Parameters, optimizer state and batch are counted shard by shard, from the shapes and
shardings that the step is compiled with. What else is in memory at the peak follows
from the live ranges of the traced gradient, and of a pipeline's buffers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from nnx_parallel.plan.local import Local
from nnx_parallel.plan.moments import Kind, Size, Timeline
from nnx_parallel.plan.roofline import OWNERS, Costs
from nnx_parallel.plan.traffic import traffic_of
from nnx_parallel.precision import array_bytes
from nnx_parallel.sharding.model import flatten
from nnx_parallel.sharding.placement import Placement, axes_of
from nnx_parallel.state import StatePlan

_OWNER_OF: dict[Kind, str] = {
    "rows": "kept activations",
    "weight": "gathered weights",
    "layer": "gathered weights",
    "cast": "gathered weights",
    "gradient": "gradients",
    "layer gradient": "gradients",
    "unsummed": "gradients",
    "combined": "gradients",
    "turned": "gathered weights",
    "whole": "temporaries",
    "fixed": "temporaries",
}


def state_bytes(plan: StatePlan, batch: Any) -> dict[str, int]:
    """Bytes of a step's arguments on one device, by owner: no estimates.

    Together they are what XLA's ``memory_analysis`` calls the argument size, where the
    compiler lays arrays out without padding, as on CPU.

    Args:
        plan: Where the training state lives.
        batch: Shapes of a global batch with their shardings (`Parts.batch_on`).
    """
    state = plan.abstract
    rest = (state.step, state.variables, state.key, state.ema, state.loss_scale)
    owned = {
        "parameters": state.params,
        "optimizer state": state.opt_state,
        "other state": rest,
        "batch": batch,
    }
    return {
        owner: sum(map(_shard_bytes, jax.tree.leaves(x))) for owner, x in owned.items()
    }


def _shard_bytes(x: Any) -> int:
    return array_bytes(x.sharding.shard_shape(x.shape), x.dtype)


class Estimate(Local):
    """The formulas of one candidate; `costs` are their results."""

    @property
    def costs(self) -> Costs:
        """All of them."""
        parts = self.parts
        batch = parts.batch_on(self.layout, self.microbatches)
        memory: dict[str, float] = dict.fromkeys(OWNERS, 0.0)
        memory |= state_bytes(self.plan, batch)
        memory["optimizer state"] -= self.host_bytes
        is_piped = self.simulation is not None
        memory |= self.pipeline_bytes() if is_piped else self.live_bytes()
        memory["temporaries"] += self.copied_bytes
        # Along the other axes devices do the same work.
        total_rows = parts.num_rows / self.size(self.working_axes)
        simulation = self.simulation
        return Costs(
            memory=memory,
            flops=self.per_row.flops * total_rows,
            model_flops=self.facts.model_flops * parts.num_rows / self.mesh.size,
            moved_bytes=self.moved_bytes(memory),
            traffic=tuple(traffic_of(self)),
            bubble=0.0 if simulation is None else simulation.bubble,
            host_bytes=self.host_bytes,
        )

    @property
    def working_axes(self) -> tuple[str, ...]:
        """Axes that split the work: those of rows and stages, and of used weights."""
        split = {*self.layout.claims.batch, *self.layout.sequence_axes, "pipe"}
        for _, _, place in self.params:
            split.update(axes_of(place.used))
        return tuple(axis for axis in self.mesh.shape if axis in split)

    # Memory

    @functools.cached_property
    def host_bytes(self) -> float:
        """Optimizer state that waits on the host: the arrays, and no counters."""
        offload = self.candidate.offload
        if offload is None or not offload.optimizer:
            return 0.0
        leaves = jax.tree.leaves(self.plan.abstract.opt_state)
        return float(sum(_shard_bytes(x) for x in leaves if x.ndim))

    @property
    def copied_bytes(self) -> float:
        """Parameters that a TPU's compiler copies, for all of a step.

        A gather of what was updated in parts writes over the old array
        (docs/library-notes.md, "The TPU compiler").
        """
        if self.topology.hardware.platform != "tpu":
            return 0.0
        return sum(
            self.shard_bytes(x.shape, place.stored, x.dtype)
            for _, x, place in self.params
            if not {*axes_of(place.optimizer)} <= {*axes_of(place.stored)}
        )

    @property
    def gradient_bytes(self) -> float:
        """Gradients where they are summed, in the dtype of the sums."""
        total = 0.0
        for path, x in flatten(self.plan.abstract.params).items():
            spec = self.plan.placements[path].gradient
            dtype = self.plan.precision.gradient_dtype(x.dtype)
            total += self.shard_bytes(x.shape, spec, dtype)
        return total

    def live_bytes(self) -> dict[str, float]:
        """What is alive at the peak besides arguments, by owner."""
        timeline = self.timeline
        sizes = self._sizes(timeline)
        owned = self._by_owner(timeline, timeline.peak(sizes) * sizes)
        # Of rows, what the forward pass keeps; the rest comes and goes.
        rows = owned["kept activations"]
        kept = sum(self.local_bytes(r) for r in self.per_row.residuals)
        owned["kept activations"] = min(rows, kept)
        owned["temporaries"] += rows - owned["kept activations"]
        if self.microbatches > 1:  # they are added to a sum, which is always there
            owned["gradients"] += self.gradient_bytes
        return owned

    def _sizes(self, timeline: Timeline) -> list[float]:
        return [self.size_bytes(size) for size in timeline.sizes]

    @staticmethod
    def _by_owner(timeline: Timeline, found: Iterable[float]) -> dict[str, float]:
        owned: dict[str, float] = dict.fromkeys(_OWNER_OF.values(), 0.0)
        for size, num_bytes in zip(timeline.sizes, found, strict=True):
            owned[_OWNER_OF[size.kind]] += float(num_bytes)
        return owned

    @property
    def timeline(self) -> Timeline:
        """What is in memory at once, as the step is traced for this strategy."""
        rows = self.per_row
        return rows.regathered if self.plan.gathers_outside_stack else rows.timeline

    def size_bytes(self, size: Size) -> float:
        """Bytes of a value of the timeline on a device."""
        if size.kind in ("rows", "whole"):
            return self.local_bytes(size)
        if size.kind == "fixed":
            return size.num_bytes * self._shares.get(size.dims, 1.0)
        place = self.plan.placements[size.path]
        if size.kind == "weight":
            share = self._share(place.used)
            return size.num_bytes * share if place.is_gathered else 0.0
        if size.kind in ("layer", "layer gradient"):
            return size.num_bytes * self._share(place.used, first=1)
        if size.kind == "turned":
            return self._turned_bytes(size, place)
        if size.kind == "combined":
            return self._combined_bytes(size, place)
        if size.kind == "unsummed":
            parts = (self._share(s) for s in (place.used, place.gradient))
            whole, own = parts
            return size.num_bytes * max(0.0, whole - own)
        spec = place.stored if size.kind == "cast" else place.gradient
        return size.num_bytes * self._share(spec)

    @functools.cached_property
    def _shares(self) -> dict[tuple[int, ...], float]:
        """A device's part of what has a parameter's shape, where it is used."""
        shares: dict[tuple[int, ...], float] = {}
        for _, x, place in self.params:
            shares[x.shape] = max(shares.get(x.shape, 0.0), self._share(place.used))
        return shares

    def _combined_bytes(self, size: Size, place: Placement) -> float:
        """A gradient on its way into a sum over devices, on CPUs.

        Other compilers combine small arrays alone.
        """
        claims, used = self.layout.claims, axes_of(place.used)
        over = [a for a in (*claims.batch, *self.layout.sequence_axes) if a not in used]
        is_summed = self.is_cpu and self.size(tuple(over)) > 1
        first = int(place.is_stacked or place.is_scanned)
        return size.num_bytes * self._share(place.used, first) * is_summed

    def _turned_bytes(self, size: Size, place: Placement) -> float:
        """A copy of all layers whose dim that is gathered comes first.

        On CPUs, whose gathers need it so, made once before the loop of the layers.
        """
        used = [*place.used, *(None,) * len(place.stored)]
        split = [i for i, dim in enumerate(place.stored) if dim != used[i]]
        is_turned = self.is_cpu and max(split, default=0) > 0
        return size.num_bytes * self._share(place.stored) * is_turned

    def _share(self, spec: P, first: int = 0) -> float:
        """A device's part of an array, or with ``first=1`` of each of its layers."""
        return 1 / self.size(axes_of(P(*spec[first:])))

    def pipeline_bytes(self) -> dict[str, float]:
        """What a pipeline has besides arguments, by owner."""
        assert self.buffers is not None
        execution, count = self._pipeline, self.buffers
        chunk = self.stage_residual_bytes / execution.schedule.chunks
        # Each buffer has a spare slot, for ticks in which a stage has nothing to write;
        # a slot's residuals are made, or read, before they are written or used.
        stash = self.hidden_bytes if execution.stash == "inputs" else chunk
        pending = chunk * (count.num_pending + 1) if count.num_pending else 0.0
        waiting = count.num_inputs + count.num_cotangents + 2
        kept = (count.num_saved + 1) * stash + chunk + pending
        # A tick runs a layer's backward pass, and the parts around the stack.
        timeline = self.per_row.timeline
        sizes = [
            0.0 if s.is_stacked or s.kind in ("gradient", "turned") else bytes_
            for s, bytes_ in zip(timeline.sizes, self._sizes(timeline), strict=True)
        ]
        owned = self._by_owner(timeline, timeline.peak(sizes) * sizes)
        owned["temporaries"] += owned["kept activations"] + waiting * self.hidden_bytes
        owned["kept activations"] = kept
        # The sums, and what the layers of one slot add to them.
        owned["gradients"] += self.gradient_bytes
        chunks = execution.schedule.chunks
        if self.num_layers > self.stages * chunks:
            # A loop over one layer is none: its gradients go to the sums at once.
            owned["gradients"] += self._staged_gradient_bytes / chunks
        owned["gathered weights"] += self._staged_copy_bytes
        return owned

    @property
    def _pipeline(self) -> Any:
        return self.layout.claims.execution

    @functools.cached_property
    def stage_residual_bytes(self) -> float:
        """Residuals of all layers of a stage, for one microbatch."""
        stacked = [r for r in self.per_row.residuals if r.is_stacked]
        return sum(map(self.local_bytes, stacked)) * self.fullest

    @functools.cached_property
    def fullest(self) -> float:
        """Layers of the chunks of a stage, as long as the longest, over their mean."""
        if self.simulation is None or not (layers := self.num_layers):
            return 1.0
        parts = self.stages * self._pipeline.schedule.chunks
        return math.ceil(layers / parts) * parts / layers

    @property
    def _staged(self) -> list[tuple[Any, Placement]]:
        return [(x, place) for _, x, place in self.params if place.is_staged]

    @property
    def _staged_gradient_bytes(self) -> float:
        return sum(
            self.shard_bytes(x.shape, p.gradient, x.dtype) for x, p in self._staged
        )

    @property
    def _staged_copy_bytes(self) -> float:
        """Weights of a stage beside those that are stored: gathered once, or moved."""
        total = 0.0
        for x, place in self._staged:
            here = place.in_stage()
            is_once = self._pipeline.gather == "step"
            if (is_once and place.is_gathered) or place.moved:
                spec = here.used if is_once else here.stored
                size = self.shard_bytes(x.shape, spec, self.dtype)
                split = self.stages if place.moved else 1
                total += size / split * self.fullest
        return total

    def moved_bytes(self, memory: Mapping[str, float]) -> float:
        """Bytes between memory and chip: what a step cannot avoid to read and write."""
        used = sum(
            self.shard_bytes(x.shape, place.used, self.dtype)
            for _, x, place in self.params
        )
        # Weights are read forward, and backward for both gradients; the update reads
        # and writes parameters and optimizer state, and reads gradients.
        state = memory["parameters"] + memory["optimizer state"]
        update = 2 * state + 2 * self.gradient_bytes * self.microbatches
        kept = 2 * memory["kept activations"] * self.microbatches
        return 3 * used * self.microbatches + update + kept
