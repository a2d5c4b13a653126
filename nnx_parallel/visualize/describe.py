"""Explains the placement of a model by a table with each array, specs and reason."""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from nnx_parallel.drawing import Picture, as_html
from nnx_parallel.errors import ParallelWarning, warn_user
from nnx_parallel.layers.recipe import describe_products
from nnx_parallel.mesh import axes_across_processes
from nnx_parallel.precision import Precision, array_bytes, format_bytes, sum_dtype
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import Path, nest, place_model
from nnx_parallel.sharding.names import ArrayInfo, dotted, path_of
from nnx_parallel.sharding.nnx_arrays import array_info, variables_of
from nnx_parallel.sharding.offload import HOST
from nnx_parallel.sharding.optimizer import as_transformation, optimizer_specs, owner_of
from nnx_parallel.sharding.placement import Placement, axes_of
from nnx_parallel.sharding.rules import RULE_REASONS, FSDPRules
from nnx_parallel.sharding.specs import is_spec


class OptimizerRow(NamedTuple):
    """One array of the optimizer state.

    Attributes:
        path: Path of the array in the optimizer state.
        shape: Global shape.
        spec: The array's sharding.
        bytes_per_device: Bytes of each device's shard, in device or host memory.
        why_whole: The reason why every device holds the complete array although the
            optimizer state of its parameter is split; empty for any other array.
        memory_kind: ``"device"``, or ``"pinned_host"`` for host memory.
        owner: Path of the parameter to which the array belongs, or empty.
    """

    path: str
    shape: tuple[int, ...]
    spec: P
    bytes_per_device: int
    why_whole: str
    memory_kind: str = "device"
    owner: str = ""

    @property
    def is_on_host(self) -> bool:
        """True if the array is in host memory between updates."""
        return self.memory_kind == HOST


def shard_bytes(layout: Layout, shape: tuple, dtype: Any, spec: P) -> int:
    """Returns the bytes of each device's shard."""
    return array_bytes(layout.sharding(spec).shard_shape(shape), dtype)


def optimizer_rows_of(
    state: optax.OptState,
    params: dict[Path, jax.ShapeDtypeStruct],
    placements: dict[Path, Placement],
    layout: Layout,
) -> tuple[OptimizerRow, ...]:
    """Makes the rows of an optimizer's state, given the trained parameters."""
    shapes = {path: tuple(value.shape) for path, value in params.items()}
    specs = optimizer_specs(state, shapes, placements, layout)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    # Specs must be leaves, because JAX would flatten them as tuples.
    flat_specs = jax.tree.leaves(specs, is_leaf=is_spec)
    rows = []
    for (path, leaf), spec in zip(leaves, flat_specs, strict=True):
        # See docs/library-notes.md, "Optax".
        owner, why_whole = owner_of(path, shapes), ""
        # Counters are replicated too, but they need almost no memory.
        if not any(spec) and leaf.size > 1:
            if owner is None:
                why_whole = "belongs to no parameter"
            elif any(placements[owner].optimizer):
                # For example, a factor of Adafactor may lack the split dim.
                why_whole = f"lacks the split dim of {dotted(owner)}"
        size = shard_bytes(layout, leaf.shape, leaf.dtype, spec)
        sharding = getattr(leaf, "sharding", None)
        kind = getattr(sharding, "memory_kind", None) or "device"
        rows.append(
            OptimizerRow(
                path_of(path),
                leaf.shape,
                spec,
                size,
                why_whole,
                kind,
                dotted(owner) if owner else "",
            )
        )
    return tuple(rows)


class ArrayRow(NamedTuple):
    """One array of a model, and its bytes as stored."""

    info: ArrayInfo
    placement: Placement
    bytes_per_device: int
    memory: str = "device"  # memory kind, and that of the optimizer state if different


@dataclass(frozen=True, kw_only=True)
class Description:
    """The placement of every array of a model, with reasons; printed as a table.

    Attributes:
        layout: The layout that is described.
        rows: The arrays of the model.
        optimizer_rows: The arrays of the optimizer state; empty without an optimizer.
        params_bytes: Bytes of stored parameters on each device.
        gradients_bytes: Bytes of the parameters' gradients on each device.
        optimizer_bytes: Bytes of each device's optimizer state, in device memory and
            host memory together.
        host_bytes: The part of ``optimizer_bytes`` that is in host memory.
        average_bytes: Bytes of the moving average of parameters on each device; 0 if no
            average is kept.
        notes: Notes on transfers that the placements of arrays do not show.
    """

    layout: Layout
    rows: tuple[ArrayRow, ...]
    optimizer_rows: tuple[OptimizerRow, ...]
    params_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    average_bytes: int = 0
    host_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def replicated(self) -> tuple[ArrayRow, ...]:
        """Parameters with a complete copy on every device, the largest first."""
        params = (row for row in self.rows if row.info.is_param)
        rows = (row for row in params if not any(row.placement.stored))
        return tuple(sorted(rows, key=lambda row: -row.bytes_per_device))

    @property
    def replicated_optimizer(self) -> tuple[OptimizerRow, ...]:
        """Replicated optimizer state that could be sharded, the largest first.

        Single numbers are left out. Arrays that belong to a parameter whose optimizer
        state is not split are left out too; see `replicated` for these parameters.
        """
        rows = (row for row in self.optimizer_rows if row.why_whole)
        return tuple(sorted(rows, key=lambda row: -row.bytes_per_device))

    @property
    def title(self) -> str:
        """The mesh, and the mesh axes that span several processes."""
        mesh = " * ".join(f"{a}={n}" for a, n in self.layout.mesh.shape.items())
        across = ", ".join(axes_across_processes(self.layout.mesh))
        return f"mesh {mesh}" + (f" (across processes: {across})" if across else "")

    def _cells(self) -> dict[str, list[str]]:
        """Returns the table's columns by name, with a cell for each array."""
        cells: dict[str, list[str]] = {name: [] for name in _COLUMNS}
        for info, place, size, memory in self.rows:
            specs = (place.stored, place.used, place.gradient, place.optimizer)
            shown = list(map(_short, specs))
            if not info.is_param:  # only parameters have gradients and optimizer state
                shown[2:] = "", ""
            shape, dtype = " ".join(map(str, info.shape)), str(info.dtype)
            why = "; ".join(filter(None, (place.reason, *map(_of_one, place.absent))))
            row = (info.path, shape, dtype, *shown, memory, f"{size:,}", why)
            for name, cell in zip(_COLUMNS, row, strict=True):
                cells[name].append(cell)
        if not self.host_bytes:
            del cells["memory"]  # everything is in device memory
        return cells

    def table(self, width: int | None = None) -> Table:
        """Returns the rows as a rich table.

        Args:
            width: Number of characters in a line. If the columns do not fit, the least
                important columns are left out, and the caption names them. ``None``
                keeps all columns.
        """
        cells = self._cells()
        widths = {name: max(map(len, (name, *x))) for name, x in cells.items()}
        # Only the reason may be wrapped, because it is prose.
        reason, widths["why"] = widths["why"], min(widths["why"], _LEAST_WHY)
        # Each column also needs two spaces and a border.
        spare = math.inf if width is None else width - 1 - 3 * len(cells)
        hidden = []
        for name in filter(cells.__contains__, _DROPPED):
            if sum(widths.values()) <= spare:
                break
            hidden.append(name)
            del cells[name], widths[name]
            spare += 3
        left = spare - sum(widths.values())
        # If the table is still too wide, paths are wrapped.
        flexible, most = ("why", reason) if "why" in cells else ("path", widths["path"])
        widths[flexible] = int(max(1, min(most, widths[flexible] + left)))
        table = Table(caption_justify="left", caption_style="")
        if hidden:
            table.caption = f"not shown in {width} columns: {', '.join(hidden)}"
        for name, each in widths.items():
            justify = "right" if name == "bytes/device" else "left"
            table.add_column(name, justify=justify, overflow="fold", width=each)
        for row in zip(*cells.values(), strict=True):
            table.add_row(*row)
        return table

    @property
    def per_device(self) -> str:
        """The bytes on each device as text."""
        totals = {"parameters": self.params_bytes, "gradients": self.gradients_bytes}
        if self.optimizer_rows:
            totals["optimizer state"] = self.optimizer_bytes - self.host_bytes
        if self.average_bytes:
            totals["moving average"] = self.average_bytes
        if self.host_bytes:
            totals["in the host's memory, optimizer state"] = self.host_bytes
        return ", ".join(f"{name} {format_bytes(x)}" for name, x in totals.items())

    def summary(self) -> str:
        """Returns totals per device, notes, and the largest replicated arrays."""
        lines = [f"per device: {self.per_device}"]
        # On one device, no array is sharded, so there is nothing more to report.
        if self.layout.mesh.size > 1:
            arrays = [row[:2] for row in self.rows]
            idle = idle_parts(self.layout, arrays)
            lines += [f"no effect: {finding}" for finding, _ in idle]
            lines += [" ".join(x) for x in _left_whole(self.layout, arrays)]
            lines += self.notes
            lines += _largest(
                [(i.path, i.shape, size, p.reason) for i, p, size, _ in self.replicated]
            )
            lines += _largest(
                [
                    (f"optimizer state {path}", shape, size, why)
                    for path, shape, _, size, why, *_ in self.replicated_optimizer
                ]
            )
        return "\n".join(lines)

    def picture(self) -> Picture:
        """Returns a picture of the table and the summary, as wide as the terminal."""
        # In a notebook, a file or a page, the width is unknown, and 120 is used.
        width = shutil.get_terminal_size((120, 24)).columns
        return Picture(self.title, _Body(self), columns=width, svg_columns=180)

    def __rich__(self) -> Group:
        return Group(Text(self.title), _Body(self))

    def __str__(self) -> str:
        return str(self.picture())

    def __repr__(self) -> str:
        size = format_bytes(self.params_bytes)
        return f"<{len(self.rows)} arrays on {self.title}, {size} of parameters each>"

    def _repr_html_(self) -> str:
        cells = self._cells()
        rows = [*zip(*cells.values(), strict=True)]
        notes = self.summary().splitlines()
        return as_html([*cells], rows, title=self.title, notes=notes)


@dataclass(frozen=True)
class _Body:
    """The table and summary of a description, in the width that rich provides."""

    description: Description

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield self.description.table(options.max_width)
        yield Text(self.description.summary())


_COLUMNS = (
    "path", "shape", "dtype", "stored", "used", "gradient", "optimizer",
    "memory", "bytes/device", "why",
)  # fmt: skip
_DROPPED = ("dtype", "gradient", "optimizer", "used", "shape", "memory", "why")
_LEAST_WHY = 24


def _largest(rows: Sequence[tuple]) -> list[str]:
    """Returns lines for the first five replicated arrays, and one for all others."""
    lines = [
        f"replicated: {path} {shape} {format_bytes(size)} ({reason})"
        for path, shape, size, reason in rows[:5]
    ]
    if rest := rows[5:]:
        size = format_bytes(sum(size for _, _, size, _ in rest))
        lines.append(f"replicated: {len(rest)} smaller ones, {size} in all")
    return lines


def _of_one(axis: str) -> str:
    return f"axis {axis!r} has size one here"


def _short(spec: P) -> str:
    parts = (
        "-" if e is None else e if isinstance(e, str) else "+".join(e) for e in spec
    )
    return " ".join(parts) if any(spec) else "whole"


def idle_parts(
    layout: Layout, arrays: Sequence[tuple[ArrayInfo, Placement]]
) -> Iterator[tuple[str, str]]:
    """Yields strategies that split no array of a model, with the remedy for each."""
    # The spec of an array's optimizer state contains all mesh axes that occur in any of
    # the array's four specs.
    used = {axis for _, p in arrays for axis in axes_of(p.optimizer)}
    for part in layout.claims.parts or (layout.claims,):
        sizes = {a: layout.mesh.shape[a] for a in part.axis_sizes if a not in used}
        sizes = {axis: size for axis, size in sizes.items() if size > 1}
        claims_arrays = part.logical or part.zero or part.rules
        is_of_activations = part.activations and not claims_arrays
        if part.execution is not None and 1 in part.axis_sizes.values():
            yield (
                f"{part.owner} has one stage: nothing is spread or pipelined.",
                "Give it at least 2 stages, or leave it out.",
            )
        if any(zero.rules.axis in sizes for zero in part.zero):
            # Arrays that are not reported are small, or a rule replicates them on
            # purpose.
            large = [(i, p) for i, p in arrays if i.size >= FSDPRules.min_size]
            whole = [(i, p) for i, p in large if "divides no free dim" in p.reason]
            for info, place in sorted(whole, key=lambda row: -row[0].size)[:1]:
                yield (
                    f"{part.owner} splits no parameter: each device holds the whole "
                    f"training state. The largest is `{info.path}` {info.shape}: "
                    f"{place.reason}.",
                    "Pad a dim of the large ones, or use DataParallel.",
                )
        # Whether a layer or `constrain` splits arrays is unknown before the model runs.
        elif sizes and not (part.batch or part.execution or is_of_activations):
            dims = ", ".join(map(repr, part.logical or sizes))
            across = " * ".join(f"{axis}={size}" for axis, size in sizes.items())
            yield (
                f"{part.owner} splits no parameter, because no dim has one of its "
                f"names: {dims}. The devices along {across} repeat the same work, so "
                f"each does {math.prod(sizes.values())} times its share.",
                f"{_NAME_THEM} FSDP() needs no names.",
            )


_NAME_THEM = (
    "Derive names, Trainer(..., names='auto', sample=batch); or name the dims by path: "
    "names=TRANSFORMER_NAMES, or names=PathNames(...) where these do not fit the model."
)
_LEAST_SHARE = 0.05


def _left_whole(
    layout: Layout, arrays: Sequence[tuple[ArrayInfo, Placement]]
) -> Iterator[tuple[str, str]]:
    """Yields matrices that tensor parallelism does not split, with the remedy.

    A share of less than 5 % is left out.
    """
    kernels = [(i, p) for i, p in arrays if len(i.shape) > 1 + p.is_stacked]
    # Adapters, lookup tables, the biases of heads and kernels into latents are left
    # out, because replicating them costs little.
    kernels = [(i, p) for i, p in kernels if i.kind == "Param"]
    kernels = [(i, p) for i, p in kernels if "latent" not in (i.names or ())]
    kernels = [(i, p) for i, p in kernels if not i.path.endswith(("embedding", "bias"))]
    flops = sum(i.flops for i, _ in kernels)
    for part in layout.claims.parts or (layout.claims,):
        axes = {a for a in part.axis_sizes if layout.mesh.shape[a] > 1}
        if not axes or "mlp" not in part.logical:
            continue
        # For an array that has a name but is not split, the table gives the reason.
        bare = [(i, p) for i, p in kernels if {*part.logical}.isdisjoint(i.names or ())]
        bare = [(i, p) for i, p in bare if not p.reason.startswith(RULE_REASONS)]
        whole = [i for i, p in bare if axes.isdisjoint(axes_of(p.used))]
        total = flops or sum(i.size for i, _ in kernels)
        share = sum(i.flops if flops else i.size for i in whole) / max(1, total)
        if _LEAST_SHARE < share < 1:  # `idle_parts` reports a share of 1
            whole.sort(key=lambda i: -i.size)
            shown = ", ".join(f"`{i.path}`" for i in whole[:3])
            yield (
                f"{part.owner} does not split {len(whole)} of {len(kernels)} matrices "
                f"({share:.0%} of all {'FLOPs' if flops else 'elements'}), such as "
                f"{shown}, because no dim has one of its names: "
                f"{', '.join(map(repr, part.logical))}.",
                "describe() gives the reasons." if flops else _NAME_THEM,
            )


def warn_idle_parts(
    model: nnx.Module, layout: Layout, placements: dict[Path, Placement]
) -> None:
    """Warns of matrices that a strategy does not split, or of an ignored mesh."""
    _warn_of_one_device(layout)
    found = variables_of(model)
    arrays = [(array_info(path, v), placements[path]) for path, v in found]
    for finding, remedy in (*idle_parts(layout, arrays), *_left_whole(layout, arrays)):
        warn_user(f"{finding} {remedy}", ParallelWarning)
    shardings = (v.get_metadata().get("out_sharding") for _, v in variables_of(model))
    if given := [x for x in shardings if isinstance(x, NamedSharding)]:
        warn_user(
            f"{len(given)} arrays of the model name their dims by a NamedSharding, "
            f"such as {given[0].spec} on {dict(given[0].mesh.shape)}. The spec is "
            "used, but the mesh is ignored: the strategy's mesh is "
            f"{dict(layout.mesh.shape)}.",
            ParallelWarning,
        )


def _warn_of_one_device(layout: Layout) -> None:
    """Warns if a strategy takes all devices but there is only one device."""
    claims = layout.claims
    if jax.device_count() > 1 or None not in claims.axis_sizes.values():
        return
    if not (claims.zero or claims.logical or claims.execution):
        return  # data parallelism over one device has the same result as one device
    platform = jax.default_backend()
    remedy = (
        "To try it on 8 simulated devices, call simulate_devices(8) before any code "
        "that uses a device"
    )
    if platform != "cpu":
        remedy = "Check which devices this process may use (CUDA_VISIBLE_DEVICES)"
    warn_user(
        f"{claims.owner} takes all devices, but JAX has found only one, of platform "
        f"{platform!r}: nothing is split. {remedy}. If one device is enough, set the "
        "sizes to 1.",
        ParallelWarning,
    )


def describe_model(
    abstract: nnx.Module,
    layout: Layout,
    optimizer: object = None,
    wrt: Any = nnx.Param,
    precision: Precision | None = None,
    *,
    keeps_average: bool = False,
    placements: dict[Path, Placement] | None = None,
    opt_state: Any = None,
) -> Description:
    """Describes a model under a layout.

    Args:
        abstract: An abstract model.
        layout: The layout.
        optimizer: An optimizer that a Trainer accepts, to count the bytes of its state.
        wrt: Filter of the Variables that are trained, which have gradients.
        precision: The dtypes of parameters and gradients; ``None`` keeps the model's
            dtypes.
        keeps_average: True if a moving average of the parameters is kept.
        placements: Placements of the model's arrays. By default they are computed, and
            written into the model's metadata.
        opt_state: Shapes of the optimizer's state, if they are known. Then the
            optimizer is not traced.
    """
    trained = {path for path, _ in variables_of(abstract, wrt)}
    placements = placements or place_model(abstract, layout)
    rows, stored, gradients, average = [], {}, 0, 0
    for path, variable in variables_of(abstract):
        info, place = array_info(path, variable), placements[path]
        is_floating = jnp.issubdtype(info.dtype, jnp.floating)
        # The training state will hold the array in this dtype.
        if precision and is_floating and (info.is_param or path in trained):
            info = replace(info, dtype=precision.params or info.dtype)
        size = shard_bytes(layout, info.shape, info.dtype, place.stored)
        rows.append(ArrayRow(info, place, size))
        if path in trained:
            stored[path] = jax.ShapeDtypeStruct(info.shape, info.dtype)
            dtype = precision.gradient_dtype(info.dtype) if precision else info.dtype
            gradients += shard_bytes(layout, info.shape, dtype, place.gradient)
            # The training state keeps the average in at least float32, because bfloat16
            # cannot represent small changes.
            dtype = sum_dtype(info.dtype)
            average += shard_bytes(layout, info.shape, dtype, place.stored)
    if optimizer is not None:
        # Only shapes are computed, which works for any transformation, even if it is
        # not from Optax.
        tx = as_transformation(optimizer, abstract)
        opt_state = jax.eval_shape(tx.init, nest(stored))
    optimizer_rows = optimizer_rows_of(opt_state, stored, placements, layout)
    on_host = {row.owner for row in optimizer_rows if row.is_on_host}
    rows = [
        row._replace(memory=f"device, optimizer: {HOST}")
        if row.info.path in on_host
        else row
        for row in rows
    ]
    return Description(
        layout=layout,
        rows=tuple(rows),
        optimizer_rows=optimizer_rows,
        params_bytes=sum(row.bytes_per_device for row in rows if row.info.is_param),
        gradients_bytes=gradients,
        optimizer_bytes=sum(row.bytes_per_device for row in optimizer_rows),
        average_bytes=average if keeps_average else 0,
        host_bytes=sum(
            row.bytes_per_device for row in optimizer_rows if row.is_on_host
        ),
        notes=(*_notes(abstract, layout), *_products(abstract, layout, precision)),
    )


def _products(
    model: nnx.Module, layout: Layout, precision: Precision | None
) -> tuple[str, ...]:
    recipe, mesh = precision and precision.products, layout.mesh
    if not recipe:
        return ()
    # A mesh may have no devices, because a description needs none.
    kind = mesh.devices.flat[0].device_kind if isinstance(mesh, Mesh) else ""
    return (describe_products(model, recipe, kind),)


def _notes(model: nnx.Module, layout: Layout) -> tuple[str, ...]:
    modules, run = list(nnx.iter_modules(model)), layout.claims.execution
    notes = [*run.describe(model, layout.mesh)] if run else []
    stock = [
        f"`{dotted(p)}`" for p, m in modules if isinstance(m, nnx.MultiHeadAttention)
    ]
    if layout.claims.sequence and stock:
        notes.append(
            f"gathered: the sequence, around {len(stock)} modules of Flax's "
            f"attention ({', '.join(stock[:5])}): each device holds the whole sequence "
            "there. With nnx_parallel.layers.attention, it stays split."
        )
    for path, module in modules:
        # This attribute of `MoE` is found by name, because this package does not import
        # the layers.
        if how := getattr(module, "describe_exchange", lambda _: "")(layout):
            notes.append(f"exchanged: tokens of `{dotted(path)}` {how}")
    return tuple(notes)
