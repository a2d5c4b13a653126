"""Compiler options of a step: which are set, and the reports about refused ones."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Backend, Trainer, compiler_options
from nnx_parallel.errors import ParallelWarning
from nnx_parallel.loggers import Logger
from nnx_parallel.training.compilation import TABLE, accepted_options
from tests.tpus import numbers_from

HIDES = "xla_gpu_enable_latency_hiding_scheduler"
GATHERS = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
FAST = "xla_cpu_enable_fast_math"
X = np.ones((8, 4), np.float32)


def mesh_of(platform: str, kind: str, count: int = 4) -> Any:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    return SimpleNamespace(size=count, devices=np.array([device] * count))


@pytest.mark.parametrize("kind", ["TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"])
def test_sparse_core_tpus_offload_collectives(kind: str):
    found = compiler_options(mesh_of("tpu", kind))
    assert found[GATHERS] is True
    assert HIDES not in found


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5e", "TPU7x"])
def test_other_tpus_have_no_options(kind: str):
    assert compiler_options(mesh_of("tpu", kind)) == {}


def test_gpus_hide_latency_and_cpus_have_no_options():
    assert compiler_options(mesh_of("gpu", "NVIDIA H100 80GB HBM3")) == {HIDES: True}
    assert compiler_options(mesh_of("cpu", "cpu")) == {}


def test_one_device_has_no_options():
    assert compiler_options(mesh_of("gpu", "NVIDIA H200", count=1)) == {}


def test_each_option_has_reason_and_source():
    assert all(len(each.reason) > 20 and each.source for each in TABLE)
    assert len({each.name for each in TABLE}) == len(TABLE)


def test_overrides_change_add_and_remove_options():
    mesh = mesh_of("gpu", "NVIDIA H100")
    assert compiler_options(mesh, {HIDES: False}) == {HIDES: False}
    assert compiler_options(mesh, {HIDES: None}) == {}
    more = {"xla_gpu_triton_gemm_any": True}
    assert compiler_options(mesh, more) == {HIDES: True} | more


def test_environment_flags_take_precedence(monkeypatch: pytest.MonkeyPatch):
    mesh = mesh_of("gpu", "NVIDIA H100")
    monkeypatch.setenv("XLA_FLAGS", f"--{HIDES}_not=1")
    assert compiler_options(mesh) == {HIDES: True}
    monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 --{HIDES}=false")
    assert compiler_options(mesh) == {}
    assert compiler_options(mesh, {HIDES: True}) == {HIDES: True}


class Greeter(Logger):
    """Collects the messages of a fit."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def squares(model: Any, batch: Any) -> Any:
    return (model(batch) ** 2).mean()


def make_trainer(loss: Any = squares, **options: Any) -> Trainer:
    return Trainer(
        lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        optax.sgd(0.1),
        loss,
        strategy=FSDP(),
        **options,
    )


def test_fit_reports_set_and_refused_options():
    greeter = Greeter()
    trainer = make_trainer(
        backend=Backend(compiler_options={FAST: False, "xla_tpu_of_tomorrow": True}),
        loggers=[greeter],
    )
    with pytest.warns(
        ParallelWarning,
        match=re.escape(
            "The compiler refuses compiler_options, which are left out: "
            "xla_tpu_of_tomorrow: No such compile option: 'xla_tpu_of_tomorrow'. "
            "Options of another platform have no effect here; other names may belong "
            "to another version."
        ),
    ):
        trainer.fit([X], num_steps=1)
    header = "\n".join(greeter.lines)
    line = f"compiler options  {FAST}=false (refused by this compiler: "
    assert f"{line}xla_tpu_of_tomorrow)" in header
    # The report appears once per process, although the evaluation is another program.
    assert trainer.evaluate([X])["loss"] > 0


def test_step_with_options_traces_once_and_nests(tmp_path):
    dumped = tmp_path / "dump"
    trainer = make_trainer(
        loggers=(),
        backend=Backend(compiler_options={"xla_dump_to": str(dumped), FAST: True}),
    )
    state, batch = trainer.state, trainer.shard_batch(X)
    compiled = trainer.train_step.lower(state, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
    files = {file.name for file in dumped.iterdir()}
    assert any("train_step" in name for name in files)
    assert FAST in (next(dumped.glob("*train_step*debug_options"))).read_text()
    del compiled
    step = trainer.train_step
    whole = jax.jit(lambda state, batch: step(state, batch)[1]["loss"])
    inside = float(whole(state, batch))
    assert float(step(state, batch)[1]["loss"]) == pytest.approx(inside)
    assert {file.name for file in dumped.glob("*train_step*before_opt*")} == {
        name for name in files if "train_step" in name and "before_opt" in name
    }


def test_step_error_is_raised_unchanged():
    def bad(model: Any, batch: Any) -> Any:
        raise ValueError("of the loss")

    trainer = make_trainer(
        bad, loggers=(), backend=Backend(compiler_options={FAST: True})
    )
    with pytest.raises(ValueError, match="of the loss"):
        trainer.train_step(trainer.state, trainer.shard_batch(X))


def test_step_without_options_is_plain_jit():
    trainer = make_trainer(loggers=())
    assert accepted_options(trainer.mesh) == ({}, {})
    assert type(trainer.train_step._jitted) is type(jax.jit(jnp.sin))  # pyright: ignore[reportFunctionMemberAccess]


TPU = """
from nnx_parallel.training.compilation import accepted_options
for name in sys.argv[1:]:
    layout = FSDP().layout(FSDP().make_mesh(devices_of(name)))
    options, refused = accepted_options(layout.mesh)
    print(len(options), len(refused))
    options, refused = accepted_options(layout.mesh, {"xla_of_tomorrow": 1})
    print(len(refused))
"""


@pytest.mark.slow
def test_libtpu_accepts_all_options():
    of_tpus = sum("gpu" not in each.kinds for each in TABLE)
    numbers = numbers_from(
        "import warnings; warnings.simplefilter('ignore')\n" + TPU,
        *("v5p:2x2x1", "v6e:4x4", "v5e:4x4"),
    )
    assert numbers == [of_tpus, 0, 1, of_tpus, 0, 1, 0, 0, 1]
