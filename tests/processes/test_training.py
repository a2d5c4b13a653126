"""Several processes train like one, and continue from each other's checkpoints."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nnx_parallel import FSDP, DataParallel, Trainer
from tests.processes.running import launch
from tests.processes.worker import Batches, Settings, digest, make_trainer

pytestmark = pytest.mark.faults


def train_here(**options: Any) -> tuple[Trainer, list[float]]:
    """Trains in this process, on one device, as the workers do."""
    settings = Settings(**options)
    devices = jax.devices()[:1]
    trainer = make_trainer(settings, DataParallel(1), devices=devices)
    history = trainer.fit(Batches(settings, 0, 1), settings.steps)
    return trainer, [float(x) for x in history["loss"]]


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """Losses of four steps of the GPT on one device."""
    return train_here()[1]


@pytest.mark.parametrize(
    ("processes", "devices", "shares"),
    [
        (2, 2, {"fsdp": 2, "hsdp": 2, "tensor_across": 1, "pipeline": 1}),
        (4, 1, {"fsdp": 4, "hsdp": 4, "tensor": 2, "pipeline": 2}),
    ],
    ids=["2x2", "4x1"],
)
def test_losses_match_one_process(
    losses: list[float],
    processes: int,
    devices: int,
    shares: dict[str, int],
    tmp_path: Path,
) -> None:
    out = tmp_path / "found.json"
    settings = {"strategies": list(shares), "out": str(out)}
    ended = launch(settings, processes=processes, devices=devices)
    assert ended.code == 0, ended.text
    found = json.loads(out.read_text())
    for name, count in shares.items():
        np.testing.assert_allclose(
            found[name]["losses"], losses, rtol=1e-5, err_msg=name
        )
        assert found[name]["share"] == [0, count], name
    across = {"fsdp": "fsdp", "pipeline": "pipe" if devices == 2 else "pipe, fsdp"}
    for name, axes in across.items():
        assert f"(across processes: {axes})" in found[name]["table"]


def test_checkpoints_move_between_process_counts(tmp_path: Path) -> None:
    here = {"model": "linear", "steps": 9}
    _, expected = train_here(**here)
    saved = {"directory": str(tmp_path / "run"), "every": 3}
    out = tmp_path / "found.json"

    train_here(**(here | {"steps": 3, "checkpoint": saved}))
    there = here | {"checkpoint": saved, "out": str(out)}
    ended = launch(there | {"steps": 6}, devices=2)
    assert ended.code == 0, ended.text
    assert "Resumed from step 3" in ended.text
    found = json.loads(out.read_text())["fsdp"]
    np.testing.assert_allclose(found["losses"], expected[3:6], rtol=1e-5)

    settings = Settings(model="linear", steps=9, checkpoint=saved)
    trainer = make_trainer(settings, FSDP(min_size=0), devices=jax.devices()[:4])
    trainer.restore(6)
    assert digest(trainer) == found["digest"]
    history = trainer.fit(Batches(settings, 0, 1), 9)
    np.testing.assert_allclose(history["loss"], expected[6:], rtol=1e-5)


def test_processes_save_the_same_steps_by_time(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run"), "seconds": 0.02, "keep_last": None}
    ended = launch({"model": "linear", "steps": 60, "checkpoint": saved})
    assert ended.code == 0, ended.text
    steps = {int(p.name) for p in (tmp_path / "run").iterdir() if p.name.isdigit()}
    assert len(steps) > 2
    assert 60 in steps
