"""`sharded_jit` traces a signature once, and compiles the same program as `jax.jit`."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.sharded_jit import CASES, by_hand, by_rules, program_text
from benchmarks.sharded_jit import RULES as CASE_RULES
from benchmarks.sharded_jit import Counted as CountedStep
from nnx_parallel import (
    audit,
    constrain,
    make_mesh,
)
from nnx_parallel.errors import IndivisibleDimError
from nnx_parallel.sharding import (
    active_mesh,
    shard,
    sharded_jit,
)
from tests.jitting import RULES, Counted, spec
from tests.steps import QUICKLY


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"data": 2, "fsdp": 4})


@pytest.mark.parametrize(
    "out_shardings", [None, P(), RULES], ids=["none", "P", "rules"]
)
def test_signature_is_traced_once(out_shardings: Any, mesh: Mesh) -> None:
    counted = Counted(lambda params, batch: jax.tree.map(lambda w: w + batch, params))
    jitted = sharded_jit(
        lambda params, batch: counted(params, batch),
        mesh,
        in_shardings=(RULES, P()),
        out_shardings=out_shardings,
    )
    small = {"w": np.ones((8, 4), np.float32)}
    large = {"w": np.ones((3, 16), np.float32)}
    more = {"w": np.ones((8, 4), np.float32), "b": np.ones((4, 4), np.float32)}
    batch = np.ones((), np.float32)
    for traces, params in enumerate((small, large, more), 1):
        out = [jitted(params, batch) for _ in range(3)][-1]
        assert counted.traces == traces
        if out_shardings is RULES:
            assert [spec(x) for x in out.values()] == [
                P(None, "fsdp") if x.shape[0] < x.shape[1] else P("fsdp")
                for x in out.values()
            ]
    for _ in range(20):
        for params in (small, large, more):
            jitted(params, batch)
    jitted.lower(small, batch)
    assert counted.traces == 3
    jitted({"w": np.ones((8, 4), np.int32)}, batch)
    assert counted.traces == 4


@jax.tree_util.register_pytree_node_class
class OfArrays:
    """A user's pytree node that accepts only arrays, not shapes or shardings."""

    def __init__(self, x: Any) -> None:
        self.x = jnp.asarray(x)

    def tree_flatten(self) -> tuple:
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple) -> "OfArrays":
        return cls(*children)


@pytest.mark.parametrize("out_shardings", [None, P()], ids=["none", "P"])
def test_only_rules_need_output_shapes(out_shardings: P, mesh: Mesh) -> None:
    x = np.ones(8, np.float32)
    jitted = sharded_jit(OfArrays, mesh, out_shardings=out_shardings)
    np.testing.assert_array_equal(jitted(x).x, x)
    plain = sharded_jit(
        lambda x: x if x.sum() else None, mesh, out_shardings=out_shardings
    )
    with jax.disable_jit():  # Python code sees values, as in a debugger
        np.testing.assert_array_equal(plain(x), x)


def test_lower_takes_shapes(mesh: Mesh) -> None:
    counted = Counted(lambda x, *, y: x @ y)
    jitted = sharded_jit(
        counted.__call__, mesh, in_shardings={"x": RULES}, out_shardings=P("data")
    )
    x, y = jax.ShapeDtypeStruct((8, 4), "float32"), np.ones((4, 2), np.float32)
    lowered = jitted.lower(x, y=y)
    assert spec_of_output(lowered) == P("data")
    jitted(np.ones((8, 4), np.float32), y=y)
    assert counted.traces == 1


def spec_of_output(lowered: jax.stages.Lowered) -> P:
    return lowered.compile().output_shardings.spec


def test_failed_trace_keeps_other_traces(mesh: Mesh) -> None:
    def function(x: jax.Array) -> jax.Array:
        if x.shape[0] == 12:
            raise RuntimeError("twelve")
        return jnp.sin(x)

    jitted = sharded_jit(function, mesh, in_shardings=RULES, out_shardings=P("fsdp"))
    good = np.ones((8, 4), np.float32)
    assert spec(jitted(good)) == P("fsdp")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="twelve"):
            jitted(np.ones((12, 4), np.float32))
        with pytest.raises(
            IndivisibleDimError, match=r"`output` with global shape \(6"
        ):
            jitted(np.ones((6, 4), np.float32))
    assert spec(jitted(good)) == P("fsdp")


def test_threads_trace_once_and_keep_meshes(mesh: Mesh) -> None:
    other = make_mesh({"fsdp": 8})
    seen, errors = [], []

    def body(x: jax.Array) -> jax.Array:
        found = active_mesh()
        assert found is not None
        seen.append((found.size, tuple(found.shape)))
        return constrain(x, "fsdp", None) * 2

    def run(jitted: Callable, sharding: NamedSharding, rows: int) -> None:
        try:
            for _ in range(10):
                # Simulated devices accept 32 programs each. Threads that launch more
                # would wait for one another forever.
                out = jax.block_until_ready(jitted(np.ones((rows, 4), np.float32)))
                assert out.sharding == sharding, out.sharding
        except BaseException as error:
            errors.append(error)

    work = []
    for where in (mesh, other):
        jitted = sharded_jit(body, where, in_shardings=RULES, out_shardings=RULES)
        for rows in (8, 16, 24):
            sharding = NamedSharding(where, P("fsdp"))
            work += [
                threading.Thread(target=run, args=(jitted, sharding, rows))
                for _ in range(2)
            ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert not errors
    assert sorted(seen) == [(8, ("data", "fsdp"))] * 3 + [(8, ("fsdp",))] * 3


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "MLP" else [pytest.mark.deep])
        for name in CASES
    ],
)
def test_program_matches_jit_with_same_shardings(name: str) -> None:
    case, mesh = CASES[name](), make_mesh({"fsdp": None})
    ours_counted, hand_counted = CountedStep(case.step), CountedStep(case.step)
    params, batch = shard((case.params, case.batch), (CASE_RULES, P("fsdp")), mesh)
    ours = by_rules(ours_counted, mesh)
    hand = by_hand(hand_counted, params, mesh)
    compiled = [step.lower(params, batch).compile(QUICKLY) for step in (ours, hand)]
    assert program_text(compiled[0]) == program_text(compiled[1])
    assert audit(compiled[0]).opcodes == audit(compiled[1]).opcodes
    for _ in range(3):
        params, _ = ours(params, batch)
    assert ours_counted.traces == hand_counted.traces == 1


def test_mesh_without_strategy_ignores_names(mesh: Mesh) -> None:
    @sharded_jit(mesh=mesh, in_shardings=P("data"))
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return constrain(x + 1, "batch", "embed"), constrain(x + 1, "fsdp", None)

    free, placed = function(np.ones((8, 8)))
    assert (spec(free), spec(placed)) == (P("data"), P("fsdp"))


def test_jax_transformations_compose(mesh: Mesh) -> None:
    function = sharded_jit(
        lambda x, y: (x * y).sum(), mesh, in_shardings=(RULES, None), out_shardings=P()
    )
    x = np.arange(16, dtype=np.float32)
    outer = sharded_jit(lambda x: function(x, x) + 1, mesh, in_shardings=P("fsdp"))
    assert outer(x) == jax.jit(lambda x: function(x, x) + 1)(x) == 1241.0
    np.testing.assert_array_equal(jax.grad(function)(x, 2.0), np.full(16, 2.0))
    rows = np.ones((3, 16), np.float32)
    np.testing.assert_array_equal(jax.vmap(function, (0, None))(rows, 2.0), [32.0] * 3)


def test_nnx_model_passes_through(mesh: Mesh) -> None:
    def step(model: nnx.Linear, x: jax.Array) -> tuple[nnx.Linear, jax.Array]:
        return model, model(x).mean()

    jitted = sharded_jit(
        step,
        mesh,
        in_shardings=(RULES, P("data")),
        out_shardings=(RULES, P()),
        donate_argnames="model",
    )
    model = shard(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), RULES, mesh)
    for _ in range(2):
        model, _ = jitted(model, np.ones((8, 16), np.float32))
        assert spec(model.kernel[...]) == spec(model.bias[...]) == P("fsdp")
