# %% [markdown]
# # 14. Long sequences
#
# If one row is too long for a device, the sequence itself must be split, because activations grow
# with its length. `ContextParallel` shards the tokens of each sequence. The model does not change,
# and neither do the numbers.

# %%
import jax
import numpy as np
import optax

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    Trainer,
    audit,
    simulate_devices,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

simulate_devices(8)

# %% [markdown]
# ## The memory of a token
#
# The batch is one row. The next function compiles a training step, and asks the compiler how much
# memory a device needs besides the parameters.

# %%
eight, one = jax.devices(), jax.devices()[:1]


def make_trainer(strategy, devices, seq_len):
    config = GPTConfig.tiny_llama(
        num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, seq_len=seq_len
    )
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        devices=devices,
        loggers=(),
    )


def compile_step(strategy, devices, seq_len):
    trainer = make_trainer(strategy, devices, seq_len)
    batch = trainer.shard_batch(np.zeros((1, seq_len + 1), np.int32))
    return trainer.train_step.lower(trainer.state, batch).compile()


LENGTH = 32_768


def kib_per_token(strategy, devices):
    memory = compile_step(strategy, devices, LENGTH).memory_analysis()
    return memory.temp_size_in_bytes / LENGTH / 1024


before = kib_per_token(DataParallel(1), one)
after = kib_per_token(ContextParallel(8), eight)
print(f"one device:         {before:5.2f} KiB a token")
print(f"ContextParallel(8): {after:5.2f} KiB a token, on each device")

# %% [markdown]
# Each device has an eighth of the tokens, and about an eighth of their activations. Attention runs
# in blocks, so no device ever holds the scores of all queries with all keys: for 32,768 tokens and
# four heads, 16 GiB.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert before / after > 6

# %% [markdown]
# ## The same numbers
#
# The next cells run a few steps on one device and on eight. With `FSDP` the training state is split
# over both axes.

# %%
rng = np.random.default_rng(0)
batches = [rng.integers(0, 256, (2, 257), dtype=np.int32) for _ in range(3)]
alone = make_trainer(DataParallel(1), one, 256).fit(batches, 3)["loss"]
print("one device:", alone)

# %%
strategy = Composite(ContextParallel(4), FSDP())
split = make_trainer(strategy, eight, 256).fit(batches, 3)["loss"]
print(f"{strategy.make_mesh().shape}:", split)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_allclose(split, alone, rtol=1e-5)

# %% [markdown]
# ## The blocks of each device
#
# Under a causal mask late tokens cost more than early ones. So the sequence is cut into twice as
# many chunks as there are devices, and device i computes chunk i and the i-th chunk from the end.
# Devices exchange halves of their tokens before and after the attention.
#
# A row is a chunk of queries, and a column is a chunk of keys; the number is the device that
# computes the block.

# %%
SIZE = 4


def show(title, owner):
    chunks = range(2 * SIZE)
    print(title)
    for query in chunks:
        seen = [str(owner(query)) if key <= query else "·" for key in chunks]
        print("   ", " ".join(seen))
    # The mask hides half of a block on the diagonal.
    work = [
        sum(query + 0.5 for query in chunks if owner(query) == device)
        for device in range(SIZE)
    ]
    print(
        f"    work: {work}, the most is {max(work) / np.mean(work):.2f} of the mean\n"
    )
    return work


in_turn = show("in turn", lambda chunk: chunk // 2)
balanced = show("balanced", lambda chunk: min(chunk, 2 * SIZE - 1 - chunk))

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert max(balanced) == min(balanced)
assert max(in_turn) == 7 * min(in_turn)

# %% [markdown]
# ## The bytes that are sent
#
# - `ring`, the default: keys and values travel from device to device, each hop during the matmuls
#   of the previous keys; in the backward pass their gradients travel with them.
# - `all_to_all`: a device gets the whole sequence for its share of the heads. The size must divide
#   the number of heads; here it is four.
# - `gather`: a device gets all keys and values.

# %%
sent = {}
for exchange in ("ring", "all_to_all", "gather"):
    report = audit(compile_step(ContextParallel(4, exchange), eight[:4], 1024))
    kinds = {each.kind for each in report.collectives} - {"all-reduce"}
    sent[exchange] = {kind: report.bytes(kind) for kind in sorted(kinds)}
    print(f"{exchange:>10}: {sent[exchange]}")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert "collective-permute" in sent["ring"]
assert "all-to-all" in sent["all_to_all"]
assert "all-gather" in sent["gather"]

# %% [markdown]
# The all-reduces of the gradients are left out.
#
# ## Choose an exchange
#
# - `ring` works with any number of heads, and no device holds more than two shards of the keys.
#   With thousands of tokens per device, the transfers can hide behind matmuls.
# - `all_to_all` runs the platform's fused kernel on whole sequences, and is quick inside a machine.
# - `gather` is simple, and as good as the others if many heads share few key heads.
#
# The size must divide the length of the sequence. Twice the size should divide it too; otherwise
# causal work is not balanced. Packed documents (`segments`), windows, sinks and soft caps work
# under all three. A model with another attention, such as `nnx.MultiHeadAttention`, runs too: XLA
# gathers its sequence, and `describe` says so.
#
# ## Exercise
#
# How much more than the mean would the busiest of eight devices compute if each had neighbouring
# tokens? And which chunks does device 5 have instead?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
# Chunk c sees c whole chunks and half of itself. With neighbouring tokens, the last device has the
# chunks 14 and 15.
of_device = [sum(chunk + 0.5 for chunk in (2 * n, 2 * n + 1)) for n in range(8)]
print(f"{max(of_device) / np.mean(of_device):.2f} of the mean")
own = [chunk for chunk in range(16) if min(chunk, 15 - chunk) == 5]
print("device 5:", own)
assert own == [5, 10]
assert max(of_device) / np.mean(of_device) == 1.875
