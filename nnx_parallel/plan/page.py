"""A plan as a page: memory by owner, a step in time, its roofs, and the table.

One file, without scripts, that a browser shows and a colleague can be sent.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from nnx_parallel.drawing import as_html
from nnx_parallel.errors import PlanError
from nnx_parallel.plan.pictures import draw_memory, draw_timeline
from nnx_parallel.plan.report import HEADER, Entry, Plan
from nnx_parallel.plan.roofs import draw_roofline
from nnx_parallel.visualize.figures import DARK, LIGHT, Figure

_SHOWN = 12  # candidates of the table, and bars
_DRAWN = 4  # of them with a timeline and roofs, the first at once

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --ground: #fff; --box: #f4f4f4;
        --edge: #d0d5da; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 76rem;
       padding: 0 1rem; color: var(--ink); background: var(--ground); }
h1 { font-size: 1.5rem; line-height: 1.3; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2rem; }
pre { background: var(--box); padding: .8rem; border-radius: 6px;
      white-space: pre-wrap; overflow-wrap: anywhere; }
div { overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .84rem; margin-bottom: .8rem;
        overflow-wrap: normal; }
td, th { padding: .3rem .7rem; vertical-align: top; text-align: left;
         border-bottom: 1px solid var(--edge); white-space: nowrap; }
td:nth-child(2), td:last-child { white-space: normal !important; min-width: 16rem; }
figure { margin: 0; max-width: 40rem; }
svg { display: block; width: 100%; height: auto; }
.pair { display: grid; gap: 1.5rem 2.5rem; margin: .8rem 0;
        grid-template-columns: repeat(auto-fit, minmax(min(27rem, 100%), 1fr)); }
summary { cursor: pointer; padding: .3rem 0; overflow-wrap: anywhere; }
"""
_DARK = """
:root { --ink: #e4e7eb; --ground: #14181e; --box: #232a33; --edge: #3b4552; }
"""


def render(plan: Plan) -> str:
    """The page of a plan."""
    rows = [
        (str(i + 1), e.candidate.code, *plan.cells(e))
        for i, e in enumerate(plan.entries[:_SHOWN])
    ]
    steps = [e for e in plan.entries[:_DRAWN] if e.time and e.time.lanes]
    parts = [
        f"<h1>{escape(plan.title)}</h1>",
        f"<pre>{escape(plan.code or 'Nothing fits.')}</pre>",
        "<h2>Candidates</h2>",
        as_html(HEADER, rows, notes=plan.summary().splitlines()),
        "<h2>Memory of a device, by owner</h2>",
        _figure(draw_memory(plan, _SHOWN)),
        "<h2>A step</h2>",
        f"<p>{_WORDS}</p>",
        *(_step(plan, entry, is_first=entry is steps[0]) for entry in steps),
    ]
    body = "\n".join(parts)
    dark = f"@media (prefers-color-scheme: dark) {{{_DARK}{DARK}}}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plan.title)}</title><style>{_STYLE}{LIGHT}{dark}</style>"
        f"</head><body>{body}</body></html>\n"
    )


_WORDS = (
    "A step in time, and its roofs: FLOP/s against FLOPs for each byte over memory and "
    "links. A line is from the data sheet, a band the assumption; a bar is "
    "the step, from the slow end of its time to the fast one. The roof that a bar "
    "comes nearest to bounds the step."
)


def _step(plan: Plan, entry: Entry, *, is_first: bool) -> str:
    """Both pictures of a candidate, which open at a click but for the first."""
    figures = draw_timeline(plan, entry), draw_roofline(plan, entry)
    pair = f'<div class="pair">{"".join(map(_figure, figures))}</div>'
    code = f"<code>{escape(entry.candidate.code)}</code>"
    opened = ' open=""' if is_first else ""
    return f"<details{opened}><summary>{code}</summary>{pair}</details>"


def _figure(figure: Figure) -> str:
    return f"<figure>{figure.inline}</figure>"


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
