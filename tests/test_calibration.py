"""Measured shares of a device's figures: stored, and used by later plans."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from nnx_parallel import FSDP, Trainer, plan
from nnx_parallel.cli import main
from nnx_parallel.errors import PlanError
from nnx_parallel.mesh import StandIn
from nnx_parallel.plan import calibration
from nnx_parallel.plan.calibration import calibrate, stored
from nnx_parallel.plan.hardware import HARDWARE, Topology
from nnx_parallel.plan.roofline import Assumptions, Costs, Traffic, time_step
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
    assert main(["plan", "--calibrate", "--topology", "h100:8", "train.py"]) == 2
    assert "leave out --topology and script" in capsys.readouterr().err


def test_command_line_explains_unknown_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    device = StandIn(0, "gpu", "NVIDIA Unknown", 0)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert main(["plan", "--calibrate"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plan has no figures of 'NVIDIA Unknown'")


def test_shares_of_other_figures_are_not_used(tmp_path: Path) -> None:
    found = Assumptions(products=(0.7, 0.75), source="measured")
    h100 = HARDWARE["h100"]
    calibration._store(found, h100, tmp_path)  # pyright: ignore[reportPrivateUsage]
    assert stored(h100, tmp_path) == found
    flops = {**h100.flops, "bfloat16": 912e12}
    assert stored(replace(h100, flops=flops), tmp_path) is None
    assert stored(replace(h100, memory_bandwidth=2.4e12), tmp_path) is None
    assert stored(replace(h100, link_bandwidth=1e11), tmp_path) is None
    # Shares of links do not depend on the network.
    assert stored(replace(h100, network_bandwidth=1e9), tmp_path) == found


def test_cache_that_is_a_file_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert stored(CPU, tmp_path / "file") is None


def test_measured_links_do_not_change_the_network() -> None:
    costs = Costs(
        memory={},
        flops=1.0,
        model_flops=1.0,
        moved_bytes=1.0,
        traffic=tuple(
            Traffic(axes=(axis,), sent_bytes=1e9, hidden=(0.0, 0.0), source="weights")
            for axis in ("data", "fsdp")
        ),
        bubble=0.0,
    )
    topology = Topology.parse("h100:16")
    given = costs, topology, {"data": 2, "fsdp": 8}, "bfloat16"
    assumed = time_step(*given, Assumptions()).parts
    measured = time_step(*given, Assumptions(links=(0.3, 0.3))).parts
    assert measured["fsdp"] == pytest.approx(2 * assumed["fsdp"])
    assert measured["data"] == assumed["data"]


def test_gather_moves_each_shard_to_its_neighbour(devices: list) -> None:
    mesh = Mesh(np.array(devices), ("all",))
    x = jnp.arange(16.0).reshape(16, 1)
    moved = calibration._gather_over(mesh)(x)  # pyright: ignore[reportPrivateUsage]
    np.testing.assert_array_equal(moved, jnp.roll(x, -2, axis=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_loop_of_products_keeps_its_size(dtype: str) -> None:
    up, down = calibration._inverse_matrices(32, 128, dtype)  # pyright: ignore[reportPrivateUsage]
    tolerance = 1e-6 if dtype == "float32" else 1e-2
    np.testing.assert_allclose((up @ down).astype("f4"), np.eye(32), atol=tolerance)
    x = jax.random.normal(jax.random.key(0), (4, 32), dtype)
    found = jax.lax.fori_loop(0, 10_000, lambda _, x: (x @ up) @ down, x)
    ratio = jnp.linalg.norm(found.astype("f4")) / jnp.linalg.norm(x.astype("f4"))
    assert 1e-10 < ratio < 1e10
