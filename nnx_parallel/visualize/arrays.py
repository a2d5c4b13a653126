"""Draws the blocks of an array, and labels each block with the devices that hold it."""

import colorsys
import itertools
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding
from rich import box
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from nnx_parallel.drawing import Colour, Picture, fill
from nnx_parallel.precision import array_bytes, format_bytes
from nnx_parallel.sharding.specs import dim_axes

# The colour of a block that every device holds.
_WHOLE: Colour = (0xD9, 0xDF, 0xE5)
# Colours for small meshes; `device_colour` makes the colours for larger ones.
_FEW = (0x2F6DB5, 0xE38B3A, 0x2E7D57, 0xC84B50, 0x8A63A8, 0x5FB0B7, 0xE2C04B, 0x8C6A55)


class ShardMap:
    """The blocks of a concrete or abstract array, along all sharded dims.

    Attributes:
        name: The array's path, or ``array``.
        shape: The global shape as text.
        dtype: The name of the dtype.
        spec: The sharding as text.
        dims: The dims that are drawn. The last of them is drawn as columns, and all
            others as rows.
        starts: For each drawn dim, the positions at which blocks begin.
        blocks: The device ids of each block, row by row.
        devices: Ids of the devices that hold a part of the array, ascending.
        bytes_per_device: Bytes of the array on each of these devices.
        is_whole: True if every device holds the complete array.
        caption: A description of rows and columns, followed by the notes.
        notes: Facts that the blocks do not show.

    Raises:
        TypeError: If the array has no sharding.
    """

    def __init__(self, x: Any, name: str = "array") -> None:
        sharding = getattr(x, "sharding", None)
        if sharding is None:
            raise TypeError(
                f"`{name}` is a {type(x).__name__} without a sharding. Place it first, "
                "for example with shard(tree, rules, mesh)."
            )
        shape = tuple(x.shape)
        # For each device of all processes, the position at which its shard begins. No
        # values are read, so the array may be abstract.
        held = {
            device.id: tuple(p.indices(n)[0] for p, n in zip(index, shape, strict=True))
            for device, index in sharding.devices_indices_map(shape).items()
        }
        # Split dims are found from the positions and not from the spec, because an axis
        # of size 1 does not split a dim, and not every sharding has a spec.
        starts = [sorted(set(along)) for along in zip(*held.values(), strict=True)]
        split = [d for d, along in enumerate(starts) if len(along) > 1]
        # Sharded dims come first, because all of them must be drawn. Otherwise a block
        # would stand for several shards. Large dims come next.
        order = sorted(range(len(shape)), key=lambda d: (d not in split, -shape[d], d))
        self.name, self.dtype = name, str(x.dtype)
        self.shape = " \u00d7 ".join(map(str, shape)) or "scalar"
        self.dims = tuple(sorted(order[: max(2, len(split))]))
        self.spec = _spec_text(sharding, len(held))
        self.starts = [starts[d] for d in self.dims]
        self.devices = sorted(held)
        self.bytes_per_device = array_bytes(sharding.shard_shape(shape), x.dtype)
        self.is_whole = not split
        grid: dict[tuple[int, ...], list[int]] = {}
        # Ids are ascending, so that `ids_text` can abbreviate runs of ids.
        for device in self.devices:
            grid.setdefault(tuple(held[device][d] for d in self.dims), []).append(
                device
            )
        blocks = [tuple(grid[key]) for key in itertools.product(*self.starts)]
        # An array with one dim is drawn as one row, and a scalar as one block.
        width = len(self.starts[-1]) if self.dims else 1
        self.blocks = [blocks[i : i + width] for i in range(0, len(blocks), width)]
        self.notes = self._notes(range(len(shape)))
        axes = [()] * len(shape)
        if isinstance(sharding, NamedSharding):  # only this type has named axes
            axes = dim_axes(sharding.spec, len(shape))
        shown = []
        for d in self.dims:
            over = f" over {' + '.join(axes[d])}" if axes[d] else ""
            parts = f" in {len(starts[d])}{over}" if d in split else ", whole"
            shown.append(f"dim {d} of {shape[d]}{parts}")
        rows, columns = " \u00d7 ".join(shown[:-1]), "".join(shown[-1:])
        words = [f"rows: {rows}"] * bool(rows) + [f"columns: {columns}"] * bool(columns)
        self.caption = " · ".join(words + self.notes)

    def _notes(self, dims: Sequence[int]) -> list[str]:
        # The caption already says which of the drawn dims are not split.
        whole = [d for d in dims if d not in self.dims]
        notes = [f"not shown: {_dims(whole)}, whole"] if whole else []
        if self.is_whole and len(self.devices) > 1:
            notes.append("every device holds all of it")
        elif any(len(ids) > 1 for row in self.blocks for ids in row):
            # All sharded dims are drawn, so devices of the same block hold copies.
            notes.append("devices of a block hold the same copy")
        return notes

    def colour(self, ids: Sequence[int]) -> Colour:
        """Returns a block's colour: its first device's, or grey for a whole array."""
        # The colour depends on the device and not on the block's position, so that a
        # device has the same colour in every array of a table.
        index = self.devices.index(ids[0])
        return _WHOLE if self.is_whole else device_colour(index, len(self.devices))


def _dims(dims: Sequence[int]) -> str:
    return f"dim{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}"


def _spec_text(sharding: Any, num_devices: int) -> str:
    if num_devices == 1:
        return "on one device"
    if isinstance(sharding, NamedSharding):
        entries = ", ".join(map(repr, sharding.spec))
        return f"P({entries})" if any(sharding.spec) else "replicated"
    return type(sharding).__name__


def ids_text(ids: Sequence[int]) -> str:
    """Formats device ids, with runs of ids abbreviated.

    Example:
        >>> ids_text([0, 1, 2, 3, 8, 10, 11])
        '0-3, 8, 10, 11'
    """
    texts = []
    # Within a run, the difference between an id and its index is constant.
    for _, run in itertools.groupby(enumerate(ids), lambda at: at[1] - at[0]):
        first, *others = (i for _, i in run)
        # A range of two ids would not be shorter, so two ids are written out.
        is_range = len(others) > 1
        texts += [f"{first}-{others[-1]}"] if is_range else map(str, (first, *others))
    return ", ".join(texts)


def elided(count: int, limit: int) -> list[int | None]:
    """Returns indices of the rows or columns to draw; ``None`` is an ellipsis.

    Example:
        >>> elided(9, 5)
        [0, 1, None, 7, 8]
    """
    if count <= limit:
        return list(range(count))
    # The ellipsis is one of the `limit` entries.
    head = limit // 2
    return [*range(head), None, *range(count - (limit - 1 - head), count)]


def device_colour(index: int, count: int) -> Colour:
    """Returns the colour of the device at ``index`` among ``count`` devices."""
    if count <= len(_FEW):
        red, green, blue = _FEW[index].to_bytes(3)
        return red, green, blue
    # Neighbouring hues differ in lightness, so that they can be told apart.
    lightness = (0.42, 0.62)[index % 2]
    red, green, blue = colorsys.hls_to_rgb(0.58 + index / count, lightness, 0.5)
    return round(255 * red), round(255 * green), round(255 * blue)


def array_picture(shards: ShardMap) -> Picture:
    """Draws the blocks of one array, with the devices that hold each block."""
    devices = f"{len(shards.devices)} device{'s' if len(shards.devices) > 1 else ''}"
    held = f"{format_bytes(shards.bytes_per_device)} on each of {devices}"
    summary = f"{shards.shape} {shards.dtype} · {shards.spec} · {held}"
    table = _blocks(shards, rows=16, columns=16)
    return Picture(
        shards.name, Group(Text(summary), table, Text(shards.caption, style="dim"))
    )


def tree_picture(kind: str, maps: Sequence[ShardMap]) -> Picture:
    """Draws arrays as a table with one row each; the last column has the blocks."""
    names = ("array", "shape", "dtype", "sharding")
    columns = [Column(name, vertical="middle") for name in names]
    columns += [Column("bytes/device", justify="right", vertical="middle")]
    table = Table(*columns, "devices", show_lines=True)
    for shards in maps:
        held = format_bytes(shards.bytes_per_device)
        blocks = _blocks(shards, rows=4, columns=8, is_boxed=False)
        table.add_row(
            shards.name, shards.shape, shards.dtype, shards.spec, held, blocks
        )
    per_device = format_bytes(sum(shards.bytes_per_device for shards in maps))
    # Arrays of one tree may be on different numbers of devices.
    devices = max(len(shards.devices) for shards in maps)
    title = f"{kind}: {len(maps)} arrays, {per_device} on each of {devices} devices"
    return Picture(title, table)


def _blocks(
    shards: ShardMap, rows: int, columns: int, *, is_boxed: bool = True
) -> Table:
    """Draws a cell for each block; leaves out middle rows or columns if too many."""
    labels = [ids_text(ids) for row in shards.blocks for ids in row]
    width = max(3 if is_boxed else 1, *map(len, labels)) + 2
    # This is the number of columns with borders that fit into 99 characters. It is at
    # least 3, for the first column, the ellipsis and the last column.
    fitting = max(3, min(columns, 99 // (width + 1)))
    table = Table(
        box=box.SQUARE if is_boxed else None,
        show_header=False,
        show_lines=is_boxed,
        padding=0,
        pad_edge=False,
    )
    shown = elided(len(shards.blocks[0]), fitting)
    for row in elided(len(shards.blocks), rows):
        table.add_row(*(_cell(shards, row, column, width) for column in shown))
    return table


def _cell(shards: ShardMap, row: int | None, column: int | None, width: int) -> Text:
    if row is None or column is None:
        return Text("…".center(width))
    ids = shards.blocks[row][column]
    return Text(ids_text(ids).center(width), style=fill(shards.colour(ids)))
