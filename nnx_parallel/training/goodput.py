"""Measures the parts of a fit's time that are not steps, and finds slow processes."""

import bisect
import contextlib
import platform
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import jax

from nnx_parallel.distributed.agreement import allgather_object

_ACCOUNT_SECONDS = 30.0  # a killed run loses up to this much of its account
_PROBE_STEPS = 16
_SHORT_WAIT = 1e-3

_FIRST_COMPARISON, _COMPARE_EVERY = 32, 512
_SLOWER, _SHARE_OF_STEP, _MIN_SECONDS = 1.5, 0.5, 0.01


class WallTime:
    """Adds up the seconds of a fit by part, except the steps.

    - ``start``: from the call of `fit` to the first batch. A state is built or read.
    - ``compile``: the step is compiled. Processes compare their programs.
    - ``data``: the devices have no step to run, because the next batch is not ready.
      A wait during which the devices work costs nothing.
    - ``saves``: the fit waits until a save has copied the state, and until the last
      save has ended.
    - ``evaluation``: evaluations of the fit, with their callbacks.

    The end of a step on the devices is not known while the host waits for a batch. So
    every 16th step that follows such a wait is measured: its duration is subtracted
    from the waits after the next steps.

    Attributes:
        seconds: The seconds by part.
    """

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self._called = self._accounted = self._dispatched = time.perf_counter()
        self.dispatch_seconds = 0.0
        self._step_seconds = 0.0
        self._num_unmeasured = _PROBE_STEPS
        self._was_late = False

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Makes a context whose seconds count for a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def note_start(self) -> None:
        """Counts the time since the call of the fit as its start."""
        self.seconds["start"] = time.perf_counter() - self._called

    def note_first_wait(self, seconds: float) -> None:
        """Counts the wait for the first batch as data, and the time before as start."""
        self.note_start()
        self.seconds["start"] -= seconds
        self.seconds["data"] += seconds

    def note_wait(self, seconds: float, *, is_idle: bool) -> None:
        """Counts the part of a wait for a batch in which no step ran.

        Args:
            seconds: Duration of the wait, which has just ended.
            is_idle: True if all dispatched steps are done.
        """
        running = self._dispatched + self._step_seconds
        idle = min(seconds, time.perf_counter() - running) if is_idle else 0.0
        self.seconds["data"] += max(0.0, idle)
        self._was_late = is_idle and seconds > _SHORT_WAIT

    @contextlib.contextmanager
    def dispatching(self) -> Iterator[None]:
        """Makes a context in which a step is dispatched."""
        self._dispatched = time.perf_counter()
        yield
        self.dispatch_seconds = time.perf_counter() - self._dispatched

    def measure_step(self, metrics: Any) -> None:
        """Waits for the dispatched step, if its duration is to be measured."""
        self._num_unmeasured += 1
        # The next batch is probably late too, so this wait delays nothing.
        if self._was_late and self._num_unmeasured > _PROBE_STEPS:
            jax.block_until_ready(metrics)
            self._step_seconds = time.perf_counter() - self._dispatched
            self._num_unmeasured = 0

    def is_due(self) -> bool:
        """Returns True every 30 seconds, when the seconds must be written."""
        now = time.perf_counter()
        is_due = now - self._accounted >= _ACCOUNT_SECONDS
        self._accounted = now if is_due else self._accounted
        return is_due


class Stragglers:
    """Finds a process for whose host all processes wait.

    Two durations of each step are measured on each host: the time to read a batch, and
    the time that the main thread needs between steps, for callbacks and loggers. Both
    are hidden while the devices run longer. So a process is slow if the median of its
    last 64 durations is more than 1.5 times the median of the other processes, more
    than half a step, and more than 10 ms. The processes exchange medians after 32, 64,
    128, ... steps, and then after every 512 steps.

    A slow device is invisible here. In a synchronous step all devices wait in the
    collectives for the slowest one, so the step takes equally long on all processes.
    The time to dispatch a step is not counted, because it may include a wait for the
    devices. Rare delays do not change a median.
    """

    def __init__(self) -> None:
        size = 64
        self._reads, self._hosts = deque[float](maxlen=size), deque[float](maxlen=size)
        self._steps = deque[float](maxlen=size)
        self._arrived, self._blocked = time.perf_counter(), 0.0
        self._num_steps, self._due = 0, _FIRST_COMPARISON
        self._named = set[tuple[int, str]]()

    def note(
        self,
        *,
        read_seconds: float,
        wait_seconds: float,
        dispatch_seconds: float,
        blocked_seconds: float,
    ) -> list[str]:
        """Takes the durations of a step when the next batch arrives.

        All processes call this before the same steps.

        Args:
            read_seconds: Time in which the batch was read.
            wait_seconds: Time for which the main thread waited for the batch.
            dispatch_seconds: Time of the last dispatch.
            blocked_seconds: Time, in all steps, for which the main thread has waited
                for the devices.

        Returns:
            A message for each slow process that has not been named before.
        """
        before, self._arrived = self._arrived, time.perf_counter()
        step, blocked = self._arrived - before, blocked_seconds - self._blocked
        self._blocked = blocked_seconds
        self._reads.append(read_seconds)
        self._hosts.append(step - wait_seconds - dispatch_seconds - blocked)
        self._steps.append(step)
        self._num_steps += 1
        if self._num_steps < self._due:
            return []
        self._due += min(self._due, _COMPARE_EVERY)
        times = [statistics.median(x) for x in (self._reads, self._hosts, self._steps)]
        found = allgather_object("durations of a step", [platform.node(), *times])
        new = describe_slow(found)
        new = {who: text for who, text in new.items() if who not in self._named}
        self._named |= new.keys()
        return [*new.values()]


def describe_slow(found: list[list[Any]]) -> dict[tuple[int, str], str]:
    """Returns a message for each slow process, by process and kind of work.

    Args:
        found: The host of each process, its seconds to read a batch, its seconds
            between two steps, and its seconds for a whole step.
    """
    kinds = {
        "reads a batch in": "Read faster there, or on more threads.",
        "spends between two steps": "Look at its callbacks and loggers.",
    }
    messages = {}
    for index, (kind, remedy) in enumerate(kinds.items(), start=1):
        in_order = sorted(times[index] for times in found)
        for process, times in enumerate(found):
            mine, step = times[index], times[-1]
            usual = _median_of_others(in_order, mine)
            if mine > max(_SLOWER * usual, _SHARE_OF_STEP * step, _MIN_SECONDS):
                messages[process, kind] = (
                    f"All processes wait for process {process} (host {times[0]}): it "
                    f"{kind} {_format(mine)}, the others {_format(usual)}; a step "
                    f"takes {_format(step)}. {remedy}"
                )
    return messages


def _median_of_others(in_order: list[float], mine: float) -> float:
    """Returns the median of sorted numbers without one of them."""
    at, count = bisect.bisect_left(in_order, mine), len(in_order) - 1
    middle = ((count - 1) // 2, count // 2)
    return statistics.mean(in_order[x + (x >= at)] for x in middle)


def _format(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
