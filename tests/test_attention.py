"""The contract of attention: what each implementation takes, refuses, and answers."""

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
    HEADS,
    IMPLEMENTATIONS,
    SEQ,
    call_of,
    refusal,
)
from nnx_parallel.audit.hlo import parse
from nnx_parallel.errors import AttentionKernelError
from nnx_parallel.layers import attention
from nnx_parallel.layers.attention_call import AttentionCall
from nnx_parallel.layers.blockwise import blockwise_attention
from nnx_parallel.layers.kernels import (
    FUSED,
    plain_attention,
    splash_attention,
    tokamax_attention,
)

# What the implementations that do not take an argument say of it.
REFUSED: dict[str, dict[str, str]] = {
    "`segments`": {
        "cudnn": "segments; it takes rows of one document",
        "tokamax": "segments; it takes rows of one document",
    },
    "`segments`, a pair": {
        "cudnn": "segments; it takes rows of one document",
        "splash": "a pair of segments; it takes those of self-attention",
        "tokamax": "segments; it takes rows of one document",
    },
    "`window`, to both sides": {
        "cudnn": "window=9; it takes one with causal=True, of self-attention"
    },
    "`softcap`": {"cudnn": "softcap; it takes none"},
    "`sinks`": {
        "cudnn": "sinks; it takes none",
        "tokamax": "sinks; it takes none",
    },
    "`mask`": {"splash": "an array as mask; it takes causal=True or none"},
    "values of another width": {
        "cudnn": "values of width 8; it takes 16, as of the keys"
    },
    "float32": {"cudnn": "dtype float32; it takes float16 or bfloat16"},
}
HAS_TOKAMAX = importlib.util.find_spec("tokamax") is not None
IDS = jnp.repeat(jnp.array([[1, 1, 2, 0]]), SEQ // 4, axis=1)


def expected(call: AttentionCall) -> np.ndarray:
    """In float64, by loops that say who sees whom."""
    query, key, value = (
        np.asarray(x, np.float64)[0] for x in (call.query, call.key, call.value)
    )
    scale = 16**-0.5 if call.scale is None else call.scale
    repeats = HEADS // key.shape[1]
    key, value = (np.repeat(x, repeats, axis=1) for x in (key, value))
    out = np.zeros((SEQ, HEADS, value.shape[-1]))
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
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_cell_of_the_table_is_true(implementation: str, name: str):
    """An argument is refused by name, or the answer is right.

    CPUs have no cuDNN: its arguments are given to JAX's own function. Nor do they have
    kernels of Tokamax, whose function has plain operations too.
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
    else:  # Python 3.11, for which there is none
        assert "pip install" in next(FUSED["tokamax"].refusals(call))
        return
    wanted = expected(call)
    assert np.max(np.abs(out[0] - wanted)) <= 1e-5 * np.max(np.abs(wanted))


def test_what_tokamax_has_no_kernel_for_is_said():
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
