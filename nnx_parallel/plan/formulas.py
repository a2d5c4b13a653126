"""Costs of a candidate, without compiling it: state exactly, the rest estimated.

Parameters, optimizer state and batch are counted shard by shard, from the shapes and
shardings that the step is compiled with. Kept activations are the residuals of the
traced loss, split over the axes that split their dims. Bytes in collectives follow from
where an array is stored and where it is used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from nnx_parallel.pipeline.run import PipelineSchedule
from nnx_parallel.plan.candidates import Candidate
from nnx_parallel.plan.costs import Facts, Residual
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.liveness import Kind, Size, Timeline
from nnx_parallel.plan.roofline import OWNERS, Costs, Traffic
from nnx_parallel.precision import array_bytes
from nnx_parallel.schedules.schedules import Fixed, Schedule
from nnx_parallel.schedules.simulate import Simulation
from nnx_parallel.schedules.table import Buffers, plan_buffers
from nnx_parallel.sharding.model import Path, flatten
from nnx_parallel.sharding.names import as_tuple, in_order
from nnx_parallel.sharding.placement import Placement
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
    return {owner: sum(map(_shard_bytes, _leaves(x))) for owner, x in owned.items()}


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


def _shard_bytes(x: Any) -> int:
    return array_bytes(x.sharding.shard_shape(x.shape), x.dtype)


def axes_of(spec: P) -> tuple[str, ...]:
    """The mesh axes of a spec."""
    return tuple(axis for dim in spec for axis in as_tuple(dim))


class Estimate:
    """The formulas of one candidate; `costs` are their results."""

    def __init__(
        self,
        facts: Facts,
        candidate: Candidate,
        topology: Topology,
        plan: StatePlan,
    ) -> None:
        self.facts, self.parts = facts, facts.parts
        self.candidate, self.topology = candidate, topology
        self.plan, self.layout, self.mesh = plan, plan.layout, plan.layout.mesh
        self.per_row, self.plain = facts.rows[candidate.remat], facts.rows["none"]
        self.microbatches = candidate.num_microbatches
        self.dtype = jnp.dtype(self.parts.compute_dtype)
        self.width = self.dtype.itemsize
        claims = self.layout.claims
        self.rows = self.parts.num_rows / self.size(claims.batch) / self.microbatches
        self.stages = self.size(("pipe",))
        table = _table(claims.execution, self.stages, self.microbatches)
        self.simulation, self.buffers = table or (None, None)
        # Path, shape and placement of each trained parameter.
        trained = flatten(plan.abstract.params)
        self.params = [(path, x, plan.placements[path]) for path, x in trained.items()]
        self._shapes = {path: x.shape for path, x in trained.items()}

    def size(self, axes: tuple[str, ...]) -> int:
        """Devices along some axes; 1 along those that the mesh lacks."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in axes)

    @property
    def costs(self) -> Costs:
        """All of them."""
        parts, devices = self.parts, self.mesh.size
        batch = parts.batch_on(self.layout, self.microbatches)
        memory: dict[str, float] = dict.fromkeys(OWNERS, 0.0)
        memory |= state_bytes(self.plan, batch)
        is_piped = self.simulation is not None
        memory |= self.pipeline_bytes() if is_piped else self.live_bytes()
        total_rows = parts.num_rows / devices
        simulation = self.simulation
        return Costs(
            memory=memory,
            flops=self.per_row.flops * total_rows,
            model_flops=self.facts.model_flops * total_rows,
            moved_bytes=self.moved_bytes(memory),
            traffic=tuple(self.traffic()),
            bubble=0.0 if simulation is None else simulation.bubble,
        )

    # Memory

    @property
    def gradient_bytes(self) -> float:
        """Gradients where they are summed, in the dtype of the sums."""
        total = 0.0
        for path, x in flatten(self.plan.abstract.params).items():
            spec = self.plan.placements[path].gradient
            dtype = self.plan.precision.gradient_dtype(x.dtype)
            total += self._bytes(x.shape, spec, dtype)
        return total

    def _bytes(self, shape: tuple[int, ...], spec: P, dtype: Any) -> float:
        return array_bytes(self.layout.sharding(spec).shard_shape(shape), dtype)

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
            owned[_OWNER_OF[size.kind]] += num_bytes
        return owned

    @property
    def timeline(self) -> Timeline:
        """What is in memory at once, as the step is traced for this strategy."""
        rows = self.per_row
        return rows.regathered if self.plan.gathers_outside_stack else rows.timeline

    def size_bytes(self, size: Size) -> float:
        """Bytes of a value of the timeline on a device."""
        if size.kind == "rows":
            value = Residual(
                row_bytes=size.num_bytes, dims=size.dims, is_stacked=size.is_stacked
            )
            return self.local_bytes(value)
        if size.kind == "fixed":
            return size.num_bytes
        place = self.plan.placements[size.path]
        if size.kind == "weight":
            share = self._share(size.path, place.used)
            return size.num_bytes * share if place.is_gathered else 0.0
        if size.kind in ("layer", "layer gradient"):
            return size.num_bytes * self._share(size.path, place.used, first=1)
        if size.kind == "turned":
            return self._turned_bytes(size, place)
        if size.kind == "combined":
            return self._combined_bytes(size, place)
        if size.kind == "unsummed":
            parts = (self._share(size.path, s) for s in (place.used, place.gradient))
            whole, own = parts
            return size.num_bytes * max(0.0, whole - own)
        spec = place.stored if size.kind == "cast" else place.gradient
        return size.num_bytes * self._share(size.path, spec)

    def _combined_bytes(self, size: Size, place: Placement) -> float:
        """A gradient on its way into a sum over devices, on CPUs.

        Other compilers combine small arrays alone.
        """
        claims, used = self.layout.claims, axes_of(place.used)
        over = [a for a in (*claims.batch, *self.layout.sequence_axes) if a not in used]
        is_summed = self._is_cpu and self.size(tuple(over)) > 1
        first = int(place.is_stacked or place.is_scanned)
        return size.num_bytes * self._share(size.path, place.used, first) * is_summed

    @property
    def _is_cpu(self) -> bool:
        return self.topology.hardware.platform == "cpu"

    def _turned_bytes(self, size: Size, place: Placement) -> float:
        """A copy of all layers whose dim that is gathered comes first.

        On CPUs, whose gathers need it so, made once before the loop of the layers.
        """
        used = [*place.used, *(None,) * len(place.stored)]
        split = [i for i, dim in enumerate(place.stored) if dim != used[i]]
        is_turned = self._is_cpu and max(split, default=0) > 0
        return size.num_bytes * self._share(size.path, place.stored) * is_turned

    def _share(self, path: Path, spec: P, first: int = 0) -> float:
        """A device's part of an array, or of each of its layers."""
        shape = self._shapes[path]
        shard = self.layout.sharding(spec).shard_shape(shape)
        return math.prod(shard[first:]) / math.prod(shape[first:])

    def local_bytes(self, residual: Residual) -> float:
        """Bytes of a residual of one microbatch on a device."""
        dims, parts = list(residual.dims), 1
        claims = self.layout.claims
        names = self._sizes_by_name
        for name, axes in claims.logical.items():
            count = self.size(as_tuple(axes))
            if count > 1 and any(n in names.get(name, ()) for n in dims):
                parts = max(parts, count)
        along = as_tuple(claims.activations.get("seq"))
        is_long = self.per_row.positions in dims or not dims
        if is_long:
            seq = tuple(axis for axis in along if axis != "tensor" or parts == 1)
            parts *= self.size(seq)
        if residual.is_stacked:
            parts *= self.stages
        return residual.row_bytes * self.rows / parts

    @functools.cached_property
    def _sizes_by_name(self) -> dict[str, set[int]]:
        named: dict[str, set[int]] = {}
        for info in self.facts.arrays:
            for name, size in zip(info.names or (), info.shape, strict=False):
                # A dim of the model's width may be any: it is not told by its size.
                if isinstance(name, str) and size != self.per_row.width:
                    named.setdefault(name, set()).add(size)
        return named

    def pipeline_bytes(self) -> dict[str, float]:
        """What a pipeline has besides arguments, by owner."""
        assert self.buffers is not None
        execution, count = self._pipeline, self.buffers
        chunk = self.stage_residual_bytes / execution.schedule.chunks
        # Each buffer has a spare slot, for ticks in which a stage has nothing to write;
        # a slot's residuals are made, or read, before they are written or used.
        stash = self._hidden_bytes if execution.stash == "inputs" else chunk
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
        owned["temporaries"] += owned["kept activations"] + waiting * self._hidden_bytes
        owned["kept activations"] = kept
        # The sums, and what one slot adds to them.
        owned["gradients"] += self.gradient_bytes
        owned["gradients"] += self._staged_gradient_bytes / execution.schedule.chunks
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
        if self.simulation is None or not (layers := self._num_layers()):
            return 1.0
        parts = self.stages * self._pipeline.schedule.chunks
        return math.ceil(layers / parts) * parts / layers

    @property
    def _staged(self) -> list[tuple[Any, Placement]]:
        return [(x, place) for _, x, place in self.params if place.is_staged]

    @property
    def _staged_gradient_bytes(self) -> float:
        return sum(self._bytes(x.shape, p.gradient, x.dtype) for x, p in self._staged)

    @property
    def _staged_copy_bytes(self) -> float:
        """Weights of a stage beside those that are stored: gathered once, or moved."""
        total = 0.0
        for x, place in self._staged:
            here = place.in_stage()
            is_once = self._pipeline.gather == "step"
            if (is_once and place.is_gathered) or place.moved:
                spec = here.used if is_once else here.stored
                size = self._bytes(x.shape, spec, self.dtype)
                split = self.stages if place.moved else 1
                total += size / split * self.fullest
        return total

    def _num_layers(self) -> int:
        stacked = (x.shape[0] for _, x, place in self.params if place.is_stacked)
        return max(stacked, default=1)

    def moved_bytes(self, memory: Mapping[str, float]) -> float:
        """Bytes between memory and chip: what a step cannot avoid to read and write."""
        used = sum(
            self._bytes(x.shape, place.used, self.dtype) for _, x, place in self.params
        )
        # Weights are read forward, and backward for both gradients; the update reads
        # and writes parameters and optimizer state, and reads gradients.
        state = memory["parameters"] + memory["optimizer state"]
        update = 2 * state + 2 * self.gradient_bytes * self.microbatches
        kept = 2 * memory["kept activations"] * self.microbatches
        return 3 * used * self.microbatches + update + kept

    # Communication

    def traffic(self) -> list[Traffic]:
        """What a device sends, by axes and reason."""
        found = [*self._of_state(), *self._of_tensor(), *self._of_sequence()]
        found += [*self._of_experts(), *self._of_stages()]
        sums: dict[tuple, float] = {}
        for each in found:
            key = each.axes, each.hidden, each.source
            sums[key] = sums.get(key, 0) + each.sent_bytes
        return [
            Traffic(axes=axes, sent_bytes=sent, hidden=hidden, source=source)
            for (axes, hidden, source), sent in sums.items()
            if sent
        ]

    def _traffic(
        self, axes: tuple[str, ...], total: float, source: str, *, exposed: bool
    ) -> Traffic:
        count = self.size(axes)
        return Traffic(
            axes=in_order(axes, self.mesh),
            sent_bytes=total * (count - 1) / count,
            hidden=(0.0, 0.0 if exposed else 1.0),
            source=source,
        )

    def _of_state(self) -> list[Traffic]:
        claims, found = self.layout.claims, []
        split = (*claims.batch, *self.layout.sequence_axes)
        gathers = 2 if self._gathers_twice() else 1
        execution = claims.execution
        is_once = isinstance(execution, PipelineSchedule) and execution.gather == "step"
        for _, x, place in self.params:
            stored, used = axes_of(place.stored), axes_of(place.used)
            size = self._bytes(x.shape, place.used, self.dtype)
            times = 1 if is_once else self.microbatches
            if axes := tuple(a for a in stored if a not in used):
                total = gathers * times * size
                found.append(self._traffic(axes, total, "weights", exposed=False))
            gradient = tuple(a for a in axes_of(place.gradient) if a not in used)
            if gradient:
                total = self.microbatches * size
                found.append(self._traffic(gradient, total, "gradients", exposed=False))
            rest = tuple(a for a in split if a not in (*used, *gradient))
            if self.size(rest) > 1:
                total = 2 * self.microbatches * size / self.size(gradient)
                found.append(self._traffic(rest, total, "gradients", exposed=False))
            updated = tuple(a for a in axes_of(place.optimizer) if a not in stored)
            if updated:
                total = self._bytes(x.shape, place.stored, x.dtype)
                found.append(self._traffic(updated, total, "updates", exposed=True))
        return found

    def _gathers_twice(self) -> bool:
        return any(place.is_gathered for _, _, place in self.params)

    @property
    def _hidden_bytes(self) -> float:
        """One microbatch's residual stream on a device, whole along the sequence."""
        context = self.size(self.layout.sequence_axes)
        elements = self.rows * self.per_row.positions * self.per_row.width / context
        return elements * self.width

    def _of_tensor(self) -> list[Traffic]:
        """Sums of products whose contracted dim is split: by rows, in Megatron's words.

        As many more in the backward pass, of products that are split by columns.
        """
        claims, found = self.layout.claims, []
        passes = 2 if self.candidate.remat == "none" else 3
        for _, x, place in self.params:
            first = 1 if place.is_stacked else 0
            spec: list[Any] = [*place.used, *(None,) * (x.ndim - len(place.used))]
            spec = spec[first:]
            if len(spec) < 2:
                continue
            others = (*claims.batch, "pipe")
            axes = tuple(a for a in as_tuple(spec[0]) if a not in others)
            if self.size(axes) < 2 or any(spec[1:]) or x.shape[-1] < 2:
                continue
            layers = x.shape[0] // self.stages if first else 1
            context = self.size(self.layout.sequence_axes)
            tokens = self.rows * self.per_row.positions / context
            size = tokens * x.shape[-1] * self.width
            total = 2 * passes * layers * self.microbatches * size
            exposed = claims.overlap is None
            found.append(self._traffic(axes, total, "activations", exposed=exposed))
        return found

    def _of_sequence(self) -> list[Traffic]:
        """Keys and values around the ring, and backward their gradients too."""
        claims, found = self.layout.claims, []
        axis = claims.sequence.axis if claims.sequence else ""
        if (count := self.size((axis,))) < 2:
            return found
        for info in self.facts.arrays:
            names = info.names or ()
            if "kv_heads" not in names:
                continue
            tensor = self.size(as_tuple(claims.logical.get("kv_heads")))
            at = names.index("kv_heads")
            if len(info.shape) - at < 2 or "embed" not in names:
                continue  # a bias
            layers = info.shape[0] // self.stages if "layers" in names[:1] else 1
            width = math.prod(info.shape[at : at + 2]) / tensor
            tokens = self.rows * self.per_row.positions / count
            # Their own dtype twice, and gradients in float32; `count - 1` hops.
            total = tokens * width * (2 * self.width + 4) * layers * self.microbatches
            found.append(self._traffic((axis,), total * count, "keys", exposed=False))
        return found

    def _of_experts(self) -> list[Traffic]:
        """Tokens to their experts and back, forward and backward."""
        axis = self.layout.claims.experts
        if axis is None or (count := self.size((axis.axis,))) < 2:
            return []
        layers = max(1, self._num_layers() // self.stages)
        # All tokens of the group are gathered, and the results scattered.
        total = 4 * count * self._hidden_bytes * layers * self.microbatches
        return [self._traffic((axis.axis,), total, "tokens", exposed=True)]

    def _of_stages(self) -> list[Traffic]:
        if self.simulation is None or self.stages < 2:
            return []
        execution: Any = self.layout.claims.execution
        hops = 2 * execution.schedule.chunks * self.microbatches
        # A hop sends all of it to one neighbour, unlike a ring.
        total = hops * self._hidden_bytes * self.stages / (self.stages - 1)
        return [self._traffic(("pipe",), total, "activations", exposed=False)]


def _table(
    execution: Any, stages: int, microbatches: int
) -> tuple[Simulation, Buffers] | None:
    if not isinstance(execution, PipelineSchedule):
        return None
    # Of a table of one's own there is only one size, and it has no hash.
    is_fixed = isinstance(execution.schedule, Fixed)
    make = _simulation.__wrapped__ if is_fixed else _simulation
    return make(execution.schedule, stages, microbatches)


@functools.lru_cache(maxsize=1024)
def _simulation(
    schedule: Schedule, stages: int, microbatches: int
) -> tuple[Simulation, Buffers]:
    table = schedule.table(stages, microbatches)
    return table.simulate(), plan_buffers(table)
