"""One device's part of a candidate: rows, stages, and bytes of an activation."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from nnx_parallel.pipeline.run import PipelineSchedule
from nnx_parallel.plan.candidates import Candidate
from nnx_parallel.plan.costs import Facts
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.moments import Size
from nnx_parallel.plan.parts import sizes_by_name
from nnx_parallel.precision import array_bytes
from nnx_parallel.schedules.schedules import Fixed, Schedule
from nnx_parallel.schedules.simulate import Simulation
from nnx_parallel.schedules.table import Buffers, plan_buffers
from nnx_parallel.sharding.model import flatten
from nnx_parallel.sharding.names import as_tuple
from nnx_parallel.state import StatePlan


class Local:
    """What a device has of a candidate; the base of its formulas.

    Args:
        facts: Of the parts, in the candidate's precision.
        candidate: How a step is run.
        topology: On which devices.
        plan: Where the state lives under its strategy.
    """

    def __init__(
        self, facts: Facts, candidate: Candidate, topology: Topology, plan: StatePlan
    ) -> None:
        self.facts, self.parts = facts, facts.parts
        self.candidate, self.topology = candidate, topology
        self.plan, self.layout, self.mesh = plan, plan.layout, plan.layout.mesh
        self.per_row = facts.rows[candidate.remat]
        self.microbatches = candidate.num_microbatches
        self.dtype = jnp.dtype(self.parts.compute_dtype)
        self.width = self.dtype.itemsize
        claims = self.layout.claims
        self.rows = self.parts.num_rows / self.size(claims.batch) / self.microbatches
        self.stages = self.size(("pipe",))
        self.is_cpu = topology.hardware.platform == "cpu"
        # Path, shape and placement of each trained parameter.
        trained = flatten(plan.abstract.params)
        self.params = [(path, x, plan.placements[path]) for path, x in trained.items()]
        staged = [x.shape[0] for _, x, place in self.params if place.is_staged]
        stacked = [x.shape[0] for _, x, place in self.params if place.is_stacked]
        # Of the stack that a pipeline cuts; else of the longest.
        self.num_layers = max(staged or stacked, default=1)
        self.simulation, self.buffers = self._schedule(claims.execution)

    def _schedule(self, execution: Any) -> tuple[Simulation | None, Buffers | None]:
        if not isinstance(execution, PipelineSchedule):
            return None, None
        # Of a table of one's own there is only one size, and it has no hash.
        is_fixed = isinstance(execution.schedule, Fixed)
        make = _simulation.__wrapped__ if is_fixed else _simulation
        sizes = self.stages, self.microbatches, self.num_layers
        return make(execution.schedule, *sizes)

    def size(self, axes: tuple[str, ...]) -> int:
        """Devices along some axes; 1 along those that the mesh lacks."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in axes)

    def shard_bytes(self, shape: tuple[int, ...], spec: P, dtype: Any) -> float:
        """A device's part of an array."""
        return array_bytes(self.layout.sharding(spec).shard_shape(shape), dtype)

    def local_bytes(self, size: Size) -> float:
        """Bytes of rows of one microbatch on a device.

        Of what a product needs whole along the positions that `tensor` splits: all of
        it, of which the rings of ``overlap`` have a part at a time.
        """
        parts, (along, others) = self._named_parts(size), self._split_sequence
        is_long = self.per_row.positions in size.dims
        if size.kind == "whole":
            is_gathered = is_long and parts == 1 and along > others
            is_gathered &= self.layout.claims.overlap is None
            return size.num_bytes * self.rows / others * is_gathered
        if is_long or not size.dims:
            parts *= others if parts > 1 else along
        if size.is_stacked:
            parts *= self.stages
        return size.num_bytes * self.rows / parts

    def _named_parts(self, size: Size) -> int:
        """Devices that split a dim by its name, or else by its size."""
        dims = size.dims[:-1] if size.name else size.dims
        return max(
            count if name == size.name or not sizes.isdisjoint(dims) else 1
            for name, count, sizes in (("", 1, set()), *self._split_sizes)
        )

    @functools.cached_property
    def _split_sizes(self) -> list[tuple[str, int, set[int]]]:
        """Names of dims, devices that split these, and the sizes that these have."""
        claims, named = self.layout.claims, sizes_by_name(self.facts.arrays)
        counts = {name: self.size(as_tuple(a)) for name, a in claims.logical.items()}
        # A dim of the model's width may be any: it is not told by its size.
        width = {self.per_row.width}
        return [
            (name, count, named.get(name, set()) - width)
            for name, count in counts.items()
            if count > 1
        ]

    @functools.cached_property
    def _split_sequence(self) -> tuple[int, int]:
        """Devices that split positions; the second of what `tensor` splits already."""
        along = as_tuple(self.layout.claims.activations.get("seq"))
        others = tuple(axis for axis in along if axis != "tensor")
        return self.size(along), self.size(others)

    @functools.cached_property
    def hidden_bytes(self) -> float:
        """One microbatch's residual stream on a device, whole along the sequence."""
        context = self.size(self.layout.sequence_axes)
        elements = self.rows * self.per_row.positions * self.per_row.width / context
        return elements * self.width


@functools.lru_cache(maxsize=1024)
def _simulation(
    schedule: Schedule, stages: int, microbatches: int, num_layers: int
) -> tuple[Simulation, Buffers]:
    table = schedule.table(stages, microbatches)
    return table.simulate(num_layers=num_layers), plan_buffers(table)
