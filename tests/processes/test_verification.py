"""`verify` and replayed steps with two processes."""

from pathlib import Path

import pytest

from nnx_parallel.cli import main

SCRIPT = """
import sys
import numpy as np, optax
from flax import nnx
import nnx_parallel
nnx_parallel.initialize()
from nnx_parallel import FSDP, Faults, Trainer
from nnx_parallel.distributed import print_once
def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()
x, y = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)
trainer = Trainer(
    lambda rngs: nnx.Linear(8, 8, rngs=rngs), optax.adam(0.1), loss, loggers=(),
    strategy=FSDP(min_size=0), faults=Faults(verify_every=2), checkpoint=sys.argv[1],
)
index, count = trainer.data_share
share = slice(index * 16 // count, (index + 1) * 16 // count)
batch = {"x": x[share], "y": y[share]}
print_once(trainer.verify(batch))
print_once(trainer.fit([batch] * 4, num_steps=4)["loss"])
"""


@pytest.mark.faults
def test_two_processes_verify_a_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    sizes = ["--processes", "2", "--devices-per-process", "2"]
    command = ["launch", "--cpu", *sizes, str(script), str(tmp_path / "run")]
    assert main(command) == 0
    text = capfd.readouterr().out
    assert "15 arrays agree, bit for bit" in text
    assert "one device                   14 arrays agree" in text
    assert (tmp_path / "run" / "verified.json").exists()
