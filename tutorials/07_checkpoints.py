# %% [markdown]
# # 7. Checkpoints: save here, restore there
#
# A checkpoint that depends on the devices that wrote it is a trap: the cluster you resume on is
# never the one you saved on. Here a checkpoint does not depend on the strategy. We save under
# FSDP on 8 devices, and restore under tensor parallelism on 2.

# %%
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax

from nnx_parallel import (
    FSDP,
    Checkpoint,
    DataParallel,
    TensorParallel,
    Trainer,
    errors,
    simulate_devices,
    visualize,
)
from nnx_parallel.models import GPT, GPTConfig, next_token_loss

simulate_devices(8)
runs = Path(tempfile.mkdtemp())
config = GPTConfig.tiny(num_layers=2, embed_dim=64, seq_len=32, vocab_size=64)
rng = np.random.default_rng(0)
batches = [rng.integers(0, 64, (16, 33), dtype=np.int32) for _ in range(8)]


def make_trainer(strategy, checkpoint, num_devices=8):
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=strategy,
        devices=jax.devices()[:num_devices],
        checkpoint=checkpoint,
        loggers=(),
    )


# %% [markdown]
# ## Killed and resumed
#
# First an uninterrupted run of 8 steps, as the reference.

# %%
reference = make_trainer(FSDP(), None)
expected = reference.fit(batches, num_steps=8)["loss"]

# %% [markdown]
# Then a run that ends after 5 steps, and a new one with the same arguments. It finds the
# checkpoint automatically, and skips the batches already seen.

# %%
first = make_trainer(FSDP(), runs / "resumed").fit(batches, num_steps=5)["loss"]
again = make_trainer(FSDP(), runs / "resumed")
second = again.fit(batches, num_steps=8)["loss"]
print(len(first), "steps, then", len(second))
np.testing.assert_array_equal(np.concatenate([first, second]), expected)

# %% [markdown]
# Not close: bit for bit equal. So are all parameters.

# %%


def same(a, b):
    return all(
        np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


assert same(again.state.params, reference.state.params)
assert same(again.state.opt_state, reference.state.opt_state)

# %% [markdown]
# ## Restored on other devices
#
# The same directory, another strategy, fewer devices. Each process reads just the shards that
# its devices need.

# %%
elsewhere = make_trainer(TensorParallel(2), runs / "resumed", num_devices=2)
elsewhere.restore()
print("step", elsewhere.step)
assert elsewhere.step == 8
assert same(elsewhere.state.params, reference.state.params)

# %%


def up_kernel(trainer):
    return trainer.state.params["blocks"]["layer"]["mlp"]["up"]["kernel"]


visualize({"saved": up_kernel(again), "restored": up_kernel(elsewhere)})

# %% [markdown]
# Training continues there, with the numbers of the others up to rounding.

# %%
more = [rng.integers(0, 64, (16, 33), dtype=np.int32) for _ in range(3)]
results = {}
for name, strategy, devices in [
    ("fsdp 8", FSDP(), 8),
    ("tensor 2", TensorParallel(2), 2),
    ("data 1", DataParallel(), 1),
]:
    trainer = make_trainer(strategy, None, devices)
    trainer.restore(directory=runs / "resumed")
    results[name] = trainer.fit(batches + more, num_steps=11)["loss"]
    print(f"{name:9}", results[name])
for values in results.values():
    assert len(values) == 3
    np.testing.assert_allclose(values, results["fsdp 8"], rtol=1e-5)

# %% [markdown]
# ## Retention
#
# `every` sets the interval; `keep_last` and `keep_best` choose which checkpoints are kept. Saves
# run in the background: the arrays are copied to the host, and written while the next steps
# run.

# %%
options = Checkpoint(runs / "kept", every=2, keep_last=2, keep_best="eval_loss")
make_trainer(FSDP(), options).fit(batches, num_steps=8, eval_data=more, eval_every=2)
saved = sorted(
    int(path.name) for path in (runs / "kept").iterdir() if path.name.isdigit()
)
print("saved steps:", saved)
assert saved[-2:] == [6, 8]

# %% [markdown]
# ## A checkpoint of another model
#
# raises an error that lists the arrays that differ, and changes nothing.

# %%
config = GPTConfig.tiny(num_layers=2, embed_dim=128, seq_len=32, vocab_size=64)
try:
    make_trainer(FSDP(), None).restore(directory=runs / "resumed")
except errors.CheckpointMismatchError as error:
    print("\n".join(str(error).splitlines()[:4]))
else:
    raise AssertionError("no error")

# %% [markdown]
# ## Exercise
#
# Fine-tuning needs the weights but not the optimizer state: `restore(weights_only=True)`. Restore
# them under SGD, and check that the step is 0 and the first loss is that of the trained model.
