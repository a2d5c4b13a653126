"""Evaluation with another loss, metrics that are not means, and sampled predictions."""

import dataclasses
import re
import warnings
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
    Callback,
    Checkpoint,
    Composite,
    DataParallel,
    Evaluation,
    Mean,
    Pipeline,
    Sum,
    TensorParallel,
    Trainer,
    TrainState,
)
from nnx_parallel.errors import (
    BatchShapeError,
    LossError,
    ParallelWarning,
    StateStructureError,
)
from nnx_parallel.layers import Stack
from nnx_parallel.sharding import PathNames

pytestmark = pytest.mark.long

CLASSES = 3


class Block(nnx.Module):
    """A block whose mode is an argument of the call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        hidden = self.norm(self.linear(x), use_running_average=not training)
        return x + self.dropout(nnx.relu(hidden), deterministic=not training)


class Classifier(nnx.Module):
    """Blocks and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.blocks = Stack(Block, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        x = self.blocks(self.first(x), training)
        return self.head(self.dropout(x, deterministic=not training))


def row_losses(model: Any, batch: Any, *, training: bool = False) -> jax.Array:
    logits = model(batch["x"], training=training)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def loss(model: Any, batch: Any) -> jax.Array:
    return row_losses(model, batch, training=True).mean()


def eval_loss(model: Any, batch: Any) -> jax.Array:
    return row_losses(model, batch).mean()


def f1(counts: Any) -> Any:
    return 2 * counts[0] / (2 * counts[0] + counts[1])


def confusion(model: Any, batch: Any) -> tuple[jax.Array, dict]:
    # Called once, because a pipeline is cut at the Stack.
    logits = model(batch["x"], training=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    found = logits.argmax(axis=-1)
    matrix = jnp.zeros((CLASSES, CLASSES), int).at[batch["label"], found].add(1)
    hits = jnp.sum((found == 0) & (batch["label"] == 0))
    errors = jnp.sum((found == 0) != (batch["label"] == 0))
    # Each trace makes a new function, as a lambda in a loss does.
    score = Sum(jnp.stack([hits, errors]), then=lambda counts: f1(counts))
    return losses.mean(), {"matrix": Sum(matrix), "f1": score}


def make_batch(seed: int, rows: int) -> dict:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "label": np.argmax(x[:, :CLASSES], axis=1)}


TRAINING = [make_batch(0, 8), make_batch(1, 8)]
# The devices do not divide the rows of the second batch.
HELD_OUT = [make_batch(2, 8), make_batch(3, 3)]
ROWS = {key: np.concatenate([b[key] for b in HELD_OUT]) for key in HELD_OUT[0]}


make_trainer = partial(
    Trainer,
    model=Classifier,
    optimizer=optax.sgd(0.1),
    loss=loss,
    strategy=FSDP(min_size=0),
    devices=jax.devices()[:4],
    loggers=(),
)


DEEP = pytest.mark.deep
STRATEGIES = {
    "data": DataParallel(),
    "tensor": Composite(TensorParallel(2), FSDP(min_size=0)),
    "pipeline": Composite(Pipeline(2), FSDP(min_size=0)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param("data", marks=DEEP), pytest.param("tensor", marks=DEEP), "pipeline"],
)
def test_eval_loss_runs_under_every_strategy(name: str) -> None:
    trainer = make_trainer(
        strategy=STRATEGIES[name],
        names=PathNames((r"^first\.kernel$", (None, "mlp"))),
        evaluation=Evaluation(loss=confusion),
        num_microbatches=2,
    )
    history = trainer.fit(TRAINING, 2, eval_data=HELD_OUT)
    found = trainer.evaluate(HELD_OUT)
    # Plain NNX with the same arrays, on all rows at once.
    model = trainer.model
    logits = np.asarray(model(ROWS["x"], training=False))
    expected = float(eval_loss(model, ROWS))
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(history["eval_loss"], [expected], rtol=1e-5)
    guessed = logits.argmax(axis=-1)
    matrix = np.zeros((CLASSES, CLASSES))
    np.add.at(matrix, (ROWS["label"], guessed), 1)
    np.testing.assert_array_equal(found["matrix"], matrix)
    hits = matrix[0, 0]
    wrong = matrix[0].sum() + matrix[:, 0].sum() - 2 * hits
    np.testing.assert_allclose(found["f1"], f1([hits, wrong]), rtol=1e-6)
    assert isinstance(found["f1"], float)


@dataclasses.dataclass
class Scaled:
    """A loss that has no hash."""

    factor: float

    def __call__(self, model: Any, batch: Any) -> jax.Array:
        return self.factor * eval_loss(model, batch)


def test_evaluate_takes_another_loss() -> None:
    trainer = make_trainer(evaluation=Evaluation(loss=eval_loss))
    usual = trainer.evaluate(HELD_OUT)["loss"]

    def doubled(model: Any, batch: Any) -> Mean:
        losses = row_losses(model, batch)
        return 2.0 * Mean(losses.sum(), losses.size)

    np.testing.assert_allclose(
        trainer.evaluate(HELD_OUT, loss=doubled)["loss"], 2 * usual, rtol=1e-6
    )
    scaled = trainer.evaluate(HELD_OUT, loss=Scaled(3.0))["loss"]
    np.testing.assert_allclose(scaled, 3 * usual, rtol=1e-6)
    assert trainer.evaluate(HELD_OUT)["loss"] == usual


@pytest.mark.parametrize("name", ["data", pytest.param("pipeline", marks=DEEP)])
def test_evaluation_in_training_mode_warns_once(name: str) -> None:
    trainer = make_trainer(strategy=STRATEGIES[name])
    message = (
        "The evaluation changes 4 variables as training does: "
        "`blocks.layer.dropout.rngs.count`, `blocks.layer.norm.mean`, "
        "`blocks.layer.norm.var`, `dropout.rngs.count`. Dropout or batch statistics "
        "act in it"
    )
    with pytest.warns(ParallelWarning, match=re.escape(message)) as caught:
        trainer.evaluate(HELD_OUT)
    assert [warning.filename for warning in caught] == [__file__]
    trainer.evaluate([make_batch(4, 5)])  # a second warning would raise here
    trainer.evaluate(HELD_OUT, loss=eval_loss)
    with pytest.warns(ParallelWarning, match="or a function to predict"):
        trainer.predict(HELD_OUT, lambda model, batch: model(batch["x"], training=True))


class Sampler(nnx.Module):
    """Always draws random numbers, like a variational autoencoder."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, CLASSES, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.noise = rngs.fork()

    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        del training  # dropout follows model.eval() instead
        logits = self.dropout(self.linear(x))
        return logits + jax.random.normal(self.noise(), logits.shape)


def test_sampling_by_design_does_not_warn() -> None:
    trainer = make_trainer(model=Sampler)
    assert trainer.evaluate(HELD_OUT) == trainer.evaluate(HELD_OUT)


def test_eval_loss_that_closes_over_model_raises() -> None:
    model = Classifier(nnx.Rngs(0))

    def stale(_: Any, batch: Any) -> jax.Array:
        return eval_loss(model, batch)

    for make in (
        lambda: make_trainer(model=model, evaluation=Evaluation(loss=stale)),
        lambda: make_trainer(model=model).evaluate(HELD_OUT, loss=stale),
    ):
        with pytest.raises(LossError, match="The loss uses the model as 'model' from"):
            make()


class Keeping(Callback):
    """Collects the metrics of an evaluation."""

    def on_eval_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.metrics = metrics


def test_array_metric_reaches_only_callbacks() -> None:
    keeping = Keeping()
    trainer = make_trainer(evaluation=Evaluation(loss=confusion), callbacks=[keeping])
    history = trainer.fit(TRAINING, 1, eval_data=HELD_OUT)
    assert keeping.metrics["matrix"].sum() == len(ROWS["label"])
    assert {name for name in history if name.startswith("eval_")} == {
        *("eval_step", "eval_loss", "eval_f1")
    }


def test_array_metric_in_training_raises() -> None:
    def counted(model: Any, batch: Any) -> tuple[jax.Array, dict]:
        losses = row_losses(model, batch, training=True)
        perplexity = Sum(
            jnp.stack([losses.sum(), jnp.float32(losses.size)]),
            then=lambda sums: jnp.exp(sums[0] / sums[1]),
        )
        return losses.mean(), {"perplexity": perplexity}

    history = make_trainer(loss=counted, num_microbatches=2).fit(TRAINING, 2)
    np.testing.assert_allclose(history["perplexity"], np.exp(history["loss"]), 1e-5)
    message = "In training, metric 'matrix' has shape (3, 3)"
    with (
        pytest.warns(UserWarning, match="leaves 2 batch statistics as they are"),
        pytest.raises(LossError, match=re.escape(message)),
    ):
        make_trainer(loss=confusion).fit(TRAINING, 1)


def test_predict_gives_row_losses_and_area() -> None:
    """Computes losses of single rows, and an area under the curve from outputs."""
    trainer = make_trainer(evaluation=Evaluation(loss=eval_loss))

    def outputs(model: Any, batch: Any) -> dict:
        scores = model(batch["x"], training=False)[:, 0]
        losses = row_losses(model, batch)
        return {"loss": losses, "score": scores, "is_0": batch["label"] == 0}

    found = trainer.predict(HELD_OUT, outputs)
    np.testing.assert_allclose(
        found["loss"].mean(), trainer.evaluate(HELD_OUT)["loss"], rtol=1e-6
    )
    ours, others = found["score"][found["is_0"]], found["score"][~found["is_0"]]
    area = (ours[:, None] > others).mean()
    assert len(ours) + len(others) == len(ROWS["label"])
    model = trainer.model
    logits = np.asarray(model(ROWS["x"], training=False))[:, 0]
    is_0 = ROWS["label"] == 0
    assert area == (logits[is_0][:, None] > logits[~is_0]).mean()


def sample(model: Any, batch: Any, rngs: nnx.Rngs) -> jax.Array:
    logits = model(batch["x"], training=False)
    return jax.random.categorical(rngs.sample(), logits)


def test_predictions_draw_random_numbers_from_seed() -> None:
    trainer = make_trainer()
    twice = [make_batch(5, 64)] * 2
    found = trainer.predict(twice, sample)
    np.testing.assert_array_equal(found, trainer.predict(twice, sample))
    assert (found != trainer.predict(twice, sample, seed=1)).any()
    assert (found[:64] != found[64:]).any()  # batches draw different numbers
    assert set(found) == {0, 1, 2}
    keys = jax.random.split(jax.random.key(1), 8)  # keys may also be data, one per row
    normal = jax.vmap(jax.random.normal)
    drawn = trainer.predict([keys], lambda model, keys: normal(keys))
    np.testing.assert_allclose(drawn, normal(keys), rtol=1e-6)
    with pytest.raises(ValueError, match=r"seed=0\.5\. It must be an integer"):
        trainer.predict(twice, sample, seed=0.5)  # pyright: ignore[reportArgumentType]


def test_prediction_without_rows_raises() -> None:
    trainer = make_trainer()

    def summed(model: Any, batch: Any) -> dict:
        logits = model(batch["x"], training=False)
        return {"logits": logits, "sum": logits.sum()}

    with pytest.raises(LossError, match="The output `sum` of predict's function has"):
        trainer.predict(TRAINING, summed)
    with pytest.raises(LossError, match="missing a required argument: 'key'"):
        trainer.predict(TRAINING, lambda model, batch, key: batch)
    with pytest.raises(LossError, match=r"has shape \(\d+,\), for \d+ rows"):
        trainer.predict(TRAINING, lambda model, batch: batch["x"].mean(0))


def test_predictions_of_different_lengths_raise() -> None:
    batches = [{"x": np.zeros((8, length, 3), np.float32)} for length in (2, 4)]
    message = (
        "The output of predict's function has shape (8, 2, 3) for batch 0, and "
        "(8, 4, 3) for batch 1. Outputs of all batches are joined along dim 0"
    )
    with pytest.raises(BatchShapeError, match=re.escape(message)):
        make_trainer().predict(batches, lambda model, batch: batch["x"])
    with pytest.raises(BatchShapeError, match="give the same structure for each"):
        make_trainer().predict(
            batches, lambda model, b: {f"of {b['x'].shape[1]}": b["x"]}
        )


def test_flax_metrics_match_plain_values() -> None:
    """Computes Flax metrics in a loss, and on the host from outputs."""

    def measured(model: Any, batch: Any) -> tuple[jax.Array, dict]:
        logits = model(batch["x"], training=False)
        losses = row_losses(model, batch)
        metrics = nnx.MultiMetric(
            accuracy=nnx.metrics.Accuracy(), mean_loss=nnx.metrics.Average()
        )
        metrics.update(logits=logits, labels=batch["label"], values=losses)
        return losses.mean(), metrics.compute()

    trainer = make_trainer(loss=measured, num_microbatches=2)
    with pytest.warns(UserWarning, match="leaves 2 batch statistics as they are"):
        history = trainer.fit(TRAINING, 2)
    np.testing.assert_allclose(history["mean_loss"], history["loss"], rtol=1e-5)
    found = trainer.evaluate(HELD_OUT)
    accuracy = nnx.metrics.Accuracy()
    for batch in HELD_OUT:
        logits = trainer.predict(
            [batch], lambda model, batch: model(batch["x"], training=False)
        )
        accuracy.update(logits=logits, labels=batch["label"].astype(np.int32))
    np.testing.assert_allclose(found["accuracy"], accuracy.compute(), rtol=1e-6)


def test_policy_is_rolled_out_and_trained() -> None:
    """Trains REINFORCE on a bandit in which action 1 pays in every state."""

    def policy_loss(model: Any, batch: Any) -> jax.Array:
        logits = jax.nn.log_softmax(model(batch["x"]))
        chosen = jnp.take_along_axis(logits, batch["action"][:, None], axis=1)[:, 0]
        return -(chosen * batch["advantage"]).mean()

    def act(model: Any, x: Any, rngs: nnx.Rngs) -> jax.Array:
        return jax.random.categorical(rngs.action(), model(x))

    trainer = make_trainer(
        loss=policy_loss,
        model=lambda rngs: nnx.Linear(4, CLASSES, rngs=rngs),
        optimizer=optax.adam(0.1),
    )
    x = make_batch(6, 64)["x"]
    rewards = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for episode in range(12):
            action = trainer.predict([x], act, seed=episode)
            reward = (action == 1).astype(np.float32)
            rewards.append(reward.mean())
            batch = {"x": x, "action": action, "advantage": reward - reward.mean()}
            placed = trainer.shard_batch(batch)
            trainer.state, _ = trainer.train_step(trainer.state, placed)
    assert trainer.step == 12
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2


def linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(8, 8, rngs=rngs)


def reversed_rows(model: Any, batch: np.ndarray) -> jax.Array:
    return ((model(batch) - batch[:, ::-1]) ** 2).mean()


def halves(params: Any) -> Any:
    return jax.tree.map(lambda x: "free" if x.ndim > 1 else "adam", params)


free = optax.contrib.schedule_free_sgd
SCHEDULE_FREE: dict[str, tuple[Any, Any]] = {
    "plain": (free(0.3), lambda s: s),
    "clipped": (optax.chain(optax.clip(1.0), free(0.3)), lambda s: s[1]),
    "every second": (optax.MultiSteps(free(0.3), 2), lambda s: s.inner_opt_state),
    "injected": (
        optax.inject_hyperparams(free)(learning_rate=0.3),
        lambda s: s.inner_state,
    ),
    "of matrices": (
        optax.multi_transform({"free": free(0.3), "adam": optax.adam(0.1)}, halves),
        lambda s: s.inner_states["free"].inner_state,
    ),
}


def numpy_loss(params: Any, batches: list[np.ndarray]) -> float:
    kernel, bias = (np.asarray(params[name]) for name in ("kernel", "bias"))
    found = (b @ kernel + bias - b[:, ::-1] for b in batches)
    return float(np.mean([np.square(x).mean() for x in found]))


def rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)


NUMBERS = [rows(seed) for seed in range(5)]


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_evaluates_its_eval_parameters(name: str) -> None:
    optimizer, find = SCHEDULE_FREE[name]
    trainer = Trainer(
        linear, optimizer, reversed_rows, strategy=FSDP(min_size=0), loggers=()
    )
    history = trainer.fit(NUMBERS, 5, eval_data=NUMBERS[:2])
    found, params = find(trainer.state.opt_state), dict(trainer.state.params)
    trained = numpy_loss(params, NUMBERS[:2])
    for path, z in found.z.items():
        if isinstance(z, jax.Array):
            params[path] = (params[path] - (1 - found.b1) * z) / found.b1
    expected = numpy_loss(params, NUMBERS[:2])
    assert abs(expected / trained - 1) > 1e-3
    judged = history["eval_loss"], [trainer.evaluate(NUMBERS[:2])["loss"]]
    np.testing.assert_allclose(judged, [[expected]] * 2, rtol=1e-5)
    model: Any = trainer.eval_model
    for path, x in params.items():
        np.testing.assert_allclose(getattr(model, path)[...], x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        trainer.predict(NUMBERS[:1]), model(NUMBERS[0]), atol=1e-5
    )
    assert trainer.evaluate(NUMBERS[:2], ema=False)["loss"] == pytest.approx(trained)
    model.bias.set_value(jnp.zeros(8))
    message = "Assigned to trainer.eval_model: ['bias']. These parameters are computed"
    with pytest.raises(StateStructureError, match=re.escape(message)):
        trainer.evaluate(NUMBERS[:2])


def test_sam_evaluates_without_ascent() -> None:
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    trainer = Trainer(linear, sam, reversed_rows, strategy=FSDP(), loggers=())
    before = numpy_loss(trainer.state.params, NUMBERS[:1])
    trainer.fit(NUMBERS, 1)  # leaves the adversarial parameters in the state
    assert numpy_loss(trainer.state.params, NUMBERS[:1]) > 1.01 * before
    assert trainer.evaluate(NUMBERS[:1])["loss"] == pytest.approx(before, rel=1e-5)
    trainer.fit(NUMBERS[1:], 2)
    after = numpy_loss(trainer.state.params, NUMBERS[:1])
    assert trainer.evaluate(NUMBERS[:1])["loss"] == pytest.approx(after, rel=1e-5)


class Seen(Callback):
    needs_evaluation = True

    def on_eval_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.losses = [*getattr(self, "losses", ()), metrics["loss"]]


def halved(state: TrainState) -> Any:
    return jax.tree.map(lambda x: x / 2, state.params)


@pytest.mark.parametrize("eval_params", [None, "params", "ema", halved])
def test_eval_params_selects_evaluated_parameters(
    eval_params: Any, tmp_path: Path
) -> None:
    seen = Seen()
    trainer = Trainer(
        linear,
        optax.sgd(0.3),
        reversed_rows,
        strategy=FSDP(min_size=0),
        loggers=(),
        callbacks=[seen],
        ema_decay=0.5,
        evaluation=Evaluation(params=eval_params),
        checkpoint=Checkpoint(tmp_path, every=1, keep_best="eval_loss"),
    )
    trainer.fit(NUMBERS, 3, eval_data=NUMBERS[:2])
    state = trainer.state
    params = {"params": state.params, halved: halved(state)}.get(eval_params, state.ema)
    expected = numpy_loss(params, NUMBERS[:2])
    assert seen.losses[-1] == pytest.approx(expected, rel=1e-5)
    model: Any = trainer.eval_model
    np.testing.assert_allclose(model.kernel[...], params["kernel"], rtol=1e-6)
    assert (trainer.eval_model is trainer.model) == (eval_params == "params")
    best = 1 + int(np.argmin(seen.losses))
    trainer.restore("best")
    assert trainer.step == best


@pytest.mark.parametrize(
    ("eval_params", "message"),
    [
        (
            "average",
            "Evaluation.params='average'. It must be 'params', 'ema', or a function",
        ),
        ("ema", "This Trainer keeps no average. Pass ema_decay=0.999."),
        (
            lambda state: {"kernel": state.params["kernel"][0]},
            "Evaluation.params: `bias` has shape None instead of (8,); `kernel` has "
            "shape (8,) instead of (8, 8). The function must return a tree like",
        ),
    ],
)
def test_invalid_eval_params_raise(eval_params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Trainer(
            linear,
            optax.sgd(0.1),
            reversed_rows,
            evaluation=Evaluation(params=eval_params),
        )


def test_function_made_for_each_call_is_reported_once() -> None:
    trainer = Trainer(
        lambda rngs: nnx.Linear(4, 2, rngs=rngs), optax.sgd(0.1), mean_loss, loggers=()
    )
    x = np.ones((8, 4), np.float32)
    scales = [1.0, 2.0, 3.0, 4.0]
    with pytest.warns(ParallelWarning) as caught:
        found = [trainer.predict([x], lambda m, x, s=s: m(x) * s) for s in scales]
    (warning,) = caught
    message = (
        r"predict has compiled '<lambda>' \(test_evaluation\.py:\d+\) for the third"
    )
    assert re.match(message, str(warning.message))
    for scale, outputs in zip(scales, found, strict=True):
        np.testing.assert_allclose(outputs, found[0] * scale, rtol=1e-6)
    for _ in range(4):  # the same function
        trainer.evaluate([x], loss=mean_loss)


def mean_loss(model: Any, batch: Any) -> jax.Array:
    return model(batch).mean()
