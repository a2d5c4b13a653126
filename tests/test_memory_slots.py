"""Gradients are added at the indices of a chunk's layers."""

import jax.numpy as jnp
import numpy as np

from nnx_parallel.pipeline.memory import Chunks


def test_layer_is_added_to_its_chunk():
    add = Chunks(2).adder(jnp.int32(1))
    totals = {"w": jnp.ones((4, 2))}
    for layer, value in ((1, 5.0), (0, 3.0), (1, 0.5)):
        totals = add(totals, {"w": jnp.full(2, value)}, jnp.int32(layer))
    expected = np.array([[1, 1], [1, 1], [4, 4], [6.5, 6.5]])
    np.testing.assert_array_equal(totals["w"], expected)


def test_stage_without_slot_adds_nothing():
    add = Chunks(2).adder(jnp.int32(-1))
    totals = add({"w": jnp.ones((4, 2))}, {"w": jnp.full(2, jnp.nan)}, jnp.int32(1))
    np.testing.assert_array_equal(totals["w"], np.ones((4, 2)))


def test_sums_keep_dtype_of_totals():
    """In bfloat16, 256 + 1 would be 256."""
    add = Chunks(1).adder(jnp.int32(0))
    one = {"w": jnp.ones(2, jnp.bfloat16)}
    totals = add({"w": jnp.full((1, 2), 256.0)}, one, jnp.int32(0))
    assert totals["w"].dtype == jnp.float32
    np.testing.assert_array_equal(totals["w"], np.full((1, 2), 257.0))
