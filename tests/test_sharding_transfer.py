"""Pytrees that are placed on a mesh and gathered again are unchanged."""

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import FSDP, Composite, DataParallel, make_mesh
from nnx_parallel.errors import IndivisibleDimError, SpecRankError, UnknownAxisError
from nnx_parallel.sharding import (
    FSDPRules,
    gather,
    process_local_to_global,
    shard,
)

ROOT = Path(__file__).parents[1]

TWO_PROCESSES = """
import sys
import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

index, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, index)

from nnx_parallel import gather, make_mesh
from nnx_parallel.sharding import FSDPRules, process_local_to_global
from nnx_parallel import shard, sharded_jit, visualize
from nnx_parallel.sharding.tree import gather_at

mesh = make_mesh({"data": 2, "tensor": 2})
rows = np.arange(8, dtype=np.float32).reshape(4, 2)
whole = np.concatenate([rows, rows + 100])
batch = process_local_to_global({"x": rows + 100 * index, "n": 3}, mesh, "data")
x = batch["x"]
assert x.shape == (8, 2) and not x.is_fully_addressable
assert gather(batch)["n"] == 3
np.testing.assert_array_equal(gather(x), whole)
np.testing.assert_array_equal(gather(x, to_host=False), whole)
w = shard({"w": np.arange(16.0)}, FSDPRules("tensor", 0), mesh)["w"]
assert [s.data.shape for s in w.addressable_shards] == [(8,)] * 2
np.testing.assert_array_equal(gather(w), np.arange(16.0))
total = sharded_jit(lambda x: x.sum(0), mesh, out_shardings=FSDPRules("tensor", 0))(x)
np.testing.assert_array_equal(gather(total), whole.sum(0))
# -0.0, infinities, a quiet NaN and a signalling NaN keep their bits.
special = np.array([0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x7FA1, 1, 0, 2], np.uint16)
special = special.view(ml_dtypes.bfloat16).reshape(4, 2)
y = shard(special, P("data", "tensor"), mesh)
assert gather(y).tobytes() == special.tobytes()
assert all(gather_at(y, (i,)).tobytes() == special[i].tobytes() for i in range(4))
assert "0, 1" in str(visualize(x))
"""


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh({"data": 2, "fsdp": 4})


def test_gathered_tree_matches_original(mesh: Mesh) -> None:
    rng = np.random.default_rng(0)
    tree = {
        "w": rng.normal(size=(64, 32)).astype(np.float32),
        "ids": rng.integers(9, size=(16,), dtype=np.int32),
        "step": np.int32(3),
        "name": "left alone",
    }
    rules = {"w": FSDPRules(min_size=0), "ids": P("data"), "step": P(), "name": None}
    placed = shard(tree, rules, mesh)
    assert placed["w"].sharding == NamedSharding(mesh, P("fsdp"))
    assert placed["w"].addressable_shards[0].data.shape == (16, 32)
    assert placed["name"] is tree["name"]
    back = gather(placed)
    assert back["name"] is tree["name"]
    for name in ("w", "ids", "step"):
        assert isinstance(back[name], np.ndarray)
        np.testing.assert_array_equal(back[name], tree[name])


def test_gather_on_devices_replicates(mesh: Mesh) -> None:
    x = shard(np.arange(8.0, dtype=np.float32), P("fsdp"), mesh)
    whole = gather({"x": x}, to_host=False)["x"]
    assert whole.sharding == NamedSharding(mesh, P())
    np.testing.assert_array_equal(whole, x)
    keys = shard(jax.random.split(jax.random.key(0), 8), P("fsdp"), mesh)
    assert gather(keys).is_fully_replicated
    alone = jnp.ones(3)
    assert gather(alone, to_host=False) is alone


def test_nnx_model_keeps_its_structure(mesh: Mesh) -> None:
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    placed = shard(model, FSDPRules(min_size=0), mesh)
    assert isinstance(placed, nnx.Linear)
    assert placed.kernel[...].sharding == NamedSharding(mesh, P("fsdp"))
    back = gather(placed).kernel.get_value()
    assert isinstance(back, np.ndarray)
    np.testing.assert_array_equal(back, model.kernel.get_value())


@pytest.mark.parametrize(
    ("where", "axes", "dim", "spec"),
    [
        (None, "data", 0, P("data")),
        (None, ("data", "fsdp"), 0, P(("data", "fsdp"))),
        (None, None, 0, P(("data", "fsdp"))),
        (None, "fsdp", 1, P(None, "fsdp")),
        (Composite(DataParallel(2), FSDP(4)), None, 0, P(("data", "fsdp"))),
    ],
)
def test_local_data_of_one_process_matches_device_put(
    where: Any, axes: Any, dim: int, spec: P, mesh: Mesh
) -> None:
    batch = {"x": np.arange(64.0, dtype=np.float32).reshape(8, 8), "n": np.int32(2)}
    placed = process_local_to_global(batch, where or mesh, axes, dim=dim)
    wanted = jax.device_put(batch["x"], NamedSharding(placed["x"].sharding.mesh, spec))
    assert placed["x"].sharding == wanted.sharding
    np.testing.assert_array_equal(placed["x"], wanted)
    for ours, theirs in zip(
        placed["x"].addressable_shards, wanted.addressable_shards, strict=True
    ):
        assert (ours.device, ours.index) == (theirs.device, theirs.index)
    assert placed["n"].sharding.spec == P()


@jax.tree_util.register_pytree_node_class
class Rows:
    """A batch class that accepts only arrays, like many users' classes."""

    def __init__(self, x: Any) -> None:
        self.x = jnp.asarray(x)

    def tree_flatten(self) -> tuple[tuple, None]:
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple) -> "Rows":
        return cls(*children)


def test_batch_may_be_custom_class(mesh: Mesh) -> None:
    placed = process_local_to_global(Rows(np.ones((8, 2))), mesh, "data")
    assert placed.x.sharding.spec == P("data")


def test_invalid_local_data_raises(mesh: Mesh) -> None:
    with pytest.raises(
        UnknownAxisError, match=re.escape("Cannot shard `batch.x` as P")
    ):
        process_local_to_global({"x": np.ones(8)}, mesh, "dat")
    with pytest.raises(IndivisibleDimError, match=r"`batch\.x` with global shape"):
        process_local_to_global({"x": np.ones(7)}, mesh, "data")
    with pytest.raises(SpecRankError, match="2 entries for 1 dims"):
        process_local_to_global({"x": np.ones(8)}, mesh, "data", dim=1)


def test_two_processes_join_local_data() -> None:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(index), port],
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors.decode()
