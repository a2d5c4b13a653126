"""Models whose layers are made by `nnx.vmap`, and called by Flax's scans and maps."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

LAYERS, WIDTH = 4, 16


class Block(nnx.Module):
    """Two products, batch statistics, dropout, and a raw parameter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.mix = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 8)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nnx.gelu(self.up(self.norm(x @ self.mix[...])))
        return x + self.dropout(self.down(hidden))


def vmapped(rngs: nnx.Rngs, **metadata: Any) -> Block:
    """The blocks as in Flax's guide; without names, nothing marks the `layers` dim."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=0, **metadata)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    return make(rngs)


class Scanned(nnx.Module):
    """`nnx.scan` over `nnx.vmap`'s blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = vmapped(rngs)
        self.head = nnx.Linear(WIDTH, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, block: Block) -> jax.Array:
            return self.call(block, x)

        return self.head(run(x, self.blocks))

    def call(self, block: Block, x: jax.Array) -> jax.Array:
        return block(x)


class Jitted(Scanned):
    """`Scanned` inside `nnx.jit`, which returns all parameters."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.jit(Scanned.__call__)(self, x)


class Rematted(Scanned):
    """`Scanned`, with its activations recomputed."""

    def call(self, block: Block, x: jax.Array) -> jax.Array:
        return nnx.remat(lambda block, x: block(x))(block, x)


class ByHand(Scanned):
    """`jax.lax.scan` over the blocks' state."""

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.blocks)

        def step(x: jax.Array, state: nnx.State) -> tuple[jax.Array, nnx.State]:
            block = nnx.merge(graphdef, state)
            return block(x), nnx.state(block)

        x, state = jax.lax.scan(step, x, state)
        nnx.update(self.blocks, state)
        return self.head(x)


def squares(model: Any, batch: Any) -> jax.Array:
    return (model(batch["rows"]) ** 2).mean()


class Critics(nnx.Module):
    """An ensemble for reinforcement learning; `nnx.vmap` makes and calls members."""

    def __init__(self, rngs: nnx.Rngs, count: int = 4) -> None:
        @nnx.split_rngs(splits=count)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> nnx.Sequential:
            return nnx.Sequential(
                nnx.Linear(WIDTH, 32, rngs=rngs),
                nnx.LayerNorm(32, rngs=rngs),
                nnx.relu,
                nnx.Linear(32, 1, rngs=rngs),
            )

        self.critics = make(rngs)

    def __call__(self, x):
        call = nnx.vmap(lambda critic, x: critic(x), in_axes=(0, None))
        return call(self.critics, x)


def value_loss(model: Any, batch: Any) -> jax.Array:
    values = model(batch["rows"])[..., 0]
    target = jax.lax.stop_gradient(values.min(axis=0)) + batch["rows"].sum(-1)
    return optax.squared_error(values, jnp.broadcast_to(target, values.shape)).mean()
