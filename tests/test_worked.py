"""The worked examples of the site: each has a known model, and all fit."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import optax
import pytest

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    ExpertParallel,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.layers import Experts
from nnx_parallel.models import GPTConfig, next_token_loss

ROOT = Path(__file__).parents[1]
DEVICE_BYTES = 80e9


@pytest.fixture(scope="module")
def worked() -> ModuleType:
    spec = importlib.util.spec_from_file_location("worked", ROOT / "docs" / "worked.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["worked"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = {
    "vocab_size": 256,
    "seq_len": 32,
    "num_layers": 2,
    "embed_dim": 64,
    "num_heads": 8,
    "mlp_dim": 128,
}


@pytest.mark.parametrize(
    ("name", "preset", "strategy"),
    [
        ("gpt2-medium", "gpt2-medium", FSDP(shard="gradients")),
        pytest.param(
            "llama-3-8b",
            "llama3-8b",
            Composite(DataParallel(2), FSDP(4)),
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "llama-3-70b",
            "llama3-70b",
            Composite(FSDP(4), TensorParallel(2)),
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "mixtral-8x7b",
            "mixtral-8x7b",
            Composite(ExpertParallel(4), FSDP(2)),
            marks=pytest.mark.deep,
        ),
    ],
)
def test_published_configs_match_presets_and_train(
    name: str, preset: str, strategy: Strategy, worked: ModuleType
) -> None:
    assert worked.published(name).num_params == GPTConfig.preset(preset).num_params
    sizes: dict[str, Any] = TINY | ({} if "gpt2" in name else {"num_kv_heads": 2})
    if "mixtral" in name:
        width = sizes.pop("mlp_dim") // 2
        sizes["experts"] = Experts(num_experts=8, top_k=2, mlp_dim=width)
    config = worked.published(name, **sizes)
    trainer = Trainer(
        worked.gpt(config),
        optax.adamw(1e-2),
        next_token_loss,
        strategy=strategy,
        loggers=(),
    )
    tokens = np.tile(np.arange(33), (8, 1))
    losses = trainer.fit([tokens] * 20, 20)["loss"]
    assert losses[-1] < losses[0] / 2, losses


def test_mixture_is_described_without_devices(worked: ModuleType) -> None:
    (mixtral,) = (e for e in worked.EXAMPLES if e.name == "Mixtral 8x7B")
    found = mixtral.describe()
    assert "over expert=8 by 'ragged'" in found.notes[0]
    # An eighth of each layer's experts; FSDP's axis splits these by eight again.
    of_experts = sum(
        row.bytes_per_device
        for row in found.rows
        if row.info.path.endswith(("mlp.up", "mlp.gate", "mlp.down"))
    )
    assert of_experts == 4 * 32 * 8 * 3 * 4096 * 14_336 / 64


@pytest.mark.slow
def test_every_example_leaves_room_for_activations(worked: ModuleType) -> None:
    names = [example.name for example in worked.EXAMPLES]
    assert len(set(names)) == 8
    for example in worked.EXAMPLES:
        told = example.describe()
        state = told.params_bytes + told.gradients_bytes + told.optimizer_bytes
        assert 0 < state < DEVICE_BYTES / 2, example.name
        devices = told.layout.mesh.size
        assert state * devices >= 16 * example.num_params()


@pytest.mark.slow
def test_table_has_one_line_per_example(worked: ModuleType) -> None:
    head, rule, *rows = worked.table()
    assert head.count("|") == rule.count("|")
    assert all(row.count("|") == head.count("|") for row in rows)
    assert len(rows) == len(worked.EXAMPLES)
