"""Weights that were saved by plain Orbax load into a Trainer under any strategy."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from nnx_parallel import FSDP, DataParallel, Precision, Trainer
from nnx_parallel.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
)
from tests.parity.runs import to_host


class Net(nnx.Module):
    """Layers in a list, statistics, and a module named ``value``, like a leaf."""

    def __init__(self, rngs: nnx.Rngs, width: int = 8) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.value = nnx.Linear(8, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.value(self.dropout(self.norm(x)))


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch) - 1).mean()


X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def make_trainer(model: Any = Net, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "strategy": FSDP(min_size=0),
        "loggers": (),
        "seed": 7,  # gives other weights than the saved ones
    }
    return Trainer(model, optax.adam(0.1), loss, **(settings | options))


def standard(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(str(path), tree)
    return path


def in_a_manager(path: Path, tree: Any) -> Path:
    with ocp.CheckpointManager(str(path)) as manager:
        manager.save(3, args=ocp.args.StandardSave(tree))
    return path / "3"


def v1(path: Path, tree: Any) -> Path:
    ocp.v1.save(str(path), tree)
    return path


SAVED = {
    "state": (standard, lambda model: nnx.state(model)),
    "pure": (standard, lambda model: nnx.to_pure_dict(nnx.state(model))),
    "manager": (in_a_manager, lambda model: nnx.state(model)),
    "v1": (v1, lambda model: nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))),
}


def arrays_of(model: nnx.Module) -> dict:
    kept = nnx.state(model, nnx.Not(nnx.RngState))
    return to_host(nnx.to_pure_dict(kept))


@pytest.mark.parametrize("name", SAVED)
def test_state_is_read_in_every_format(name: str, tmp_path: Path) -> None:
    save, select = SAVED[name]
    source = Net(nnx.Rngs(0))
    source.norm.mean[...] = jnp.arange(8.0)
    path = save(tmp_path / "plain", select(source))
    trainer = make_trainer(ema_decay=0.5)
    trainer.fit([X], 1)
    before = to_host({"optimizer": trainer.state.opt_state})
    streams = to_host(nnx.to_pure_dict(nnx.state(trainer.model, nnx.RngCount)))
    trainer.load_weights(path)
    for model in (trainer.model, trainer.ema_model):
        found = arrays_of(model)
        for key, value in arrays_of(source).items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)
    kernel = trainer.state.params["value"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (1, 8)
    after = to_host({"optimizer": trainer.state.opt_state})
    assert all((after[key] == x).all() for key, x in before.items())
    kept = to_host(nnx.to_pure_dict(nnx.state(trainer.model, nnx.RngCount)))
    assert all((kept[key] == x).all() for key, x in streams.items())
    assert trainer.step == 1
    trainer.fit([X] * 2, 2)  # the loaded state can be trained


def test_parameters_are_read_into_another_dtype(tmp_path: Path) -> None:
    source = Net(nnx.Rngs(0))
    path = standard(tmp_path / "params", nnx.state(source, nnx.Param))
    trainer = make_trainer(
        strategy=DataParallel(), precision=Precision(params=jnp.bfloat16)
    )
    trainer.load_weights(str(path), only=nnx.Param)
    found = trainer.state.params["layers"][1]["kernel"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        found, source.layers[1].kernel[...].astype(jnp.bfloat16)
    )
    message = "`norm.mean` float32[8] is not in the checkpoint"
    with pytest.raises(CheckpointMismatchError, match=re.escape(message)):
        trainer.load_weights(path)


def test_mismatch_lists_differences_and_changes_nothing(tmp_path: Path) -> None:
    source: Any = Net(nnx.Rngs(0), width=4)
    source.extra = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    path = standard(tmp_path / "other", nnx.state(source))
    trainer = make_trainer()
    before = to_host({"params": trainer.state.params})
    with pytest.raises(CheckpointMismatchError) as caught:
        trainer.load_weights(path)
    assert str(caught.value) == (
        f"The checkpoint in '{path}' differs from the model:\n"
        "  `value.bias` is float32[4] in the checkpoint and float32[8] here\n"
        "  `value.kernel` is float32[8,4] in the checkpoint and float32[8,8] here\n"
        "  `extra.kernel` float32[2,2] is only in the checkpoint\n"
        "Nothing has changed. Build the same model, or read only some of its arrays, "
        "for example with load_weights(path, only=nnx.Param)."
    )
    after = to_host({"params": trainer.state.params})
    assert all((after[key] == x).all() for key, x in before.items())
    # Parts with the same shape can be loaded; the head differs.
    del source.extra
    path = standard(tmp_path / "head", nnx.state(source))
    trainer.load_weights(
        path, only=nnx.All(nnx.Param, nnx.Not(nnx.PathContains("value")))
    )
    np.testing.assert_array_equal(
        trainer.state.params["layers"][0]["kernel"], source.layers[0].kernel[...]
    )


def test_invalid_checkpoint_raises(tmp_path: Path) -> None:
    trainer = make_trainer(checkpoint=str(tmp_path / "run"))
    message = f"Directory '{tmp_path}/none' does not exist."
    with pytest.raises(CheckpointNotFoundError, match=re.escape(message)):
        trainer.load_weights(tmp_path / "none")
    trainer.fit([X], 1)
    with pytest.raises(CheckpointReadError, match="For the directory of a Trainer use"):
        trainer.load_weights(tmp_path / "run")
    # The directory of one step is an ordinary checkpoint.
    found = trainer.state.params["value"]["kernel"]
    other = make_trainer(seed=1)
    other.load_weights(tmp_path / "run" / "1")
    np.testing.assert_array_equal(other.state.params["value"]["kernel"], found)


def test_run_with_loaded_weights_resumes(tmp_path: Path) -> None:
    path = standard(tmp_path / "plain", nnx.state(Net(nnx.Rngs(0))))

    def run(num_steps: int) -> Trainer:
        trainer = make_trainer(checkpoint=str(tmp_path / "run"))
        trainer.load_weights(path)
        trainer.fit([X] * num_steps, num_steps)
        return trainer

    first, second = run(1), run(2)
    assert (first.step, second.step) == (1, 2)
    assert len(second.fit([X] * 3, 3)["loss"]) == 1
