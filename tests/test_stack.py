"""A `Stack` computes the same as its blocks in sequence."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import FSDP
from nnx_parallel.errors import StackError
from nnx_parallel.layers import Remat, Stack, default_remat
from nnx_parallel.sharding import using

NUM_LAYERS = 3


class Block(nnx.Module):
    """A linear layer, statistics, dropout, and a residual connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x + scale * self.dropout(nnx.gelu(self.norm(self.linear(x))))


class Cached(nnx.Module):
    """A block that reads and replaces a cached value."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array, factor: float, slot: dict) -> tuple:
        out = self.linear(x) * factor + slot["sum"]
        return out, {"sum": slot["sum"] + x, "count": slot["count"] + 1}


def blocks_one_by_one(seed: int) -> list[Block]:
    """The blocks of a stack with this seed, as separate modules."""
    keys = jax.random.split(nnx.Rngs(seed).params(), NUM_LAYERS)
    return [Block(nnx.Rngs(key)) for key in keys]


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (16, 8))


def arrays(model: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(nnx.state(model))
    return [np.asarray(leaf) for leaf in map(key_words, leaves)]


def key_words(x: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_stack_matches_blocks_one_by_one(x: jax.Array, remat: Remat) -> None:
    stack: Any = Stack(Block, NUM_LAYERS, remat=remat, rngs=nnx.Rngs(4))
    blocks = blocks_one_by_one(4)
    for _ in range(2):  # the second call has new statistics and dropout counts
        expected = x
        for block in blocks:
            expected = block(expected, 0.5)
        np.testing.assert_allclose(stack(x, 0.5), expected, rtol=1e-5, atol=1e-6)
    stacked = [np.stack(layers) for layers in zip(*map(arrays, blocks), strict=True)]
    for found, wanted in zip(arrays(stack.layer), stacked, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert (np.asarray(stack.layer.dropout.rngs.count[...]) == 2).all()
    assert stack.layer.norm.mean[...].shape == (NUM_LAYERS, 8)


def test_blocks_and_dropout_masks_differ(x: jax.Array) -> None:
    stack: Any = Stack(Block, 2, rngs=nnx.Rngs(0))
    first, second = np.asarray(stack.layer.linear.kernel[...])
    assert (first != second).any()
    keys = jax.random.key_data(stack.layer.dropout.rngs.key[...])
    assert (keys[0] != keys[1]).any()
    assert (np.asarray(stack(x)) != np.asarray(stack(x))).any()


def test_evaluation_is_deterministic_and_keeps_statistics(x: jax.Array) -> None:
    stack = Stack(Block, NUM_LAYERS, rngs=nnx.Rngs(4))
    stack.eval()
    before = arrays(stack)
    assert (np.asarray(stack(x)) == np.asarray(stack(x))).all()
    for found, wanted in zip(arrays(stack), before, strict=True):
        assert found.tobytes() == wanted.tobytes()


def gradients(stack: Stack, x: jax.Array) -> Any:
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)

    @jax.jit
    def run(params: nnx.State) -> nnx.State:
        def loss(params: nnx.State) -> jax.Array:
            return (nnx.merge(graphdef, params, rest, copy=True)(x) ** 2).mean()

        return jax.grad(loss)(params)

    return run(params)


def test_remat_does_not_change_gradients(x: jax.Array) -> None:
    found = {
        remat: gradients(Stack(Block, 2, remat=remat, rngs=nnx.Rngs(0)), x)
        for remat in ("none", "dots", "full")
    }
    with default_remat("full"):
        found["default"] = gradients(Stack(Block, 2, rngs=nnx.Rngs(0)), x)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(found["none"]))
    assert largest > 0
    for grads in found.values():
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(found["none"]), strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a, b, atol=1e-6 * largest)


def test_remat_keeps_fewer_residuals(x: jax.Array) -> None:
    def num_kept(remat: Remat) -> int:
        stack = Stack(Block, NUM_LAYERS, remat=remat, rngs=nnx.Rngs(0))
        graphdef, params, rest = nnx.split(stack, nnx.Param, ...)

        def run(params: nnx.State) -> jax.Array:
            return nnx.merge(graphdef, params, rest, copy=True)(x)

        kept = jax.eval_shape(lambda params: jax.vjp(run, params)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(kept))

    none, dots, full = map(num_kept, ("none", "dots", "full"))
    assert none > dots > full >= NUM_LAYERS * x.size


def test_every_block_has_separate_slot(x: jax.Array) -> None:
    stack: Any = Stack(Cached, NUM_LAYERS, rngs=nnx.Rngs(0))
    slots = {
        "sum": jax.random.normal(jax.random.key(1), (NUM_LAYERS, 16, 8)),
        "count": jnp.arange(NUM_LAYERS),
    }
    out, found = stack(x, 2.0, scanned=slots)
    expected, sums = x, []
    for i in range(NUM_LAYERS):
        sums.append(slots["sum"][i] + expected)
        kernel, bias = (stack.layer.linear.kernel[i], stack.layer.linear.bias[i])
        expected = (expected @ kernel + bias[None]) * 2.0 + slots["sum"][i]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["sum"], np.stack(sums), rtol=1e-5, atol=1e-5)
    assert list(found["count"]) == [1, 2, 3]


def test_all_arrays_gain_layers_name() -> None:
    stack: Any = Stack(Block, 2, rngs=nnx.Rngs(0))
    specs: Any = FSDP(min_size=0).specs(nnx.state(stack))
    assert stack.layer.linear.kernel.get_metadata()["out_sharding"] == ("layers",)
    assert tuple(specs["layer"]["linear"]["kernel"].get_value()) == (None, "fsdp")


def test_placed_stack_matches_unplaced_stack(x: jax.Array) -> None:
    stack = Stack(Block, 2, rngs=nnx.Rngs(0))
    stack.eval()
    expected = stack(x)
    strategy = FSDP(min_size=0)
    placed = strategy.merge(*strategy.split(stack))

    @jax.jit
    def run(stack: nnx.Module, x: jax.Array) -> jax.Array:
        with using(strategy.layout()):
            return stack(x)

    np.testing.assert_allclose(run(placed, x), expected, rtol=1e-5, atol=1e-6)


class Tied(nnx.Module):
    """One Variable in two places, which is not allowed."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.down.kernel = self.up.kernel


def test_shared_variable_within_block_raises() -> None:
    message = (
        "A block of the stack holds the same Variable in several places: ['up.kernel'] "
        "also occur elsewhere in the block. Stacking would silently untie them. Give "
        "each module a separate Variable, or keep the shared Variable outside the "
        "stack and pass it to the blocks as an argument."
    )
    with pytest.raises(StackError, match=re.escape(message)):
        Stack(Tied, 2, rngs=nnx.Rngs(0))


def test_shared_variable_outside_block_raises() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.LayerNorm(8, rngs=rngs)

            def make_block(rngs: nnx.Rngs) -> nnx.Module:
                return nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), self.norm)

            self.blocks = Stack(make_block, 2, rngs=rngs)

    message = (
        "A block of the stack holds Variables from outside the block: "
        "['layers.1.bias', 'layers.1.scale']. Each stacked block would silently train "
        "a separate copy."
    )
    for build in (lambda: Model(nnx.Rngs(0)), lambda: FSDP().describe(Model)):
        with pytest.raises(StackError, match=re.escape(message)):
            build()


def test_blocks_may_share_a_constant() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = nnx.Variable(jnp.arange(8.0))

            def make_block(rngs: nnx.Rngs) -> nnx.Module:
                block = nnx.Linear(8, 8, rngs=rngs)
                block.table = self.table  # pyright: ignore[reportAttributeAccessIssue]
                return block

            self.blocks = Stack(make_block, 2, rngs=rngs)

    stacked: Any = Model(nnx.Rngs(0)).blocks.layer
    np.testing.assert_array_equal(stacked.table[...], np.tile(np.arange(8.0), (2, 1)))


def test_empty_stack_and_unknown_policy_raise() -> None:
    message = "num_layers=0. A Stack needs at least 1 layer."
    with pytest.raises(StackError, match=re.escape(message)):
        Stack(Block, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Unknown remat policy 'half'"):
        Stack(Block, 2, remat="half", rngs=nnx.Rngs(0))  # pyright: ignore[reportArgumentType]
