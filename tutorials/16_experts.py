# %% [markdown]
# # 16. Mixtures of experts
#
# A mixture of experts has many MLPs, and a router that sends each token to a few of them: it has
# more parameters, but hardly more FLOPs per token. This tutorial trains a mixture, balances its
# experts, and splits them over eight devices.

# %%
from dataclasses import replace
from pydoc_data.topics import topics

import jax
import numpy as np
import optax

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    ExpertParallel,
    Trainer,
    audit,
    simulate_devices,
)
from nnx_parallel.layers import Experts
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

simulate_devices(8)

# %% [markdown]
# ## The cost of a token
#
# Python's documentation is the text; each pair of letters is a token. A token goes to two of eight
# experts, `top_k=2`.

# %%
words = " ".join(" ".join(topics.values()).lower().split())[:400_000]
pairs = np.frombuffer(words.encode("ascii", "replace"), "<u2")
kinds, text = np.unique(pairs, return_inverse=True)
LENGTH = 64


def batches(num_batches, num_rows=16):
    """Returns rows of tokens from random places of the text."""
    rng = np.random.default_rng(0)
    for _ in range(num_batches):
        starts = rng.integers(0, len(text) - LENGTH, (num_rows, 1))
        yield text[starts + np.arange(LENGTH + 1)].astype(np.int32)


EXPERTS = Experts(num_experts=8, top_k=2, mlp_dim=32, scores="sigmoid")
config = GPTConfig.tiny_experts(
    vocab_size=8 * -(-len(kinds) // 8),  # devices divide the rows of the table
    num_layers=2,
    embed_dim=32,
    seq_len=LENGTH,
    experts=EXPERTS,
)
print(f"{config.num_params:,} parameters, {config.num_active_params:,} of them active")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
unused = 2 * (8 - 2) * 3 * 32 * 32  # layers, experts, kernels and their shapes
assert config.num_params - config.num_active_params == unused

# %% [markdown]
# `flops_per_token` and MFU count only the active parameters. Some published models:

# %%
for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"):
    model = GPTConfig.preset(name)
    total, active = model.num_params / 1e9, model.num_active_params / 1e9
    print(f"{name:17} {total:6.1f} B parameters, {active:5.1f} B active")

# %% [markdown]
# ## Without balance
#
# Experts that get tokens learn, and then get more tokens:

# %%
STEPS = 100


def make_trainer(experts, strategy, num_devices=8):
    own = replace(config, experts=experts)
    return Trainer(
        lambda rngs: GPT(own, rngs=rngs),
        optax.adam(3e-3),
        next_token_loss,
        strategy=strategy,
        devices=jax.devices()[:num_devices],
        loggers=(),
    )


free = make_trainer(EXPERTS, DataParallel(1), num_devices=1)
free_history = free.fit(batches(STEPS), STEPS)


# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code"}
def loads(trainer):
    """Returns each expert's tokens divided by the mean, (layers, experts), for 64 rows."""
    model = trainer.model
    model.train()  # tokens are counted only in training mode
    (tokens,) = batches(1, num_rows=64)
    model(tokens[:, :-1])
    counts = np.asarray(model.blocks.layer.mlp.counts)
    return counts / counts.mean(axis=1, keepdims=True)


def draw(found):
    """Draws a bar for each expert of each layer, and marks the mean."""
    for number, layer in enumerate(found):
        print(f"layer {number}")
        for expert, load in enumerate(layer):
            bar = "█" * round(12 * load)
            print(f"  expert {expert}  {load:4.2f}  {bar[:12]:12}│{bar[12:]}")


def over_time(history, every=10):
    """Returns the load of the busiest expert, for every tenth step by default."""
    return " ".join(f"{load:4.2f}" for load in history["expert_load"][::every])


# %% [markdown]
# `expert_load` is the number of tokens of the busiest expert divided by the mean; 1 is perfect.
# Here 4 is the worst: all tokens go to the same two of eight experts. `router_entropy` is in nats.

# %%
print("expert_load, every 10th step:", over_time(free_history))
before = loads(free)
draw(before)

# %% [markdown]
# ## A bias that follows counts
#
# `bias_rate` gives each expert a bias, which is added to its score only when the experts of a token
# are chosen. After a step, the bias of an expert with more tokens than the mean falls by the rate,
# and all others rise. DeepSeek-V3 is balanced in this way. The bias is the same bit for bit on any
# mesh.

# %%
BALANCED = replace(EXPERTS, bias_rate=0.01)
even = make_trainer(BALANCED, DataParallel(1), num_devices=1)
even_history = even.fit(batches(STEPS), STEPS)
print("expert_load, every 10th step:", over_time(even_history))
after = loads(even)
draw(after)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert before.max(axis=1).min() > 2.5  # in each layer some expert has most tokens
assert before.min() < 0.2  # and some have hardly any
assert after.max() < 1.5
assert after.min() > 0.5
final = [history["loss"][-10:].mean() for history in (free_history, even_history)]
np.testing.assert_allclose(final[1], final[0], rtol=0.05)

# %% [markdown]
# Both runs learn equally fast on such a short text. The difference is the cost of idle experts:
# they take memory, and all devices wait for the busiest one. `balance_loss=` is the alternative: a
# loss that is smallest if all experts have equal shares.
#
# ## The experts, split
#
# `ExpertParallel(4)` gives each of four devices two of the eight experts. Outside of the experts
# its axis splits the batch, and with `FSDP` also the state of all other parameters.

# %%
strategy = Composite(ExpertParallel(4), FSDP())
split = make_trainer(BALANCED, strategy)
split_history = split.fit(batches(5), 5)
print("one device:", even_history["loss"][:5])
print(f"{dict(strategy.make_mesh().shape)}:", split_history["loss"])

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_allclose(split_history["loss"], even_history["loss"][:5], rtol=1e-5)
for name in ("expert_load", "router_entropy"):
    np.testing.assert_allclose(split_history[name], even_history[name][:5], rtol=0.01)

# %% [markdown]
# The layers are in dim 0 and the experts in dim 1:

# %%
description = split.describe()
for row in description.rows:
    if row.info.path.endswith(("mlp.up", "mlp.router", "query.kernel")):
        print(f"{row.info.path:36} {row.info.shape!s:15} {row.placement.stored}")

# %% [markdown]
# This is how tokens reach their experts:

# %%
print(*description.notes, sep="\n")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert "over expert=4 by 'gather'" in description.notes[0]
up = split.state.params["blocks"]["layer"]["mlp"]["up"]
assert up.addressable_shards[0].data.size * 8 == up.size

# %% [markdown]
# ## The bytes that are sent
#
# - `gather`: each device gathers the tokens of all devices of the axis, and computes the rows of
#   its experts. A reduce-scatter sums the outputs and sends them back.
# - `ragged`: a ragged all-to-all sends each row to the device of its expert, and another sends the
#   result back. JAX has none for CPUs, so it is not run here.
#
# Numbers that a device sends per token and layer, in units of the model's width, for `n` devices
# and `k` experts per token:
#
# | | forward | backward | additionally with `remat` |
# |---|---|---|---|
# | `gather` | `2 (n - 1)` | `2 (n - 1)` | `n - 1` |
# | `ragged` | `2 k (n - 1) / n` | `2 k (n - 1) / n` | `k (n - 1) / n` |
#
# `audit` counts the bytes of a compiled step. Without `FSDP`, only tokens are gathered:

# %%
SIZE = 8
alone = make_trainer(BALANCED, ExpertParallel(SIZE))
(tokens,) = batches(1)
batch = alone.shard_batch(tokens)
report = audit(alone.train_step.lower(alone.state, batch).compile())
own = 16 * LENGTH // SIZE  # tokens of a device
# `audit` counts n shards; n - 1 of them are sent.
collected = SIZE * own * config.embed_dim * 4 * config.num_layers
for kind in ("all-gather", "reduce-scatter"):
    print(f"{kind:14} {report.bytes(kind):9,} bytes, in theory {2 * collected:9,}")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
# The choices (int32) are sent in the forward pass, and their weights in both passes.
choices = SIZE * own * 2 * 4 * config.num_layers
assert report.bytes("all-gather") == 2 * collected + 2 * choices
assert report.bytes("reduce-scatter") == 2 * collected + choices

# %% [markdown]
# The remaining bytes are the choices of experts, and their weights.
#
# ## No token is dropped
#
# A device computes the rows that exceed its share by more than a quarter in additional rounds: the
# results are exact, and an unbalanced step takes longer. `capacity_factor=` instead drops tokens
# above the capacity of an expert. In the first steps it drops this share:

# %%
tight = make_trainer(
    replace(EXPERTS, capacity_factor=1.0), DataParallel(1), num_devices=1
)
dropped = tight.fit(batches(10), 10)["dropped_share"]
print("dropped:", " ".join(f"{share:.0%}" for share in dropped))

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert dropped.max() > 0.3
assert dropped.min() > 0.05

# %% [markdown]
# [Choose a strategy](../choose.md#experts) says when to combine `ExpertParallel` with other
# strategies.
#
# ## Exercise
#
# Qwen3-30B-A3B has 128 experts, and a token goes to 8 of them. From which size of `ExpertParallel`
# on does `ragged` send less than `gather`? By what factor at 64 devices? And how many bytes does a
# device then send for each of its tokens in a step, in bfloat16 and without `remat`?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
qwen = GPTConfig.preset("qwen3-30b-a3b")
top_k = qwen.experts.top_k
sizes = [n for n in range(2, 129) if 128 % n == 0]
fewer = [n for n in sizes if top_k * (n - 1) / n < n - 1]
factor = (64 - 1) / (top_k * 63 / 64)
sent = qwen.num_layers * 4 * top_k * 63 / 64 * qwen.embed_dim * 2
print(f"from {fewer[0]} on; at 64 a factor of {factor:.0f}")
print(
    f"{sent / 2**20:.1f} MiB a token, for {qwen.num_active_params / 1e9:.1f} B parameters"
)
assert fewer[0] == 16
assert factor == 8
