"""A donated array that is deleted or passed twice raises an error on the host."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel import FSDP, Trainer, make_mesh, shard, sharded_jit
from nnx_parallel.errors import DonatedArrayError


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"fsdp": None})


def step(params: Any, batch: Any, *more: Any) -> Any:
    # The mean needs all devices: if the call failed on only one, the others would wait.
    shift = batch.mean() + sum(x.mean() for x in more)
    return jax.tree.map(lambda x: x + shift, params)


@pytest.fixture(scope="module")
def jitted(mesh: Mesh) -> Any:
    return sharded_jit(step, mesh, in_shardings=P("fsdp"), donate_argnums=0)


def make(mesh: Mesh) -> tuple[dict, jax.Array]:
    params = {"w": np.ones(8, np.float32), "b": [np.zeros(8, np.float32)]}
    return shard((params, np.ones(8, np.float32)), P("fsdp"), mesh)


def test_array_donated_earlier_raises(jitted: Any, mesh: Mesh) -> None:
    old, batch = make(mesh)
    new = jitted(old, batch)
    gone = {"w": new["w"], "b": old["b"]}
    message = (
        "`params.b.0`, of shape (8,), is gone: it was donated to an earlier call, or "
        "deleted. Pass the output of that call, or give it a copy: jnp.copy(x)."
    )
    for _ in range(3):  # later calls are tried without a look-up
        with pytest.raises(DonatedArrayError, match=re.escape(message)):
            jitted(gone, batch)
    with pytest.raises(RuntimeError, match=re.escape("`params.b.0`, of shape")):
        jitted(batch=batch, params=gone)
    # The refused calls donated nothing.
    new = jitted(jitted(new, batch), batch)
    np.testing.assert_array_equal(new["w"], 4.0)


def test_donated_array_passed_twice_raises(jitted: Any, mesh: Mesh) -> None:
    params, batch = make(mesh)
    message = "`batch` is the same array as `params.w`, which is donated: the outputs"
    with pytest.raises(DonatedArrayError, match=re.escape(message)):
        jitted(params, params["w"])
    with pytest.raises(DonatedArrayError, match=re.escape("`args_1` is the same")):
        jitted(params, batch, batch, params["b"][0])
    tied = {"w": params["w"], "b": [params["w"]]}
    with pytest.raises(DonatedArrayError, match=re.escape("`params.w` is the same")):
        jitted(tied, batch)
    np.testing.assert_array_equal(jitted(params, batch, batch, batch)["w"], 4.0)


def test_host_values_may_be_donated(jitted: Any, mesh: Mesh) -> None:
    x = np.ones(8, np.float32)
    numbers = sharded_jit(lambda n, x: x * n, mesh, donate_argnums=0)
    np.testing.assert_array_equal(numbers(2, x), 2 * x)
    for _ in range(3):
        np.testing.assert_array_equal(jitted({"x": x, "same": x}, x)["x"], 2 * x)
    grad = jax.grad(lambda x: jitted(x, x).sum())(x)
    np.testing.assert_array_equal(grad, 2 * x)


def test_stepping_state_twice_raises() -> None:
    trainer = Trainer(
        lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        optax.sgd(0.1),
        lambda model, batch: (model(batch["x"]) ** 2).mean(),
        strategy=FSDP(min_size=0),
        loggers=(),
    )
    batch = trainer.shard_batch({"x": np.ones((8, 8), np.float32)})
    old = trainer.state
    trainer.state, _ = trainer.train_step(old, batch)
    with pytest.raises(DonatedArrayError, match=re.escape("`state.step`, of shape ()")):
        trainer.train_step(old, batch)
    message = "`batch.x` is the same array as `state.params.kernel`, which is donated"
    with pytest.raises(DonatedArrayError, match=re.escape(message)):
        trainer.train_step(trainer.state, {"x": trainer.state.params["kernel"]})
    trainer.state, metrics = trainer.train_step(trainer.state, batch)
    assert jnp.isfinite(metrics["loss"])
    assert trainer.step == 2
    # A loop that does not hand the new state back to the Trainer.
    state, _ = trainer.train_step(trainer.state, batch)
    for use in (trainer.save, lambda: trainer.step, lambda: trainer.evaluate([batch])):
        with pytest.raises(
            DonatedArrayError, match=("Assign the new state in a custom loop")
        ):
            use()
    trainer.state = state
    assert trainer.step == 3
