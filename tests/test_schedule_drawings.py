"""Pictures show where and when every slot runs, and the costs of slots."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from rich.console import Console

from nnx_parallel import visualize
from nnx_parallel.drawing import Picture, fill
from nnx_parallel.schedules.schedules import (
    GPipe,
    Interleaved,
    OneFOneB,
    Schedule,
    ZeroBubble,
)
from nnx_parallel.schedules.simulate import TimedSlot
from nnx_parallel.schedules.table import Table
from nnx_parallel.visualize.schedules import COLOURS

SCHEDULES = (GPipe(), OneFOneB(), ZeroBubble(), Interleaved(2), Interleaved(3))
SVG = "{http://www.w3.org/2000/svg}"
COLUMN, LINE = 12.2, 24.4  # pixels of one character in rich's SVG

schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def ground(slot: TimedSlot, num_chunks: int) -> str | None:
    """The colour of a slot's cell, by its kind; later chunks have lighter colours."""
    share = 0.6 * slot.chunk / max(num_chunks - 1, 1)
    red, green, blue = (round(v + share * (255 - v)) for v in COLOURS[slot.kind])
    colour = fill((red, green, blue)).bgcolor
    assert colour is not None
    return colour.name


def boxes(root: ElementTree.Element, stage: int) -> list[tuple[str, int, int]]:
    """Fill, first column and width of each cell on a stage's line."""
    return [
        (
            rect.attrib["fill"],
            round(float(rect.attrib["x"]) / COLUMN),
            round(float(rect.attrib["width"]) / COLUMN),
        )
        for rect in root.iter(f"{SVG}rect")
        # The title is line 0.
        if rect.get("shape-rendering")
        and round((float(rect.attrib["y"]) - 1.5) / LINE) == stage + 1
    ]


@schedules
def test_picture_has_cell_for_every_slot(schedule: Schedule) -> None:
    table = schedule.table(4, 8)
    costs: dict[str, Any] = {
        "forward": 1.0,
        "backward_input": 2.0,
        "backward_weight": 1.0,
    }
    root = parse(visualize(table, **costs).svg)
    timeline = table.simulate(**costs).timeline
    left, _, width, _ = map(float, root.attrib["viewBox"].split())
    for stage in range(4):
        found = boxes(root, stage)
        slots = [s for s in timeline.slots if s.stage == stage]
        wanted = Counter(ground(slot, schedule.chunks) for slot in slots)
        idle = {colour for colour, _, _ in found} - set(wanted)
        assert len(idle) == 1
        cells = [cell for cell in found if cell[0] not in idle]
        assert Counter(colour for colour, _, _ in cells) == wanted
        # Cells have the slots' order and widths. One background column separates them.
        scale = (cells[0][2] + 1) / (slots[0].end - slots[0].start)
        for (colour, x, columns), slot in zip(cells, slots, strict=True):
            assert colour == ground(slot, schedule.chunks)
            assert columns + 1 == pytest.approx(scale * (slot.end - slot.start))
            assert (x + columns) * COLUMN <= left + width
        starts = [x for _, x, _ in cells]
        assert starts == sorted(set(starts))
        first = starts[0] - scale * slots[0].start
        np.testing.assert_allclose(
            starts, [first + scale * slot.start for slot in slots], atol=1e-6
        )


def test_stage_with_fewer_layers_has_shorter_cells() -> None:
    # With 4 layers on 3 stages, the later stages need half of a slot's time.
    table = OneFOneB().table(3, 4)
    slots = table.simulate(num_layers=4).timeline.slots
    root = parse(visualize(table, num_layers=4).svg)
    colours = {ground(slot, 1) for slot in slots}
    first, second, _ = (
        [columns for colour, _, columns in boxes(root, stage) if colour in colours]
        for stage in range(3)
    )
    assert len(first) == len(second) == 8
    # The longest cells are backward slots. Half of an odd width is rounded down.
    assert max(first) // 2 <= max(second) <= max(first) // 2 + 1


@schedules
def test_title_matches_simulation(schedule: Schedule) -> None:
    table = schedule.table(4, 8)
    simulation = table.simulate(1.0, 1.5, 0.5)
    picture = visualize(table, forward=1.0, backward_input=1.5, backward_weight=0.5)
    title = parse(picture.svg).findtext(f"{SVG}title") or ""
    assert title == picture.title
    assert title.startswith(f"{table.name}: 4 stages")
    assert f"bubble {simulation.bubble:.1%} " in title
    assert f"peak memory {simulation.peak_stage_inputs} " in title
    assert str(picture).splitlines()[0] == title


def lines_in_colour(picture: Picture, columns: int) -> list[str]:
    console = Console(force_terminal=True, color_system="truecolor", width=columns)
    with console.capture() as capture:
        console.print(picture)
    return re.sub(r"\x1b\[[\d;]*m", "", capture.get()).splitlines()


def test_coloured_terminal_shows_ticks_times_and_legend() -> None:
    table = ZeroBubble().table(4, 8)
    picture = visualize(table, backward_weight=0.5)
    lines = lines_in_colour(picture, 160)
    simulation = table.simulate(backward_weight=0.5)
    start = simulation.timeline.tick_start
    ticks, times = (line.split()[1:] for line in lines[5:7])
    assert ticks == [str(tick) for tick in range(table.num_ticks)]
    assert times == [f"{time:g}" for time in start[:-1]]
    at = re.search(r" 9 ", lines[5])
    assert at is not None
    # Stage 2 runs F7, B5 and W3 in this column.
    assert lines[3][at.start() : lines[5].index("10")].split() == ["7", "5", "3"]
    for label in ("forward (cost 1)", "backward weight (cost 0.5)", "bubble"):
        assert label in lines[7]


def test_letters_are_drawn_if_they_fit() -> None:
    picture = visualize(OneFOneB().table(2, 16))
    narrow = lines_in_colour(picture, 400)[1].split()[2:]
    assert [cell for cell in narrow if cell != "·"].count("15") == 2
    wide = lines_in_colour(visualize(OneFOneB().table(2, 3)), 400)[1].split()[2:]
    assert {"F2", "B2"} <= set(wide)


def test_picture_is_saved_as_svg(tmp_path: Path) -> None:
    picture = visualize(replace(GPipe().table(2, 2), name="<mine> & {yours}"))
    picture.save(tmp_path / "schedule.svg")
    saved = (tmp_path / "schedule.svg").read_text(encoding="utf-8")
    assert saved == picture.svg == picture._repr_svg_()  # pyright: ignore[reportPrivateUsage]
    title = parse(saved).findtext(f"{SVG}title") or ""
    assert title.startswith("<mine> & {yours}: 2")
    with pytest.raises(ValueError, match=re.escape("x.png must end in .svg.")):
        picture.save(tmp_path / "x.png")


def plain_lines(table: Table, columns: int) -> list[str]:
    return str(replace(visualize(table), columns=columns)).splitlines()


@schedules
def test_terminal_shows_every_slot_of_every_stage(schedule: Schedule) -> None:
    table = schedule.table(4, 8)
    _, *lines = plain_lines(table, 1000)
    assert [line.split()[:2] for line in lines] == [["stage", f"{s}"] for s in range(4)]
    per_slot = 3 if table.is_split else 2
    for line in lines:
        shown = [cell for cell in line.split()[2:] if cell != "·"]
        assert len(shown) == len(set(shown)) == per_slot * 8 * schedule.chunks


def test_long_terminal_line_is_cut() -> None:
    table = GPipe().table(2, 100)
    _, *lines = plain_lines(table, 40)
    assert all(len(line) <= 40 and line.endswith("…") for line in lines)
    assert str(visualize(table)).splitlines() == plain_lines(table, 88)
    forward = visualize(GPipe().forward_table(2, 2))
    assert str(forward) == (
        "Forward: 2 stages, 2 microbatches · bubble 33.3%\n"
        "stage 0  F0 F1 ·\n"
        "stage 1  ·  F0 F1"
    )


def test_costs_for_other_objects_raise() -> None:
    message = "visualize got costs ['forward'] for a ArrayImpl. Only the Table of a"
    with pytest.raises(TypeError, match=re.escape(message)):
        visualize(jax.numpy.ones(3), forward=2.0)
