"""Differing replicas are found and named."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import Callback, Checkpoint, Faults, Trainer, make_mesh
from nnx_parallel.checkpoint import CheckpointManager, CheckpointReader
from nnx_parallel.errors import CheckpointSaveError, ReplicaError
from nnx_parallel.sharding.checksum import checksums
from nnx_parallel.training.diagnostics import check_replicas


def corrupt(x: jax.Array, device: int) -> jax.Array:
    """Flips one bit of the array on one device."""
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


def test_two_differing_copies_name_both() -> None:
    mesh = make_mesh({"data": 2}, jax.devices()[:2])
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P()))
    with pytest.raises(ReplicaError, match=re.escape("do not agree")):
        check_replicas([corrupt(x, 1)], 1)


def test_sharded_arrays_are_not_compared() -> None:
    mesh = make_mesh({"fsdp": None})
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P("fsdp")))
    check_replicas({"x": corrupt(x, 3)}, 1)


@pytest.mark.parametrize("device", [0, 3, 7])
@pytest.mark.parametrize(
    ("spec", "num_others"),
    [(P(), 7), (P("fsdp"), 3), (P(("data", "fsdp")), 0)],
    ids=str,
)
def test_saving_differing_copies_raises(
    spec: P, num_others: int, device: int, tmp_path: Path
) -> None:
    mesh = make_mesh({"data": 4, "fsdp": 2})
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, spec))
    # The disk has no fault, so `on_save_error` does not turn this error into a warning.
    options = Checkpoint(tmp_path, keep_last=1, on_save_error="warn")
    reports: list[str] = []
    states = [x, corrupt(x, device)]

    def save() -> None:
        with CheckpointManager(options) as manager:
            manager.report = reports.append
            for step, w in enumerate(states, start=1):
                manager.save_groups(step, {"model": {"w": w, "whole": x}}, {})
                manager.wait()

    if num_others == 0:  # no other device has the same part
        save()
        assert len(reports) == 2
        return
    with pytest.raises(CheckpointSaveError, match="Saving step 2 in") as caught:
        save()
    assert isinstance(caught.value.__cause__, ReplicaError)
    text = str(caught.value)
    assert "Copies of 1 arrays differ:\n  `model: w`[" in text
    odd = f"{jax.devices()[device]} (process 0) differ from {num_others} others"
    assert odd in text
    assert len(reports) == 1
    reader = CheckpointReader(options)
    assert reader.steps == [1]
    wanted = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    found, _ = reader.restore({"model": {"w": wanted, "whole": wanted}})
    np.testing.assert_array_equal(found["model"]["w"], np.ones((8, 8)))


def test_checksum_of_differing_copies_raises() -> None:
    mesh = make_mesh({"data": None})
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P()))
    with pytest.raises(ReplicaError, match=re.escape("`g: x`[(None, None)]: ")):
        checksums({"g": {"x": corrupt(x, 6)}})


def test_fit_checks_replicas_periodically() -> None:
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
        faults=Faults(check_replicas_every=4),
        loggers=(),
    )
    batch = {"x": np.ones((8, 4), np.float32)}
    with pytest.raises(ReplicaError, match=re.escape("`params.kernel`[(")) as caught:
        trainer.fit([batch] * 12, 12)
    assert re.search(r"differ at step (4|8):", str(caught.value))
