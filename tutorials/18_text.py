# %% [markdown]
# # 18. A language model from text files
#
# This tutorial begins with text files and ends with an exported GPT. It learns a tokenizer, packs
# documents into rows, trains under FSDP, and samples. The text is the source of Python's standard
# library, so nothing is downloaded. For your files and a pod, start from the script
# `examples/text.py` of the repository, which has the same steps.

# %%
import ast
import inspect
import shutil
import sysconfig
import tempfile
from pathlib import Path

import grain
import jax
import numpy as np
import optax
from grain import experimental as packing

from nnx_parallel import FSDP, Checkpoint, TextSamples, Trainer, simulate_devices
from nnx_parallel.models import GPT, GPTConfig, generate, next_token_loss, pad_prompts
from nnx_parallel.weights import save_pretrained

simulate_devices(8)
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Two sources of text
#
# One source is code: the functions of the library. The other is prose: its documentation strings.

# %%
code, prose = [], []
for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
    text = path.read_text(errors="replace")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            code.append(
                inspect.cleandoc("".join(lines[node.lineno - 1 : node.end_lineno]))
            )
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            prose.append(ast.get_docstring(node) or "")
prose = [text for text in prose if text]
print(f"{len(code):,} functions, {len(prose):,} documentation strings")

# %% [markdown]
# ## A tokenizer
#
# The library [tokenizers](https://huggingface.co/docs/tokenizers) learns a byte-level BPE, which
# represents any text and makes frequent strings a single token. `pip install 'nnx-parallel[text]'` installs it. If it is
# missing, each byte is a token. Token 0 begins every document.

# %%
END = 0
try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError:
    vocab_size = 257

    def encode(text):
        return [byte + 1 for byte in text.encode()]

    def decode(tokens):
        return bytes(t - 1 for t in tokens if t).decode(errors="replace")

else:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|end|>"],  # gets number 0
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(code + prose, learner)
    vocab_size, decode = bpe.get_vocab_size(), bpe.decode

    def encode(text):
        return bpe.encode(text).ids


line = "def read(self, size=-1):"
print(len(line), "bytes,", len(encode(line)), "tokens")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert decode(encode(line)) == line

# %% [markdown]
# ## Packed rows
#
# Documents have different lengths, but all rows have the same length. Grain packs several documents
# into a row. The batch also has `segments`, the number of each token's document. With it, the model
# and the loss keep documents apart.
#
# `mix` draws 70 % of the documents from the code. `shuffle` gives each epoch a different order, which
# depends only on the seed.

# %%
LENGTH, ROWS = 129, 16  # a row is the input and the last label


def documents(texts):
    for text in texts:
        tokens = np.array([END, *encode(text)], np.int32)
        for start in range(0, len(tokens), LENGTH):
            yield {"tokens": tokens[start : start + LENGTH]}


sources = [list(documents(code)), list(documents(prose))]
# Every 20th document is held out.
held_out = [source[::20] for source in sources]
for source in sources:
    del source[::20]


def segments_of(row):
    return {"tokens": row["tokens"], "segments": row["tokens_segment_ids"]}


def packed(sources):
    """Returns endless batches of {tokens, segments}, each int32 (ROWS, LENGTH)."""
    endless = [
        grain.MapDataset.source(source).seed(seed).shuffle().repeat()
        for seed, source in enumerate(sources)
    ]
    mixed = grain.MapDataset.mix(endless, weights=[7, 3]).to_iter_dataset()
    rows = packing.FirstFitPackIterDataset(
        mixed, length_struct={"tokens": LENGTH}, num_packing_bins=ROWS
    )
    return rows.map(segments_of).batch(ROWS)


batch = next(iter(packed(sources)))
print(f"{(batch['segments'] == 0).mean():.1%} of the tokens are padding")
print(f"{batch['segments'].max(axis=1).mean():.1f} documents in a row")

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert batch["tokens"].shape == (ROWS, LENGTH)
assert (batch["segments"] == 0).mean() < 0.2

# %% [markdown]
# ## Train
#
# `TextSamples` continues prompts of different lengths every 15 steps, and logs the texts.

# %%
config = GPTConfig.tiny_llama(
    vocab_size=vocab_size, seq_len=LENGTH - 1, embed_dim=96, num_layers=2
)


def make_trainer(directory):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 45)
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
        next_token_loss,
        strategy=FSDP(),
        checkpoint=Checkpoint(directory, every=15, keep_last=None),
        callbacks=(sample,),
        loggers=(),
    )


sample = TextSamples(
    ["def read", "Return the"],
    every=15,
    encode=encode,
    decode=decode,
    start=END,
    stop=[END],
    max_new_tokens=24,
    top_p=0.9,
)
trainer = make_trainer(folder / "run")
losses = trainer.fit(packed(sources), num_steps=45)["loss"]
print(f"loss: {losses[0]:.2f} to {losses[-1]:.2f} nats a token")
for text in sample.texts:
    print(repr(text))

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert losses[-1] < 0.85 * losses[0]
assert sample.texts[0].startswith("def read")
assert sample.texts[1].startswith("Return the")

# %% [markdown]
# ## A restart sees the same batches
#
# A checkpoint also has the position in the data: Grain's iterator gives its state to the Trainer. We
# copy the run without its last checkpoint, as if it had been killed after step 30, and start it again:

# %%
shutil.copytree(folder / "run", folder / "killed")
shutil.rmtree(folder / "killed" / "45")
again = make_trainer(folder / "killed")
repeated = again.fit(packed(sources), num_steps=45)["loss"]
print(
    f"{len(repeated)} steps; losses are equal: {np.array_equal(repeated, losses[30:])}"
)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
np.testing.assert_array_equal(repeated, losses[30:])

# %% [markdown]
# ## Generate
#
# `generate` keeps keys and values in a cache, so a new token costs one pass. `pad_prompts` makes a batch
# of prompts of unequal lengths. `predict` compiles the function, and runs it under the strategy:

# %%
prompts = pad_prompts([[END, *encode(text)] for text in ("class", "if not ")])


def go_on(model, batch):
    return generate(
        model,
        batch["prompt"],
        lengths=batch["lengths"],
        max_new_tokens=16,
        temperature=0,  # takes the likeliest token; to sample, pass a key and temperature=1
        stop=[END],
    )


tokens = trainer.predict([prompts], go_on)  # (2, prompt_len + 16)
for row in tokens:
    print(repr(decode([int(t) for t in row if t != END])))

# %% [markdown]
# ## Export
#
# The folder has the format of transformers. Any strategy can read it; here a Trainer on one device
# does:

# %%
save_pretrained(folder / "export", trainer.model)
if vocab_size != 257:
    bpe.save(str(folder / "export" / "tokenizer.json"))
print(sorted(path.name for path in (folder / "export").iterdir()))
alone = Trainer(
    GPT.from_pretrained(folder / "export"),
    optax.sgd(0.0),
    next_token_loss,
    devices=jax.devices()[:1],
    loggers=(),
)
print("equal tokens:", np.array_equal(alone.predict([prompts], go_on), tokens))

# %% [markdown]
# ## On a pod
#
# With several processes, each process reads its part of every source, and makes its rows of each
# batch. Its part is `source[index::count]`, where `index, count = trainer.data_share`. The script does
# this:
#
# ```console
# $ python -m nnx_parallel launch --processes 2 --devices-per-process 4 --cpu examples/text.py
# ```
#
# ## Exercise
#
# Which share of the tokens is code, if 70 % of the documents are code?

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
means = np.array(
    [np.mean([len(row["tokens"]) for row in source]) for source in sources]
)
share = 0.7 * means[0] / (0.7 * means[0] + 0.3 * means[1])
print(
    f"{share:.0%}: functions have {means[0]:.0f} tokens, documentation {means[1]:.0f}"
)
assert 0.5 < share < 1
