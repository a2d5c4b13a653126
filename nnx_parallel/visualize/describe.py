"""The table that explains a placement: every array, its specs, and why."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from nnx_parallel.mesh import axes_across_processes
from nnx_parallel.precision import Precision, array_bytes, format_bytes
from nnx_parallel.sharding.layout import Layout, Placement
from nnx_parallel.sharding.model import (
    Path,
    as_transformation,
    nest,
    optimizer_specs,
    owner_of,
    place_model,
)
from nnx_parallel.sharding.names import (
    ArrayInfo,
    array_info,
    dotted,
    is_spec,
    path_of,
    variables_of,
)


@dataclass(frozen=True, kw_only=True)
class ArrayRow:
    """One array of a `Description`.

    Attributes:
        info: Path, shape, dtype and names.
        placement: The four specs and the reason.
        bytes_per_device: Of the array as stored.
    """

    info: ArrayInfo
    placement: Placement
    bytes_per_device: int


class OptimizerRow(NamedTuple):
    """One array of the optimizer state.

    Attributes:
        path: Dotted path in the state.
        shape: Its shape.
        spec: Where it lives.
        bytes_per_device: Of the array as stored.
        why_whole: Why every device holds all of it, though the optimizer state of its
            parameter is split; empty if that is not so.
    """

    path: str
    shape: tuple[int, ...]
    spec: P
    bytes_per_device: int
    why_whole: str


@dataclass(frozen=True, kw_only=True)
class Description:
    """Where every array of a model lives and why; printed as a table.

    Attributes:
        layout: The layout that was described.
        rows: One entry for each array of the model.
        optimizer_rows: One entry for each array of the optimizer state; empty unless
            an optimizer was given.
        params_bytes: Parameters on each device, as stored.
        gradients_bytes: Their gradients on each device.
        optimizer_bytes: Optimizer state on each device.
        average_bytes: Moving average of the parameters on each device, if one is kept.
    """

    layout: Layout
    rows: tuple[ArrayRow, ...]
    optimizer_rows: tuple[OptimizerRow, ...]
    params_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    average_bytes: int = 0

    @property
    def replicated(self) -> tuple[ArrayRow, ...]:
        """Parameters of which every device holds a whole copy, the largest first."""
        whole = [
            r for r in self.rows if r.info.is_param and not any(r.placement.stored)
        ]
        return tuple(sorted(whole, key=lambda row: -row.bytes_per_device))

    @property
    def replicated_optimizer(self) -> tuple[OptimizerRow, ...]:
        """Optimizer state that stays whole and need not, the largest first.

        Single numbers are left out, and what follows a parameter whose optimizer state
        no rule splits: `replicated` and ``why`` tell of it.
        """
        whole = [row for row in self.optimizer_rows if row.why_whole]
        return tuple(sorted(whole, key=lambda row: -row.bytes_per_device))

    @property
    def title(self) -> str:
        """The mesh, and which of its axes span processes."""
        mesh = " * ".join(f"{a}={n}" for a, n in self.layout.mesh.shape.items())
        across = axes_across_processes(self.layout.mesh)
        return f"mesh {mesh}" + (
            f" (across processes: {', '.join(across)})" if across else ""
        )

    def table(self) -> Table:
        """The rows as a rich table."""
        table = Table()
        for column in ("path", "shape", "dtype", "stored", "used", "gradient"):
            table.add_column(column)
        table.add_column("optimizer")
        table.add_column("bytes/device", justify="right")
        table.add_column("why")
        for row in self.rows:
            place = row.placement
            specs = (place.stored, place.used, place.gradient, place.optimizer)
            # Other variables have no gradient, and no optimizer state.
            shown = specs if row.info.is_param else (place.stored, place.used, "", "")
            table.add_row(
                row.info.path,
                " ".join(map(str, row.info.shape)),
                str(row.info.dtype),
                *(_short(spec) for spec in shown),
                f"{row.bytes_per_device:,}",
                place.reason,
            )
        return table

    def summary(self) -> str:
        """Totals per device, and the largest arrays left replicated."""
        totals = {"parameters": self.params_bytes, "gradients": self.gradients_bytes}
        if self.optimizer_rows:
            totals["optimizer state"] = self.optimizer_bytes
        if self.average_bytes:
            totals["moving average"] = self.average_bytes
        shown = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in totals.items()
        )
        lines = [f"per device: {shown}"]
        # On one device every array is whole: there is nothing to report.
        if self.layout.mesh.size > 1:
            lines += _largest(
                [
                    (r.info.path, r.info.shape, r.bytes_per_device, r.placement.reason)
                    for r in self.replicated
                ]
            )
            lines += _largest(
                [
                    (f"optimizer state {path}", shape, size, why)
                    for path, shape, _, size, why in self.replicated_optimizer
                ]
            )
        return "\n".join(lines)

    def __rich__(self) -> Group:
        return Group(Text(self.title), self.table(), Text(self.summary()))

    def __str__(self) -> str:
        # In a notebook rich would display the table instead of writing it.
        console = Console(file=io.StringIO(), width=180, force_jupyter=False)
        with console.capture() as capture:
            console.print(self.table())
        return f"{self.title}\n{capture.get()}{self.summary()}"


def _largest(rows: Sequence[tuple], count: int = 5) -> list[str]:
    """The first of some replicated arrays, and what the others add up to."""
    lines = [
        f"replicated: {path} {shape} {format_bytes(size)} ({reason})"
        for path, shape, size, reason in rows[:count]
    ]
    if rest := rows[count:]:
        whole = format_bytes(sum(size for _, _, size, _ in rest))
        lines.append(f"replicated: {len(rest)} smaller ones, {whole} in all")
    return lines


def _short(spec: P | str) -> str:
    if isinstance(spec, str):
        return spec
    parts = [
        "-" if e is None else e if isinstance(e, str) else "+".join(e) for e in spec
    ]
    return " ".join(parts) if any(spec) else "whole"


def _shard_bytes(layout: Layout, shape: tuple, dtype: Any, spec: P) -> int:
    return array_bytes(layout.sharding(spec).shard_shape(shape), dtype)


def _is_floating(info: ArrayInfo) -> bool:
    return jnp.issubdtype(info.dtype, jnp.floating)


def describe_model(
    abstract: nnx.Module,
    layout: Layout,
    optimizer: object = None,
    wrt: Any = nnx.Param,
    *,
    precision: Precision | None = None,
    keeps_average: bool = False,
) -> Description:
    """Describes a model under a layout.

    Args:
        abstract: An abstract model; it gets its placements written into its metadata.
        layout: The layout.
        optimizer: What a Trainer takes as optimizer, for its state's bytes.
        wrt: Filter of the Variables that are trained: these have gradients.
        precision: The dtypes of parameters and gradients; ``None`` leaves them as the
            model makes them.
        keeps_average: Whether a moving average of the parameters is kept.
    """
    trained = {path for path, _ in nnx.to_flat_state(nnx.state(abstract, wrt))}
    placements = place_model(abstract, layout)
    rows, stored, gradients, average = [], {}, 0, 0
    for path, variable in variables_of(abstract):
        info, place = array_info(path, variable), placements[path]
        # In the dtype in which the state will hold it.
        if precision and (info.is_param or path in trained) and _is_floating(info):
            info = dataclasses.replace(info, dtype=precision.params or info.dtype)
        size = _shard_bytes(layout, info.shape, info.dtype, place.stored)
        rows.append(ArrayRow(info=info, placement=place, bytes_per_device=size))
        if path in trained:
            stored[path] = jax.ShapeDtypeStruct(info.shape, info.dtype)
            dtype = precision.gradient_dtype(info.dtype) if precision else info.dtype
            gradients += _shard_bytes(layout, info.shape, dtype, place.gradient)
            # At least float32, as the state keeps it: in bfloat16 there is no room
            # for small moves.
            dtype = jnp.promote_types(info.dtype, jnp.float32)
            average += _shard_bytes(layout, info.shape, dtype, place.stored)
    optimizer_rows = _optimizer_rows(abstract, layout, optimizer, stored)
    return Description(
        layout=layout,
        rows=tuple(rows),
        optimizer_rows=optimizer_rows,
        params_bytes=sum(r.bytes_per_device for r in rows if r.info.is_param),
        gradients_bytes=gradients,
        optimizer_bytes=sum(row.bytes_per_device for row in optimizer_rows),
        average_bytes=average if keeps_average else 0,
    )


def _optimizer_rows(
    abstract: nnx.Module,
    layout: Layout,
    optimizer: object,
    values: dict[Path, jax.ShapeDtypeStruct],
) -> tuple[OptimizerRow, ...]:
    if optimizer is None:
        return ()
    params = {path: v for path, v in variables_of(abstract) if path in values}
    tx = as_transformation(optimizer, abstract)
    # By shapes, for any transformation: none of Optax's is known by name.
    state = jax.eval_shape(tx.init, nest(values))
    shapes = {path: tuple(value.shape) for path, value in values.items()}
    # Written there by `place_model`.
    placements = {path: v.get_metadata()["placement"] for path, v in params.items()}
    specs = optimizer_specs(state, shapes, placements, layout)

    def row(path: tuple, leaf: Any, spec: P) -> OptimizerRow:
        # docs/library-notes.md, "Optax"
        shape, owner = tuple(leaf.shape), owner_of(path, shapes)
        why_whole = ""
        # Counters are whole everywhere, and cost nothing.
        if not any(spec) and math.prod(shape) > 1:
            if owner is None:
                why_whole = "belongs to no parameter"
            elif any(placements[owner].optimizer):
                # A factor of Adafactor's, say, that lacks the dim which is split.
                why_whole = f"follows no split dim of {dotted(owner)}"
        return OptimizerRow(
            path=path_of(path),
            shape=shape,
            spec=spec,
            bytes_per_device=_shard_bytes(layout, shape, leaf.dtype, spec),
            why_whole=why_whole,
        )

    leaves = jax.tree_util.tree_leaves_with_path(state)
    # Specs are leaves here: JAX would take them apart.
    flat_specs = jax.tree.leaves(specs, is_leaf=is_spec)
    return tuple(
        row(path, leaf, spec)
        for (path, leaf), spec in zip(leaves, flat_specs, strict=True)
    )
