"""Shows progress as one line that a terminal or notebook redraws, or as plain lines."""

import importlib
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from nnx_parallel.precision import format_bytes, format_clock, format_number

_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 16, 30
_NOTEBOOK_WIDTH = 110

Metrics = Mapping[str, float]


def _memory(metrics: Metrics) -> str:
    share = metrics.get("device_memory_fraction")
    of_all = "" if share is None else f" ({share:.0%})"
    return f"memory {format_bytes(metrics['device_memory_bytes'])}{of_all}"


def _tokens(metrics: Metrics) -> str:
    speed = f"{_count(metrics['tokens_per_second']):>5} tok/s"
    return speed + " total" * ("tokens_per_second_per_device" in metrics)


def _tokens_each(metrics: Metrics) -> str:
    return f"{_count(metrics['tokens_per_second_per_device']):>5} tok/s per device"


# The Trainer's metrics, in the order in which the line shows them after the loss's
# metrics. On a narrow terminal, the metrics with the highest rank are dropped first.
_FIELDS: dict[str, tuple[int, Callable[[Metrics], str]]] = {
    "grad_norm": (4, lambda m: f"grad norm {format_number(m['grad_norm'])}"),
    "learning_rate": (8, lambda m: f"lr {format_number(m['learning_rate'])}"),
    "tokens_per_second": (2, _tokens),
    "tokens_per_second_per_device": (7, _tokens_each),
    "examples_per_second": (
        2,
        lambda m: f"{_count(m['examples_per_second']):>5} rows/s",
    ),
    "step_seconds": (7, lambda m: f"{_duration(m['step_seconds']):>7}/step"),
    "device_memory_bytes": (6, _memory),
    "mfu": (5, lambda m: f"{m['mfu']:>3.0%} MFU"),
    "hfu": (8, lambda m: f"{m['hfu']:>3.0%} HFU"),
}
_CLOCK_RANK, _OWN_RANK = 1, 3
_NOT_SHOWN = {
    "loss", "compile_seconds", "data_wait_seconds", "device_memory_fraction",
    "loss_scale", "lost_updates", "skipped", "tflops_per_device",
}  # fmt: skip


class ConsoleLogger:
    """Shows progress, loss, the loss's other metrics, speed, memory and time left.

    On a terminal this is one line, redrawn in place::

        step  120/1000 ━━━━╸━━━━━━━━━━ 12% loss  2.413 · 48.2k tok/s · 4:32 left

    If the line does not fit, values are dropped in this order: HFU, learning rate,
    tokens per second per device, seconds per step, memory, MFU, the gradient's norm,
    and the loss's other metrics. A Jupyter notebook redraws one display, with this line
    below the messages. If the output is neither, a plain line with all metrics is
    printed every ``every`` steps, and after ``seconds`` without one. In all cases, each
    evaluation and each message gets a separate line.

    Args:
        every: Number of steps from one plain line to the next.
        seconds: A plain line is also printed this many seconds after the last one.
        console: Console to write to; by default the notebook or standard output.

    Example:
        >>> import sys
        >>> logger = ConsoleLogger(every=1, console=Console(file=sys.stdout, width=80))
        >>> logger.start(first_step=0, num_steps=10)
        >>> logger.log(1, {"loss": 2.4131, "tokens_per_second": 48_213.0})
        step  1/10 · loss  2.413 · 48.2k tok/s
        >>> logger.log(1, {"eval_loss": 2.5})
        step  1/10 · eval_loss 2.500
        >>> logger.finish()
    """

    def __init__(
        self, *, every: int = 50, seconds: float = 30, console: Console | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}. It must be 1 or more.")
        self.every, self.seconds = every, seconds
        self._console, self._is_given = console, console is not None
        self._live: Live | None = None
        self._display: _Display | None = None
        self._line = _StatusLine(0, 0)
        self._next_line, self._next_time = 0, math.inf

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Starts drawing, if the console is a terminal."""
        self.finish()
        # The console is not made in `__init__`, because standard output may be replaced
        # before the fit.
        self._console = self._console or Console()
        self._line = _StatusLine(first_step, num_steps)
        self._next_line = first_step + 1
        if not self._is_given and (module := _notebook()):
            self._display = _Display(module, self._line)
        elif self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._line, console=self._console, refresh_per_second=8)
            self._live.start()

    def log(self, step: int, metrics: Metrics) -> None:
        """Updates the line on a terminal, or prints a plain line if one is due."""
        evaluation = {k: v for k, v in metrics.items() if k.startswith("eval_")}
        training = {k: v for k, v in metrics.items() if k not in evaluation}
        if training:  # an evaluation does not make a plain line due
            self._line.update(step, training)
            # A line is due at the last step too, so that a log ends with the final
            # numbers.
            is_due = step >= min(self._next_line, self._line.num_steps)
            is_due |= time.monotonic() >= self._next_time
            if self._display is not None:
                self._display.draw(step >= self._line.num_steps)
            elif self._live is None and is_due:
                self._next_line = (step // self.every + 1) * self.every
                self._next_time = time.monotonic() + self.seconds
                self._print([self._line.position(step), *self._line.fields()])
        if evaluation:
            fields = [
                f"{name} {format_number(value)}" for name, value in evaluation.items()
            ]
            self._print([self._line.position(step), *fields])

    @property
    def is_on_output(self) -> bool:
        """True if messages go to standard output, not to a notebook or a file."""
        is_file = self._console is not None and self._console.file is not sys.stdout
        return self._display is None and not is_file

    def message(self, text: str) -> None:
        """Prints the text on a separate line."""
        self._print([text])

    def shorten(self, num_steps: int) -> None:
        """Sets the run's last step, after the data has ended early."""
        self._line.num_steps = num_steps

    def finish(self) -> None:
        """Stops drawing. After a step, the line stays and shows the run's time."""
        if self._live is not None:
            self._line.ended = time.monotonic()
            # If a fit fails before its first step, the line is removed.
            self._live.transient = self._line.first is None
            self._live.stop()
            self._live = None
        if self._display is not None:
            self._line.ended = time.monotonic()
            self._display.draw(is_due=True)
            self._display = None

    def _print(self, fields: list[str]) -> None:
        if self._display is not None:
            self._display.add(" · ".join(fields))
            return
        console = self._console = self._console or Console()
        # Rich would read the brackets of a plain string as markup. `soft_wrap` keeps a
        # line in one piece on a narrow console.
        console.print(Text(_separator(console.options).join(fields)), soft_wrap=True)


def _notebook() -> Any:
    """Returns ``IPython.display`` if a notebook runs this code, or ``None``."""
    ipython: Any = sys.modules.get("IPython")
    # The shell of a notebook has a kernel. The shell of a terminal has none.
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    return importlib.import_module("IPython.display")


class _Display:
    """A display of a notebook: messages, and below them the progress line.

    Args:
        module: ``IPython.display``.
        line: The progress line.
    """

    def __init__(self, module: Any, line: "_StatusLine") -> None:
        self._module, self._line = module, line
        self._messages: list[str] = []
        self._handle: Any = None
        self._next_time = 0.0

    def add(self, text: str) -> None:
        """Adds a message."""
        self._messages.append(text)
        self.draw(is_due=True)

    def draw(self, is_due: bool) -> None:
        """Draws if it is due, or if the last drawing is half a second old."""
        if not is_due and time.monotonic() < self._next_time:
            return
        self._next_time = time.monotonic() + 0.5
        lines = list(self._messages)
        # If a fit fails before its first step, the line is removed.
        if self._line.first is not None or self._line.ended is None:
            # Rich would write HTML in a notebook.
            console = Console(
                file=io.StringIO(), width=_NOTEBOOK_WIDTH, force_jupyter=False
            )
            with console.capture() as capture:
                console.print(self._line)
            lines.append(capture.get().rstrip())
        data = {"text/plain": "\n".join(lines)}
        if self._handle is None:
            self._handle = self._module.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class _StatusLine:
    """The position, metrics and clock of a run, fitted to the terminal's width."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self.num_steps = num_steps
        self._step = first_step
        self._metrics: dict[str, float] = {}
        self._began = self._latest = time.monotonic()
        # The first step includes compilation, so speed is measured from its end.
        self.first: tuple[int, float] | None = None
        self.ended: float | None = None

    def update(self, step: int, metrics: Metrics) -> None:
        self._step = step
        # This is a new dict, because the thread that redraws the line may be reading
        # the old one.
        self._metrics = {**self._metrics, **metrics}
        self._latest = time.monotonic()
        self.first = self.first or (step, self._latest)

    def position(self, step: int) -> str:
        return f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}"

    def fields(self, width: int | None = None) -> list[str]:
        """Returns all fields, or the most important fields that fit the width."""
        found = list(self._ranked_fields())
        # The first field is never dropped. Among fields of equal rank the last one is
        # dropped first.
        while width is not None and len(found) > 1:
            if sum(len(text) + 3 for _, text in found) - 3 <= width:
                break
            found.pop(max(range(1, len(found)), key=lambda i: (found[i][0], i)))
        return [text for _, text in found]

    def _ranked_fields(self) -> Iterator[tuple[int, str]]:
        metrics = self._metrics
        if "loss" in metrics:
            yield 0, f"loss {format_number(metrics['loss']):>6}"
        for name, value in metrics.items():
            part = name.removeprefix("learning_rate/")
            if part != name:  # the rate of a part of the optimizer
                yield _FIELDS["learning_rate"][0], f"lr {part} {format_number(value)}"
            elif name not in _FIELDS and name not in _NOT_SHOWN:
                yield _OWN_RANK, f"{name} {format_number(value)}"
        for name, (rank, spell) in _FIELDS.items():
            is_said = name == "examples_per_second" and "tokens_per_second" in metrics
            if name in metrics and not is_said:
                yield rank, spell(metrics)
        if clock := self._clock():
            yield _CLOCK_RANK, clock

    def _clock(self) -> str:
        if self.ended is not None:
            return f"took {format_clock(self.ended - self._began)}"
        if self.first is None:
            return f"compiling {format_clock(time.monotonic() - self._began)}"
        first_step, first_time = self.first
        steps, seconds = self._step - first_step, self._latest - first_time
        if not steps:  # there is no speed after one step
            return ""
        # The clock counts down between steps too.
        due = self._latest + seconds / steps * (self.num_steps - self._step)
        return f"{format_clock(max(0.0, due - time.monotonic()))} left"

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        position, total = self.position(self._step), self.num_steps
        fraction = min(1.0, self._step / total) if total else 1.0
        free = options.max_width - len(f"{position}  100% ") - 1
        text = _separator(options).join(self.fields(free - _MIN_BAR_WIDTH))
        width = min(_MAX_BAR_WIDTH, free - len(text))
        percent = Text(f"{int(100 * fraction):>3}%", style="bold")
        if width <= 0:
            # The text is cropped, because rich would write an ellipsis, which not every
            # encoding has.
            parts = (position, "  ", percent, " ", text)
            yield Text.assemble(*parts, no_wrap=True, overflow="crop")
            return
        # These are the colours of the remaining part, the done part, and a full bar.
        styles = "bright_black", "green", "green"
        bar = ProgressBar(total, self._step, width, False, *styles)
        line = Table.grid(*(Column(no_wrap=True) for _ in range(4)), padding=(0, 1))
        line.add_row(position, bar, percent, text)
        yield line


def _separator(options: ConsoleOptions) -> str:
    return " | " if options.ascii_only else " · "


def _count(value: float) -> str:
    sizes = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
    letter = next((x for x, size in sizes.items() if value >= size), "")
    return _three_digits(value / sizes.get(letter, 1)) + letter


def _duration(seconds: float) -> str:
    number, unit = (1000 * seconds, "ms") if seconds < 1 else (seconds, "s")
    return f"{_three_digits(number)} {unit}"


def _three_digits(value: float) -> str:
    # 9.995 would be rounded to 10.00, which has four digits.
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
