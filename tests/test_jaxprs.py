"""Programs that are cut and run in parts."""

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.layers.jaxprs import inline, run, trace


def test_inlining_keeps_constants_apart_from_inputs():
    table = np.linspace(1.0, 2.0, 4, dtype=np.float32)

    def function(x: jax.Array) -> jax.Array:
        return jax.jit(jnp.sin)(x) * jax.lax.cumsum(jnp.array(table))

    x = jnp.arange(4.0)
    jaxpr, consts, _ = trace(function, x)
    inlined = inline(jaxpr)
    assert "jit" not in {eqn.primitive.name for eqn in inlined.eqns}
    assert len(inlined.invars) == 1
    assert len(inlined.constvars) == len(consts) == 1
    env = dict(zip((*inlined.constvars, *inlined.invars), (*consts, x), strict=True))
    (found,) = run(inlined.eqns, inlined.outvars, env)
    np.testing.assert_allclose(found, function(x), rtol=1e-6)
