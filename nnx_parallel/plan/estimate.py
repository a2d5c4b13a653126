"""Computes a candidate's costs by formulas: exact for the state, estimates otherwise.

Parameters, optimizer state and batch are counted shard by shard, from the shapes and
shardings that the step is compiled with. The rest of the memory is an untuned sum:
kept residuals, gradients, gathered weights, and one layer computed again. The sum ranks
candidates and drops candidates that cannot fit; a compiler decides among the others.
Sent bytes follow from the specs in which arrays are stored and used. They are counted
for the collective that sends the fewest bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from nnx_parallel.layers.loss import default_chunk_size
from nnx_parallel.pipeline.run import PipelineSchedule
from nnx_parallel.plan.candidates import Candidate
from nnx_parallel.plan.costs import Facts, Residual, is_of_pairs
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.parts import sizes_by_name
from nnx_parallel.plan.roofline import OWNERS, Costs, Traffic
from nnx_parallel.precision import array_bytes
from nnx_parallel.schedules.schedules import Fixed, Schedule
from nnx_parallel.schedules.simulate import Simulation
from nnx_parallel.schedules.table import Buffers, plan_buffers
from nnx_parallel.sharding.model import flatten
from nnx_parallel.sharding.names import as_tuple, dotted
from nnx_parallel.sharding.placement import Placement, axes_of
from nnx_parallel.sharding.specs import in_order
from nnx_parallel.state import StatePlan


def state_bytes(plan: StatePlan, batch: Any) -> dict[str, int]:
    """Counts the exact bytes of a step's arguments on one device, by owner.

    Their sum is the argument size of XLA's ``memory_analysis`` if the compiler lays
    arrays out without padding, as on CPU.

    Args:
        plan: Placement of the training state.
        batch: Shapes of a global batch with shardings (`Parts.batch_on`).
    """
    state = plan.whole.abstract
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


class Estimate:
    """The formulas for one candidate; `costs` has their results.

    Args:
        facts: The traced loss, in the candidate's precision.
        candidate: The strategy, microbatches and remat.
        topology: The devices.
        plan: Placement of the training state under the strategy.
    """

    def __init__(
        self, facts: Facts, candidate: Candidate, topology: Topology, plan: StatePlan
    ) -> None:
        self.facts, self.parts = facts, facts.parts
        self.candidate, self.topology = candidate, topology
        self.plan, self.layout, self.mesh = plan, plan.layout, plan.layout.mesh
        self.per_row = facts.row(candidate.remat)
        self.microbatches = candidate.num_microbatches
        self.dtype = jnp.dtype(self.parts.compute_dtype)
        self.width = self.dtype.itemsize
        claims = self.layout.claims
        self.rows = self.parts.num_rows / self.size(claims.batch) / self.microbatches
        self.stages = self.size(("pipe",))
        self.is_cpu = topology.hardware.platform == "cpu"
        # (path, shape, placement) of each trained parameter.
        trained = flatten(plan.abstract.params)
        self.params = [(path, x, plan.placements[path]) for path, x in trained.items()]
        staged = [x.shape[0] for _, x, place in self.params if place.is_staged]
        stacked = [x.shape[0] for _, x, place in self.params if place.is_stacked]
        # The number of layers of the stack that a pipeline cuts, or of the longest
        # stack.
        self.num_layers = max(staged or stacked, default=1)
        self.simulation, self.buffers = self._schedule(claims.execution)

    @property
    def costs(self) -> Costs:
        """The costs of the candidate."""
        parts = self.parts
        batch = parts.batch_on(self.layout, self.microbatches)
        memory: dict[str, float] = dict.fromkeys(OWNERS, 0.0)
        memory |= state_bytes(self.plan, batch)
        memory["optimizer state"] -= self.host_bytes
        is_piped = self.simulation is not None
        memory |= self.pipeline_bytes() if is_piped else self.live_bytes()
        memory["temporaries"] += self.copied_bytes
        # Devices along the other axes do the same work.
        total_rows = parts.num_rows / self.size(self.working_axes)
        simulation = self.simulation
        return Costs(
            memory=memory,
            flops=self.per_row.flops * total_rows,
            model_flops=self.facts.model_flops * parts.num_rows / self.mesh.size,
            moved_bytes=self.moved_bytes(memory),
            traffic=tuple(_traffic_of(self)),
            bubble=0.0 if simulation is None else simulation.bubble,
            host_bytes=self.host_bytes,
        )

    @property
    def working_axes(self) -> tuple[str, ...]:
        """Axes that split the work: axes of rows, of stages, and of weights in use."""
        split = {*self.layout.claims.batch, *self.layout.sequence_axes, "pipe"}
        for _, _, place in self.params:
            split.update(axes_of(place.used))
        return tuple(axis for axis in self.mesh.shape if axis in split)

    def _schedule(self, execution: Any) -> tuple[Simulation | None, Buffers | None]:
        if not isinstance(execution, PipelineSchedule):
            return None, None
        # A user's table has only one size, so its results are not cached.
        is_fixed = isinstance(execution.schedule, Fixed)
        make = _simulation.__wrapped__ if is_fixed else _simulation
        sizes = self.stages, self.microbatches, self.num_layers
        return make(execution.schedule, *sizes)

    def size(self, axes: tuple[str, ...]) -> int:
        """Returns the number of devices along axes; missing axes count as 1."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in axes)

    def shard_bytes(self, shape: tuple[int, ...], spec: P, dtype: Any) -> float:
        """Returns the bytes of a device's shard of an array."""
        return array_bytes(self.layout.sharding(spec).shard_shape(shape), dtype)

    def local_bytes(self, rows: Residual) -> float:
        """Returns the bytes of a residual on one device, for one microbatch."""
        # Attention over a split sequence computes scores in blocks, and does not keep
        # them.
        is_split = bool(self.layout.sequence_axes)
        if is_split and is_of_pairs(rows.dims, self.per_row.positions):
            return 0.0
        parts, (along, others) = self._named_parts(rows.dims), self._split_sequence
        if self.per_row.positions in rows.dims or not rows.dims:
            parts *= others if parts > 1 else along
        if rows.is_stacked:
            parts *= self.stages
        return rows.num_bytes * self.rows / parts

    def _named_parts(self, dims: tuple[int, ...]) -> int:
        """Returns the number of devices that split a value with dims of these sizes."""
        counts = (n for n, sizes in self._split_sizes if not sizes.isdisjoint(dims))
        return max(counts, default=1)

    @functools.cached_property
    def _split_sizes(self) -> list[tuple[int, set[int]]]:
        """For each name, the number of devices that split its dims, and their sizes."""
        claims, named = self.layout.claims, sizes_by_name(self.plan.model.infos)
        counts = {name: self.size(as_tuple(a)) for name, a in claims.logical.items()}
        # A dim as wide as the residual stream cannot be recognised by its size.
        width = {self.per_row.width}
        return [
            (count, named.get(name, set()) - width)
            for name, count in counts.items()
            if count > 1
        ]

    @functools.cached_property
    def _split_sequence(self) -> tuple[int, int]:
        """Numbers of devices over which the sequence is split.

        The first counts all axes that split it, the second all of these but `tensor`.
        """
        along = as_tuple(self.layout.claims.activations.get("seq"))
        others = tuple(axis for axis in along if axis != "tensor")
        return self.size(along), self.size(others)

    @functools.cached_property
    def hidden_bytes(self) -> float:
        """Bytes of a microbatch's hidden states on a device, not split by `tensor`."""
        context = self.size(self.layout.sequence_axes)
        elements = self.rows * self.per_row.positions * self.per_row.width / context
        return elements * self.width

    @functools.cached_property
    def host_bytes(self) -> float:
        """Bytes of optimizer state on the host: its arrays, but not its counters."""
        offload = self.candidate.offload
        if offload is None or not offload.optimizer:
            return 0.0
        leaves = jax.tree.leaves(self.plan.whole.abstract.opt_state)
        return float(sum(_shard_bytes(x) for x in leaves if x.ndim))

    @property
    def copied_bytes(self) -> float:
        """Bytes of parameters that a TPU's compiler copies for the whole step.

        An array that is updated in shards is then gathered. The gather overwrites the
        old array, so the compiler copies the old array (docs/library-notes.md, "The TPU
        compiler").
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
        """Bytes of gradients in the spec and the dtype in which they are summed."""
        total = 0.0
        for path, x in flatten(self.plan.abstract.params).items():
            spec = self.plan.placements[path].gradient
            dtype = self.plan.precision.gradient_dtype(x.dtype)
            total += self.shard_bytes(x.shape, spec, dtype)
        return total

    def live_bytes(self) -> dict[str, float]:
        """Returns memory besides arguments, by owner, for a step without stages."""
        kept = sum(map(self.local_bytes, self.per_row.residuals))
        # With microbatches, a device holds the gradients of one microbatch and the sum
        # over microbatches.
        copies = 2 if self.microbatches > 1 else 1
        return {
            "kept activations": kept,
            "gradients": copies * self.gradient_bytes,
            "gathered weights": self.gathered_bytes,
            "temporaries": self.layer_bytes,
        }

    @property
    def gathered_bytes(self) -> float:
        """Bytes of weights that are gathered: a layer per stack, and all others."""
        total = 0.0
        for _, x, place in self.params:
            if place.is_gathered:
                shape, here = x.shape, place.in_stage()
                if place.is_stacked:
                    shape, here = shape[1:], here.of_layer()
                total += self.shard_bytes(shape, here.used, self.dtype)
        return total

    @property
    def layer_bytes(self) -> float:
        """Bytes of a layer that is computed again, or of the loss."""
        residuals = self.facts.row("none").residuals
        stacked = sum(self.local_bytes(r) for r in residuals if r.is_stacked)
        others = (self.local_bytes(r) for r in residuals if not r.is_stacked)
        layer = stacked * self.stages / self.num_layers
        row = self.per_row
        if row.scores is not None:
            # The gradient of the softmax needs the scores, their exponentials, and the
            # gradients of both. Without remat, the kept scores make room for these.
            count = 0 if self.candidate.remat == "none" else 3
            layer += count * self.local_bytes(row.scores)
        # The loss runs before the first layer's backward pass.
        return max(layer, self.loss_bytes) + max(others, default=0.0)

    @property
    def loss_bytes(self) -> float:
        """Bytes of a chunk's logits and their gradient, and the head's gradient."""
        logits = self.per_row.logits
        if logits is None:
            return 0.0
        size, (*_, classes) = self.local_bytes(logits), logits.dims
        splits = self._named_parts(logits.dims)
        # (positions, classes) in float32 or float64
        width = logits.num_bytes / math.prod(logits.dims)
        default = default_chunk_size(self.per_row.width, classes, splits)
        chunk = logits.chunk_size or default
        limit = chunk * classes * width / splits
        if size <= limit:  # a single chunk, which needs no sum
            return 2 * size
        # The chunks add up the gradient of the head, which is not sharded yet.
        return 2 * limit + 4.0 * self.per_row.width * classes / splits

    def pipeline_bytes(self) -> dict[str, float]:
        """Returns memory besides arguments, by owner, for a pipeline."""
        assert self.buffers is not None
        execution, count = self._pipeline, self.buffers
        chunk = self.stage_residual_bytes / execution.schedule.chunks
        # Each buffer has a spare slot, for ticks in which a stage has nothing to write.
        # One more copy of a chunk's residuals exists while they are computed and
        # written, or read and used.
        stash = self.hidden_bytes if execution.stash == "inputs" else chunk
        pending = chunk * (count.num_pending + 1) if count.num_pending else 0.0
        waiting = count.num_inputs + count.num_cotangents + 2
        return {
            "kept activations": (count.num_saved + 1) * stash + chunk + pending,
            # Summed gradients, and the gradients of the layers that one slot runs.
            "gradients": self.gradient_bytes
            + self._staged_gradient_bytes / execution.schedule.chunks,
            "gathered weights": self.gathered_bytes + self._staged_copy_bytes,
            "temporaries": self.layer_bytes + waiting * self.hidden_bytes,
        }

    @property
    def _pipeline(self) -> Any:
        return self.layout.claims.execution

    @functools.cached_property
    def stage_residual_bytes(self) -> float:
        """Bytes of residuals of all layers of a stage, for one microbatch."""
        stacked = [r for r in self.per_row.residuals if r.is_stacked]
        return sum(map(self.local_bytes, stacked)) * self.fullest

    @functools.cached_property
    def fullest(self) -> float:
        """Length of the longest chunk, divided by the mean length of chunks."""
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
        """Bytes of a stage's gathered or moved weights, besides the stored shards."""
        total = 0.0
        for x, place in self._staged:
            here = place.in_stage()
            is_once = self._pipeline.gather == "step"
            if (is_once and place.is_gathered) or place.stage_axes:
                spec = here.used if is_once else here.stored
                size = self.shard_bytes(x.shape, spec, self.dtype)
                split = self.stages if place.stage_axes else 1
                total += size / split * self.fullest
        return total

    def moved_bytes(self, memory: Mapping[str, float]) -> float:
        """Returns bytes that a step must read from and write to a device's memory."""
        used = sum(
            self.shard_bytes(x.shape, place.used, self.dtype)
            for _, x, place in self.params
        )
        # Weights are read three times: forward, and backward for each of the two
        # gradients. The update reads and writes parameters and optimizer state, and
        # reads gradients.
        state = memory["parameters"] + memory["optimizer state"]
        update = 2 * state + 2 * self.gradient_bytes * self.microbatches
        kept = 2 * memory["kept activations"] * self.microbatches
        return 3 * used * self.microbatches + update + kept


@functools.lru_cache(maxsize=1024)
def _simulation(
    schedule: Schedule, stages: int, microbatches: int, num_layers: int
) -> tuple[Simulation, Buffers]:
    table = schedule.table(stages, microbatches)
    return table.simulate(num_layers=num_layers), plan_buffers(table)


def _traffic_of(local: Estimate) -> list[Traffic]:
    """Returns the bytes that a device sends, by axes and reason."""
    sums: dict[tuple, float] = {}
    for part in (_of_state, _of_tensor, _of_sequence, _of_experts, _of_stages):
        for each in part(local):
            key = each.axes, each.hidden, each.source
            sums[key] = sums.get(key, 0) + each.sent_bytes
    return [
        Traffic(axes=axes, sent_bytes=sent, hidden=hidden, source=source)
        for (axes, hidden, source), sent in sums.items()
        if sent
    ]


def _sent(
    local: Estimate, axes: tuple[str, ...], total: float, source: str, *, exposed: bool
) -> Traffic:
    count = local.size(axes)
    # A CPU sends between operations, and does not compute at the same time.
    exposed = exposed or local.is_cpu
    return Traffic(
        axes=in_order(axes, local.mesh),
        sent_bytes=total * (count - 1) / count,
        hidden=(0.0, 0.0 if exposed else 1.0),
        source=source,
    )


def _of_state(local: Estimate) -> Iterator[Traffic]:
    claims = local.layout.claims
    split = (*claims.batch, *local.layout.sequence_axes)
    gathers = 2 if any(place.is_gathered for _, _, place in local.params) else 1
    execution = claims.execution
    is_once = isinstance(execution, PipelineSchedule) and execution.gather == "step"
    # CPUs have no reduce-scatter: they all-reduce gradients, and drop the parts of
    # other devices.
    sums = 2 if local.is_cpu else 1
    for _, x, stored_at in local.params:
        place, of_stage = stored_at, 1
        if place.stage_axes:
            # If stages share layers unevenly, the layers are sent to the stages once
            # per step.
            for source, dtype in (("weights", local.dtype), ("gradients", x.dtype)):
                part = local.shard_bytes(x.shape, place.stored, dtype)
                yield _sent(local, place.stage_axes, part, source, exposed=True)
            place, of_stage = place.in_stage(), local.stages
        stored, used = axes_of(place.stored), axes_of(place.used)
        size = local.shard_bytes(x.shape, place.used, local.dtype) / of_stage
        times = 1 if is_once else gathers * local.microbatches
        if axes := tuple(a for a in stored if a not in used):
            yield _sent(local, axes, times * size, "weights", exposed=False)
        gradient = tuple(a for a in axes_of(place.gradient) if a not in used)
        if gradient:
            total = sums * local.microbatches * size
            yield _sent(local, gradient, total, "gradients", exposed=False)
        rest = tuple(a for a in split if a not in (*used, *gradient))
        if local.size(rest) > 1:
            total = 2 * local.microbatches * size / local.size(gradient)
            yield _sent(local, rest, total, "gradients", exposed=False)
        updated = tuple(a for a in axes_of(place.optimizer) if a not in stored)
        if updated:
            total = local.shard_bytes(x.shape, place.stored, x.dtype) / of_stage
            yield _sent(local, updated, total, "updates", exposed=True)


def _passes(local: Estimate) -> int:
    """Returns how often a layer's transfers run: forward, backward, and for remat."""
    return 2 if local.candidate.remat == "none" else 3


def _of_tensor(local: Estimate) -> Iterator[Traffic]:
    """Yields sums of products whose contracted dim is split ("by rows" in Megatron).

    The backward pass has the same number of sums, for products that are split by
    columns.
    """
    claims = local.layout.claims
    for _, x, place in local.params:
        first = 1 if place.is_stacked else 0
        spec: list[Any] = [*place.used, *(None,) * (x.ndim - len(place.used))]
        spec = spec[first:]
        if len(spec) < 2:
            continue
        others = (*claims.batch, "pipe")
        axes = tuple(a for a in as_tuple(spec[0]) if a not in others)
        if local.size(axes) < 2 or any(spec[1:]) or x.shape[-1] < 2:
            continue
        layers = x.shape[0] / local.stages if first else 1
        context = local.size(local.layout.sequence_axes)
        tokens = local.rows * local.per_row.positions / context
        size = tokens * x.shape[-1] * local.width
        total = 2 * _passes(local) * layers * local.microbatches * size
        is_halved = claims.halves and claims.execution is None
        exposed = claims.overlap is None and not is_halved
        yield _sent(local, axes, total, "activations", exposed=exposed)


def _of_sequence(local: Estimate) -> Iterator[Traffic]:
    """Yields transfers of keys and values in the ring, and of their gradients."""
    claims = local.layout.claims
    axis = claims.sequence.axis if claims.sequence else ""
    if (count := local.size((axis,))) < 2:
        return
    places = {dotted(path): place for path, place in local.plan.placements.items()}
    for info in local.plan.model.infos:
        names = info.names or ()
        if "kv_heads" not in names:
            continue
        at = names.index("kv_heads")
        used = places[info.path].used
        tensor = local.size(as_tuple(used[at])) if at < len(used) else 1
        if len(info.shape) - at < 2 or "embed" not in names:
            continue  # a bias
        layers = info.shape[0] / local.stages if "layers" in names[:1] else 1
        width = math.prod(info.shape[at : at + 2]) / tensor
        tokens = local.rows * local.per_row.positions / count
        # Keys and values travel twice, in their dtype, and gradients once, in float32;
        # each makes `count - 1` hops.
        total = tokens * width * (2 * local.width + 4) * layers * local.microbatches
        yield _sent(local, (axis,), total * count, "keys", exposed=False)


def _of_experts(local: Estimate) -> Iterator[Traffic]:
    """Yields the tokens that each mixture's exchange sends to experts and back."""
    axis = local.layout.claims.experts
    if axis is None or (count := local.size((axis.axis,))) < 2:
        return
    # `axis.choose` cannot see that described devices are CPUs, which have no ragged
    # exchange.
    for top_k, layers in local.facts.mixtures:
        how = "gather" if local.is_cpu else axis.choose(local.mesh, top_k)[0]
        # Either a token goes to all devices, or each of its rows goes to one expert's
        # device.
        copies = count if how == "gather" else top_k
        # Tokens go to experts and back, in both passes. With remat they go to the
        # experts once more, but outputs need not come back.
        times = (2 + _passes(local)) * max(1, layers / local.stages)
        total = copies * local.hidden_bytes * times * local.microbatches
        yield _sent(local, (axis.axis,), total, f"tokens ({how})", exposed=True)


def _of_stages(local: Estimate) -> Iterator[Traffic]:
    if local.simulation is None or local.stages < 2:
        return
    execution: Any = local.layout.claims.execution
    hops = 2 * execution.schedule.chunks * local.microbatches
    # A hop sends all bytes to one neighbour. The factor cancels the factor (n - 1) / n
    # that `_sent` applies for rings.
    total = hops * local.hidden_bytes * local.stages / (local.stages - 1)
    yield _sent(local, ("pipe",), total, "activations", exposed=False)
