"""Metrics are read after their step, checked and kept; step times become rates."""

import math
import re
import tracemalloc
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel.errors import NonFiniteLossError
from nnx_parallel.layers import Stack
from nnx_parallel.layers.stack.scan import Remat
from nnx_parallel.loggers import Logger, LoggerGroup
from nnx_parallel.strategies import DataParallel
from nnx_parallel.training.recorder import (
    PEAK_FLOPS,
    Recorder,
    Throughput,
    count_tokens,
    peak_flops,
)
from nnx_parallel.training.trainer import Trainer


class Memory(Logger):
    """Keeps all rows of metrics."""

    logs_layers = False

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict]] = []

    def start(self, *, first_step: int, num_steps: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def log(self, step: int, metrics: Any) -> None:
        self.rows.append((step, dict(metrics)))


def metrics(loss: float = 1.0, grad_norm: float = 2.0, **more: float) -> dict:
    values = {"loss": loss, "grad_norm": grad_norm, **more}
    return {name: jnp.float32(value) for name, value in values.items()}


THROUGHPUT = Throughput(
    num_rows=4,
    num_tokens=None,
    model_flops=None,
    hardware_flops=None,
    device=jax.devices()[0],
    num_devices=1,
)


def make_recorder(**options: Any) -> tuple[Recorder, list[int], Memory]:
    known, memory = [], Memory()
    group = LoggerGroup([memory])
    recorder = Recorder(group, lambda step, _: known.append(step), **options)
    return recorder, known, memory


@pytest.mark.parametrize("max_behind", [0, 1, 2])
def test_max_behind_limits_steps_in_flight(max_behind: int) -> None:
    recorder, known, _ = make_recorder(max_behind=max_behind)
    for step in range(1, 6):
        recorder.push(step, metrics(), 0.0)
        assert known == list(range(1, step - max_behind + 1))
    recorder.flush()
    assert known == [1, 2, 3, 4, 5]


def test_step_takes_8_bytes_per_metric() -> None:
    recorder = Recorder(LoggerGroup([]), lambda step, row: None)

    def run(first: int, last: int) -> int:
        for step in range(first, last):
            recorder.push(step, metrics(), 0.5)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = run(0, 500)
        growth = (run(500, 3000) - before) / 2500
    finally:
        tracemalloc.stop()
    recorder.flush()
    assert len(recorder.history()) == 4
    # Capacity grows by a sixteenth more than is needed.
    assert growth < 4 * 8 * 17 / 16 + 4


@pytest.mark.parametrize("max_behind", [0, 2])
def test_slow_callback_is_not_in_durations(
    monkeypatch: pytest.MonkeyPatch, max_behind: int
) -> None:
    """Steps take a second, and the callback of step 6 takes 100 seconds."""
    clock = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: clock)

    def on_step(step: int, row: dict[str, float]) -> None:
        nonlocal clock
        clock += 100 if step == 6 else 0

    recorder = Recorder(LoggerGroup([]), on_step, max_behind=max_behind)
    recorder.throughput = THROUGHPUT
    for step in range(1, 12):
        clock += 1
        recorder.push(step, metrics(), 0.0)
    assert {*recorder.step_seconds} == {1.0}
    assert {*recorder.history()["step_seconds"][1:]} == {1.0}


@pytest.mark.parametrize("every", [1, 2])
def test_callback_that_is_slow_in_most_steps_is_in_durations(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """From step 20 on, the callback takes 10 seconds."""
    clock = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: clock)

    def on_step(step: int, row: dict[str, float]) -> None:
        nonlocal clock
        clock += 10 if step >= 20 and step % every == 0 else 0

    recorder = Recorder(LoggerGroup([]), on_step)
    recorder.throughput = THROUGHPUT
    for step in range(1, 80):
        clock += 1
        recorder.push(step, metrics(), 0.0)
    assert np.mean(recorder.step_seconds) == pytest.approx(1 + 10 / every, rel=0.2)


def test_columns_are_aligned() -> None:
    recorder, _, memory = make_recorder()
    recorder.add_compilation(3.0)
    recorder.push(1, metrics(loss=4.0), 0.5)
    recorder.push(2, metrics(loss=3.0, extra=7.0), 0.25)
    recorder.flush()
    recorder.record_eval(2, {"loss": 5.0})
    history = recorder.history()
    np.testing.assert_array_equal(history["step"], [1, 2])
    np.testing.assert_array_equal(history["loss"], [4.0, 3.0])
    np.testing.assert_array_equal(history["extra"], [math.nan, 7.0])
    assert history.compile_seconds == 3.0
    with pytest.raises(KeyError, match=r"an attribute: history\.compile_seconds"):
        _ = history["compile_seconds"]
    assert [row.get("compile_seconds") for _, row in memory.rows] == [3.0, None, None]
    np.testing.assert_array_equal(history["data_wait_seconds"], [0.5, 0.25])
    np.testing.assert_array_equal(history["eval_step"], [2])
    np.testing.assert_array_equal(history["eval_loss"], [5.0])
    assert [step for step, _ in memory.rows] == [1, 2, 2]
    assert memory.rows[-1] == (2, {"eval_loss": 5.0})
    assert recorder.last_row()["loss"] == 3.0


def test_layer_values_go_only_to_layer_loggers() -> None:
    plain, layered = Memory(), Memory()
    layered.logs_layers = True
    rows: list[dict] = []
    group = LoggerGroup([plain, layered])
    recorder = Recorder(group, lambda _, row: rows.append(row), log_every=2)
    for step in (1, 2):
        loads = jnp.float32([step, 3.0])
        recorder.push(step, metrics() | {"loads/mlp": loads}, 0.0)
    recorder.flush()
    ((step, row),) = plain.rows
    assert step == 2
    assert row == rows[1]
    assert row.keys() == {"loss", "grad_norm", "data_wait_seconds"}
    assert layered.rows == [(2, row), (2, {"loads/mlp/0": 2.0, "loads/mlp/1": 3.0})]
    assert "loads/mlp" not in recorder.history()


@pytest.mark.parametrize(
    ("loss", "grad_norm", "found"),
    [
        (math.nan, math.nan, "loss nan, gradient norm nan."),
        (math.inf, 1.0, "loss inf, gradient norm 1.0."),
        (1.0, math.inf, "loss 1.0, gradient norm inf."),
    ],
)
def test_nonfinite_metric_names_last_finite_step(
    loss: float, grad_norm: float, found: str
) -> None:
    recorder, _, _ = make_recorder(max_behind=0)
    with pytest.raises(NonFiniteLossError) as caught:
        recorder.push(8, metrics(loss, grad_norm), 0.0)
    text = f"Step 8: {found} No earlier step of this fit was finite."
    assert str(caught.value) == text
    recorder.push(9, metrics(0.125), 0.0)
    message = f"Step 10: {found} Last finite loss: 0.125 at step 9."
    with pytest.raises(NonFiniteLossError, match=re.escape(message)):
        recorder.push(10, metrics(loss, grad_norm), 0.0)
    assert list(recorder.history()["step"]) == [9]


def test_bad_steps_of_one_player_raise() -> None:
    """Good steps of another player neither reset the count nor give the last loss."""
    recorder, known, _ = make_recorder(max_behind=0, skip_limit=1)
    # The name of another metric may come first.
    bad = metrics(math.nan, math.nan, **{"a/aux/loss": 1.0, "a/loss": math.nan})
    recorder.push(1, metrics(0.5, **{"a/loss": 0.5}), 0.0, "a")
    recorder.push(2, metrics(0.25, **{"b/loss": 0.25}), 0.0, "b")
    recorder.push(3, bad, 0.0, "a")
    recorder.push(4, metrics(0.125, **{"b/loss": 0.125}), 0.0, "b")
    assert known == [1, 2, 3, 4]
    message = (
        "Step 5 of a: loss nan, gradient norm nan. Last finite loss of a: 0.5 at step "
        "1. The last 2 steps of a were bad, and SkipSteps(limit=1) skips no more steps."
    )
    with pytest.raises(NonFiniteLossError, match=re.escape(message)):
        recorder.push(5, bad, 0.0, "a")


def test_skipped_step_passes_while_scale_can_fall() -> None:
    recorder, known, _ = make_recorder(max_behind=0)
    recorder.push(1, metrics(0.5), 0.0)
    overflow = {"loss": math.inf, "grad_norm": math.nan, "skipped": 1}
    recorder.push(2, metrics(**overflow, loss_scale=2.0), 0.0)
    assert known == [1, 2]
    with pytest.raises(NonFiniteLossError, match=re.escape("loss: 0.5 at step 1.")):
        recorder.push(3, metrics(**overflow, loss_scale=1.0), 0.0)


def test_log_every_affects_only_loggers() -> None:
    recorder, known, memory = make_recorder(log_every=3)
    for step in range(1, 8):
        recorder.push(step, metrics(), 0.0)
    recorder.flush()
    assert [step for step, _ in memory.rows] == [3, 6]
    assert len(known) == len(recorder.history()["loss"]) == 7


# Throughput


def throughput(**options: Any) -> Throughput:
    settings: dict[str, Any] = {"num_rows": 8, "num_tokens": 64, "num_devices": 2}
    settings |= {"model_flops": 8e12, "hardware_flops": 5e12}
    return Throughput(**(settings | {"device": jax.devices()[0]} | options))


def test_first_step_and_pauses_have_no_rate() -> None:
    recorder, _, _ = make_recorder(max_behind=0)
    recorder.throughput = throughput()
    for step in range(1, 4):
        recorder.push(step, metrics(), 0.0)
    rates = recorder.history()["tokens_per_second"]
    assert np.isnan(rates[0])
    assert (rates[1:] > 0).all()


def test_rates_follow_step_seconds() -> None:
    rates = throughput().rates(0.5)
    assert rates["step_seconds"] == 0.5
    assert rates["examples_per_second"] == 16
    assert rates["tokens_per_second"] == 128
    assert rates["tokens_per_second_per_device"] == 64
    assert "tokens_per_second_per_device" not in throughput(num_devices=1).rates(0.5)
    assert rates["tflops_per_device"] == 8
    # The peak FLOPs of a CPU are unknown.
    assert {"mfu", "hfu"}.isdisjoint(rates)
    unknown = throughput(num_tokens=None, model_flops=None).rates(0.5)
    assert {"tokens_per_second", "tflops_per_device"}.isdisjoint(unknown)


@dataclass
class Accelerator:
    """The parts of a device that the recorder reads."""

    device_kind: str

    def memory_stats(self) -> dict:
        return {"peak_bytes_in_use": 5}


def test_mfu_and_hfu_are_shares_of_peak() -> None:
    rates = throughput(device=Accelerator("TPU v5 lite")).rates(0.5)
    assert rates["mfu"] == pytest.approx(8e12 / 197e12)
    assert rates["hfu"] == pytest.approx(10e12 / 197e12)
    assert rates["device_memory_bytes"] == 5


def test_remat_changes_hfu_but_not_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEAK_FLOPS, "cpu", 1e12)
    rows, width, layers = 8, 16, 3
    product = 2 * rows * width * 4 * width  # FLOPs of one of a block's two products

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(jnp.tanh(self.up(x)))

    def flops(remat: Remat) -> tuple[float, float]:
        """The FLOPs behind MFU and HFU."""
        trainer = Trainer(
            lambda rngs: Stack.of([Block(rngs) for _ in range(layers)]),
            optax.sgd(1e-3),
            lambda model, batch: jnp.mean(model(batch) ** 2),
            strategy=DataParallel(2),
            devices=jax.devices()[:2],
            remat=remat,
            loggers=(),
        )
        batch = np.ones((rows, width), np.float32)
        last = trainer.fit([batch] * 2, num_steps=2)
        seconds = 2e12 * last["step_seconds"][-1]
        return last["mfu"][-1] * seconds, last["hfu"][-1] * seconds

    (mfu, hfu), (mfu_full, hfu_full) = flops("none"), flops("full")
    assert mfu == pytest.approx(mfu_full) == pytest.approx(3 * layers * 2 * product)
    # Only `up` is computed again: the gradient does not need the output of `down`.
    assert hfu_full - hfu == pytest.approx(layers * product)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("cpu", None),
    ],
)
def test_peak_flops_match_device_kind(kind: str, peak: float | None) -> None:
    assert peak_flops(Accelerator(kind)) == peak


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"tokens": np.zeros((4, 9), np.int32)}, 36),
        ({"a_weights": np.zeros((4, 9)), "tokens": np.zeros((4, 9), np.uint16)}, 36),
        ({"image": np.zeros((4, 8, 8, 3), np.uint8), "label": np.zeros(4, int)}, None),
        ({"x": np.zeros((4, 9), np.float32)}, None),
    ],
)
def test_tokens_are_integers_with_two_dims(batch: dict, count: int | None) -> None:
    assert count_tokens(batch) == count
