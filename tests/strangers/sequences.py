"""Models that step along a sequence in time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def forecast_loss(model: Any, batch: Any) -> jax.Array:
    return optax.squared_error(model(batch["past"]), batch["future"]).mean()


class Forecaster(nnx.Module):
    """Several bidirectional LSTMs, and a head."""

    def __init__(self, rngs: nnx.Rngs, hidden: int = 16, num_layers: int = 1) -> None:
        def rnn(size: int) -> nnx.RNN:
            return nnx.RNN(nnx.LSTMCell(size, hidden, rngs=rngs), rngs=rngs)

        self.rnns = nnx.List(
            [
                nnx.Bidirectional(rnn(size), rnn(size), rngs=rngs)
                for size in [3] + [2 * hidden] * (num_layers - 1)
            ]
        )
        self.head = nnx.Linear(2 * hidden, 4, rngs=rngs)

    def __call__(self, x: Any):
        for rnn in self.rnns:
            x = rnn(x)
        return self.head(x[:, -1])


class MambaBlock(nnx.Module):
    """A selective state space model: raw parameters, and an associative scan."""

    def __init__(self, dim: int, *, state: int = 4, rngs: nnx.Rngs) -> None:
        inner = 2 * dim
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.in_proj = nnx.Linear(dim, 2 * inner, use_bias=False, rngs=rngs)
        self.conv_weight = nnx.Param(jax.random.normal(rngs.params(), (3, inner)) / 3)
        self.x_proj = nnx.Linear(inner, 2 * state, use_bias=False, rngs=rngs)
        self.dt_proj = nnx.Linear(inner, inner, rngs=rngs)
        self.A_log = nnx.Param(
            jnp.log(jnp.tile(jnp.arange(1.0, state + 1), (inner, 1)))
        )
        self.D = nnx.Param(jnp.ones(inner))
        self.out_proj = nnx.Linear(inner, dim, use_bias=False, rngs=rngs)

    def __call__(self, x):
        u, z = jnp.split(self.in_proj(self.norm(x)), 2, axis=-1)
        padded = jnp.pad(u, ((0, 0), (2, 0), (0, 0)))
        t = u.shape[1]
        u = nnx.silu(sum(padded[:, i : i + t] * self.conv_weight[i] for i in range(3)))
        b, c = jnp.split(self.x_proj(u), 2, axis=-1)
        dt = nnx.softplus(self.dt_proj(u))
        decay = jnp.exp(-dt[..., None] * jnp.exp(self.A_log[...]))
        drive = (dt * u)[..., None] * b[:, :, None]

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, h = jax.lax.associative_scan(combine, (decay, drive), axis=1)
        y = (h * c[:, :, None]).sum(-1) + self.D * u
        return x + self.out_proj(y * nnx.silu(z))


class Mamba(nnx.Module):
    """A plain list of blocks, marked with `nnx.data`, and a separate NumPy constant."""

    def __init__(self, rngs: nnx.Rngs, dim: int = 16, num_layers: int = 2) -> None:
        self.embed = nnx.Linear(3, dim, rngs=rngs)
        self.blocks = nnx.data([MambaBlock(dim, rngs=rngs) for _ in range(num_layers)])
        self.head = nnx.Linear(dim, 4, rngs=rngs)
        self.scale = np.float32(0.5)

    def __call__(self, x):
        x = self.embed(x * self.scale)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, -1])
