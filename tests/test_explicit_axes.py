"""Models, meshes and contexts with Explicit axes, and the modes of NNX's Variables."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Backend,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
    constrain,
    plan,
    sharded_jit,
)
from nnx_parallel.errors import MeshAxisTypeError, ModelError, UnknownAxisError
from nnx_parallel.layers import Stack
from nnx_parallel.sharding import LogicalRules, annotate

pytestmark = pytest.mark.long

IDS = np.random.default_rng(0).integers(0, 32, (16, 8))
X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
TX = optax.sgd(0.5, momentum=0.9)
FSDP_TP = Composite(TensorParallel(2), FSDP(min_size=0))
STRATEGIES = {"data": DataParallel(), "fsdp": FSDP(min_size=0), "tp x fsdp": FSDP_TP}


class Language(nnx.Module):
    """A model for Explicit axes ``fsdp`` and ``tp``, as in Bonsai.

    Every form of a spec occurs: in initializers, metadata, products, lookups, reshapes,
    ``reshard`` and ``auto_axes``, and inside a scan, a checkpoint and a ``vmap``.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        init, key = nnx.initializers.lecun_normal(), rngs.params
        table = jax.random.normal(key(), (32, 32), out_sharding=P("tp", "fsdp"))
        self.table = nnx.Param(0.2 * table, out_sharding=("tp", "fsdp"))
        up = init(key(), (32, 64), jnp.float32, out_sharding=P("fsdp", "tp"))
        self.up = nnx.Param(up, out_sharding=("fsdp", "tp"))
        self.down = nnx.Param(
            init(key(), (64, 32), jnp.float32, out_sharding=P("tp", "fsdp")),
            out_sharding=("tp", "fsdp"),
        )
        self.scale = nnx.Param(jnp.ones(32, out_sharding=P(None)))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def block(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        split = P("fsdp", None, "tp")
        h = jnp.matmul(x, self.up[...], out_sharding=split)
        heads = h.reshape(*h.shape[:2], 4, -1, out_sharding=P(*split, None))
        h = jax.nn.silu(heads).reshape(h.shape, out_sharding=split)
        spec = P("fsdp", None, None)
        y = jnp.einsum("bth,hd->btd", h, self.down[...], out_sharding=spec)
        return jax.sharding.reshard(
            x + y * self.scale[...][None, None], P("fsdp")
        ), None

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table.at[ids].get(out_sharding=P("fsdp", None, None))
        x = x + jnp.zeros(x.shape, out_sharding=P("fsdp"))
        x, _ = jax.lax.scan(jax.checkpoint(self.block), x, None, length=2)
        double = jax.sharding.auto_axes(lambda x: 2 * x, out_sharding=P("fsdp"))
        x = double(self.dropout(x))
        return jnp.einsum("btd,vd->btv", x, self.table[...], out_sharding=P("fsdp"))


def language_loss(model: Any, ids: jax.Array) -> jax.Array:
    labels = jax.nn.one_hot(jnp.roll(ids, 1, 1), 32)
    return -(labels * jax.nn.log_softmax(model(ids))).sum(-1).mean()


def square(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def make(model: Any, strategy: Strategy | None = None, **options: Any) -> Trainer:
    strategy = strategy or FSDP(min_size=0)
    return Trainer(model, TX, square, strategy=strategy, loggers=(), **options)


def lowered(trainer: Trainer, batch: Any = X) -> str:
    step: Any = trainer.train_step
    return step.lower(trainer.state, trainer.shard_batch(batch)).as_text()


def params_of(model: nnx.Module) -> dict:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def train_by_flax(num_steps: int) -> tuple[list[float], dict]:
    """Trains `Language` in plain Flax on an Explicit mesh of one device."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = Language(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, ids: Any) -> jax.Array:
            value, grads = nnx.value_and_grad(language_loss)(model, ids)
            optimizer.update(model, grads)
            return value

        losses = [float(step(model, optimizer, IDS)) for _ in range(num_steps)]
        return losses, params_of(model)


@pytest.fixture(scope="module")
def by_flax() -> tuple[list[float], dict]:
    return train_by_flax(10)


@pytest.mark.parametrize("name", STRATEGIES)
def test_model_for_explicit_axes_trains_as_in_flax(name: str, by_flax: tuple) -> None:
    losses, params = by_flax
    trainer = Trainer(
        Language, TX, language_loss, strategy=STRATEGIES[name], loggers=()
    )
    found = trainer.fit([IDS] * 10, num_steps=10)["loss"]
    np.testing.assert_allclose(found, losses, rtol=2e-6)
    assert jax.tree.structure(params_of(trainer.model)) == jax.tree.structure(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-6),
        params_of(trainer.model),
        params,
    )


# The context's mesh


CONTEXTS: dict[str, Callable[[], Any]] = {
    "Explicit, the strategy's axes": lambda: jax.make_mesh((8,), ("fsdp",)),
    "Explicit, other axes": lambda: jax.make_mesh((4, 2), ("x", "y")),
    "Auto, other axes": lambda: jax.make_mesh(
        (4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2
    ),
    "other devices": lambda: jax.make_mesh((2,), ("a",), devices=jax.devices()[2:4]),
    "the Trainer's": lambda: FSDP().make_mesh(),
}


def linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(32, 32, rngs=rngs)


def run_everything(directory: Path) -> list:
    """Calls each method of a Trainer that traces or computes; returns all numbers."""
    trainer: Any = make(Product, checkpoint=directory)
    losses = trainer.fit([X] * 3, num_steps=3)["loss"]
    batch = trainer.shard_batch(X)
    trainer.state, metrics = trainer.train_step(trainer.state, batch)
    found = [losses, metrics["loss"], trainer.evaluate([X])["loss"]]
    found.append(trainer.predict([X]))
    assert trainer.verify(X)
    trainer.restore(3)
    found.append(make(Product, checkpoint=directory).step)  # it reads a checkpoint
    assert "fsdp=8" in str(trainer.describe())
    planned = plan(trainer, topology="cpu:8", batch=X, candidates=FSDP(), compile=0)
    assert planned.best is not None
    model: Any = FSDP(min_size=0).init(Product, 0)
    _, state = FSDP(min_size=0).split(model)
    found += [trainer.model.w, model.w, state.w]
    return [np.asarray(x) for x in found]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> list:
    return run_everything(tmp_path_factory.mktemp("outside"))


@pytest.mark.parametrize("name", CONTEXTS)
def test_mesh_of_context_has_no_effect(
    name: str, outside: list, tmp_path: Path
) -> None:
    with jax.set_mesh(CONTEXTS[name]()):
        found = run_everything(tmp_path)
    for x, y in zip(found, outside, strict=True):
        np.testing.assert_array_equal(x, y)


def test_step_made_outside_runs_in_any_mesh() -> None:
    trainer = make(linear)
    batch = trainer.shard_batch(X)
    state, first = trainer.train_step(trainer.state, batch)
    with jax.set_mesh(jax.make_mesh((8,), ("fsdp",))):
        state, second = trainer.train_step(state, batch)
        assert not jax.sharding.get_abstract_mesh().empty
    assert float(second["loss"]) < float(first["loss"])


# Meshes and arrays with Explicit axes


def test_explicit_mesh_is_used_as_auto_mesh() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",))
    trainer = make(linear, backend=Backend(mesh=mesh))
    assert trainer.mesh.axis_types == (AxisType.Auto,)
    assert list(trainer.mesh.devices) == list(mesh.devices)
    wanted = make(linear).fit([X] * 2, num_steps=2)["loss"]
    np.testing.assert_array_equal(trainer.fit([X] * 2, num_steps=2)["loss"], wanted)


@pytest.mark.parametrize("strategy", [FSDP(min_size=0), FSDP_TP], ids=str)
@pytest.mark.parametrize("is_inside", [False, True])
def test_model_built_in_explicit_mesh_trains(
    strategy: Strategy, is_inside: bool
) -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    with jax.set_mesh(mesh):
        names = {"out_sharding": ("fsdp", "tp")}
        model = nnx.Linear(32, 32, rngs=nnx.Rngs(0), kernel_metadata=names)
    assert "fsdp" in str(jax.typeof(model.kernel[...]))
    with jax.set_mesh(mesh) if is_inside else contextlib.nullcontext():
        found = make(model, strategy).fit([X] * 2, num_steps=2)["loss"]
    wanted = make(linear, DataParallel()).fit([X] * 2, num_steps=2)["loss"]
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


@pytest.mark.parametrize("is_built", [False, True])
def test_metadata_with_mesh_is_read_as_names(is_built: bool) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    init = nnx.with_partitioning(
        nnx.initializers.lecun_normal(),
        NamedSharding(mesh, P(None, "model")),  # pyright: ignore[reportArgumentType]
        mesh=mesh,
    )

    def build(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(32, 32, kernel_init=init, rngs=rngs)

    with pytest.warns(match="name their dims by a NamedSharding"):
        trainer = make(build(nnx.Rngs(0)) if is_built else build, FSDP_TP)
    model: Any = trainer.model
    assert model.kernel[...].sharding.spec == P("fsdp", "tensor")
    wanted = make(linear, DataParallel()).fit([X] * 2, num_steps=2)["loss"]
    found = trainer.fit([X] * 2, num_steps=2)["loss"]
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


# The constraints


SPLIT, OWN = P("fsdp", "tp"), P("rows", "cols")


class Product(nnx.Module):
    """A linear map; its weight and output have the given spec, or a sharding of it."""

    def __init__(self, rngs: nnx.Rngs, spec: Any = SPLIT) -> None:
        init = nnx.initializers.lecun_normal()
        w = init(rngs.params(), (32, 32), jnp.float32, out_sharding=spec)
        self.w = nnx.Param(w, out_sharding=("fsdp", "tp"))
        self.spec = spec

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.matmul(x, self.w[...], out_sharding=self.spec))


def placing(spec: Any) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: Product(rngs, spec)


@pytest.mark.parametrize(
    ("spec", "strategy", "found"),
    [
        (P("fsdp", "tp"), FSDP_TP, r'\{"fsdp"\}, \{"tensor"\}'),
        (P("fsdp", "tp"), FSDP(min_size=0), r'\{"fsdp"\}, \{\?\}'),
        (P("dp", "model"), FSDP_TP, r'\{"fsdp"\}, \{"tensor"\}'),
        (P("data"), FSDP(min_size=0), r'\{"fsdp"\}, \{\?\}'),
        (P(None, "mlp"), FSDP_TP, r'\{\?\}, \{"tensor"\}'),
        (P("batch", None), DataParallel(), r'\{"data"\}, \{\?\}'),
        (P("tp", "model"), FSDP_TP, r'\{"tensor"\}, \{\?\}'),
        (P(("data", "fsdp")), FSDP(min_size=0), r'\{"fsdp"\}, \{\?\}'),
    ],
    ids=str,
)
def test_spec_constrains_output(spec: P, strategy: Strategy, found: str) -> None:
    text = lowered(make(placing(spec), strategy))
    assert re.search(rf"sharding_constraint.*\[{found}\]", text)


def test_spec_without_names_changes_no_program() -> None:
    class Plain(Product):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(jnp.matmul(x, self.w[...]))

    def program(kind: type) -> str:
        return lowered(make(lambda rngs: kind(rngs, P(None, None))))

    assert program(Product) == program(Plain)


def test_axis_that_does_not_divide_is_left_out() -> None:
    rows = X[:4]
    trainer = make(placing(P("tp", "fsdp")), Composite(TensorParallel(8), FSDP(1)))
    assert "tensor" not in re.findall(r"\{.*\?\}", lowered(trainer, rows))
    assert np.isfinite(trainer.fit([rows], num_steps=1)["loss"]).all()


def test_sharding_on_mesh_of_model_is_translated() -> None:
    mesh = jax.make_mesh((2, 4), ("rows", "cols"))
    rules = (LogicalRules({"rows": "fsdp", "cols": "tensor"}),)
    strategy = Composite(TensorParallel(2), FSDP(min_size=0), rules=rules)

    class Own(Product):
        def __call__(self, x: jax.Array) -> jax.Array:
            sharding = NamedSharding(mesh, P("rows"))
            return jax.lax.with_sharding_constraint(super().__call__(x), sharding)

    with pytest.warns(match="no parameter has a dim of this name"):
        trainer = make(lambda rngs: Own(rngs, NamedSharding(mesh, OWN)), strategy)
    text = lowered(trainer)
    assert re.search(r'sharding_constraint.*\[\{"fsdp"\}, \{"tensor"\}\]', text)
    assert re.search(r'sharding_constraint.*\[\{"fsdp"\}, \{\}\]', text)


@pytest.mark.parametrize("in_call", [False, True])
def test_unknown_axis_raises_rule_to_write(in_call: bool) -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        model = Product(rngs, P(None, None) if in_call else P("rows"))
        model.spec = P("rows")
        return model

    function = "dot_general" if in_call else "truncated_normal"
    message = (
        f"Name 'rows' of `P('rows',)` in `{function}` is neither a logical axis nor a "
        "mesh axis. Map it with rules=(LogicalRules({'rows': 'tensor'}),), or to None "
        "to replicate."
    )
    with pytest.raises(UnknownAxisError, match=re.escape(message)):
        make(build).fit([X], num_steps=1)
    rules = (LogicalRules({"rows": "tensor"}),)
    with pytest.warns(match="or a spec in its call, gives a dim this name"):
        mapped = make(build, Composite(TensorParallel(), rules=rules))
    assert np.isfinite(mapped.fit([X], num_steps=1)["loss"]).all()


def test_explicit_axes_in_model_raise() -> None:
    class Explicit(Product):
        def __call__(self, x: jax.Array) -> jax.Array:
            place: Any = jax.sharding.explicit_axes
            return place(jnp.matmul, in_sharding=P("fsdp"))(x, self.w[...])

    message = "The model makes the mesh axes ['fsdp'] Explicit. The axes of a Trainer's"
    with pytest.raises(MeshAxisTypeError, match=re.escape(message)):
        make(Explicit).fit([X], num_steps=1)


class Residual(Product):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.sharding.reshard(x + super().__call__(x), P("fsdp"))


@pytest.mark.parametrize(
    "strategy",
    [FSDP_TP, Composite(Pipeline(2), TensorParallel(2), FSDP(min_size=0))],
    ids=["tp x fsdp", "pipeline"],
)
def test_stack_of_blocks_with_specs_matches_one_device(strategy: Strategy) -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        return Stack(Residual, 4, rngs=rngs)

    trainer = make(build, strategy, num_microbatches=2)
    assert re.search(r'constraint.*\[\{"fsdp"\}, \{"tensor"\}\]', lowered(trainer))
    one = make(build, DataParallel(), devices=jax.devices()[:1], num_microbatches=2)
    found = trainer.fit([X] * 5, num_steps=5)["loss"]
    np.testing.assert_allclose(found, one.fit([X] * 5, num_steps=5)["loss"], rtol=2e-6)


def test_spec_in_custom_gradient_and_vmap_matches_one_device() -> None:
    @jax.custom_vjp
    def double(x: jax.Array) -> jax.Array:
        return jax.sharding.reshard(2 * x, P("fsdp"))

    def backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
        return (jax.sharding.reshard(2 * grad, P("fsdp")),)

    double.defvjp(lambda x: (double(x), None), backward)

    class Various(Product):
        def __call__(self, x: jax.Array) -> jax.Array:
            def row(x: jax.Array) -> jax.Array:
                return jnp.matmul(x, self.w[...], out_sharding=P("tp"))

            def energy(x: jax.Array) -> jax.Array:
                return (jnp.matmul(x, self.w[...], out_sharding=self.spec) ** 2).sum()

            return jnp.tanh(double(jax.vmap(row)(x)) + 0.1 * jax.grad(energy)(x))

    one = make(Various, DataParallel(), devices=jax.devices()[:1])
    wanted = one.fit([X] * 5, num_steps=5)["loss"]
    found = make(Various, FSDP_TP).fit([X] * 5, num_steps=5)["loss"]
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_convolution_with_groups_and_spec_matches_one_device() -> None:
    class Grouped(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            names = {"out_sharding": (None, None, "tp")}
            self.conv = nnx.Conv(
                *(4, 4, (3,)), feature_group_count=2, rngs=rngs, kernel_metadata=names
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.conv(x.reshape(-1, 8, 4))
            return y.reshape(-1, 32, out_sharding=P("fsdp"))

    one = make(Grouped, DataParallel(), devices=jax.devices()[:1])
    wanted = one.fit([X] * 3, num_steps=3)["loss"]
    found = make(Grouped, FSDP_TP).fit([X] * 3, num_steps=3)["loss"]
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_sharded_jit_takes_specs_of_its_mesh() -> None:
    mesh = jax.make_mesh((8,), ("x",))

    def product(x: jax.Array) -> jax.Array:
        return jnp.matmul(x, x.T, out_sharding=P("x"))

    jitted = sharded_jit(product, mesh, in_shardings=P("x"))
    np.testing.assert_allclose(jitted(X), X @ X.T, rtol=1e-5, atol=1e-5)
    assert re.search(r'constraint.*\[\{"x"\}, \{\?\}\]', jitted.lower(X).as_text())
    unknown = sharded_jit(lambda x: jnp.zeros(8, out_sharding=P("y")), mesh)
    message = "Cannot shard `jnp.zeros` as P('y',): the mesh has no axis 'y'."
    with pytest.raises(UnknownAxisError, match=re.escape(message)):
        unknown(X)


def test_sharded_jit_takes_mesh_axis_called_batch() -> None:
    mesh = jax.make_mesh((8,), ("batch",))

    def given(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(2 * x, P(None, "batch"))

    def named(x: jax.Array) -> jax.Array:
        return constrain(2 * x, None, "batch")

    def summed(x: jax.Array) -> jax.Array:
        return jnp.matmul(x, x.T, out_sharding=P(None, "batch"))

    for function, wanted in ((given, 2 * X), (named, 2 * X), (summed, X @ X.T)):
        found = sharded_jit(function, mesh)(X)
        assert found.sharding.spec == P(None, "batch")
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_explicit_axes_in_sharded_jit_are_placed_by_jax() -> None:
    def double(x: jax.Array) -> jax.Array:
        y = jnp.matmul(x, x.T, out_sharding=P("x"))
        assert jax.typeof(y).sharding.spec == P("x", None)
        return y

    def function(x: jax.Array) -> jax.Array:
        place: Any = jax.sharding.explicit_axes
        return place(double, in_sharding=P("x"))(x)

    found = sharded_jit(function, jax.make_mesh((8,), ("x",)))(X)
    assert found.sharding.spec == P("x")
    np.testing.assert_allclose(found, X @ X.T, rtol=1e-5, atol=1e-5)


def test_model_with_specs_runs_in_function_of_predict() -> None:
    trainer = make(Product)
    with pytest.raises((RuntimeError, ValueError), match="not under a mesh context"):
        trainer.model(X)

    def twice(model: Any, x: jax.Array) -> jax.Array:
        return 2 * model(x)

    model: Any = trainer.model
    wanted = 2 * np.tanh(X @ np.asarray(model.w))
    np.testing.assert_allclose(trainer.predict([X], twice), wanted, rtol=1e-5)


# Functions that JAX has traced before


def traced_once(kind: str) -> Callable[[jax.Array], jax.Array]:
    """Makes a function with specs and names that JAX's trace caches remember."""

    def place(x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(jnp.sin(x), P("data"))
        return constrain(jnp.cos(x), "batch", "mlp")

    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return place(x), None

    def scan(x: jax.Array) -> jax.Array:
        return jax.lax.scan(body, x, None, length=2)[0]

    return {"jit": jax.jit(place), "nnx.jit": nnx.jit(place), "scan": scan}[kind]


def calling(function: Callable[[jax.Array], jax.Array]) -> type[nnx.Module]:
    class Calling(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(
                *(32, 32),
                rngs=rngs,
                kernel_metadata={"out_sharding": (None, "mlp")},
                bias_metadata={"out_sharding": ("heads",)},
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            # The type of a constant has no mesh, so JAX finds its trace again.
            return function(jnp.ones(x.shape)) * function(self.up(x))

    return Calling


RULES = (LogicalRules({"mlp": None}),)
FSDP_TP_WITHOUT_MLP = Composite(TensorParallel(2), FSDP(min_size=0), rules=RULES)
ORDERS: dict[str, list[dict[str, Any]]] = {
    "one device first": [{"strategy": DataParallel(1)}, {"strategy": FSDP_TP}],
    "many devices first": [{"strategy": FSDP_TP}, {"strategy": DataParallel(1)}],
    "another mesh": [{"strategy": FSDP(min_size=0)}, {"strategy": FSDP_TP}],
    "other rules": [
        {"strategy": FSDP_TP_WITHOUT_MLP},
        {"strategy": FSDP_TP},
    ],
    "derived names": [{"strategy": FSDP_TP, "names": "auto", "sample": X}],
}


@pytest.mark.parametrize("kind", ["jit", "nnx.jit", "scan"])
@pytest.mark.parametrize("order", ORDERS)
def test_each_trainer_places_a_traced_function(order: str, kind: str) -> None:
    shared = calling(traced_once(kind))
    for options in ORDERS[order]:
        one = options["strategy"] == DataParallel(1)
        options = {**options, "devices": jax.devices()[:1] if one else None}
        trainer = make(shared, **options)
        text = lowered(trainer)
        fresh = calling(traced_once(kind))
        options |= {"names": None, "sample": None}
        assert text == lowered(make(fresh, **options))
        if options["strategy"] == FSDP_TP:
            assert re.search(r'constraint.*\[\{"fsdp"\}, \{"tensor"\}\]', text)
            assert trainer.verify(X)
        assert np.isfinite(trainer.fit([X], num_steps=1)["loss"]).all()


def test_functions_with_other_annotations_place_a_traced_function() -> None:
    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        return annotate(2 * x, "doubled")

    mesh = jax.make_mesh((8,), ("x",))
    for spec in (P("x"), P(None, "x")):
        jitted = sharded_jit(lambda x: double(x), mesh, annotations={"doubled": spec})
        assert jitted(X).sharding.is_equivalent_to(
            NamedSharding(jitted(X).sharding.mesh, spec), 2
        )


OTHER_JAX = """
import jax
from jax._src import sharding_impls

del sharding_impls.canonicalize_sharding  # other modules of JAX keep it

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import Trainer
from nnx_parallel.errors import VersionError

x = np.ones((8, 4), np.float32)

def train(**options):
    def loss(model, x):
        return jnp.matmul(x, model.kernel[...], **options).mean()

    linear = lambda rngs: nnx.Linear(4, 4, rngs=rngs)
    return Trainer(linear, optax.sgd(0.1), loss, loggers=()).fit([x], num_steps=1)

train()
try:
    train(out_sharding=P("data"))
except VersionError as error:
    print(error)
"""


def test_jax_that_reads_specs_otherwise_raises_at_first_spec() -> None:
    run = subprocess.run(
        [sys.executable, "-c", OTHER_JAX], capture_output=True, text=True, check=True
    )
    message = (
        f"The model passes a spec to JAX, but jax {jax.__version__} reads specs in a "
        "way that nnx_parallel does not know. Install 'jax<0.13', or remove the specs "
        "from the model. JAX's error: "
    )
    assert run.stdout.startswith(message), run.stdout


def test_jax_reads_specs_itself_outside_of_a_layout() -> None:
    with pytest.raises(ValueError, match="not under a mesh context"):
        jnp.zeros(8, out_sharding=P("fsdp"))
    types = (AxisType.Explicit,)
    with jax.sharding.use_abstract_mesh(AbstractMesh((8,), ("x",), axis_types=types)):
        found = jax.eval_shape(lambda: jnp.zeros(8, out_sharding=P("x")))
    assert found.sharding.spec == P("x")


# Modes of NNX


MODES: dict[str, Callable[[], Any]] = {
    "hijax": lambda: nnx.var_defaults(hijax=True),
    "ref": lambda: nnx.var_defaults(ref=True),
    "hijax and ref": lambda: nnx.var_defaults(hijax=True, ref=True),
    "tree mode": lambda: nnx.set_graph_mode(False),
}


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.up(x))))


@pytest.mark.parametrize("mode", MODES)
def test_mode_of_flax_has_no_effect(mode: str) -> None:
    wanted = make(Dropped).fit([X] * 3, num_steps=3)["loss"]
    with MODES[mode]():
        trainer = make(Dropped)
        found = trainer.fit([X] * 3, num_steps=3)["loss"]
        assert trainer.predict([X]).shape == (16, 8)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("mode", ["hijax", "ref"])
def test_built_model_in_mode_raises(mode: str) -> None:
    with MODES[mode]():
        model = nnx.Linear(32, 8, use_bias=False, rngs=nnx.Rngs(0))
    message = (
        f"The Variable `kernel` has hijax={mode == 'hijax'}, ref={mode == 'ref'}. A "
        "step carries the arrays of a model as its state, so Variables must have "
        "hijax=False and ref=False. Pass a function that builds the model, on which "
        "nnx.var_defaults has no effect; or build the model inside "
        "nnx.var_defaults(hijax=False, ref=False)."
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        make(model)


def test_variable_made_in_mode_raises() -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(32, 8, rngs=rngs, kernel_metadata={"hijax": True})

    with pytest.raises(ModelError, match=re.escape("The Variable `kernel` has hijax=")):
        make(build)
