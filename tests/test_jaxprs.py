"""Programs that are cut, partly run, and interpreted."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel.programs import Fold, Origins, is_call, trace


def test_inlining_separates_constants_and_inputs():
    table = np.linspace(1.0, 2.0, 4, dtype=np.float32)

    def function(x: jax.Array) -> jax.Array:
        return jax.jit(jnp.sin)(x) * jax.lax.cumsum(jnp.array(table))

    x = jnp.arange(4.0)
    traced = trace(function, x, inlined=is_call)
    assert "jit" not in {eqn.primitive.name for eqn in traced.eqns}
    assert len(traced.inputs) == len(traced.consts) == 1
    np.testing.assert_allclose(traced(x), function(x), rtol=1e-6)


def swap_in_scan(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    """The third carried value depends on ``a`` only after three iterations."""

    def step(carry: tuple, x: jax.Array) -> tuple:
        first, second, third = carry
        return (a, first, second), third + x

    return jax.lax.scan(step, (b, b, b), jnp.stack([c, c]))


def add_in_while(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
    return jax.lax.while_loop(
        lambda x: x[0] < a, lambda x: (x[0] + b, 2 * x[1]), (b, c)
    )


@jax.custom_vjp
def sum_and_count(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return a * b, b + 1


sum_and_count.defvjp(lambda a, b: (sum_and_count(a, b), a), lambda a, g: (g[0], a))

# The arguments that each output depends on.
ORIGINS: dict[str, tuple[Callable, list[str]]] = {
    "literal": (lambda a, b, c: (jnp.float32(1), a * 2), ["", "a"]),
    "call": (lambda a, b, c: jax.jit(lambda x, y: (y, x))(a, b), ["b", "a"]),
    "remat": (lambda a, b, c: jax.checkpoint(jnp.sin)(a + c), ["ac"]),
    "custom_vjp": (lambda a, b, c: sum_and_count(a, b), ["ab", "b"]),
    "branches": (
        lambda a, b, c: jax.lax.cond(a > 0, lambda: (b, 1.0), lambda: (b + c, 2.0)),
        ["abc", "a"],
    ),
    "scan": (swap_in_scan, ["ab", "ab", "ab", "abc"]),
    "while": (add_in_while, ["ab", "abc"]),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_origins_of_outputs(name: str) -> None:
    function, expected = ORIGINS[name]
    traced = trace(function, *[jax.ShapeDtypeStruct((), jnp.float32)] * 3)
    found = Origins()([frozenset("a"), frozenset("b"), frozenset("c")], traced)
    assert ["".join(sorted(x)) for x in jax.tree.leaves(found)] == expected


class Names(Fold):
    """Folds several programs at once; a constant lists its number in each."""

    def constant(self, *numbers: Any) -> str:
        return str([float(x) for x in numbers])

    def apply(self, inputs: list, *eqns: Any) -> list:
        return [f"{eqns[0].primitive.name}({', '.join(inputs)})"]


def test_programs_are_read_side_by_side() -> None:
    def scaled(size: int) -> Any:
        return trace(lambda x: x.sum() / x.size, jnp.zeros(size))

    two, four = scaled(2), scaled(4)
    assert Names()(["x"], two, four) == "div(reduce_sum(x), [2.0, 4.0])"
    longer = trace(lambda x: jnp.sin(x.sum()) / x.size, jnp.ones(4))
    with pytest.raises(ValueError, match="zip"):
        Names()(["x"], two, longer)
