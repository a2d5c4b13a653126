"""Metrics of a run, fetched behind the step, checked, kept, logged; and its speed."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.audit.report import audit
from nnx_parallel.errors import NonFiniteLossError
from nnx_parallel.loggers.logger import Logger
from nnx_parallel.mesh import Device

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
"""Dense bfloat16 FLOP/s of a device by the start of its ``device_kind``, from the
makers' data sheets."""


def peak_flops(device: Device) -> float | None:
    """Peak bfloat16 FLOP/s of a device, or ``None`` where it is not known."""
    kind = device.device_kind
    known = [name for name in PEAK_FLOPS if kind.startswith(name)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def count_tokens(batch: Any) -> int | None:
    """Tokens in a batch: the elements of its first integer array of two dims.

    ``None`` for a batch without one: then speed is counted in examples.
    """
    for leaf in jax.tree.leaves(batch):
        # (batch, seq): labels have one dim, images have more.
        if leaf.ndim == 2 and jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf.size
    return None


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Work of one step, to turn its seconds into rates.

    Attributes:
        num_rows: Rows of the global batch.
        num_tokens: Its tokens, or ``None``.
        flops_per_device: Of the compiled step, recomputation included, or ``None``.
        device: A device of the mesh that is this process's.
    """

    num_rows: int
    num_tokens: int | None
    flops_per_device: float | None
    device: Device

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, batch: Any, device: Device) -> Self:
        """Throughput of a compiled step on a global batch."""
        try:
            flops = audit(compiled).flops
        except (jax.errors.JaxRuntimeError, ValueError, KeyError, IndexError):
            # libtpu may be newer than jaxlib, which then cannot print its programs.
            flops = None
        return cls(
            num_rows=jax.tree.leaves(batch)[0].shape[0],
            num_tokens=count_tokens(batch),
            flops_per_device=flops,
            device=device,
        )

    def rates(self, step_seconds: float) -> dict[str, float]:
        """Metrics of a step that took ``step_seconds``.

        ``mfu`` divides the FLOPs of the compiled step by the device's peak. Under
        remat these include the recomputation, which makes it the hardware's rather
        than the model's utilisation.
        """
        rates = {
            "step_seconds": step_seconds,
            "examples_per_second": self.num_rows / step_seconds,
        }
        if self.num_tokens is not None:
            rates["tokens_per_second"] = self.num_tokens / step_seconds
        if self.flops_per_device:
            flops = self.flops_per_device / step_seconds
            rates["tflops_per_device"] = flops / 1e12
            if peak := peak_flops(self.device):
                rates["mfu"] = flops / peak
        if stats := self.device.memory_stats():  # CPUs have none
            rates["device_memory_bytes"] = float(stats.get("peak_bytes_in_use", 0))
        return rates


History = dict[str, np.ndarray]

_MOST_LOST = 0.5
"""Share of lost updates from which a run is warned."""


class Recorder:
    """Collects the metrics of each step without making the step wait.

    Metrics stay on the device while the next steps are dispatched. Times are means over
    the last 8 steps, since steps in flight complete unevenly.

    Args:
        logger: Where they go.
        on_step: Called with the step and its metrics once these are known.
        log_every: Steps between logged metrics.
        max_behind: Steps that may be in flight.

    Attributes:
        throughput: Work of one step, once it is compiled.
    """

    def __init__(
        self,
        logger: Logger,
        on_step: Callable[[int, dict[str, float]], None],
        *,
        log_every: int = 1,
        max_behind: int = 2,
    ) -> None:
        self.throughput: Throughput | None = None
        self._logger = logger
        self._on_step = on_step
        self._log_every = log_every
        self._max_behind = max_behind
        self._in_flight: deque[tuple[int, Mapping[str, jax.Array], float]] = deque()
        self._rows: list[dict[str, float]] = []
        self._evals: list[dict[str, float]] = []
        self._last_time: float | None = None
        self._durations: deque[float] = deque(maxlen=8)
        self._extra: dict[str, float] = {}
        self._has_warned = False

    def push(
        self, step: int, metrics: Mapping[str, jax.Array], wait_seconds: float
    ) -> None:
        """Takes the metrics of a step that has been dispatched.

        Raises:
            NonFiniteLossError: If the loss or gradient of an earlier step is not
                finite.
        """
        for value in metrics.values():
            # Begun now, so that reading it later waits for the step alone.
            value.copy_to_host_async()
        self._in_flight.append((step, metrics, wait_seconds))
        while len(self._in_flight) > self._max_behind:
            self._take()

    def flush(self) -> None:
        """Waits for all steps in flight."""
        while self._in_flight:
            self._take()

    def restart_clock(self) -> None:
        """Leaves what has happened since the last step out of the next step's time."""
        self._last_time = time.perf_counter()

    def last_row(self) -> dict[str, float]:
        """The metrics of the newest step that is known, itself as ``"step"``."""
        return dict(self._rows[-1]) if self._rows else {}

    def add_once(self, **metrics: float) -> None:
        """Adds metrics to the next step alone, such as the compile time."""
        self._extra |= metrics

    def record_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps and logs the metrics of an evaluation, named ``eval_name``."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self._evals.append({"eval_step": step, **named})
        self._logger.log(step, named)

    def history(self) -> History:
        """Every metric by name: one entry a step, NaN where a step has none.

        ``step`` numbers the entries; ``eval_step`` those of the evaluations.
        """
        return _columns(self._rows) | _columns(self._evals)

    def _take(self) -> None:
        step, metrics, wait_seconds = self._in_flight.popleft()
        row = {name: float(value) for name, value in metrics.items()}
        # The clock is read behind `float`, which waits until the step is done.
        row |= self._timing(wait_seconds) | self._extra
        self._extra = {}
        self._check_finite(step, row)
        self._check_resolution(step, row)
        self._rows.append({"step": step, **row})
        if step % self._log_every == 0:
            self._logger.log(step, row)
        self._on_step(step, row)

    def _timing(self, wait_seconds: float) -> dict[str, float]:
        now = time.perf_counter()
        rates: dict[str, float] = {"data_wait_seconds": wait_seconds}
        # Not of the first step, whose time includes what came before it.
        if self._last_time is not None and self.throughput is not None:
            self._durations.append(now - self._last_time)
            mean = sum(self._durations) / len(self._durations)
            rates |= self.throughput.rates(mean)
        self._last_time = now
        return rates

    def _check_finite(self, step: int, row: dict[str, float]) -> None:
        if _is_finite(row):
            return
        if row.get("skipped") and row["loss_scale"] > 1:
            return  # float16: the next step runs at half the scale, down to 1
        last = next(filter(_is_finite, reversed(self._rows)), None)
        before = (
            "No step of this fit before it was finite."
            if last is None
            else f"Last finite loss: {last['loss']:.6g} at step {last['step']}."
        )
        raise NonFiniteLossError(
            f"Step {step}: loss {row['loss']}, gradient norm {row['grad_norm']}. "
            f"{before}"
        )

    def _check_resolution(self, step: int, row: dict[str, float]) -> None:
        if row.get("lost_updates", 0.0) < _MOST_LOST or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"Step {step}: {row['lost_updates']:.0%} of the updates are too small to "
            "change a parameter of 16 bits and are lost. Keep parameters in float32 "
            "and compute in bfloat16: precision=Precision.mixed_bfloat16().",
            stacklevel=2,
        )


def _is_finite(row: dict[str, float]) -> bool:
    # The gradient overflows first: the loss is finite for one step more.
    return math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])


def _columns(rows: list[dict[str, float]]) -> History:
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: np.asarray([row.get(name, math.nan) for row in rows]) for name in names
    }
