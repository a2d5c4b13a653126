"""The layers that use mesh axes, compared with plain arithmetic."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Composite, TensorParallel
from nnx_parallel.layers import (
    Dense,
    Embed,
    active_remat,
    check_remat,
    cross_entropy,
    default_remat,
)
from nnx_parallel.layers.attention import attention
from nnx_parallel.sharding import using

VOCAB = 12


@pytest.fixture(scope="module")
def logits() -> jax.Array:
    return 5 * jax.random.normal(jax.random.key(0), (2, 5, VOCAB))


@pytest.fixture(scope="module")
def labels() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, 5), 0, VOCAB)


# Products


@pytest.mark.parametrize(
    ("in_dims", "out_dims", "formula"),
    [
        ({"embed": 6}, {"mlp": 8}, "bse,em->bsm"),
        ({"embed": 6}, {"heads": 2, "head_dim": 4}, "bse,ehd->bshd"),
        ({"heads": 2, "head_dim": 4}, {"embed": 6}, "bshd,hde->bse"),
    ],
)
def test_dense_contracts_named_dims(
    in_dims: dict, out_dims: dict, formula: str
) -> None:
    dense = Dense(in_dims, out_dims, use_bias=True, rngs=nnx.Rngs(0))
    assert dense.bias is not None
    dense.bias.set_value(jax.random.normal(jax.random.key(1), dense.bias.shape))
    x = jax.random.normal(jax.random.key(2), (2, 3, *in_dims.values()))
    expected = jnp.einsum(formula, x, dense.kernel[...])
    bias = jnp.broadcast_to(dense.bias[...], expected.shape)
    np.testing.assert_allclose(dense(x), expected + bias, rtol=1e-5, atol=1e-6)
    assert dense.kernel.get_metadata()["out_sharding"] == (*in_dims, *out_dims)
    assert dense.bias.get_metadata()["out_sharding"] == tuple(out_dims)


def test_dense_initializer_keeps_variance() -> None:
    dense = Dense({"heads": 16, "head_dim": 16}, {"embed": 512}, rngs=nnx.Rngs(0))
    assert dense.bias is None
    np.testing.assert_allclose(dense.kernel[...].std(), 1 / 16, rtol=0.02)


def test_duplicate_dim_name_raises() -> None:
    message = "The dims ('embed', 'embed') name 'embed' twice. Give each dim of a"
    with pytest.raises(ValueError, match=re.escape(message)):
        Dense({"embed": 4}, {"embed": 4}, rngs=nnx.Rngs(0))


def test_embed_looks_up_and_attends() -> None:
    embed = Embed(VOCAB, 4, rngs=nnx.Rngs(0))
    tokens = jnp.array([[0, 11], [3, 3]])
    found = embed(tokens)
    assert (np.asarray(found) == np.asarray(embed.embedding[...])[tokens]).all()
    logits = found @ embed.embedding[...].T
    np.testing.assert_allclose(embed.attend(found), logits, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("token", [VOCAB, 1000])
def test_token_outside_vocabulary_gives_nan(token: int) -> None:
    rows = Embed(VOCAB, 4, rngs=nnx.Rngs(0))(jnp.array([[0, token]]))
    assert jnp.isfinite(rows[0, 0]).all()
    assert jnp.isnan(rows[0, 1]).all()


# Attention


def test_grouped_attention_matches_scaled_softmax() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 5, 4, 8))
    key, value = (jax.random.normal(k, (2, 5, 2, 8)) for k in keys[1:])
    mask = jnp.tril(jnp.ones((5, 5), bool))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, jnp.repeat(key, 2, axis=2)) / 8**0.5
    weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -jnp.inf))
    expected = jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(value, 2, axis=2))
    np.testing.assert_allclose(
        attention(query, key, value, causal=True), expected, rtol=1e-5, atol=1e-6
    )
    masked = attention(query, key, value, mask=mask[None, None])
    np.testing.assert_allclose(masked, expected, rtol=1e-5, atol=1e-6)


# Loss


def test_cross_entropy_matches_optax(logits: jax.Array, labels: jax.Array) -> None:
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    found = cross_entropy(logits, labels)
    np.testing.assert_allclose(found.value, expected.mean(), rtol=1e-6)
    assert float(found.weight) == labels.size
    with_z = cross_entropy(logits, labels, z_loss=0.1)
    z = jax.nn.logsumexp(logits, axis=-1) ** 2
    np.testing.assert_allclose(with_z.value, (expected + 0.1 * z).mean(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_])
def test_zero_weights_drop_labels(
    logits: jax.Array, labels: jax.Array, dtype: Any
) -> None:
    weights = (labels % 3 > 0).astype(dtype)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    kept = np.asarray(labels) % 3 > 0
    found = cross_entropy(logits, labels, weights)
    mean = np.asarray(expected)[kept].mean()
    np.testing.assert_allclose(found.value, mean, rtol=1e-6)
    assert float(found.weight) == kept.sum()
    nothing = cross_entropy(logits, labels, jnp.zeros_like(weights))
    assert float(nothing.value) == 0.0


def test_bfloat16_logits_are_summed_in_float32(
    logits: jax.Array, labels: jax.Array
) -> None:
    narrow = logits.astype(jnp.bfloat16)
    found = cross_entropy(narrow, labels)
    assert found.total.dtype == jnp.float32  # pyright: ignore[reportAttributeAccessIssue]
    expected = cross_entropy(narrow.astype(jnp.float32), labels)
    assert float(found.total) == float(expected.total)
    grad = jax.grad(lambda x: cross_entropy(x, labels).value)(narrow)
    assert grad.dtype == jnp.bfloat16


def test_split_vocabulary_matches_one_device() -> None:
    def function(embed: Embed, tokens: jax.Array) -> jax.Array:
        return cross_entropy(embed.attend(embed(tokens)), tokens, z_loss=0.1).value

    embed, tokens = Embed(64, 32, rngs=nnx.Rngs(0)), jnp.arange(40).reshape(8, 5)
    value_and_grad = jax.value_and_grad(function)
    expected = value_and_grad(embed, tokens)
    layout = Composite(FSDP(4), TensorParallel(2)).layout()

    @jax.jit
    def split(embed: Embed, tokens: jax.Array) -> tuple:
        with using(layout):
            return value_and_grad(embed, tokens)

    for found, wanted in zip(
        jax.tree.leaves(split(embed, tokens)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


# Remat


def test_default_remat_applies_only_inside_context() -> None:
    assert active_remat() == "none"
    with default_remat("full"):
        assert active_remat() == "full"
    assert active_remat() == "none"


@pytest.mark.parametrize("check", [check_remat])
def test_unknown_remat_policy_raises(check: Callable) -> None:
    message = (
        "Unknown remat policy 'everything'. Policies: ['none', 'dots', 'full'], "
        "Save(*names), a policy of jax.checkpoint_policies, or None to follow the "
        "Trainer's. Call a function that makes a policy, such as "
        "save_only_these_names, first."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check("everything")
