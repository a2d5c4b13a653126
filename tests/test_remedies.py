"""A step without enough memory raises; the error names the owners, and remedies."""

import re
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest

from nnx_parallel import DataParallel, Trainer
from nnx_parallel.errors import DeviceMemoryError
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan.hardware import HARDWARE, hardware_of
from nnx_parallel.plan.remedies import Shortage, find_remedies
from nnx_parallel.training.recorder import PEAK_FLOPS
from tests.tpus import HEADER

pytestmark = pytest.mark.long

CONFIG = GPTConfig.tiny()
ROWS = {"tokens": np.zeros((16, 65), np.int32)}
# The message that TPU compilers of the last two years print.
TOLD = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
    "memory required for HLO temporaries ({}) exceeds available HBM ({})."
)
OLDER = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used {} of {} hbm."


def trainer_of(loss: Any = next_token_loss, **given: Any) -> Trainer:
    return Trainer(
        lambda rngs: GPT(CONFIG, rngs=rngs),
        optax.adamw(1e-3),
        loss,
        loggers=(),
        **given,
    )


def test_remedies_fit_by_formulas() -> None:
    trainer = trainer_of(strategy=DataParallel(8))
    text = find_remedies(trainer, ROWS, TOLD.format("6.0M", "4.0M"))
    owners, what, *lines = text.splitlines()
    assert owners.startswith(
        "A program gets 4 MiB of a device's memory. By the formulas"
    )
    assert "kept activations" in owners
    assert "optimizer state 1.683 MiB" in owners
    assert what == "Changes that fit by the same formulas, the fastest first:"
    sizes = [float(x) for line in lines for x in re.findall(r"([\d.]+) MiB", line)]
    assert len(lines) == 3
    assert all(size <= 4 for size in sizes)
    assert any("strategy=FSDP()" in line for line in lines)


def test_compiler_message_is_parsed() -> None:
    found = Shortage.of(TOLD.format("3.0M", "2.0M"), None, None, 2**20)
    assert found == Shortage(limit=2 * 2**20, used=4 * 2**20)
    older = Shortage.of(OLDER.format("3.0G", "2.0G"), None, None, 2**20)
    assert older == Shortage(limit=2 * 2**30, used=3 * 2**30)
    h100 = HARDWARE["h100"]
    assert Shortage.of("", None, h100, 0.0) == Shortage(limit=60e9, used=None)
    assert Shortage.of("", None, None, 0.0) is None


def test_remedies_say_if_nothing_fits() -> None:
    text = find_remedies(trainer_of(), ROWS, TOLD.format("6.0M", "0.1M"))
    assert text.endswith(
        "Nothing that plan knows fits on 8 devices: take more devices, or fewer rows "
        "in a batch."
    )


def test_estimates_are_scaled_by_observed_error() -> None:
    names = "parameters", "optimizer state", "other state", "batch"
    own: dict[str, float] = dict.fromkeys(names, 1.0) | {"kept activations": 4.0}
    short = Shortage(limit=10.0, used=12.0)
    # 8 of 12 bytes were not counted exactly, but only 4 were estimated: a factor of 2.
    assert short.scaled(own, own | {"kept activations": 1.0}) == 6.0


def test_out_of_memory_fit_names_remedies() -> None:
    message = TOLD.format("6.0M", "4.0M")

    def refuse(_: Any) -> None:
        raise MemoryError(message)

    def loss(model: Any, batch: Any) -> Any:
        value = next_token_loss(model, batch)
        jax.debug.callback(refuse, value.value)
        return value

    trainer = trainer_of(loss, devices=jax.devices()[:1])
    with pytest.raises(DeviceMemoryError) as caught:
        trainer.fit([ROWS], 1)
    assert "Changes that fit by the same formulas, the fastest" in str(caught.value)
    assert "remat='full'" in str(caught.value)


def test_peaks_match_hardware_table() -> None:
    class Described:
        platform = "described"

        def __init__(self, kind: str) -> None:
            self.device_kind = kind

    for kind, peak in PEAK_FLOPS.items():
        found = hardware_of(Described(kind))
        assert found is not None
        assert found.peak("bfloat16") == pytest.approx(peak, rel=1e-3)
    assert hardware_of(Described("NVIDIA H100 80GB HBM3")) is HARDWARE["h100"]
    assert hardware_of(jax.devices()[0]) is None


COMPILE = """
from nnx_parallel.training.diagnostics import explaining_memory
config = GPTConfig.preset("gpt2", vocab_size=50_304)
batch = {"tokens": jax.ShapeDtypeStruct((64, 1025), "int32")}
trainer = Trainer(
    lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), next_token_loss,
    strategy=DataParallel(1), devices=devices_of("v5e:2x2")[:1],
    precision=Precision.mixed_bfloat16(), loggers=(),
)
plan = trainer._run.plan
try:
    with explaining_memory(plan, 1, None, (trainer, batch)):
        lower_gpt(trainer.train_step, plan, 64, 1024).compile()
except errors.DeviceMemoryError as error:
    print(error)
line = "num_microbatches=4, remat='dots'"
step = make_train_step(plan, next_token_loss, eval(f"StepOptions({line})"))
memory = memory_of(step, plan, 64, 1024)
print(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
"""


@pytest.mark.slow
def test_tpu_out_of_memory_names_remedies() -> None:
    pytest.importorskip("libtpu")
    run = subprocess.run(
        [sys.executable, "-c", HEADER + COMPILE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    text, bytes_of_remedy = run.stdout.rsplit("\n", 2)[:2]
    assert "Out of device memory: RESOURCE_EXHAUSTED" in text
    assert (
        "Trainer(..., strategy=DataParallel(size=1), num_microbatches=4, remat=" in text
    )
    assert int(bytes_of_remedy) < 15.75 * 2**30
