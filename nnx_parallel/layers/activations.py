"""Nonlinearities between the kernels of an MLP, by name.

References:
    [1] Shazeer, "GLU Variants Improve Transformer", 2020,
    https://arxiv.org/abs/2002.05202
    [2] OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.2,
    https://arxiv.org/abs/2508.10925
"""

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

Activation = Literal["gelu", "swiglu", "geglu", "clamped_swiglu"]
"""Nonlinearities of an MLP; all except ``gelu`` have a gate, which is a third kernel.

- ``gelu``: ``gelu(up)``, approximated by a tanh.
- ``swiglu``: ``silu(gate) * up`` [1].
- ``geglu``: ``gelu(gate) * up`` [1].
- ``clamped_swiglu``: ``gate * sigmoid(1.702 * gate) * (up + 1)``, where the gate is at
  most 7 and up is between -7 and 7 [2].
"""

Activate = Callable[..., Array]
"""A function of the outputs of the kernels up and gate, or of up only for ``gelu``."""


def _swiglu(up: Array, gate: Array) -> Array:
    return jax.nn.silu(gate) * up


def _geglu(up: Array, gate: Array) -> Array:
    return jax.nn.gelu(gate) * up


def _clamped_swiglu(up: Array, gate: Array) -> Array:
    gate = jnp.minimum(gate, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -7.0, 7.0) + 1.0)


ACTIVATIONS: Mapping[Activation, Activate] = {
    "gelu": jax.nn.gelu,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "clamped_swiglu": _clamped_swiglu,
}
