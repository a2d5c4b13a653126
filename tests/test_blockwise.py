"""Blockwise attention is exact in both passes, and never holds all scores."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel.layers.attention.blocks import (
    Pattern,
    Tokens,
    backward_block,
    blockwise_attention,
    forward_block,
    merge,
    output_delta,
    sinks_gradient,
    with_sinks,
)

Operands = dict[str, Any]


def naive(
    pattern: Pattern,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    q_tokens: Tokens,
    k_tokens: Tokens,
    sinks: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Computes all scores at once, directly as the contract says."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * pattern.scale
    if pattern.softcap is not None:
        scores = pattern.softcap * jnp.tanh(scores / pattern.softcap)
    own, other = q_tokens.positions[:, :, None], k_tokens.positions[:, None, :]
    left, right = pattern.window
    seen = jnp.ones((1, 1, query.shape[1], key.shape[1]), bool)
    seen &= (own >= other)[:, None] if pattern.causal else True
    seen &= (own - other <= left)[:, None] if left is not None else True
    seen &= (other - own <= right)[:, None] if right is not None else True
    if q_tokens.segments is not None and k_tokens.segments is not None:
        own, other = q_tokens.segments[:, :, None], k_tokens.segments[:, None, :]
        seen = seen & ((own == other) & (own > 0))[:, None]
    seen = seen if mask is None else seen & mask
    largest = jax.lax.stop_gradient(scores.max())
    weights = jnp.where(seen, jnp.exp(scores - largest), 0.0)
    total = weights.sum(-1)
    if sinks is not None:
        total += jnp.exp(sinks[None, :, None] - largest)
    weights /= jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def operands(case: Operands, rows: int = 2, heads: int = 4) -> tuple:
    """Arguments of `blockwise_attention` that follow the pattern."""
    rng = np.random.default_rng(0)
    seq, keys = case["lengths"]
    widths = (seq, heads, 8), (keys, case["kv_heads"], 8), (keys, case["kv_heads"], 6)
    arrays = [jnp.asarray(rng.normal(size=(rows, *s)), jnp.float32) for s in widths]
    own = other = None
    if case["packed"]:  # the first segment is padding
        own, other = (np.sort(rng.integers(0, 4, (rows, n))) for n in (seq, keys))
        own, other = map(jnp.asarray, (own, own if seq == keys else other))
    sinks = jnp.asarray(rng.normal(size=heads), jnp.float32) if case["sinks"] else None
    mask = jnp.asarray(rng.random((1, heads, seq, keys)) < 0.7)
    tokens = Tokens.in_order(seq, own), Tokens.in_order(keys, other)
    return *arrays, *tokens, sinks, mask if case["mask"] else None


def value_and_gradients(function: Any, operands: tuple) -> tuple:
    """Value and gradients of a scalar in which each output has a different weight."""
    query, key, value, *tokens, sinks, mask = operands

    @jax.jit
    def run(*arrays: Any) -> tuple:
        def loss(*arrays: Any) -> tuple[jax.Array, jax.Array]:
            query, key, value, sinks = arrays
            out = function(query, key, value, *tokens, sinks, mask)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

        given = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
        grads, out = jax.grad(loss, given, has_aux=True)(*arrays)
        return out, grads

    return run(query, key, value, sinks)


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.shape == b.shape
        # A NaN makes this comparison false.
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(b))


CHOICES: dict[str, list] = {
    "causal": [True, False],
    "window": [(None, None), (5, None), (5, 3)],
    "softcap": [None, 2.0],
    "packed": [True, False],
    "sinks": [False, True],
    "mask": [False, True],
    "lengths": [(40, 40), (37, 53)],
    "kv_heads": [2, 4, 1],
}
EACH = itertools.product(*CHOICES.values())
PRODUCT = [dict(zip(CHOICES, each, strict=True)) for each in EACH]


def covering(cases: list[Operands], count: int) -> list[Operands]:
    """Chooses few cases that cover every combination of ``count`` arguments' values."""

    def combinations(case: Operands) -> set:
        choices = [(k, repr(v)) for k, v in case.items()]
        return set(itertools.combinations(choices, count))

    missing, chosen = set().union(*map(combinations, cases)), []
    while missing:
        best = max(cases, key=lambda case: len(combinations(case) & missing))
        chosen.append(best)
        missing -= combinations(best)
    return chosen


QUICK = covering(PRODUCT, 1)
PAIRS = [case for case in covering(PRODUCT, 2) if case not in QUICK]
REST = [case for case in PRODUCT[::11] if case not in (*QUICK, *PAIRS)]


@pytest.mark.parametrize(
    "case",
    [
        *QUICK,
        *(pytest.param(case, marks=pytest.mark.deep) for case in PAIRS),
        *(pytest.param(case, marks=pytest.mark.slow) for case in REST),
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_blockwise_matches_naive_attention(case: Operands):
    """Checks all arguments; the blocks divide neither the queries nor the keys."""
    pattern = Pattern(
        scale=0.5,
        causal=case["causal"],
        window=case["window"],
        softcap=case["softcap"],
        block=(16, 8),
    )
    given = operands(case)
    found = value_and_gradients(partial(blockwise_attention, pattern), given)
    assert_same(found, value_and_gradients(partial(naive, pattern), given))


PACKED = {
    "packed": True, "sinks": True, "mask": False, "lengths": (40, 40), "kv_heads": 2
}  # fmt: skip


def test_key_blocks_merge_in_any_order():
    """Merges results over blocks of shuffled keys, as a ring does."""
    pattern = Pattern(scale=0.5, causal=True, window=(9, None), block=(8, 8))
    given = operands(PACKED)
    query, key, value, q_tokens, k_tokens, sinks, _ = given
    order = np.random.default_rng(1).permutation(40)
    key, value = key[:, order], value[:, order]
    k_tokens = jax.tree.map(lambda x: x[:, order], k_tokens)
    given = (query, key, value, q_tokens, k_tokens, sinks, None)
    expected = value_and_gradients(partial(naive, pattern), given)
    out = expected[0]
    grad = jnp.cos(jnp.arange(out.size).reshape(out.shape))

    @jax.jit
    def run() -> tuple:
        def pieces(tree: Any) -> list:
            ends = itertools.pairwise([0, 5, 24, 40])
            of = [slice(*pair) for pair in ends]
            return [jax.tree.map(lambda x, s=s: x[:, s], tree) for s in of]

        each = pieces((key, value, k_tokens))
        empty = (jnp.zeros_like(out), jnp.full(out.shape[:-1], -jnp.inf))
        part = empty
        for k, v, tokens in each:
            more = forward_block(query, k, v, q_tokens, tokens, pattern)
            part = merge(part, more)
        found, lse = with_sinks(part, sinks)
        delta = output_delta(found, grad)
        dquery, dkeys, dvalues = 0, [], []
        for k, v, tokens in each:
            own = (query, k, v, grad, lse, delta, q_tokens, tokens, pattern)
            dq, dk, dv = backward_block(*own)
            dquery, dkeys, dvalues = dquery + dq, [*dkeys, dk], [*dvalues, dv]
        dkey, dvalue = (jnp.concatenate(x, axis=1) for x in (dkeys, dvalues))
        return found, (dquery, dkey, dvalue, sinks_gradient(sinks, lse, delta))

    assert_same(run(), expected)


def test_fully_masked_rows_give_zero():
    """Outputs are 0, gradients 0, and merging such a row changes nothing."""
    nothing = (jnp.zeros((1, 2, 1, 3)), jnp.full((1, 2, 1), -jnp.inf))
    some = (jnp.ones((1, 2, 1, 3)), jnp.zeros((1, 2, 1)))
    assert_same(merge(nothing, some), some)
    out, lse = merge(nothing, nothing)
    assert not out.any()
    assert (lse == -jnp.inf).all()
    *arrays, q_tokens, _, _, _ = operands(PACKED)
    padding = q_tokens._replace(segments=jnp.zeros((2, 40), jnp.int32))
    pattern = Pattern(scale=1.0, block=(16, 16))
    given = (*arrays, padding, padding, None, None)
    found = value_and_gradients(partial(blockwise_attention, pattern), given)
    assert not any(x.any() for x in jax.tree.leaves(found))
    own, other = operands(PACKED)[:3], (q_tokens, padding, None, None)
    found = value_and_gradients(partial(blockwise_attention, pattern), own + other)
    assert not any(x.any() for x in jax.tree.leaves(found))


def test_bfloat16_is_summed_in_float32():
    pattern = Pattern(scale=0.3, causal=True, block=(16, 16))
    given = operands(PACKED)
    narrow = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, given
    )
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, narrow
    )
    found = value_and_gradients(partial(blockwise_attention, pattern), narrow)
    expected = value_and_gradients(partial(naive, pattern), wide)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.max(np.abs(a - b)) <= 2**-7 * np.max(np.abs(b))


def blocks_run(pattern: Pattern, tokens: Tokens) -> int:
    """Number of blocks that the forward pass computes; it skips the others."""
    seen = []

    class Counting(Pattern):
        def sees(self, queries: Tokens, keys: Tokens) -> jax.Array | None:
            jax.debug.callback(lambda _: seen.append(1), queries.positions)
            return super().sees(queries, keys)

    x = jnp.ones((tokens.positions.shape[0], tokens.positions.shape[1], 1, 8))
    run = jax.jit(partial(forward_block, pattern=Counting(**vars(pattern))))
    jax.block_until_ready(run(x, x, x, tokens, tokens))
    jax.effects_barrier()
    return len(seen)


@pytest.mark.parametrize(
    ("changes", "segments", "expected"),
    [
        ({}, None, 64),
        ({"causal": True}, None, 36),
        ({"causal": True, "window": (16, None)}, None, 8 + 7 + 6),
        ({"window": (8, 8)}, None, 8 + 7 + 7),
        ({"causal": True}, [1, 1, 2, 2, 2, 0, 0, 0], 3 + 6),
        ({}, [3, 1, 1, 2, 0, 0, 0, 0], 1 + 4 + 1),
    ],
)
def test_empty_blocks_are_skipped(changes, segments, expected):
    """Each block of 8 tokens is either one document or padding."""
    own = None if segments is None else jnp.repeat(jnp.asarray([segments]), 8, axis=1)
    pattern = Pattern(scale=1.0, block=(8, 8), **changes)
    assert blocks_run(pattern, Tokens.in_order(64, own)) == expected
