"""Passes over data with a length, with a smaller last batch in each pass."""

import functools
import io
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from nnx_parallel import FSDP, Callback, Checkpoint, Mean, Pipeline, Trainer
from nnx_parallel.data import Pad, batches
from nnx_parallel.data.batches import DROPPED, Agreed, BatchAgreement
from nnx_parallel.errors import (
    BatchShapeError,
    DataError,
    DataExhaustedError,
    LossError,
    ParallelWarning,
)
from nnx_parallel.layers import Stack, cross_entropy
from nnx_parallel.loggers import ConsoleLogger

SIZES = (16, 16, 5)


def make_rows(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    return {"x": x, "y": rng.integers(3, size=count).astype(np.int32)}


def split(rows: dict, *sizes: int) -> list[dict]:
    stops = np.cumsum(sizes)
    return [
        {name: x[stop - size : stop] for name, x in rows.items()}
        for size, stop in zip(sizes, stops, strict=True)
    ]


BATCHES = split(make_rows(sum(SIZES)), *SIZES)


class Files:
    """Batches with a length; a batch cannot be seen before its turn."""

    def __init__(self, batches: list[dict] = BATCHES) -> None:
        self.batches, self.num_read = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict]:
        for batch in self.batches:
            self.num_read += 1
            yield batch


class Loader:
    """Orders the rows differently in each pass, like PyTorch's DataLoader."""

    def __init__(self, seed: int = 0, drop_last: bool = False) -> None:
        self.rows, self.batch_size = make_rows(sum(SIZES)), 16
        self.sampler, self.drop_last = range(sum(SIZES)), drop_last
        self.rng, self.num_read = np.random.default_rng(seed), 0

    def __len__(self) -> int:
        return (math.floor if self.drop_last else math.ceil)(len(self.sampler) / 16)

    def __iter__(self) -> Iterator[dict]:
        yield from self.batches(self.rng.permutation(len(self.sampler)))

    def batches(self, order: np.ndarray) -> Iterator[dict]:
        for i in range(len(self)):
            self.num_read += 1
            yield {k: x[order[16 * i : 16 * i + 16]] for k, x in self.rows.items()}


class Numbered(Loader):
    """Shuffles each pass by the number of the pass, like DistributedSampler."""

    def set_epoch(self, epoch: int) -> None:
        self.rng = np.random.default_rng(epoch)


def grain_dataset(seed: int = 0) -> Any:
    rows = [dict(zip(("x", "y"), row, strict=True)) for row in _rows()]
    return grain.MapDataset.source(rows).seed(seed).shuffle().batch(16)


def _rows() -> list[tuple]:
    rows = make_rows(sum(SIZES))
    return list(zip(rows["x"], rows["y"], strict=True))


def loss(model: Any, batch: dict) -> Mean:
    return cross_entropy(model(batch["x"]), batch["y"], batch.get("weights"))


def make_trainer(checkpoint: Any = None, loss: Any = loss, **options: Any) -> Trainer:
    model = options.pop("model", lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    settings: dict[str, Any] = {"strategy": FSDP(min_size=0), "loggers": ()}
    settings["devices"] = jax.devices()[:2]
    settings |= options
    return Trainer(model, optax.adam(0.05), loss, checkpoint=checkpoint, **settings)


def fit(trainer: Trainer, data: Any, epochs: int, last: Any = "drop") -> list[float]:
    history = trainer.fit(data, num_epochs=epochs, last_batch=last)
    return list(history.get("loss", []))


@pytest.fixture(scope="module")
def by_hand() -> list[float]:
    """Losses of three passes over all batches, including small ones, on one device."""
    one = make_trainer(devices=jax.devices()[:1])
    return [float(one.fit([b], num_epochs=1)["loss"][0]) for b in BATCHES * 3]


def test_epoch_is_one_pass_over_data(by_hand: list[float]) -> None:
    trainer = make_trainer()
    assert len(fit(trainer, BATCHES, 3)) == trainer.step == 6
    # `num_epochs` is the total number of passes, including earlier ones.
    assert fit(trainer, BATCHES, 3) == []
    assert len(fit(trainer, BATCHES, 5)) == 4
    # Passes over other data are counted from zero.
    assert len(fit(trainer, BATCHES[:1], 2)) == 2
    assert trainer.step == 12


@pytest.mark.parametrize("count", [1, 2])
def test_padded_batch_has_loss_of_real_rows(count: int, by_hand: list[float]) -> None:
    losses = fit(make_trainer(num_microbatches=count), BATCHES, 3, Pad("weights"))
    np.testing.assert_allclose(losses, by_hand, rtol=1e-5)


def test_pipeline_pads_last_batch() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.stack = Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.stack(x)

    options: dict[str, Any] = {"model": Net, "num_microbatches": 2}
    two = make_trainer(strategy=Pipeline(2), devices=jax.devices()[:2], **options)
    losses = fit(two, BATCHES, 1, Pad("weights"))
    one = make_trainer(model=Net, devices=jax.devices()[:1])
    expected = [float(one.fit([b], num_epochs=1)["loss"][0]) for b in BATCHES]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    mean = two.evaluate(BATCHES)["loss"]
    assert mean == pytest.approx(one.evaluate(BATCHES)["loss"], rel=1e-5)


@pytest.mark.parametrize("make", [Files, Loader, Numbered, grain_dataset])
@pytest.mark.parametrize(
    ("last", "stop"),
    # A batch is dropped between steps 4 and 5, so no completed step includes it.
    [("drop", 3), ("drop", 4), (Pad("weights"), 4)],
)
def test_run_resumes_within_epoch(
    make: Any, last: Any, stop: int, tmp_path: Path
) -> None:
    expected = uninterrupted(make, last)
    assert len(expected) == (6 if last == "drop" else 9)
    first = make_trainer(Checkpoint(tmp_path), callbacks=[StopAt(stop)])
    losses = fit(first, make(), 3, last)
    assert first.step == stop
    losses += fit(make_trainer(Checkpoint(tmp_path)), make(), 3, last)
    assert losses == expected


@functools.cache
def uninterrupted(make: Any, last: Any) -> list[float]:
    return fit(make_trainer(), make(), 3, last)


class StopAt(Callback):
    """Ends the fit at a step; calls `stop` earlier, as metrics are two steps late."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        if step == self.step - 2:
            trainer.stop("enough")


def test_resume_skips_numbered_passes(tmp_path: Path) -> None:
    make_trainer(Checkpoint(tmp_path, every=2)).fit(
        Numbered(), num_epochs=2, last_batch="drop"
    )
    data = Numbered()
    assert len(fit(make_trainer(Checkpoint(tmp_path, every=2)), data, 3)) == 2
    assert data.num_read == 5  # of 8 batches; it skips all of the first pass


def test_script_resumes_in_second_fit(tmp_path: Path) -> None:
    other = split(make_rows(64), 32, 32)

    def run(directory: Path, *epochs: int) -> list[float]:
        trainer = make_trainer(Checkpoint(directory, every=1))
        pairs = zip((BATCHES, other), epochs, strict=False)
        return [x for data, n in pairs for x in fit(trainer, data, n)]

    expected = run(tmp_path / "whole", 2, 2)
    assert len(expected) == 8
    assert run(tmp_path / "parts", 2, 1) == expected[:6]
    assert run(tmp_path / "parts", 2, 2) == expected[6:]


def test_implicit_drop_warns_before_first_step() -> None:
    message = (
        "A last batch of 5 rows instead of 16 is left out of the training. Pass "
        "last_batch='drop' if this is intended; last_batch=Pad('weights') trains on "
        "it, and the added rows have no effect."
    )
    for data in (BATCHES, Loader(), grain_dataset(), Files()):
        with pytest.warns(ParallelWarning, match=re.escape(message)) as found:
            make_trainer().fit(data, num_epochs=2)
        assert len(found) == 1
    data = Loader()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ParallelWarning):
            make_trainer().fit(data, num_epochs=2)
        assert data.num_read == 0
        make_trainer().fit(Loader(drop_last=True), num_epochs=1)


def test_late_drop_warns_at_line_of_fit() -> None:
    said: list[str] = []
    logger = SimpleNamespace(start=_ignore, log=_ignore, finish=_ignore)
    logger.message = said.append
    trainer = make_trainer(loggers=[logger])
    # The reading thread finds the small batch. `Files` has no index to look it up
    # earlier.
    with pytest.warns(ParallelWarning, match="A last batch of 5 rows") as found:
        trainer.fit(Files(), num_epochs=3)
    assert [w.filename for w in found] == [__file__]
    assert trainer.step == 6
    message = (
        "Done at step 6, not 9: 3 batches of the 3 epochs were left out, or missing."
    )
    assert message in said


def test_late_drop_completes_progress_bar() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=False)
    trainer = make_trainer(loggers=[ConsoleLogger(console=console)])
    with pytest.warns(ParallelWarning, match="A last batch of 5 rows"):
        trainer.fit(Files(), num_epochs=3)
    assert [line[:9] for line in out.getvalue().splitlines() if "loss" in line] == [
        "step 1/9 ",
        "step 6/6 ",
    ]


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def test_smaller_batch_raises_before_first_step() -> None:
    message = (
        "Batch 2, the last one, has 5 rows, and the first has 16. Leave it out by "
        "last_batch='drop', fill it up by last_batch=Pad('weights'), or let the data "
        "drop it."
    )
    for data in (BATCHES, Loader(), grain_dataset()):
        trainer = make_trainer()
        with pytest.raises(BatchShapeError, match=re.escape(message)):
            trainer.fit(data, num_epochs=2, last_batch="error")
        with pytest.raises(BatchShapeError, match=re.escape(message)):
            trainer.fit(BATCHES, num_steps=3, last_batch="error")
        assert trainer.step == 0
    message = "3 batches here, 0 of them skipped to resume, 1 left out as smaller."
    with pytest.raises(DataExhaustedError, match=re.escape(message)):
        make_trainer().fit(BATCHES, num_steps=3, last_batch="drop")


def test_stream_drops_last_batch_of_each_epoch() -> None:
    def stream() -> Iterator[dict]:
        while True:
            yield from BATCHES

    found = make_trainer().fit(stream(), num_steps=6, last_batch="drop")["loss"]
    assert list(found) == fit(make_trainer(), BATCHES, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_steps": 3, "num_epochs": 2},
            "fit got num_steps=3 and num_epochs=2. It takes one of them: num_steps, "
            "the number of updates, or num_epochs, the number of passes over data with "
            "a length.",
        ),
        ({}, "fit got neither num_steps nor num_epochs. It takes one of them: num_s"),
        (
            {"num_epochs": 1.5},
            "num_epochs=1.5. It must be an integer of at least 1: all passes over the "
            "data, including earlier ones.",
        ),
        (
            {"num_steps": 1, "last_batch": "keep"},
            "last_batch='keep'. Valid values are 'drop', which leaves a smaller batch "
            "out, Pad('weights'), which fills it up with rows of weight 0, and 'error'",
        ),
    ],
)
def test_invalid_lengths_and_last_batch_raise(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer().fit(BATCHES, **arguments)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            iter(BATCHES),
            "num_epochs=2 counts passes over the data, but one pass uses up an "
            "iterator (list_iterator). Pass the object that it was made from, such as "
            "a list or a DataLoader, or num_steps=.",
        ),
        (
            SimpleNamespace(__iter__=None),
            "Data of type SimpleNamespace cannot be iterated over.",
        ),
        (
            grain_dataset().repeat(),
            "num_epochs=2 counts passes over the data, but RepeatMapDataset has no "
            "length. Pass data whose len() is the number of its batches, or num_steps= "
            "in place of num_epochs=.",
        ),
        (grain_dataset().to_iter_dataset(), "IterDataset has no length. Pass data"),
        ([], "num_epochs=2 counts passes over the data, but list is empty."),
    ],
    ids=["iterator", "none", "endless", "unsized", "empty"],
)
def test_num_epochs_for_endless_data_raises(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        make_trainer().fit(data, num_epochs=2)


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.linear = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.norm(x))


def scalar(model: Any, batch: dict) -> jax.Array:
    return loss(model, batch).value


def unweighted(model: Any, batch: dict) -> Mean:
    return cross_entropy(model(batch["x"]), batch["y"])


def with_metric(model: Any, batch: dict) -> Any:
    return loss(model, batch), {"largest": model(batch["x"]).max()}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"loss": scalar}, "the loss"),
        ({"loss": unweighted}, "the loss"),
        ({"loss": with_metric}, "the metric 'largest'"),
        ({"model": Normed}, "`norm.mean`, `norm.var`"),
    ],
    ids=["scalar", "unweighted", "metric", "statistics"],
)
def test_padding_that_changes_metrics_raises(options: dict, found: str) -> None:
    message = (
        f"last_batch=Pad('weights') adds rows of weight 0, which would change {found}. "
        "A loss or metric of the rows must be a Mean whose total and weight follow from"
        " batch['weights'], such as cross_entropy(logits, labels, batch['weights']); "
        "batch statistics count every row. Return a Mean, or leave the batch out: "
        "last_batch='drop'."
    )
    trainer = make_trainer(**options)
    with pytest.raises(LossError, match=re.escape(message)):
        trainer.fit(BATCHES, num_epochs=1, last_batch=Pad("weights"))
    assert trainer.step == 0


def test_pad_keeps_dtype_of_weights() -> None:
    mask = np.ones((2, 3), bool)
    filled = Pad("mask").fill({"x": np.arange(2), "mask": mask}, 4)
    np.testing.assert_array_equal(filled["x"], [0, 1, 1, 1])
    np.testing.assert_array_equal(filled["mask"], [[True] * 3] * 2 + [[False] * 3] * 2)
    assert filled["mask"].dtype == bool
    with pytest.raises(
        DataError, match="the entry 'mask' to a batch: batches must be dicts"
    ):
        Pad("mask").fill((mask,), 4)
    with pytest.raises(DataError, match="dim 0 must be the rows"):
        Pad("mask").fill({"x": mask, "mask": np.float32(1)}, 4)


def test_all_processes_drop_last_batch_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process may reach its smaller last batch before the others."""
    mine = {"x": np.zeros((4, 2), np.float32)}
    signature = batches.batch_signature(mine)
    theirs = {
        "whole": [signature, None, None, {}, False, False],
        "dropped": [None, None, None, None, True, False],
    }
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def check(batch: Any, other: str) -> Agreed:
        monkeypatch.setattr(
            batches, "allgather_object", lambda _, mine: [mine, theirs[other]]
        )
        return BatchAgreement().check(batch, index=3, num_read=3)

    assert check(mine, "whole") == Agreed(4)
    assert check(mine, "dropped") == Agreed(None)
    assert check(DROPPED, "whole") == Agreed(None)
    assert check(DROPPED, "dropped") == Agreed(None)
