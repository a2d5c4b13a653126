"""Arguments and data that a Trainer refuses, and losses that stop it."""

import gzip
import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    Backend,
    Callback,
    Checkpoint,
    DataParallel,
    Debugging,
    Faults,
    Precision,
    Trainer,
    make_mesh,
)
from nnx_parallel.distributed import Watchdog
from nnx_parallel.errors import (
    BatchShapeError,
    DataError,
    DataExhaustedError,
    NonFiniteLossError,
)


def squares(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make_batch(rows: int = 16, width: int = 4, fill: float = 1.0) -> dict:
    x = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    return {"x": fill * x, "y": fill * x.sum(1, keepdims=True)}


make_trainer = partial(
    Trainer,
    model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
    optimizer=optax.sgd(0.05),
    loss=squares,
    loggers=(),
)


@pytest.mark.parametrize(
    "name", ["callbacks", "loss", "optimizer", "strategy", "loggers", "checkpoint"]
)
def test_assigning_constructor_argument_raises(name: str):
    text = f"`trainer.{name} = ...` would have no effect: a Trainer reads its arguments"
    with pytest.raises(AttributeError, match=re.escape(text)):
        setattr(make_trainer(), name, ())


def test_assigning_grouped_argument_raises() -> None:
    trainer: Any = make_trainer()
    text = "when it is built. Pass faults=Faults(step_timeout=...) to Trainer(...)."
    with pytest.raises(AttributeError, match=re.escape(text)):
        trainer.step_timeout = 5


@pytest.mark.parametrize("name", ["layout", "step", "train_step", "fit"])
def test_assigning_read_only_attribute_raises(name: str):
    with pytest.raises(AttributeError, match="is read-only"):
        setattr(make_trainer(), name, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("callback", "no attribute 'callback'. Did you mean 'callbacks'? Options are"),
        ("note", "no attribute 'note'. Options are arguments of Trainer(...)"),
    ],
)
def test_assigning_unknown_attribute_raises(name: str, message: str):
    with pytest.raises(AttributeError, match=re.escape(message)):
        setattr(make_trainer(), name, "mine")


def test_state_and_attributes_of_subclass_may_be_assigned():
    class Noted(Trainer):
        note = ""

    trainer: Any = Noted(**make_trainer.keywords)
    trainer.note = trainer.own = "a"
    trainer.note, trainer.own = "mine", 1
    trainer.state = trainer.state
    assert (trainer.note, trainer.own) == ("mine", 1)


def test_calling_trainer_raises():
    trainer: Any = make_trainer()
    with pytest.raises(TypeError, match=r"cannot be called\. To train, call"):
        trainer({"x": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_microbatches": 2.0},
            "num_microbatches=2.0. It must be an integer of at least 1, which does not "
            "split the batch.",
        ),
        (
            {"log_every": 0},
            "log_every=0. It must be an integer of at least 1, which logs every step; "
            "loggers=() logs nothing.",
        ),
        (
            {"num_microbatches": 0},
            "num_microbatches=0. It must be an integer of at least 1, which does not "
            "split the batch.",
        ),
        (
            {"ema_decay": 1.0},
            "ema_decay=1.0. It must be a number of at least 0 and below 1, such as "
            "0.999.",
        ),
        (
            {"remat": "some"},
            "Unknown remat policy 'some'. Policies: ['none', 'dots', 'full']",
        ),
    ],
)
def test_invalid_arguments_raise_before_building(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(**options)


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        (
            Faults,
            {"check_replicas_every": -1},
            "check_replicas_every=-1. It must be an integer of at least 0, which "
            "compares nothing.",
        ),
        (
            Debugging,
            {"overfit_batches": 1.5},
            "overfit_batches=1.5. It must be an integer of at least 0, which takes all "
            "batches.",
        ),
        (
            Debugging,
            {"profile": (5, 5)},
            "profile=(5, 5) covers no step. Give two numbers of steps, 0 <= start < "
            "stop, such as (10, 15).",
        ),
        (Debugging, {"profile": (-1, 5)}, "profile=(-1, 5) covers no step."),
    ],
)
def test_invalid_options_raise(group: Any, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        group(**options)


def test_devices_and_mesh_agree() -> None:
    devices = jax.devices()[4:6]
    by_devices = make_trainer(devices=devices)
    by_mesh = make_trainer(backend=Backend(mesh=DataParallel().make_mesh(devices)))
    assert by_devices.mesh == by_mesh.mesh
    assert set(by_mesh.mesh.devices.flat) == set(devices)
    kernel = by_mesh.state.params["kernel"]
    assert set(kernel.sharding.device_set) == set(devices)


def test_devices_with_mesh_raise() -> None:
    message = (
        "Trainer got devices= and Backend(mesh=). A mesh already has devices: pass "
        "only one of the two."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(
            devices=jax.devices(), backend=Backend(mesh=make_mesh({"data": 8}))
        )


# Data


def test_exhausted_data_raises() -> None:
    trainer = make_trainer()
    message = "Data ended before step 4 of 5: list gave 3 batches here, 0 of them"
    with pytest.raises(DataExhaustedError, match=re.escape(message)):
        trainer.fit([make_batch()] * 3, 5)
    assert trainer.step == 0
    message = "Data ended before step 4 of 5: generator gave 3 batches here, 0 of them"
    with pytest.raises(DataExhaustedError, match=re.escape(message)):
        trainer.fit((make_batch() for _ in range(3)), 5)
    assert trainer.step == 3


def test_indivisible_rows_raise() -> None:
    message = (
        "Batch of 12 rows cannot be split: 2 microbatches * data=8 need a multiple of "
        "16 rows. Nearest: 16."
    )
    trainer = make_trainer(num_microbatches=2)
    with pytest.raises(BatchShapeError, match=re.escape(message)):
        trainer.fit([make_batch(12)], 1)
    with pytest.raises(BatchShapeError, match=re.escape(message)):
        trainer.shard_batch(make_batch(12))


def test_changed_batch_shape_raises() -> None:
    trainer = make_trainer()
    with pytest.raises(BatchShapeError, match=re.escape("shape (24, 4)")):
        trainer.fit([make_batch(), make_batch(), make_batch(24)], 3)


def test_one_shot_eval_data_raises() -> None:
    message = (
        "eval_data is an iterator, which one evaluation would use up. Pass a list, or "
        "an object whose __iter__ starts over."
    )
    with pytest.raises(DataError, match=re.escape(message)):
        make_trainer().fit([make_batch()], 1, eval_data=iter([make_batch()]))


def test_single_batch_as_data_raises() -> None:
    with pytest.raises(DataError, match=re.escape("Data is one dict.")):
        make_trainer().fit(make_batch(), 1)


# Losses that are not finite


@pytest.mark.parametrize("bad_step", [1, 3, 4])
def test_nonfinite_loss_raises_and_is_not_saved(bad_step: int, tmp_path: Path) -> None:
    batches = [make_batch(fill=np.nan if i == bad_step else 1.0) for i in range(1, 7)]
    trainer = make_trainer(checkpoint=Checkpoint(tmp_path, every=2))
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.fit(batches, 6)
    text = str(caught.value)
    assert text.startswith(f"Step {bad_step}: loss nan, gradient norm nan. ")
    if bad_step == 1:
        assert "No earlier step of this fit was finite." in text
        assert "there is no checkpoint" in text
    else:
        assert re.search(rf"Last finite loss: [\d.]+ at step {bad_step - 1}\.", text)
        saved = (bad_step - 1) // 2 * 2
        assert f"there is a checkpoint of step {saved}." in text
    assert "`bias`, `kernel` (2 arrays)." in text
    assert "The step's batch has 64 NaN in batch['x']" in text
    assert "Lower the learning rate" not in text  # the batch is the cause
    saved = {int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()}
    assert all(step < bad_step for step in saved)


def test_nonfinite_gradient_raises_at_finite_loss() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return jax.numpy.sqrt((model(batch["x"]) * 0.0) ** 2).mean()

    with pytest.raises(
        NonFiniteLossError, match=r"Step 1: loss 0\.0, gradient norm nan"
    ):
        make_trainer(loss=loss).fit([make_batch()] * 4, 4)


def test_float16_raises_at_minimum_scale() -> None:
    trainer = make_trainer(precision=Precision.mixed_float16())
    good, bad = make_batch(fill=0.1), make_batch(fill=np.inf)
    history = trainer.fit([good, bad, good], 3)
    assert list(history["skipped"]) == [0, 1, 0]
    assert list(history["loss_scale"]) == [2.0**15, 2.0**15, 2.0**14]
    message = (
        "Step 18: loss nan, gradient norm nan. No earlier step of this fit was finite."
    )
    with pytest.raises(NonFiniteLossError, match=re.escape(message)):
        trainer.fit([bad] * 40, 40)


# Profiles


def test_profile_writes_trace_of_steps(tmp_path: Path) -> None:
    trainer = make_trainer(checkpoint=tmp_path, debugging=Debugging(profile=(1, 3)))
    trainer.fit([make_batch()] * 4, 4)
    (trace,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    named = [event["args"] for event in events if event.get("name") == "train"]
    assert [args["step_num"] for args in named] == ["1", "2"]
    operations = [event.get("args", {}).get("hlo_op") for event in events]
    runs = Counter(name for name in operations if name)
    assert min(runs.values()) >= 2 * 8, (
        "the trace does not have both full steps on every device"
    )


def test_watchdog_runs_until_trace_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    stop_trace = jax.profiler.stop_trace

    def note_stop() -> None:
        events.append("trace")
        stop_trace()

    def fail(trainer: Trainer, step: int, metrics: Any) -> None:
        raise RuntimeError("a hook that fails")

    monkeypatch.setattr(jax.profiler, "stop_trace", note_stop)
    monkeypatch.setattr(Watchdog, "disarm", lambda self: events.append("off"))
    failing = Callback()
    monkeypatch.setattr(failing, "on_step_end", fail)
    trainer = make_trainer(
        callbacks=[failing], checkpoint=tmp_path, debugging=Debugging(profile=(0, 9))
    )
    with pytest.raises(RuntimeError, match="a hook that fails"):
        trainer.fit([make_batch()] * 9, 9)
    assert events[:2] == ["trace", "off"]
