# %% [markdown]
# # 1. Meshes, axes and shardings
#
# A *mesh* gives every device coordinates along named axes. A *spec* assigns mesh axes to the dims
# of an array. Together they are a *sharding*: it says which block of the array each device holds.

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

# %% [markdown]
# ## A mesh
#
# This mesh lays out eight devices as 4 by 2:

# %%
mesh = make_mesh({"data": 4, "tensor": 2})
ids = np.vectorize(lambda device: device.id)(mesh.devices)
print(dict(mesh.shape))
print(ids)  # device 5 is at data=2, tensor=1

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert jax.device_count() == 8
assert ids[2, 1] == 5

# %% [markdown]
# ## A sharding, and its picture
#
# A spec has one entry for each dim. `P("data", "tensor")` splits dim 0 into four parts and dim 1 into
# two. That makes eight blocks, one for each device.

# %%
x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)  # 8 KiB
both = shard(x, P("data", "tensor"), mesh)
visualize(both)

# %% [markdown]
# The number in a block is the device that holds it. The array is still one array, with its global
# shape and its values. Device 5 holds rows 32 to 47 and columns 16 to 31:

# %%
block = both.addressable_shards[5]
print("global shape", both.shape, "shape on device 5", block.data.shape)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert both.shape == (64, 32)  # global
assert block.data.shape == (16, 16)  # on each device: 64 / 4, 32 / 2
np.testing.assert_array_equal(block.data, x[32:48, 16:32])  # data=2, tensor=1
np.testing.assert_array_equal(both, x)

# %% [markdown]
# ## Replication
#
# A mesh axis that the spec leaves out does not split the array: the devices along it hold the same
# block, and the array is *replicated* along this axis. `P("data")` splits the rows into four
# blocks, and each block is on two devices:

# %%
rows = shard(x, P("data"), mesh)
visualize(rows)

# %% [markdown]
# `P()` replicates the array on every device:

# %%
replicated = shard(x, P(), mesh)
visualize(replicated)

# %% [markdown]
# One dim can be split along both axes, here into eight blocks of eight rows:

# %%
one_dim = shard(x, P(("data", "tensor")), mesh)
visualize(one_dim)


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
def bytes_per_device(array):
    return array.addressable_shards[0].data.nbytes


assert bytes_per_device(both) == bytes_per_device(one_dim) == x.nbytes // 8
assert bytes_per_device(rows) == x.nbytes // 4
assert bytes_per_device(replicated) == x.nbytes

# %% [markdown]
# ## Computation follows the shardings
#
# You write a program for global arrays. The compiler partitions it by the shardings, and adds
# communication where a device needs data that another device holds. Each such operation is a
# *collective*. `audit` counts the collectives of a compiled program and their bytes.
#
# Take the matmul `x @ w` with the rows of `x` sharded, and `w` replicated. Each device has all that
# it needs for its rows of the result, so there is no communication:

# %%
w = np.ones((32, 16), np.float32)


def collectives(in_shardings, out_sharding):
    def matmul(x, w):
        return x @ w  # (64, 32) @ (32, 16) -> (64, 16)

    step = sharded_jit(
        matmul, mesh, in_shardings=in_shardings, out_shardings=out_sharding
    )
    report = audit(step.lower(x, w).compile())
    return {each.kind: each.bytes for each in report.collectives}


rows_split = collectives((P("data"), P()), P("data"))
print(rows_split)

# %% [markdown]
# Now shard the contracted dim, which is the columns of `x` and the rows of `w`. Each device computes
# a partial sum of every element of the result. An *all-reduce* adds the partial sums; it has as many
# bytes as the whole result:

# %%
sum_split = collectives((P(None, "tensor"), P("tensor")), P())
print(sum_split)

# %% [markdown]
# Shard the rows again, but ask for a replicated result. Then an *all-gather* collects the rows on
# every device:

# %%
gathered = collectives((P("data"), P()), P())
print(gathered)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert rows_split == {}
assert sum_split == {"all-reduce": 64 * 16 * 4}
assert gathered == {"all-gather": 64 * 16 * 4}

# %% [markdown]
# A third collective, the *reduce-scatter*, adds like an all-reduce and leaves each device with one
# shard of the sum. A strategy is a choice of shardings, and the shardings determine which
# collectives a step needs.
#
# ## Exercise
#
# Shard `x` so that each device holds 8 rows and all 32 columns, multiply it by a `w` whose columns
# are sharded over `tensor`, and request the result as `P("data", "tensor")`. Predict the collective
# and its bytes before you look.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
# The two devices of a pair hold different rows, and each needs the rows of the other: an all-gather
# of 16 rows of 32 columns.
answer = collectives((P(("data", "tensor")), P(None, "tensor")), P("data", "tensor"))
print(answer)
assert answer == {"all-gather": 16 * 32 * 4}
