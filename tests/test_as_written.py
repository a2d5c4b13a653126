"""Models and losses in the forms that users of Flax write."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Mean, Trainer
from nnx_parallel.errors import LossError, ParallelWarning

BATCH = {"x": np.ones((8, 4), np.float32), "y": np.zeros((8, 2), np.float32)}


def squares(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make_trainer(model: Any = None, loss: Any = squares) -> Trainer:
    model = model or functools.partial(nnx.Linear, 4, 2)
    strategy = FSDP(min_size=0)
    return Trainer(model, optax.sgd(0.1), loss, strategy=strategy, loggers=())


class ByName(nnx.Linear):
    """A layer with a keyword-only `rngs`, as in Flax."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(4, 2, rngs=rngs)


@pytest.mark.parametrize(
    "model",
    [
        ByName,
        functools.partial(nnx.Linear, 4, 2),
        functools.partial(nnx.Linear, 4, out_features=2),
        lambda rngs, width=2: nnx.Linear(4, width, rngs=rngs),
        lambda streams: nnx.Linear(4, 2, rngs=streams),
        nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0))),
        nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.PathContains("bias"), ...),
    ],
    ids=["class", "partial", "keyword", "default", "position", "pair", "three"],
)
def test_any_callable_that_takes_rngs_builds_model(model: Any) -> None:
    expected = nnx.Linear(4, 2, rngs=nnx.Rngs(0)).kernel[...]
    found: Any = make_trainer(model).state.params["kernel"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nnx.Linear, "cannot be called with only rngs: missing a required argument"),
        (lambda: None, "cannot be called with only rngs: too many positional"),
        (
            lambda rngs: (rngs,),
            "returns a tuple, not an nnx.Module. Pass lambda rngs: Mode",
        ),
    ],
)
def test_callable_that_builds_no_model_raises(model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make_trainer(model)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda model, batch, key: 0.0, "missing a required argument: 'key'"),
        (lambda model, batch, *, step: 0.0, "missing a required"),
        (lambda model: 0.0, "too many positional arguments"),
    ],
)
def test_loss_with_wrong_signature_raises(loss: Any, reason: str) -> None:
    with pytest.raises(LossError, match="cannot be called with a model and a batch: "):
        make_trainer(loss=loss)
    with pytest.raises(LossError, match=re.escape(reason)):
        make_trainer(loss=loss)


def test_partial_loss_keeps_bound_arguments() -> None:
    def loss(model: Any, batch: Any, weight: float, rngs: nnx.Rngs) -> jax.Array:
        return weight * squares(model, batch) + 0 * jax.random.uniform(rngs())

    bound = functools.partial(loss, weight=0.5)
    found = make_trainer(loss=bound).fit([BATCH], 1)["loss"]
    expected = make_trainer().fit([BATCH], 1)["loss"]
    np.testing.assert_allclose(found, expected / 2, rtol=1e-6)


class Scores(NamedTuple):
    """Metrics in a named tuple."""

    exact: Any
    rows: Any


@pytest.mark.parametrize(
    ("names", "make"),
    [
        ("aux", lambda half, rows: half),
        ("aux.0 aux.1", lambda half, rows: (half, rows)),
        ("aux.exact aux.rows", Scores),
        ("a.exact a.rows b", lambda half, rows: {"a": Scores(half, rows), "b": half}),
        ("", lambda half, rows: None),
    ],
)
def test_metrics_in_pytrees_are_named_by_path(names: str, make: Any) -> None:
    def loss(model: Any, batch: Any) -> Any:
        count = jnp.float32(batch["x"].shape[0])
        return squares(model, batch), make(jnp.float32(0.5), Mean(3 * count, 4 * count))

    history = make_trainer(loss=loss).fit([BATCH], 1)
    assert set(names.split()) <= set(history.keys())
    for name in names.split():
        assert history[name] in ([0.5], [0.75])


def test_outputs_beside_loss_do_not_change_the_step() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return squares(model, batch), (model(batch["x"]), {"half": 0.5})

    trainer = make_trainer(loss=loss)
    with pytest.warns(ParallelWarning, match="not reported as a metric") as record:
        found = trainer.fit([BATCH], 1)
    assert len(record) == 1
    assert found["loss"] == make_trainer().fit([BATCH], 1)["loss"]
    assert found["half"] == [0.5]


# A wrapper that replaces one method of a model.


class TwoWays(nnx.Module):
    """A model with two methods that a loss can call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 2, rngs=rngs)

    def hidden(self, x: jax.Array) -> jax.Array:
        return self.linear(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.hidden(x)


def quantize(model: nnx.Module, name: str) -> Any:
    """Makes a subclass for the model in which one method rounds its inputs, like Qwix.

    https://github.com/google/qwix, `quantize_nnx_model`
    """
    model, cls = nnx.clone(model), type(model)
    method = getattr(cls, name)

    def rounded(self: Any, x: jax.Array) -> jax.Array:
        return method(self, jnp.round(x))

    fields = {"_unquantized_type": cls, name: rounded, "__module__": "qwix"}
    model.__class__ = type(cls.__name__, (cls,), fields)
    return model


def test_loss_that_bypasses_quantized_method_raises() -> None:
    model = TwoWays(nnx.Rngs(0))
    batch = BATCH | {"x": BATCH["x"] * 0.6}
    through_hidden = lambda model, batch: squares(model.hidden, batch)  # noqa: E731
    trainer = make_trainer(quantize(model, "__call__"), through_hidden)
    message = "has replaced ['__call__'] of TwoWays, as Qwix's quantize_model does"
    for use in (lambda: trainer.fit([batch], 1), lambda: trainer.evaluate([batch])):
        with pytest.raises(LossError, match=re.escape(message)):
            use()
    # Valid: the wrapped method is the one that the loss calls, directly or indirectly.
    expected = float(squares(model, BATCH))
    for name, loss in (("hidden", through_hidden), ("__call__", squares)):
        found = make_trainer(quantize(model, name), loss).fit([batch], 1)["loss"]
        np.testing.assert_allclose(found, [expected], rtol=1e-5)
    # A user's subclass with the same name as its base is not reported as quantized.
    make_trainer(_same_name(), through_hidden).fit([batch], 1)


def _same_name() -> Any:
    base = TwoWays

    class TwoWays_(base):  # noqa: N801
        """Overrides a method that the loss does not call."""

        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * self.hidden(x)

    TwoWays_.__name__ = base.__name__
    return TwoWays_
