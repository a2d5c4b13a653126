"""Attention over a split sequence: one device's numbers, and balanced work."""

import re
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    Strategy,
    TensorParallel,
    audit,
)
from nnx_parallel.errors import (
    AttentionKernelError,
    IndivisibleDimError,
    ParallelWarning,
)
from nnx_parallel.layers.attention import attention
from nnx_parallel.layers.attention import blocks as score_blocks
from nnx_parallel.sharding import constrain, using
from nnx_parallel.sharding.layout import Layout
from tests.parity.pairs import all_pairs, pairs_met
from tests.steps import QUICKLY

NAMES = ("batch", "seq", "heads", "head_dim")
ROWS, SEQ, HEADS, WIDTH = 4, 32, 8, 8

EXCHANGES = ("ring", "all_to_all", "gather")
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal_window": {"causal": True, "window": 5},
    "packed": {"causal": True, "segments": True},
    "packed_window": {"causal": True, "segments": True, "window": 5},
    "bidirectional": {"segments": True, "window": 9},
}
KV_HEADS = (8, 2, 1)
MESHES: dict[str, tuple[Strategy, ...]] = {
    "alone": (),
    "fsdp": (FSDP(2),),
    "tp": (TensorParallel(2),),
    "tp_sequence": (TensorParallel(2, sequence=True),),
}
FACTORS = (EXCHANGES, tuple(MASKS), KV_HEADS, tuple(MESHES))
PAIRS = all_pairs(*FACTORS)
FEW = [
    ("ring", "causal", 2, "fsdp"),
    ("all_to_all", "packed", 1, "tp"),
    ("gather", "causal_window", 8, "tp_sequence"),
    ("gather", "packed_window", 2, "alone"),
    ("ring", "bidirectional", 8, "tp_sequence"),
]
"""The cases that `make test` runs. They contain every value of every factor."""


def parametrized() -> list:
    marks = {case: [] if case in FEW else [pytest.mark.deep] for case in PAIRS}
    marks |= {case: [] for case in FEW}
    return [
        pytest.param(*case, marks=marks.get(case, [pytest.mark.slow]))
        for case in product(*FACTORS)
    ]


def test_selections_cover_all_values_and_pairs():
    values = [set(column) for column in zip(*FEW, strict=True)]
    assert values == [set(factor) for factor in FACTORS]
    assert pairs_met(PAIRS) == pairs_met(product(*FACTORS))


def layout_of(strategy: Strategy) -> Layout:
    sizes = strategy.axis_sizes.values()
    devices = jax.devices()[: int(np.prod([size or 1 for size in sizes]))]
    return strategy.layout(strategy.make_mesh(devices))


def operands(kv_heads: int, seq: int = SEQ, keys: int | None = None) -> list[Array]:
    rng = np.random.default_rng(0)
    keys = keys or seq
    shapes = [(ROWS, seq, HEADS, WIDTH), *[(ROWS, keys, kv_heads, WIDTH)] * 2]
    arrays = [rng.normal(size=shape) for shape in (*shapes, (HEADS,))]
    return [jnp.asarray(x, jnp.float32) for x in arrays]


def documents(seq: int = SEQ) -> Array:
    """Segment ids of three documents and padding; lengths differ between rows."""
    ends = np.sort(np.random.default_rng(1).integers(1, seq, (ROWS, 3)), axis=1)
    ids = (np.arange(seq)[None, None] >= ends[..., None]).sum(1)
    return jnp.asarray((ids + 1) % 4, jnp.int32)


def value(layout: Layout | None, arrays: list[Array], **rules: Any) -> Array:
    """Returns the output of an attention with sinks."""
    query, key, value, sinks = arrays
    with using(layout):
        run = jax.jit(lambda q, k, v: attention(q, k, v, sinks=sinks, **rules))
        return run(query, key, value)


def value_and_gradients(
    layout: Layout | None, arrays: list[Array], **rules: Any
) -> tuple:
    """Value and gradients of a scalar that weighs each output; sinks come last."""

    def loss(*arrays: Array) -> tuple[Array, Array]:
        query, key, value, sinks = arrays
        with using(layout):
            query = constrain(query, *NAMES)
            out = attention(query, key, value, sinks=sinks, **rules)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    run = jax.jit(jax.grad(loss, range(4), has_aux=True))
    grads, out = run(*arrays)
    return out, *grads


@cache
def expected(mask: str, kv_heads: int) -> tuple:
    return value_and_gradients(None, operands(kv_heads), **rules_of(mask))


def rules_of(mask: str) -> dict[str, Any]:
    rules = MASKS[mask]
    return rules | {"segments": documents()} if "segments" in rules else rules


def assert_same(found: tuple, wanted: tuple) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert np.isfinite(a).all()
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.parametrize(("exchange", "mask", "kv_heads", "mesh"), parametrized())
def test_attention_matches_one_device(exchange, mask, kv_heads, mesh):
    """Compares outputs, and gradients of queries, keys, values and sinks."""
    size = 4 if mesh == "alone" else 2
    strategy = Composite(ContextParallel(size, exchange), *MESHES[mesh])
    found = value_and_gradients(
        layout_of(strategy), operands(kv_heads), **rules_of(mask)
    )
    assert_same(found, expected(mask, kv_heads))


@pytest.mark.deep
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("keys", [16, 15])
def test_cross_attention_matches_one_device(exchange, keys):
    """Keys are exchanged if the axis divides their number, and gathered otherwise."""
    arrays = operands(2, keys=keys)
    found = value_and_gradients(layout_of(ContextParallel(4, exchange)), arrays)
    assert_same(found, value_and_gradients(None, arrays))


# Work


@pytest.mark.parametrize(
    ("exchange", "is_trained"),
    [
        ("ring", False),
        ("gather", False),
        pytest.param("ring", True, marks=pytest.mark.deep),
        pytest.param("gather", True, marks=pytest.mark.deep),
    ],
)
def test_causal_work_is_balanced(exchange, is_trained, monkeypatch):
    """Counts the blocks that each of eight devices computes at run time.

    If each device had neighbouring blocks, the last would do 1.88 times the mean work.
    """
    counts: Counter[int] = Counter()

    def counting(self: Any, needed: Any, attend: Any, *state: Any) -> Any:
        def run(*state: Any) -> Any:
            index = jax.lax.axis_index("context")
            area = self.q.size * self.k.size
            jax.debug.callback(lambda i: counts.update({int(i): area}), index)
            return attend(*state)

        if needed is None:
            return run(*state)
        return jax.lax.cond(needed, run, lambda *state: state, *state)

    seq = 256
    monkeypatch.setattr(score_blocks.Grid, "unless_empty", counting)
    run = value_and_gradients if is_trained else value
    run(layout_of(ContextParallel(8, exchange)), operands(8, seq), causal=True)
    jax.effects_barrier()
    assert set(counts) == set(range(8))
    assert max(counts.values()) <= 1.05 * np.mean(list(counts.values()))
    # Blocks without a visible key are skipped. The excess over half of all blocks comes
    # from the diagonal, which has 16 blocks.
    assert sum(counts.values()) == (1 + is_trained) * seq * (seq + 16) // 2


def test_unbalanced_length_warns(monkeypatch):
    layout = layout_of(ContextParallel(8))
    message = (
        "Causal attention of 24 tokens over context=8 is not balanced: the last device "
        "has 15 times the work of the first. Use a sequence length that is a multiple "
        "of 16."
    )
    query, key, value, _ = operands(8, 24)
    with using(layout), pytest.warns(ParallelWarning, match=re.escape(message)):
        jax.eval_shape(lambda *x: attention(*x, causal=True), query, key, value)


# Transfers and memory of a compiled program


LONG, KV_HEADS_OF_LONG = 1024, 2
SHARD = LONG // 4 * WIDTH * 4
"""Bytes of one head of the tokens on one device, in float32."""


@cache
def compiled(exchange: Any, *, causal: bool, is_trained: bool) -> jax.stages.Compiled:
    layout = layout_of(ContextParallel(4, exchange))
    names = ((HEADS, "heads"), *[(KV_HEADS_OF_LONG, "kv_heads")] * 2)
    arrays = [
        jax.ShapeDtypeStruct(
            (1, LONG, heads, WIDTH),
            jnp.float32,
            sharding=layout.sharding(
                layout.activation_spec(
                    (1, LONG, heads, WIDTH), ("batch", "seq", name, "head_dim")
                )
            ),
        )
        for heads, name in names
    ]

    def run(*arrays: Array) -> Array:
        with using(layout):
            return attention(*arrays, causal=causal)

    def loss(*arrays: Array) -> Array:
        return (run(*arrays) ** 2).sum()

    function = jax.grad(loss, range(3)) if is_trained else run
    return jax.jit(function).lower(*arrays).compile(QUICKLY)


def sent(exchange: str, *, causal: bool, is_trained: bool) -> dict[str, int]:
    """Bytes that a device sends in one attention, by kind of collective."""
    found: Counter[str] = Counter()
    for each in audit(
        compiled(exchange, causal=causal, is_trained=is_trained)
    ).collectives:
        # The audit counts an all-gather's result, which has 4 shards. A device sends
        # its shard 3 times.
        share = 3 / 4 if each.kind != "collective-permute" else 1
        found[each.kind] += int(each.bytes * share)
    # Drops scalars, such as a sum over all devices in the loss.
    return {kind: size for kind, size in found.items() if size > 64}


KEYS = 2 * KV_HEADS_OF_LONG * SHARD  # bytes of one device's keys and values


@pytest.mark.parametrize(
    ("exchange", "is_trained", "expected"),
    [
        # A device receives n - 1 of n shards. The backward pass receives them again,
        # with their gradients.
        ("ring", False, {"collective-permute": 3 * KEYS}),
        ("ring", True, {"collective-permute": 3 * 3 * KEYS}),
        # The backward pass gathers again, and scatters the gradients.
        ("gather", False, {"all-gather": 3 * KEYS}),
        ("gather", True, {"all-gather": 6 * KEYS, "reduce-scatter": 3 * KEYS}),
        # Exchanged: queries, outputs, and keys and values repeated to 4 heads; then all
        # gradients.
        ("all_to_all", False, {"all-to-all": (2 * HEADS + 2 * 4) * SHARD * 3 // 4}),
        ("all_to_all", True, {"all-to-all": 2 * (2 * HEADS + 2 * 4) * SHARD * 3 // 4}),
    ],
)
def test_sent_bytes_match_theory(exchange, is_trained, expected):
    found = sent(exchange, causal=False, is_trained=is_trained)
    if jax.__version_info__ < (0, 11) and (exchange, is_trained) == ("gather", True):
        # XLA of jax 0.10 merges the equal gathers of both passes.
        found["all-gather"] *= 2
    assert found == expected


def test_balancing_sends_each_token_twice():
    """Balancing adds only transfers of queries, keys, values and outputs."""
    found = sent("ring", causal=True, is_trained=False)
    halves = (2 * HEADS + 2 * KV_HEADS_OF_LONG) * SHARD
    assert found == {"collective-permute": 3 * KEYS + halves}


@pytest.mark.parametrize(
    "exchange",
    ["ring", *(pytest.param(e, marks=pytest.mark.deep) for e in EXCHANGES[1:])],
)
def test_no_array_holds_all_scores(exchange):
    text = compiled(exchange, causal=True, is_trained=True).as_text()
    assert text is not None
    shapes = re.findall(r"(?:f|s|u|pred)\d*\[([\d,]+)\]", text)
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    # The largest array has the scores of one block for all heads, or the scores of one
    # device.
    assert largest <= HEADS * 256 * 512 < LONG * LONG * HEADS // 4


# Errors


def attend(strategy: Strategy, seq: int, kv_heads: int = 8, **rules: Any) -> Array:
    query, key, value, _ = operands(kv_heads, seq)
    with using(layout_of(strategy)):
        return attention(query, key, value, causal=True, **rules)


def test_indivisible_length_raises():
    message = (
        "Cannot split dim 1 of the queries of an attention with shape (4, 30, 8, 8) "
        "over the mesh axis 'context', because its size 4 does not divide 30. Pad the "
        "dim to 32."
    )
    with pytest.raises(IndivisibleDimError, match=re.escape(message)):
        attend(ContextParallel(4), 30)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (
            ContextParallel(3, "all_to_all"),
            "exchange='all_to_all' splits the heads of attention over context=3, which "
            "does not divide 8 heads. Use a size among [1, 2, 4, 8], or "
            "exchange='ring' or 'gather', which do not split heads.",
        ),
        (
            Composite(ContextParallel(8, "all_to_all"), DataParallel(1)),
            "",
        ),
        (
            Composite(ContextParallel(4, "all_to_all"), TensorParallel(2)),
            "",
        ),
    ],
)
def test_indivisible_heads_raise(strategy, text):
    if not text:
        jax.eval_shape(lambda: attend(strategy, 48))
        return
    with pytest.raises(IndivisibleDimError, match=re.escape(text)):
        attend(strategy, 48)


def test_unknown_exchange_raises():
    message = (
        "ContextParallel(exchange='zigzag'): valid values are ['ring', 'all_to_all', "
        "'gather']."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        ContextParallel(2, "zigzag")  # pyright: ignore[reportArgumentType]


def test_kernel_for_whole_sequences_raises():
    message = "exchange='ring' of a split sequence; it needs complete sequences, which"
    with pytest.raises(AttentionKernelError, match=re.escape(message)):
        attend(ContextParallel(4), 32, implementation="splash")


@pytest.mark.parametrize("seq", [1, 30])
def test_generating_model_is_not_split(seq):
    """Single tokens and array masks are left to the partitioner."""
    query, key, value, _ = operands(2, seq)
    mask = jnp.ones((1, 1, seq, seq), bool)
    with using(layout_of(ContextParallel(4))):
        found = attention(query, key, value, mask=mask)
    wanted = attention(query, key, value)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
