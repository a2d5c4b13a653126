# %% [markdown]
# # 17. From a laptop to a pod
#
# Your model trains on a laptop, and tomorrow it will train on sixteen chips that you do not have
# yet. `plan` says on the laptop which strategies fit, how much each costs, and which line to write.

# %%
import dataclasses
import tempfile

import jax
import numpy as np
import optax

from nnx_parallel import (
    FSDP,
    DataParallel,
    Precision,
    Trainer,
    plan,
    simulate_devices,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan import (
    HARDWARE,
    Candidate,
    Topology,
    draw_memory,
    draw_roofline,
    draw_timeline,
)

simulate_devices(8)

# %% [markdown]
# ## The Trainer, as it is
#
# The strategy of the Trainer does not matter. The model is a function, so nothing is allocated. A
# plan needs only the shapes of the data.

# %%
config = GPTConfig.gpt_1_3b()
trainer = Trainer(
    lambda rngs: GPT(config, rngs=rngs),
    optax.adamw(3e-4),
    next_token_loss,
    precision=Precision.mixed_bfloat16(),
    loggers=(),
)
ROWS = 256
batch = {"tokens": jax.ShapeDtypeStruct((ROWS, config.seq_len + 1), "int32")}
print(f"{config.num_params:,} parameters, {ROWS * config.seq_len:,} tokens a step")

# %% [markdown]
# ## A first plan
#
# `"v5p:2x2x4"` is a slice of sixteen TPU chips. `compile=0` asks only the formulas. `fix` decides
# parts of the answer, here to keep the list short.

# %%
first = plan(
    trainer,
    topology="v5p:2x2x4",
    batch=batch,
    fix={"pipe": 1, "tensor": 1, "microbatches": 1, "offload": False},
    compile=0,
)
print(first)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert first.best is not None
assert len(first.entries) == 9  # three places for the state, three kinds of remat
state = 4 * config.num_params  # bytes of float32
sharded = next(e for e in first.entries if "FSDP(16), " in f"{e.name}, ")
np.testing.assert_allclose(sharded.costs.memory["parameters"], state / 16, rtol=1e-3)
np.testing.assert_allclose(
    sharded.costs.memory["optimizer state"], 2 * state / 16, rtol=1e-3
)

# %% [markdown]
# The best candidate that fits comes first. Candidates that do not fit come last. The last column
# says why a candidate lost: the owner of most of its memory, or how many times slower it is, and
# for which part it waits. [Plan](../plan.md#read-the-answer) explains the columns.
#
# Memory by owner:

# %%
draw_memory(first)

# %% [markdown]
# Bars of one strategy differ only in remat: kept activations shrink.
#
# ## The waits of a step
#
# Pale transfers run during matmuls and cost no extra time.

# %%
draw_timeline(first)

# %% [markdown]
# The roofline shows the bound of a step [1]. The horizontal axis is the FLOPs of a step for each
# byte that it moves. To the right of a roof's bend, its transfers do not limit the step. To the
# left, the chips wait for bytes.
#
# [1] Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009,
# [doi:10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785)

# %%
draw_roofline(first)

# %% [markdown]
# With 256 rows each chip has 16 rows. A batch with fewer rows has fewer FLOPs for each byte:

# %%
few = plan(
    trainer,
    topology="v5p:2x2x4",
    batch={"tokens": jax.ShapeDtypeStruct((16, config.seq_len + 1), "int32")},
    candidates=[FSDP()],
    compile=0,
)
draw_roofline(few)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
products, _, sent = few.entries[0].time.lanes
many, _, as_much = sharded.time.lanes
assert sent.name == as_much.name == "fsdp"
assert products.work / sent.work < many.work / as_much.work / 8

# %% [markdown]
# ## All strategies
#
# Without `fix` a plan tries all strategies and their composites, schedules of pipelines,
# microbatches and remat:

# %%
found = plan(trainer, topology="v5p:2x2x4", batch=batch, compile=0)
print(f"{found.num_enumerated:,} candidates, {found.num_dropped:,} ruled out")
for entry in found.entries[:5]:
    print(f"{entry.time.fast:.2f} to {entry.time.slow:.2f} s  {entry.name}")
    print(f"    {entry.why or 'the first'}")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert found.num_enumerated > 1000
assert found.best.time.middle <= first.best.time.middle * 1.0051
kinds = {name for e in found.entries for name, n in e.axis_sizes.items() if n > 1}
assert kinds >= {"data", "fsdp", "tensor", "pipe"}

# %% [markdown]
# The picture of a pipeline shows in grey the time in which stages wait for each other.

# %%
piped = next(e for e in found.entries if "Pipeline(4)" in e.name)
print(piped.name)
print(piped.why)
draw_timeline(found, piped)

# %% [markdown]
# ## Pin the decided parts
#
# Perhaps a checkpoint or a later cluster needs `TensorParallel(4)`. Fix it, and the plan finds the
# rest. On the command line it is `--fix tensor=4`.

# %%
pinned = plan(trainer, topology="v5p:2x2x4", batch=batch, fix={"tensor": 4}, compile=0)
print(pinned.code)
ratio = pinned.best.time.middle / found.best.time.middle
print(f"{ratio:.2f} times the step of the first plan")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert "TensorParallel(size=4" in pinned.code
assert all(e.axis_sizes["tensor"] == 4 for e in pinned.entries if e.axis_sizes)
assert ratio >= 1

# %% [markdown]
# ## Ask a compiler
#
# If there is a compiler for the target, `plan` compiles the best candidates, and reads memory,
# FLOPs and transfers from the program. The compiler for TPUs comes with `pip install
# 'nnx-parallel[tpu-compiler]'`. A compiler for simulated CPU devices is always available:

# %%
small = GPTConfig.tiny(num_layers=4, embed_dim=64, seq_len=64)


def make_trainer(**options):
    return Trainer(
        lambda rngs: GPT(small, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        loggers=(),
        **options,
    )


rows = np.random.default_rng(0).integers(small.vocab_size, size=(64, 65))
tokens = {"tokens": rows.astype(np.int32)}
with tempfile.TemporaryDirectory() as cache:  # by default ~/.cache/nnx_parallel/plan
    tried = plan(
        make_trainer(),
        topology="cpu:8",
        batch=tokens,
        candidates=[
            Candidate(strategy=FSDP(8)),
            Candidate(strategy=DataParallel(8), remat="full"),
        ],
        compile=2,
        num_processes=2,
        cache=cache,
    )
for entry in tried.entries:
    formulas, costs = entry.estimate.total_bytes / 2**20, entry.costs
    who = "the compiler" if costs.is_compiled else "formulas again: no compiler here"
    print(f"{entry.name}: {formulas:.1f} MiB by formulas,", end=" ")
    print(f"{costs.total_bytes / 2**20:.1f} MiB by {who}")
print(tried.code)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
for entry in tried.entries:
    guess, told = entry.estimate.total_bytes, entry.costs.total_bytes
    assert 0.5 < guess / told < 2
assert tried.best is not None

# %% [markdown]
# Such a small program consists of operations that the formulas leave out.
# [Benchmarks](../benchmarks.md#plans-against-a-compiler) compares large programs.
#
# ## The line to write
#
# The next cell trains with the strategy and the settings of the plan's last line:

# %%
best = tried.best.candidate
planned = make_trainer(
    strategy=best.strategy,
    num_microbatches=best.num_microbatches,
    remat=best.remat,
)
losses = planned.fit([tokens] * 5, num_steps=5)["loss"]
print(f"{dict(planned.mesh.shape)}: loss {losses[0]:.3f} to {losses[-1]:.3f}")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert planned.mesh.size == 8
assert losses[-1] < losses[0]
held = sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(planned.state.params)
)
assert held == tried.best.costs.memory["parameters"]

# %% [markdown]
# A script needs none of these lines: `python -m nnx_parallel plan train.py --topology v5p:2x2x4`
# prints the same. See [the page of plan](../plan.md).
#
# ## Exercise
#
# Suppose a chip like v5p with 16 GiB: which strategy, which remat, and how many microbatches does
# the 1.3B model then need on sixteen of them? Which owner takes the most memory in the
# `DataParallel` candidate that needs the least memory?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
chip = dataclasses.replace(HARDWARE["v5p"], name="small", memory_bytes=16 * 2**30)
sixteen = Topology(hardware=chip, num_devices=16, shape=(2, 2, 4))
answer = plan(
    trainer, topology=sixteen, batch=batch, fix={"pipe": 1, "tensor": 1}, compile=0
)
print(answer.code)
copied = next(e for e in answer.entries if e.name.startswith("DataParallel(16)"))
print(copied.name, "-", copied.why)
assert "FSDP(size=16" in answer.code
assert not copied.fits(sixteen)
assert answer.best.costs.total_bytes <= 0.95 * 16 * 2**30
