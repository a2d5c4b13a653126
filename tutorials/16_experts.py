# %% [markdown]
# # 16. Mixtures of experts
#
# A larger MLP can learn more, but every token needs the FLOPs of the whole MLP. A mixture of experts
# has many MLPs, and a router that sends each token to a few of them: it has more parameters, but
# hardly more FLOPs per token. This tutorial trains a mixture, observes that some experts are hardly
# used, balances them, and splits them over eight devices.

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
# Python's documentation is the text; each pair of letters is a token. The model is a small Llama
# with eight experts in place of each MLP. A token goes to two of them, `top_k=2`.

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
# A token uses only the active parameters: two of the eight experts in each layer, and everything
# else. `flops_per_token` and MFU count only these. Some published models:

# %%
for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"):
    model = GPTConfig.preset(name)
    total, active = model.num_params / 1e9, model.num_active_params / 1e9
    print(f"{name:17} {total:6.1f} B parameters, {active:5.1f} B active")

# %% [markdown]
# ## Without balance
#
# The first run is on one device. A router that is trained only to predict the next token has no reason
# to use all experts. Experts that get tokens learn, and then get more tokens.

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
# The log line has `expert_load`, the number of tokens of the busiest expert divided by the mean,
# and `router_entropy`, in nats. A load of 1 is perfect. Here 4 is the worst: all tokens go to the
# same two of eight experts.

# %%
print("expert_load, every 10th step:", over_time(free_history))
before = loads(free)
draw(before)

# %% [markdown]
# ## A bias that follows counts
#
# `bias_rate` gives each expert a bias, which is added to its score only when the experts of a token are
# chosen. After a step, the bias of an expert with more tokens than the mean falls by the rate, and the
# bias of all other experts rises by the rate. This needs no gradient and no additional loss.
# DeepSeek-V3 is balanced in this way. Tokens are counted in integers over the whole batch, so that
# the bias is the same bit for bit on any mesh.

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
# Both runs learn equally fast so far: such a short text gives eight experts little to learn. The
# difference is the cost of idle experts. They take memory, and once experts are split over devices
# all devices wait for the busiest one.
#
# `balance_loss=` is the alternative: a loss that is smallest if all experts have equal shares of
# each sequence, or of the batch. Its gradient changes the router, and thus the model. `z_loss=` keeps
# the router's logits small. `top_groups=` and `shared_dim=` come from DeepSeek-V3.
#
# ## The experts, split
#
# `ExpertParallel(4)` gives each of four devices two of the eight experts. Outside of the experts
# its axis splits the batch, and with `FSDP` also the state of all other parameters. Model, loss,
# batches and numbers stay the same.

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
# The shards of each device follow. The layers are in dim 0 and the experts in dim 1. The axis
# `expert` splits the experts, and `fsdp` splits each expert.

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
# - `gather`: each device gathers the tokens of all devices of the axis, and computes the rows of its
#   experts. A reduce-scatter then sums the outputs and sends them back. It runs on every platform.
# - `ragged`: a ragged all-to-all sends each row to the device of its expert, and another sends the
#   result back. JAX has no ragged all-to-all for CPUs, so it is not run here.
#
# The table shows how many numbers a device sends per token and layer, in units of the model's
# width, for `n` devices and `k` experts per token:
#
# | | forward | backward | additionally with `remat` |
# |---|---|---|---|
# | `gather` | `2 (n - 1)` | `2 (n - 1)` | `n - 1` |
# | `ragged` | `2 k (n - 1) / n` | `2 k (n - 1) / n` | `k (n - 1) / n` |
#
# `ExpertParallel(exchange=None)` takes `ragged` on GPUs and TPUs if `k < n - 1`. `audit` counts
# the bytes that go into the collectives of a compiled step. Without `FSDP`, only tokens are
# gathered:

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
# The remaining bytes are the experts that tokens have chosen, and their weights.
#
# ## No token is dropped
#
# A device has room for a quarter more rows than its share. It computes further rows in additional
# rounds: the results are exact under any routing, and an unbalanced step takes longer.
# `capacity_factor=` instead limits the tokens of an expert per sequence: tokens above its capacity are
# dropped. This is a different model, whose metrics have a `dropped_share`. In the first steps, before
# the experts are balanced, it drops this share:

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
# ## Strategies for mixtures
#
# | | with experts |
# |---|---|
# | only `FSDP()` | each layer gathers all of its experts: the first choice if the experts of a layer fit on a device and the batch is large |
# | `ExpertParallel(n)` | experts stay where they are, tokens travel; `n` divides the experts, best within a machine |
# | `Composite(ExpertParallel(n), FSDP())` | the usual choice for large mixtures: both axes split batch and state |
# | with `TensorParallel(m)` | each expert's width is split too, which suits wide experts |
# | with `Pipeline(p)` | each stage has the experts of its layers; all microbatches use the same bias |
# | with `ContextParallel(c)` | tokens of a sequence are on several devices, and each is sent to its experts |
#
# [Plan](../plan.md) says which of them fits and how long a step takes.
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
