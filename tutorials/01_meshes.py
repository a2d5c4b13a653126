# %% [markdown]
# # 1. Meshes, axes, and what a sharding is
#
# A *mesh* names devices by coordinates. A *spec* says which mesh axis splits which dim of
# an array. Mesh and spec together are a *sharding*: it tells for every device which block
# of the array it holds. There is nothing else to it; all that follows is built on this.

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

simulate_devices(8)  # one CPU plays eight devices; leave it out on accelerators
assert jax.device_count() == 8

# %% [markdown]
# ## A mesh
#
# Eight devices, laid out as 4 by 2. The axes have names, and the names are all that the
# rest of the code will mention.

# %%
mesh = make_mesh({"data": 4, "tensor": 2})
ids = np.vectorize(lambda device: device.id)(mesh.devices)
print(dict(mesh.shape))
print(ids)  # device 5 is at data=2, tensor=1
assert ids[2, 1] == 5

# %% [markdown]
# ## A sharding, and its picture
#
# The spec has an entry for each dim. `P("data", "tensor")` splits dim 0 in four and dim 1
# in two: eight blocks, one for each device.

# %%
x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)  # 8 KiB
both = shard(x, P("data", "tensor"), mesh)
visualize(both)

# %% [markdown]
# A number in a block is the device that holds it. The array still is one array: its shape
# is the global one, and so are its values.

# %%
block = both.addressable_shards[5]
assert both.shape == (64, 32)  # global
assert block.data.shape == (16, 16)  # on each device: 64 / 4, 32 / 2
np.testing.assert_array_equal(block.data, x[32:48, 16:32])  # data=2, tensor=1
np.testing.assert_array_equal(both, x)

# %% [markdown]
# ## What is not split is copied
#
# A mesh axis that the spec leaves out holds copies. `P("data")` splits the rows in four,
# and the two devices of each pair hold the same block. `P()` copies all of it.

# %%
rows = shard(x, P("data"), mesh)
visualize(rows)

# %%
whole = shard(x, P(), mesh)
one_dim = shard(
    x, P(("data", "tensor")), mesh
)  # both axes over dim 0: 8 blocks of 8 rows


def bytes_per_device(array):
    return array.addressable_shards[0].data.nbytes


for name, array in {
    "both": both,
    "one_dim": one_dim,
    "rows": rows,
    "whole": whole,
}.items():
    print(
        f"{name:8} {array.sharding.spec!s:30} {bytes_per_device(array):5} bytes per device"
    )

assert bytes_per_device(both) == bytes_per_device(one_dim) == x.nbytes // 8
assert bytes_per_device(rows) == x.nbytes // 4
assert bytes_per_device(whole) == x.nbytes

# %% [markdown]
# ## Computation follows
#
# A program is written for whole arrays. The compiler splits it as the shardings say, and
# adds communication exactly where a device needs what another one has. `audit` counts it.
#
# Split the rows of `x` in the product `x @ w`, and each device has all it needs: the rows of
# the result are split like those of `x`, and nothing is sent.

# %%
w = np.ones((32, 16), np.float32)


def collectives(in_shardings, out_sharding):
    def product(x, w):
        return x @ w  # (64, 32) @ (32, 16) -> (64, 16)

    step = sharded_jit(
        product, mesh, in_shardings=in_shardings, out_shardings=out_sharding
    )
    np.testing.assert_allclose(step(x, w), x @ w, rtol=1e-6)
    report = audit(step.lower(x, w).compile())
    return {each.kind: each.bytes for each in report.collectives}


rows_split = collectives((P("data"), P()), P("data"))
print(rows_split)
assert rows_split == {}

# %% [markdown]
# Split the dim that is summed over, and each device has a part of every sum. One
# all-reduce adds the parts: the bytes of the whole result.

# %%
sum_split = collectives((P(None, "tensor"), P("tensor")), P())
print(sum_split)
assert sum_split == {"all-reduce": 64 * 16 * 4}

# %% [markdown]
# Ask for the rows whole that were computed in parts, and they are gathered.

# %%
gathered = collectives((P("data"), P()), P())
print(gathered)
assert gathered == {"all-gather": 64 * 16 * 4}

# %% [markdown]
# These two, and the reduce-scatter, which adds and keeps a part, are nearly all that
# distributed training sends. A strategy is a choice of shardings; what it costs follows
# from it. The rest of these tutorials is about good choices.
#
# ## Exercise
#
# Put `x` on the mesh so that each device holds 8 rows and all 32 columns, multiply it by a
# `w` that is split along its columns over `tensor`, and ask for `P("data", "tensor")`.
# Guess which collective there is, and its bytes, before you look.

# %%
answer = collectives((P(("data", "tensor")), P(None, "tensor")), P("data", "tensor"))
print(answer)
assert answer == {"all-gather": 16 * 32 * 4}  # the rows of `x` of each pair of devices
