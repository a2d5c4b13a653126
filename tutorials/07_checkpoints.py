# %% [markdown]
# # 7. Checkpoints: save here, restore there
#
# The cluster on which a run resumes is often not the one that saved it. So a checkpoint here does
# not depend on the strategy or on the number of devices. This tutorial saves under FSDP on 8
# devices, and restores under tensor parallelism on 2.

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
# An uninterrupted run of 8 steps is the reference:

# %%
reference = make_trainer(FSDP(), None)
expected = reference.fit(batches, num_steps=8)["loss"]
print(expected)

# %% [markdown]
# Another run ends after 5 steps:

# %%
first = make_trainer(FSDP(), runs / "resumed").fit(batches, num_steps=5)["loss"]
print(first)

# %% [markdown]
# A new Trainer with the same arguments finds the checkpoint automatically. It skips the batches that
# were already seen, and runs the last three steps:

# %%
again = make_trainer(FSDP(), runs / "resumed")
second = again.fit(batches, num_steps=8)["loss"]
print(second)

# %% [markdown]
# These losses equal the losses of the uninterrupted run bit for bit, and so do all parameters and the
# optimizer state.


# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
def same(a, b):
    return all(
        np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


np.testing.assert_array_equal(np.concatenate([first, second]), expected)
assert same(again.state.params, reference.state.params)
assert same(again.state.opt_state, reference.state.opt_state)

# %% [markdown]
# ## Restored on other devices
#
# The next Trainer reads the same directory under another strategy, on fewer devices. Each process
# reads only the shards that its devices need.

# %%
elsewhere = make_trainer(TensorParallel(2), runs / "resumed", num_devices=2)
elsewhere.restore()
print("step", elsewhere.step)


def up_kernel(trainer):
    return trainer.state.params["blocks"]["layer"]["mlp"]["up"]["kernel"]


visualize({"saved": up_kernel(again), "restored": up_kernel(elsewhere)})

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert elsewhere.step == 8
assert same(elsewhere.state.params, reference.state.params)

# %% [markdown]
# Training continues from there, with the same losses up to rounding. A Trainer can also restore from
# another run's directory. On 8 devices under FSDP:

# %%
more = [rng.integers(0, 64, (16, 33), dtype=np.int32) for _ in range(3)]


def continued(strategy, num_devices):
    trainer = make_trainer(strategy, None, num_devices)
    trainer.restore(directory=runs / "resumed")
    return trainer.fit(batches + more, num_steps=11)["loss"]


fsdp_losses = continued(FSDP(), 8)
print(fsdp_losses)

# %% [markdown]
# On 2 devices under tensor parallelism:

# %%
tensor_losses = continued(TensorParallel(2), 2)
print(tensor_losses)

# %% [markdown]
# On one device:

# %%
one_losses = continued(DataParallel(), 1)
print(one_losses)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
for losses in (tensor_losses, one_losses):
    assert len(losses) == 3
    np.testing.assert_allclose(losses, fsdp_losses, rtol=1e-5)

# %% [markdown]
# ## Retention
#
# `every` sets the number of steps from one checkpoint to the next. `keep_last` and `keep_best` choose
# which checkpoints are kept. Saving does not stop the training: arrays are copied to the host, and
# written to disk while the next steps run.

# %%
options = Checkpoint(runs / "kept", every=2, keep_last=2, keep_best="eval_loss")
make_trainer(FSDP(), options).fit(batches, num_steps=8, eval_data=more, eval_every=2)
saved = sorted(
    int(path.name) for path in (runs / "kept").iterdir() if path.name.isdigit()
)
print("saved steps:", saved)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert saved[-2:] == [6, 8]

# %% [markdown]
# ## A checkpoint of another model
#
# Restoring a checkpoint of a model with other shapes is an error. The error lists the arrays that
# differ, and the Trainer does not change.

# %%
narrow = config
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
# them under SGD, and check that the step is 0 and the first loss equals the trained model's.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
config = narrow
tuned = Trainer(
    lambda rngs: GPT(config, rngs=rngs),
    optax.sgd(0.1),
    next_token_loss,
    strategy=FSDP(),
    loggers=(),
)
tuned.restore(directory=runs / "resumed", weights_only=True)
assert tuned.step == 0
loss = tuned.fit(more, num_steps=1)["loss"]
print(f"first loss {loss[0]:.5f}, of the trained model {fsdp_losses[0]:.5f}")
np.testing.assert_allclose(loss[0], fsdp_losses[0], rtol=1e-5)
