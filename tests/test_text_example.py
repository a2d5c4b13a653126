"""The script for text files: tokens, parts of processes, mixtures and resumed runs."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from examples.text import END, documents, make_tokenizer, packed
from nnx_parallel import FSDP, Checkpoint, Trainer
from nnx_parallel.models import GPT
from tests.processes.running import ROOT, Ended
from tests.processes.running import run as run_command

pytestmark = pytest.mark.long

SIZES: dict[str, Any] = {"length": 9, "rows": 4, "share": (0, 1)}


def numbered(first: int, count: int) -> list[dict[str, np.ndarray]]:
    """Documents of one to four tokens; each document repeats a different token."""
    return [{"tokens": np.full(1 + n % 4, first + n, np.int32)} for n in range(count)]


def take(dataset: grain.IterDataset, count: int) -> list[np.ndarray]:
    return [batch["tokens"] for batch, _ in zip(dataset, range(count), strict=False)]


def test_bytes_without_the_tokenizers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = make_tokenizer(["abc"], 300)
    text = "d\xe9f \N{GRINNING FACE}\0"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == len(text.encode())
    assert END not in tokens
    assert max(tokens) < tokenizer.vocab_size == 257


def test_bpe_round_trip() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = make_tokenizer(["the cat and the hat"] * 3, 270)
    text = "the d\xe9f \N{GRINNING FACE}\n"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text.encode())
    assert END not in tokens
    assert tokenizer.vocab_size <= 270
    again = make_tokenizer(["the cat and the hat"] * 3, 270)
    assert again.encode(text) == tokens


def test_documents_keep_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = make_tokenizer([], 0)
    texts = ["a" * 3, "b" * 9, "c" * 20]
    rows = [row["tokens"] for row in documents(texts, tokenizer, 8)]
    assert max(map(len, rows)) == 8
    joined = np.concatenate(rows)
    assert (joined == END).sum() == len(texts)
    assert tokenizer.decode(joined.tolist()) == "".join(texts)


def test_processes_read_disjoint_parts() -> None:
    sources = [numbered(1, 40), numbered(100, 40)]
    seen = [
        set(
            np.concatenate(
                take(packed(sources, [1, 1], **dict(SIZES, share=share)), 40)
            ).flat
        )
        for share in ((0, 2), (1, 2))
    ]
    assert seen[0] & seen[1] == {0}  # padding
    assert seen[0] | seen[1] == {0, *range(1, 41), *range(100, 140)}


def test_mixture_follows_weights() -> None:
    sources = [numbered(1, 40), numbered(100, 40)]
    found = Counter(
        int(value >= 100)
        for tokens in take(packed(sources, [7, 3], **SIZES), 60)
        for row in tokens
        for value in set(row.tolist()) - {0}
    )
    assert found[0] / found.total() == pytest.approx(0.7, abs=0.06)


def test_epochs_have_different_orders() -> None:
    tokens = np.concatenate(take(packed([numbered(1, 40)], [1], **SIZES), 30)).flatten()
    order = [
        int(t) for t, before in zip(tokens[1:], tokens, strict=False) if t != before
    ]
    order = [t for t in order if t]
    assert Counter(order[:40]) != Counter(order[:20] * 2)
    assert order[:40] != order[40:80]


def test_restored_iterator_continues_with_same_batches() -> None:
    sources = [numbered(1, 40), numbered(100, 30)]
    first = iter(packed(sources, [7, 3], **SIZES))
    for _ in range(7):  # within a group of packed rows
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    again = iter(packed(sources, [7, 3], **SIZES))
    again.set_state(state)
    for _ in range(20):
        np.testing.assert_equal(next(again), next(first))


def loss(model: Any, batch: Any) -> jax.Array:
    return (model(batch["tokens"] / 100) ** 2).mean()


def test_resumed_run_sees_same_batches(tmp_path: Path) -> None:
    sources = [numbered(1, 40), numbered(100, 30)]

    def fit(directory: Path) -> np.ndarray:
        trainer = Trainer(
            lambda rngs: nnx.Linear(9, 1, rngs=rngs),
            optax.sgd(1e-3),
            loss,
            strategy=FSDP(4, min_size=0),
            devices=jax.devices()[:4],
            checkpoint=Checkpoint(directory, every=5, keep_last=None),
            loggers=(),
        )
        return trainer.fit(packed(sources, [7, 3], **SIZES), num_steps=15)["loss"]

    whole = fit(tmp_path / "whole")
    assert len(set(whole.tolist())) == 15
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for step in ("10", "15"):
        shutil.rmtree(tmp_path / "killed" / step)
    np.testing.assert_array_equal(fit(tmp_path / "killed"), whole[5:])


@pytest.mark.faults
def test_script_trains_resumes_and_exports_on_two_processes(tmp_path: Path) -> None:
    def launch(steps: int) -> Ended:
        sizes = "--rows 4 --length 32 --width 32 --layers 1 --vocab 300 --every 2"
        return run_command(
            *("launch", "--cpu", "--processes", "2", "--devices-per-process", "1"),
            *(str(ROOT / "examples/text.py"), "--run", str(tmp_path / "run")),
            *("--steps", str(steps), *sizes.split()),
        )

    first = launch(2)
    assert first.code == 0, first.text
    assert first.text.count("Sample at step 2: def read") == 1
    shutil.rmtree(tmp_path / "run/export-2")
    second = launch(4)
    assert second.code == 0, second.text
    assert "Resumed from step 2" in second.text
    assert "Step 4 is exported to" in second.text
    names = {path.name for path in (tmp_path / "run/export-4").iterdir()}
    assert names >= {"config.json", "model.safetensors"}
    Trainer(GPT.from_pretrained(tmp_path / "run/export-4"), optax.sgd(0.0), loss)
