"""The number of this process, the lines that it prints, and how it ends."""

import contextlib
import faulthandler
import logging
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar, cast

import jax

# This module reads JAX's private state, because `jax.process_index()` and
# `jax.process_count()` start a backend, and then `jax.distributed.initialize` raises.
# No other module of this package reads this state.
from jax._src import distributed, xla_bridge

from nnx_parallel.distributed.causes import CAUSE, exit_code_of, note_cause
from nnx_parallel.errors import ProcessError

T = TypeVar("T")

STATE = distributed.global_state
"""State of JAX's coordination service: its address, and its client after the start."""

TAGGED = "NNX_PARALLEL_TAGGED"
"""Environment variable: the process id of a launcher that adds a tag to every line."""

PEER_LOST = 75
"""Exit code of a process that ends because another is lost; the run may be retried."""

PREEMPTED = 128 + signal.SIGTERM
"""Exit code 143 of a process in which a SIGTERM has ended a fit.

A shell reports the same code for a process that a SIGTERM has killed. Schedulers can
start such a run again.
"""

INTERRUPT = "Ctrl-C"
"""Argument of the KeyboardInterrupt that ends a fit on all processes."""

HUNG = 76
"""Exit code of a process in which a step or evaluation did not end in time."""

EXCHANGE_SECONDS = 1800.0
"""How long a process waits for another process, which may be compiling or restoring."""

_REASON_SECONDS = 5.0
_SILENT_SECONDS = 25.0  # a machine that vanishes is noticed after 10 to 20 seconds
_ENDING_SECONDS = 10.0
_WATCHDOG_GRACE_SECONDS = 5.0
_WATCHDOG_POLL_SECONDS = 1.0
# Under `step_timeout="auto"`, a step may take this time, PyTorch's default for NCCL, or
# 20 times the median of the last steps if that is longer.
_AUTO_SECONDS = 600.0
_AUTO_STEPS = 20
# jax 0.12 raises the status of a failed collective as a `ValueError`.
_STATUS = re.compile(r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED): ")
_RESUME = (
    "All processes end. Start the same command again: it resumes from the last "
    "checkpoint. `python -m nnx_parallel launch --max-restarts` does so by itself."
)

# Frames of these packages may be between the script and this package in a stack.
_LIBRARIES = {"contextlib", "functools", "threading", "jax", "flax", "orbax", "numpy"}

# The first thread that ends the process takes this lock and never releases it. So only
# the first reason is printed, not the later errors that follow from it.
_ending = threading.Lock()
# Sends the exit message to the other processes, after `install`. Until then it is
# `str`, which does nothing. The message ``None`` says that the other processes end for
# the same reason.
_notify: Callable[[str | None], object] = str


def process_index() -> int:
    """Returns the number of this process."""
    return STATE.process_id or 0


def process_count() -> int:
    """Returns the number of processes."""
    return STATE.num_processes or 1


def has_backend() -> bool:
    """Returns True if JAX has counted its devices and cannot add more."""
    return bool(xla_bridge.backends_are_initialized())


def print_once(*values: Any, **options: Any) -> None:
    """Prints on process 0 and nowhere else; takes the arguments of ``print``.

    Example:
        >>> print_once("loss", 0.5)
        loss 0.5
    """
    if process_index() == 0:
        print(*values, **options)  # noqa: T201


def tag() -> str:
    """Returns the prefix for this process's lines; empty if the launcher adds it."""
    is_tagged = process_count() > 1 and not os.environ.get(TAGGED)
    return f"[process {process_index()}] " if is_tagged else ""


def write_error(text: str) -> None:
    """Flushes stdout, then writes tagged lines to stderr in one write."""
    # One write keeps the lines of several processes on one terminal from mixing.
    lines = "".join(f"{tag()}{line}\n" for line in text.splitlines())
    for stream, text in ((sys.stdout, ""), (sys.stderr, lines)):
        if stream is not None and not stream.closed:
            stream.write(text)
            stream.flush()  # `os._exit` often follows and flushes nothing


def tag_logging() -> None:
    """Adds the process's tag to the message of every ``logging`` record."""
    # A record factory also affects handlers that are installed later. A formatter or
    # filter would affect only existing handlers.
    make_record = logging.getLogRecordFactory()

    def make_tagged_record(*args: Any, **options: Any) -> logging.LogRecord:
        record = make_record(*args, **options)
        # `msg` is a %-format that is filled in later, so % is doubled.
        record.msg = f"{tag().replace('%', '%%')}{record.msg}"
        return record

    logging.setLogRecordFactory(make_tagged_record)


def make_interrupt(text: str) -> KeyboardInterrupt:
    """Makes a KeyboardInterrupt that is shown as one line without a traceback.

    If the error is uncaught, a script ends as after any Ctrl-C: by SIGINT, which shells
    report as code 130. A notebook, or Python's prompt, returns to the user.
    """
    # The error cannot be a subclass, because Python ends by SIGINT only after a plain
    # KeyboardInterrupt. IPython shows the lines that `_render_traceback_` returns
    # (docs/library-notes.md, "Python" and "Notebooks").
    error = KeyboardInterrupt(text)
    vars(error)["_render_traceback_"] = lambda: [f"KeyboardInterrupt: {text}"]
    return error


def _line(error: BaseException) -> str | None:
    """Returns the line of a `make_interrupt` error; ``None`` for other errors."""
    lines = vars(error).get("_render_traceback_")
    return lines()[0] if isinstance(error, KeyboardInterrupt) and lines else None


_excepthook: Callable[..., object] | None = None


def _install_hook() -> None:
    """Installs `_show` as the hook for uncaught exceptions, unless `install` ran.

    It shows interrupts as lines, and notes causes for a launcher.
    """
    global _excepthook
    if _excepthook is None and sys.excepthook is not _end_by_exception:
        _excepthook, sys.excepthook = sys.excepthook, _show


def _show(
    kind: type[BaseException], error: BaseException, place: TracebackType | None
) -> None:
    line = _line(error)
    if issubclass(kind, Exception):
        note_cause(kind.__name__, str(error), exit_code_of(error))
    if line is None:
        assert _excepthook is not None
        _excepthook(kind, error, place)
    # In a script, the last messages of the fit have already reported the Ctrl-C.
    elif error.args != (INTERRUPT,) or hasattr(sys, "ps1"):
        write_error(line)


def install(notify: Callable[[str | None], None]) -> None:
    """Installs a hook: an uncaught exception calls ``notify`` and ends the process."""
    global _notify
    _notify = notify
    sys.excepthook = _end_by_exception


def _end_by_exception(
    kind: type[BaseException], error: BaseException, _: TracebackType | None
) -> None:
    # A collective or a request most likely failed because another process is lost. The
    # report of the loss arrives on another thread, which then ends this process.
    if _is_of_collective(error):
        threading.Event().wait(_REASON_SECONDS)
    elif _is_of_connection(error):
        threading.Event().wait(_SILENT_SECONDS)
    _ending.acquire(timeout=_ENDING_SECONDS)
    text = str(error).strip().splitlines()
    reason = f"{kind.__name__}: {text[0]}" if text else kind.__name__
    # A Ctrl-C ends the fit on all processes, so the others need no reason.
    is_alike = error.args == (INTERRUPT,)
    text = "".join(traceback.format_exception(error))
    code = exit_code_of(error)
    if issubclass(kind, Exception):
        note_cause(kind.__name__, str(error), code)
    _end(
        _line(error) or text,
        lambda: _notify(None if is_alike else reason),
        # Shells report that a signal ended a process by this code.
        128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else code,
    )


def _is_of_collective(error: BaseException | None) -> bool:
    """Returns True if an error, or its cause, comes from JAX's runtime."""
    # The cause matters for saves. A save has collectives too, and its error is raised
    # from the error of a collective.
    return error is not None and (
        isinstance(error, jax.errors.JaxRuntimeError)
        or _STATUS.match(str(error)) is not None
        or _is_of_collective(error.__cause__)
    )


def _is_of_connection(error: BaseException) -> bool:
    """Returns True if a request to another process failed."""
    cause = error.__cause__
    return isinstance(error, ProcessError) and isinstance(cause, OSError | EOFError)


def end_by_loss(process: int, reason: str | None, drain: Callable[[], None]) -> None:
    """Ends this process because another process is lost.

    Args:
        process: Number of the lost process.
        reason: Exit message of the lost process, or ``None`` if it sent none.
        drain: Function that waits until the other processes have received the reason.
            It is called before this process ends.
    """
    if not _ending.acquire(blocking=False):
        return  # this process is ending already, for another reason
    text = "its connection closed without an exit message (killed, or out of memory)."
    if reason is not None:
        text = f"{reason.rstrip('.')}. Its output says more."
    note_cause("lost process", text, PEER_LOST)
    _end(f"Process {process} is lost: {text} {_RESUME}", drain, PEER_LOST)


def end_by_error(text: str, kind: type[Exception]) -> None:
    """Ends this process from another thread, because the main thread may be stuck."""
    if _ending.acquire(blocking=False):
        reason = f"{kind.__name__}: {text}"
        _end(reason, lambda: _notify(reason), 1)


def place_of(frame: FrameType | None) -> str:
    """Describes a frame by the call of this package and the line of the script."""
    call, place = "", ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if package == __name__.partition(".")[0]:
            name = frame.f_code.co_qualname
            # The inner function of a decorator is not the call that the script made.
            call = call if "<locals>" in name else f"{name}, at "
        elif package not in _LIBRARIES:
            break
        frame = frame.f_back
    return call + place


def _end(text: str, notify: Callable[[], object], code: int) -> None:
    try:
        # A closed pipe or a lost connection must not keep the process from ending.
        with contextlib.suppress(Exception):
            write_error(text)
        with contextlib.suppress(Exception):
            notify()
    finally:
        # `sys.exit` would run JAX's exit handler, which waits up to 300 s in a shutdown
        # barrier for the other processes, while they wait for this process in a
        # collective.
        os._exit(code)


StepTimeout = float | Literal["auto"] | None


class _Armed(NamedTuple):
    """A running clock: its end by `time.monotonic`, and the facts for the error."""

    deadline: float
    limit: float  # seconds
    step: int
    awaited: str


class Watchdog:
    """Ends the process if a step takes too long, and prints the stack of every thread.

    JAX's heartbeat does not notice a process that is alive but stuck:
    https://github.com/jax-ml/jax/issues/38503

    Args:
        timeout_seconds: Longest duration of a step, or of a batch of an evaluation.
            ``"auto"`` derives the limit if there are several processes, and sets no
            limit for one process. ``None`` means no limit.
        step_seconds: Durations of the last steps, for the limit under ``"auto"``.

    Raises:
        ValueError: If the time is not positive.
    """

    def __init__(
        self, timeout_seconds: StepTimeout, step_seconds: Collection[float] = ()
    ) -> None:
        self._is_auto = timeout_seconds == "auto"
        is_number = isinstance(timeout_seconds, int | float)
        is_limit = is_number and timeout_seconds > 0
        if timeout_seconds is not None and not (self._is_auto or is_limit):
            raise ValueError(
                f"step_timeout={timeout_seconds!r} is invalid. It must be a positive "
                "number of seconds, None for no limit, or 'auto'."
            )
        self._timeout, self._step_seconds = timeout_seconds, step_seconds
        self._changed = threading.Condition()
        self._armed: _Armed | None = None
        self._thread: threading.Thread | None = None

    def limit(self, awaited: str = "step") -> float | None:
        """Returns the current limit in seconds; ``None`` if there is no limit."""
        if not isinstance(self._timeout, str):
            return self._timeout
        if process_count() == 1:
            return None
        if awaited != "step" or not self._step_seconds:
            return EXCHANGE_SECONDS
        return max(_AUTO_SECONDS, _AUTO_STEPS * statistics.median(self._step_seconds))

    def arm(self, step: int, awaited: str = "step") -> None:
        """Restarts the clock; the error will name ``awaited`` and ``step``."""
        limit = self.limit(awaited)
        if limit is None:
            return
        with self._changed:
            self._armed = _Armed(time.monotonic() + limit, limit, step, awaited)
            if self._thread is None:
                name = "nnx_parallel.watchdog"
                self._thread = threading.Thread(target=self._watch, name=name)
                self._thread.daemon = True
                self._thread.start()

    def disarm(self) -> None:
        """Stops the clock, for example during compilation or a checkpoint."""
        with self._changed:
            if self._armed is not None and not self._is_auto:
                faulthandler.cancel_dump_traceback_later()
            self._armed = None
            self._changed.notify()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in this context counts toward a given limit, but not toward ``"auto"``.

        Data and hooks may take any time if they do so on all processes. If only one
        process takes long, the limits of the other processes apply: `EXCHANGE_SECONDS`
        if they wait for its batch, and the limit of a step if they wait in a step.
        """
        armed = self._armed if self._is_auto else None
        if armed is not None:
            self._armed = armed._replace(deadline=math.inf)
        yield
        if armed is not None:
            self.arm(armed.step, armed.awaited)

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches; the clock is `paused` while a batch is read."""
        iterator, end = iter(batches), object()
        while True:
            with self.paused():
                batch = next(iterator, end)
            if batch is end:
                return
            yield cast(T, batch)

    def _watch(self) -> None:
        with self._changed:
            while self._armed is not None:
                left = self._armed.deadline - time.monotonic()
                if left <= 0:
                    self._end(self._armed)
                    break
                if not self._is_auto:
                    # A C call that never releases the interpreter's lock stops this
                    # thread; then `faulthandler` ends the process. `faulthandler` has
                    # only one timer, so under "auto" the script may use it.
                    limit = left + _WATCHDOG_GRACE_SECONDS
                    file = sys.__stderr__ or sys.stderr
                    faulthandler.dump_traceback_later(limit, exit=True, file=file)
                # `arm` does not notify this thread, so that arming takes no time in a
                # step. So this thread polls.
                self._changed.wait(min(left, _WATCHDOG_POLL_SECONDS))
            self._thread = None

    def _end(self, armed: _Armed) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        name = "step_timeout='auto'" if self._is_auto else "step_timeout"
        reason = (
            f"No {armed.awaited} has ended for {armed.limit:g} s ({name}) after step "
            f"{armed.step} was dispatched; the stack of every thread is above"
        )
        if _ending.acquire(blocking=False):
            note_cause("step timeout", reason, HUNG)
            _end(f"{reason}. {_RESUME}", lambda: _notify(reason), HUNG)


class Termination:
    """Context that records a SIGTERM or a Ctrl-C instead of ending the process.

    Schedulers and clouds send SIGTERM some seconds before they take a machine away,
    which is enough time to save. A SIGTERM handler that was installed earlier is called
    too, and is restored on exit. A SIGINT handler is replaced only if it is Python's
    default handler. A second Ctrl-C raises KeyboardInterrupt at once.

    Args:
        saves: True if the fit saves a checkpoint before it ends.

    Attributes:
        is_requested: True after a SIGTERM.
        is_interrupted: True after a Ctrl-C.
        defers: If True, the first Ctrl-C is only recorded. If False, it is also raised.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self.is_requested = self.is_interrupted = self.defers = False
        self._saves = saves
        self._previous: Any = None
        self._handlers: dict[int, Any] = {}  # earlier handlers, to restore
        self._is_watching = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread handle signals
        previous = signal.getsignal(signal.SIGTERM)
        if callable(previous):
            warnings.warn(
                f"A handler of SIGTERM, {_name(previous)}, was installed before the "
                "fit. During the fit, a SIGTERM saves a checkpoint and ends the run. "
                "Your handler is called too, when the signal arrives. If it ends the "
                "process, no checkpoint is saved.",
                stacklevel=3,
            )
        self._previous = previous
        self._is_watching = True
        self._install(signal.SIGTERM, self._record)
        # The handling of SIGINT stays unchanged if SIGINT is ignored, as under nohup,
        # or if the user handles it.
        handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if handles:
            self._install(signal.SIGINT, self._record_interrupt)
        if handles or CAUSE in os.environ:
            _install_hook()
        return self

    def _install(self, number: int, handler: Callable[..., None]) -> None:
        # `None` means that the previous handler was installed from C. Python cannot
        # restore it.
        previous = signal.signal(number, handler)
        self._handlers[number] = signal.SIG_DFL if previous is None else previous

    def __exit__(self, *exc_info: object) -> None:
        for number, previous in self._handlers.items():
            # A handler that was installed after this one is kept.
            if getattr(signal.getsignal(number), "__self__", None) is self:
                signal.signal(number, previous)
        self._handlers = {}
        self._is_watching = False

    def check(self) -> None:
        """Warns once if another SIGTERM handler has replaced this one."""
        found = signal.getsignal(signal.SIGTERM)
        if self._is_watching and found != self._record:
            self._is_watching = False
            warnings.warn(
                f"A handler of SIGTERM, {_name(found)}, was installed during the fit. "
                "It replaces the fit's handler, so a preemption will end the run "
                "without a save. Install the handler before the fit; then both "
                "handlers are called.",
                stacklevel=2,
            )

    def _record(self, number: int, frame: FrameType | None) -> None:
        # The handler does not save, because it may run at any line, even in a save.
        self.is_requested = True
        if callable(self._previous):
            self._previous(number, frame)

    def _record_interrupt(self, number: int, frame: FrameType | None) -> None:
        # The interrupt is recorded even if it is raised, because it may arrive during
        # JAX's callback in the garbage collector, where exceptions are lost
        # (docs/library-notes.md, "Lost processes").
        is_first, self.is_interrupted = not self.is_interrupted, True
        if not (is_first and self.defers):
            when = "before the first step" if is_first else "twice, without a save"
            raise make_interrupt(f"{INTERRUPT} {when}, in {_place(frame)}")
        saved = ", once it is saved" if self._saves else ". It saves no checkpoint"
        # The signal may have arrived during another write, and then this write raises.
        with contextlib.suppress(Exception):
            write_error(
                f"Ctrl-C: the fit ends after this step{saved}. A second Ctrl-C ends it "
                "at once."
            )


@contextlib.contextmanager
def raising_interrupts() -> Iterator[None]:
    """Makes sure that a Ctrl-C or an exit during the block is raised from the block.

    An interrupt may get lost: JAX's callback in the garbage collector swallows it, and
    libraries catch it and raise other errors. So an exception that a signal handler
    raises is recorded, and is raised again at the end of the block, in place of any
    other error.
    """
    heard: list[BaseException] = []
    outer = sys.exception()
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(previous := signal.getsignal(number)):
                    signal.signal(number, partial(_note, previous, heard))
                    stack.callback(signal.signal, number, previous)
        try:
            yield
        except BaseException as error:
            if not heard and (found := _interrupt_in(error, outer)) is not None:
                heard.append(found)
            if not heard:
                raise
    if heard:
        raise heard[-1] from None


def _note(
    handler: Callable[..., object],
    heard: list[BaseException],
    number: int,
    frame: FrameType | None,
) -> None:
    try:
        handler(number, frame)
    except BaseException as error:
        heard.append(error)
        raise


def _interrupt_in(
    error: BaseException, outer: BaseException | None
) -> BaseException | None:
    """Finds the interrupt in a chain of errors; the search stops at ``outer``."""
    seen, found = {id(None), id(outer)}, [error]
    for each in found:
        if isinstance(each, KeyboardInterrupt | SystemExit):
            return each
        group = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        for inner in (each.__cause__, each.__context__, *group):
            if id(inner) not in seen:
                seen.add(id(inner))
                found.append(cast(BaseException, inner))
    return None


def _place(frame: FrameType | None) -> str:
    """Describes the line of a frame by function, file and line number."""
    if frame is None:
        return "no line of Python"
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _name(handler: Any) -> str:
    return f"`{getattr(handler, '__qualname__', repr(handler))}`"
