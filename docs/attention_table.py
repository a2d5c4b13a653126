"""The table of attention's implementations, and the arguments that each accepts."""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.layers import Implementation
from nnx_parallel.layers.attention.kernels import FUSED, AttentionCall

SEQ, HEADS, HEAD_DIM = 128, 2, 16
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
# NumPy computes these arrays without compiling a program for each operation.
_IDS = np.repeat(np.array([[1, 1, 2, 0]], np.int32), SEQ // 4, axis=1)
_PAIR = jnp.asarray(_IDS), jnp.asarray(_IDS[:, ::-1])
_SEEN = np.eye(SEQ, dtype=bool)[None, None] | (np.arange(SEQ) == 3)
# A call with each argument, by the argument's name on the page.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "`causal`": {"causal": True},
    "`segments`": {"causal": True, "segments": (_PAIR[0], _PAIR[0])},
    "`segments`, a pair": {"segments": _PAIR},
    "`window`, causal": {"causal": True, "window": 9},
    "`window`, to both sides": {"window": 9},
    "`softcap`": {"softcap": 2.0},
    "`sinks`": {"sinks": jnp.array([0.5, -1.0])},
    "`scale`": {"causal": True, "scale": 0.3},
    "`mask`": {"mask": jnp.asarray(_SEEN)},
    "one key head for two heads": {"kv_heads": 1},
    "values of another width": {"value_dim": 8},
    "float32": {"dtype": jnp.float32},
}


def call_of(
    *,
    dtype: Any = jnp.bfloat16,
    kv_heads: int = HEADS,
    value_dim: int = HEAD_DIM,
    **options: Any,
) -> AttentionCall:
    """A call of one row with random operands."""
    sizes = [(HEADS, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, value_dim)]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    query, key, value = (
        jax.random.normal(key, (1, SEQ, *size), dtype)
        for key, size in zip(keys, sizes, strict=True)
    )
    return AttentionCall(query=query, key=key, value=value, **options)


def refusal(implementation: str, argument: str) -> str | None:
    """Returns why an implementation refuses an argument; ``None`` if it accepts it."""
    if implementation not in FUSED:
        return None
    refusals = FUSED[implementation].refusals
    always = {*refusals(call_of())}  # tokamax, where it is not installed
    found = [
        reason
        for reason in refusals(call_of(**ARGUMENTS[argument]))
        if reason not in always
    ]
    return "; ".join(found) or None


def table() -> list[str]:
    """Returns a Markdown table with a row for each argument."""
    lines = [
        f"| | {' | '.join(f'`{name}`' for name in IMPLEMENTATIONS)} |",
        "|---" * (len(IMPLEMENTATIONS) + 1) + "|",
        "| runs on | any | NVIDIA GPUs | TPUs | GPUs and TPUs |",
    ]
    for argument in ARGUMENTS:
        cells = (refusal(name, argument) for name in IMPLEMENTATIONS)
        marks = " | ".join("yes" if cell is None else f"no: {cell}" for cell in cells)
        lines.append(f"| {argument} | {marks} |")
    return lines
