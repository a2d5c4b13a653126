# %% [markdown]
# # 5. Pipelines: schedules, bubbles, and a picture of each
#
# A pipeline puts the first layers on one device and the last ones on another. Only the
# activations between them are sent, so it is the strategy for slow links. Its price is idle
# time: a stage has nothing to do before the first microbatch reaches it. That idle time is the
# *bubble*, and schedules are ways to shrink it.

# %%
import jax
import numpy as np
import optax

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

simulate_devices(8)

# %% [markdown]
# ## GPipe
#
# Split the batch into microbatches. While stage 1 processes microbatch 0, stage 0 takes
# microbatch 1. In the picture time goes to the right, and a cell shows the number of its
# microbatch; blue is forward, orange is backward.

# %%
S, M = 4, 8  # stages, microbatches
gpipe = GPipe().table(num_stages=S, num_microbatches=M)
visualize(gpipe)

# %% [markdown]
# The empty corners are the bubble. A stage is idle for `S - 1` slots of each direction, and works
# in `M`. So its efficiency is `M / (M + S - 1)`.

# %%
cost = gpipe.simulate()
print(f"efficiency {cost.efficiency:.1%}, bubble {cost.bubble:.1%}")
assert np.isclose(cost.efficiency, M / (M + S - 1))

# %% [markdown]
# More microbatches, less bubble. But GPipe saves the inputs of all of them until the backward
# passes begin: memory grows with `M`.

# %%
for microbatches in (4, 8, 16, 32, 64):
    cost = GPipe().table(S, microbatches).simulate()
    print(
        f"M={microbatches:3}: bubble {cost.bubble:5.1%}, keeps {cost.peak_stage_inputs} inputs"
    )
    assert cost.peak_stage_inputs == microbatches

# %% [markdown]
# ## 1F1B
#
# One forward, one backward. The backward pass of a microbatch starts as early as possible, which
# frees its saved input. The bubble is the same; memory no longer depends on `M`. Papers count `S`
# inputs on the first stage. Here it is `2 S - 1`: stages run in lock step, a forward and a
# backward slot in each tick, so that a microbatch spends a tick in each stage in both passes.

# %%
one_f_one_b = OneFOneB().table(S, M)
visualize(one_f_one_b)

# %%
assert one_f_one_b.simulate().efficiency == gpipe.simulate().efficiency
kept = {m: OneFOneB().table(S, m).simulate().peak_stage_inputs for m in (8, 16, 64)}
print(kept)
assert set(kept.values()) == {2 * S - 1}

# %% [markdown]
# ## Interleaved
#
# Give a stage several *chunks* of layers instead of one: layers 0, 4, 8 and so on go to
# stage 0. A microbatch then passes every stage `V` times, and a stage has work after a `V`-th of
# the time: `M / (M + (S - 1) / V)`. Activations are sent `V` times as often.

# %%
V = 2
interleaved = Interleaved(chunks=V).table(S, M)
visualize(interleaved)

# %%
assert np.isclose(interleaved.simulate().efficiency, M / (M + (S - 1) / V))

# %% [markdown]
# ## Zero bubble
#
# The backward pass computes two gradients: that of a stage's *input*, for which the previous stage
# waits, and that of its *weights*, which is needed only for the update. Compute the first
# immediately, and fill idle slots with the second (green). This is the schedule ZB-H1 of the
# paper that introduced the name: its bubble is smaller, not zero.

# %%
zero_bubble = ZeroBubble().table(S, M)
visualize(zero_bubble)

# %%
assert np.isclose(zero_bubble.simulate().efficiency, 3 * M / (3 * M + 2 * (S - 1)))
for table in (gpipe, one_f_one_b, interleaved, zero_bubble):
    cost = table.simulate()
    print(
        f"{table.name:17} bubble {cost.bubble:5.1%}, keeps {cost.peak_stage_inputs:2} inputs"
    )

# %% [markdown]
# ## Run them
#
# The loss is the one for a single device; the library finds the call of the model's `Stack` of
# layers in it and cuts there. Every schedule gives the losses of one device.

# %%
config = GPTConfig.tiny(
    num_layers=8, embed_dim=32, num_heads=4, seq_len=16, vocab_size=64
)
rng = np.random.default_rng(0)
batches = [rng.integers(0, 64, (16, 17), dtype=np.int32) for _ in range(3)]


def make_trainer(strategy, num_devices):
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        num_microbatches=M,
        devices=jax.devices()[:num_devices],
        loggers=(),
    )


one = make_trainer(DataParallel(1), 1).fit(batches, num_steps=3)["loss"]
print("one device        ", one)
for schedule in (GPipe(), Interleaved(chunks=V), ZeroBubble(), OneFOneB()):
    trainer = make_trainer(Pipeline(S, schedule), S)
    losses = trainer.fit(batches, num_steps=3)["loss"]
    print(f"{type(schedule).__name__:18}", losses)
    np.testing.assert_allclose(losses, one, rtol=1e-5)

# %% [markdown]
# ## Communication
#
# A microbatch's activations go from stage to stage: `collective-permute`s to the neighbour, one in
# each tick, forward and backward. (Small ones carry random keys and the numbers of
# microbatches.) A stage holds a quarter of the layers.

# %%
batch = trainer.shard_batch(batches[0])
report = audit(trainer.train_step.lower(trainer.state, batch).compile())
hop = (16 // M) * 16 * 32 * 4  # (microbatch, seq, embed) in float32
hops = [c for c in report.collectives if c.kind == "collective-permute"]
print([f"{c.count} times {c.bytes_each} bytes" for c in hops], "one hop:", hop)
assert max(c.bytes_each for c in hops) == hop
assert {c.count for c in hops} == {one_f_one_b.num_ticks}
kernel = trainer.state.params["blocks"]["layer"]["mlp"]["up"]["kernel"]
assert kernel.shape[0] == 8
assert kernel.addressable_shards[0].data.shape[0] == 2  # layers on each stage

# %% [markdown]
# ## Exercise
#
# A `Table` of your own runs like the others. Write GPipe with the microbatches in reverse order in
# the backward pass, by passing `Table.from_ticks` the tick of every slot (row: stage, column:
# microbatch), and draw it. How many inputs does it save?
