# %% [markdown]
# # 3. FSDP and ZeRO: where the bytes go
#
# In data parallelism every device holds a replica of the whole training state. With AdamW in
# float32 it has 16 bytes per parameter: 4 for the parameter, 4 for its gradient, and 8 for two
# moments. FSDP shards this state. This tutorial counts the bytes that it saves, and the
# communication that it costs.

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
# How much of the state does one of N devices hold?
#
# | | parameters | gradients | optimizer state |
# |---|---|---|---|
# | `DataParallel()` | all | all | all |
# | `FSDP(shard="optimizer")`, ZeRO-1 | all | all | 1/N |
# | `FSDP(shard="gradients")`, ZeRO-2 | all | 1/N | 1/N |
# | `FSDP()`, ZeRO-3 | 1/N | 1/N | 1/N |
#
# The next function trains for five steps and draws the memory of one device: a block is 128 KiB.

# %%
rng = np.random.default_rng(0)
batches = [rng.integers(0, 256, (16, 65), dtype=np.int32) for _ in range(5)]
trainers, losses = {}, {}


def train(name, strategy):
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        loggers=(),
    )
    trainers[name] = trainer
    losses[name] = trainer.fit(batches, num_steps=5)["loss"]
    print("losses    ", np.round(losses[name], 4))
    draw_memory(trainer.describe())


# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code"}
def draw_memory(description):
    """Prints one line each for parameters, gradients and optimizer state."""
    sizes = {
        "parameters": description.params_bytes,
        "gradients": description.gradients_bytes,
        "optimizer": description.optimizer_bytes,
    }
    for name, size in sizes.items():
        print(f"{name:10} {size / 2**20:6.2f} MiB ", "█" * round(size / 2**17))


# %% [markdown]
# **Data parallelism** keeps everything on every device.

# %%
train("data parallel", DataParallel())

# %% [markdown]
# **ZeRO-1** shards the optimizer state. Each device updates its shard of the parameters, and then
# all devices gather the updated parameters.

# %%
train("ZeRO-1", FSDP(shard="optimizer"))

# %% [markdown]
# **ZeRO-2** also shards the gradients.

# %%
train("ZeRO-2", FSDP(shard="gradients"))

# %% [markdown]
# **ZeRO-3** also shards the parameters. They are gathered before each use.

# %%
train("ZeRO-3", FSDP())

# %% [markdown]
# The losses are the same under all four. Small arrays (biases and norms) stay replicated under
# ZeRO-3, because each gather would cost a message. The description lists them, with the reason:

# %%
zero3 = trainers["ZeRO-3"].describe()
print(zero3.summary())


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
def held_by_one_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


for name, trainer in trainers.items():
    np.testing.assert_allclose(losses[name], losses["data parallel"], rtol=1e-5)
    table = trainer.describe()
    assert held_by_one_device(trainer.state.params) == table.params_bytes
    assert held_by_one_device(trainer.state.opt_state) == table.optimizer_bytes
replicated = sum(row.bytes_per_device for row in zero3.replicated)
assert (zero3.params_bytes - replicated) * 8 == 4 * config.num_params - replicated

# %% [markdown]
# ## The shards of each device
#
# Each block shows the number of the device that holds it:

# %%
params = trainers["ZeRO-3"].state.params
visualize(
    {"embedding": params["embed"]["embedding"], "mlp": params["blocks"]["layer"]["mlp"]}
)

# %% [markdown]
# `FSDP` shards a dim that the size of its axis divides, usually the dim that a product contracts.
# It never shards the leading `layers` dim, because the model runs one layer after the other.
#
# ## Communication
#
# A sharded parameter is all-gathered just before it is used, and again in the backward pass.
# `audit` counts the bytes of a step's collectives, here in units of the parameters' bytes:

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code"}
param_bytes = 4 * config.num_params
reports = {}
for name, trainer in trainers.items():
    batch = trainer.shard_batch(batches[0])
    reports[name] = audit(trainer.train_step.lower(trainer.state, batch).compile())
print(f"{'':14}{'all-reduce':>12}{'all-gather':>12}{'temporaries':>14}")
for name, report in reports.items():
    sent = [report.bytes(kind) / param_bytes for kind in ("all-reduce", "all-gather")]
    scratch = report.temporary_bytes / 2**20
    print(f"{name:14}{sent[0]:12.2f}{sent[1]:12.2f}{scratch:10.1f} MiB")

# %% [markdown]
# - Data parallelism all-reduces the gradients once.
# - ZeRO-1 and ZeRO-2 also all-gather the parameters once, after the update.
# - ZeRO-3 all-gathers the parameters twice.
#
# The all-reduce column is a little over 1 because the embedding is used twice.
#
# XLA's CPU compiler writes an all-reduce and a slice for every reduce-scatter. On an accelerator,
# ZeRO-2 sends as much as data parallelism, and ZeRO-1 and ZeRO-3 send one and a half times as much.
# In mixed precision gradients and gathered parameters have half the bytes, except the updated
# parameters of ZeRO-1 and ZeRO-2.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
gathered = {
    name: report.bytes("all-gather") / param_bytes for name, report in reports.items()
}
assert gathered["data parallel"] == 0
sharded = 1 - replicated / param_bytes  # the share in arrays that are large enough
assert gathered["ZeRO-1"] == gathered["ZeRO-2"] == sharded  # updated parameters, once
assert 1.9 * sharded < gathered["ZeRO-3"] <= 2 * sharded  # forward and backward

# %% [markdown]
# ## One layer at a time
#
# FSDP gathers the parameters of one layer inside the loop over layers, and drops them before the
# next. So in the last column, the temporaries of ZeRO-3 are hardly larger than the others'.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
extra = reports["ZeRO-3"].temporary_bytes - reports["data parallel"].temporary_bytes
assert extra < param_bytes / 2

# %% [markdown]
# [Choose a strategy](../choose.md) says which one to take.
#
# ## Exercise
#
# `FSDP(min_size=0)` shards the small arrays too. How many bytes does it save here, and how many
# more collectives does a step have? Use `report.count("all-gather")`.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
train("all sharded", FSDP(min_size=0))
trainer = trainers["all sharded"]
batch = trainer.shard_batch(batches[0])
report = audit(trainer.train_step.lower(trainer.state, batch).compile())
saved = sum(
    getattr(zero3, kind) - getattr(trainer.describe(), kind)
    for kind in ("params_bytes", "gradients_bytes", "optimizer_bytes")
)
gathers = report.count("all-gather"), reports["ZeRO-3"].count("all-gather")
print(
    f"saves {saved / 1024:.0f} KiB per device; {gathers[0]} all-gathers, not {gathers[1]}"
)
assert saved > 0
assert gathers[0] > gathers[1]
