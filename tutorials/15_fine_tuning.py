# %% [markdown]
# # 15. Fine-tuning
#
# Most models are not trained from scratch. You have a folder from the Hugging Face hub, with
# `config.json` and safetensors files. This tutorial reads such a folder onto eight devices, trains
# adapters next to the model's kernels, and writes folders that transformers and PEFT can read.

# %%
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel import (
    FSDP,
    Callback,
    Composite,
    DataParallel,
    TensorParallel,
    Trainer,
    simulate_devices,
)
from nnx_parallel.layers import lora, merge_lora
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.weights import save_adapters, save_pretrained

simulate_devices(8)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A folder
#
# To avoid a download, we make the folder: it has a small Llama that has learned to count up by one. If
# you have a folder, start at the next heading.

# %%
LENGTH = 32


def count(step, seed, num_batches):
    """Returns rows that count up by `step`, modulo 64."""
    rng = np.random.default_rng(seed)
    for _ in range(num_batches):
        start = rng.integers(0, 64, (32, 1))
        yield ((start + step * np.arange(LENGTH + 1)) % 64).astype(np.int32)


config = GPTConfig.tiny_llama(vocab_size=64, num_layers=2, seq_len=LENGTH)
first = Trainer(
    lambda rngs: GPT(config, rngs=rngs),
    optax.adam(3e-3),
    next_token_loss,
    strategy=DataParallel(),
    loggers=(),
)
losses = first.fit(count(1, seed=0, num_batches=80), num_steps=80)["loss"]
save_pretrained(folder / "base", first.model)
print(f"loss: {losses[0]:.2f} to {losses[-1]:.3f} nats")
print(sorted(path.name for path in (folder / "base").iterdir()))
print(json.loads((folder / "base" / "config.json").read_text())["architectures"])

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert losses[-1] < 0.2

# %% [markdown]
# ## Read it, sharded
#
# `GPT.from_pretrained` returns a model for a Trainer. This call reads only the headers
# of the files: if a name or shape differs from the model in `config.json`, an error
# names the first difference. The Trainer then reads the bytes of each device's shards.
# No process holds all weights.
#
# `lora` adds two narrow matrices, A and B, next to each kernel whose path matches `targets`. B
# starts as zeros, so the model starts unchanged. `wrt=nnx.LoRAParam` trains only these factors;
# only they have gradients and optimizer state. The callback ends the fit when the loss is low.


# %%
class StopWhenGood(Callback):
    def on_step_end(self, trainer, step, metrics):
        if metrics["loss"] < 0.1:
            trainer.stop("the loss is below 0.1")


strategy = Composite(TensorParallel(2), FSDP())
adapted = lora(
    GPT.from_pretrained(folder / "base"), targets=r"attention|mlp", rank=4, alpha=8
)
trainer = Trainer(
    adapted,
    optax.adam(1e-2),
    next_token_loss,
    strategy=strategy,
    wrt=nnx.LoRAParam,
    callbacks=(StopWhenGood(),),
    loggers=(),
)
params = nnx.state(trainer.model, nnx.Param)
factors = nnx.state(trainer.model, nnx.LoRAParam)
sizes = [sum(x.size for x in jax.tree.leaves(state)) for state in (params, factors)]
print(f"{sizes[1]:,} of {sizes[0]:,} parameters are trained")

# %% [markdown]
# ## Train on the answers
#
# The new task is to count up by three. Each row begins with a prompt of four tokens, which the model
# should read and not learn to write: their `weights` are 0.

# %%
weights = np.ones((32, LENGTH + 1), np.float32)
weights[:, :4] = 0


def batches(seed, num_batches):
    for tokens in count(3, seed, num_batches):
        yield {"tokens": tokens, "weights": weights}


held_out = list(batches(seed=9, num_batches=2))
before = trainer.evaluate(held_out)["loss"]
history = trainer.fit(batches(seed=1, num_batches=200), num_steps=200)
after = trainer.evaluate(held_out)["loss"]
print(f"{trainer.step} steps; held out: {before:.2f} to {after:.3f} nats")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert before > 2
assert after < 0.3
assert trainer.step < 200

# %% [markdown]
# ## Write it
#
# `merge_lora` adds each product of A and B to its kernel, which gives the same model without adapters.
# `save_adapters` writes only the factors, in the format of PEFT. Both folders appear whole or not
# at all, and a folder that has files is never overwritten.

# %%
merged = merge_lora(trainer.model)
save_pretrained(folder / "tuned", merged, source=folder / "base")
save_adapters(folder / "adapters", trainer.model, base=str(folder / "base"))
for name in ("tuned", "adapters"):
    files = {path.name: path.stat().st_size for path in (folder / name).iterdir()}
    print(name, files)

# %% [markdown]
# The folder does not know under which strategy it was written. One device reads it:

# %%
alone = Trainer(
    GPT.from_pretrained(folder / "tuned"),
    optax.adam(1e-3),
    next_token_loss,
    strategy=DataParallel(1),
    devices=jax.devices()[:1],
    loggers=(),
)
again = alone.evaluate(held_out)["loss"]
print(f"held out, on one device: {again:.3f} nats")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_allclose(again, after, rtol=1e-4)

# %% [markdown]
# ## Exercise
#
# How many bytes would AdamW's state have for all parameters in float32, and how many does it have here?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
# AdamW keeps two moments of four bytes for each parameter that is trained.
for name, size in zip(("all", "adapters"), sizes, strict=True):
    print(f"{name}: {2 * 4 * size / 1024:.0f} KiB")
assert sizes[1] < sizes[0] / 4
