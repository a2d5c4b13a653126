"""Accounts for the wall time of a run, from the lines of ``metrics.jsonl``.

A fit that trains writes lines with ``"seconds"``: its seconds so far by part, except
the steps. The first of these lines also has ``"before"``: the seconds of all earlier
fits of the run. So the account is complete although a resumed run removes lines. The
last line has ``"ended": true``, unless the fit ended by an error or a SIGTERM.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnx_parallel.drawing import aligned
from nnx_parallel.files import open_regular, parse_object
from nnx_parallel.precision import format_clock

MAX_LINE_BYTES = 16 * 2**20

PARTS = {
    "steps": "steps",
    "start": "start",
    "compile": "compile",
    "data": "data",
    "saves": "saves",
    "evaluation": "evaluation",
    "restarts": "restarts ({num_restarts:,})",
    "repeated": "repeated steps ({num_repeated:,})",
}
"""Parts of the wall time, and their texts. ``steps`` has the productive seconds."""

_COUNTS = ("num_restarts", "num_repeated")
_NUM_SHOWN = 3


class Account:
    """Seconds of a run by part, over all its fits.

    The productive seconds are the rest: the time of the steps, with their callbacks,
    without steps that were done again. The time from the end of a fit to the next fit
    counts only if the fit ended by an error, a kill or a SIGTERM.

    Example:
        >>> account = Account()
        >>> account.read({"step": 0, "time": 10, "seconds": {"start": 2}, "before": {}})
        >>> account.read({"step": 1, "time": 14, "seconds": {"start": 2, "saves": 1}})
        >>> account.totals()
        {'start': 2.0, 'saves': 1.0, 'steps': 3.0}
        >>> account.line()
        'Goodput 50.0 % of 0:06: start 33.3 %, saves 16.7 %.'
    """

    def __init__(self) -> None:
        self.step = 0
        self._before: dict[str, float] = {}
        self._spent: dict[str, float] = {}
        self._began: float | None = None  # the time when the present fit was called
        self._latest = 0.0
        self._has_ended = False

    def read(self, line: Mapping[str, Any]) -> None:
        """Takes the next line. Lines of other programs change nothing."""
        time, seconds = _number(line.get("time")), _numbers(line.get("seconds"))
        before = _numbers(line.get("before"))
        # Lines of a fit that finds nothing to train must not count as time of the run.
        if time is None or "config" in line or "message" in line:
            return
        if seconds is not None and before is not None:
            self._before = before
            self._began = self._latest = time - sum(seconds.values())
        if seconds is not None:
            self._spent, self._has_ended = seconds, line.get("ended") is True
        self._latest = max(self._latest, time)
        step = line.get("step")
        self.step = step if isinstance(step, int) else self.step

    @property
    def productive_seconds(self) -> float:
        """Seconds of steps that were not done again."""
        began = self._latest if self._began is None else self._began
        spent = self._latest - began - sum(self._spent.values())
        return self._before.get("steps", 0.0) + max(0.0, spent)

    def totals(self) -> dict[str, float]:
        """Returns the seconds by part, and the counts ``num_restarts`` and others."""
        found = dict(self._before)
        for name, seconds in self._spent.items():
            found[name] = found.get(name, 0.0) + seconds
        return found | {"steps": self.productive_seconds}

    def repeat_from(self, step: int, productive_seconds: float) -> None:
        """Counts the steps after ``step`` as steps that are done again.

        Args:
            step: The last step that stays.
            productive_seconds: `productive_seconds` at the end of that step.
        """
        totals = self.totals()
        lost = max(0.0, totals["steps"] - productive_seconds)
        count = max(0, self.step - step)
        if not count or self._began is None:
            return
        changes = {"steps": -lost, "repeated": lost, "num_repeated": count}
        for name, change in changes.items():
            totals[name] = totals.get(name, 0) + change
        # No fit is in progress, so all seconds count as seconds before the next fit.
        self._before, self._spent, self._began = totals, {}, self._latest

    def next_before(self, time: float) -> dict[str, float]:
        """Returns the seconds before a fit that is called at this time."""
        if self._began is None:
            return {}
        found = self.totals()
        if not self._has_ended:
            gap = max(0.0, time - self._latest)
            found["restarts"] = found.get("restarts", 0.0) + gap
            found["num_restarts"] = found.get("num_restarts", 0) + 1
        return found

    @property
    def total_seconds(self) -> float:
        """All seconds of the account."""
        return sum(x for name, x in self.totals().items() if name not in _COUNTS)

    def line(self) -> str:
        """Returns the goodput and the largest losses in one line, or ""."""
        if not (total := self.total_seconds):
            return ""
        (_, share, _), *rows = self._rows()
        rows.sort(key=lambda row: -row[2])
        shown = [f"{name} {share}" for name, share, x in rows if x >= 5e-4 * total]
        others = sum(x for *_, x in rows[_NUM_SHOWN:])
        if len(shown) > _NUM_SHOWN:
            shown[_NUM_SHOWN:] = [f"others {100 * others / total:.1f} %"]
        causes = f": {', '.join(shown)}" if shown else ""
        return f"Goodput {share} of {format_clock(total)}{causes}."

    def table(self) -> str:
        """Returns a text with a line for each part, or "" if there is no fit."""
        if not (total := self.total_seconds):
            return ""
        (_, share, _), *_ = rows = self._rows()
        cells = [(name, format_clock(x), share) for name, share, x in rows]
        title = f"goodput: {share} of {format_clock(total)}"
        return "\n".join([title, aligned(cells, indent="  ")])

    def is_worth_a_line(self) -> bool:
        """Returns True if the run was restarted, or took more than a minute."""
        return bool(self.totals().get("num_restarts")) or self.total_seconds > 60

    def _rows(self) -> list[tuple[str, str, float]]:
        """Returns the text, the share and the seconds of each part, steps first."""
        totals, total = self.totals(), self.total_seconds
        counts = {name: int(totals.get(name, 0)) for name in _COUNTS}
        return [
            (text.format(**counts), f"{100 * totals[name] / total:.1f} %", totals[name])
            for name, text in PARTS.items()
            if name == "steps" or totals.get(name)
        ]


def read_account(path: Path) -> Account:
    """Returns the account of a run from its file, which a live run may be writing.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a regular file, or a line is not a JSON object.
    """
    account, skipped = Account(), b""
    with open(path, "rb", opener=open_regular) as file:
        for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
            if not line.endswith(b"\n"):  # torn by a crash, or being written
                break
            # Most lines of a long run have metrics. Of these, the last one is enough.
            if b'"seconds": {' in line:
                for needed in filter(None, (skipped, line)):
                    account.read(parse_object(needed, path))
                skipped = b""
            elif b'"config": ' not in line and b'"message": ' not in line:
                skipped = line
    if skipped:
        account.read(parse_object(skipped, path))
    return account


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and 0 <= value < math.inf
    return float(value) if is_number else None


def _numbers(values: Any) -> dict[str, float] | None:
    """Returns the numbers of a JSON object, or ``None`` if it has other values."""
    if not isinstance(values, dict):
        return None
    found = {name: x for name, y in values.items() if (x := _number(y)) is not None}
    return found if len(found) == len(values) else None
