"""Replicas that differ are found and named."""

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import Callback, Trainer, make_mesh
from nnx_parallel.errors import ReplicaError
from nnx_parallel.training.diagnostics import check_replicas


def corrupt(x: jax.Array, device: int) -> jax.Array:
    """The array with one bit flipped on one device."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.view(np.uint8).ravel()[0] ^= 1
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "fsdp")], ids=str)
def test_one_flipped_bit_is_named(spec: P) -> None:
    mesh = make_mesh({"data": 4, "fsdp": 2})
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, spec))
    check_replicas({"good": x, "key": jax.random.key(0)}, 3)
    with pytest.raises(ReplicaError) as caught:
        check_replicas({"good": x, "bad": corrupt(x, 5)}, 3)
    text = str(caught.value)
    assert text.startswith("Copies of 1 arrays differ at step 3:\n  `bad`[")
    others = 7 if spec == P() else 3
    device = jax.devices()[5]
    assert f"{device} (process 0) differ from {others} others" in text


def test_two_copies_that_differ_name_both() -> None:
    mesh = make_mesh({"data": 2}, jax.devices()[:2])
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P()))
    with pytest.raises(ReplicaError, match=re.escape("do not agree")):
        check_replicas([corrupt(x, 1)], 1)


def test_what_is_not_replicated_cannot_differ() -> None:
    mesh = make_mesh({"fsdp": None})
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("fsdp")))
    check_replicas({"x": corrupt(x, 3)}, 1)


def test_a_fit_compares_every_so_often() -> None:
    class Corrupt(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 3:
                params = {**trainer.state.params}
                params["kernel"] = corrupt(params["kernel"], 2)
                state = trainer.state
                trainer.state = type(state)(**{**vars(state), "params": params})

    trainer = Trainer(
        model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        optimizer=optax.sgd(0.0),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        callbacks=(Corrupt(),),
        check_replicas_every=4,
        loggers=(),
    )
    batch = {"x": np.ones((8, 4), np.float32)}
    with pytest.raises(ReplicaError, match=re.escape("`params.kernel`[(")) as caught:
        trainer.fit([batch] * 12, 12)
    assert re.search(r"differ at step (4|8):", str(caught.value))
