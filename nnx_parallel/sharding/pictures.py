"""`visualize`: which device holds what, for terminals, notebooks and pages."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from nnx_parallel.sharding.blocks import (
    ShardMap,
    elided,
    hex_of,
    ids_text,
    ink_on,
    shard_map_of,
    shown_bytes,
)
from nnx_parallel.sharding.svg import array_svg, table_svg
from nnx_parallel.sharding.trees import path_of


@dataclass(frozen=True, eq=False)
class Picture:
    """Which device holds what. Notebooks show it; ``print`` draws it in text.

    Attributes:
        title: Of the picture.
        maps: The blocks of each array.
        is_table: Whether arrays are lines of a table, or one array is drawn large.
    """

    title: str
    maps: tuple[ShardMap, ...]
    is_table: bool

    @property
    def svg(self) -> str:
        """The picture as an SVG document."""
        if self.is_table:
            return table_svg(self.title, self.maps)
        return array_svg(self.maps[0])

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Writes the SVG.

        Raises:
            ValueError: If the path does not end in ``.svg``.
        """
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(f"Pictures are saved as SVG: {path} must end in .svg.")
        path.write_text(self.svg, encoding="utf-8")

    def __rich__(self) -> Group | Table:
        return self._table() if self.is_table else _large(self.maps[0])

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=160).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _table(self) -> Table:
        table = Table(title=self.title, title_justify="left", show_lines=True)
        for column in ("array", "shape", "dtype", "sharding"):
            table.add_column(column, vertical="middle")
        table.add_column("bytes/device", justify="right", vertical="middle")
        table.add_column("devices")
        for shards in self.maps:
            table.add_row(
                shards.name,
                shards.shape_text,
                shards.dtype,
                shards.spec,
                shown_bytes(shards.bytes_per_device),
                _small(shards),
            )
        return table


def visualize(tree: Any) -> Picture:
    """Draws which device holds which block of an array, or of every array of a model.

    Args:
        tree: An array; or a model, a state, any pytree. Its arrays have a sharding;
            they may be ``jax.ShapeDtypeStruct``. Of an array with more than two dims
            the picture has two, sharded ones before whole ones and large ones before
            small, and its caption says which.

    Returns:
        A picture: ``print`` and rich draw it in the terminal, a notebook shows it, and
        it has ``svg`` and ``save(path)``. A block is labelled with the devices that
        hold it; copies share a block.

    Raises:
        TypeError: If an array has no sharding, or there is none.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from nnx_parallel import make_mesh
        >>> from nnx_parallel.sharding import shard
        >>> mesh = make_mesh({"fsdp": 4, "tensor": 2})
        >>> print(visualize(shard(np.ones(4096), P("tensor"), mesh)))
        array
        4096 float32 · P('tensor') · 8 KiB on each of 8 devices
        ┌────────────┬────────────┐
        │ 0, 2, 4, 6 │ 1, 3, 5, 7 │
        └────────────┴────────────┘
        columns: dim 0 of 4096 in 2 over tensor · devices of a block hold the same copy
    """
    if hasattr(tree, "shape") and hasattr(tree, "sharding"):
        return Picture("array", (shard_map_of(tree),), is_table=False)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    maps = [
        shard_map_of(leaf, path_of(keys).removesuffix(".value"))
        for keys, leaf in leaves
    ]
    if not maps:
        raise TypeError(
            f"A {type(tree).__name__} without arrays cannot be drawn. Pass an array "
            "that lies on a mesh, a model, or any pytree of such arrays."
        )
    per_device = sum(shards.bytes_per_device for shards in maps)
    devices = max(shards.num_devices for shards in maps)
    title = (
        f"{type(tree).__name__}: {len(maps)} arrays, {shown_bytes(per_device)} on each "
        f"of {devices} devices"
    )
    return Picture(title, tuple(maps), is_table=True)


def _large(shards: ShardMap) -> Group:
    return Group(
        Text(shards.name, style="bold"),
        Text(shards.summary),
        *_boxes(shards, columns=100),
        Text(shards.caption, style="dim"),
    )


def _boxes(shards: ShardMap, columns: int) -> Iterator[Text]:
    labels = [ids_text(ids) for row in shards.blocks for ids in row]
    width = max(3, *map(len, labels)) + 2
    shown = elided(len(shards.blocks[0]), max(3, min(16, (columns - 1) // (width + 1))))
    line = "─" * width
    yield Text("┌" + "┬".join([line] * len(shown)) + "┐")
    for number, row in enumerate(elided(len(shards.blocks), 16)):
        if number:
            yield Text("├" + "┼".join([line] * len(shown)) + "┤")
        yield _row(shards, row, shown, width)
    yield Text("└" + "┴".join([line] * len(shown)) + "┘")


def _row(
    shards: ShardMap, row: int | None, shown: Sequence[int | None], width: int
) -> Text:
    text = Text("│")
    for column in shown:
        if row is None or column is None:
            text.append("…".center(width))
        else:
            ids = shards.blocks[row][column]
            text.append(ids_text(ids).center(width), style=_style(shards, ids))
        text.append("│")
    return text


def _small(shards: ShardMap) -> Text:
    """The blocks without lines between them, to stand in a table."""
    width = max(len(ids_text(ids)) for row in shards.blocks for ids in row) + 2
    columns = elided(len(shards.blocks[0]), 8)
    lines = []
    for row in elided(len(shards.blocks), 4):
        line = Text()
        for column in columns:
            if row is None or column is None:
                line.append("…".center(width))
            else:
                ids = shards.blocks[row][column]
                line.append(ids_text(ids).center(width), style=_style(shards, ids))
        lines.append(line)
    return Text("\n").join(lines)


def _style(shards: ShardMap, ids: Sequence[int]) -> str:
    fill = shards.colour(ids)
    return f"{hex_of(ink_on(fill))} on {hex_of(fill)}"
