# %% [markdown]
# # 13. Your transformer: `Stack`, names, `constrain`
#
# A transformer in plain Flax NNX runs under data parallelism and FSDP as it is. Three changes, of a
# few lines each, make it run well under every strategy:
#
# 1. A `Stack` holds the blocks. This allows `Pipeline` and `remat`.
# 2. Names give the meaning of each dim of a parameter. This allows `TensorParallel`.
# 3. `constrain` names the dims of activations. This allows sequence parallelism.

# %%
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    TensorParallel,
    Trainer,
    audit,
    constrain,
    errors,
    simulate_devices,
    visualize,
)
from nnx_parallel.layers import Stack
from nnx_parallel.sharding import TRANSFORMER_NAMES, PathNames

simulate_devices(8)

# %% [markdown]
# ## The model, written for one device
#
# Nothing in this model comes from the library.

# %%
VOCAB, EMBED, HEADS, LAYERS, SEQ = 256, 64, 8, 2, 32


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, EMBED, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, 4 * EMBED, rngs=rngs)
        self.down = nnx.Linear(4 * EMBED, EMBED, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, seq, embed) to the same
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        hidden = nnx.gelu(self.up(self.norm2(x)))  # (batch, seq, mlp)
        return x + self.down(hidden)


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.positions = nnx.Embed(SEQ, EMBED, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.head = nnx.Linear(EMBED, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # (batch, seq)
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (batch, seq, vocab)


def loss(model, tokens):
    logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# %% [markdown]
# The next function trains the model for three steps, and prints the losses, and the state, FLOPs
# and sent bytes of one device.

# %%
rng = np.random.default_rng(0)
batches = [rng.integers(0, VOCAB, (16, SEQ + 1), dtype=np.int32) for _ in range(3)]
trainers, losses, reports = {}, {}, {}


def measure(name, model, strategy, **options):
    trainer = Trainer(
        model(nnx.Rngs(0)),
        optax.adamw(1e-3),
        loss,
        strategy=strategy,
        loggers=(),
        **options,
    )
    batch = trainer.shard_batch(batches[0])
    reports[name] = audit(trainer.train_step.lower(trainer.state, batch).compile())
    losses[name] = trainer.fit(batches, num_steps=3)["loss"]
    trainers[name] = trainer
    print_measurements(name)


# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code"}
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def state_bytes(name):
    table = trainers[name].describe()
    return table.params_bytes + table.optimizer_bytes


def print_measurements(name):
    report = reports[name]
    sent = [f"{report.count(k)} {k}" for k in KINDS if report.count(k)]
    print(f"losses       {losses[name]}")
    print(f"state        {state_bytes(name) / 1024:6,.0f} KiB per device")
    print(f"temporaries  {report.temporary_bytes / 1024:6,.0f} KiB per device")
    print(f"FLOPs        {report.flops / 1e6:6.1f} million per device")
    print(f"collectives  {', '.join(sent) or 'none'}")
    print(f"program      {sum(report.opcodes.values()):6,} instructions")


# %% [markdown]
# ## As it is
#
# One device:

# %%
measure(
    "one device",
    Transformer,
    DataParallel(),
    devices=jax.devices()[:1],
)

# %% [markdown]
# **Data parallelism**. Each of eight devices computes an eighth of the FLOPs:

# %%
measure("data parallel", Transformer, DataParallel())

# %% [markdown]
# **FSDP**. A device now holds an eighth of the state:

# %%
measure("FSDP", Transformer, FSDP())

# %% [markdown]
# **A pipeline** needs more. It does not know which part of the model is a stack of layers:

# %%
two_stages = Composite(Pipeline(2), FSDP())
try:
    measure("pipeline", Transformer, two_stages, num_microbatches=4)
except errors.PipelineError as error:
    print(textwrap.fill(str(error), 90))


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
def is_close(name, other, factor):
    return abs(reports[name].flops / (factor * reports[other].flops) - 1) < 0.05


assert is_close("data parallel", "one device", 1 / 8)
assert is_close("FSDP", "one device", 1 / 8)
assert state_bytes("data parallel") == state_bytes("one device")
assert state_bytes("FSDP") < 1.2 * state_bytes("one device") / 8
assert "pipeline" not in losses

# %% [markdown]
# ## Change 1: a `Stack` for the blocks
#
# `Stack.of` stacks the arrays of all blocks along a new first dim. A call runs the blocks in order.
#
# ```diff
#  class Transformer(nnx.Module):
#      def __init__(self, rngs: nnx.Rngs) -> None:
#          ...
# -        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
# +        self.blocks = Stack.of([Block(rngs) for _ in range(LAYERS)])
#
#      def __call__(self, tokens: jax.Array) -> jax.Array:
#          ...
# -        for block in self.blocks:
# -            x = block(x)
# +        x = self.blocks(x)
# ```


# %%
class Stacked(Transformer):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.blocks = Stack.of(self.blocks)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = self.blocks(x)
        return self.head(self.norm(x))


# %% [markdown]
# **FSDP** again. The program has a loop over the layers in place of a copy of the block for each
# layer, and gathers the parameters of one layer at a time.

# %%
measure("FSDP, Stack", Stacked, FSDP())

# %% [markdown]
# **`remat="full"`** keeps only the input of each block. The temporaries shrink by more than half,
# for a fifth more FLOPs:

# %%
measure("FSDP, Stack, remat", Stacked, FSDP(), remat="full")

# %% [markdown]
# **A pipeline** of two stages, each with one of the two layers, sharded by FSDP over four devices:

# %%
measure("pipeline, Stack", Stacked, two_stages, num_microbatches=4)
up = trainers["pipeline, Stack"].state.params["blocks"]["layer"]["up"]["kernel"]
visualize(up)


# %% [markdown]
# A device computes one and a half times the FLOPs that FSDP needs: the difference is the bubble of
# [tutorial 5](05_pipelines.py). More microbatches make it smaller.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
def instructions(name):
    return sum(reports[name].opcodes.values())


assert instructions("FSDP, Stack") < instructions("FSDP") / 1.3
plain, remat = reports["FSDP, Stack"], reports["FSDP, Stack, remat"]
in_loop = [c for c in plain.collectives if c.kind == "all-gather" and c.count == LAYERS]
assert sum("while" in c.source for c in in_loop) >= 6  # kernels of a layer
assert remat.temporary_bytes < 0.6 * plain.temporary_bytes
assert 1.15 < remat.flops / plain.flops < 1.25
assert is_close("pipeline, Stack", "FSDP, Stack", 6 / 4)
assert up.addressable_shards[0].data.size * 8 == up.size

# %% [markdown]
# ## Change 2: names for the dims of parameters
#
# `TensorParallel` must know the meaning of each dim of a kernel. The model does not name the dims,
# so nothing is sharded, and a warning says so:

# %%
both = Composite(TensorParallel(2), FSDP())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    measure("tensor, no names", Stacked, both)
print("\n" + textwrap.fill(f"Warning: {caught[0].message}", 90))

# %% [markdown]
# The two devices of a pair do the same work. `names="auto"` derives the names from the traced loss.
# The trace needs a batch, or the shapes of one:
#
# ```diff
#  Trainer(
#      ...,
# +    names="auto",
# +    sample=batches[0],
#  )
# ```

# %%
derived = {"names": "auto", "sample": batches[0]}
measure("tensor, derived names", Stacked, both, **derived)

# %% [markdown]
# Now each device computes an eighth. The description gives the evidence for each name:


# %%
def print_reasons(name):
    for row in trainers[name].describe().rows:
        if row.info.path.endswith(("kernel", "embedding")):
            print(f"{row.info.path:36} {row.placement.stored}")
            print(textwrap.indent(textwrap.fill(row.placement.reason, 84), "    "))


print_reasons("tensor, derived names")

# %% [markdown]
# Names can also be given by path:

# %%
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    measure("tensor, attention", Stacked, both, names=TRANSFORMER_NAMES)
print("\n" + textwrap.fill(f"Warning: {told[0].message}", 90))

# %% [markdown]
# The warning tells why the FLOPs have not fallen to an eighth: `up`, `down` and `head` are not
# among the usual names. A table that you write has a regular expression for the path, and a name
# for each dim.

# %%
NAMES = PathNames(
    (r"up\.kernel", ("embed", "mlp")),
    (r"up\.bias", ("mlp",)),
    (r"down\.kernel", ("mlp", "embed")),
    (r"head\.kernel", ("embed", "vocab")),
    *TRANSFORMER_NAMES.pairs,
    optional=True,
)
measure("tensor, all names", Stacked, both, names=NAMES)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert is_close("tensor, no names", "one device", 1 / 4)
assert "TensorParallel" in str(caught[0].message)
assert is_close("tensor, all names", "one device", 1 / 8)
assert is_close("tensor, derived names", "one device", 1 / 8)
assert "matrices" in str(told[0].message)
between = reports["tensor, attention"].flops
assert 1.1 * reports["tensor, all names"].flops < between
assert between < 0.9 * reports["tensor, no names"].flops

# %% [markdown]
# ## Change 3: `constrain` for activations
#
# In sequence parallelism each device keeps only a part of each sequence between the matmuls.
# `constrain` names the dims of an activation, and the strategy decides which of them to shard.
#
# ```diff
#  class Block(nnx.Module):
#      def __call__(self, x: jax.Array) -> jax.Array:
#          mask = nnx.make_causal_mask(x[..., 0])
#          x = x + self.attention(self.norm1(x), mask=mask)
# +        x = constrain(x, "batch", "seq", "embed")
#          hidden = nnx.gelu(self.up(self.norm2(x)))
# -        return x + self.down(hidden)
# +        hidden = constrain(hidden, "batch", "seq", "mlp")
# +        return constrain(x + self.down(hidden), "batch", "seq", "embed")
# ```


# %%
class ConstrainedBlock(Block):
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        x = constrain(x, "batch", "seq", "embed")
        hidden = nnx.gelu(self.up(self.norm2(x)))
        hidden = constrain(hidden, "batch", "seq", "mlp")
        return constrain(x + self.down(hidden), "batch", "seq", "embed")


# %% [markdown]
# The embedding of the tokens and the logits get names too. The whole model after the three changes:


# %%
class Parallel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.positions = nnx.Embed(SEQ, EMBED, rngs=rngs)
        self.blocks = Stack.of([ConstrainedBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(EMBED, rngs=rngs)
        self.head = nnx.Linear(EMBED, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        x = self.blocks(constrain(x, "batch", "seq", "embed"))
        return constrain(self.head(self.norm(x)), "batch", "seq", "vocab")


# %% [markdown]
# **Sequence parallelism** has no effect on the model without `constrain`, and a warning gives the
# reason:

# %%
sequence = Composite(TensorParallel(2, sequence=True), FSDP())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    measure("sequence, no constrain", Stacked, sequence, names=NAMES)
print("\n" + textwrap.fill(f"Warning: {caught[0].message}", 90))

# %% [markdown]
# With `constrain`, a device keeps half of each sequence between the matmuls, and all-gathers bring
# the halves together:

# %%
measure("sequence, constrain", Parallel, sequence, names=NAMES)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
plain, alike = reports["tensor, all names"], reports["sequence, no constrain"]
assert alike.opcodes == plain.opcodes
split = reports["sequence, constrain"]
assert split.temporary_bytes < 0.95 * plain.temporary_bytes
assert split.count("all-gather") > plain.count("all-gather")

# %% [markdown]
# ## All measurements
#
# The losses of all rows are equal up to rounding.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code"}
print(f"{'':23}{'state':>10}{'scratch':>11}{'FLOPs':>10}   collectives")
for name, report in reports.items():
    memory = state_bytes(name) / 1024, report.temporary_bytes / 1024
    sent = ", ".join(f"{report.count(k)} {k}" for k in KINDS if report.count(k))
    sizes = f"{memory[0]:6,.0f} KiB{memory[1]:7,.0f} KiB{report.flops / 1e6:8.1f} M"
    print(f"{name:23}{sizes}   {sent}")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
for name, values in losses.items():
    np.testing.assert_allclose(values, losses["one device"], rtol=1e-5, err_msg=name)

# %% [markdown]
# ## Exercise
#
# Place the model under `Composite(Pipeline(2), TensorParallel(2), FSDP())`. Before you look: which part
# of `up.kernel` does a device hold, and which of the three changes does this strategy need?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
# A device holds an eighth: the pipeline shards the layers, tensor parallelism shards `mlp`, and FSDP
# shards `embed`. The strategy needs the Stack and the names, but not `constrain`.
three_d = Trainer(
    Parallel(nnx.Rngs(0)),
    optax.adamw(1e-3),
    loss,
    strategy=Composite(Pipeline(2), TensorParallel(2), FSDP()),
    names=NAMES,
    num_microbatches=4,
    loggers=(),
)
up = three_d.state.params["blocks"]["layer"]["up"]["kernel"]
assert up.addressable_shards[0].data.size * 8 == up.size
visualize(up)
