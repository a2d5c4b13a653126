# %% [markdown]
# # 4. Tensor and sequence parallelism
#
# Tensor parallelism shards *matmuls*: each device has a part of every weight matrix and computes a
# part of every layer. Two consecutive matmuls communicate only once if the first is sharded by
# columns and the second by rows.

# %%
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    Composite,
    DataParallel,
    TensorParallel,
    Trainer,
    audit,
    errors,
    make_mesh,
    shard,
    sharded_jit,
    simulate_devices,
    visualize,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

simulate_devices(8)

# %% [markdown]
# ## By columns, then by rows
#
# An MLP computes `gelu(x @ up) @ down`. Shard `up` by columns: a device computes the complete
# values of a quarter of the hidden units. Shard `down` by rows: the device gets a partial sum of
# every output. One all-reduce adds the partial sums.

# %%
mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
rng = np.random.default_rng(0)
x = rng.normal(size=(16, 64)).astype(np.float32)  # (batch, embed)
up = rng.normal(size=(64, 256)).astype(np.float32)  # (embed, mlp)
down = rng.normal(size=(256, 64)).astype(np.float32)  # (mlp, embed)
visualize(
    {
        "up, by columns": shard(up, P(None, "tensor"), mesh),
        "down, by rows": shard(down, P("tensor"), mesh),
    }
)

# %% [markdown]
# The next function compiles the MLP with given shardings, and counts the bytes of its collectives.

# %%


def mlp(x, up, down):
    return jax.nn.gelu(x @ up) @ down  # (16, 64) -> (16, 256) -> (16, 64)


def sent(up_spec, down_spec):
    step = sharded_jit(
        mlp, mesh, in_shardings=(P(), up_spec, down_spec), out_shardings=P()
    )
    report = audit(step.lower(x, up, down).compile())
    return {kind: report.bytes(kind) for kind in {c.kind for c in report.collectives}}


columns_rows = sent(P(None, "tensor"), P("tensor", None))
print("columns, then rows:   ", columns_rows)
columns_columns = sent(P(None, "tensor"), P(None, "tensor"))
print("columns, then columns:", columns_columns)

# %% [markdown]
# By columns and then by rows, one all-reduce of the output is enough. With both matrices sharded by
# columns, the whole hidden layer is gathered as well, which is four times as large.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert columns_rows == {"all-reduce": x.nbytes}  # once, the size of the output
assert sum(columns_columns.values()) > 4 * x.nbytes  # the hidden layer is gathered

# %% [markdown]
# ## In a transformer
#
# In attention, query, key and value are sharded by columns, which means by heads, and the output
# projection by rows. The MLP is the one above. So a block all-reduces its activations twice in the
# forward pass and twice in the backward pass. `TensorParallel` shards the dims that the model names
# `heads`, `mlp` and `vocab`.

# %%
config = GPTConfig.tiny(num_layers=3, embed_dim=64, num_heads=8, seq_len=32)
tokens = [rng.integers(0, 256, (16, 33), dtype=np.int32) for _ in range(4)]


def make_trainer(strategy, devices=None):
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        devices=devices,
        loggers=(),
    )


four = jax.devices()[:4]
tensor = make_trainer(TensorParallel(4), four)
mlp_params = tensor.state.params["blocks"]["layer"]["mlp"]
visualize({name: layer["kernel"] for name, layer in mlp_params.items()})

# %% [markdown]
# `up` is sharded along its last dim and `down` along the one before it. Dim 0 counts the layers.
#
# These are the collectives of the forward pass, in a loop over three layers:


# %%
def step_report(trainer):
    batch = trainer.shard_batch(tokens[0])
    return audit(trainer.train_step.lower(trainer.state, batch).compile())


report = step_report(tensor)
forward = [
    c for c in report.collectives if c.count == 3 and "transpose" not in c.source
]
activation_bytes = 16 * 32 * 64 * 4  # (batch, seq, embed) in float32
for each in forward:
    print(f"{each.kind}: {each.count} times {each.bytes_each:,} bytes")
print(f"activations of the batch: {activation_bytes:,} bytes")

# %% [markdown]
# The communication volume grows with the *batch*, not with the parameters, and every layer waits
# for it. So use only devices of one machine, where links are fast.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert [c.kind for c in forward] == ["all-reduce", "all-reduce"]
assert all(c.bytes_each == activation_bytes for c in forward)

# %% [markdown]
# ## Sequence parallelism
#
# Between the matmuls every device holds the same activations. `sequence=True` shards them along
# `seq`. The all-reduce then becomes its two halves: a reduce-scatter after one matmul and an
# all-gather before the next. The communication volume stays the same, and a device keeps a quarter
# of the activations.

# %%
sequence = make_trainer(TensorParallel(4, sequence=True), four)
sequence_report = step_report(sequence)
for name, found in {"tensor": report, "and sequence": sequence_report}.items():
    kinds = {
        kind: found.count(kind)
        for kind in ("all-reduce", "all-gather", "reduce-scatter")
    }
    print(
        f"{name:13}", kinds, f"{found.temporary_bytes / 2**20:.2f} MiB of temporaries"
    )

# %% [markdown]
# XLA's CPU compiler writes an all-reduce and a slice for every reduce-scatter.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert sequence_report.count("all-gather") > report.count("all-gather")
assert sequence_report.temporary_bytes < report.temporary_bytes

# %% [markdown]
# ## Overlap
#
# With `overlap="ring"` a matmul does not wait for the all-gather before it: the devices send their
# shards around a ring by `collective-permute`, and multiply the shard that they have while the next
# one arrives.

# %%
ring = make_trainer(TensorParallel(4, overlap="ring"), four)
ring_report = step_report(ring)
print({kind: ring_report.count(kind) for kind in ("all-gather", "collective-permute")})

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert ring_report.count("collective-permute") > 0
assert ring_report.count("all-gather") < sequence_report.count("all-gather")

# %% [markdown]
# On simulated devices the ring gains nothing, since they share one memory. With the TPU compiler for
# 4 chips, 95 % of the ring's bytes overlap with matmuls; without the ring none do
# (`python -m benchmarks overlap`).
#
# ## The same numbers
#
# On one device:

# %%
one = make_trainer(DataParallel(1), jax.devices()[:1])
expected = one.fit(tokens, num_steps=4)["loss"]
print(expected)

# %% [markdown]
# Tensor parallelism over four devices:

# %%
tensor_losses = tensor.fit(tokens, num_steps=4)["loss"]
print(tensor_losses)

# %% [markdown]
# With sequence parallelism:

# %%
sequence_losses = sequence.fit(tokens, num_steps=4)["loss"]
print(sequence_losses)

# %% [markdown]
# With the ring:

# %%
ring_losses = ring.fit(tokens, num_steps=4)["loss"]
print(ring_losses)

# %% [markdown]
# Tensor parallelism and data parallelism together, on all eight devices:

# %%
both = make_trainer(Composite(DataParallel(2), TensorParallel(4)))
both_losses = both.fit(tokens, num_steps=4)["loss"]
print(both_losses)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
for losses in (tensor_losses, sequence_losses, ring_losses, both_losses):
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
step = sharded_jit(mlp, mesh, in_shardings=(P(), P(None, "tensor"), P("tensor")))
np.testing.assert_allclose(step(x, up, down), mlp(x, up, down), rtol=1e-3, atol=1e-2)

# %% [markdown]
# ## Exercise
#
# Llama has fewer key heads than query heads: `GPTConfig.tiny_llama()` has 4 query heads and 2 key
# heads. Where does `TensorParallel(4)` place the kernels of the keys? Read `describe()`. Which error does
# a model with 6 query heads and 3 key heads raise?


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
def llama(rngs):
    return GPT(GPTConfig.tiny_llama(), rngs=rngs)


# Four devices cannot share two heads, so each device holds both key heads.
table = TensorParallel(4).describe(llama, mesh=mesh)
for row in table.rows:
    if "attention" in row.info.path:
        print(
            f"{row.info.path:36} {row.placement.stored!s:28} {row.bytes_per_device:6,} bytes"
        )


def six_heads(rngs):
    config = GPTConfig.tiny_llama(num_heads=6, num_kv_heads=3, embed_dim=96)
    return GPT(config, rngs=rngs)


try:
    TensorParallel(4).describe(six_heads, mesh=mesh)
except errors.IndivisibleDimError as error:
    print(error)
else:
    raise AssertionError("no error")
