"""Models that place their activations themselves, with the mesh of JAX's context."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
    constrain,
)
from nnx_parallel.errors import ParallelWarning, UnknownAxisError
from nnx_parallel.layers import Stack

X = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)
FSDP_TP = Composite(FSDP(4, min_size=0), TensorParallel(2))


class Placing(nnx.Module):
    """A linear layer that constrains its output to a bare spec."""

    def __init__(self, rngs: nnx.Rngs, spec: Any = None) -> None:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tp"))
        self.linear = nnx.Linear(64, 64, kernel_init=init, rngs=rngs)
        self.spec = spec

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tanh(self.linear(x))
        if self.spec is None:
            return y
        return jax.lax.with_sharding_constraint(y, self.spec)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def trainer(model: Any, strategy: Strategy, **options: Any) -> Trainer:
    return Trainer(
        model, optax.sgd(1.0), loss, strategy=strategy, loggers=(), **options
    )


def lowered(of: Trainer) -> str:
    step: Any = of.train_step
    return step.lower(of.state, of.shard_batch(X)).as_text()


def test_bare_spec_uses_mesh_of_strategy() -> None:
    spec = P("tensor", "fsdp")  # the library's layouts would not choose this spec
    placing = trainer(lambda rngs: Placing(rngs, spec), FSDP_TP)
    with jax.set_mesh(placing.mesh):
        under_set_mesh = lowered(placing)
    for text in (lowered(placing), under_set_mesh):
        assert re.search(r'sharding_constraint.*\{"tensor"\}, \{"fsdp"\}', text)
    plain = trainer(Placing, DataParallel(1), devices=jax.devices()[:1])
    found = placing.fit([X] * 2, num_steps=2)["loss"]
    np.testing.assert_allclose(found, plain.fit([X] * 2, num_steps=2)["loss"], 1e-5)
    np.testing.assert_allclose(
        placing.evaluate([X])["loss"], plain.evaluate([X])["loss"], 1e-5
    )


def test_bare_spec_applies_in_pipeline_stage() -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        return Stack(lambda rngs: Placing(rngs, P("fsdp")), 2, rngs=rngs)

    strategy = Composite(Pipeline(2), FSDP(4, min_size=0))
    staged = trainer(build, strategy, num_microbatches=2)
    assert re.search(r'sharding_constraint.*\{"fsdp"', lowered(staged))


def test_bare_spec_with_usual_name_of_axis_is_translated() -> None:
    placing = trainer(lambda rngs: Placing(rngs, P("dp", "tp")), FSDP_TP)
    assert re.search(r'sharding_constraint.*\{"fsdp"\}, \{"tensor"\}', lowered(placing))


def test_bare_spec_of_unknown_axis_raises() -> None:
    placing = trainer(lambda rngs: Placing(rngs, P(None, "cols")), TensorParallel())
    message = (
        "Name 'cols' of `P(None, 'cols')` in `with_sharding_constraint` is neither a "
        "logical axis nor a mesh axis. Map it with rules=(LogicalRules({'cols': "
        "'tensor'}),), or to None to replicate."
    )
    with pytest.raises(UnknownAxisError, match=re.escape(message)):
        placing.fit([X], num_steps=1)


class Sharding(Placing):
    """Constrains its output to a sharding on the mesh of its context."""

    def __call__(self, x: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        sharding = jax.sharding.NamedSharding(mesh, P("tp"))
        return jax.lax.with_sharding_constraint(self.linear(x), sharding)


def test_sharding_of_unknown_axis_raises() -> None:
    placing = trainer(Sharding, TensorParallel())
    message = "The model makes a NamedSharding from the mesh that it finds, but names"
    with pytest.raises(UnknownAxisError, match=re.escape(message)):
        placing.fit([X], num_steps=1)


class Caching(nnx.Module):
    """Creates a named Variable during the call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(rngs.params.normal((64, 64)))

    def __call__(self, x: jax.Array) -> jax.Array:
        cache = nnx.Cache(x @ self.w, out_sharding=("batch", "embed"))
        return cache[...]


def test_variable_made_in_loss_needs_no_mesh_axes() -> None:
    caching = trainer(Caching, FSDP(min_size=0))
    assert np.isfinite(caching.fit([X], num_steps=1)["loss"]).all()


class Asking(Placing):
    """Constrains its output only if a mesh is set, as some models do."""

    def __call__(self, x: jax.Array) -> jax.Array:
        if jax.sharding.get_abstract_mesh().empty:
            return jnp.tanh(self.linear(x))
        return super().__call__(x)


def test_model_that_reads_mesh_runs_without_mesh() -> None:
    asking = trainer(lambda rngs: Asking(rngs, P("tensor", "fsdp")), FSDP_TP)
    assert '{"tensor"}, {"fsdp"}' not in lowered(asking)
    with jax.set_mesh(asking.mesh):
        fresh = trainer(lambda rngs: Asking(rngs, P("tensor", "fsdp")), FSDP_TP)
        assert '{"tensor"}, {"fsdp"}' in lowered(fresh)


def constrained(*names: Any, kind: AxisType = AxisType.Auto) -> jax.Array:
    """An array that a function constrains under a mesh of the user."""
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: constrain(x + 1, *names))(jnp.asarray(X))


def test_constrain_applies_on_mesh_of_user() -> None:
    for names in (("data", "tp"), ("data", ("tp",)), (P("data", "tp"),)):
        assert constrained(*names).sharding.spec == P("data", "tp")  # pyright: ignore[reportAttributeAccessIssue]
    # Only a strategy gives axes to the batch: here the partitioner decides.
    assert constrained("batch", "tp").sharding.spec[1] == "tp"  # pyright: ignore[reportAttributeAccessIssue]
    assert constrained("batch", "embed").sharding.is_fully_replicated


def test_constrain_without_effect_on_mesh_of_user_warns() -> None:
    with pytest.warns(ParallelWarning, match="has no effect under the mesh"):
        constrained("data", "tp", kind=AxisType.Explicit)
