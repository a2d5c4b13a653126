"""Measured shares of a device's figures: stored, and used by later plans."""

import json
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Trainer, plan
from nnx_parallel.cli import main
from nnx_parallel.errors import PlanError
from nnx_parallel.mesh import StandIn
from nnx_parallel.plan import calibration
from nnx_parallel.plan.calibration import calibrate, stored
from nnx_parallel.plan.hardware import HARDWARE
from nnx_parallel.plan.roofline import Assumptions
from tests.plans import shape

CPU = HARDWARE["cpu"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_PRODUCTS_CPU", ((64, 32, 64), (64, 64, 128)))
    monkeypatch.setattr(calibration, "_BYTES_CPU", 2**20)
    monkeypatch.setattr(calibration, "_SECONDS", 0.002)


def planned(cache: Path) -> Any:
    trainer = Trainer(
        lambda rngs: nnx.Linear(64, 64, rngs=rngs),
        optax.sgd(0.1),
        lambda model, batch: model(batch["x"]).mean(),
        loggers=(),
    )
    given = {"topology": "cpu:8", "batch": {"x": shape(16, 64)}, "compile": 0}
    return plan(trainer, candidates=[FSDP(8)], cache=cache, **given)


def test_plan_uses_measured_shares(tmp_path: Path) -> None:
    assert planned(tmp_path).assumptions == Assumptions()
    found = calibrate(cache=tmp_path)
    assert found.source.startswith("measured on 8 x cpu, 20")
    for worst, best in (found.products, found.memory, found.links):
        assert 0 < worst <= best
    assert stored(CPU, tmp_path) == found
    later = planned(tmp_path)
    assert later.assumptions == found
    assert f"{found.source}: products attain" in str(later)
    assert "assumed: products" not in str(later)


def test_one_device_has_no_links(tmp_path: Path) -> None:
    found = calibrate(jax.devices()[:1], cache=tmp_path)
    assert found.links == Assumptions().links


@pytest.mark.parametrize(
    "content", ["{", "{}", json.dumps({"products": [0, 1]}), json.dumps([1])]
)
def test_damaged_file_is_not_used(tmp_path: Path, content: str) -> None:
    (tmp_path / "calibration-cpu.json").write_text(content)
    assert stored(CPU, tmp_path) is None
    assert planned(tmp_path).assumptions == Assumptions()


def test_unknown_device_raises(tmp_path: Path) -> None:
    device: Any = StandIn(0, "gpu", "NVIDIA Unknown", 0)
    with pytest.raises(PlanError, match="no figures of 'NVIDIA Unknown'"):
        calibrate([device], cache=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_command_line_measures_or_names_missing_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["plan", "--calibrate", "--cache", str(tmp_path)]) == 0
    assert "measured on 8 x cpu" in capsys.readouterr().out
    assert main(["plan", "--topology", "h100:8"]) == 2
    assert "plan needs script" in capsys.readouterr().err
