"""`sharded_jit`: placement of inputs and outputs, and the context of a trace."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import FSDP, Composite, TensorParallel, constrain, make_mesh
from nnx_parallel.sharding import (
    PathRules,
    PolicyRules,
    active_layout,
    active_mesh,
    annotate,
    shard,
    sharded_jit,
)
from tests.jitting import RULES, Counted, spec


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"data": 2, "fsdp": 4})


# Placement


def test_inputs_and_outputs_follow_rules_and_specs(mesh: Mesh) -> None:
    @sharded_jit(
        mesh=mesh,
        in_shardings=(RULES, P("data")),
        out_shardings=(RULES, {"mean": P(), "rows": P(("data", "fsdp"))}),
    )
    def step(params: dict, batch: jax.Array) -> tuple[dict, dict]:
        """Advances one step."""
        out = batch @ params["w"]
        return jax.tree.map(jnp.sin, params), {"mean": out.mean(), "rows": out}

    params = {"w": np.ones((4, 16), np.float32), "b": np.ones(16, np.float32)}
    new, metrics = step(params, np.ones((8, 4), np.float32))
    assert new["w"].sharding == NamedSharding(mesh, P("fsdp"))
    assert new["b"].sharding == NamedSharding(mesh, P("fsdp"))
    assert metrics["mean"].sharding == NamedSharding(mesh, P())
    assert metrics["rows"].sharding == NamedSharding(mesh, P(("data", "fsdp")))
    assert (step.__name__, step.__doc__) == ("step", "Advances one step.")
    np.testing.assert_allclose(metrics["rows"], 4.0)


def test_none_keeps_placement_of_argument(mesh: Mesh) -> None:
    x = shard(np.ones((8, 8)), P(None, "fsdp"), mesh)
    identity = sharded_jit(lambda x, y: (x, y), mesh, in_shardings=(None, P("data")))
    found, _ = identity(x, np.ones(8))
    assert spec(found) == P(None, "fsdp")


def test_in_shardings_apply_by_name_or_to_all(mesh: Mesh) -> None:
    def function(x: jax.Array, y: jax.Array, *more: jax.Array, z: jax.Array) -> tuple:
        return x, y, more, z

    ones = np.ones((8, 8))
    named = {"y": P("data"), "z": P("fsdp"), "more": P(None, "data")}
    _, y, (first, second), z = sharded_jit(function, mesh, in_shardings=named)(
        ones, ones, ones, ones, z=ones
    )
    specs = [spec(array) for array in (y, first, second, z)]
    assert specs == [P("data"), P(None, "data"), P(None, "data"), P("fsdp")]
    everywhere = sharded_jit(function, mesh, in_shardings=P("fsdp"))
    x, y, _, z = everywhere(ones, ones, z=ones)
    assert {spec(x), spec(y), spec(z)} == {P("fsdp")}


def test_keyword_order_does_not_retrace(mesh: Mesh) -> None:
    function = Counted(lambda x, *, y, z: x + y - z)
    jitted = sharded_jit(function.__call__, mesh, in_shardings=P("fsdp"))
    x = np.arange(8.0, dtype=np.float32)
    first = jitted(x, y=2 * x, z=x)
    np.testing.assert_array_equal(first, jitted(x, z=x, y=2 * x))
    np.testing.assert_array_equal(first, 2 * x)
    assert function.traces == 1


def test_constrain_args_moves_arguments(mesh: Mesh) -> None:
    elsewhere = shard(np.ones((8, 8), np.float32), P(None, "fsdp"), mesh)

    def function(x: jax.Array, scale: float) -> jax.Array:
        return x * scale

    required = sharded_jit(function, mesh, in_shardings=(P("data"), None))
    with pytest.raises(ValueError, match="does not match the sharding"):
        required(elsewhere, 2.0)
    constrained = sharded_jit(function, mesh, constrain_args=(P("data"), None))
    assert spec(constrained(elsewhere, 2.0)) == P("data")
    by_name = sharded_jit(function, mesh, constrain_args={"x": RULES})
    assert spec(by_name(elsewhere, scale=2.0)) == P("fsdp")


def test_donated_arguments_are_deleted(mesh: Mesh) -> None:
    def step(params: jax.Array, batch: jax.Array) -> jax.Array:
        return params + batch

    jitted = sharded_jit(
        step,
        mesh,
        in_shardings=RULES,
        out_shardings=RULES,
        donate_argnames="params",
    )
    params, batch = shard([np.ones((8, 8)), np.ones((8, 8))], RULES, mesh)
    new = jitted(params, batch)
    assert params.is_deleted()
    assert not batch.is_deleted()
    jitted(new, batch=batch)
    assert new.is_deleted()


# Static arguments


def test_undeclared_static_callable_raises(mesh: Mesh) -> None:
    def function(x: jax.Array, f: Callable, y: jax.Array) -> jax.Array:
        return f(x) + y

    ones = np.ones(8, np.float32)
    declared = sharded_jit(
        function,
        mesh,
        in_shardings=(P("fsdp"), P()),
        out_shardings=RULES,
        static_argnames="f",
    )
    for out in (declared(ones, jnp.negative, ones), declared(ones, y=ones, f=jnp.sin)):
        assert spec(out) == P("fsdp")
    np.testing.assert_allclose(declared(ones, jnp.negative, ones), 0.0)
    np.testing.assert_allclose(declared(ones, jnp.square, ones), 2.0)
    for placements in (None, P(), RULES):
        undeclared = sharded_jit(function, mesh, in_shardings=placements)
        with pytest.raises(TypeError):
            undeclared(ones, jnp.negative, ones)
    message = "`f` is a function, not an array, and cannot be placed on a mesh. Leave"
    with pytest.raises(TypeError, match=re.escape(message)):
        sharded_jit(function, mesh, in_shardings=P())(ones, lambda x: x, ones)


def test_each_static_value_compiles_separately(mesh: Mesh) -> None:
    counted = Counted(lambda x, n: jnp.ones((n, 4)) * x)
    jitted = sharded_jit(
        lambda x, n: counted(x, n), mesh, out_shardings=RULES, static_argnames=("n",)
    )
    assert spec(jitted(1.0, 2)) == P(None, "fsdp")
    assert spec(jitted(1.0, 8)) == P("fsdp")
    assert spec(jitted(2.0, n=2)) == P(None, "fsdp")
    for _ in range(2):
        jitted(3.0, 2)
        jitted(3.0, 8)
        jitted(3.0, n=2)
    assert counted.traces == 3
    with pytest.raises(ValueError, match=r"static argument among \('n',\) cannot"):
        jitted(1.0, [2])


# Methods, stages and keywords, as in `jax.jit`


class Scale:
    """A value with a compiled method."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @sharded_jit(
        mesh=make_mesh({"data": 2, "fsdp": 4}),
        in_shardings={"x": P("fsdp")},
        out_shardings=RULES,
        static_argnames="self",
    )
    def apply(self, x: jax.Array, *, shift: float = 0.0) -> jax.Array:
        """Scales and shifts."""
        return self.factor * x + shift


def test_method_is_bound_to_instance() -> None:
    two, three = Scale(2.0), Scale(3.0)
    x = np.ones(8, np.float32)
    assert spec(two.apply(x)) == P("fsdp")
    np.testing.assert_array_equal(two.apply(x, shift=1.0), 3.0 * x)
    np.testing.assert_array_equal(three.apply(x), 3.0 * x)
    assert Scale.apply.__doc__ == "Scales and shifts."
    np.testing.assert_array_equal(Scale.apply(two, x), 2.0 * x)


def test_compiled_call_keeps_keywords(mesh: Mesh) -> None:
    def function(x: jax.Array, *, a: jax.Array, n: int = 1, z: jax.Array) -> tuple:
        return x - a, a - z, n * z

    jitted = sharded_jit(
        function, mesh, in_shardings={"a": P("fsdp")}, static_argnames="n"
    )
    plain = jax.jit(function, static_argnames="n")
    x, a, z = (np.full(8, value, np.float32) for value in (1, 2, 3))
    ours = jitted.lower(x, z=z, n=2, a=a).compile()
    theirs = plain.lower(x, z=z, n=2, a=a).compile()
    assert ours.in_tree == theirs.in_tree
    for found, wanted in zip(ours(x, z=z, a=a), theirs(x, z=z, a=a), strict=True):
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(TypeError, match="Function compiled with input pytree"):
        ours(x, a, z)


def test_trace_and_eval_shape_compile_nothing(mesh: Mesh) -> None:
    counted = Counted(lambda x, *, y: (x @ y, y.sum()))
    jitted = sharded_jit(counted.__call__, mesh, in_shardings={"x": P("fsdp")})
    x, y = np.ones((8, 4), np.float32), np.ones((4, 2), np.float32)
    shapes = jitted.eval_shape(x, y=y)
    assert [out.shape for out in shapes] == [(8, 2), ()]
    traced = jitted.trace(x, y=y)
    assert [aval.shape for aval in traced.jaxpr.in_avals] == [(8, 4), (4, 2)]
    jitted(x, y=y)
    assert counted.traces == 1
    jitted.clear_cache()
    jitted(x, y=y)
    assert counted.traces == 2


@pytest.mark.parametrize("first", ["weak", "strong"])
def test_placement_does_not_depend_on_earlier_calls(first: str, mesh: Mesh) -> None:
    """A weak scalar keeps bfloat16; a strong scalar promotes the output to float32."""
    x = np.ones((8, 4), jnp.bfloat16)
    scalars = {"weak": 2.0, "strong": np.float32(2.0)}
    by_dtype = PolicyRules(
        lambda info: P("fsdp" if info.dtype == jnp.bfloat16 else "data")
    )
    jitted = sharded_jit(lambda x, s: x * s, mesh, out_shardings=by_dtype)
    order = [first, *scalars, *scalars]
    found = {name: spec(jitted(x, scalars[name])) for name in order}
    assert found == {"weak": P("fsdp"), "strong": P("data")}


@pytest.mark.parametrize("order", [1, -1])
def test_placement_does_not_depend_on_array_type(order: int, mesh: Mesh) -> None:
    """NumPy's float64 becomes float32 on a device, so rules see float32."""
    by_dtype = PolicyRules(
        lambda info: P("fsdp" if info.dtype == jnp.float32 else "data")
    )
    ones = [np.ones(8), np.ones(8, np.float32), jnp.ones(8), np.ones(8, np.int64)]
    jitted = sharded_jit(lambda x: x + 1, mesh, constrain_args=by_dtype)
    found = [spec(jitted(x)) for x in ones[::order]][::order]
    assert found == [P("fsdp")] * 3 + [P("data")]
    scalars = [2, 2.0, True, 2j, np.float64(2), np.float32(2), np.int8(2), jnp.ones(())]
    wanted = [spec(_scaled(mesh, by_dtype)(scalar)) for scalar in scalars]
    jitted = _scaled(mesh, by_dtype)
    for _ in range(2):
        assert [spec(jitted(s)) for s in scalars[::order]][::order] == wanted
    assert set(wanted) == {P("fsdp"), P("data")}


def _scaled(mesh: Mesh, rules: PolicyRules) -> Callable:
    half = jnp.ones(8, jnp.bfloat16)
    return sharded_jit(lambda s: half * s, mesh, out_shardings=rules)


# Active context


def test_mesh_is_active_while_tracing(mesh: Mesh) -> None:
    def function(x: jax.Array) -> jax.Array:
        assert active_mesh() is mesh
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
        return jax.lax.with_sharding_constraint(x, P("fsdp"))

    assert spec(sharded_jit(function, mesh)(np.ones(8))) == P("fsdp")
    assert active_mesh() is None
    assert active_layout() is None
    assert jax.sharding.get_abstract_mesh().empty


def test_strategy_activates_its_names() -> None:
    strategy = Composite(FSDP(4), TensorParallel(2))

    @sharded_jit(mesh=strategy, in_shardings=P("fsdp"))
    def function(x: jax.Array) -> jax.Array:
        return constrain(jnp.sin(x), "batch", "mlp")

    assert spec(function(np.ones((8, 8)))) == P("fsdp", "tensor")


def test_annotations_are_bound_by_caller(mesh: Mesh) -> None:
    def function(x: jax.Array) -> dict:
        hidden = annotate({"h": jnp.sin(x)}, "hidden")
        assert annotate(x, "unbound") is x
        return jax.tree.map(jnp.cos, hidden)

    x = np.ones((8, 8), np.float32)
    for placement in (P(None, "data"), PathRules((r"h", P(None, "data")))):
        jitted = sharded_jit(function, mesh, annotations={"hidden": placement})
        assert spec(jitted(x)["h"]) == P(None, "data")
    np.testing.assert_allclose(jitted(x)["h"], function(jnp.asarray(x))["h"], rtol=1e-6)
    message = (
        "Annotations ['hiden'] are not used. Names that the function gives with "
        "annotate: ['hidden', 'unbound']."
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        sharded_jit(function, mesh, annotations={"hiden": P()})(x)
