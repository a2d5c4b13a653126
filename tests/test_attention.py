"""The contract of attention: what each implementation takes, refuses, and answers."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel.audit.hlo import parse
from nnx_parallel.layers import attention
from nnx_parallel.layers.blockwise import blockwise_attention
from nnx_parallel.layers.kernels import (
    FUSED,
    AttentionCall,
    plain_attention,
    splash_attention,
)

SEQ, HEADS = 128, 2
IDS = jnp.repeat(jnp.array([[1, 1, 2, 0]]), SEQ // 4, axis=1)
# Each argument, and the implementations that refuse it by what they say.
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "causal": ({"causal": True}, {}),
    "segments": (
        {"causal": True, "segments": (IDS, IDS)},
        {"cudnn": "segments; it takes rows of one document"},
    ),
    "pair": (
        {"segments": (IDS, IDS[:, ::-1])},
        {
            "cudnn": "segments; it takes rows of one document",
            "splash": "a pair of segments; it takes those of self-attention",
        },
    ),
    "window": ({"causal": True, "window": 9}, {}),
    "both_sides": (
        {"window": 9},
        {"cudnn": "window=9; it takes one with causal=True, of self-attention"},
    ),
    "softcap": ({"softcap": 2.0}, {"cudnn": "softcap; it takes none"}),
    "sinks": ({"sinks": jnp.array([0.5, -1.0])}, {"cudnn": "sinks; it takes none"}),
    "scale": ({"causal": True, "scale": 0.3}, {}),
    "mask": (
        {"mask": jnp.eye(SEQ, dtype=bool)[None, None].at[..., 3].set(True)},
        {"splash": "an array as mask; it takes causal=True or none"},
    ),
}


def call_of(dtype: Any = jnp.float32, **options: Any) -> AttentionCall:
    rng = np.random.default_rng(0)
    query, key, value = jnp.asarray(rng.normal(size=(3, 1, SEQ, HEADS, 16)), dtype)
    return AttentionCall(query=query, key=key, value=value, **options)


def expected(call: AttentionCall) -> np.ndarray:
    """In float64, by loops that say who sees whom."""
    query, key, value = (
        np.asarray(x, np.float64)[0] for x in (call.query, call.key, call.value)
    )
    scale = 16**-0.5 if call.scale is None else call.scale
    out = np.zeros_like(query)
    keys = np.arange(SEQ)
    for i, head in np.ndindex(SEQ, HEADS):
        seen = np.ones(SEQ, bool) if not call.causal else keys <= i
        if call.window is not None:
            seen = seen & (abs(keys - i) <= call.window)
        if call.segments is not None:
            own, other = (np.asarray(ids)[0] for ids in call.segments)
            seen = seen & (other == own[i]) & (own[i] != 0)
        if call.mask is not None:
            seen = seen & np.asarray(call.mask)[0, 0, i]
        scores = scale * key[:, head] @ query[i, head]
        if call.softcap is not None:
            scores = call.softcap * np.tanh(scores / call.softcap)
        weights = np.where(seen, np.exp(scores), 0.0)
        total = weights.sum()
        total += 0 if call.sinks is None else np.exp(float(call.sinks[head]))
        out[i, head] = weights @ value[:, head] / (total or 1.0)
    return out


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("implementation", ["xla", "splash", "cudnn"])
def test_an_argument_is_honoured_or_refused_by_name(implementation: str, name: str):
    """CPUs have no cuDNN: its arguments are given to JAX's own function there."""
    options, refused = ARGUMENTS[name]
    call = call_of(**options)
    if implementation in FUSED:
        half = call_of(jnp.bfloat16, **options)
        reasons = [*FUSED[implementation].refusals(half)]
        assert reasons == (
            [refused[implementation]] if implementation in refused else []
        )
        if reasons:
            return
    if implementation == "xla":
        args = {k: v for k, v in vars(call).items() if k not in ("positions",)}
        found = attention(**args, implementation="xla")
    elif implementation == "splash":
        found = splash_attention(call, interpret=True)
    else:
        found = plain_attention(call, "xla")
    wanted = expected(call)
    assert np.max(np.abs(found[0] - wanted)) <= 1e-5 * np.max(np.abs(wanted))


def test_splash_gives_padding_no_gradient():
    def loss(query: jax.Array, key: jax.Array, run: Any) -> jax.Array:
        call = call_of(causal=True, segments=(IDS, IDS))
        call = AttentionCall(**{**vars(call), "query": query, "key": key})
        return (run(call) ** 2).sum()

    call = call_of()
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
def test_long_sequences_hold_no_queries_times_keys(packed: bool):
    """Forward and backward, of layers in a scan too, before which JAX would put masks.

    No array of the program is as large as 4096 x 4096.
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


X = jnp.zeros((2, 8, 4, 16))
LONGER = jnp.zeros((2, 12, 4, 16))
INTS = jnp.ones((2, 8), jnp.int32)
WRONG = [
    (
        {"segments": INTS[:, :7]},
        "Segments of queries have shape (2, 7); each token has",
    ),
    ({"segments": INTS * 1.0}, "Segments of queries have dtype float32; ids of"),
    (
        {"segments": INTS, "key": LONGER, "value": LONGER},
        "takes a pair, int (2, 8) and",
    ),
    ({"window": 0}, "window is 0; it is the number of keys that a query sees on a"),
    ({"window": 2.5}, "window is 2.5; it is the number of keys"),
    ({"softcap": 0.0}, "softcap is 0.0; scores are bounded by it: a number above 0"),
    ({"sinks": jnp.zeros(3)}, "Sinks of shape (3,) for 4 query heads; each has its"),
    ({"mask": jnp.ones((2, 4, 8, 7), bool)}, "it must be bool (2, 4, 8, 8), or 1"),
    (
        {"mask": jnp.ones((1, 1, 8, 8))},
        "A mask of shape (1, 1, 8, 8) and dtype float32",
    ),
    ({"key": X[:, :, :3], "value": X[:, :, :3]}, "kv_heads must divide heads"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_what_attention_cannot_take(changes: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=re.escape(text)):
        attention(**{"query": X, "key": X, "value": X, **changes})
