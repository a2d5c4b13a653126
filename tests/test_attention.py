"""The contract of attention: arguments and results of each implementation."""

import importlib.util
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from docs.attention_table import (
    ARGUMENTS,
    IMPLEMENTATIONS,
    SEQ,
    call_of,
    refusal,
)
from nnx_parallel import Composite, ContextParallel, Strategy, TensorParallel
from nnx_parallel.audit.hlo import parse
from nnx_parallel.errors import AttentionKernelError
from nnx_parallel.layers.attention import attention
from nnx_parallel.layers.attention.blocks import blockwise_attention
from nnx_parallel.layers.attention.kernels import (
    FUSED,
    AttentionCall,
    attention_in_blocks,
    plain_attention,
    splash_attention,
    tokamax_attention,
)
from nnx_parallel.sharding import using

pytestmark = pytest.mark.long

# Errors of the implementations that do not support an argument.
REFUSED: dict[str, dict[str, str]] = {
    "`segments`": {
        "cudnn": "segments; it takes rows of one document",
        "tokamax": "segments; it takes rows of one document",
    },
    "`segments`, a pair": {
        "cudnn": "segments; it takes rows of one document",
        "splash": "a pair of segments; it takes one array, for self-attention",
        "tokamax": "segments; it takes rows of one document",
    },
    "`window`, to both sides": {
        "cudnn": "window=9; it needs causal=True and self-attention"
    },
    "`softcap`": {"cudnn": "softcap, which it does not support"},
    "`sinks`": {
        "cudnn": "sinks, which it does not support",
        "tokamax": "sinks, which it does not support",
    },
    "`mask`": {"splash": "an array as mask; it takes causal=True or no mask"},
    "values of another width": {
        "cudnn": "values of width 8; it takes 16, the keys' width"
    },
    "float32": {"cudnn": "dtype float32; it takes float16 or bfloat16"},
}
HAS_TOKAMAX = importlib.util.find_spec("tokamax") is not None
IDS = jnp.asarray(np.repeat(np.array([[1, 1, 2, 0]], np.int32), SEQ // 4, axis=1))


def reference(call: AttentionCall, grad: Any = 0.0) -> tuple[np.ndarray, ...]:
    """The output, and gradients of queries, keys and values, in float64 by NumPy."""
    query, key, value = (
        np.asarray(x, np.float64) for x in (call.query, call.key, call.value)
    )
    groups = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, groups, axis=2) for x in (key, value))
    index, keys = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])[None]
    seen = (keys <= index) if call.causal else np.ones((len(index), keys.size), bool)
    if call.window is not None:
        seen = seen & (abs(keys - index) <= call.window)
    seen = seen[None, None]  # (batch, heads, queries, keys)
    if call.segments is not None:
        own, other = (np.asarray(ids) for ids in call.segments)
        own, other = own[:, None, :, None], other[:, None, None, :]
        seen = seen & (own == other) & (own != 0)
    if call.mask is not None:
        seen = seen & np.asarray(call.mask)
    scores = call.factor * np.einsum("bqhd,bkhd->bhqk", query, key)
    slope: Any = call.factor
    if call.softcap is not None:
        bent = np.tanh(scores / call.softcap)
        scores, slope = call.softcap * bent, (1 - bent**2) * call.factor
    weights = np.where(seen, np.exp(scores), 0.0)
    total = weights.sum(-1, keepdims=True)
    if call.sinks is not None:
        total += np.exp(np.asarray(call.sinks, np.float64))[None, :, None, None]
    weights /= np.where(total == 0, 1.0, total)
    out = np.einsum("bhqk,bkhd->bqhd", weights, value)
    grad = np.broadcast_to(grad, out.shape)
    of_weights = np.einsum("bqhd,bkhd->bhqk", grad, value)
    mean = (weights * of_weights).sum(-1, keepdims=True)
    of_scores = weights * (of_weights - mean) * slope
    dquery = np.einsum("bhqk,bkhd->bqhd", of_scores, key)
    dkeys = (
        np.einsum("bhqk,bqhd->bkhd", *pair).reshape(*call.key.shape[:3], groups, -1)
        for pair in ((of_scores, query), (weights, grad))
    )
    return out, dquery, *(x.sum(3) for x in dkeys)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_implementations_refuse_or_match_xla(implementation: str, name: str):
    """Each implementation either refuses an argument by name or computes correctly.

    CPUs have no cuDNN, so JAX's plain function gets cuDNN's arguments. CPUs have no
    Tokamax kernels either, but Tokamax's function also has an implementation in plain
    operations.
    """
    found = refusal(implementation, name)
    assert found == REFUSED.get(name, {}).get(implementation)
    if found is not None:
        return
    call = call_of(**{**ARGUMENTS[name], "dtype": jnp.float32})
    if implementation == "xla":
        args = {k: v for k, v in vars(call).items() if k not in ("positions",)}
        out = attention(**args, implementation="xla")
    elif implementation == "splash":
        out = splash_attention(call, interpret=True)
    elif implementation == "cudnn":
        out = plain_attention(call, "xla")
    elif HAS_TOKAMAX:
        out = tokamax_attention(call, "xla_chunked")
    else:  # Tokamax needs Python 3.12
        assert "pip install" in next(FUSED["tokamax"].refusals(call))
        return
    wanted = reference(call)[0]
    assert np.max(np.abs(out - wanted)) <= 1e-5 * np.max(np.abs(wanted))


# NumPy computes these arrays without compiling a program for each operation.
SEEN = np.ones((2, 4, 8, 8), bool)
SEEN[1, :, 3] = False
ROW_3_SEES_NOTHING = jnp.asarray(SEEN[:, :1])
HEAD_2_SEES_LESS = np.ones((2, 4, 8, 8), bool)
HEAD_2_SEES_LESS[:, 2, 3] = False
PAIR = (
    jnp.asarray(np.tile(np.array([[1, 1, 2, 2, 3, 3, 0, 0]], np.int32), (2, 1))),
    jnp.asarray(np.ones((2, 8), np.int32)),
)
UNSEEN: dict[str, dict[str, Any]] = {
    "a row of the mask": {"mask": ROW_3_SEES_NOTHING},
    "packed": {"segments": (PAIR[0], PAIR[0]), "causal": True},
    "segments": {"segments": PAIR},
    "later keys only": {
        "mask": jnp.asarray(~np.tri(8, dtype=bool)[None, None]),
        "causal": True,
    },
    "a row for one head": {"mask": jnp.asarray(HEAD_2_SEES_LESS)},
    "the whole mask": {"mask": jnp.asarray(np.zeros((1, 1, 1, 8), bool))},
    "a window": {"mask": ROW_3_SEES_NOTHING, "window": 100},
    "keys outside the window": {"mask": jnp.asarray(~np.eye(8, dtype=bool)[None, None])}
    | {"window": 1, "causal": True},
    "softcap": {"mask": ROW_3_SEES_NOTHING, "softcap": 2.0},
    "sinks": {"mask": ROW_3_SEES_NOTHING, "sinks": jnp.array([0.5, -1.0, 0.0, 2.0])},
}
ANSWERS: dict[str, Any] = {
    "blocks": attention_in_blocks,
    "tokamax": partial(tokamax_attention, implementation="xla_chunked"),
    "one device": None,
    "ring": ContextParallel(4),
    "all_to_all": ContextParallel(4, "all_to_all"),
    "gather": Composite(ContextParallel(2, "gather"), TensorParallel(2)),
}


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (answer, name)
        for answer, run in ANSWERS.items()
        for name in (list(UNSEEN)[:4] if isinstance(run, Strategy) else UNSEEN)
    ],
)
def test_fully_masked_queries_give_zero(answer: str, name: str):
    """Checks outputs and gradients; other queries have their usual results."""
    rules, run, strategy = UNSEEN[name], ANSWERS[answer], None
    if isinstance(run, Strategy):
        run, strategy = None, run

    def call_of(query: jax.Array, key: jax.Array, value: jax.Array) -> AttentionCall:
        return AttentionCall(query=query, key=key, value=value, **rules)

    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(key, (2, 8, heads, 16))
        for key, heads in zip(keys, (4, 2, 2, 4), strict=True)
    ]
    *arrays, grad = arrays
    if answer == "tokamax" and any(FUSED["tokamax"].refusals(call_of(*arrays))):
        return
    layout = None
    if strategy is not None:
        layout = strategy.layout(strategy.make_mesh(jax.devices()[:4]))

    def compute(*arrays: jax.Array) -> jax.Array:
        if run is not None:
            return run(call_of(*arrays))
        with using(layout):
            return attention(*arrays, **rules)

    # Tokamax combines masks of different ranks.
    with jax.numpy_rank_promotion("allow"):
        out, pull = jax.vjp(jax.jit(compute), *arrays)
        found = out, *pull(grad)
    expected = reference(call_of(*arrays), grad)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.max(np.abs(ours - theirs)) <= 2e-6 * max(np.max(np.abs(theirs)), 1)
    sees_nothing = ~expected[0].any(-1)
    assert sees_nothing.any()
    for of_queries in found[:2]:
        assert not np.any(of_queries[sees_nothing])


def test_unsupported_tokamax_kernel_raises():
    reason = "Not supported on cpu" if HAS_TOKAMAX else "which is not installed"
    x = jnp.ones((1, SEQ, 2, 16), jnp.bfloat16)
    with pytest.raises(AttentionKernelError, match="runs on gpu or tpu") as refused:
        attention(x, x, x, implementation="tokamax")
    if HAS_TOKAMAX:
        call = call_of(causal=True)
        with pytest.raises(AttentionKernelError, match=reason):
            tokamax_attention(call)
    else:
        assert reason in str(refused.value)


def test_splash_gives_padding_no_gradient():
    def loss(query: jax.Array, key: jax.Array, run: Any) -> jax.Array:
        call = call_of(dtype=jnp.float32, causal=True, segments=(IDS, IDS))
        call = AttentionCall(**{**vars(call), "query": query, "key": key})
        return (run(call) ** 2).sum()

    call = call_of(dtype=jnp.float32)
    splash = partial(splash_attention, interpret=True)
    of_blocks = lambda call: blockwise_attention(  # noqa: E731
        call.pattern, call.query, call.key, call.value, *call.tokens
    )
    found, wanted = (
        jax.grad(loss, (0, 1))(call.query, call.key, run) for run in (splash, of_blocks)
    )
    for a, b in zip(found, wanted, strict=True):
        assert not a[:, 3 * SEQ // 4 :].any()
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(b))


@pytest.mark.parametrize("packed", [False, True])
def test_long_sequences_never_hold_all_scores(packed: bool):
    """Checks both passes, also of layers in a scan, where JAX would store masks.

    No array of the program has as many elements as the 4096 x 4096 scores.
    """
    seq = 4096
    x = jax.ShapeDtypeStruct((1, seq, 1, 4), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, seq), jnp.int32)

    def loss(x: jax.Array, ids: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            segments = ids if packed else None
            return attention(x, x, x, causal=True, segments=segments), None

        return jax.lax.scan(layer, x, length=2)[0].sum()

    compiled = jax.jit(jax.grad(loss)).lower(x, ids).compile()
    shapes = [
        math.prod(shape.dims)
        for computation in parse(compiled.as_text() or "").computations.values()
        for instruction in computation.instructions.values()
        for shape in instruction.shapes
    ]
    assert max(shapes) <= 512 * 512
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * seq * seq / 8


X = np.zeros((2, 8, 4, 16), np.float32)
LONGER = np.zeros((2, 12, 4, 16), np.float32)
INTS = np.ones((2, 8), np.int32)
WRONG = [
    (
        {"segments": INTS[:, :7]},
        "Segments of queries have shape (2, 7); they must be int (2, 8)",
    ),
    (
        {"segments": INTS.astype(np.float32)},
        "Segments of queries have dtype float32; they must be integers",
    ),
    (
        {"segments": INTS, "key": LONGER, "value": LONGER},
        "needs a pair of arrays, int (2, 8) and",
    ),
    (
        {"window": 0},
        "window is 0; it must be None, for no limit, or an int of at least 1: the "
        "number of keys that a",
    ),
    (
        {"window": 2.5},
        "window is 2.5; it must be None, for no limit, or an int of at least 1",
    ),
    (
        {"softcap": 0.0},
        "softcap is 0.0; it must be None, for no bound, or a number above 0: the bound "
        "of the scores",
    ),
    (
        {"sinks": np.zeros(3, np.float32)},
        "sinks has shape (3,) for 4 query heads; it must be (4,), one number for each",
    ),
    (
        {"mask": np.ones((2, 4, 8, 7), bool)},
        "it must be bool (2, 4, 8, 8), where any dim may also be 1",
    ),
    (
        {"mask": np.ones((1, 1, 8, 8), np.float32)},
        "The mask has shape (1, 1, 8, 8) and dtype float32",
    ),
    ({"key": X[:, :, :3], "value": X[:, :, :3]}, "kv_heads must divide heads"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_invalid_attention_arguments_raise(changes: dict[str, Any], text: str):
    given: dict[str, Any] = {"query": X, "key": X, "value": X} | changes
    arrays: dict[str, Any] = {
        name: jnp.asarray(x) for name, x in given.items() if isinstance(x, np.ndarray)
    }
    with pytest.raises(ValueError, match=re.escape(text)):
        attention(**given | arrays)
