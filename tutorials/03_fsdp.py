# %% [markdown]
# # 3. FSDP and ZeRO: where the bytes go
#
# In data parallelism every device keeps a copy of everything. With AdamW in float32 that is
# 16 bytes for each parameter: 4 for itself, 4 for its gradient, 8 for the optimizer's two
# moments. Sharding takes the copies away, one kind after the other. We count.

# %%
import jax
import numpy as np
import optax

from models import GPT, GPTConfig, next_token_loss
from nnx_parallel import FSDP, DataParallel, Trainer, audit, simulate_devices, visualize

simulate_devices(8)

config = GPTConfig.tiny(num_layers=4, embed_dim=128, seq_len=64)
print(f"{config.num_params:,} parameters")

# %% [markdown]
# ## Four answers to one question
#
# How much of each does a device hold?
#
# | | parameters | gradients | optimizer state |
# |---|---|---|---|
# | `DataParallel()` | whole | whole | whole |
# | `FSDP(shard="optimizer")`, ZeRO-1 | whole | whole | 1/N |
# | `FSDP(shard="gradients")`, ZeRO-2 | whole | 1/N | 1/N |
# | `FSDP()`, ZeRO-3 | 1/N | 1/N | 1/N |
#
# Whatever is kept in parts must be put together before it is used. We give the same run to
# all four.

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
# The losses are the same: where bytes lie is no part of the mathematics.
#
# ## Bytes per device
#
# `describe` says what a strategy promises. We check it against the arrays that are really
# there after five steps.


# %%
def held_by_one_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


print(f"{'':14}{'parameters':>12}{'gradients':>12}{'optimizer':>12}  bytes per device")
for name, trainer in trainers.items():
    told = trainer.describe()
    sizes = (told.params_bytes, told.gradients_bytes, told.optimizer_bytes)
    print(f"{name:14}" + "".join(f"{size:12,}" for size in sizes))
    assert held_by_one_device(trainer.state.params) == told.params_bytes
    assert held_by_one_device(trainer.state.opt_state) == told.optimizer_bytes

# %% [markdown]
# Of 8 devices each keeps about an eighth. "About", for small arrays (biases, norms) stay whole:
# to gather them would cost a message and save next to nothing. Nothing is left whole in
# silence; the description lists it.

# %%
zero3 = trainers["ZeRO-3"].describe()
whole = sum(row.bytes_per_device for row in zero3.replicated)
assert (zero3.params_bytes - whole) * 8 == 4 * config.num_params - whole
print(zero3.summary())

# %% [markdown]
# Here is the state itself. Each block has the number of the device that holds it.

# %%
params = trainers["ZeRO-3"].state.params
visualize(
    {"embedding": params["embed"]["embedding"], "mlp": params["blocks"]["layer"]["mlp"]}
)

# %% [markdown]
# `FSDP` takes the largest dim that divides. It never takes the leading `layers` dim, over
# which the model is scanned: then one device would hold whole layers, and the others wait.
#
# ## What it costs
#
# A parameter that is kept in parts is all-gathered just before it is used: once forward, and
# once more backward, for the gathered copy is dropped in between. Compare what a step sends.

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
split = 1 - whole / param_bytes  # the share that is not too small to be split
assert gathered["ZeRO-1"] == gathered["ZeRO-2"] == split  # what was updated, once
assert 1.9 * split < gathered["ZeRO-3"] <= 2 * split  # forward and backward

# %% [markdown]
# Data parallelism all-reduces the gradients. ZeRO-1 and 2 gather the parameters after each
# has been updated on its device. ZeRO-3 gathers them twice.
#
# An all-reduce is a reduce-scatter and an all-gather, so it moves twice the bytes. Where
# gradients are sharded an accelerator only reduces and scatters them: ZeRO-2 then moves exactly
# as much as data parallelism, and ZeRO-3 one and a half times that. So does ZeRO-1, whose
# gradients are whole. (XLA for CPU writes every sum as an all-reduce and takes a slice, which is
# what we see counted here. In mixed precision gradients and gathered parameters are half as
# large, but not what ZeRO-1 and 2 gather: what was updated is float32.)
# A tied embedding is used twice, so its gradient is summed twice: hence a little over 1.
#
# ## One layer at a time
#
# To gather all parameters at once would undo the saving. Here a layer's parameters are
# gathered inside the scan over layers, and the compiler's scratch memory shows it: ZeRO-3
# needs hardly more than the others, although it puts every parameter together twice.

# %%
for name, report in reports.items():
    print(f"{name:14}{report.temporary_bytes / 2**20:6.1f} MiB of temporaries")
extra = reports["ZeRO-3"].temporary_bytes - reports["data parallel"].temporary_bytes
assert extra < param_bytes / 2

# %% [markdown]
# ## Which one?
#
# The first that fits. ZeRO-2 keeps a third here, and in float32 sends no more bytes; ZeRO-3 is for
# models whose parameters do not fit. [Choose a strategy](../choose.md) does the arithmetic.
#
# ## Exercise
#
# `FSDP(min_size=0)` splits the small arrays too. How many bytes does it save here, and how many
# collectives more does a step make? `report.count("all-gather")` tells.
