"""A plan's result: ranked candidates with reasons, and the code for the best one."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from nnx_parallel.drawing import Picture
from nnx_parallel.errors import PlanError
from nnx_parallel.plan.candidates import Candidate
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.roofline import Assumptions, Costs, StepTime
from nnx_parallel.precision import format_bytes
from nnx_parallel.sharding.offload import Offload

# Okabe and Ito's palette, which colour-blind readers can tell apart.
PRODUCTS, _MEMORY = "#0072b2", "#009e73"
HEADER = ("", "strategy, microbatches, remat", "GiB", "step, s", "MFU", "sent, GB",
          "hidden", "why not")  # fmt: skip
AXES = ("#cc79a7", "#e69f00", "#d55e00", "#56b4e9", "#999999")
EQUAL = 0.03
"""Times that differ by at most this share count as equal."""
ERROR_BAND = (0.6, 1.5)
"""Bytes of a compiled step, divided by the formulas' estimate (docs/benchmarks.md)."""
_MOST = 50  # candidates in the JSON of a plan


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A candidate, its costs, and the reason if it was not chosen.

    Attributes:
        candidate: The candidate.
        axis_sizes: Sizes of its mesh axes, outermost first.
        estimate: Its costs by formulas; ``None`` if it cannot run.
        costs: Its costs, by the compiler if it was compiled, otherwise by formulas.
        time: Range of its step's time; ``None`` without costs.
        estimated_time: The range by formulas, even if the candidate was compiled.
        refused: The text of the error if it cannot run; empty if it can.
        why: Why it was not chosen; empty for the best candidate.
        dtype: Dtype of its products; empty for the plan's dtype.
    """

    candidate: Candidate
    axis_sizes: dict[str, int]
    estimate: Costs | None = None
    costs: Costs | None = None
    time: StepTime | None = None
    estimated_time: StepTime | None = None
    refused: str = ""
    why: str = ""
    dtype: str = ""

    @property
    def name(self) -> str:
        """The candidate as shortened Python."""
        code = self.candidate.code.removeprefix("strategy=").replace("size=", "")
        code = code.replace("Precision.mixed_bfloat16()", "mixed_bfloat16")
        return code.replace(f"backend=Backend(offload={Offload()!r})", "offload")

    def fits(self, topology: Topology) -> bool:
        """Returns True if a device has enough memory for the candidate."""
        usable = topology.hardware.usable_bytes
        return self.costs is not None and self.costs.total_bytes <= usable

    @property
    def is_compiled(self) -> bool:
        """True if its costs and time come from the compiler."""
        return self.costs is not None and self.costs.is_compiled

    @property
    def num_axes(self) -> int:
        """Number of mesh axes with more than one device."""
        return sum(1 for size in self.axis_sizes.values() if size > 1)

    def mfu(self, topology: Topology, dtype: str) -> tuple[float, float]:
        """Returns the lowest and highest model FLOP/s, as shares of the peak."""
        if self.costs is None or self.time is None:
            return 0.0, 0.0
        peak = topology.hardware.peak(self.dtype or dtype)
        slow, fast = (
            self.costs.model_flops / (seconds * peak)
            for seconds in (self.time.slow, self.time.fast)
        )
        return slow, fast


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `plan`, which can be printed, and saved as JSON or as a page.

    Attributes:
        topology: The devices.
        model_name: Class of the model.
        num_params: Number of elements of the trained parameters.
        num_rows: Rows of a global batch.
        dtype: Dtype of the products.
        entries: Candidates, the best first. Candidates that do not fit come after all
            that fit, the smallest first.
        num_enumerated: Number of candidates that were considered.
        num_dropped: Number of candidates that formulas ruled out.
        assumptions: The assumptions behind the ranges.
        notes: Limits of this plan, such as a missing compiler.
        seconds: Seconds that the parts of the search took, by name.
    """

    topology: Topology
    model_name: str
    num_params: int
    num_rows: int
    dtype: str
    entries: tuple[Entry, ...]
    num_enumerated: int
    num_dropped: int
    assumptions: Assumptions
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> Entry | None:
        """The best candidate; ``None`` if no candidate fits."""
        first = self.entries[0] if self.entries else None
        return first if first is not None and first.fits(self.topology) else None

    @property
    def code(self) -> str:
        """The line of Python for the best candidate; empty if nothing fits."""
        return f"Trainer(..., {self.best.candidate.code})" if self.best else ""

    @property
    def title(self) -> str:
        """The model, the batch and the devices."""
        devices = f"{self.topology.num_devices:,} x {self.topology.hardware.name}"
        return (
            f"{self.model_name} of {self.num_params:,} parameters, "
            f"{self.num_rows:,} rows a step, on {self.topology.name} ({devices})"
        )

    def timed(self, entry: Entry | None = None) -> tuple[Entry, StepTime]:
        """Returns a candidate, by default the first, and its time.

        Raises:
            PlanError: If the candidate cannot run.
        """
        entry = entry or (self.entries[0] if self.entries else None)
        if entry is None or entry.time is None or not entry.time.lanes:
            why = entry.refused if entry else "The plan has no candidate."
            raise PlanError(f"A step that cannot run has no picture. {why}")
        return entry, entry.time

    def table(self, num_rows: int = 12) -> Table:
        """Returns the best candidates as a rich table."""
        table = Table(
            caption_justify="left",
            caption_style="",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        shown = self.entries[:num_rows]
        # Readers copy the code, so no word of it is broken over lines.
        words = [word for entry in shown for word in entry.name.split()]
        for name in HEADER:
            if name == "why not":
                table.add_column(name, min_width=12, ratio=1)
            elif name == "strategy, microbatches, remat":
                least = max(map(len, words), default=0)
                table.add_column(name, overflow="fold", min_width=least, ratio=1)
            else:
                table.add_column(name, justify="right" if name else "left")
        for i, entry in enumerate(shown):
            table.add_row(str(i + 1), entry.name, *self.cells(entry))
        if more := len(self.entries) - num_rows:
            table.caption = f"{more} more" if more > 0 else None
        return table

    def cells(self, entry: Entry) -> tuple[str, ...]:
        """Returns an entry's cells in the table, after its number and code."""
        costs, time = entry.costs, entry.time
        if costs is None or time is None:
            return "", "", "", "", "", entry.refused
        slow, fast = entry.mfu(self.topology, self.dtype)
        gib = costs.total_bytes / 2**30
        size = f"{gib:.1f}" if gib >= 0.1 else format_bytes(costs.total_bytes)
        hidden = sum(t.sent_bytes * t.hidden[0] for t in costs.traffic)
        share = f"{hidden / costs.sent_bytes:.0%}" if costs.sent_bytes else "-"
        return (
            f"{'' if costs.is_compiled else '~'}{size}",
            f"{'' if costs.is_compiled else '~'}{time.fast:.3g} to {time.slow:.3g}",
            f"{_percent(slow)} to {_percent(fast)}",
            f"{costs.sent_bytes / 1e9:.3g}",
            share if costs.is_compiled else "?",
            entry.why,
        )

    def summary(self) -> str:
        """Describes the search and the assumptions, and gives the best one's code."""
        usable = self.topology.hardware.usable_bytes
        compiled = sum(1 for e in self.entries if e.costs and e.costs.is_compiled)
        low, high = ERROR_BAND
        lines = [
            f"{self.num_enumerated:,} candidates; formulas ruled out "
            f"{self.num_dropped:,}; {compiled} compiled; "
            f"{sum(self.seconds.values()):.0f} s",
            f"a program gets {format_bytes(usable)} of a device's memory "
            f"({self.topology.hardware.source})",
            *self.assumptions.lines(),
            "values with ~ or ? are estimates by formulas; a compiled step may need "
            f"{low:g} to {high:g} times this memory",
            "MFU counts attention's masked scores, but not recomputation",
            *self.notes,
        ]
        if (best := self.best) is not None:
            owners = owners_of(best.costs)
            lines += [f"memory of the first candidate: {owners}", "", self.code]
        else:
            lines.append(
                "Nothing fits. Take more devices or fewer rows a step; the first "
                "candidate needs the least memory."
            )
        return "\n".join(lines)

    def picture(self) -> Picture:
        """Returns the table and its summary, at the width of the terminal."""
        width = max(100, shutil.get_terminal_size((140, 24)).columns)
        body = Group(self.table(), Text(self.summary()))
        return Picture(self.title, body, columns=width, svg_columns=180)

    def __rich__(self) -> Group:
        return Group(Text(self.title, style="bold"), self.table(), Text(self.summary()))

    def __str__(self) -> str:
        return str(self.picture())

    def __repr__(self) -> str:
        return f"<plan of {self.title}: {self.code or 'nothing fits'}>"

    def to_json(self) -> dict[str, Any]:
        """Returns the values as plain data, in bytes and seconds.

        Only the 50 best candidates are included; `num_enumerated` counts all.
        """
        return {
            "topology": self.topology.name,
            "model": self.model_name,
            "num_params": self.num_params,
            "num_rows": self.num_rows,
            "dtype": self.dtype,
            "usable_bytes": self.topology.hardware.usable_bytes,
            "num_enumerated": self.num_enumerated,
            "num_dropped": self.num_dropped,
            "assumptions": vars(self.assumptions),
            "notes": list(self.notes),
            "seconds": self.seconds,
            "code": self.code,
            "candidates": [self._entry_json(entry) for entry in self.entries[:_MOST]],
        }

    def _entry_json(self, entry: Entry) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "code": entry.candidate.code,
            "mesh": entry.axis_sizes,
            "fits": entry.fits(self.topology),
            "why": entry.why or entry.refused,
        }
        if (costs := entry.costs) is None or entry.time is None:
            return facts
        return facts | {
            "is_compiled": costs.is_compiled,
            "compile_seconds": costs.compile_seconds,
            "memory": dict(costs.memory),
            "estimated_memory": dict((entry.estimate or costs).memory),
            "flops": costs.flops,
            "model_flops": costs.model_flops,
            "moved_bytes": costs.moved_bytes,
            "bubble": costs.bubble,
            "traffic": [vars(each) for each in costs.traffic],
            "step_seconds": [entry.time.fast, entry.time.slow],
            "slow_seconds_by_part": dict(entry.time.parts),
            "mfu": list(entry.mfu(self.topology, self.dtype)),
        }


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{100 * share:.1g}%"


def lane_colours(time: StepTime) -> dict[str, str]:
    """Returns a colour for each lane of a step, the same in all its pictures."""
    found = {"products": PRODUCTS, "memory": _MEMORY}
    axes = [lane.name for lane in time.lanes if lane.name not in found]
    return found | {name: AXES[i % len(AXES)] for i, name in enumerate(axes)}


def owners_of(costs: Costs | None) -> str:
    """Describes a device's memory by owner, the largest first."""
    owned = sorted((costs.memory if costs else {}).items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in owned if size)


def explain(entry: Entry, best: Entry | None, topology: Topology) -> str:
    """Explains in one line why a candidate was not chosen."""
    costs, time = entry.costs, entry.time
    if costs is None or time is None:
        return entry.refused
    if not entry.fits(topology):
        usable = topology.hardware.usable_bytes
        owner, size = max(costs.memory.items(), key=lambda item: item[1])
        return (
            f"does not fit: {format_bytes(costs.total_bytes)} of "
            f"{format_bytes(usable)}; the largest part is {owner}, {format_bytes(size)}"
        )
    if best is None or best.time is None or best is entry:
        return ""
    # A time by formulas is compared only with another time by formulas.
    is_guess = best.is_compiled and not entry.is_compiled
    least = (is_guess and best.estimated_time) or best.time
    ratio = time.middle / least.middle
    names = [*time.parts, *(n for n in least.parts if n not in time.parts)]
    more = {n: time.parts.get(n, 0) - least.parts.get(n, 0) for n in names}
    name = max(more, key=lambda n: more[n])
    if is_guess and ratio < 0.995:
        return f"{ratio:.2f} x the time by formulas; not compiled"
    if ratio < 1.005:
        return "as fast by formulas; not compiled" if is_guess else "as fast"
    if more[name] <= 0:
        return f"{ratio:.2f} x as slow"
    words = {
        "products": "computes more",
        "bubble": f"stages wait {costs.bubble:.0%} of the time",
        "memory": "moves more memory",
    }
    return f"{ratio:.2f} x as slow: {words.get(name, f'waits for {name}')}"


def order(entries: Sequence[Entry], topology: Topology) -> list[Entry]:
    """Sorts candidates: fitting ones, fastest first; then others, smallest first."""

    def key(entry: Entry) -> tuple[int, float, float, int]:
        if entry.costs is None or entry.time is None:
            return 2, 0.0, 0.0, 0
        if not entry.fits(topology):
            return 1, entry.costs.total_bytes, 0.0, 0
        # Equally fast candidates are sorted by number of mesh axes, then by memory.
        # Three digits count, because a step's time is not known more precisely.
        time, size = float(f"{entry.time.middle:.3g}"), int(entry.costs.total_bytes)
        return 0, time, entry.num_axes, size

    return sorted(entries, key=key)


def simplest_first(
    ranked: Sequence[Entry], topology: Topology
) -> tuple[list[Entry], int]:
    """Moves the equally fast candidates to the front, the simplest first.

    Candidates are equally fast if they differ by at most `EQUAL` from the first, and if
    their times come from the same source: the compiler or the formulas. The simplest
    has the fewest mesh axes, then the fewest microbatches, then the shortest list of
    arguments.

    Returns:
        The candidates, and the number of equally fast ones.
    """
    if not ranked or ranked[0].time is None:
        return [*ranked], 0
    first, limit = ranked[0], (1 + EQUAL) * ranked[0].time.middle

    def is_equal(entry: Entry) -> bool:
        is_near = entry.time is not None and entry.time.middle <= limit
        return (
            is_near and entry.fits(topology) and entry.is_compiled == first.is_compiled
        )

    def key(entry: Entry) -> tuple[int, int, int]:
        candidate = entry.candidate
        return entry.num_axes, candidate.num_microbatches, candidate.code.count("=")

    equal = sorted(filter(is_equal, ranked), key=key)
    rest = [entry for entry in ranked if not is_equal(entry)]
    return [*equal, *rest], len(equal)
