"""Mistakes that leave a run finite get a warning; legal code gets none."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import Callback, EarlyStopping, Mean, Trainer, initialize
from nnx_parallel.errors import (
    LossError,
    OptimizerError,
    ParallelWarning,
    ProcessError,
    StateStructureError,
)
from nnx_parallel.layers import Embed, lora
from nnx_parallel.models import GPT, GPTConfig, generate, pad_prompts

pytestmark = pytest.mark.long

X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
Y = np.arange(16, dtype=np.int32) % 4
T = np.linspace(0, 1, 16, dtype=np.float32)
BATCH = {"x": X, "y": Y, "t": T}
SGD = optax.sgd(0.1)


@pytest.fixture(autouse=True)
def allow_promotion() -> Iterator[None]:
    """Lets shapes broadcast as they do for users."""
    with jax.numpy_rank_promotion("allow"):
        yield


def linear(width: int) -> Any:
    return lambda rngs: nnx.Linear(8, width, rngs=rngs)


def make(loss: Any = None, width: int = 4, **options: Any) -> Trainer:
    settings = {"model": linear(width), "optimizer": SGD, "loss": loss or squares}
    call: Any = Trainer
    return call(**(settings | {"loggers": ()} | options))


def squares(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) ** 2).mean()


def cross_entropy(logits: Any, labels: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits, labels).mean()


def against_column(model: Any, batch: Any) -> Any:
    return ((model(batch["x"])[:, 0] - batch["t"][:, None]) ** 2).mean()


NO_GRADIENT = "The loss has no gradient with respect to any trained parameter"
PAIRS = "Broadcasting gives (16, 16): each row is combined with every other row"
OUTSIDE = jnp.asarray(X)

SILENT: dict[str, tuple[Any, int, dict, str]] = {
    "labels (N,)": (
        lambda m, b: ((m(b["x"]) - b["t"]) ** 2).mean(),
        1,
        BATCH,
        "values of shape (16,) from batch['t'] with values of shape (16, 1) that the "
        f"model computes. {PAIRS}",
    ),
    "labels (N, 1)": (
        lambda m, b: jnp.abs(m(b["x"])[:, 0] - b["t"]).mean(),
        1,
        BATCH | {"t": T[:, None]},
        "instance with batch['t'][:, 0].",
    ),
    "logits (N, 1)": (
        lambda m, b: optax.sigmoid_binary_cross_entropy(m(b["x"]), b["t"]).mean(),
        1,
        BATCH,
        PAIRS,
    ),
    "constant": (lambda m, b: 0.5, 4, BATCH, NO_GRADIENT),
    "accuracy": (
        lambda m, b: (m(b["x"]).argmax(-1) == b["y"]).mean(dtype=jnp.float32),
        4,
        BATCH,
        NO_GRADIENT,
    ),
    "softmax": (
        lambda m, b: cross_entropy(jax.nn.softmax(m(b["x"])), b["y"]),
        4,
        BATCH,
        "The loss applies a softmax to the results of a softmax",
    ),
    "outside": (
        lambda m, b: (m(OUTSIDE) ** 2).mean(),
        4,
        BATCH,
        "The loss does not use the batch, but an array from outside, of shape (16, 8)",
    ),
    "mean": (
        lambda m, b: Mean(squares(m, b), 16.0),
        4,
        BATCH,
        "The total of the loss's Mean is a mean already",
    ),
    "bias": (
        lambda m, b: ((b["x"] @ m.kernel[...]) ** 2).mean(),
        4,
        BATCH,
        "no gradient with respect to 1 trained parameters: `bias`.",
    ),
    "tokens": (
        squares,
        4,
        BATCH | {"x": np.ones((16, 8), np.int32)},
        "batch['x'] is int32, and the layer with the weights `kernel` multiplies",
    ),
    "pixels": (
        lambda m, b: (m(b["x"].reshape(16, 8).astype(jnp.bfloat16)) ** 2).mean(),
        4,
        BATCH | {"x": np.ones((16, 2, 4), np.uint8)},
        "Pixels from 0 to 255 make most models diverge",
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_silent_mistake_warns(name: str) -> None:
    loss, width, batch, message = SILENT[name]
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        make(loss, width).fit([batch], 1)


def contrastive(model: Any, batch: Any) -> Any:
    z = model(batch["x"])
    scores = z @ z.T + batch["t"]  # (rows, rows)
    same = batch["y"][:, None] == batch["y"]
    centred = z[:, :1] - z[:, 0]
    ranks = z[:, 0][:, None] - batch["t"]
    return jnp.where(same, scores, 0).mean() + (centred + ranks).mean() * 0.01


def with_metrics(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    shares = jax.nn.softmax(logits)
    metrics = {"confidence": shares.max(-1).mean(), "low": (1 - shares).min()}
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return Mean(losses.sum(), 16.0) + Mean(squares(model, batch), 1.0), metrics


def rounded(model: Any, batch: Any) -> Any:
    z = model(batch["x"])
    return ((z + jax.lax.stop_gradient(jnp.round(z) - z)) ** 2).mean()


def integers(model: Any, batch: Any) -> Any:
    outputs = model(batch["pixels"] / 255)
    graph = batch["pixels"].T @ outputs
    chosen = jax.nn.one_hot(batch["y"], 8)
    return (graph**2).mean() + squares(model, {"x": chosen})


@pytest.mark.parametrize("loss", [contrastive, with_metrics, rounded, integers])
def test_legal_losses_do_not_warn(loss: Any) -> None:
    make(loss).fit([BATCH | {"pixels": np.ones((16, 8), np.uint8)}], 1)


def every(tree: Any) -> Any:
    """A mask that selects all parameters."""
    return jax.tree.map(lambda _: True, tree)


RATES: list[tuple[Any, str]] = [
    (optax.sgd(-0.1), "The learning rate is -0.1. With a negative learning rate"),
    (optax.adamw(0.0), "The learning rate is 0, so nothing is trained."),
    (optax.set_to_zero(), "The learning rate is 0, so nothing is trained."),
    (
        optax.chain(optax.clip(1.0), optax.scale_by_adam()),
        "The optimizer has no learning rate (it is clip, scale_by_adam).",
    ),
    (optax.adamw(1e-3, weight_decay=1e5), "The weight decay 100000 times the learning"),
    (
        optax.adamw(1e-3, weight_decay=1e5, mask=every),
        "The weight decay 100000 times the learning",
    ),
]


@pytest.mark.parametrize(("optimizer", "message"), RATES)
def test_optimizer_in_wrong_direction_warns(optimizer: Any, message: str) -> None:
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        _ = make(optimizer=optimizer).train_step


def test_optimizers_in_right_direction_do_not_warn() -> None:
    ascent = optax.chain(optax.sgd(0.1), optax.scale(-1.0))
    adam = optax.chain(optax.scale_by_adam(), optax.scale(-1e-3))
    masked = optax.masked(optax.adamw(1e-3), every)
    doubled = optax.chain(optax.masked(optax.sgd(0.1), every), optax.scale(2.0))
    cocob = optax.contrib.cocob()
    core = optax.adafactor(1e-3), optax.lion(1e-4), optax.adamw(1e-3, mask=every)
    for optimizer in (*core, adam, ascent, masked, doubled, cocob):
        _ = make(optimizer=optimizer).train_step
    with pytest.raises(OptimizerError, match="learning rate is a text"):
        _ = make(optimizer=optax.sgd("0.1")).train_step  # pyright: ignore[reportArgumentType]


def test_schedule_shorter_than_run_warns() -> None:
    optimizer = optax.sgd(optax.linear_schedule(0.1, 0.0, 4))
    make(optimizer=optimizer).fit([BATCH] * 5, 5)
    message = "The learning rate was 0 in 6 of 10 steps"
    with pytest.warns(ParallelWarning, match=message):
        make(optimizer=optimizer).fit([BATCH] * 10, 10)


def test_second_fit_of_same_length_warns() -> None:
    trainer = make()
    trainer.fit([BATCH] * 2, 2)
    message = "This fit trains nothing: 2 steps are asked for, and 2 are done already."
    with pytest.warns(ParallelWarning, match=re.escape(message)):
        trainer.fit([BATCH] * 2, 2)


def test_other_seed_warns_on_resume(tmp_path: Any) -> None:
    make(checkpoint=tmp_path).fit([BATCH], 1)
    with pytest.warns(ParallelWarning, match="seed=3 has no effect: the run goes on"):
        make(checkpoint=tmp_path, seed=3).fit([BATCH] * 2, 2)


def test_adapters_trained_with_everything_warn() -> None:
    model = lora(linear(4)(nnx.Rngs(0)), targets="", rank=2)
    with pytest.warns(ParallelWarning, match=re.escape("Trainer(wrt=nnx.LoRAParam)")):
        _ = make(model=model).train_step
    _ = make(model=model, wrt=nnx.LoRAParam).train_step


def test_built_model_in_prediction_warns() -> None:
    model = linear(4)(nnx.Rngs(0))
    with pytest.warns(ParallelWarning, match="uses the model as 'model' from outside"):
        make(model=model).predict([BATCH], lambda m, b: model(b["x"]))


class Ends(Callback):
    def on_train_batch_end(self, trainer: Any, step: int, metrics: Any) -> None:
        """A hook of another library."""


class Short(Callback):
    def on_step_end(self, trainer: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A hook with too few arguments."""


TOKENS = np.array([[1, 2, 3]], np.int32)


def sample(prompt: Any, **options: Any) -> Any:
    settings = {"max_new_tokens": 2, "temperature": 0} | options
    config = GPTConfig.tiny(num_layers=1)
    call: Any = generate
    return call(
        nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), prompt, **settings
    )


RAISING: dict[str, tuple[Any, type[Exception], str]] = {
    "hook of another name": (
        lambda: make(callbacks=[Ends()]),
        TypeError,
        "has the method on_train_batch_end, which no fit calls. The hook is "
        "on_step_end(self, trainer",
    ),
    "hook with other arguments": (
        lambda: make(callbacks=[Short()]),
        TypeError,
        "has on_step_end(trainer: Any) -> None: too many positional arguments. A fit "
        "calls on_step_end(trainer, step, metrics).",
    ),
    "metric of an evaluation": (
        lambda: make(callbacks=[EarlyStopping("val_loss")]).fit([BATCH], 1),
        ValueError,
        "A metric of an evaluation has the prefix eval_",
    ),
    "state of another model": (
        lambda: setattr(make(), "state", make(width=3).state),
        StateStructureError,
        "The state belongs to another run. 2 arrays differ: `params.bias` has shape "
        "(3,) instead of (4,)",
    ),
    "batch for state": (
        lambda: make().train_step(BATCH, BATCH),
        TypeError,
        "The first argument of the step is a dict. It must be the state",
    ),
    "loss of Optax": (
        lambda: make(optax.l2_loss),
        TypeError,
        "loss is optax.l2_loss, a function of arrays.",
    ),
    "weight 0": (
        lambda: make(lambda m, b: Mean(m(b["x"]).sum(), 0.0)).fit([BATCH], 1),
        LossError,
        "The loss is a Mean with the weight 0, so no row would count.",
    ),
    "dict without loss": (
        lambda: make(lambda m, b: {"mse": squares(m, b)}).fit([BATCH], 1),
        LossError,
        "A dict of metrics needs the key 'loss'.",
    ),
    "tokens in float": (
        lambda: Embed(4, 2, rngs=nnx.Rngs(0))(jnp.ones((1, 2))),
        TypeError,
        "Embed got tokens of dtype float32. It takes integers",
    ),
    "text to continue": (
        lambda: sample("hello"),
        ValueError,
        "The prompt is 'hello'. It must be tokens, an array of integers of shape "
        "(batch, prompt_len)",
    ),
    "token beyond the vocabulary": (
        lambda: sample(TOKENS * 200),
        ValueError,
        "The prompt has tokens from 200 to 600; tokens of this model are from 0 to 255",
    ),
    "length of another library": (
        lambda: sample(TOKENS, max_length=3),
        TypeError,
        "generate has no argument 'max_length'. Did you mean max_new_tokens=?",
    ),
    "temperature in quotes": (
        lambda: sample(TOKENS, temperature="0"),
        TypeError,
        "temperature is '0'; it must be a number.",
    ),
    "texts to pad": (
        lambda: pad_prompts(["hello"]),  # pyright: ignore[reportArgumentType]
        TypeError,
        "A prompt is 'hello'. Each prompt must be a list of tokens",
    ),
    "rngs by position": (
        lambda: GPT(GPTConfig.tiny(), nnx.Rngs(0)),  # pyright: ignore[reportCallIssue]
        TypeError,
        "Write GPT(config, rngs=rngs).",
    ),
}


@pytest.mark.parametrize("name", RAISING)
def test_mistake_raises(name: str) -> None:
    mistake, error, message = RAISING[name]
    with pytest.raises(error, match=re.escape(message)):
        mistake()


def test_some_variables_of_a_run_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNX_PARALLEL_NUM_PROCESSES", "2")
    with pytest.raises(ProcessError, match="only NNX_PARALLEL_NUM_PROCESSES is set"):
        initialize()
    monkeypatch.undo()
    with pytest.raises(ProcessError, match="'localhost' has no port"):
        initialize("localhost", 2, 0)


NOTES: list[tuple[Any, str]] = [
    (lambda m, b: m(b["x"]) if m(b["x"]).sum() > 0 else 0.0, "jnp.where"),
    (lambda m, b: np.mean(np.tanh(m(b["x"]))), "compute with jnp in place of np"),
    (lambda m, b: float(squares(m, b)), "float(), int(), .item()"),
    (lambda m, b: m(b["x"])[b["y"] > 0].mean(), "keep all rows and mask them"),
    (lambda m, b: m(b.x).mean(), "The batch is a dict: write batch['x']."),
    (lambda m, b: m(b).mean(), "The model got the whole batch: model(batch['x'])."),
    (lambda m, b: m - b, "is the model, not its outputs: outputs = model(batch['x'])"),
    (lambda m, b: m(b["x"][:, 1:]).mean(), "arrays whose last dim is 8"),
    (
        lambda m, b: cross_entropy(m(b["x"]), jax.nn.one_hot(b["y"], 4)),
        "takes labels that are integers, one for each row of logits",
    ),
]


@pytest.mark.parametrize(("loss", "note"), NOTES)
def test_errors_in_loss_get_remedies(loss: Any, note: str) -> None:
    kinds = (TypeError, ValueError, IndexError, AttributeError)
    with pytest.raises(kinds) as found:
        make(loss).fit([BATCH], 1)
    assert note in found.value.__notes__[-1]
