# %% [markdown]
# # 6. Composing: 3D parallelism
#
# Each strategy owns one axis of the mesh. `Composite` combines them: the axes multiply, the claims
# on each array merge. Large models are trained with three: stages over the slowest links, shards
# of the state over faster ones, parts of each matmul over the fastest.

# %%
import jax
import numpy as np
import optax

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
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
# The order of the arguments does not matter. The mesh puts the axis that communicates most often
# (`tensor`) innermost, where the devices are neighbours, and `pipe` outermost.

# %%
assert Composite(TensorParallel(2), Pipeline(2), FSDP(2)).make_mesh() == mesh
assert tuple(mesh.shape) == ("pipe", "fsdp", "tensor")

# %% [markdown]
# One size may be left out and takes the remaining devices. So the same line works for 8 devices
# and for 800.

# %%
assert Composite(Pipeline(2), FSDP(), TensorParallel(2)).make_mesh().shape == mesh.shape

# %% [markdown]
# ## Three claims on one array
#
# The kernel of an MLP has dims `(layers, embed, mlp)`. The pipeline shards `layers`, tensor
# parallelism `mlp`, and FSDP the free dim `embed`. Each device holds an eighth.

# %%
config = GPTConfig.tiny(
    num_layers=4, embed_dim=64, num_heads=4, seq_len=32, vocab_size=64
)


def make_trainer(strategy, devices=None):
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        num_microbatches=4,
        devices=devices,
        loggers=(),
    )


trainer = make_trainer(strategy)
kernel = trainer.state.params["blocks"]["layer"]["mlp"]["up"]["kernel"]
print(kernel.shape, kernel.sharding.spec)
assert kernel.addressable_shards[0].data.size * 8 == kernel.size
visualize(kernel)

# %% [markdown]
# `describe` gives the reason for each sharding.

# %%
for row in trainer.describe().rows:
    if "mlp" in row.info.path or "embedding" in row.info.path:
        print(f"{row.info.path:30} {row.placement.stored!s:36} {row.placement.reason}")

# %% [markdown]
# ## The same numbers
#
# Five strategies for one run on eight devices. Only the strategy changes.

# %%
rng = np.random.default_rng(0)
batches = [rng.integers(0, 64, (32, 33), dtype=np.int32) for _ in range(3)]
trainers = [
    make_trainer(DataParallel()),
    make_trainer(Composite(DataParallel(2), FSDP())),
    make_trainer(Composite(FSDP(), TensorParallel(2))),
    make_trainer(Composite(Pipeline(2), FSDP())),
    trainer,
]
one = make_trainer(DataParallel(1), jax.devices()[:1]).fit(batches, num_steps=3)["loss"]
print(f"{'one device':52}", one)
for each in trainers:
    losses = each.fit(batches, num_steps=3)["loss"]
    print(f"{each.strategy!r:52}", losses)
    np.testing.assert_allclose(losses, one, rtol=1e-5)

# %% [markdown]
# ## Which devices communicate
#
# In this mesh of devices 0 to 7, `tensor` joins 0 and 1, `fsdp` 0 and 2, `pipe` 0 and 4. The groups
# of a collective show its axis. Count the collectives of one step.

# %%
batch = trainer.shard_batch(batches[0])
report = audit(trainer.train_step.lower(trainer.state, batch).compile())
for kind in sorted({c.kind for c in report.collectives}):
    print(f"{kind:20} {report.count(kind):4} times, {report.bytes(kind):10,} bytes")
assert report.count("all-gather") > 0  # fsdp: parameters, where they are used
assert report.count("all-reduce") > 0  # tensor: partial sums of matmuls; and gradients
assert report.count("collective-permute") > 0  # pipe: to the next stage

# %% [markdown]
# ## Conflicting claims
#
# Two parts that claim the same axis are an error, before anything is compiled.

# %%
try:
    Composite(FSDP(4), FSDP(2))
except errors.PlacementConflictError as error:
    print(error)
else:
    raise AssertionError("no error")

# %% [markdown]
# ## How to choose the sizes
#
# - `TensorParallel`: at most the devices of one machine; it sends activations in every layer.
# - `Pipeline`: as many stages as needed to fit, with several times as many microbatches.
# - `FSDP`: the rest. `DataParallel` outside of it where a group already fits.
#
# [Choose a strategy](../choose.md) computes them for a model and its machines.
#
# ## Exercise
#
# Print `trainer.describe().params_bytes` for the five strategies. Which needs most memory, which
# least? On two machines with four devices each, which of the five sends the fewest bytes between
# the machines?
