"""Steps that are skipped: non-finite, spiked, without labels; and their checkpoints."""

import dataclasses
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Backend,
    Checkpoint,
    Composite,
    DataParallel,
    EarlyStopping,
    Faults,
    Mean,
    Offload,
    Pipeline,
    Precision,
    SkipSteps,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import NonFiniteLossError, ParallelWarning
from nnx_parallel.layers import Stack, cross_entropy
from nnx_parallel.loggers import JSONLinesLogger
from nnx_parallel.metrics import result_of
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.optimizers import muon, muon_dimension_numbers
from nnx_parallel.sharding import PathNames
from nnx_parallel.sharding.nnx_arrays import flatten_pure
from tests.parity.runs import to_host

pytestmark = pytest.mark.long

WIDTH, ROWS = 16, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


class Net(nnx.Module):
    """Statistics, which a skipped step must not change, before a stack."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.blocks = Stack(Block, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(self.norm(x))


def weighted(model: Any, batch: Any) -> tuple[Mean, dict]:
    errors = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    mean = Mean((errors * batch["w"]).sum(), batch["w"].sum())
    return mean, {"error": mean}


def plain(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make_batch(seed: int, *, y: float = 1.0, weight: float = 1.0) -> dict:
    x = np.random.default_rng(seed).normal(size=(ROWS, WIDTH))
    rows = {"y": np.full((ROWS, 1), y), "w": np.full(ROWS, weight), "x": x}
    return {name: array.astype(np.float32) for name, array in rows.items()}


def scheduled(step: Any) -> Any:
    return 0.01 / (1.0 + step)  # depends on the step count


def muon_of(model: Any) -> Any:
    return muon(0.02, muon_weight_dimension_numbers=muon_dimension_numbers(model))


make_trainer = partial(
    Trainer,
    model=Net,
    optimizer=optax.adam(scheduled),
    loss=plain,
    strategy=FSDP(min_size=0),
    loggers=(),
)


def arrays(trainer: Trainer) -> dict[str, np.ndarray]:
    state = dataclasses.replace(trainer.state, step=jnp.int32(0), key=None)
    return to_host(flatten_pure(vars(state)))


BAD = {
    "NaN": ({"y": math.nan}, {"faults": Faults(on_non_finite="skip")}),
    "infinite": ({"y": math.inf}, {"faults": Faults(on_non_finite=SkipSteps(limit=1))}),
    "spike": (
        {"y": 1e3},
        {"faults": Faults(on_non_finite=SkipSteps(max_grad_norm=100.0))},
    ),
    "no label": ({"weight": 0.0}, {"loss": weighted}),
}

WAYS = {
    "FSDP": {},
    "one device": {
        "strategy": DataParallel(1),
        "devices": jax.devices()[:1],
    },
    "microbatches": {"num_microbatches": 2},
    "bfloat16": {"precision": Precision.mixed_bfloat16()},
    "float16": {"precision": Precision.mixed_float16()},
    "TP x FSDP": {
        "strategy": Composite(TensorParallel(2), FSDP()),
        "names": PathNames((r"linear\.kernel", ("embed", "mlp"))),
    },
    "pipeline": {
        "strategy": Composite(Pipeline(2), FSDP()),
        "num_microbatches": 2,
    },
    "offload": {"backend": Backend(offload=Offload())},
    "muon": {"optimizer": muon_of},
    "average": {"ema_decay": 0.9},
}


@pytest.mark.parametrize(
    ("way", "bad"),
    [
        *((way, bad) for way in WAYS for bad in ("NaN", "no label")),
        *(("FSDP", "infinite"), ("FSDP", "spike"), ("pipeline", "spike")),
    ],
)
def test_skipped_step_changes_nothing(way: str, bad: str) -> None:
    batch, options = BAD[bad]
    first, last = make_batch(0), make_batch(1)
    trainer = make_trainer(**(WAYS[way] | options))
    history = trainer.fit([first, make_batch(2, **batch), last], 3)
    expected = make_trainer(**(WAYS[way] | options))
    expected.fit([first, last], 2)
    assert list(history["skipped"]) == [0, 1, 0]
    assert trainer.step == 3
    found, wanted = arrays(trainer), arrays(expected)
    assert found.keys() == wanted.keys()
    scale = {"loss_scale.scale", "loss_scale.good_steps"}  # these follow the gradients
    for path in wanted.keys() - scale:
        np.testing.assert_array_equal(found[path], wanted[path], err_msg=path)


def classes(model: Any, batch: Any) -> Mean:
    labels = jnp.zeros(len(batch["x"]), jnp.int32)
    return cross_entropy(model(batch["x"]), labels)


def next_token(model: Any, batch: Any) -> Mean:
    return next_token_loss(model, (batch["x"] > 0).astype(jnp.int32))


def make_mixture(rngs: nnx.Rngs) -> GPT:
    return GPT(GPTConfig.tiny_experts(num_layers=1), rngs=rngs)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"loss": classes}, {"loss": next_token, "model": make_mixture}],
)
def test_default_step_has_no_condition(options: dict, num_microbatches: int) -> None:
    trainer = make_trainer(**options, num_microbatches=num_microbatches)
    assert "skipped" not in trainer.fit([make_batch(0)], 1)


def test_partly_empty_microbatches_give_one_mean() -> None:
    batch = make_batch(0)
    batch["w"][::2] = 0.0  # rows of the first of two microbatches
    history = [
        make_trainer(
            loss=weighted, num_microbatches=count, optimizer=optax.sgd(0.1), model=Still
        ).fit([batch], 1)
        for count in (1, 2)
    ]
    for name in ("loss", "grad_norm", "error"):
        np.testing.assert_allclose(history[1][name], history[0][name], rtol=1e-6)
    assert list(history[1]["skipped"]) == [0]


class Still(nnx.Module):
    """A model whose rows are independent."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def lines(path: Path) -> str:
    return "\n".join(re.findall(r'"message": "(.*)"', path.read_text()))


def test_batch_without_labels_is_never_the_best(tmp_path: Path) -> None:
    stopping = EarlyStopping("loss", patience=2)
    options = Checkpoint(tmp_path, every=1, keep_last=None, keep_best="loss")
    loggers = [JSONLinesLogger(tmp_path / "log.jsonl")]
    trainer = make_trainer(
        loss=weighted, checkpoint=options, callbacks=[stopping], loggers=loggers
    )
    batches = [make_batch(i, weight=float(i in (0, 3))) for i in range(4)]
    history = trainer.fit(batches, 4)
    assert [*np.isnan(history["loss"])] == [False, True, True, False]
    assert [*np.isnan(history["error"])] == [False, True, True, False]
    best = [1, 4][int(history["loss"][3] <= history["loss"][0])]
    assert stopping.best_step == best
    trainer.restore("best")
    assert trainer.step == best
    said = lines(tmp_path / "log.jsonl")
    assert "Step 2 changed nothing: the weight of its loss is 0" in said
    assert "2 steps changed nothing (skipped): 2, 3." in said


def test_evaluation_without_labels_is_nan() -> None:
    trainer = make_trainer(loss=weighted)
    with pytest.warns(ParallelWarning, match="weights of its Mean are 0 in every"):
        found = trainer.evaluate([make_batch(0, weight=0.0)])
    assert math.isnan(found["loss"])
    assert math.isnan(found["error"])
    batches = [make_batch(0), make_batch(1, weight=0.0)]
    assert trainer.evaluate(batches) == trainer.evaluate(batches[:1])


@pytest.mark.parametrize(
    ("terms", "expected"),
    [((6.0, 3.0, 0.0, 0.0), 2.0), ((1.0, 0.0, 1.0, 0.0), math.nan)],
)
def test_result_of_ignores_empty_terms(terms: tuple, expected: float) -> None:
    a, b, c, d = map(jnp.float32, terms)
    np.testing.assert_array_equal(result_of(Mean(a, b) + Mean(c, d)), expected)


def test_too_many_consecutive_bad_steps_raise() -> None:
    trainer = make_trainer(faults=Faults(on_non_finite=SkipSteps(limit=2)))
    bad, good = make_batch(0, y=math.nan), make_batch(1)
    history = trainer.fit([good, bad, bad, good, bad, bad], 6)
    assert list(history["skipped"]) == [0, 1, 1, 0, 1, 1]
    message = (
        "Step 3: loss nan, gradient norm nan. No earlier step of this fit was "
        "finite. The last 3 steps were bad, and SkipSteps(limit=2) skips no more "
        "steps. The step's batch has 16 NaN in batch['y'], the first in row 0."
    )
    trainer = make_trainer(faults=Faults(on_non_finite=SkipSteps(limit=2)))
    with pytest.raises(NonFiniteLossError, match=re.escape(message)):
        trainer.fit([bad] * 6, 6)


GUARDS = {
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 2),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adam(0.01)),
    "MultiSteps": lambda: optax.MultiSteps(
        optax.adam(0.01), 1, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_optimizer_guard_keeps_run_going(guard: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    trainer = make_trainer(
        model=Still, optimizer=GUARDS[guard](), loggers=[JSONLinesLogger(log)]
    )
    batches = [make_batch(i, y=math.nan if i == 1 else 1.0) for i in range(4)]
    history = trainer.fit(batches, 4)
    assert list(history["skipped"] == 1) == [False, True, False, False]
    assert np.isfinite(history["loss"][2:]).all()
    assert "1 steps changed nothing (skipped): 2." in lines(log)


def test_exhausted_optimizer_guard_raises() -> None:
    trainer = make_trainer(model=Still, optimizer=GUARDS["apply_if_finite"]())
    with pytest.raises(NonFiniteLossError, match=r"`linear\.bias`, `linear\.kernel`"):
        trainer.fit([make_batch(0, y=math.nan)] * 6, 6)


def broken_at(step: int) -> Any:
    return optax.sgd(lambda count: jnp.where(count == step - 1, jnp.nan, 0.01))


@pytest.mark.parametrize("keep_last", [1, 3])
def test_nonfinite_update_is_not_saved(keep_last: int, tmp_path: Path) -> None:
    def make(bad_step: int) -> Trainer:
        options = Checkpoint(tmp_path, every=2, keep_last=keep_last)
        return make_trainer(optimizer=broken_at(bad_step), checkpoint=options)

    batches = [make_batch(i) for i in range(8)]
    message = r"Step 6: not finite after its update: .* is a checkpoint of step 4\."
    with pytest.raises(NonFiniteLossError, match=message):
        make(6).fit(batches, 8)
    again = make(0)
    assert list(again.fit(batches, 8)["step"]) == [5, 6, 7, 8]
    assert np.isfinite(again.state.params["blocks"]["layer"]["linear"]["kernel"]).all()


def test_manual_save_of_broken_state_raises(tmp_path: Path) -> None:
    trainer = make_trainer(optimizer=broken_at(1), checkpoint=tmp_path)
    batch = trainer.shard_batch(make_batch(0))
    trainer.state, _ = trainer.train_step(trainer.state, batch)
    with pytest.raises(NonFiniteLossError, match="Step 1: not finite after its update"):
        trainer.save()
    assert not [path for path in tmp_path.iterdir() if path.name.isdigit()]


class Masked(Still):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.mask = nnx.Variable(jnp.array([0.0, -jnp.inf]))
        self.unset = nnx.Variable(jnp.full(2, jnp.nan))


def test_intended_infinities_are_saved(tmp_path: Path) -> None:
    plateau = optax.contrib.reduce_on_plateau()  # its best value begins at infinity
    optimizer = optax.chain(optax.adam(0.01), plateau)
    trainer = make_trainer(model=Masked, optimizer=optimizer, checkpoint=tmp_path)
    trainer.save()
    trainer.fit([make_batch(0)], 1)
    again = make_trainer(model=Masked, optimizer=optimizer, checkpoint=tmp_path)
    again.restore(1)
    assert again.step == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_trainer(faults=Faults(on_non_finite="ignore")),  # pyright: ignore[reportArgumentType]
            "on_non_finite='ignore'. It",
        ),
        (lambda: SkipSteps(limit=0), "SkipSteps.limit=0. It must be an integer of at"),
        (lambda: SkipSteps(max_grad_norm=-1.0), "SkipSteps.max_grad_norm=-1.0. It"),
    ],
)
def test_invalid_skip_raises(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
