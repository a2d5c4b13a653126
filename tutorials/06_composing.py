# %% [markdown]
# # 6. Composing: 3D parallelism
#
# Each strategy owns one axis of the mesh. `Composite` combines strategies: their axes form one
# mesh, and an array may be sharded along several of them. Large models are trained with three: a
# pipeline across the slowest links, FSDP across faster ones, and tensor parallelism inside a
# machine.

# %%
import collections

import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    OneFOneB,
    Pipeline,
    TensorParallel,
    Trainer,
    audit,
    errors,
    simulate_devices,
    visualize,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

simulate_devices(8)

strategy = Composite(Pipeline(2), FSDP(2), TensorParallel(2))
mesh = strategy.make_mesh()
print(dict(mesh.shape))

# %% [markdown]
# The order of the arguments does not matter: `tensor` is always on neighbouring devices, and `pipe`
# on the most distant ones. One size may be left out: that strategy takes the devices that remain.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert tuple(mesh.shape) == ("pipe", "fsdp", "tensor")
assert Composite(TensorParallel(2), Pipeline(2), FSDP(2)).make_mesh() == mesh
assert Composite(Pipeline(2), FSDP(), TensorParallel(2)).make_mesh() == mesh

# %% [markdown]
# ## One array, sharded three times
#
# All Trainers on this page copy the arrays of one built model. The kernel of an MLP has dims
# `(layers, embed, mlp)`. The pipeline shards `layers`, FSDP shards `embed`, and tensor parallelism
# shards `mlp`:

# %%
config = GPTConfig.tiny(
    num_layers=4, embed_dim=64, num_heads=4, seq_len=32, vocab_size=64
)
model = GPT(config, rngs=nnx.Rngs(0))


def make_trainer(strategy, devices=None):
    return Trainer(
        model,
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        num_microbatches=4,
        devices=devices,
        loggers=(),
    )


trainer = make_trainer(strategy)
block = trainer.state.params["blocks"]["layer"]
kernel = block["mlp"]["up"]["kernel"]
visualize(kernel)

# %% [markdown]
# The bias of the second matmul has dims `(layers, embed)`; it is too small for FSDP to shard, so
# four devices hold the same copy:

# %%
bias = block["mlp"]["down"]["bias"]
visualize(bias)

# %% [markdown]
# `describe` gives the reason for each sharding.

# %%
for row in trainer.describe().rows:
    if "mlp" in row.info.path or "embedding" in row.info.path:
        print(f"{row.info.path:30} {row.placement.stored!s:36} {row.placement.reason}")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert kernel.addressable_shards[0].data.size * 8 == kernel.size
assert bias.addressable_shards[0].data.size * 2 == bias.size

# %% [markdown]
# ## The same numbers
#
# First, as the reference, on one device.

# %%
rng = np.random.default_rng(0)
batches = [rng.integers(0, 64, (32, 33), dtype=np.int32) for _ in range(3)]

one = make_trainer(DataParallel(1), jax.devices()[:1])
expected = one.fit(batches, num_steps=3)["loss"]
print(expected)

# %% [markdown]
# **Data parallelism**:

# %%
data = make_trainer(DataParallel())
data_losses = data.fit(batches, num_steps=3)["loss"]
print(data_losses)

# %% [markdown]
# **FSDP within two groups** of four devices, for two machines with a slow link between them:

# %%
hybrid = make_trainer(Composite(DataParallel(2), FSDP()))
hybrid_losses = hybrid.fit(batches, num_steps=3)["loss"]
print(hybrid_losses)

# %% [markdown]
# **FSDP and tensor parallelism**: pairs of devices share every matmul.

# %%
two_d = make_trainer(Composite(FSDP(), TensorParallel(2)))
two_d_losses = two_d.fit(batches, num_steps=3)["loss"]
print(two_d_losses)

# %% [markdown]
# **A pipeline of two stages**, each sharded by FSDP over four devices.

# %%
stages = make_trainer(Composite(Pipeline(2), FSDP()))
stages_losses = stages.fit(batches, num_steps=3)["loss"]
print(stages_losses)

# %% [markdown]
# **All three strategies together**, as in the pictures above.

# %%
three_d_losses = trainer.fit(batches, num_steps=3)["loss"]
print(three_d_losses)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
for losses in (data_losses, hybrid_losses, two_d_losses, stages_losses, three_d_losses):
    np.testing.assert_allclose(losses, expected, rtol=1e-5)

# %% [markdown]
# ## Which devices communicate
#
# The groups of a collective show along which axis its devices lie. These are the collectives of one
# step:

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code"}
batch = trainer.shard_batch(batches[0])
report = audit(trainer.train_step.lower(trainer.state, batch).compile())


def axes_of(collective):
    """The mesh axes along which the devices of a group differ."""
    places = np.stack(np.unravel_index(collective.groups[0], mesh.devices.shape))
    return " ".join(
        axis
        for axis, along in zip(mesh.axis_names, places, strict=True)
        if len(set(along)) > 1
    )


found = collections.Counter()
for each in report.collectives:
    found[each.kind, axes_of(each), each.bytes_each] += each.count
print(f"{'collective':20}{'along':18}{'times':>5}{'bytes each':>12}")
for (kind, axes, size), count in sorted(found.items()):
    if size > 4096:  # not biases, norms and scalars
        print(f"{kind:20}{axes:18}{count:5}{size:12,}")

# %% [markdown]
# - `fsdp`: parameters are all-gathered where they are used.
# - `tensor`: partial sums of matmuls are all-reduced.
# - `pipe`: a `collective-permute` sends activations to the next stage, or gradients to the previous
#   one, in each of the six ticks of the schedule.
# - `pipe` again: the **all-to-alls**. All devices compute the embedding, the head and the loss,
#   each for a share of the rows. So in each tick the output of the last stage, and the gradient
#   that leaves the first stage, are spread over all stages. On the way back an all-gather is used.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
ticks = OneFOneB().table(num_stages=2, num_microbatches=4).num_ticks
activations = (32 // 4 // 2) * 32 * 64 * 4  # (rows, seq, embed) in float32 on a device
for kind in ("all-to-all", "collective-permute"):
    sizes = {key: count for key, count in found.items() if key[0] == kind}
    assert sizes == {(kind, "pipe", activations): 2 * ticks}
assert report.count("all-gather") > 0
assert report.count("all-reduce") > 0

# %% [markdown]
# ## Conflicting claims
#
# Two parts that claim the same axis are an error, before anything is compiled:

# %%
try:
    Composite(FSDP(4), FSDP(2))
except errors.PlacementConflictError as error:
    print(error)
else:
    raise AssertionError("no error")

# %% [markdown]
# [Choose a strategy](../choose.md) has rules for the sizes.
#
# ## Exercise
#
# Print `trainer.describe().params_bytes` for the five strategies. Which needs the most memory,
# which the least? On two machines with four devices each, which of the five sends the fewest bytes
# between the machines?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
# Devices 0 to 3 are on one machine, 4 to 7 on the other.
machine = np.arange(8) // 4


def bytes_between(trainer):
    batch = trainer.shard_batch(batches[0])
    compiled = trainer.train_step.lower(trainer.state, batch).compile()
    return sum(
        each.bytes
        for each in audit(compiled).collectives
        if any(len(set(machine[list(group)])) > 1 for group in each.groups)
    )


sent, held = {}, {}
for each in (data, hybrid, two_d, stages, trainer):
    name = repr(each.strategy)
    sent[name], held[name] = bytes_between(each), each.describe().params_bytes
    print(
        f"{name:52} holds {held[name]:8,} bytes, sends {sent[name]:9,} between machines"
    )
# `DataParallel` holds the most. The pipeline with FSDP holds the least, and sends the fewest bytes:
# only activations go from one machine to the other. FSDP with tensor parallelism sends the most,
# because its `fsdp` axis lies across both machines: parameters are gathered over the slow link.
assert max(held, key=held.get) == repr(data.strategy)
assert min(held, key=held.get) == min(sent, key=sent.get) == repr(stages.strategy)
assert max(sent, key=sent.get) == repr(two_d.strategy)
