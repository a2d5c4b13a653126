"""Drawings show every slot where and when it runs, and say what it costs."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from nnx_parallel.errors import ScheduleError
from nnx_parallel.schedules.schedules import (
    GPipe,
    Interleaved,
    OneFOneB,
    Schedule,
    ZeroBubble,
)

SCHEDULES = (GPipe(), OneFOneB(), ZeroBubble(), Interleaved(2), Interleaved(3))
SVG = "{http://www.w3.org/2000/svg}"

schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def cells(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class") == kind]
    return [rect for group in groups for rect in group.iter(f"{SVG}rect")]


@schedules
def test_a_drawing_has_a_cell_for_every_slot_to_scale(schedule: Schedule) -> None:
    table = schedule.table(4, 8)
    drawing = table.draw(forward=1.0, backward_input=2.0, backward_weight=1.0)
    root = parse(drawing.svg)
    costs = {"forward": 1.0, "backward": 3.0}
    if table.is_split:
        costs = {"forward": 1.0, "backward_input": 2.0, "backward_weight": 1.0}
    scale = (960 - 100) / drawing.simulation.total_time
    for kind, cost in costs.items():
        rects = cells(root, kind)
        assert len({(r.get("x"), r.get("y")) for r in rects}) == 4 * 8 * schedule.chunks
        widths = [float(rect.attrib["width"]) for rect in rects]
        np.testing.assert_allclose(widths, cost / schedule.chunks * scale - 1, atol=0.5)
        right = [float(r.attrib["x"]) + float(r.attrib["width"]) for r in rects]
        assert max(right) <= 960


@schedules
def test_a_drawings_caption_is_what_the_simulation_says(schedule: Schedule) -> None:
    table = schedule.table(4, 8)
    simulation = table.simulate(1.0, 1.5, 0.5)
    drawing = table.draw(1.0, 1.5, 0.5)
    title = parse(drawing.svg).findtext(f"{SVG}title") or ""
    assert title == f"{table.name}: {drawing.caption}"
    assert f"bubble {simulation.bubble:.1%} " in title
    assert f"peak memory {simulation.peak_stage_inputs} " in title
    assert str(drawing).splitlines()[0] == title


def test_cells_say_which_slot_they_are() -> None:
    root = parse(ZeroBubble().table(4, 8).draw().svg)
    titles = [r.findtext(f"{SVG}title") for r in cells(root, "backward_weight")]
    assert "backward weight of microbatch 3, chunk 0 on stage 2, tick 9" in titles
    assert "backward weight 1" in (root.findtext(f"{SVG}desc") or "")


def test_numbers_are_drawn_where_there_is_room() -> None:
    def numbers(width: int) -> list[str | None]:
        root = parse(OneFOneB().table(2, 16).draw(width=width).svg)
        groups = [g for g in root.iter(f"{SVG}g") if g.get("class") == "forward"]
        return [text.text for group in groups for text in group.iter(f"{SVG}text")]

    assert sorted(numbers(2000), key=str) == sorted(map(str, [*range(16)] * 2))
    assert numbers(300) == []


def test_a_drawing_is_saved_as_svg(tmp_path: Path) -> None:
    drawing = replace(GPipe().table(2, 2), name="<mine> & yours").draw()
    drawing.save(tmp_path / "schedule.svg")
    saved = (tmp_path / "schedule.svg").read_text(encoding="utf-8")
    assert saved == drawing.svg == drawing._repr_svg_()  # pyright: ignore[reportPrivateUsage]
    assert (parse(saved).findtext(f"{SVG}title") or "").startswith("<mine> & yours: 2")
    with pytest.raises(ScheduleError, match=re.escape("x.png must end in .svg.")):
        drawing.save(tmp_path / "x.png")


@schedules
def test_a_terminal_shows_every_slot_of_every_stage(schedule: Schedule) -> None:
    table = schedule.table(4, 8)
    _, *lines = table.draw().text(columns=1000).splitlines()
    assert [line.split()[:2] for line in lines] == [["stage", f"{s}"] for s in range(4)]
    per_slot = 3 if table.is_split else 2
    for line in lines:
        shown = [cell for cell in line.split()[2:] if cell != "·"]
        assert len(shown) == len(set(shown)) == per_slot * 8 * schedule.chunks


def test_a_terminal_line_that_does_not_fit_is_cut() -> None:
    drawing = GPipe().table(2, 100).draw()
    _, *lines = drawing.text(columns=40).splitlines()
    assert all(len(line) <= 40 and line.endswith("…") for line in lines)
    assert str(drawing) == drawing.text(88)
    forward = GPipe().forward_table(2, 2).draw()
    assert str(forward) == (
        "Forward: 2 stages, 2 microbatches · bubble 33.3%\n"
        "stage 0  F0 F1 ·\n"
        "stage 1  ·  F0 F1"
    )
