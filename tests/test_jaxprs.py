"""Programs that are cut and run in parts."""

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.programs import is_call, trace


def test_inlining_separates_constants_and_inputs():
    table = np.linspace(1.0, 2.0, 4, dtype=np.float32)

    def function(x: jax.Array) -> jax.Array:
        return jax.jit(jnp.sin)(x) * jax.lax.cumsum(jnp.array(table))

    x = jnp.arange(4.0)
    traced = trace(function, x, inlined=is_call)
    assert "jit" not in {eqn.primitive.name for eqn in traced.eqns}
    assert len(traced.inputs) == len(traced.consts) == 1
    np.testing.assert_allclose(traced(x), function(x), rtol=1e-6)
