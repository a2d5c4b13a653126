# %% [markdown]
# # 11. Read a profile: where a step's time goes
#
# What *should* the step do? What does the compiled program do? And what did the devices do while it
# ran?

# %%
import collections
import gzip
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import optax

from nnx_parallel import FSDP, Debugging, Trainer, audit, simulate_devices
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

simulate_devices(8)

config = GPTConfig.tiny(num_layers=2, embed_dim=128, seq_len=64)
rng = np.random.default_rng(0)
ROWS, SEQ = 16, 64
batches = [rng.integers(0, 256, (ROWS, SEQ + 1), dtype=np.int32) for _ in range(12)]
directory = tempfile.mkdtemp()


def make_trainer(**options):
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=FSDP(),
        loggers=(),
        **options,
    )


# %% [markdown]
# ## 1. The theory of the step
#
# A training step of a transformer costs `6 N` FLOPs per token, where `N` is the number of parameters
# in matmuls. Attention costs `12 L E T` more, for `L` layers of width `E` over `T` tokens.

# %%
theory = config.flops_per_token(SEQ) * ROWS * SEQ
print(f"{theory / 1e9:.2f} GFLOP a step")

# %% [markdown]
# ## 2. The compiled program
#
# `audit` counts the operations of the compiled program. More FLOPs than in theory mean that
# something is computed twice, by remat or because of a bad sharding. A collective that the strategy
# does not need means that a `constrain` is missing.

# %%
trainer = make_trainer(checkpoint=directory, debugging=Debugging(profile=(6, 10)))
batch = trainer.shard_batch(batches[0])
report = audit(trainer.train_step.lower(trainer.state, batch).compile())
print(report.table())
print(f"\nall devices: {report.flops * 8 / 1e9:.2f} GFLOP a step")

# %% [markdown]
# Program and theory agree to within 5 %, so nothing is computed twice. The only
# collectives are all-gathers and all-reduces, which FSDP needs.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert abs(report.flops * 8 / theory - 1) < 0.05
assert {c.kind for c in report.collectives} == {"all-gather", "all-reduce"}

# %% [markdown]
# ## 3. The run on the devices
#
# `Debugging(profile=(6, 10))` traces steps 6 to 9. Choose steps from the middle of a run: the first
# step compiles, and the next few warm up caches. The trace is in the checkpoint directory.

# %%
trainer.fit(batches, num_steps=12)
(trace,) = Path(directory, "profile").rglob("*.trace.json.gz")
events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
print(f"{len(events):,} events in {trace.name.partition('.')[2]}")

# %% [markdown]
# To see the trace, open <https://ui.perfetto.dev> and drop the file there, or point TensorBoard's
# profile plugin or XProf at the directory. For a number, add up the events: every operation is an
# event with a duration in microseconds.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code"}
steps = [e for e in events if e.get("name", "").startswith("train") and "dur" in e]
print(len(steps), "steps were traced")

KINDS = {
    "collectives": ("all-reduce", "all-gather", "reduce-scatter", "collective-permute"),
    # `ynn` and `xnn` are matmul kernels for CPUs.
    "matmuls": ("dot", "ynn", "xnn", "convolution", "custom-call"),
    "fused elementwise": ("fusion", "reduce", "broadcast", "transpose", "copy"),
}


def kind_of(name):
    for kind, starts in KINDS.items():
        if any(part in name for part in starts):
            return kind
    return None


microseconds = collections.Counter()
for event in events:
    name = event.get("args", {}).get("hlo_op", "")
    if "dur" not in event or not name or name.startswith(("while", "call")):
        continue  # a loop's operations have their own events
    microseconds[kind_of(name) or "other"] += event["dur"]
total = sum(microseconds.values())
for kind, spent in microseconds.most_common():
    print(f"{kind:18} {spent / total:5.0%}", "█" * round(40 * spent / total))

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert len(steps) >= 4
assert total > 0

# %% [markdown]
# These are shares of the total time of operations, summed over devices. Simulated devices wait for
# each other *inside* their collectives. On an accelerator, look at the timeline instead: a
# collective that overlaps with matmuls is free; one that overlaps with nothing is *exposed*, and
# costs its whole time.
#
# ## The host
#
# When a device waits for Python, the timeline has gaps between steps. Compare the time until the
# call returns with the time until the step is done:

# %%
state = trainer.state
dispatch, done = [], []
for _ in range(10):
    start = time.perf_counter()
    state, metrics = trainer.train_step(state, batch)
    dispatch.append(time.perf_counter() - start)
    jax.block_until_ready((state, metrics))
    done.append(time.perf_counter() - start)
trainer.state = state
print(
    f"call returns after {1e3 * np.median(dispatch):.2f} ms, step done after "
    f"{1e3 * np.median(done):.2f} ms"
)

# %% [markdown]
# If the first number is well below the second, the host is ahead of the devices, and they never
# wait for it. Two things undo this lead: slow data, and reading a metric in each step. `Trainer`
# reads metrics up to two steps late, and prefetches batches.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert np.median(dispatch) < np.median(done) / 2

# %% [markdown]
# ## Exercise
#
# Set `remat="full"` in the Trainer. Predict the FLOPs before you look: the forward pass
# is a third of them, and is repeated for the layers. How many bytes of temporaries does
# `remat` save?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
# The forward pass is a third of the FLOPs. It runs once more for the layers, but not for the logits,
# which are outside of the stack. So the total is a little less than 4/3 of the FLOPs without remat.
remat = make_trainer(remat="full")
saved = audit(remat.train_step.lower(remat.state, batch).compile())
print(f"FLOPs: {saved.flops / report.flops:.2f} times those without remat")
print(
    f"temporaries: {saved.temporary_bytes:,} bytes, without remat {report.temporary_bytes:,}"
)
assert 1.2 < saved.flops / report.flops < 4 / 3
assert saved.temporary_bytes < report.temporary_bytes
