"""The pictures of the site, drawn from real shardings, meshes and descriptions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

import jax
import numpy as np
import planned
import worked
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from vector import (
    Marks,
    array,
    device,
    document,
    ink,
    line,
    rect,
    shift,
    standalone,
    text,
)

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    simulate_devices,
)
from nnx_parallel.collectives.sequence import balanced_moves
from nnx_parallel.mesh import MESH_AXES
from nnx_parallel.models import GPT, GPTConfig
from nnx_parallel.visualize.figures import Figure

STATIC = Path(__file__).parent / "_static"


@dataclass(frozen=True)
class Panel:
    """A part of a figure: a drawing, its description, and its caption.

    Attributes:
        marks: The drawing.
        size: Its width and height.
        alt: Its description, for readers who cannot see it.
        caption: HTML below it.
    """

    marks: Marks
    size: tuple[float, float]
    alt: str
    caption: str = ""

    @property
    def html(self) -> str:
        """The drawing above its caption."""
        caption = f"<figcaption>{self.caption}</figcaption>" if self.caption else ""
        return f"<figure>{document(self.marks, *self.size, self.alt)}{caption}</figure>"


@dataclass(frozen=True)
class Placed:
    """A small GPT of four layers under a strategy, on eight devices."""

    strategy: Strategy

    @property
    def mesh(self) -> Mesh:
        """The strategy's mesh over eight simulated devices."""
        simulate_devices(8)
        return self.strategy.make_mesh(jax.devices()[:8])

    def kernel(self, path: str) -> tuple[NamedSharding, tuple[int, ...]]:
        """Sharding and shape of a stacked kernel, as stored."""
        config = GPTConfig.tiny(num_layers=4)
        found = self.strategy.describe(
            lambda rngs: GPT(config, rngs=rngs), mesh=self.mesh
        )
        (row,) = (row for row in found.rows if row.info.path.endswith(path))
        return found.layout.sharding(row.placement.stored), row.info.shape

    def batch(self) -> NamedSharding:
        """Sharding of the rows of a batch."""
        return NamedSharding(self.mesh, P(self.strategy.layout(self.mesh).claims.batch))


HERO = (
    (DataParallel(), "Every device holds the whole model and an eighth of the batch."),
    (FSDP(), "Every layer is sharded over all eight, and gathered when it runs."),
    (
        Composite(TensorParallel(2), FSDP()),
        "Each matmul is split over two devices; four such pairs share the state.",
    ),
    (
        Composite(Pipeline(2), FSDP()),
        "The first two layers live on four devices, the last two on the others.",
    ),
)


def _code(strategy: Strategy) -> str:
    return repr(strategy).replace("size=", "").replace("'", '"')


def hero() -> list[Panel]:
    """One model under four strategies: which device holds which rows and weights."""
    panels = []
    for strategy, words in HERO:
        placed = Placed(strategy)
        marks = [text(22, 12, "batch", "soft"), text(118, 12, "four layers", "soft")]
        marks += array(6, 20, 32, 116, placed.batch(), (8, 8))
        sharding, shape = placed.kernel("mlp.up.kernel")
        for layer in range(4):
            marks += array(60, 20 + 30 * layer, 116, 26, sharding, shape, {0: layer})
        code = _code(strategy)
        caption = f"<code>{escape(code)}</code>{words}"
        panels.append(Panel(marks, (182, 140), f"{code}: {words}", caption))
    return panels


def hero_file() -> str:
    """The hero figure as a separate picture, two by two."""
    marks: Marks = []
    for n, panel in enumerate(hero()):
        x, y = 24 + 218 * (n % 2), 16 + 184 * (n // 2)
        code = _code(HERO[n][0])
        marks += shift(
            [
                *panel.marks,
                text(92, 160, code, font_size=10.5, font_family="monospace"),
            ],
            x,
            y,
        )
    alt = "One model on eight devices. " + " ".join(panel.alt for panel in hero())
    return standalone(marks, 448, 376, alt)


_STEPS = {
    "Gather": "Each device sends its quarter of the layer to the others (all-gather).",
    "Compute": "Each runs the whole layer on its rows of the batch.",
    "Drop": "Each device frees the other three quarters. The next layer follows.",
    "Scatter": "Backward: gradients are summed, and each device keeps its quarter of "
    "the sum (reduce-scatter).",
}


def fsdp() -> list[Panel]:
    """The four phases of a layer under FSDP, on four devices."""
    panels = []
    for step, words in _STEPS.items():
        marks: Marks = []
        for column in range(4):
            x = 12 + 44 * column
            marks.append(text(x + 15, 12, str(column), "soft", font_size=11))
            for quarter in range(4):
                own = quarter == column
                held = own or step in ("Gather", "Compute")
                box = (x, 20 + 15 * quarter, 30, 13)
                look = device(quarter) if held else "absent"
                marks.append(rect(*box, look))
                if own and step == "Scatter":
                    middle = box[1] + 10.5
                    sign = text(x + 15, middle, "Σ", ink(quarter), font_size=11)
                    marks.append(sign)
                if own and step == "Gather":
                    marks.append(
                        f'<rect class="line" x="{x - 2}" y="{box[1] - 2}" width="34" '
                        'height="17" rx="3" stroke-width="1.5"/>'
                    )
            if step == "Compute":
                marks.append(line((x + 15, 83), (x + 15, 97), arrow=True))
                marks.append(rect(x, 101, 30, 13, device(column)))
        label = {"Compute": "rows of the device", "Scatter": "gradient of the layer"}
        words_below = label.get(step, "parameters of the layer")
        marks.append(text(93, 129, words_below, "soft", font_size=11))
        if step == "Gather":
            marks.append(text(93, 96, "outlined: it holds this", "soft", font_size=10))
        if step == "Drop":
            marks.append(text(93, 96, "dashed: freed", "soft", font_size=10))
        if step == "Scatter":
            marks.append(text(93, 96, "Σ: summed over all rows", "soft", font_size=10))
        panels.append(Panel(marks, (186, 134), words, f"<b>{step}.</b> {words}"))
    return panels


def matmuls() -> list[Panel]:
    """Two consecutive matmuls, split by columns and then by rows."""
    simulate_devices(8)
    mesh = TensorParallel(4).make_mesh(jax.devices()[:4])
    config = GPTConfig.tiny(num_layers=4)
    found = TensorParallel(4).describe(lambda rngs: GPT(config, rngs=rngs), mesh=mesh)
    rows = {row.info.path.split(".")[-2]: row for row in found.rows if _is_mlp(row)}

    def kernel(name: str, x: float, y: float, width: float, height: float) -> Marks:
        row = rows[name]
        sharding = found.layout.sharding(row.placement.stored)
        return array(x, y, width, height, sharding, row.info.shape, {0: 0})

    hidden = NamedSharding(mesh, P(None, "tensor"))
    column = [
        rect(10, 46, 44, 60, "whole"),
        text(68, 81, "\u00d7", font_size=16),
        *kernel("up", 82, 36, 96, 44),
        text(192, 81, "=", font_size=16),
        *array(206, 46, 96, 60, hidden, (8, 8)),
        text(32, 124, "input", "soft"),
        text(130, 98, "columns", "soft"),
        text(254, 124, "hidden, columns", "soft"),
        text(156, 148, "communication: none"),
    ]
    row = [
        *array(6, 46, 96, 60, hidden, (8, 8)),
        text(114, 81, "\u00d7", font_size=16),
        *kernel("down", 126, 26, 44, 96),
        text(182, 81, "=", font_size=16),
        *[
            rect(194 + 9 * n, 34 + 11 * n, 40, 48, device(n)) for n in range(4)
        ],  # one partial sum on each device
        line((264, 81), (276, 81), arrow=True),
        rect(280, 51, 30, 50, "whole"),
        text(54, 124, "hidden", "soft"),
        text(148, 138, "rows", "soft"),
        text(226, 138, "4 partial sums", "soft"),
        text(292, 118, "output", "soft"),
        text(156, 160, "communication: one all-reduce"),
    ]
    first = (
        "Each device multiplies the whole input by its columns of the kernel, and "
        "gets its columns of the result."
    )
    second = (
        "Each device multiplies its columns by its rows of the kernel. The results "
        "are partial sums: one all-reduce adds them up."
    )
    return [
        Panel(column, (312, 166), first, f"<b>Split by columns.</b> {first}"),
        Panel(row, (316, 166), second, f"<b>Then by rows.</b> {second}"),
    ]


def _is_mlp(row: object) -> bool:
    path = row.info.path
    return ".mlp." in path and path.endswith("kernel")


_MACHINE = (146, 116)


def balance() -> list[Panel]:
    """Shows which of four devices computes each block of a causal attention."""
    size, side = 4, 15
    chunks = range(2 * size)
    # Chunks 2 d and 2 d + 1 are the two halves of device d's tokens.
    moves = itertools.chain(*zip(*balanced_moves(size), strict=True))
    owners = {
        "In turn.": [chunk // 2 for chunk in chunks],
        "Balanced.": [to for _, to in moves],
    }
    panels = []
    for name, owner in owners.items():
        marks: Marks = [text(103, 12, "keys", "soft", font_size=11)]
        marks.append(text(22, 84, "queries", "soft", font_size=11))
        for query, key in itertools.product(chunks, chunks):
            look = device(owner[query]) if key <= query else "absent"
            box = (44 + side * key, 18 + side * query, side - 2, side - 2)
            marks.append(rect(*box, look))
        work = [
            sum(query + 0.5 for query in chunks if owner[query] == each)
            for each in range(size)
        ]
        shown = ", ".join(f"{blocks:g}" for blocks in work)
        words = f"Devices 0 to {size - 1} compute {shown} blocks."
        if name == "Balanced.":
            words += " Each has a chunk from the start and one from the end."
        panels.append(Panel(marks, (176, 146), words, f"<b>{name}</b> {words}"))
    return panels


def machines() -> list[Panel]:
    """A 3D mesh over four machines of four devices."""
    strategy = Composite(Pipeline(2), FSDP(2), TensorParallel(4))
    sizes = strategy.axis_sizes
    axes = sorted(sizes, key=MESH_AXES.index)
    mesh = np.arange(16).reshape([sizes[axis] for axis in axes])  # (pipe, fsdp, tensor)
    width, height = _MACHINE
    marks: Marks = []
    for stage, shard in itertools.product(range(2), range(2)):
        x, y = 10 + (width + 68) * shard, 10 + (height + 56) * stage
        number = int(mesh[stage, shard, 0]) // 4
        marks.append(
            f'<rect class="line" x="{x}" y="{y}" width="{width}" height="{height}" '
            'rx="8" stroke-width="1"/>'
        )
        marks.append(
            text(x + 10, y + 17, f"machine {number}", "soft", text_anchor="start")
        )
        places = [
            (x + 18, y + 28),
            (x + 88, y + 28),
            (x + 88, y + 70),
            (x + 18, y + 70),
        ]
        middle = [(px + 20, py + 16) for px, py in places]
        marks.append(line(*middle, middle[0], width=4))
        for place, found in zip(places, mesh[stage, shard], strict=True):
            colour = device(2 * stage + shard)
            marks.append(rect(*place, 40, 32, colour, 4))
            shade = ink(2 * stage + shard)
            marks.append(text(place[0] + 20, place[1] + 20, str(found), shade))
    for stage in range(2):
        y = 10 + (height + 56) * stage + height / 2
        marks.append(line((10 + width, y), (78 + width, y), width=2))
        marks.append(text(44 + width, y - 7, "fsdp"))
    for shard in range(2):
        x, y = 10 + (width + 68) * shard + width / 2, 10 + height
        marks.append(line((x, y), (x, y + 56), width=1, arrow=True))
        marks.append(text(x + 8, y + 32, "pipe", text_anchor="start"))
    alt = (
        "Sixteen devices in four machines. Within a machine four devices form the "
        "tensor axis. Machines 0 and 1 are stage 0 of the pipeline, joined by the fsdp "
        "axis, and send their activations to machines 2 and 3, which are stage 1."
    )
    caption = (
        f"<code>{_code(strategy)}</code>The axis that communicates most, "
        "<code>tensor</code>, stays within a machine. <code>fsdp</code> gathers and "
        "scatters between two machines; <code>pipe</code> sends only activations."
    )
    return [Panel(marks, (380, 308), alt, caption)]


ZERO = {
    "DataParallel()": DataParallel(8),
    'ZeRO-1: FSDP(shard="optimizer")': FSDP(8, shard="optimizer"),
    'ZeRO-2: FSDP(shard="gradients")': FSDP(8, shard="gradients"),
    "ZeRO-3: FSDP()": FSDP(8),
}


def zero() -> list[Panel]:
    """Bytes per device of an 8B model under ZeRO 1, 2 and 3."""
    build = worked.gpt(GPTConfig.llama3_8b())
    marks: Marks = []
    unit, said = 340 / 130e9, []
    limit = 6 + unit * 80e9
    for n, (name, strategy) in enumerate(ZERO.items()):
        example = worked.Example(name="", build=build, strategy=strategy, why="")
        found = example.describe()
        owners = {
            "parameters": found.params_bytes,
            "gradients": found.gradients_bytes,
            "optimizer": found.optimizer_bytes,
        }
        x, y = 6.0, 22 + 50 * n
        total = sum(owners.values())
        said.append(f"{name}: {total / 1e9:.0f} GB")
        marks.append(text(x, y, name, text_anchor="start", font_size=12.5))
        for owner, size in owners.items():
            marks.append(
                f'<rect data-owner="{owner}" fill="var(--owner)" x="{x:.4g}" '
                f'y="{y + 7}" width="{unit * size:.4g}" height="20"/>'
            )
            x += unit * size
        words = f"{total / 1e9:.0f} GB"
        at = limit if x < limit < x + 50 else x  # not across the mark
        marks.append(text(at + 5, y + 22, words, text_anchor="start", font_weight=600))
    # The mark has a piece for each bar, because one long line would cross the words.
    ticks = " ".join(f"M{limit:.5g} {50 * n + 26} v26" for n in range(len(ZERO)))
    marks.append(f'<path class="line" d="{ticks}" stroke-width="2"/>')
    marks.append(text(limit, 222, "80 GB: one device", "soft"))
    owners = "".join(
        f'<li data-owner="{owner}">{owner}</li>'
        for owner in ("parameters", "gradients", "optimizer")
    )
    caption = (
        f'<ul class="owners">{owners}</ul>Training state of Llama 3 8B on '
        "each of eight devices, with AdamW in float32, without activations."
    )
    return [Panel(marks, (404, 228), "; ".join(said), caption)]


def _of_plan(draw: Callable[[], tuple[Figure, str]]) -> Callable[[], list[Panel]]:
    """A picture of a plan, as the library draws it."""

    def panels() -> list[Panel]:
        drawn, caption = draw()
        return [Panel(drawn.marks, (drawn.width, drawn.height), drawn.alt, caption)]

    return panels


FIGURES: dict[str, Callable[[], list[Panel]]] = {
    "hero": hero,
    "fsdp": fsdp,
    "matmuls": matmuls,
    "balance": balance,
    "machines": machines,
    "zero": zero,
    "plan-memory": _of_plan(planned.memory),
    "plan-timeline": _of_plan(planned.timeline),
    "plan-stages": _of_plan(planned.stages),
    "plan-roofline": _of_plan(planned.roofline),
}


def figure(name: str) -> str:
    """A figure of the site, as HTML."""
    panels = "".join(panel.html for panel in FIGURES[name]())
    return f'<div class="drawing drawing-{name}">{panels}</div>'


def logo() -> str:
    """Eight devices, in their colours."""
    marks = [
        rect(2 + 7 * (n % 4), 2 + 14 * (n // 4), 6, 13, device(n)) for n in range(8)
    ]
    return document(marks, 32, 31, "nnx_parallel") + "\n"


FILES = {"hero.svg": hero_file, "logo.svg": logo}


if __name__ == "__main__":  # after a change to the pictures
    for name, draw in FILES.items():
        (STATIC / name).write_text(draw())
