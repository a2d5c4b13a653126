"""Checkpoints of adapters only: size, checksums of the base, any strategy."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Checkpoint,
    Composite,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.checkpoint import CheckpointReader, StoredCheckpoint
from nnx_parallel.errors import CheckpointError, CheckpointMismatchError
from nnx_parallel.layers import lora
from nnx_parallel.models import GPT, next_token_loss

GOLDENS = Path(__file__).parent / "goldens"
ROWS = np.concatenate([np.load(GOLDENS / "llama" / "logits.npz")["tokens"]] * 4)
BATCHES = [np.roll(ROWS, i, axis=1) for i in range(4)]


def make_trainer(directory: Path, seed: int = 0, **options: Any) -> Trainer:
    base = options.pop("base", None) or GPT.from_pretrained(GOLDENS / "llama")
    strategy: Strategy = options.pop("strategy", FSDP(min_size=0))
    return Trainer(
        lora(base, targets="query|down", rank=2),
        optax.adam(1e-2),
        next_token_loss,
        strategy=strategy,
        wrt=nnx.LoRAParam,
        checkpoint=Checkpoint(directory, frozen=options.pop("frozen", "checksum")),
        loggers=(),
        seed=seed,
        **options,
    )


def test_run_resumes_from_adapters_and_base(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", frozen="save")
    expected = whole.fit(BATCHES, 4)["loss"]
    first = make_trainer(tmp_path / "run")
    before = first.fit(BATCHES[:2], 2)["loss"]
    # The second run uses another strategy: the layout on disk does not depend on it.
    tensor = Composite(TensorParallel(2), FSDP(min_size=0))
    second = make_trainer(tmp_path / "run", strategy=tensor)
    after = second.fit(BATCHES, 4)["loss"]
    np.testing.assert_allclose([*before, *after], expected, rtol=1e-5)
    assert len(after) == 2
    # The checkpoint has the adapters, two Adam moments per adapter with a count, and
    # the progress.
    num = sum(x.size for x in jax.tree.leaves(nnx.state(first.model, nnx.LoRAParam)))
    assert num_bytes(first.state.opt_state) == 8 * num + 4
    stored = read_stored(tmp_path / "run")
    sizes = {name: num_bytes(group) for name, group in stored.groups.items()}
    assert (sizes["model"], sizes["optimizer"]) == (4 * num, 8 * num + 4)
    assert set(sizes) == {"model", "optimizer", "progress"}
    # A full checkpoint stores the base; here the base has only checksums.
    more = read_stored(tmp_path / "whole")
    assert stored.base.keys() == more.groups["model"].keys() - stored.groups["model"]
    assert stored.checksums["base"] == {
        path: more.checksums["model"][path] for path in stored.base
    }
    assert on_disk(tmp_path / "whole") - on_disk(tmp_path / "run") > 0.8 * num_bytes(
        {path: more.groups["model"][path] for path in stored.base}
    )
    # A Trainer that saves only checksums of the base restores a full checkpoint.
    make_trainer(tmp_path / "new").restore(directory=tmp_path / "whole")


def read_stored(directory: Path) -> StoredCheckpoint:
    return CheckpointReader(directory).describe()


def num_bytes(arrays: Any) -> int:
    leaves = (x for x in jax.tree.leaves(arrays))
    return sum(x.size * x.dtype.itemsize for x in leaves)


def on_disk(directory: Path) -> int:
    files = (directory / "4").rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def other_base(rngs: nnx.Rngs) -> nnx.Module:
    """The same base with one different element."""
    model: Any = GPT.from_pretrained(GOLDENS / "llama")(rngs)
    kernel = model.blocks.layer.mlp.up.kernel
    kernel.set_value(kernel.get_value().at[0, 0, 0].add(1e-3))
    return model


def test_another_base_raises_and_changes_nothing(tmp_path: Path) -> None:
    make_trainer(tmp_path / "run").fit(BATCHES[:1], 1)
    model = other_base(nnx.Rngs(0))
    trainer = Trainer(
        lora(model, targets="query|down", rank=2),
        optax.adam(1e-2),
        next_token_loss,
        strategy=FSDP(min_size=0),
        wrt=nnx.LoRAParam,
        checkpoint=Checkpoint(tmp_path / "new", frozen="checksum"),
        loggers=(),
    )
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(trainer.model)))
    text = "Checkpoint 1 in '" + str(tmp_path / "run") + "' was trained on another "
    text += "base: 1 of 12 arrays that it names by checksum differ from this "
    text += "model's arrays. The first, `blocks.layer.mlp.up.kernel`, has checksum "
    for weights_only in (False, True):
        with pytest.raises(CheckpointMismatchError, match=re.escape(text)):
            trainer.restore(directory=tmp_path / "run", weights_only=weights_only)
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(trainer.model)))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    wider = make_trainer(
        tmp_path / "wider", base=GPT.from_pretrained(GOLDENS / "smollm")
    )
    text = "was trained on another base:\n  `head.kernel` was float32[32,128] and is "
    with pytest.raises(CheckpointMismatchError, match=re.escape(text + "nothing here")):
        wider.restore(directory=tmp_path / "run")
    reader = CheckpointReader(tmp_path / "run")
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        trainer.state,
    )
    with pytest.raises(CheckpointMismatchError, match=r"names 12 arrays by check"):
        reader.restore_state(abstract)
    text = "Checkpoint(frozen='hash') must be 'save' or 'checksum'."
    with pytest.raises(CheckpointError, match=re.escape(text)):
        Checkpoint(tmp_path, frozen="hash")  # pyright: ignore[reportArgumentType]
