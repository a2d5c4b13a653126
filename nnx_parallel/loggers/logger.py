"""The interface of loggers, and loggers that write to files and services.

Only process 0 of a run calls loggers.
"""

import contextlib
import importlib
import io
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from nnx_parallel.errors import LogFileError, suggests_names, warn_user
from nnx_parallel.files import open_regular, parse_object
from nnx_parallel.loggers.console import ConsoleLogger
from nnx_parallel.loggers.goodput import MAX_LINE_BYTES, Account

RESTART = "NNX_PARALLEL_RESTART"
"""Environment variable that the launcher sets to the number of restarts so far."""


class Logger(Protocol):
    """Receives the metrics and messages of a run.

    Metrics are scalars on the host, such as ``loss``, ``grad_norm``, ``learning_rate``,
    ``step_seconds``, ``tokens_per_second`` (of all devices), ``mfu``, ``hfu``,
    ``eval_loss``. The first update is step 1.

    A logger with an attribute ``logs_layers = True`` also gets metrics of each layer,
    such as ``expert_loads/blocks.layer.mlp/0``. A logger with a method
    ``configure(config)`` gets the settings of the run after `start`: a dict of JSON
    values such as ``strategy``, ``mesh``, ``num_params``, ``seed`` and ``versions``. A
    second call has facts about the first batch: ``batch`` and ``num_rows``. A logger
    with the methods ``account`` and ``goodput`` accounts for the wall time, as
    `JSONLinesLogger` does.
    """

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Begins a run of ``num_steps`` steps; ``first_step`` of them are done."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics of a step; a second call may add metrics to the same step."""

    def message(self, text: str) -> None:
        """Records a line for people to read."""

    def finish(self) -> None:
        """Releases files and the terminal; it is called after an error too."""


class LoggerGroup:
    """Passes each call to several loggers, on process 0 only.

    Args:
        loggers: The loggers.
        warns: True if an ``OSError`` of a logger that has started, for instance from a
            full disk, becomes a warning. Repeated errors are not shown.
    """

    def __init__(self, loggers: Iterable[Logger], *, warns: bool = False) -> None:
        self._loggers = tuple(loggers)
        self._warns = warns
        self._failing: set[int] = set()

    def _active(self) -> tuple[Logger, ...]:
        # The process is checked at each call, because a group may be made before the
        # processes are connected.
        return self._loggers if jax.process_index() == 0 else ()

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Starts each logger."""
        for logger in self._active():
            logger.start(first_step=first_step, num_steps=num_steps)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs to each logger."""
        for logger in self._active():
            self._call(logger, logger.log, step, metrics)

    def log_layers(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of each layer to the loggers that show them."""
        for logger in self._active() if metrics else ():
            if getattr(logger, "logs_layers", False):
                self._call(logger, logger.log, step, metrics)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Passes settings of the run to the loggers that record them."""
        for logger in self._active():
            if configure := getattr(logger, "configure", None):
                self._call(logger, configure, config)

    def account(
        self, step: int, seconds: Mapping[str, float], *, has_ended: bool = False
    ) -> None:
        """Passes a fit's seconds by part to the loggers that account for them."""
        for logger in self._active():
            if account := getattr(logger, "account", None):
                self._call(logger, account, step, seconds, has_ended)

    def goodput(self) -> str:
        """Returns a line about the run's wall time, or "" if it would not be useful."""
        found = (getattr(logger, "goodput", str)() for logger in self._active())
        return next(filter(None, found), "")

    def message(self, text: str) -> None:
        """Sends the text to each logger; only one of them prints it."""
        loggers = self._active()
        is_printed = any(getattr(logger, "is_on_output", False) for logger in loggers)
        for logger in loggers:
            if not (is_printed and getattr(logger, "keeps_output", False)):
                self._call(logger, logger.message, text)

    def shorten(self, num_steps: int) -> None:
        """Passes a new last step of the run to the loggers that display it."""
        for logger in self._active():
            if isinstance(logger, ConsoleLogger):
                self._call(logger, logger.shorten, num_steps)

    def finish(self) -> None:
        """Finishes every logger, even if one of them raises an error."""
        with contextlib.ExitStack() as stack:
            for logger in reversed(self._active()):  # the stack reverses them again
                stack.callback(self._call, logger, logger.finish)

    def _call(self, logger: Logger, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except OSError as error:
            if not self._warns:
                raise
            if id(logger) not in self._failing:
                warn_user(
                    f"{type(logger).__name__} failed: {error}. Training goes on; "
                    "metrics that it cannot write are lost."
                )
            self._failing.add(id(logger))
        else:
            self._failing.discard(id(logger))


def default_loggers(directory: Path | None) -> list[Logger]:
    """Makes a console logger and, for a directory, a logger to ``metrics.jsonl``."""
    if directory is None:
        return [ConsoleLogger()]
    return [ConsoleLogger(), JSONLinesLogger(directory / "metrics.jsonl")]


class JSONLinesLogger:
    """Appends a JSON object for each logged step to a file.

    A line is ``{"step": 3, "time": 1760000000.0, "loss": 2.4}``, with ``time`` in
    seconds since 1970. When ``log`` returns, the operating system has the line. Values
    that JSON cannot represent are written as the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``, which ``float`` reads.

    On resume, lines with later steps than the checkpoint are removed, because a dead
    run wrote them. A last line that a crash has torn is removed too. Both happen in one
    atomic replacement of the file. A run that starts from step 0 renames an older file
    to ``<stem>.1<suffix>``, or to the next free number.

    Some lines have the seconds of a fit by part, under ``seconds``, and the seconds of
    all earlier fits, under ``before``. `goodput` adds them up, also over removed lines.

    Args:
        path: The file, often ``metrics.jsonl``; its directory is created if needed.

    Raises:
        LogFileError: On ``start``, if another program wrote lines of the file, or if
            the path is not a regular file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> logger = JSONLinesLogger(path)
        >>> logger.start(first_step=0, num_steps=10)
        >>> logger.log(1, {"loss": 2.5})
        >>> logger.finish()
        >>> json.loads(path.read_text())["loss"]
        2.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: io.FileIO | None = None
        self._step = 0
        self._account, self._is_accounted = Account(), False

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Opens the file, without lines after ``first_step`` that a dead run wrote."""
        self.finish()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._account, self._is_accounted = Account(), False
        try:
            if os.path.lexists(self.path):
                self._account = _cut_lines(self.path, first_step)
            # The file is not buffered, so a killed process loses no logged step.
            self._file = io.FileIO(self.path, "a", opener=open_regular)
        except ValueError as error:
            raise LogFileError(
                f"Cannot log to this path: {error} Or choose another path."
            ) from None
        self._step = first_step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line."""
        self._step = step
        self._write({name: _json_number(value) for name, value in metrics.items()})

    def configure(self, config: Mapping[str, Any]) -> None:
        """Writes one line with the settings under ``config``."""
        self._write({"config": dict(config)})

    def message(self, text: str) -> None:
        """Writes one line with the text under ``message``, at the last logged step."""
        self._write({"message": text})

    def account(
        self, step: int, seconds: Mapping[str, float], has_ended: bool = False
    ) -> None:
        """Writes one line with the seconds of this fit by part, except the steps."""
        self._step = step
        line: dict[str, Any] = {"seconds": _rounded(seconds)}
        if not self._is_accounted:
            called = time.time() - sum(seconds.values())
            line["before"] = _rounded(self._account.next_before(called))
        if has_ended:
            line["ended"] = True
        self._account.read(self._write(line))
        self._is_accounted = True

    def goodput(self) -> str:
        """Returns a line about the run's wall time, or "" if it would not be useful."""
        account = self._account
        is_useful = self._is_accounted and account.is_worth_a_line()
        return account.line() if is_useful else ""

    def finish(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if self._file is None:
            raise RuntimeError("The logger is not open. Call `start` before `log`.")
        line = {"step": self._step, "time": round(time.time(), 3), **values}
        rest = (json.dumps(line, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            # The usual cause is a full disk. The torn line is removed, because a
            # resumed run would take it for a line of another program.
            self._file.truncate(size)
            raise
        return line


def _json_number(value: float) -> float | str:
    if isinstance(value, int):  # counts stay whole numbers
        return value
    number = float(value)
    return number if math.isfinite(number) else json.dumps(number)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(x, 3) for name, x in seconds.items()}


def _cut_lines(path: Path, last_step: int) -> Account:
    """Removes the lines after a step. For step 0, renames the file instead.

    Returns the account of all lines.
    """
    account, is_kept, productive = Account(), list[bool](), 0.0
    for found, _ in _parsed_lines(path):
        is_kept.append(found["step"] <= last_step)
        account.read(found)
        if is_kept[-1]:
            productive = account.productive_seconds
    account.repeat_from(last_step, productive)
    if last_step == 0 and is_kept:
        names = (f"{path.stem}.{i}{path.suffix}" for i in itertools.count(1))
        free = (x for x in map(path.with_name, names) if not os.path.lexists(x))
        path.rename(next(free))
        # Only the launcher knows that this is the same run, which died before a save.
        return account if os.environ.get(RESTART, "0") != "0" else Account()
    if not all(is_kept):
        # A new file is renamed over the old file, so that after a crash one of the two
        # files is complete.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                lines = _parsed_lines(path)
                file.writelines(x for found, x in lines if found["step"] <= last_step)
                file.flush()
                os.fsync(descriptor)
        except OSError:
            os.unlink(temporary)  # the file takes space on a disk that may be full
            raise
        os.chmod(temporary, path.stat().st_mode)  # `mkstemp` lets only the owner read
        os.replace(temporary, path)
    return account


def _parsed_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields the object and the bytes of each line.

    The step of a line that a crash has torn is infinity.
    """
    with open(path, "rb", opener=open_regular) as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
        for number, line in enumerate(lines, start=1):
            # A torn line may not be JSON, but it can only be the last line.
            is_torn = not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES
            yield {"step": math.inf} if is_torn else _parse(path, number, line), line


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = parse_object(line, path)
        return found | {"step": int(found["step"])}
    except (ValueError, TypeError, KeyError) as error:
        raise LogFileError(
            f"Line {number} of '{path}' is {line[:40]!r}. JSONLinesLogger appends only "
            'to files whose lines are JSON objects with a "step", because it removes '
            "lines that a dead run wrote. Choose another path, or move the file away."
        ) from error


class TensorBoardLogger:
    """Writes TensorBoard event files, through tensorboardX.

    On resume, TensorBoard drops the points that a dead run wrote after the step of the
    checkpoint.

    Args:
        directory: Directory of the event files. Each run needs a separate directory.

    Raises:
        ImportError: If tensorboardX is not installed.
    """

    logs_layers = True

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        # The import is here and not in `start`, so that a missing library raises an
        # error before the fit.
        self._module = _import_extra("tensorboardX", "tensorboard", type(self).__name__)
        self._writer: Any = None
        self._step = 0

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Opens a new event file."""
        self.finish()
        self._step = first_step
        dropped = first_step + 1  # and all later steps
        self._writer = self._module.SummaryWriter(
            str(self.directory), purge_step=dropped
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one scalar for each metric."""
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Writes the settings as JSON under ``config``."""
        text = json.dumps(config, indent=2).replace("\n", "\n    ")
        # TensorBoard shows lines verbatim if they begin with four spaces.
        self._writer.add_text("config", f"    {text}", self._step)

    def message(self, text: str) -> None:
        """Writes the text under ``message``, at the last logged step."""
        self._writer.add_text("message", text, self._step)

    def finish(self) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@suggests_names
class WandbLogger:
    """Sends metrics to Weights & Biases.

    The run's config has the settings of the run: strategy, mesh, number of parameters,
    batch, seed, versions and others. Values in your ``config`` have priority. To
    continue the same run after a restart, pass a fixed ``id`` and ``resume="allow"``.
    The x-axis of charts is ``step``, which may go back after a restart.

    Args:
        **init_kwargs: Arguments of ``wandb.init``, such as ``project``, ``name`` and
            ``config``.

    Raises:
        ImportError: If wandb is not installed.
    """

    logs_layers = True
    keeps_output = True
    """True, because it keeps the text that other loggers print."""

    def __init__(self, **init_kwargs: Any) -> None:
        self.init_kwargs = init_kwargs
        self._module = _import_extra("wandb", "wandb", type(self).__name__)
        self._run: Any = None
        self._given: set[str] = set()

    def start(self, *, first_step: int, num_steps: int) -> None:
        """Begins or resumes the run."""
        self.finish()
        self._run = self._module.init(**self.init_kwargs)
        given = self.init_kwargs.get("config")
        if isinstance(given, str):  # the path of a file, which wandb has read
            self._given = {*self._run.config.keys()}
        elif isinstance(given, Mapping):
            self._given = {*given}
        else:
            self._given = {*getattr(given, "__dict__", ())}
        # wandb's step counter must not go back, but the step of a resumed run does.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics with their step."""
        self._run.log({"step": step} | {k: float(x) for k, x in metrics.items()})

    def configure(self, config: Mapping[str, Any]) -> None:
        """Adds the settings to the run's config."""
        new = {name: x for name, x in config.items() if name not in self._given}
        # A resumed run may have another mesh.
        self._run.config.update(new, allow_val_change=True)

    def message(self, text: str) -> None:
        """Prints the text, which Weights & Biases keeps with the run's output.

        A run that also has a `ConsoleLogger` prints its messages only once.
        """
        self._module.termlog(text)

    def finish(self) -> None:
        """Uploads the remaining data and ends the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _import_extra(module: str, extra: str, user: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # The message contains the text of the first error, because the import of an
        # installed library may fail too.
        raise ImportError(
            f"{user} needs {module}, which cannot be imported ({error}). Install it "
            f'with `pip install "nnx-parallel[{extra}]"`.'
        ) from error
