# %% [markdown]
# # 1. Meshes, axes, and what a sharding is
#
# A *mesh* gives every device coordinates along named axes. A *spec* assigns mesh axes to the
# dims of an array. Together they are a *sharding*: it determines for every device which block of
# the array it holds. Everything else in these tutorials builds on this.

# %%
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    audit,
    make_mesh,
    shard,
    sharded_jit,
    simulate_devices,
    visualize,
)

simulate_devices(8)  # eight devices on one CPU; leave it out on accelerators
assert jax.device_count() == 8

# %% [markdown]
# ## A mesh
#
# Eight devices, laid out as 4 by 2. The axes have names; the rest of the code mentions only
# these.

# %%
mesh = make_mesh({"data": 4, "tensor": 2})
ids = np.vectorize(lambda device: device.id)(mesh.devices)
print(dict(mesh.shape))
print(ids)  # device 5 is at data=2, tensor=1
assert ids[2, 1] == 5

# %% [markdown]
# ## A sharding, and its picture
#
# The spec has an entry per dim. `P("data", "tensor")` splits dim 0 in four and dim 1 in two:
# eight blocks, one per device.

# %%
x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)  # 8 KiB
both = shard(x, P("data", "tensor"), mesh)
visualize(both)

# %% [markdown]
# The number in a block is the device that holds it. The array is still one array, with its
# global shape and values.

# %%
block = both.addressable_shards[5]
assert both.shape == (64, 32)  # global
assert block.data.shape == (16, 16)  # on each device: 64 / 4, 32 / 2
np.testing.assert_array_equal(block.data, x[32:48, 16:32])  # data=2, tensor=1
np.testing.assert_array_equal(both, x)

# %% [markdown]
# ## Replication
#
# Along a mesh axis that the spec leaves out, the array is replicated. `P("data")` splits the
# rows in four, and the two devices of each pair hold the same block. `P()` replicates the
# array on every device.

# %%
rows = shard(x, P("data"), mesh)
visualize(rows)

# %%
replicated = shard(x, P(), mesh)
one_dim = shard(
    x, P(("data", "tensor")), mesh
)  # both axes over dim 0: 8 blocks of 8 rows


def bytes_per_device(array):
    return array.addressable_shards[0].data.nbytes


for name, array in {
    "both": both,
    "one_dim": one_dim,
    "rows": rows,
    "replicated": replicated,
}.items():
    print(
        f"{name:10} {array.sharding.spec!s:30} {bytes_per_device(array):5} bytes per device"
    )

assert bytes_per_device(both) == bytes_per_device(one_dim) == x.nbytes // 8
assert bytes_per_device(rows) == x.nbytes // 4
assert bytes_per_device(replicated) == x.nbytes

# %% [markdown]
# ## Computation follows the shardings
#
# A program is written for global arrays. The compiler partitions it by the shardings, and adds
# communication where a device needs data of another one. `audit` counts it.
#
# Shard the rows of `x` in the matmul `x @ w`, and each device has all it needs: the rows of the
# result are sharded like those of `x`, and there is no communication.

# %%
w = np.ones((32, 16), np.float32)


def collectives(in_shardings, out_sharding):
    def matmul(x, w):
        return x @ w  # (64, 32) @ (32, 16) -> (64, 16)

    step = sharded_jit(
        matmul, mesh, in_shardings=in_shardings, out_shardings=out_sharding
    )
    np.testing.assert_allclose(step(x, w), x @ w, rtol=1e-6)
    report = audit(step.lower(x, w).compile())
    return {each.kind: each.bytes for each in report.collectives}


rows_split = collectives((P("data"), P()), P("data"))
print(rows_split)
assert rows_split == {}

# %% [markdown]
# Shard the contracted dim, and each device has a partial sum of every element. One all-reduce
# adds them: the bytes of the unsharded result.

# %%
sum_split = collectives((P(None, "tensor"), P("tensor")), P())
print(sum_split)
assert sum_split == {"all-reduce": 64 * 16 * 4}

# %% [markdown]
# Request a replicated result of a computation on sharded rows, and it is all-gathered.

# %%
gathered = collectives((P("data"), P()), P())
print(gathered)
assert gathered == {"all-gather": 64 * 16 * 4}

# %% [markdown]
# These two and the reduce-scatter, which adds and keeps one shard, are nearly all the
# communication of distributed training. A strategy is a choice of shardings, which determines
# its cost. The rest of these tutorials is about good choices.
#
# ## Exercise
#
# Shard `x` so that each device holds 8 rows and all 32 columns, multiply it by a `w` whose
# columns are sharded over `tensor`, and request the result as `P("data", "tensor")`. Predict
# the collective and its bytes before you look.

# %%
answer = collectives((P(("data", "tensor")), P(None, "tensor")), P("data", "tensor"))
print(answer)
assert answer == {"all-gather": 16 * 32 * 4}  # the rows of `x` of each pair of devices
