"""A plan as a page: bars of memory by owner, of time by what takes it, and the table.

One file, without scripts, that a browser shows and a colleague can be sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from nnx_parallel.drawing import as_html
from nnx_parallel.errors import PlanError
from nnx_parallel.plan.report import Entry, Plan
from nnx_parallel.precision import format_bytes

# Of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442",
    "#999999",
)  # fmt: skip
_SHOWN = 12
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
       padding: 0 1rem; color: #1a1a1a; background: #fff; }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto; }
td, th { padding: .15rem .6rem; vertical-align: top; }
.name { font: 13px ui-monospace, monospace; margin: .7rem 0 .1rem; }
.legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
"""


def render(plan: Plan) -> str:
    """The page of a plan."""
    shown = [e for e in plan.entries[:_SHOWN] if e.costs is not None]
    usable = plan.topology.hardware.usable_bytes
    header = ("", "strategy, microbatches, remat", "GiB/device", "step, s", "MFU",
              "sent, GB", "overlapped", "why not")  # fmt: skip
    rows = [
        (str(i + 1), e.candidate.code, *plan.cells(e))
        for i, e in enumerate(plan.entries[:_SHOWN])
    ]
    parts = [
        f"<h1>{escape(plan.title)}</h1>",
        f"<pre>{escape(plan.code or 'Nothing fits.')}</pre>",
        "<h2>Memory of a device</h2>",
        _bars(
            [(e.candidate.code, dict(e.costs.memory)) for e in shown if e.costs],
            limit=usable,
            unit=format_bytes,
            mark=f"a program gets {format_bytes(usable)}",
        ),
        "<h2>Time of a step, everything at its worse value</h2>",
        _bars(
            [(e.candidate.code, _spent(e)) for e in shown],
            limit=None,
            unit=lambda seconds: f"{seconds:.3g} s",
            mark="",
        ),
        "<h2>Candidates</h2>",
        as_html(header, rows, notes=plan.summary().splitlines()),
    ]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(plan.title)}</title><style>{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def save(plan: Plan, path: str | Path) -> None:
    """Writes a plan as ``.json`` or as a page, ``.html``.

    Raises:
        PlanError: If the path ends otherwise.
    """
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(plan.to_json(), indent=1), encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(render(plan), encoding="utf-8")
    else:
        raise PlanError(f"A plan is saved as .json or .html, not as {path.name!r}.")


def _spent(entry: Entry) -> dict[str, float]:
    return dict(entry.time.parts) if entry.time else {}


def _bars(
    rows: list[tuple[str, Mapping[str, float]]],
    *,
    limit: float | None,
    unit: Callable[[float], str],
    mark: str,
) -> str:
    """Stacked bars on one scale, each part with its value in a tooltip."""
    owners = list(dict.fromkeys(o for _, parts in rows for o, x in parts.items() if x))
    colours = {o: _COLOURS[i % len(_COLOURS)] for i, o in enumerate(owners)}
    totals = [sum(parts.values()) for _, parts in rows]
    # A bar far beyond the limit would leave nothing of the others to be seen.
    scale = max(totals, default=1.0) or 1.0
    scale = min(scale, 2 * limit) if limit else scale
    legend = "".join(
        f'<span><i style="background:{colours[o]}"></i>{escape(o)}</span>'
        for o in owners
    )
    drawn = []
    for (name, parts), total in zip(rows, totals, strict=True):
        left, pieces = 0.0, []
        for owner, size in parts.items():
            width = 1000 * size / scale
            if size and left < 1000:
                title = escape(f"{owner}: {unit(size)}")
                pieces.append(
                    f'<rect x="{left:.2f}" width="{min(width, 1000 - left):.2f}" '
                    f'height="18" fill="{colours[owner]}"><title>{title}</title></rect>'
                )
            left += width
        if limit and limit <= scale:
            at = 1000 * limit / scale
            pieces.append(
                f'<line x1="{at:.2f}" x2="{at:.2f}" y1="-2" y2="20" stroke="#000" '
                f'stroke-width="2"><title>{escape(mark)}</title></line>'
            )
        label = escape(f"{name}: {unit(total)}")
        drawn.append(
            f'<div class="name">{label}</div><svg role="img" aria-label="{label}" '
            f'viewBox="0 -2 1000 22" width="100%" height="22" '
            f'preserveAspectRatio="none">{"".join(pieces)}</svg>'
        )
    note = f"<p>The line: {escape(mark)}.</p>" if mark else ""
    return f'<div class="legend">{legend}</div>{"".join(drawn)}{note}'
