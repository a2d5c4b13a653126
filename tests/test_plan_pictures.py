"""Pictures of a plan are to scale, and readable on a phone and by a screen reader."""

import math
import re
from xml.etree import ElementTree

import pytest

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    OneFOneB,
    Pipeline,
    TensorParallel,
    ZeroBubble,
)
from nnx_parallel.errors import PlanError
from nnx_parallel.plan import (
    Assumptions,
    Candidate,
    Entry,
    Plan,
    Topology,
    draw_memory,
    draw_roofline,
    draw_timeline,
    render,
)
from nnx_parallel.plan.roofline import Costs, Traffic, time_step
from nnx_parallel.visualize.figures import WIDTH

GIB = 2**30
V5P = Topology.parse("v5p:4x4x4")


def traffic(*axes: str, sent: float, least: float = 0.0, most: float = 1.0) -> Traffic:
    return Traffic(axes=axes, sent_bytes=sent, hidden=(least, most), source="weights")


def entry(candidate: Candidate, sizes: dict[str, int], **costs) -> Entry:
    given = {"memory": {}, "flops": 2e15, "model_flops": 1.5e15, "moved_bytes": 4e11}
    found = Costs(**given | costs)
    spent = time_step(found, V5P, sizes, "bfloat16")
    return Entry(candidate=candidate, axis_sizes=sizes, costs=found, time=spent)


STATE = {"parameters": 2 * GIB, "gradients": 4 * GIB, "optimizer state": 10 * GIB}
SHARDED = entry(
    Candidate(strategy=FSDP(64), remat="full"),
    {"fsdp": 64},
    memory=STATE | {"kept activations": 24 * GIB, "batch": 100},
    traffic=(traffic("fsdp", sent=3e10), traffic("fsdp", sent=2e10, most=0.0)),
    is_compiled=True,
)
PIPED = entry(
    Candidate(
        strategy=Composite(Pipeline(4, schedule=ZeroBubble()), TensorParallel(2)),
        num_microbatches=8,
    ),
    {"pipe": 4, "data": 8, "tensor": 2},
    memory=STATE,
    bubble=0.2,
    traffic=(
        traffic("data", sent=1e10, least=0.5, most=0.5),
        traffic("tensor", sent=9e10, most=0.0),
        traffic("pipe", sent=1e3),
    ),
)
LARGE = entry(
    Candidate(strategy=DataParallel(64)),
    {"data": 64},
    memory={"parameters": 400 * GIB, "padding": 20 * GIB},
)
REFUSED = Entry(
    candidate=Candidate(strategy=Pipeline(3)), axis_sizes={}, refused="no 3 stages"
)


@pytest.fixture(scope="module")
def found() -> Plan:
    return Plan(
        topology=V5P,
        model_name="GPT",
        num_params=10**9,
        num_rows=512,
        dtype="bfloat16",
        entries=(SHARDED, PIPED, LARGE, REFUSED),
        num_enumerated=4,
        num_dropped=1,
        assumptions=Assumptions(),
    )


def rects(marks: list[str], **wanted: str) -> list[dict[str, str]]:
    """The attributes of rectangles that have the wanted attributes."""
    found = (dict(re.findall(r'([\w-]+)="([^"]*)"', m)) for m in marks if "<rect" in m)
    return [each for each in found if wanted.items() <= each.items()]


def widths(marks: list[str], **wanted: str) -> list[float]:
    return [float(each["width"]) for each in rects(marks, **wanted)]


def test_memory_bars_show_bytes_by_owner(found: Plan) -> None:
    figure = draw_memory(found, 2)
    unit = WIDTH / V5P.hardware.usable_bytes
    bars = [w for w in widths(figure.marks, height="16") if w > 0.1]
    expected = [2, 4, 10, 24, 2, 4, 10]
    assert bars == pytest.approx([unit * GIB * n for n in expected], rel=1e-3)
    assert "1. FSDP(64), remat='full': 40 GiB (kept activations 24 GiB" in str(figure)
    assert "2. " in figure.alt
    assert "~16 GiB" in figure.alt  # an estimate by formulas


def test_long_bar_is_cut_at_twice_limit(found: Plan) -> None:
    figure = draw_memory(found)
    assert "does not fit" in str(figure)
    assert "Pipeline(3)" not in str(figure)  # refused, so its memory is unknown
    bars = rects(figure.marks, height="16")
    ends = [float(x["x"]) + float(x["width"]) for x in bars]
    assert max(ends) == pytest.approx(WIDTH)
    (limit,) = {m.split('d="M')[1].split()[0] for m in figure.marks if "<path" in m} - {
        f"{WIDTH - 7:g}"
    }
    assert float(limit) == pytest.approx(WIDTH / 2)


@pytest.mark.parametrize("each", [SHARDED, PIPED], ids=["fsdp", "pipeline"])
def test_timeline_spans_range_of_step_time(found: Plan, each: Entry) -> None:
    time = each.time
    assert time is not None
    figure = draw_timeline(found, each)
    at_best = figure.marks.index(next(m for m in figure.marks if "At best" in m))
    at_worst = figure.marks.index(next(m for m in figure.marks if "At worst" in m))
    drawn = figure.marks[at_best:at_worst], figure.marks[at_worst:]
    lengths = [
        max(float(r["x"]) + float(r["width"]) for r in rects(marks)) for marks in drawn
    ]
    start = WIDTH - (lengths[1] - lengths[0]) / (1 - time.fast / time.slow)
    assert lengths[1] == pytest.approx(WIDTH, abs=2)
    assert start == pytest.approx(84, abs=2)  # where time 0 is drawn


def test_lanes_add_up_to_step_time(found: Plan) -> None:
    for each in (SHARDED, PIPED):
        time = each.time
        assert time is not None
        products, *others = time.lanes
        waited = sum(lane.exposed[0] for lane in others)
        assert products.exposed[0] + waited == pytest.approx(time.slow)
        memory, *sent = others
        busy = max(
            products.exposed[1], memory.hidden[1], sum(x.hidden[1] for x in sent)
        )
        waited = sum(lane.exposed[1] for lane in others)
        assert busy + waited == pytest.approx(time.fast)
        assert len({lane.name for lane in time.lanes}) == len(time.lanes)


def test_every_pipeline_slot_is_drawn(found: Plan) -> None:
    figure = draw_timeline(found, PIPED)
    paths = [m for m in figure.marks if m.startswith("<path d=")]
    table = ZeroBubble().table(4, 8)
    boxes = [path.count("M") for path in paths]
    # Forward, backward for inputs, backward for weights; each at best and at worst.
    assert sorted(boxes) == [4 * 8] * 6
    assert sum(boxes) == 2 * len(table.simulate().timeline.slots)
    for stage in range(4):
        assert sum(f">stage {stage}<" in mark for mark in figure.marks) == 2
    assert "4 stages" in figure.alt


def test_roofline_points_match_flops_and_bytes(found: Plan) -> None:
    time = SHARDED.time
    assert time is not None
    figure = draw_roofline(found, SHARDED)
    bars = [
        [tuple(map(float, p.split())) for p in re.findall(r"[\d.]+ [\d.]+", mark)]
        for mark in figure.marks
        if 'stroke-width="4"' in mark
    ]
    (memory, sent) = sorted(bars)
    # The axes are logarithmic, so distances are ratios.
    low, high = memory
    assert low[0] == high[0]
    ticks = {
        m.split(">")[1].split("<")[0]: m for m in figure.marks if "text-anchor" in m
    }
    x = {w: float(re.findall(r' x="([\d.]+)"', ticks[w])[0]) for w in ("100", "1,000")}
    decade = x["1,000"] - x["100"]
    ratio = 4e11 / 5e10
    assert sent[0][0] - low[0] == pytest.approx(decade * math.log10(ratio), abs=0.1)
    assert low[0] - x["1,000"] == pytest.approx(decade * math.log10(5), abs=0.1)
    attained = [2e15 / seconds for seconds in (time.slow, time.fast)]
    y = {w: float(re.findall(r' y="([\d.]+)"', ticks[w])[0]) for w in ("100 T", "50 T")}
    octave = y["50 T"] - y["100 T"]
    for (_, at), flops in zip(memory, attained, strict=True):
        expected = y["100 T"] - 4 - octave * math.log2(flops / 1e14)
        assert at == pytest.approx(expected, abs=0.1)
    assert "memory: 400 GB, 5,000 FLOP a byte, 2.77 TB/s" in "".join(figure.marks)
    for line in Assumptions().lines():
        assert line.split(", ")[0] in "".join(figure.marks)


def test_negligible_transfer_has_no_roof(found: Plan) -> None:
    figure = draw_roofline(found, PIPED)
    assert "pipe" not in figure.alt  # it sends only 1,000 bytes
    assert all(f"{name} " in figure.alt for name in ("memory", "data", "tensor"))


@pytest.mark.parametrize("draw", [draw_memory, draw_timeline, draw_roofline])
def test_pictures_are_readable_on_phone_and_have_alt(
    found: Plan, draw, tmp_path
) -> None:
    figure = draw(found)
    assert figure == draw(found)
    sizes = [float(x) for x in re.findall(r'font-size="([\d.]+)"', figure.inline)]
    assert min(sizes) * 358 / figure.width >= 9
    for text in (figure.inline, figure.svg):
        svg = ElementTree.fromstring(text)
        assert svg.findtext("{http://www.w3.org/2000/svg}title") == figure.alt
    assert len(figure.alt) > 100
    figure.save(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() == figure._repr_svg_()
    with pytest.raises(ValueError, match=r"must end in \.svg"):
        figure.save(tmp_path / "plan.png")


@pytest.mark.parametrize("draw", [draw_timeline, draw_roofline])
def test_drawing_refused_candidate_raises(found: Plan, draw) -> None:
    with pytest.raises(PlanError, match=r"has no picture\. no 3 stages"):
        draw(found, REFUSED)


def test_page_has_all_figures_and_no_requests(found: Plan) -> None:
    page = render(found)
    assert page == render(found)
    body = page.partition("<body>")[2].partition("</body>")[0]
    root = ElementTree.fromstring(f"<body>{body}</body>")
    figures = root.findall(".//figure")
    # One memory picture, and a timeline and a roofline for each of three candidates.
    assert len(figures) == 1 + 2 * 3
    assert [x.get("open") is not None for x in root.iter("details")] == [
        True,
        False,
        False,
    ]
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=", page)
    assert "@media (prefers-color-scheme: dark)" in page


def test_timeline_labels_every_second_of_many_stages(found: Plan) -> None:
    piped = entry(
        Candidate(strategy=Pipeline(16, schedule=OneFOneB()), num_microbatches=32),
        {"pipe": 16},
        bubble=0.3,
    )
    figure = draw_timeline(found, piped)
    stages = re.findall(r">(stage \d+)<", "".join(figure.marks))
    # Labels of all 16 stages would touch.
    assert stages == [f"stage {n}" for n in range(0, 16, 2)] * 2
