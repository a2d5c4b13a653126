"""Pictures show the devices that hold each shard, to people and to parsers."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from nnx_parallel import FSDP, Trainer, make_mesh
from nnx_parallel.drawing import fill
from nnx_parallel.sharding import PathRules
from nnx_parallel.sharding.rules import FSDPRules
from nnx_parallel.sharding.tree import shard
from nnx_parallel.visualize import visualize
from nnx_parallel.visualize.arrays import ShardMap, device_colour, ids_text

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"data": 2, "fsdp": 4})


def abstract(mesh: Mesh, shape: tuple, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 8), P("data", "fsdp")),
        ((8, 8), P("fsdp")),
        ((8, 8), P(None, ("data", "fsdp"))),
        ((8,), P("fsdp")),
        ((8, 8), P()),
        ((), P()),
        ((8, 4, 2), P("fsdp", None, "data")),
        ((2, 8, 8, 8), P("data", "fsdp")),
    ],
)
def test_blocks_show_devices_that_hold_them(shape: tuple, spec: P, mesh: Mesh) -> None:
    array = shard(np.arange(np.prod(shape), dtype=np.int32).reshape(shape), spec, mesh)
    shards = ShardMap(array)
    held = {s.device.id: s for s in array.addressable_shards}
    seen = []
    for i, row in enumerate(shards.blocks):
        for j, ids in enumerate(row):
            place = (i, j)[2 - len(shards.dims) :]
            for device in ids:
                seen.append(device)
                index = held[device].index
                for at, starts, dim in zip(
                    place, shards.starts, shards.dims, strict=True
                ):
                    assert (index[dim].start or 0) == starts[at]
    assert sorted(seen) == list(range(8))
    assert shards.bytes_per_device == array.addressable_shards[0].data.nbytes


@pytest.mark.parametrize(
    ("shape", "spec", "dims", "notes"),
    [
        ((512, 8, 64), P(None, "fsdp"), (0, 1), ["not shown: dim 2, whole"]),
        ((8, 64, 32), P(), (1, 2), ["not shown: dim 0, whole"]),
        ((4, 8, 2), P("fsdp", None, "data"), (0, 2), ["not shown: dim 1, whole"]),
        ((16, 4), P(), (0, 1), []),
    ],
)
def test_caption_names_two_shown_dims(
    shape: tuple, spec: P, dims: tuple, notes: list[str], mesh: Mesh
) -> None:
    shards = ShardMap(abstract(mesh, shape, spec))
    assert shards.dims == dims
    assert shards.notes[: len(notes)] == notes
    assert f"rows: dim {dims[0]} of {shape[dims[0]]}" in shards.caption


def test_shards_along_third_dim_have_separate_blocks() -> None:
    """A block lists several devices only if they have copies."""
    mesh = make_mesh({"pipe": 2, "fsdp": 2, "tensor": 2})
    shards = ShardMap(abstract(mesh, (4, 8, 6), P("pipe", "fsdp", "tensor")))
    assert shards.blocks == [[(0,), (1,)], [(2,), (3,)], [(4,), (5,)], [(6,), (7,)]]
    assert shards.caption == (
        "rows: dim 0 of 4 in 2 over pipe \N{MULTIPLICATION SIGN} dim 1 of 8 in 2 over "
        "fsdp · columns: dim 2 of 6 in 2 over tensor"
    )
    copies = ShardMap(abstract(mesh, (4, 8, 6), P("pipe", None, "tensor")))
    assert copies.blocks == [[(0, 2), (1, 3)], [(4, 6), (5, 7)]]
    assert "devices of a block hold the same copy" in copies.notes


def test_array_is_drawn_as_text(mesh: Mesh) -> None:
    picture = visualize(abstract(mesh, (512, 64), P("data")))
    assert str(picture).splitlines() == [
        "array",
        "512 \N{MULTIPLICATION SIGN} 64 float32 · P('data') · 64 KiB on each of 8 "
        "devices",
        "┌─────┐",
        "│ 0-3 │",
        "├─────┤",
        "│ 4-7 │",
        "└─────┘",
        "rows: dim 0 of 512 in 2 over data · columns: dim 1 of 64, whole · devices of "
        "a block hold the same copy",
    ]


def test_terminal_shows_colours(mesh: Mesh) -> None:
    console = Console(force_terminal=True, color_system="truecolor", width=100)
    with console.capture() as capture:
        console.print(visualize(abstract(mesh, (8,), P("fsdp"))))
    red, green, blue = device_colour(0, 8)
    assert f"48;2;{red};{green};{blue}m 0, 4 " in capture.get()


def cells(svg: str) -> list[tuple[str, ElementTree.Element]]:
    """The label and the rectangle of every coloured cell."""
    root = ElementTree.fromstring(svg)
    texts = {
        (float(text.attrib["x"]), round(float(text.attrib["y"]) / 24.4)): text.text
        for text in root.iter(f"{SVG}text")
    }
    return [
        (
            (texts[float(r.attrib["x"]), round(float(r.attrib["y"]) / 24.4) + 1] or ""),
            r,
        )
        for r in root.iter(f"{SVG}rect")
        if r.get("shape-rendering")
    ]


def test_svg_has_labelled_block_per_shard(mesh: Mesh, tmp_path: Path) -> None:
    picture = visualize(abstract(mesh, (64, 512), P("data", "fsdp")))
    blocks = cells(picture.svg)
    assert [label.strip() for label, _ in blocks] == [f"{i}" for i in range(8)]
    assert len({rect.get("fill") for _, rect in blocks}) == 8
    picture.save(tmp_path / "array.svg")
    assert (tmp_path / "array.svg").read_text() == picture._repr_svg_()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ValueError, match=re.escape("must end in .svg.")):
        picture.save(tmp_path / "array.png")


@pytest.mark.parametrize("size", [(8, 8), (1, 4096), (4096, 1), (7,), (0, 8), ()])
def test_svg_elements_stay_inside_picture(size: tuple, mesh: Mesh) -> None:
    svg = visualize(abstract(mesh, size, P())).svg
    root = ElementTree.fromstring(svg)
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    assert cells(svg)
    for _, rect in cells(svg):
        x, y = float(rect.attrib["x"]), float(rect.attrib["y"])
        assert left <= x <= x + float(rect.attrib["width"]) <= left + width
        assert top <= y <= y + float(rect.attrib["height"]) <= top + height
    for text in root.iter(f"{SVG}text"):
        right = float(text.attrib["x"]) + float(text.attrib["textLength"])
        assert left <= right <= left + width
        assert top <= float(text.attrib["y"]) <= top + height


def test_model_is_drawn_as_table_of_arrays() -> None:
    columns = FSDP(8, rules=(PathRules((r"kernel", P(None, "fsdp"))),))
    model = columns.init(lambda rngs: nnx.Linear(64, 128, rngs=rngs), 0)
    for tree in (model, nnx.state(model)):
        picture = visualize(tree)
        assert picture.title.endswith(": 2 arrays, 4.5 KiB on each of 8 devices")
        assert len(cells(picture.svg)) == 1 + 8
    text = str(visualize(model))
    assert [line.split()[1] for line in text.splitlines()[4::2]] == ["bias", "kernel"]
    for part in ("kernel", "P(None, 'fsdp')", "4 KiB", "replicated", "0-7"):
        assert part in text


def test_description_is_drawn_with_totals() -> None:
    described = FSDP(8).describe(lambda rngs: nnx.Linear(64, 128, rngs=rngs))
    picture = visualize(described)
    assert str(picture) == str(described)
    assert picture.title == "mesh fsdp=8"
    for part in ("kernel", "free dim 0", "per device: parameters 4.5 KiB"):
        assert part.replace(" ", "\N{NO-BREAK SPACE}") in picture.svg.replace(
            "&#160;", "\N{NO-BREAK SPACE}"
        )


def test_public_functions_shadow_packages() -> None:
    """The functions `visualize` and `audit` have the names of packages."""
    for first in ("visualize.describe", "cli.launch"):
        script = (
            f"import nnx_parallel.{first}, nnx_parallel.drawing\n"
            "import nnx_parallel.audit.report\n"
            "from nnx_parallel import audit, visualize\n"
            "import nnx_parallel\n"
            "assert callable(visualize) and nnx_parallel.visualize is visualize\n"
            "assert callable(audit) and nnx_parallel.audit is audit\n"
        )
        subprocess.run([sys.executable, "-c", script], check=True)


def test_drawing_unplaced_arrays_raises(mesh: Mesh) -> None:
    message = "`a` is a ndarray without a sharding. Place it first, for example with sh"
    with pytest.raises(TypeError, match=re.escape(message)):
        visualize({"a": np.ones(3)})
    with pytest.raises(
        TypeError, match=re.escape("A dict without arrays cannot be dr")
    ):
        visualize({})
    message = "`array` is a ndarray without a sharding. Place it first"
    with pytest.raises(TypeError, match=re.escape(message)):
        visualize(np.ones(3))
    # To JAX, an object that is not a pytree, such as a Trainer, is a single leaf.
    message = "A object without arrays cannot be drawn. Pass an array with a sharding"
    with pytest.raises(TypeError, match=re.escape(message)):
        visualize(object())
    single: Any = jax.device_put(np.ones(3), jax.devices()[3])
    assert "on one device" in str(visualize(thing=single))
    assert "│  3  │" in str(visualize(single))


def test_ids_are_shortened_and_colours_are_readable() -> None:
    assert ids_text(range(64)) == "0-63"
    assert ids_text([0, 1]) == "0, 1"
    for count in (4, 8, 64, 512):
        colours = [device_colour(i, count) for i in range(count)]
        assert count > 64 or len(set(colours)) == count
        for colour in colours:
            style = fill(colour)
            assert style.color is not None
            assert style.bgcolor is not None
            assert tuple(style.bgcolor.get_truecolor()) == colour
            assert contrast(colour, tuple(style.color.get_truecolor())) >= 4.5


def contrast(one: tuple, other: tuple) -> float:
    def luminance(colour: tuple) -> float:
        linear = [
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
            for v in (value / 255 for value in colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_colours_follow_devices(mesh: Mesh) -> None:
    tree = {"rows": np.ones((64, 64)), "columns": np.ones((63, 64))}
    placed = shard(tree, FSDPRules(min_size=0), mesh)
    maps = [ShardMap(x) for x in jax.tree.leaves(placed)]
    colours = [
        {ids: shards.colour(ids) for row in shards.blocks for ids in row}
        for shards in maps
    ]
    assert colours[0] == colours[1]


def test_traced_array_is_drawn_once_when_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        hidden = model(batch)
        picture = visualize(hidden)
        assert "printed when the function is compiled" in str(picture)
        return (hidden**2).mean()

    trainer = Trainer(
        lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        optax.sgd(0.1),
        loss,
        strategy=FSDP(min_size=0),
        loggers=(),
    )
    trainer.fit([np.ones((16, 4), np.float32)] * 2, 2)
    line = loss.__code__.co_firstlineno + 2
    title, summary, *_, caption = capsys.readouterr().out.splitlines()
    assert title == f"test_sharding_pictures.py:{line}"
    assert summary == "16 \u00d7 4 float32 · P('fsdp') · 32 B on each of 8 devices"
    assert caption == "rows: dim 0 of 16 in 8 over fsdp · columns: dim 1 of 4, whole"
    trainer.evaluate([np.ones((16, 4), np.float32)])
    assert capsys.readouterr().out == ""  # the same text is not printed again


def test_array_in_manual_region_names_manual_axes(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    def block(x: jax.Array) -> jax.Array:
        visualize(x)
        return 2 * x

    spec = P("fsdp")
    function = jax.shard_map(block, mesh=mesh, in_specs=spec, out_specs=spec)
    jax.jit(function)(np.ones((8, 2), np.float32))
    line = block.__code__.co_firstlineno + 1
    assert capsys.readouterr().out.splitlines() == [
        f"test_sharding_pictures.py:{line}",
        "2 \u00d7 2 float32 · one block for each index of data, fsdp: these axes are "
        "manual here, and only this code knows how the blocks differ",
    ]


def test_traced_array_under_vmap_has_no_sharding(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    def norm(x: jax.Array) -> jax.Array:
        visualize(x * 2)
        return (x**2).sum()

    sharding = NamedSharding(mesh, P(mesh.axis_names[0]))
    x = jax.device_put(np.ones((8, 4), np.float32), sharding)
    assert jax.vmap(norm)(x).shape == (8,)
    assert jax.jit(jax.vmap(jax.grad(norm)))(x).shape == (8, 4)
    assert "one element of jax.vmap, which has no sharding" in capsys.readouterr().out
