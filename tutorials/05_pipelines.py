# %% [markdown]
# # 5. Pipelines: schedules, bubbles, and a picture of each
#
# A pipeline puts the first layers of a model on one device and the last layers on another. Only the
# activations between them are sent, so a pipeline suits slow links. Its price is the *bubble*: a
# stage has no work before the first microbatch reaches it. A schedule decides which microbatch each
# stage works on at each time.

# %%
import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel import (
    DataParallel,
    GPipe,
    Interleaved,
    OneFOneB,
    Pipeline,
    Trainer,
    ZeroBubble,
    audit,
    simulate_devices,
    visualize,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.schedules import Table

simulate_devices(8)

# %% [markdown]
# ## GPipe
#
# Time runs to the right, each row is a stage, and a cell shows the number of its microbatch.
# Forward passes are blue, backward passes orange.

# %%
S, M = 4, 8  # stages, microbatches
gpipe = GPipe().table(num_stages=S, num_microbatches=M)
visualize(gpipe)

# %% [markdown]
# The empty corners are the bubble. The efficiency is `M / (M + S - 1)`:

# %%
cost = gpipe.simulate()
print(f"efficiency {cost.efficiency:.1%}, bubble {cost.bubble:.1%}")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert np.isclose(cost.efficiency, M / (M + S - 1))

# %% [markdown]
# More microbatches make the bubble smaller. But under GPipe a stage keeps the inputs of all
# microbatches:

# %%
kept = []
for microbatches in (4, 8, 16, 32, 64):
    cost = GPipe().table(S, microbatches).simulate()
    kept.append(cost.peak_stage_inputs)
    print(f"M={microbatches:3}: bubble {cost.bubble:5.1%}, keeps {kept[-1]} inputs")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert kept == [4, 8, 16, 32, 64]

# %% [markdown]
# ## 1F1B: one forward, one backward
#
# The backward pass of a microbatch starts as early as possible, which frees its saved input. The
# bubble is as large as GPipe's, but memory no longer depends on `M`.

# %%
one_f_one_b = OneFOneB().table(S, M)
visualize(one_f_one_b)

# %%
kept = {m: OneFOneB().table(S, m).simulate().peak_stage_inputs for m in (8, 16, 64)}
for microbatches, inputs in kept.items():
    print(f"M={microbatches:3}: keeps {inputs} inputs")

# %% [markdown]
# Papers count `S` inputs on the first stage; here there are `2 S - 1`, because all stages run in
# lock step, and a tick has a slot for a forward and a slot for a backward pass.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert one_f_one_b.simulate().efficiency == gpipe.simulate().efficiency
assert set(kept.values()) == {2 * S - 1}

# %% [markdown]
# ## Interleaved 1F1B
#
# Each stage has `V` *chunks* of layers. With 8 layers, 4 stages and 2 chunks, stage 0 has layers 0
# and 4. The efficiency is `M / (M + (S - 1) / V)`, and activations are sent `V` times as often.

# %%
V = 2
interleaved = Interleaved(chunks=V).table(S, M)
visualize(interleaved)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert np.isclose(interleaved.simulate().efficiency, M / (M + (S - 1) / V))

# %% [markdown]
# ## Zero bubble
#
# The previous stage waits for the gradient of the stage's *input*. Nothing waits for the gradient
# of its *weights*, except the update. The zero-bubble schedule fills idle slots with the second
# (green). This is ZB-H1; its bubble is smaller, but not zero.

# %%
zero_bubble = ZeroBubble().table(S, M)
visualize(zero_bubble)

# %% [markdown]
# The four schedules side by side:

# %%
for table in (gpipe, one_f_one_b, interleaved, zero_bubble):
    cost = table.simulate()
    print(
        f"{table.name:17} bubble {cost.bubble:5.1%}, keeps {cost.peak_stage_inputs:2} inputs"
    )

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert np.isclose(zero_bubble.simulate().efficiency, 3 * M / (3 * M + 2 * (S - 1)))

# %% [markdown]
# ## Run them
#
# A loss for a pipeline is the loss for one device. The library finds the call of the model's
# `Stack` in it, and cuts the computation there. First, one device:

# %%
config = GPTConfig.tiny(
    num_layers=8, embed_dim=32, num_heads=4, seq_len=16, vocab_size=64
)
rng = np.random.default_rng(0)
batches = [rng.integers(0, 64, (16, 17), dtype=np.int32) for _ in range(3)]
model = GPT(config, rngs=nnx.Rngs(0))


def make_trainer(strategy, num_devices):
    return Trainer(
        model,
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        num_microbatches=M,
        devices=jax.devices()[:num_devices],
        loggers=(),
    )


expected = make_trainer(DataParallel(1), 1).fit(batches, num_steps=3)["loss"]
print(expected)

# %% [markdown]
# Now four stages, under each schedule. GPipe:

# %%
gpipe_losses = make_trainer(Pipeline(S, GPipe()), S).fit(batches, num_steps=3)["loss"]
print(gpipe_losses)

# %% [markdown]
# Interleaved 1F1B:

# %%
chunks = Pipeline(S, Interleaved(chunks=V))
chunks_losses = make_trainer(chunks, S).fit(batches, num_steps=3)["loss"]
print(chunks_losses)

# %% [markdown]
# Zero bubble:

# %%
zero_losses = make_trainer(Pipeline(S, ZeroBubble()), S).fit(batches, num_steps=3)[
    "loss"
]
print(zero_losses)

# %% [markdown]
# 1F1B, which is the default:

# %%
trainer = make_trainer(Pipeline(S), S)
losses = trainer.fit(batches, num_steps=3)["loss"]
print(losses)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
for found in (gpipe_losses, chunks_losses, zero_losses, losses):
    np.testing.assert_allclose(found, expected, rtol=1e-5)

# %% [markdown]
# ## Communication
#
# Each stage holds two of the eight layers:

# %%
kernel = trainer.state.params["blocks"]["layer"]["mlp"]["up"]["kernel"]
visualize(kernel)

# %% [markdown]
# In every tick, each stage sends the activations of one microbatch to the next stage, and gradients
# to the previous one, by a `collective-permute`:

# %%
batch = trainer.shard_batch(batches[0])
report = audit(trainer.train_step.lower(trainer.state, batch).compile())
hop = (16 // M) * 16 * 32 * 4  # (microbatch, seq, embed) in float32
print(f"activations of one microbatch: {hop:,} bytes")
hops = [c for c in report.collectives if c.kind == "collective-permute"]
for each in hops:
    print(f"{each.kind}: {each.count} times {each.bytes_each:,} bytes")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert max(c.bytes_each for c in hops) == hop
assert {c.count for c in hops} == {one_f_one_b.num_ticks}
assert kernel.shape[0] == 8
assert kernel.addressable_shards[0].data.shape[0] == 2  # layers on each stage

# %% [markdown]
# ## Layers that do not divide
#
# DeepSeek-V3 has 3 dense layers, then 58 with experts. `Pipeline` spreads the larger stack over its
# stages, and runs the smaller one before them. Four stages share 58 layers as 15, 15, 14 and 14,
# and all wait for the slowest:

# %%
table = OneFOneB().table(S, M)
for layers in (56, 58, 61, 6):
    print(f"{layers} layers: bubble {table.simulate(num_layers=layers).bubble:.1%}")
visualize(table, num_layers=6)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
share = M / (M + S - 1)
assert np.isclose(table.simulate(num_layers=56).efficiency, share)
assert np.isclose(table.simulate(num_layers=58).efficiency, share * 58 / (4 * 15))

# %% [markdown]
# ## Exercise
#
# Write GPipe in two rounds: all passes of the first half of the microbatches, and then all passes
# of the second half. Give `Table.from_ticks` the tick of every slot (row: stage, column:
# microbatch). How many inputs does a stage keep, and how large is the bubble?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
stage, microbatch = np.indices((S, M))
half = M // 2
ticks = half + S - 1  # of a round's forward passes, and of its backward passes
start = 2 * ticks * (microbatch // half)
forward = start + stage + microbatch % half
backward = start + ticks + (S - 1 - stage) + microbatch % half
rounds = Table.from_ticks(S, forward, backward, name="GPipe in two rounds")
# A stage keeps half as many inputs as under GPipe, but there are two bubbles.
cost = rounds.simulate()
assert cost.peak_stage_inputs == half
assert np.isclose(cost.efficiency, M / (M + 2 * (S - 1)))
visualize(rounds)
