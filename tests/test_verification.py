"""`Trainer.verify`, replays of steps, and the command ``verify``."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks.verification import (
    KINDS,
    MLP,
    find_in_replays,
    find_in_runs,
    find_mutants,
    flipping,
    make_trainer,
    squares,
)
from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Faults,
    Offload,
    Pipeline,
    Precision,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.cli.doctor import verified_in
from nnx_parallel.errors import ReplayError, VerificationError
from nnx_parallel.layers import Stack, lora
from nnx_parallel.layers.experts import Experts
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.optimizers import muon, muon_dimension_numbers
from nnx_parallel.training import compilation, step, verification
from nnx_parallel.training.arguments import Backend
from nnx_parallel.training.comparison import Part, Sums, compare

pytestmark = pytest.mark.long

TOKENS = np.random.default_rng(0).integers(0, 64, (16, 17)).astype(np.int32)
CONFIG = GPTConfig.tiny(
    vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, seq_len=16
)


def gpt_trainer(strategy: Strategy, config: Any = CONFIG, **options: Any) -> Trainer:
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "loggers": ()} | options
    optimizer = options.pop("optimizer")
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optimizer,
        next_token_loss,
        strategy=strategy,
        **options,
    )


def by_name(report: verification.Verification) -> dict[str, Any]:
    return {c.name: c for c in report.comparisons}


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (FSDP(prefetch="first", min_size=0), {}),
        pytest.param(
            Composite(FSDP(4), TensorParallel(2, sequence=True)),
            {"optimizer": optax.adamw(1e-2), "ema_decay": 0.9},
            marks=pytest.mark.deep,
        ),
        pytest.param(
            Composite(Pipeline(2), FSDP(2), TensorParallel(2)),
            {"num_microbatches": 2},
            marks=pytest.mark.deep,
        ),
        pytest.param(
            DataParallel(),
            {"precision": Precision.mixed_bfloat16()},
            marks=pytest.mark.deep,
        ),
    ],
    ids=["fsdp-prefetch", "tp-fsdp-ema", "pipeline", "bfloat16"],
)
def test_correct_step_verifies(strategy: Strategy, options: dict) -> None:
    """Every comparison agrees, and the run continues as if `verify` were not called."""
    verified, other = (gpt_trainer(strategy, **options) for _ in range(2))
    verified.fit([TOKENS] * 2, num_steps=1)
    report = verified.verify(TOKENS)
    found = by_name(report)
    assert not report.differences
    assert set(found["itself, run again"].errors.values()) == {0.0}
    assert found["one device"].note == "16 of 16 rows"
    names = found["one device"].errors
    assert "the loss" in names
    assert "gradient of `embed.embedding`" in names
    assert "parameter `embed.embedding` after the update" in names
    verified.fit([TOKENS] * 3, num_steps=3)
    other.fit([TOKENS] * 3, num_steps=3)
    assert bits_of(verified.state.params) == bits_of(other.state.params)


def bits_of(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("strategy", "config", "options"),
    [
        (
            Composite(ExpertParallel(2), FSDP(4)),
            GPTConfig.tiny(
                vocab_size=64,
                embed_dim=32,
                num_layers=2,
                num_heads=4,
                seq_len=16,
                experts=Experts(num_experts=4, top_k=2, mlp_dim=32),
            ),
            {},
        ),
        (Composite(ContextParallel(2), FSDP(4)), CONFIG, {}),
        (Composite(FSDP(4), TensorParallel(2, overlap="halves")), CONFIG, {}),
        (
            Composite(FSDP(4), TensorParallel(2, sequence=True, overlap="ring")),
            CONFIG,
            {},
        ),
        (
            FSDP(min_size=0),
            CONFIG,
            {
                "optimizer": lambda model: muon(
                    0.02, muon_weight_dimension_numbers=muon_dimension_numbers(model)
                )
            },
        ),
        (FSDP(), CONFIG, {"backend": Backend(offload=Offload())}),
        (FSDP(), CONFIG, {"wrt": nnx.PathContains("norm")}),
    ],
    ids=["experts", "context", "halves", "ring", "muon", "offload", "part"],
)
def test_more_steps_verify(strategy: Strategy, config: Any, options: dict) -> None:
    assert not gpt_trainer(strategy, config, **options).verify(TOKENS).differences


def test_verify_keeps_models() -> None:
    """`verify` does not donate arrays that others hold; only a step does."""
    trainer, batch = make_trainer(DataParallel(), is_exposed=False)
    trainer.fit([batch], num_steps=1)
    model = trainer.model
    before = bits_of(nnx.state(model))
    trainer.verify(batch)
    assert bits_of(nnx.state(model)) == before
    assert bits_of(nnx.state(trainer.model)) == before
    model = trainer.model
    model.first.bias[...] = model.first.bias[...] + 1
    changed = np.asarray(model.first.bias[...])
    trainer.verify(batch)
    np.testing.assert_array_equal(trainer.state.params["first"]["bias"], changed)


class Grouped(nnx.Module):
    """A depthwise convolution, whose gradient XLA's partitioner computes wrongly."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(16, 16, (3,), feature_group_count=16, rngs=rngs)
        self.out = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``(batch, positions, 16)`` to the same shape."""
        return self.out(nnx.gelu(self.conv(x)))


@pytest.mark.filterwarnings("ignore:TensorParallel.* splits no parameter")
def test_wrong_gradient_of_the_partitioner_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adam hides a constant factor in the gradient, but the report names it."""
    monkeypatch.setattr(compilation, "partition_correctly", lambda layout, f: f)
    x, y = np.random.default_rng(0).normal(size=(2, 16, 8, 16)).astype(np.float32)
    trainer = Trainer(
        Grouped,
        optax.adam(1e-3),
        squares,
        strategy=Composite(DataParallel(4), TensorParallel(2)),
        loggers=(),
    )
    with pytest.raises(VerificationError, match=r"about 2\.000 times") as caught:
        trainer.verify({"x": x, "y": y})
    report = caught.value.report
    assert report.differences[0].array == "gradient of `conv.kernel`"
    assert report.differences[0].ratio == pytest.approx(2, rel=1e-3)
    assert report.remedy == "To avoid it: Trainer(..., strategy=FSDP())."
    assert "To avoid it" in str(caught.value)
    trainer.fit([{"x": x, "y": y}], num_steps=1)  # verify did not change the state


OPTION = "xla_cpu_enable_fast_math"


def test_wrong_option_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that doubles every gradient stands in for a wrong compiler."""
    right = step.jit_step

    def wrong(layout: Any, function: Any, overrides: Any = None, **options: Any) -> Any:
        def doubled(state: Any, batch: Any) -> Any:
            computed, hashes = function(state, batch)
            grads = jax.tree.map(lambda x: 2 * x, computed.grads)
            return replace(computed, grads=grads), hashes

        is_wrong = (overrides or {}).get(OPTION) and "donate_argnums" not in options
        chosen = doubled if is_wrong else function
        return right(layout, chosen, overrides, **options)

    monkeypatch.setattr(step, "jit_step", wrong)
    options = {OPTION: True, "xla_cpu_enable_concurrency_optimized_scheduler": True}
    trainer, batch = make_trainer(
        FSDP(8, min_size=0),
        is_exposed=False,
        backend=Backend(compiler_options=options),
    )
    with pytest.raises(VerificationError, match=r"about 2\.000 times") as caught:
        trainer.verify(batch)
    line = f"backend=Backend(compiler_options={{{OPTION!r}: None}})"
    assert caught.value.report.remedy == f"To avoid it: Trainer(..., {line})."


@pytest.mark.deep
def test_adapters_verify() -> None:
    trainer = Trainer(
        lora(lambda rngs: GPT(CONFIG, rngs=rngs), targets="query|value", rank=4),
        optax.sgd(0.1, momentum=0.9),
        next_token_loss,
        strategy=Composite(FSDP(4), TensorParallel(2)),
        wrt=nnx.LoRAParam,
        loggers=(),
    )
    assert not trainer.verify(TOKENS).differences


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("find", [find_in_runs, find_in_replays])
def test_flipped_bits_are_named(find: Any, kind: str) -> None:
    trainer, batch = make_trainer(FSDP(8, min_size=0))
    rng, found = random.Random(0), set()
    for _ in range(4):
        found.add(find(kind, trainer, batch, rng))
    assert found <= {"named", "no effect"}
    assert "named" in found


def test_changed_instructions_are_named() -> None:
    trainer, batch = make_trainer(FSDP(8, min_size=0), is_exposed=False)
    found = find_mutants(trainer, batch, every=5)
    assert found["missed"] == 0
    assert found["named"] > 3


def test_replayed_steps_match_plain_steps(tmp_path: Path) -> None:
    """A replay changes no number, and a fault ends the run before a save."""
    plain, batch = make_trainer(FSDP(8, min_size=0), is_exposed=False)
    replayed, _ = make_trainer(
        FSDP(8, min_size=0),
        is_exposed=False,
        faults=Faults(verify_every=2),
        checkpoint=tmp_path / "run",
    )
    first = plain.fit([batch] * 5, num_steps=5)
    second = replayed.fit([batch] * 5, num_steps=5)
    np.testing.assert_allclose(first["loss"], second["loss"], rtol=1e-6)
    with (
        flipping(replayed, random.Random(0), run=2) as path,
        pytest.raises(ReplayError, match=f"parameter `{path}`: .* .process 0."),
    ):
        replayed.fit([batch] * 9, num_steps=9)
    assert replayed.step == 5
    assert [x.name for x in (tmp_path / "run").iterdir() if x.name.isdigit()] == ["5"]


@pytest.mark.parametrize("value", [-1, 1.5, "all"])
def test_invalid_step_counts_raise(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="verify_every"):
        Faults(verify_every=value)


def test_ungrouped_argument_names_its_group() -> None:
    with pytest.raises(TypeError, match=r"faults=Faults\(verify_every=...\)"):
        Trainer(MLP, optax.sgd(0.1), squares, verify_every=100)  # pyright: ignore


def test_little_memory_reduces_rows_and_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fits(run: Any) -> bool:
        layers = run.programs.plan.abstract.params["layer"]["kernel"]
        return run.batch["x"].shape[0] <= 8 and layers.shape[0] == 1

    def make(rngs: nnx.Rngs) -> Stack:
        return Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs=rngs)

    monkeypatch.setattr(verification.Run, "fits", fits)
    sgd = optax.sgd(0.1)
    trainer = Trainer(make, sgd, squares, strategy=DataParallel(), loggers=())
    x, y = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)
    last = trainer.verify({"x": x, "y": y}).comparisons[-1]
    assert (last.name, last.note) == ("one device", "8 of 16 rows, 1 of 2 layers")
    assert "gradient of `layer.kernel`" in last.errors


@pytest.mark.parametrize(
    ("limit", "note"),
    [
        (10**12, "16 of 16 rows"),
        (None, "16 of 16 rows"),
        (1, "not even the smallest part of the step fits into memory"),
    ],
)
def test_memory_limit_is_respected(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, note: str
) -> None:
    monkeypatch.setattr(verification, "memory_limit", lambda device: limit)
    trainer, batch = make_trainer(DataParallel(), is_exposed=False)
    assert trainer.verify(batch).comparisons[-1].note == note


def test_loss_that_needs_its_mesh_is_not_compared_elsewhere() -> None:
    strategy = FSDP(8, min_size=0)
    mesh = strategy.make_mesh()

    @partial(jax.shard_map, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
    def rows(x: jax.Array) -> jax.Array:
        return x + 0

    def loss(model: MLP, batch: dict[str, jax.Array]) -> jax.Array:
        return squares(model, batch | {"x": rows(batch["x"])})

    trainer, batch = make_trainer(strategy, is_exposed=False, loss=loss)
    last = trainer.verify(batch).comparisons[-1]
    assert last.result == "not compared"
    assert "the step does not run there" in last.note


@pytest.mark.parametrize(
    ("mine", "right"),
    [
        ([np.nan, 50, -7], [np.nan, 1, 2]),
        ([np.inf, 50, -7], [np.inf, 1, 2]),
        ([1, 1], [np.nan, 1]),
        ([np.nan, 1], [1, 1]),
        ([np.inf, 1], [-np.inf, 1]),
        ([0.5, 1, 2], [1, 2, 4]),
        ([0, 0], [1e-3, 1e-3]),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.09])
def test_differences_beside_nonfinite_values_are_found(
    mine: list, right: list, noise: float
) -> None:
    def arrays(values: list) -> Any:
        found = np.asarray(values, np.float32)
        return {"x": {((0, len(values)),): Part(found, "cpu:0")}}

    moved = {"x": Sums(count=1, square=1.0, worst=noise**2)}
    judge = partial(compare, "other", noise=moved, floors={"x": 1e-5})
    (found,) = judge(arrays(mine), arrays(right)).differences
    assert found.array == "x"
    assert not judge(arrays(right), arrays(right)).differences


def test_error_in_verify_keeps_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, batch = make_trainer(FSDP(8, min_size=0), is_exposed=False)
    trainer.fit([batch], num_steps=1)
    before = bits_of(trainer.state.params)

    def fail(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verification, "_changes", fail)
        with pytest.raises(KeyboardInterrupt):
            trainer.verify(batch)
    assert bits_of(trainer.state.params) == before
    assert trainer.fit([batch] * 3, num_steps=3)["loss"].shape == (2,)


class Wide(nnx.Module):
    """A model in float64."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 16, param_dtype=np.float64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``(batch, 16)`` to ``(batch, 16)``."""
        return self.linear(x)


def test_double_precision_verifies() -> None:
    with jax.enable_x64(True):
        x, y = np.random.default_rng(0).normal(size=(2, 16, 16))
        strategy = FSDP(8, min_size=0)
        tx = optax.sgd(0.1)
        trainer = Trainer(Wide, tx, squares, strategy=strategy, loggers=())
        last = trainer.verify({"x": x, "y": y}).comparisons[-1]
        assert max(last.errors.values()) < 1e-14


def test_stack_is_shortened_with_its_arrays() -> None:
    model = nnx.eval_shape(
        lambda: Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 4, rngs=nnx.Rngs(0))
    )
    verification.shorten(model, 2)
    assert model.num_layers == 2
    assert nnx.state(model)["layer"]["kernel"].shape == (2, 4, 4)


def test_header_and_doctor_say_what_was_verified(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "run"
    trainer, batch = make_loud(FSDP(8, min_size=0), where)
    assert "No run was verified" in verified_in(str(where))
    trainer.fit([batch], num_steps=1)
    assert "verified     never" in capfd.readouterr().out
    trainer.verify(batch)
    make_loud(FSDP(8, min_size=0), where)[0].fit([batch] * 2, num_steps=2)
    text = capfd.readouterr().out
    assert "at step 1:" in text
    assert "with one device" in text
    make_loud(DataParallel(), where)[0].fit([batch] * 3, num_steps=3)
    assert "with another strategy, mesh" in capfd.readouterr().out
    assert "Verified on" in verified_in(str(where))
    (where / "verified.json").write_text(json.dumps({"date": 3}))
    assert "No run was verified" in verified_in(str(where))


def make_loud(strategy: Strategy, where: Path) -> tuple[Trainer, Any]:
    _, batch = make_trainer(strategy, is_exposed=False)
    model = lambda rngs: MLP(rngs, is_exposed=False)  # noqa: E731
    tx = optax.sgd(0.1, momentum=0.9)
    trainer = Trainer(model, tx, squares, strategy=strategy, checkpoint=where)
    return trainer, batch


def test_fit_after_verify_resumes(tmp_path: Path) -> None:
    """`verify` reads the newest checkpoint, and the fit continues from there."""
    first, batch = make_loud(FSDP(8, min_size=0), tmp_path / "run")
    first.fit([batch] * 4, num_steps=2)
    again, _ = make_loud(FSDP(8, min_size=0), tmp_path / "run")
    assert again.verify(batch).step == 2
    history = again.fit([batch] * 4, num_steps=4)
    assert len(history["loss"]) == 2


SCRIPT = """
import numpy as np, optax
from flax import nnx
from nnx_parallel import FSDP, Trainer, simulate_devices
simulate_devices(8)
def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()
x, y = np.ones((2, 16, 8), np.float32)
model = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
trainer = Trainer(model, optax.sgd(0.1), loss, strategy=FSDP(min_size=0))
"""
FIT = 'trainer.fit([{"x": x, "y": y}] * 3, num_steps=3)\nraise SystemExit("too far")\n'
PADDED = """
from nnx_parallel import Mean
from nnx_parallel.data import Pad
def weighted(model, batch):
    error = ((model(batch["x"]) - batch["y"]) ** 2).mean(axis=-1)
    return Mean((error * batch["w"]).sum(), batch["w"].sum())
trainer = Trainer(model, optax.sgd(0.1), weighted, strategy=FSDP(min_size=0))
trainer.fit([{"x": x, "y": y}] * 3, num_steps=3, last_batch=Pad("w"))
"""


@pytest.mark.parametrize(
    ("script", "code", "expected"),
    [
        (SCRIPT + FIT, 0, "one device"),
        (SCRIPT, 2, "did not call Trainer.fit"),
        (None, 2, "does not exist"),
        ("raise SystemExit(0)\n" + SCRIPT, 2, "exited with code 0 in line 1 before"),
        ("1 / 0\n", 2, "failed in line 1 (ZeroDivisionError: division by zero)"),
        (SCRIPT + "trainer.fit([], num_steps=3)\n", 2, "gives no batch"),
        (SCRIPT + PADDED, 0, "one device"),
    ],
    ids=["right", "no-fit", "no-script", "exits", "fails", "no-data", "padded"],
)
def test_verify_command(
    tmp_path: Path, script: str | None, code: int, expected: str
) -> None:
    file = tmp_path / "train.py"
    if script:
        file.write_text(script)
    command = [sys.executable, "-m", "nnx_parallel", "verify", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert expected in done.stdout + done.stderr
