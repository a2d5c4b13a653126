# %% [markdown]
# # 10. Write a strategy
#
# A strategy is a frozen dataclass that answers questions: which mesh axis is mine and how large
# is it, does it split the batch, which named dims does it split. It answers for itself only;
# `Composite` does the rest. We write one that the library lacks, and hold it to the library's
# own standard.
#
# A vocabulary of 128,000 tokens makes the embedding and the head the largest arrays of a small
# model. `VocabParallel` splits these two along the vocabulary, and nothing else.

# %%
from dataclasses import dataclass

import jax
import numpy as np
import optax

from models import GPT, GPTConfig, next_token_loss
from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Strategy,
    Trainer,
    audit,
    simulate_devices,
    visualize,
)
from nnx_parallel.sharding import Claims

simulate_devices(8)

# %% [markdown]
# ## The whole of it
#
# `axis_sizes` is the one answer that must be given; all others have a default that changes
# nothing. `logical_axes` maps names in models to the axis. An axis may have any name.


# %%
@dataclass(frozen=True, repr=False)
class VocabParallel(Strategy):
    """Embedding and head split along the vocabulary, over the axis ``words``."""

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"VocabParallel({self.size}): it needs at least 1 part.")

    def claims(self) -> Claims:
        return Claims(axis_sizes={"words": self.size}, logical={"vocab": "words"})


# %% [markdown]
# ## It composes
#
# Nothing was said about meshes or about other strategies, and yet it stands in a `Composite`.
# `FSDP` splits what is left.

# %%
strategy = Composite(VocabParallel(2), FSDP())
config = GPTConfig.tiny(num_layers=2, vocab_size=512, seq_len=32)


def make_trainer(strategy, devices=None):
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
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
# ## Held to the standard
#
# First: the numbers of one device.

# %%
rng = np.random.default_rng(0)
batches = [rng.integers(0, 512, (16, 33), dtype=np.int32) for _ in range(4)]
one = make_trainer(DataParallel(1), jax.devices()[:1]).fit(batches, num_steps=4)["loss"]
losses = trainer.fit(batches, num_steps=4)["loss"]
print(one, losses, sep="\n")
np.testing.assert_allclose(losses, one, rtol=1e-5)

# %% [markdown]
# Second: every array lies where it was promised, before the steps and after them.

# %%
told = trainer.describe()
held = sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trainer.state.params)
)
assert held == told.params_bytes
table = trainer.state.params["embed"]["embedding"]
assert table.addressable_shards[0].data.size * 8 == table.size  # words=2, fsdp=4

# %% [markdown]
# Third: it sends what theory says. On its own, over two devices, it splits the lookup and the
# logits. The two halves of a looked-up row must be added, and so must the parts of the loss's
# normaliser: one number for each token. No array of the size of the vocabulary travels.

# %%
alone = make_trainer(VocabParallel(2), jax.devices()[:2])
batch = alone.shard_batch(batches[0])
report = audit(alone.train_step.lower(alone.state, batch).compile())
print(report.table())
logits_bytes = 16 * 32 * 512 * 4  # (batch, seq, vocab) in float32
assert {c.kind for c in report.collectives} == {"all-reduce"}
assert report.bytes() < logits_bytes

# %% [markdown]
# Its errors are checked too, before anything compiles.

# %%
try:
    VocabParallel(0)
except ValueError as error:
    print(error)
else:
    raise AssertionError("no error")

# %% [markdown]
# ## More to answer
#
# `batch_axes` if the axis splits the batch; `activation_axes` for names of activations alone;
# `user_rules` for explicit rules. What runs differently, as a pipeline does, answers
# `pipeline`. `CONTRIBUTING.md` has the list for a strategy that is to join the library.
#
# ## Exercise
#
# Give `VocabParallel` the batch as well: `batch_axes` returns `("words",)`. The losses stay equal. What
# does the audit show now, and would you rather have this or `FSDP(2)`?
