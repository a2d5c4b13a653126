"""A fit starts with the step that a plan compiled, or reports why it does not."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import monitoring

from nnx_parallel import FSDP, Backend, Trainer, plan
from nnx_parallel.loggers import Logger
from nnx_parallel.plan import Candidate
from nnx_parallel.plan.compiled import options_of
from nnx_parallel.plan.parts import Parts
from nnx_parallel.training.compilation import facts_of, keep_program

ROWS = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
BATCHES = [{"x": ROWS, "y": ROWS * k} for k in (1, 2, 3)]


def loss(model: Any, batch: Any) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


class Said(Logger):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def trainer_of(said: Said, **given: Any) -> Trainer:
    return Trainer(
        lambda rngs: nnx.Linear(32, 32, rngs=rngs),
        optax.adam(1e-2),
        loss,
        strategy=FSDP(8),
        loggers=[said],
        **given,
    )


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The compiler's events, until the test clears the list."""
    events: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event.endswith("backend_compile_duration"):
            events.append(event)

    monitoring.register_event_duration_secs_listener(note)
    yield events
    monitoring.unregister_event_duration_listener(note)


@pytest.fixture
def optimized() -> Iterator[None]:
    """Enables optimizations, as in the process that compiles for a plan."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def fit(trainer: Trainer, compiled: list[str]) -> np.ndarray:
    trainer.state  # noqa: B018 - parameters are made by other programs
    compiled.clear()
    return trainer.fit(BATCHES, 3)["loss"]


def keep(directory: Path, **changed: str) -> None:
    trainer = trainer_of(Said())
    batch = trainer.shard_batch(BATCHES[0])
    lowered: Any = trainer.train_step.lower(trainer.state, batch)  # pyright: ignore[reportFunctionMemberAccess]
    facts = facts_of([*trainer.mesh.devices.flat]) | changed
    assert keep_program(directory, lowered, lowered.compile(), facts, 1.5)


def test_cached_step_is_loaded_without_compiling(
    tmp_path: Path, compiled: list[str]
) -> None:
    cold = fit(trainer_of(Said()), compiled)
    assert len(compiled) >= 1
    keep(tmp_path)
    said = Said()
    warm = fit(trainer_of(said, backend=Backend(warm_start=tmp_path)), compiled)
    assert compiled == []
    np.testing.assert_array_equal(cold, warm)
    found = [line for line in said.lines if "was read from" in line]
    assert len(found) == 1
    assert found[0].endswith("a plan has compiled the same program in 1.5 s.")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (None, "the directory does not exist. The step was compiled."),
        ({}, "this program is not one of the 0 that were compiled there."),
        ({"jaxlib": "0.1"}, "the same program was compiled for jaxlib '0.1', not '"),
    ],
    ids=["no directory", "another program", "another version"],
)
def test_cache_miss_reports_reason(
    tmp_path: Path, compiled: list[str], changed: dict[str, str] | None, reason: str
) -> None:
    directory = tmp_path / "plan"
    if changed is not None:
        directory.mkdir()
    if changed:
        keep(directory, **changed)
    said = Said()
    fit(trainer_of(said, backend=Backend(warm_start=directory)), compiled)
    assert compiled
    assert any(reason in line for line in said.lines)


def test_damaged_cache_recompiles(tmp_path: Path, compiled: list[str]) -> None:
    keep(tmp_path)
    (file,) = tmp_path.glob("*.step")
    file.write_bytes(file.read_bytes()[:-100])
    said = Said()
    fit(trainer_of(said, backend=Backend(warm_start=tmp_path)), compiled)
    assert compiled
    assert any("cannot be read" in line for line in said.lines)


@pytest.mark.parametrize("mode", ["file", "directory"])
def test_cache_writable_by_others_recompiles(
    tmp_path: Path, compiled: list[str], mode: str
) -> None:
    keep(tmp_path)
    (file,) = tmp_path.glob("*.step")
    # Unpickling this would end the process.
    file.write_bytes(file.read_bytes().partition(b"\n")[0] + b"\ncos\nabort\n(tR.")
    (file if mode == "file" else tmp_path).chmod(0o777)
    said = Said()
    fit(trainer_of(said, backend=Backend(warm_start=tmp_path)), compiled)
    assert compiled
    assert any("777, so that other users can write to it" in x for x in said.lines)


def test_invalid_directory_raises() -> None:
    message = "warm_start=3 is not a path. It must be the directory where `plan` keeps"
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer_of(Said(), backend=Backend(warm_start=3))  # pyright: ignore[reportArgumentType]


def test_plan_uses_options_of_trainer() -> None:
    given = {"xla_cpu_enable_fast_math": True}
    parts = Parts.of(
        trainer_of(Said(), backend=Backend(compiler_options=given)), BATCHES[0]
    )
    candidate = Candidate(strategy=FSDP(4), num_microbatches=2, remat="dots")
    options = options_of(parts, candidate)
    assert options.compiler_options == given
    assert (options.num_microbatches, options.remat) == (2, "dots")


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("given", [None, {"xla_cpu_enable_fast_math": True}])
def test_fit_runs_program_compiled_by_plan(
    tmp_path: Path, compiled: list[str], given: dict[str, Any] | None
) -> None:
    cold = fit(trainer_of(Said(), backend=Backend(compiler_options=given)), compiled)
    plan(
        trainer_of(Said(), backend=Backend(compiler_options=given)),
        topology="cpu:8",
        batch=BATCHES[0],
        candidates=[FSDP(8)],
        cache=tmp_path,
    )
    trainer = trainer_of(
        Said(), backend=Backend(warm_start=tmp_path, compiler_options=given)
    )
    warm = fit(trainer, compiled)
    assert compiled == []
    np.testing.assert_array_equal(cold, warm)
    other = {"xla_cpu_enable_fast_math": False}  # needs another program
    fit(
        trainer_of(
            Said(), backend=Backend(warm_start=tmp_path, compiler_options=other)
        ),
        compiled,
    )
    assert compiled
