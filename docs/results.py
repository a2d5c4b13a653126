"""Results of the benchmarks as Markdown, with a plot of their ratios."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
PLOTS = DOCS / "_build" / "plots"


def page() -> list[str]:
    """Returns the lines of the page, with a section for each file of results."""
    lines: list[str] = []
    for file in sorted(RESULTS.glob("*.json")):
        lines += _part(file.stem, json.loads(file.read_text()))
    return lines


def _part(name: str, found: dict[str, Any]) -> list[str]:
    figures = found["figures"]
    ratios = {key: each for key, each in figures.items() if _is_ratio(each)}
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    # A rubric, because text inside a directive cannot have sections.
    lines = [f"```{{rubric}} {found['title']}", "```", ""]
    if ratios:
        _plot(name, ratios)
        alt = "; ".join(f"{key}: {each['median']:.2f}" for key, each in ratios.items())
        lines += [
            f"![Ratios with their intervals. {alt}](/_build/plots/{name}.svg)",
            "",
        ]
    for table in _tables(figures):
        lines += [*table, ""]
    return [
        *lines,
        f"`{found['command']}` on {found['hardware']}, load average "
        f"{found['load average']}; {versions}.",
        "",
    ]


def _tables(figures: dict[str, Any]) -> list[list[str]]:
    """Makes a column for each variant of `variant: quantity`; lists other figures.

    Variants with a quantity in common share a table.
    """
    columns: dict[str, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    for key, each in figures.items():
        variant, colon, quantity = key.partition(": ")
        if colon:
            columns.setdefault(variant, {})[quantity] = each
        else:
            others[key] = each
    tables = []
    while columns:
        rows = dict.fromkeys(next(iter(columns.values())))
        names = [name for name, each in columns.items() if rows.keys() & each.keys()]
        group = {name: columns.pop(name) for name in names}
        rows |= dict.fromkeys(row for each in group.values() for row in each)
        cells = [
            [_shown(each[row]) if row in each else "" for each in group.values()]
            for row in rows
        ]
        tables.append(_table(["", *group], zip(rows, cells, strict=True)))
    if others:
        cells = ((key, [_shown(each)]) for key, each in others.items())
        tables.append(_table(["measured", "figure"], cells))
    return tables


def _table(head: list[str], rows: Iterable[tuple[str, list[str]]]) -> list[str]:
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    lines += [[name, *cells] for name, cells in rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _is_ratio(figure: Any) -> bool:
    return isinstance(figure, dict) and "median" in figure


def _shown(figure: Any) -> str:
    if _is_ratio(figure):
        low, high = figure["low"], figure["high"]
        return f"{figure['median']:.3f} ({low:.3f} to {high:.3f})"
    if isinstance(figure, dict):
        return ", ".join(f"{key} {value}" for key, value in figure.items()) or "none"
    if isinstance(figure, bool):
        return "yes" if figure else "no"
    if isinstance(figure, float):
        return f"{figure:.4g}"
    return f"{figure:,}" if isinstance(figure, int) else str(figure)


def _plot(name: str, ratios: dict[str, Any]) -> None:
    """Medians and their intervals, one line each, on a light background."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = name
    names = list(ratios)[::-1]
    figure, axes = plt.subplots(figsize=(7, 0.9 + 0.34 * len(names)))
    for row, key in enumerate(names):
        each = ratios[key]
        axes.plot([each["low"], each["high"]], [row, row], color="#2f6db5", lw=3)
        axes.plot(each["median"], row, "o", color="#1f2933", ms=5)
    axes.axvline(1.0, color="#9aa5b1", lw=1, zorder=0)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_xlabel(
        "ratio (1: the same); line: 95 % interval of the median", fontsize=9
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    PLOTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOTS / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
