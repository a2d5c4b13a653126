"""The cost of `sharded_jit` over `jax.jit` with the same shardings written out.

The benchmark checks three claims, on a training step of an MLP and of a transformer:
the compiled programs have the same text, except for names; the function is traced
equally often; the host dispatches both equally fast. To show the noise, the last is
also measured for two `jax.jit` of one function.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.timing import Ratio, Runner, Table, interleave
from nnx_parallel import audit, make_mesh, shard, sharded_jit
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding import FSDPRules, resolve_shardings

RULES = FSDPRules("fsdp")
WIDTHS = (64, 256, 256, 64)
CONFIG = GPTConfig.tiny(num_layers=2, seq_len=32)
RATE = 1e-2

Step = Callable[[Any, Any], tuple[Any, jax.Array]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step and its arguments.

    Attributes:
        step: ``(params, batch) -> (new parameters, loss)``.
        params: The parameters, on the host.
        batch: The batch, on the host.
    """

    step: Step
    params: Any
    batch: Any


@dataclass(eq=False)
class Counted:
    """A step that counts its traces."""

    step: Step
    traces: int = 0

    def __call__(self, params: Any, batch: Any) -> tuple[Any, jax.Array]:
        """Runs or traces the step."""
        self.traces += 1
        return self.step(params, batch)


def make_mlp() -> Case:
    """A step of an MLP over plain dicts."""
    rng = np.random.default_rng(0)
    params = [
        {"kernel": rng.normal(0, 0.1, shape).astype(np.float32)}
        for shape in itertools.pairwise(WIDTHS)
    ]

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"])
        return jnp.mean((x - batch["x"]) ** 2)

    batch = {"x": rng.normal(size=(64, WIDTHS[0])).astype(np.float32)}
    return Case(step=_descend(loss), params=params, batch=batch)


def make_transformer() -> Case:
    """A step of a GPT over its NNX state."""
    graphdef, params = nnx.split(GPT(CONFIG, rngs=nnx.Rngs(0)))

    def loss(params: Any, batch: Any) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return next_token_loss(model, batch).value

    shape = (16, CONFIG.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, shape, np.int32)
    return Case(step=_descend(loss), params=params, batch={"tokens": tokens})


CASES = {"MLP": make_mlp, "transformer": make_transformer}


def _descend(loss: Callable[[Any, Any], jax.Array]) -> Step:
    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    return step


def by_rules(step: Step, mesh: Mesh) -> Any:
    """The step compiled by `sharded_jit`."""
    return sharded_jit(
        step,
        mesh,
        in_shardings=(RULES, P("fsdp")),
        out_shardings=(RULES, P()),
        donate_argnames="params",
    )


def by_hand(step: Step, params: Any, mesh: Mesh) -> Any:
    """Returns the step compiled by `jax.jit`, given the sharding of each array."""
    shardings = resolve_shardings(params, RULES, mesh)
    return jax.jit(
        step,
        in_shardings=(shardings, NamedSharding(mesh, P("fsdp"))),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )


def program_text(compiled: jax.stages.Compiled) -> str:
    """Text of a compiled program, without metadata about its sources."""
    text = (compiled.as_text() or "").partition(",")[2]  # all but the module's name
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = re.sub(
        r"(?ms)^(FileNames|FunctionNames|FileLocations|StackFrames).*?^$", "", text
    )
    names: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), text)


def measure(rounds: int = 500) -> Table:
    """All figures, for both models."""
    table = Table("sharded_jit over jax.jit with the same shardings, 8 devices")
    mesh = make_mesh({"fsdp": None})
    for name, make in CASES.items():
        _compare(table, name, make(), mesh, rounds)
    return table


def _compare(table: Table, name: str, case: Case, mesh: Mesh, rounds: int) -> None:
    batch = shard(case.batch, P("fsdp"), mesh)
    counted = {key: Counted(case.step) for key in ("ours", "by hand", "again")}

    def place() -> Any:
        return shard(jax.tree.map(jnp.array, case.params), RULES, mesh)

    jitted = {
        key: by_rules(step, mesh) if key == "ours" else by_hand(step, place(), mesh)
        for key, step in counted.items()
    }
    ours, hand = (
        jitted[key].lower(place(), batch).compile() for key in ("ours", "by hand")
    )
    table.add(f"{name}: same opcodes", audit(ours).opcodes == audit(hand).opcodes)
    table.add(f"{name}: same program text", program_text(ours) == program_text(hand))
    runs = {key: Runner(step, place(), batch) for key, step in jitted.items()}
    seconds = interleave(runs, rounds)
    table.add(f"{name}: jax.jit, us", 1e6 * float(np.median(seconds["by hand"])))
    _add_ratios(table, f"{name}: step", seconds)
    seconds = interleave({key: run.dispatch for key, run in runs.items()}, rounds)
    table.add(f"{name}: dispatch jax.jit, us", 1e6 * np.median(seconds["by hand"]))
    _add_ratios(table, f"{name}: dispatch", seconds)
    traces = [counted[key].traces for key in ("ours", "by hand")]
    table.add(f"{name}: traces, sharded_jit and jax.jit", traces)


def _add_ratios(table: Table, name: str, seconds: dict[str, np.ndarray]) -> None:
    ratio = Ratio.of(seconds["ours"], seconds["by hand"])
    table.add(f"{name}, sharded_jit / jax.jit", ratio)
    same = Ratio.of(seconds["again"], seconds["by hand"])
    table.add(f"{name}, jax.jit / jax.jit (A/A)", same)
