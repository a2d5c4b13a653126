"""The demo's text and baseline models, and one small run of the full demo."""

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from demo.corpus import (
    RandomWindows,
    bigram_bits,
    spread_windows,
    standard_library,
    unigram_bits,
)
from demo.train import STRATEGIES, Settings, run
from nnx_parallel.models import GPTConfig
from tests.parity.runs import compiling


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def test_held_out_files_are_not_trained_on() -> None:
    corpus = standard_library()
    assert not set(corpus.train_files) & set(corpus.valid_files)
    assert len(corpus.valid_files) > 5
    assert len(corpus.valid) > 100_000
    assert len(corpus.train) > 10 * len(corpus.valid)


def test_corpus_is_deterministic_and_sorted() -> None:
    first, second = standard_library(), standard_library()
    assert first == second
    assert list(first.train_files) == sorted(first.train_files)
    np.testing.assert_array_equal(first.valid, second.valid)


def test_corpus_leaves_out_tests_and_packages() -> None:
    corpus = standard_library()
    folders = {part for file in corpus.train_files for part in file.parts[:-1] if part}
    assert "asyncio" in folders
    assert not folders & {"site-packages", "dist-packages", "test", "tests", "idlelib"}


def test_held_out_files_depend_only_on_names(tmp_path: Path) -> None:
    def held_out(root: Path) -> set[Path]:
        files = standard_library(root).valid_files
        return {file.relative_to(root) for file in files}

    for root in (tmp_path / "a", tmp_path / "b"):
        (root / "test").mkdir(parents=True)
        (root / "test" / "left_out.py").write_text("x")
        for number in range(60):
            (root / f"m{number}.py").write_text(root.name)
    assert held_out(tmp_path / "a") == held_out(tmp_path / "b")
    (tmp_path / "b" / "another.py").write_text("")
    assert held_out(tmp_path / "b") - {Path("another.py")} == held_out(tmp_path / "a")


def test_directory_without_source_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape("too few to hold any out")):
        standard_library(tmp_path)


def test_random_windows_are_reproducible() -> None:
    text = as_bytes(bytes(range(100)))
    windows = RandomWindows(text=text, global_batch_size=4, seq_len=8)
    first = list(itertools.islice(windows, 3))
    for batch, again in zip(first, windows, strict=False):
        assert (batch.shape, batch.dtype) == ((4, 9), np.int32)
        np.testing.assert_array_equal(batch, again)
        np.testing.assert_array_equal(np.diff(batch), 1)
    assert not np.array_equal(first[0], first[1])


def test_spread_windows_cover_text() -> None:
    text = as_bytes(bytes(range(100)))
    batches = spread_windows(text, num_batches=2, global_batch_size=2, seq_len=4)
    assert [batch.shape for batch in batches] == [(2, 5)] * 2
    assert batches[0][0, 0] == 0
    assert batches[-1][-1, -1] == 99


def test_unigram_bits_match_hand_calculation() -> None:
    # The text "aab", with 1 added to each of 256 counts, gives a 3/259, b 2/259, c
    # 1/259.
    rows = as_bytes(b"zabc").astype(np.int32)[None]
    expected = -sum(math.log2(n / 259) for n in (3, 2, 1)) / 3
    assert unigram_bits(as_bytes(b"aab"), [rows]) == pytest.approx(expected)


def test_bigram_bits_match_hand_calculation() -> None:
    # The pairs of "aab" are aa and ab: after a, each has 2/258; after another byte,
    # 1/256.
    rows = as_bytes(b"aabc").astype(np.int32)[None]
    expected = -(2 * math.log2(2 / 258) + math.log2(1 / 256)) / 3
    assert bigram_bits(as_bytes(b"aab"), [rows]) == pytest.approx(expected)


def test_each_strategy_uses_eight_devices(devices: list) -> None:
    for name, make_strategy in STRATEGIES.items():
        assert make_strategy().make_mesh(devices).size == 8, name


@pytest.mark.slow
def test_demo_trains_resumes_and_restores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: list
) -> None:
    def output(strategy: str, num_steps: int) -> str:
        settings = Settings(
            directory=str(tmp_path),
            model=GPTConfig.tiny_llama(num_layers=2),
            num_steps=num_steps,
            pause_every=2,
            global_batch_size=8,
            seq_len=16,
            num_valid_batches=2,
            sample_len=16,
        )
        run(STRATEGIES[strategy](), settings)
        return capsys.readouterr().out

    started = output("default", num_steps=2)
    assert "mesh fsdp=4 * tensor=2" in started
    assert "step 2/2" in started
    assert "Resumed" not in started

    resumed = output("hsdp", num_steps=4)
    assert "mesh data=2 * fsdp=4" in resumed
    assert "Resumed from step 2" in resumed
    assert "step 4/4" in resumed

    done = output("default", num_steps=4)
    assert "Resumed from step 4" in done
    assert "All 4 steps are done: nothing to train." in done
    assert "Step 4 restored on 4 devices under DataParallel()" in done
    assert gpt_bits(done) == pytest.approx(gpt_bits(resumed), abs=2e-4)


@pytest.mark.slow
def test_three_axis_strategy_matches_default_losses(
    tmp_path: Path, devices: list
) -> None:
    losses = {}
    for name in ("default", "3d"):
        settings = Settings(
            directory=str(tmp_path / name),
            num_steps=6,
            pause_every=6,
            seq_len=32,
            num_valid_batches=2,
            sample_len=4,
        )
        run(STRATEGIES[name](), settings)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        losses[name] = [r["loss"] for r in records if "loss" in r]
    assert len(losses["3d"]) == 6
    np.testing.assert_allclose(losses["3d"], losses["default"], rtol=1e-5)


@pytest.mark.slow
def test_demo_beats_ngram_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: list
) -> None:
    with compiling(optimized=True):
        run(STRATEGIES["default"](), Settings(directory=str(tmp_path)))
    output = capsys.readouterr().out
    counted = re.findall(r"(?:unigram|bigram) +(\d+\.\d+)", output)
    unigram, bigram = map(float, counted)
    assert bigram < unigram
    assert max(gpt_bits(output)) < 0.8 * bigram
    assert "It continues `def `" in output


def gpt_bits(output: str) -> list[float]:
    """The bits per byte before the restore and after it."""
    before, after = re.findall(r"GPT +(\d+\.\d+)", output)
    return [float(before), float(after)]
