# %% [markdown]
# # 3. FSDP and ZeRO: where the bytes go
#
# In data parallelism every device holds a replica of everything. With AdamW in float32 that is
# 16 bytes per parameter: 4 for itself, 4 for its gradient, 8 for the optimizer's two moments.
# Sharding removes the replicas, one kind after the other. We count.

# %%
import jax
import numpy as np
import optax

from nnx_parallel import FSDP, DataParallel, Trainer, audit, simulate_devices, visualize
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

simulate_devices(8)

config = GPTConfig.tiny(num_layers=4, embed_dim=128, seq_len=64)
print(f"{config.num_params:,} parameters")

# %% [markdown]
# ## Four strategies
#
# How much of each does a device hold, of N?
#
# | | parameters | gradients | optimizer state |
# |---|---|---|---|
# | `DataParallel()` | all | all | all |
# | `FSDP(shard="optimizer")`, ZeRO-1 | all | all | 1/N |
# | `FSDP(shard="gradients")`, ZeRO-2 | all | 1/N | 1/N |
# | `FSDP()`, ZeRO-3 | 1/N | 1/N | 1/N |
#
# Whatever is sharded must be gathered before it is used. We train the same model under all
# four.

# %%
strategies = {
    "data parallel": DataParallel(),
    "ZeRO-1": FSDP(shard="optimizer"),
    "ZeRO-2": FSDP(shard="gradients"),
    "ZeRO-3": FSDP(),
}
rng = np.random.default_rng(0)
batches = [rng.integers(0, 256, (16, 65), dtype=np.int32) for _ in range(5)]


def make_trainer(strategy):
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        loggers=(),
    )


trainers = {name: make_trainer(strategy) for name, strategy in strategies.items()}
losses = {name: t.fit(batches, num_steps=5)["loss"] for name, t in trainers.items()}
for name, values in losses.items():
    print(f"{name:14}", np.round(values, 4))
    np.testing.assert_allclose(values, losses["data parallel"], rtol=1e-5)

# %% [markdown]
# The losses are the same: shardings do not change the mathematics.
#
# ## Bytes per device
#
# `describe` states the shardings of a strategy. We compare its bytes with the arrays after five
# steps.


# %%
def held_by_one_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


print(f"{'':14}{'parameters':>12}{'gradients':>12}{'optimizer':>12}  bytes per device")
for name, trainer in trainers.items():
    table = trainer.describe()
    sizes = (table.params_bytes, table.gradients_bytes, table.optimizer_bytes)
    print(f"{name:14}" + "".join(f"{size:12,}" for size in sizes))
    assert held_by_one_device(trainer.state.params) == table.params_bytes
    assert held_by_one_device(trainer.state.opt_state) == table.optimizer_bytes

# %% [markdown]
# Each of 8 devices holds about an eighth. "About", because small arrays (biases, norms) stay
# replicated: gathering them would cost a message and save next to nothing. Nothing is silently
# replicated; the description lists it.

# %%
zero3 = trainers["ZeRO-3"].describe()
replicated = sum(row.bytes_per_device for row in zero3.replicated)
assert (zero3.params_bytes - replicated) * 8 == 4 * config.num_params - replicated
print(zero3.summary())

# %% [markdown]
# Here is the state itself. Each block shows the number of the device that holds it.

# %%
params = trainers["ZeRO-3"].state.params
visualize(
    {"embedding": params["embed"]["embedding"], "mlp": params["blocks"]["layer"]["mlp"]}
)

# %% [markdown]
# `FSDP` shards the largest dim that its axis divides. It never takes the leading `layers` dim,
# over which the model is scanned: then one device would hold complete layers, and the others
# would wait for them.
#
# ## Communication volume
#
# A sharded parameter is all-gathered just before it is used: once in the forward pass, and once
# more in the backward pass, since the gathered copy is dropped in between. Compare the
# collectives of a step.

# %%
reports = {}
for name, trainer in trainers.items():
    batch = trainer.shard_batch(batches[0])
    reports[name] = audit(trainer.train_step.lower(trainer.state, batch).compile())

param_bytes = 4 * config.num_params
print(
    f"{'':14}{'all-reduce':>12}{'all-gather':>12}   in units of the parameters' bytes"
)
for name, report in reports.items():
    sent = [report.bytes(kind) / param_bytes for kind in ("all-reduce", "all-gather")]
    print(f"{name:14}{sent[0]:12.2f}{sent[1]:12.2f}")

gathered = {
    name: report.bytes("all-gather") / param_bytes for name, report in reports.items()
}
assert gathered["data parallel"] == 0
sharded = 1 - replicated / param_bytes  # the share in arrays that are large enough
assert gathered["ZeRO-1"] == gathered["ZeRO-2"] == sharded  # updated parameters, once
assert 1.9 * sharded < gathered["ZeRO-3"] <= 2 * sharded  # forward and backward

# %% [markdown]
# Data parallelism all-reduces the gradients. ZeRO-1 and 2 gather the parameters after each
# shard has been updated on its device. ZeRO-3 gathers them twice.
#
# An all-reduce is a reduce-scatter and an all-gather, so it sends twice the bytes of either.
# Sharded gradients only need the reduce-scatter on an accelerator: ZeRO-2 then sends as much as
# data parallelism, and ZeRO-3 one and a half times that. So does ZeRO-1, whose gradients are
# replicated. (XLA for CPU compiles every sum to an all-reduce and a slice, which is what is
# counted here. In mixed precision gradients and gathered parameters are half as large, except
# those that ZeRO-1 and 2 gather: updated parameters are float32.)
# A tied embedding is used twice, so its gradient is summed twice: hence a little over 1.
#
# ## One layer at a time
#
# Gathering all parameters at once would undo the saving. Here a layer's parameters are gathered
# inside the scan over layers, and the compiler's scratch memory shows it: ZeRO-3 needs hardly
# more than the others, although it gathers every parameter twice.

# %%
for name, report in reports.items():
    print(f"{name:14}{report.temporary_bytes / 2**20:6.1f} MiB of temporaries")
extra = reports["ZeRO-3"].temporary_bytes - reports["data parallel"].temporary_bytes
assert extra < param_bytes / 2

# %% [markdown]
# ## Which one?
#
# The first that fits. ZeRO-2 needs a third of the memory here, and in float32 sends no more bytes;
# ZeRO-3 is for models whose parameters do not fit. [Choose a strategy](../choose.md) does the
# arithmetic.
#
# ## Exercise
#
# `FSDP(min_size=0)` shards the small arrays too. How many bytes does it save here, and how many
# more collectives does a step have? Use `report.count("all-gather")`.
