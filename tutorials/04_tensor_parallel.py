# %% [markdown]
# # 4. Tensor and sequence parallelism
#
# Data parallelism shards rows. Tensor parallelism shards *matmuls*: each device has a part of
# every weight matrix and computes a part of every layer. The aim is little communication. Two
# consecutive matmuls communicate once, if the first is sharded by columns and the second by
# rows.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    Composite,
    DataParallel,
    TensorParallel,
    Trainer,
    audit,
    make_mesh,
    sharded_jit,
    simulate_devices,
    visualize,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

simulate_devices(8)

# %% [markdown]
# ## By columns, then by rows
#
# An MLP is `gelu(x @ up) @ down`. With `up` sharded by columns, a device computes complete values
# of some hidden units, and the nonlinearity needs no communication. With `down` sharded by rows,
# the device multiplies just its own units, which gives a partial sum of each output. One
# all-reduce adds the partial sums.

# %%
mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
rng = np.random.default_rng(0)
x = rng.normal(size=(16, 64)).astype(np.float32)  # (batch, embed)
up = rng.normal(size=(64, 256)).astype(np.float32)  # (embed, mlp)
down = rng.normal(size=(256, 64)).astype(np.float32)  # (mlp, embed)


def mlp(x, up, down):
    return jax.nn.gelu(x @ up) @ down  # (16, 64) -> (16, 256) -> (16, 64)


def sent(up_spec, down_spec):
    step = sharded_jit(
        mlp, mesh, in_shardings=(P(), up_spec, down_spec), out_shardings=P()
    )
    np.testing.assert_allclose(
        step(x, up, down), mlp(x, up, down), rtol=1e-3, atol=1e-2
    )
    report = audit(step.lower(x, up, down).compile())
    return {kind: report.bytes(kind) for kind in {c.kind for c in report.collectives}}


columns_rows = sent(P(None, "tensor"), P("tensor", None))
columns_columns = sent(P(None, "tensor"), P(None, "tensor"))
print("columns, rows:   ", columns_rows)
print("columns, columns:", columns_columns)
assert columns_rows == {"all-reduce": x.nbytes}  # once, the size of the output
assert sum(columns_columns.values()) > 4 * x.nbytes  # the hidden layer is gathered

# %% [markdown]
# ## In a transformer
#
# The same pattern twice in each block: query, key and value by columns (that is, by heads), the
# output projection by rows; and the MLP. So a block all-reduces its activations twice in the
# forward pass and, for the gradients, twice in the backward pass.
#
# The model names its dims: `heads`, `mlp`, `vocab`, `embed`. `TensorParallel` shards the first
# three. Nothing in the model mentions a mesh.

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
# `up` is sharded along its last dim, `down` along the one before it. Dim 0 is the layers.
#
# Count the collectives of a step. The loop over layers has three iterations, forward and
# backward.

# %%


def step_report(trainer):
    batch = trainer.shard_batch(tokens[0])
    return audit(trainer.train_step.lower(trainer.state, batch).compile())


report = step_report(tensor)
forward = [
    c for c in report.collectives if c.count == 3 and "transpose" not in c.source
]
activation_bytes = 16 * 32 * 64 * 4  # (batch, seq, embed) in float32
print([f"{c.kind}: {c.count} times {c.bytes_each:,} bytes" for c in forward])
assert [c.kind for c in forward] == ["all-reduce", "all-reduce"]
assert all(c.bytes_each == activation_bytes for c in forward)

# %% [markdown]
# The communication volume grows with the *batch*, not with the parameters, and each layer waits
# for it. So keep the axis small and where links are fast, within one machine.
#
# ## Sequence parallelism
#
# Between the matmuls (norms, residuals, dropout) every device holds the same activations and
# computes the same numbers. `sequence=True` shards those along `seq`. The all-reduce becomes its
# two halves: a reduce-scatter after the matmuls, an all-gather before the next. The
# communication volume is the same, and each device saves a quarter of the activations.

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
assert sequence_report.count("all-gather") > report.count("all-gather")
assert sequence_report.temporary_bytes < report.temporary_bytes

# %% [markdown]
# ## Overlap
#
# A matmul waits for the all-gather before it. It need not: the local shard can be multiplied while
# the next one arrives. `overlap="ring"` sends shards around a ring, one hop at a time
# (`collective-permute`), and computes a part of the matmul during each hop.

# %%
ring = make_trainer(TensorParallel(4, overlap="ring"), four)
ring_report = step_report(ring)
print({kind: ring_report.count(kind) for kind in ("all-gather", "collective-permute")})
assert ring_report.count("collective-permute") > 0
assert ring_report.count("all-gather") < sequence_report.count("all-gather")

# %% [markdown]
# On simulated devices this gains nothing, since they share one memory. With the TPU compiler for 4
# chips, 95 % of the ring's bytes overlap with matmuls; without the ring none do
# (`python -m benchmarks overlap`).
#
# ## The same numbers

# %%
trainers = {
    "one device": make_trainer(DataParallel(1), jax.devices()[:1]),
    "tensor": tensor,
    "sequence": sequence,
    "ring": ring,
    "with data": make_trainer(Composite(DataParallel(2), TensorParallel(4))),
}
losses = {name: t.fit(tokens, num_steps=4)["loss"] for name, t in trainers.items()}
for name, values in losses.items():
    print(f"{name:11}", np.round(values, 5))
    np.testing.assert_allclose(values, losses["one device"], rtol=1e-5)
assert jnp.isfinite(losses["ring"]).all()

# %% [markdown]
# ## Exercise
#
# Llama has fewer key heads than query heads: `GPTConfig.tiny_llama()` has 4 query heads and 2 key
# heads. Which error does `TensorParallel(4)` raise? Replicate `kv_heads` by a rule, and see the
# cost in `describe()`: `TensorParallel(4, rules=(LogicalRules({"kv_heads": None}),))`.
