# %% [markdown]
# # 10. Write a strategy
#
# A strategy is a frozen dataclass with one method, `claims`. Its claims say which mesh axis the
# strategy owns, how large the axis is, and which dims it splits. `Composite` merges the claims of
# several strategies.
#
# With a vocabulary of 128,000 tokens, the embedding and the head are the largest arrays of a small
# model. The new strategy, `VocabParallel`, splits these two along the vocabulary, and splits the
# batch over the same axis.

# %%
from dataclasses import dataclass

import jax
import numpy as np
import optax

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    Trainer,
    audit,
    simulate_devices,
    visualize,
)
from nnx_parallel.errors import PlacementConflictError
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.strategies import Claims

simulate_devices(8)

# %% [markdown]
# ## The whole strategy
#
# - `axis_sizes` gives the name of the mesh axis and its size. You can choose any name. A size of
#   `None` takes the devices that remain.
# - `batch` lists the axes that split the rows of a batch.
# - `logical` maps the names that models give to their dims to mesh axes.


# %%
@dataclass(frozen=True, repr=False)
class VocabParallel(Strategy):
    """Splits the batch, and the vocabulary of embedding and head, over an axis ``words``."""

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"VocabParallel({self.size}): it needs at least 1 part.")

    def claims(self) -> Claims:
        return Claims(
            axis_sizes={"words": self.size},
            batch=("words",),
            logical={"vocab": "words"},
        )


# %% [markdown]
# ## It composes
#
# In this `Composite`, `FSDP` shards the dims that are still free, and a `Pipeline` spreads the
# layers over stages.

# %%
strategy = Composite(VocabParallel(2), FSDP(2), Pipeline(2))
config = GPTConfig.tiny(num_layers=2, vocab_size=512, seq_len=32)


def make_trainer(strategy, devices=None, num_microbatches=4):
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        num_microbatches=num_microbatches,
        devices=devices,
        loggers=(),
    )


trainer = make_trainer(strategy)
print(dict(trainer.mesh.shape))
for row in trainer.describe().rows:
    if "embedding" in row.info.path or "up.kernel" in row.info.path:
        print(f"{row.info.path:28} {row.placement.stored!s:24} {row.placement.reason}")
visualize(trainer.state.params["embed"])

# %% [markdown]
# Two claims on one name contradict each other. Merging them raises an error that says how to decide.

# %%
try:
    Claims(logical={"vocab": "words"}) | Claims(logical={"vocab": "tensor"})
except PlacementConflictError as error:
    print(error)
else:
    raise AssertionError("no error")

# %% [markdown]
# ## Test it as the library tests its strategies
#
# First, its losses must equal the losses of one device:

# %%
rng = np.random.default_rng(0)
batches = [rng.integers(0, 512, (16, 33), dtype=np.int32) for _ in range(4)]
one = make_trainer(DataParallel(1), jax.devices()[:1]).fit(batches, num_steps=4)["loss"]
print(one)

# %%
losses = trainer.fit(batches, num_steps=4)["loss"]
print(losses)

# %%
np.testing.assert_allclose(losses, one, rtol=1e-5)

# %% [markdown]
# Second, after the steps every array must have the sharding that `describe` states:

# %%
told = trainer.describe()
held = sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trainer.state.params)
)
assert held == told.params_bytes
table = trainer.state.params["embed"]["embedding"]
assert table.addressable_shards[0].data.size * 4 == table.size  # words=2, fsdp=2

# %% [markdown]
# Third, its step must have the collectives that the theory predicts, and no others. The embedding
# is gathered for the lookup and again for the logits, and the gradients of both uses, and of all
# replicated parameters, are summed.

# %%
alone = make_trainer(VocabParallel(2), jax.devices()[:2], num_microbatches=1)
batch = alone.shard_batch(batches[0])
report = audit(alone.train_step.lower(alone.state, batch).compile())
print(report.table())
gathered = [c.bytes_each for c in report.collectives if c.kind == "all-gather"]
assert gathered == [512 * 64 * 4] * 2  # (vocab, embed) in float32
assert {c.kind for c in report.collectives} == {"all-gather", "all-reduce"}

# %% [markdown]
# Fourth, a wrong argument must raise an error before anything is compiled:

# %%
try:
    VocabParallel(0)
except ValueError as error:
    print(error)
else:
    raise AssertionError("no error")

# %% [markdown]
# ## More claims
#
# - `activations` maps names of activations only. Sequence parallelism needs it.
# - `rules` are the explicit rules of the user.
# - `zero` lists axes that split the training state but not the computation: parameters are gathered
#   where they are used, as under `FSDP`.
# - `execution` says how a step is run. `Pipeline` puts its schedule there.
#
# A strategy may also have a method `check(self, model, mesh)`, which refuses a model before anything
# is compiled.
#
# `CONTRIBUTING.md` lists the steps to add a strategy to the library.
#
# ## Exercise
#
# Take `batch` out of the claims. The losses stay equal. Which arrays are communicated now? With a
# vocabulary of 128,000, would you choose this variant, the strategy above, or `FSDP(2)`?


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
@dataclass(frozen=True, repr=False)
class VocabOnly(VocabParallel):
    """Splits the vocabulary like `VocabParallel`, and replicates the batch."""

    def claims(self) -> Claims:
        return Claims(axis_sizes={"words": self.size}, logical={"vocab": "words"})


replicated = make_trainer(VocabOnly(2), jax.devices()[:2], num_microbatches=1)
batch = replicated.shard_batch(batches[0])
changed = audit(replicated.train_step.lower(replicated.state, batch).compile())
print(changed.table())
# No parameter is gathered. Activations are summed instead: each device looks up the tokens of its
# half of the vocabulary, and computes its half of the logits. But both devices run all layers for
# all rows, which is twice the work. With 128,000 tokens and few rows the activations are smaller
# than the table. FSDP(2) gathers the same table as VocabParallel(2), and shards everything else too.
np.testing.assert_allclose(replicated.fit(batches, num_steps=4)["loss"], one, rtol=1e-5)
assert changed.count("all-gather") == 0
assert changed.flops > 1.2 * report.flops
