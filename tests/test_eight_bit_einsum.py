"""Products of `nnx.Einsum` in 8 bits."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, DataParallel, Precision, Strategy, Trainer, audit
from nnx_parallel.errors import EightBitError
from nnx_parallel.layers.eight_bit import eight_bit_matmul
from nnx_parallel.layers.recipe import layers_in_eight_bits, set_recipe
from nnx_parallel.precision import EightBit

pytestmark = pytest.mark.long

INT8 = EightBit(forward="int8", gradient="int8", layers="")
MXFP8 = EightBit(forward="float8_e4m3fn", gradient="float8_e4m3fn", layers="", block=32)


def einsum(text: str, shape: tuple[int, ...], **options: Any) -> nnx.Einsum:
    init = nnx.initializers.normal(0.1)
    return nnx.Einsum(text, shape, kernel_init=init, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("recipe", [INT8, MXFP8], ids=["int8", "mxfp8"])
@pytest.mark.parametrize(
    ("text", "shape", "w_dims", "bias"),
    [
        ("bsd,dh->bsh", (64, 32), (0,), (32,)),
        ("...d,hd->...h", (32, 64), (1,), (32,)),
        ("bshd,hed->bse", (2, 32, 32), (0, 2), None),
        ("bsd,hdk->bhsk", (4, 64, 8), (1,), (4, 1, 8)),
    ],
)
def test_products_match_products_of_dense(
    recipe: EightBit, text: str, shape: tuple, w_dims: tuple, bias: tuple | None
) -> None:
    layer = einsum(text, shape, bias_shape=bias and tuple(n for n in bias if n > 1))
    kernel = layer.kernel[...]
    rng = np.random.default_rng(0)
    ins = [shape[d] for d in w_dims]
    x = jnp.asarray(rng.normal(size=(2, 3, *ins)), jnp.float32)
    others = [d for d in range(kernel.ndim) if d not in w_dims]

    def expected(x: jax.Array, kernel: jax.Array) -> jax.Array:
        ordered = kernel.transpose(*w_dims, *others)
        y = eight_bit_matmul(x, ordered, len(w_dims), recipe)
        return jnp.moveaxis(y, 2, 1) if text.endswith("bhsk") else y

    def found(x: jax.Array, kernel: jax.Array) -> jax.Array:
        copied = nnx.clone(layer)
        copied.kernel[...] = kernel
        set_recipe(copied, recipe)
        return copied(x)

    dy = jax.eval_shape(expected, x, kernel)
    dy = jnp.asarray(rng.normal(size=dy.shape), jnp.float32)
    run = jax.jit(lambda f, *x: (f(*x), *jax.vjp(f, *x)[1](dy)), static_argnums=0)
    results = run(found, x, kernel), run(expected, x, kernel)
    for each, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5)
    change = np.abs(results[0][0] - layer(x)).max()
    assert 1e-4 < change < 0.2


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Einsum("bsd,hd->bsh", (64, 32), rngs=rngs)
        self.down = nnx.Einsum("...h,hd->...d", (64, 32), (32,), rngs=rngs)


def loss(model: Net, batch: Any) -> jax.Array:
    return (model.down(jnp.tanh(model.up(batch))) ** 2).mean()


def train(strategy: Strategy, count: int, rounding: Any = "nearest") -> tuple:
    trainer = Trainer(
        Net,
        optax.sgd(0.5),
        loss,
        strategy=strategy,
        devices=jax.devices()[:count],
        precision=Precision.int8("", compute=None, rounding=rounding),
        loggers=(),
    )
    rng = np.random.default_rng(0)
    batch = trainer.shard_batch(rng.normal(size=(8, 4, 32)).astype(np.float32))
    step: Any = trainer.train_step
    compiled = step.lower(trainer.state, batch).compile()
    state, losses = trainer.state, []
    for _ in range(3):
        state, metrics = trainer.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, compiled


def test_step_matches_one_device_and_gathers_8_bits() -> None:
    expected, _ = train(DataParallel(1), 1, "stochastic")
    losses, compiled = train(FSDP(2, min_size=0), 2, "stochastic")
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    gathers = [x for x in audit(compiled).collectives if x.kind == "all-gather"]
    kernels = [x.bytes_each for x in gathers for _ in range(x.count)]
    # Both kernels, of 64 * 32 weights, are gathered in the forward pass, and `down` in
    # the backward pass: the input of `up` has no gradient.
    assert sorted(kernels)[-3:] == [64 * 32] * 3


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: einsum("ebd,edh->ebh", (4, 8, 8)), "its einsum_str has the labels ['"),
        (lambda: einsum("bd,dh->b", (8, 8)), "the labels ['h'] in only one operand"),
        (lambda: einsum("bd,h->bdh", (8,)), "no label that is contracted"),
        (lambda: einsum("bdd,dh->bh", (8, 8)), "a label twice in an operand"),
        (lambda: einsum("bd,...d->b", (8,)), "'...' in its kernel"),
        (
            lambda: einsum("bd,dh->bh", (8, 8), einsum_op=lambda *x, **y: 0),
            "it has another einsum_op",
        ),
    ],
)
def test_products_without_recipe_raise(layer: Any, reason: str) -> None:
    with pytest.raises(EightBitError, match=re.escape(reason)):
        layers_in_eight_bits(layer(), INT8)


def test_dims_without_complete_blocks_raise() -> None:
    with pytest.raises(EightBitError, match="it has 24 inputs and 8 outputs"):
        layers_in_eight_bits(einsum("bd,hd->bh", (8, 24)), MXFP8)


def test_text_of_einsum_call_is_checked() -> None:
    layer = einsum("bd,dh->bh", (8, 8))
    set_recipe(layer, INT8)
    with pytest.raises(EightBitError, match="A call of `` cannot run in 8 bits: its e"):
        layer(jnp.ones((8, 8)), "dh,dh->dh")
