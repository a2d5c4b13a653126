"""Fetches, checks and logs the metrics of a run, measures speed, and writes traces."""

import contextlib
import itertools
import math
import statistics
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nnx_parallel.audit.report import flops_of
from nnx_parallel.data.rows import count_rows, partition
from nnx_parallel.errors import NonFiniteLossError, warn_user
from nnx_parallel.loggers.logger import LoggerGroup
from nnx_parallel.mesh import Device
from nnx_parallel.precision import format_number
from nnx_parallel.training.history import History

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bfloat16 FLOP/s from vendors' data sheets, by a prefix of ``device_kind``."""


def peak_flops(device: Device) -> float | None:
    """Returns a device's peak bfloat16 FLOP/s, or ``None`` if it is unknown."""
    kind = device.device_kind
    known = [name for name in PEAK_FLOPS if kind.startswith(name)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def count_tokens(batch: Any) -> int | None:
    """Returns the number of tokens: the size of the first integer array of two dims.

    Returns ``None`` if there is no such array; speed is then counted in examples.
    """
    # Tokens have shape (batch, seq). Labels have one dim, and images have more.
    matrices = (x for x in partition(batch)[0] if x.ndim == 2)
    integers = (x.size for x in matrices if jnp.issubdtype(x.dtype, jnp.integer))
    return next(integers, None)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The amounts of work in one step, from which rates are computed.

    Attributes:
        num_rows: Rows of the global batch.
        num_tokens: Tokens of the global batch, or ``None``.
        model_flops: FLOPs that the model needs for the batch (`count_model_flops`), or
            ``None``.
        hardware_flops: FLOPs of the compiled step on one device, which include
            recomputation; ``None`` if they or the device's peak are unknown.
        device: One of this process's devices in the mesh.
        num_devices: Number of devices in the mesh.
    """

    num_rows: int
    num_tokens: int | None
    model_flops: float | None
    hardware_flops: float | None
    device: Device
    num_devices: int

    @classmethod
    def of(
        cls,
        compiled: jax.stages.Compiled,
        batch: Any,
        mesh: Mesh,
        model_flops: float | None = None,
    ) -> Self:
        """Returns the throughput of a compiled step on a global batch."""
        device, flops = mesh.local_devices[0], None
        # Without a peak, as on a CPU, `rates` does not use the FLOPs. To count them,
        # the text of the whole program is parsed.
        if peak_flops(device):
            # If libtpu is newer than jaxlib, jaxlib may be unable to print the program.
            with contextlib.suppress(
                jax.errors.JaxRuntimeError, ValueError, KeyError, IndexError
            ):
                flops = flops_of(compiled)
        return cls(
            num_rows=count_rows(batch),
            num_tokens=count_tokens(batch),
            model_flops=model_flops,
            hardware_flops=flops,
            # `memory_stats` fails for devices of other processes.
            device=device,
            num_devices=mesh.size,
        )

    def rates(self, step_seconds: float) -> dict[str, float]:
        """Returns the metrics of a step that took ``step_seconds``.

        ``mfu`` is the model's FLOP/s per device (``tflops_per_device``), divided by
        the device's peak. ``hfu`` is the compiled step's FLOP/s, divided by the peak.
        With remat it is larger than ``mfu``, because it includes recomputation.
        """
        rates = {
            "step_seconds": step_seconds,
            "examples_per_second": self.num_rows / step_seconds,
        }
        if self.num_tokens is not None:
            speed = rates["tokens_per_second"] = self.num_tokens / step_seconds
            if self.num_devices > 1:
                rates["tokens_per_second_per_device"] = speed / self.num_devices
        peak = peak_flops(self.device)
        if self.model_flops:
            flops = self.model_flops / self.num_devices / step_seconds
            rates["tflops_per_device"] = flops / 1e12
            if peak:
                rates["mfu"] = flops / peak
        if self.hardware_flops and peak:
            rates["hfu"] = self.hardware_flops / step_seconds / peak
        if stats := self.device.memory_stats():  # CPUs have no statistics
            peak_bytes = float(stats.get("peak_bytes_in_use", 0))
            rates["device_memory_bytes"] = peak_bytes
            # The limit is the memory that JAX may use, by default three quarters of a
            # GPU's memory.
            if limit := stats.get("bytes_limit"):
                rates["device_memory_fraction"] = peak_bytes / limit
        return rates


OF_PLAYERS = ("loss", "grad_norm", "learning_rate")
"""Metrics that each player also reports under the player's name."""

Values = Mapping[str, float]
"""Metrics by name, on the host."""


class _Columns:
    """A table of numbers that take 8 bytes each."""

    def __init__(self, index: str) -> None:
        self._index = index
        self._columns: dict[str, array[Any]] = {index: array("q")}

    def __len__(self) -> int:
        return len(self._columns[self._index])

    def append(self, index: int, values: Values) -> None:
        """Adds a row. Missing values and the earlier values of a new name are NaN."""
        for name in values:
            if name not in self._columns:
                self._columns[name] = array("d", itertools.repeat(math.nan, len(self)))
        for name, column in self._columns.items():
            column.append(index if name == self._index else values.get(name, math.nan))

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each name with its values, if there are rows."""
        for name, column in self._columns.items() if len(self) else ():
            yield name, np.array(column)


@dataclass
class Recorder:
    """Collects the metrics of each step without making the step wait.

    Metrics stay on the device while the next steps are dispatched. Times are means over
    the last 8 steps, because steps in flight complete at irregular intervals.

    Attributes:
        logger: Logger of the metrics. Arrays ``(layers,)``, such as the load of
            experts, go only to loggers that show each layer.
        on_step: Function that gets a step's number and metrics once they are known.
        log_every: Steps between logged metrics.
        max_behind: Number of steps that may be in flight.
        throughput: The work of one step, once the step is compiled.
        skip_limit: Number of bad steps in a row, of one player, that are skipped; 0 if
            the first bad step ends the run.
        is_state_finite: Function that is called after a bad step, and returns True if
            the state is still finite.
        step_seconds: Durations of the last 8 steps, without evaluations, saves and slow
            callbacks.
        bad_step: The step whose loss or gradients ended the run, or 0.
        blocked_seconds: Seconds in which `flush` waited for the end of steps.
    """

    logger: LoggerGroup
    on_step: Callable[[int, dict[str, float]], None]
    log_every: int = 1
    max_behind: int = 2
    throughput: Throughput | None = None
    skip_limit: int = 0
    is_state_finite: Callable[[], bool] = bool

    def __post_init__(self) -> None:
        self._in_flight: deque[tuple[int, Mapping[str, jax.Array], float, str]] = (
            deque()
        )
        self._steps, self._evals = _Columns("step"), _Columns("eval_step")
        self._last_row: dict[str, float] = {}
        self._last_finite: dict[str, dict[str, float]] = {}  # by player
        self._last_time: float | None = None
        self.step_seconds: deque[float] = deque(maxlen=8)
        self._num_untimed = 0  # steps in flight whose durations are not known
        # Durations since the last call that was excluded; the first may be excluded.
        self._num_timed = self.step_seconds.maxlen or 0
        self.bad_step, self.blocked_seconds = 0, 0.0
        self._extra: dict[str, float] = {}  # values of only the next step
        self._compile_seconds: float | None = None
        self._has_warned = False
        self._num_skipped, self._first_skipped = 0, list[int]()
        self._num_bad = Counter[str]()  # bad steps in a row, by player

    def push(
        self,
        step: int,
        metrics: Mapping[str, jax.Array],
        wait_seconds: float,
        player: str = "",
    ) -> None:
        """Takes the metrics of a step that has been dispatched.

        With a player, the names of its metrics begin with its name, as in
        ``critic/loss``. Loggers then get the newest values of all players.

        Raises:
            NonFiniteLossError: If a loss or gradient of an earlier step is not finite.
        """
        for value in metrics.values():
            # The copy begins now, so that a later read waits only for the step.
            value.copy_to_host_async()
        self._in_flight.append((step, metrics, wait_seconds, player))
        self.flush(self.max_behind)

    def flush(self, num_behind: int = 0) -> None:
        """Waits for all steps in flight except the newest ``num_behind``."""
        while len(self._in_flight) > num_behind:
            step, metrics, wait_seconds, player = self._in_flight.popleft()
            start = time.perf_counter()
            row = {name: float(x) for name, x in metrics.items() if not x.ndim}
            # The clock is read after `float`, which waits for the end of the step.
            self.blocked_seconds += time.perf_counter() - start
            row |= self._timing(wait_seconds)
            self._check(step, row, player)
            self._warn_of_lost(step, row)
            self._steps.append(step, row)
            row |= self._extra
            self._extra = {}
            before = self._last_row.items() if player else ()
            others = {name: x for name, x in before if "/" in name}
            self._last_row = {**others, "step": step, **row}
            if _is_finite(row):
                self._last_finite[player] = self._last_row
            if step % self.log_every == 0:
                # One curve with the losses of several players would be useless.
                mixed = OF_PLAYERS if player else ()
                shown = {n: x for n, x in (others | row).items() if n not in mixed}
                self.logger.log(step, shown)
                self.logger.log_layers(step, _by_layer(metrics))
            start = time.perf_counter()
            self.on_step(step, row)
            self._exclude(time.perf_counter() - start)

    def is_idle(self) -> bool:
        """Returns True if all steps that have been dispatched are done."""
        newest: Any = self._in_flight[-1][1].values() if self._in_flight else ()
        return all(value.is_ready() for value in newest)

    def _exclude(self, seconds: float) -> None:
        """Excludes a call from the durations of steps, if it took longer than a step.

        The durations of steps that were in flight during the call are unknown.
        """
        # A call that is slow in most steps is a part of their durations. So 8 durations
        # come between two calls that are excluded.
        is_rare = self._num_timed >= (self.step_seconds.maxlen or 0)
        # Until a duration is known, calls of more than one second are excluded.
        if is_rare and seconds > statistics.fmean(self.step_seconds or [1.0]):
            self.restart_clock()
            self._num_untimed, self._num_timed = len(self._in_flight), 0

    def restart_clock(self) -> None:
        """Excludes the time since the last step from the next step's time."""
        self._last_time = time.perf_counter()

    def last_row(self) -> dict[str, float]:
        """Returns the newest known metrics, with their step's number as ``"step"``."""
        return dict(self._last_row)

    def add_compilation(self, seconds: float) -> None:
        """Logs the seconds of a compilation with the next step.

        The history has their sum as an attribute, because a column would be NaN for all
        other steps.
        """
        self._extra["compile_seconds"] = seconds
        self._compile_seconds = (self._compile_seconds or 0.0) + seconds

    def record_eval(self, step: int, metrics: Values) -> None:
        """Stores and logs an evaluation's metrics, with the prefix ``eval_``."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self._evals.append(step, named)
        self.logger.log(step, named)

    def best_eval(self, name: str, mode: str) -> str:
        """Returns the best finite value of an evaluation's metric, with its step.

        The text is empty if no value is finite. ``mode`` is ``"min"`` or ``"max"``.
        """
        columns = dict(self._evals.arrays())
        steps = zip(columns.get(name, ()), columns.get("eval_step", ()), strict=False)
        finite = [(value, step) for value, step in steps if math.isfinite(value)]
        if not finite:
            return ""
        pick = min if mode == "min" else max
        value, step = pick(finite, key=lambda pair: pair[0])
        return f"Best {name} {format_number(value)} at step {int(step)}."

    def history(self) -> History:
        """Returns every metric by name, with NaN for steps that do not have it.

        ``step`` has the step numbers. A metric of evaluations has one entry for each
        evaluation; ``eval_step`` has the step numbers of the evaluations.
        """
        history = History(itertools.chain(self._steps.arrays(), self._evals.arrays()))
        history.compile_seconds = self._compile_seconds
        return history

    def _timing(self, wait_seconds: float) -> dict[str, float]:
        before, self._last_time = self._last_time, time.perf_counter()
        rates = {"data_wait_seconds": wait_seconds}
        # The first step has no rates, because its time includes earlier work.
        if before is not None and self.throughput is not None:
            if not self._num_untimed:
                self.step_seconds.append(self._last_time - before)
                self._num_timed += 1
            self._num_untimed = max(0, self._num_untimed - 1)
            if self.step_seconds:
                rates |= self.throughput.rates(statistics.fmean(self.step_seconds))
        return rates

    def skip_message(self) -> str:
        """Returns a line about skipped steps, or an empty text."""
        shown = ", ".join(map(str, self._first_skipped))
        more = ", ..." * (self._num_skipped > len(self._first_skipped))
        line = f"{self._num_skipped} steps changed nothing (skipped): {shown}{more}."
        return line * bool(self._num_skipped)

    def _note_skipped(self, step: int) -> None:
        self._num_skipped += 1
        if len(self._first_skipped) < 10:
            self._first_skipped.append(step)

    def _check(self, step: int, row: dict[str, float], player: str) -> None:
        is_skipped = bool(row.get("skipped"))
        if is_skipped and math.isnan(row["loss"]) and row["grad_norm"] == 0:
            if not self._num_skipped:
                self.logger.message(
                    f"Step {step} changed nothing: the weight of its loss is 0, as for "
                    "a batch whose labels all have weight 0."
                )
            self._note_skipped(step)
            return
        # With float16, an overflow halves the loss scale of the next step, down to 1.
        overflows = is_skipped and not math.isfinite(row["grad_norm"])
        if overflows and row.get("loss_scale", 1) > 1:
            return
        is_bad = is_skipped or not _is_finite(row)
        # Good steps of other players would hide a player that never trains.
        num_bad = self._num_bad[player] = self._num_bad[player] + 1 if is_bad else 0
        if is_bad and num_bad > self.skip_limit and not self._survived(row):
            self._raise(step, row, player)
        if is_bad:
            self._note_skipped(step)
            row["skipped"] = 1.0

    def _survived(self, row: Values) -> bool:
        """Returns True if the optimizer itself kept bad gradients out of the state."""
        if "skipped" in row or math.isfinite(row["grad_norm"]):
            return False  # the compiled step skips bad steps, or only the loss is bad
        return self.is_state_finite()

    def _raise(self, step: int, row: Values, player: str) -> None:
        self.bad_step = step
        of_player = f" of {player}" if player else ""
        before = f"No earlier step{of_player or ' of this fit'} was finite."
        if last := self._last_finite.get(player):
            before = (
                f"Last finite loss{of_player}: {last['loss']:.6g} at step "
                f"{last['step']}."
            )
        if self.skip_limit:
            before += (
                f" The last {self._num_bad[player]} steps{of_player} were bad, and "
                f"SkipSteps(limit={self.skip_limit}) skips no more steps."
            )
        raise NonFiniteLossError(
            f"Step {step}{of_player}: loss {row['loss']}, gradient norm "
            f"{row['grad_norm']}. {before}"
        )

    def _warn_of_lost(self, step: int, row: Values) -> None:
        if row.get("lost_updates", 0.0) >= 0.5 and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"Step {step}: {row['lost_updates']:.0%} of the updates are too small "
                "to change a parameter of 16 bits and are lost. Keep parameters in "
                "float32 and compute in bfloat16: "
                "precision=Precision.mixed_bfloat16().",
            )


def _by_layer(metrics: Mapping[str, jax.Array]) -> Values:
    """Returns a metric per layer, named as in ``expert_loads/blocks.layer.mlp/0``."""
    arrays = {name: np.asarray(x) for name, x in metrics.items() if x.ndim}
    return {
        f"{name}/{index}": float(value)
        for name, values in arrays.items()
        for index, value in enumerate(values)
    }


def _is_finite(row: Values) -> bool:
    # The gradient overflows one step before the loss.
    return math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])


@dataclass
class Tracer(contextlib.AbstractContextManager):
    """Writes one `jax.profiler` trace of the steps from ``start`` to ``stop - 1``.

    Steps are counted from 0, as by ``range``. The trace is written to the
    folder ``profile`` of the directory, by default the working directory.
    """

    profile: tuple[int, int] | None
    directory: Path | None
    _is_tracing: bool = False

    def step(self, step: int, state: Any) -> contextlib.AbstractContextManager:
        """Names a step in the trace. Starts or stops the trace at the right step.

        ``state`` is the result of the previous step, which may still be running.
        """
        if self.profile is None:
            return contextlib.nullcontext()
        start, stop = self.profile
        # The trace stops before this step is dispatched, so that it contains none of
        # this step's work.
        if step >= stop:
            self.stop(state)
        elif step >= start and not self._is_tracing:
            jax.profiler.start_trace(str((self.directory or Path()) / "profile"))
            self._is_tracing = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def stop(self, state: Any = None) -> None:
        """Ends a running trace as soon as ``state`` is computed."""
        if self._is_tracing:
            # Steps are dispatched ahead. Without this wait, the trace would end before
            # their work is done.
            jax.block_until_ready(state)
            self._is_tracing = False
            jax.profiler.stop_trace()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
