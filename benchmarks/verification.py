"""Injects faults into a step, and records which of them `verify` and replays find.

A fault flips one bit of one shard of a parameter, a gradient or an activation, on one
device, in one run of a program; or it changes one instruction of the compiled step.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks.timing import Ratio, Table, interleave
from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Faults,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import ReplayError, VerificationError
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.programs import ClosedJaxpr, inline
from nnx_parallel.sharding import active_mesh
from nnx_parallel.sharding.checksum import data_of
from nnx_parallel.sharding.names import path_of
from nnx_parallel.training.verification import replay

NUM_DEVICES = 8
STRATEGIES: dict[str, Strategy] = {
    "FSDP(8)": FSDP(8, min_size=0),
    "DataParallel(8)": DataParallel(8),
    "TP 2 x FSDP 4": Composite(TensorParallel(2), FSDP(4, min_size=0)),
}
KINDS = ("activation", "gradient", "parameter")


@dataclass
class Injector:
    """Flips a bit of one shard on one device, in one of the next runs.

    Attributes:
        runs_left: Number of runs before the fault; None injects nothing.
        kind: ``"activation"`` or ``"gradient"``.
        device: Index of the device.
        element: Index of the element in the shard, modulo its size.
        bit: The bit of the float32 to flip.
    """

    runs_left: int | None = None
    kind: str = ""
    device: int = 0
    element: int = 0
    bit: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, kind: str, device: np.ndarray) -> np.ndarray:
        """Returns ``(mask, element)`` for a run on a device; the mask is mostly 0."""
        with self.lock:
            if (
                kind != self.kind
                or int(device) != self.device
                or self.runs_left is None
            ):
                return np.zeros(2, np.uint32)
            self.runs_left -= 1
            is_due = self.runs_left == 0
            return np.asarray([is_due << self.bit, self.element], np.uint32)


INJECTOR = Injector()


def _flipped(kind: str, x: jax.Array) -> jax.Array:
    mesh = active_mesh()
    if mesh is None:
        return x
    axes = tuple(mesh.axis_names)
    spec = P(axes)

    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def flip(shard: jax.Array) -> jax.Array:
        device = jax.lax.axis_index(axes)
        shape = jax.ShapeDtypeStruct((2,), jnp.uint32)
        mask, element = jax.pure_callback(partial(INJECTOR.ask, kind), shape, device)
        words = jax.lax.bitcast_convert_type(shard.ravel(), jnp.uint32)
        words = words.at[element % words.size].set(words[element % words.size] ^ mask)
        return jax.lax.bitcast_convert_type(words, jnp.float32).reshape(shard.shape)

    return flip(x)


@jax.custom_vjp
def exposed(x: jax.Array) -> jax.Array:
    """Returns ``x``; the injector may flip a bit of it, or of its gradient."""
    return _flipped("activation", x)


def _forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _flipped("activation", x), None


def _backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (_flipped("gradient", gradient),)


exposed.defvjp(_forward, _backward)


class MLP(nnx.Module):
    """Two matrices; its activation is exposed to the injector."""

    def __init__(self, rngs: nnx.Rngs, *, is_exposed: bool = True) -> None:
        names: Any = {"out_sharding": ("embed", "mlp")}
        self.first = nnx.Linear(16, 32, rngs=rngs, kernel_metadata=names)
        names = {"out_sharding": ("mlp", "embed")}
        self.second = nnx.Linear(32, 16, rngs=rngs, kernel_metadata=names)
        self._is_exposed = is_exposed

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 16) -> (batch, 16)."""
        x = nnx.gelu(self.first(x))
        return self.second(exposed(x) if self._is_exposed else x)


def squares(model: MLP, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean square error."""
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make_trainer(
    strategy: Strategy, *, is_exposed: bool = True, loss: Any = squares, **options: Any
) -> Any:
    """Returns a Trainer of the `MLP`, and a batch."""
    model = partial(MLP, is_exposed=is_exposed)
    tx = optax.sgd(0.1, momentum=0.9)
    trainer = Trainer(model, tx, loss, strategy=strategy, loggers=(), **options)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 16, 16)).astype(np.float32)
    return trainer, {"x": x, "y": y}


def flip_parameter(params: Any, rng: random.Random) -> tuple[Any, str]:
    """Returns parameters with one flipped bit in one device's shard, and the path."""
    leaves, structure = jax.tree.flatten(params)
    index, chosen = rng.randrange(len(leaves)), rng.randrange(NUM_DEVICES)
    x, bit = leaves[index], rng.randrange(32)
    shards = []
    for number, shard in enumerate(x.addressable_shards):
        values = np.array(shard.data)
        if number == chosen:
            words = values.reshape(-1).view(np.uint32)
            words[rng.randrange(words.size)] ^= np.uint32(1 << bit)
        shards.append(jax.device_put(values, shard.device))
    leaves[index] = jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, shards
    )
    keys, _ = jax.tree.leaves_with_path(params)[index]
    return structure.unflatten(leaves), path_of(keys)


@contextmanager
def flipping(trainer: Any, rng: random.Random, run: int) -> Iterator[str]:
    """Flips a bit of a parameter for one run of the first half; gives its path."""
    programs = trainer._programs
    compute, update = programs.split_step
    count, seed = 0, rng.random()
    _, path = flip_parameter(trainer.state.params, random.Random(seed))

    def faulty(state: Any, batch: Any) -> Any:
        nonlocal count
        count += 1
        if count == run:
            params, _ = flip_parameter(state.params, random.Random(seed))
            state = replace(state, params=params)
        return compute(state, batch)

    programs.__dict__["split_step"] = faulty, update
    try:
        yield path
    finally:
        programs.__dict__["split_step"] = compute, update


@contextmanager
def injecting(kind: str, rng: random.Random, run: int) -> Iterator[None]:
    """Flips a bit of an activation or a gradient in one of the next runs."""
    INJECTOR.kind, INJECTOR.runs_left = kind, run
    INJECTOR.device, INJECTOR.bit = rng.randrange(NUM_DEVICES), rng.randrange(32)
    INJECTOR.element = rng.randrange(2**16)
    try:
        yield
    finally:
        INJECTOR.runs_left = None


_SWAPPED = {
    "add": jax.lax.sub_p,
    "sub": jax.lax.add_p,
    "mul": jax.lax.add_p,
    "div": jax.lax.mul_p,
    "max": jax.lax.min_p,
    "tanh": jax.lax.sin_p,
}
"""Operations, and their replacements in a wrong program."""


def mutants(trainer: Any, batch: Any) -> Iterator[Callable]:
    """Yields the compiled step with one changed instruction, for each that can be."""
    programs = trainer._programs
    plan, placed = programs.plan, programs.shard_batch(batch)
    traced = programs.train_step.trace(trainer.state, placed)
    closed = traced.jaxpr
    flat = inline(closed.jaxpr)
    out_tree = jax.tree.structure(traced.out_info)
    count = len(jax.tree.leaves(plan.shardings))
    shardings = [*jax.tree.leaves(plan.shardings)]
    shardings += [None] * (len(flat.outvars) - count)
    for index, eqn in enumerate(flat.eqns):
        if (other := _SWAPPED.get(eqn.primitive.name)) is None:
            continue
        eqns = [*flat.eqns]
        eqns[index] = eqn.replace(primitive=other, params=_params_of(other, eqn))
        jaxpr = flat.replace(eqns=eqns)
        function = jex.jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
        jitted = jax.jit(function, out_shardings=shardings)

        def step(state: Any, batch: Any, jitted: Any = jitted) -> Any:
            return out_tree.unflatten(jitted(*jax.tree.leaves((state, batch))))

        yield step


def _params_of(primitive: Any, eqn: Any) -> dict[str, Any]:
    return {"accuracy": None} if primitive is jax.lax.sin_p else {}


@contextmanager
def stepping(trainer: Any, step: Callable) -> Iterator[None]:
    """Makes a Trainer run another program as its step."""
    programs = trainer._programs
    programs.__dict__["start"] = lambda *args: (step, None)
    try:
        yield
    finally:
        del programs.__dict__["start"]


def find_in_runs(kind: str, trainer: Any, batch: Any, rng: random.Random) -> str:
    """Injects one fault into a run of a step; returns what `verify` says of it.

    Returns:
        ``"named"``, ``"missed"``, or ``"no effect"`` if no bit of a result has changed.
    """
    return _find(kind, trainer, batch, rng, lambda: trainer.verify(batch))


def find_in_replays(kind: str, trainer: Any, batch: Any, rng: random.Random) -> str:
    """Injects one fault into a replayed step; the same results as `find_in_runs`."""
    programs, placed = trainer._programs, trainer.shard_batch(batch)

    def run() -> None:
        trainer.state, _ = replay(programs, trainer.state, placed)

    return _find(kind, trainer, batch, rng, run)


def _find(
    kind: str, trainer: Any, batch: Any, rng: random.Random, run: Callable
) -> str:
    compute, _ = trainer._programs.split_step
    placed, seed = trainer.shard_batch(batch), rng.random()

    def inject(number: int) -> Any:
        again = random.Random(seed)
        if kind == "parameter":
            return flipping(trainer, again, number)
        return injecting(kind, again, number)

    if kind != "parameter":
        with inject(1):
            # It must end before the injector is taken back.
            _, faulty = jax.block_until_ready(compute(trainer.state, placed))
        if _bits(faulty) == _bits(compute(trainer.state, placed)[1]):
            return "no effect"
    with inject(rng.randint(1, 2)) as path:
        try:
            run()
        except (ReplayError, VerificationError) as error:
            is_named = not path or f"parameter `{path}`" in str(error)
            return "named" if is_named else "missed"
    return "missed"


def _bits(tree: Any) -> list[bytes]:
    return [np.asarray(data_of(x)).tobytes() for x in jax.tree.leaves(tree)]


def find_mutants(trainer: Any, batch: Any, every: int = 1) -> dict[str, int]:
    """Verifies steps with one changed instruction; counts the results.

    It changes one of each ``every`` instructions that it can change.
    """
    counts = {"named": 0, "missed": 0, "no effect": 0}
    right = trainer._programs.train_step
    placed = trainer.shard_batch(batch)
    before = jax.tree.map(jnp.copy, trainer.state)
    wanted = _bits(right(before, placed))
    for step in itertools.islice(mutants(trainer, batch), 0, None, every):
        if _bits(step(trainer.state, placed)) == wanted:
            counts["no effect"] += 1
            continue
        with stepping(trainer, step):
            try:
                trainer.verify(batch)
                counts["missed"] += 1
            except VerificationError:
                counts["named"] += 1
    return counts


def measure(rounds: int = 100) -> Table:
    """Injects faults, counts false alarms, and measures the costs.

    Args:
        rounds: Number of faults of each kind of detection.
    """
    table = Table("Faults that verify and replays name, and their cost")
    rng = random.Random(0)
    for name, find in (("verify", find_in_runs), ("replays", find_in_replays)):
        counts = {"named": 0, "missed": 0, "no effect": 0}
        trainers = {k: make_trainer(s) for k, s in STRATEGIES.items()}
        while counts["named"] + counts["missed"] < rounds:
            trainer, batch = trainers[rng.choice([*trainers])]
            counts[find(rng.choice(KINDS), trainer, batch, rng)] += 1
        table.add(f"{name}: flipped bits", counts)
    for name, strategy in STRATEGIES.items():
        trainer, batch = make_trainer(strategy, is_exposed=False)
        found = find_mutants(trainer, batch)
        table.add(f"verify: changed instructions, {name}", found)
    trainer, batch = make_trainer(
        FSDP(8, min_size=0), is_exposed=False, faults=Faults(verify_every=1)
    )
    alarms = 0
    while trainer.step < 100 * rounds:
        try:
            trainer.fit(itertools.repeat(batch), num_steps=100 * rounds)
        except ReplayError:
            alarms += 1
    table.add("false alarms in replayed steps", f"{alarms} in {trainer.step:,}")
    _measure_cost(table, "demo's GPT", *_demo(), rounds=20)
    _measure_cost(table, "1,000 arrays", *_many_arrays(), rounds=20)
    return table


def _measure_cost(
    table: Table, name: str, trainer: Any, batch: Any, rounds: int
) -> None:
    """Adds the cost of a replay, and of a verification in steps."""
    programs, placed = trainer._programs, trainer.shard_batch(batch)

    def timed(step: Callable) -> float:
        start = time.perf_counter()
        trainer.state, metrics = step(trainer.state, placed)
        jax.block_until_ready((trainer.state, metrics))
        return time.perf_counter() - start

    runs = {
        "step": partial(timed, trainer.train_step),
        "again": partial(timed, trainer.train_step),
        "replay": partial(timed, partial(replay, programs)),
    }
    seconds = interleave(runs, rounds)
    ratio = Ratio.of(seconds["replay"], seconds["step"])
    table.add(f"{name}: step / step (A/A)", Ratio.of(seconds["again"], seconds["step"]))
    table.add(f"{name}: replayed step / step", ratio)
    share = ratio.median - 1
    table.add(f"{name}: cost of verify_every=100, % of the time", round(share, 2))
    for call in ("first", "second"):
        report = trainer.verify(batch)
        step = float(np.median(seconds["step"]))
        table.add(f"{name}: {call} verify, s", round(report.seconds, 1))
        table.add(f"{name}: {call} verify, steps", round(report.seconds / step))


def _demo() -> tuple[Any, Any]:
    config = GPTConfig.tiny(embed_dim=256, num_layers=4, num_heads=4, seq_len=128)
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adamw(1e-3),
        next_token_loss,
        strategy=FSDP(),
        loggers=(),
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (16, 129))
    return trainer, {"tokens": tokens.astype(np.int32)}


class _Deep(nnx.Module):
    """500 layers with two arrays each."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(500)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 16) -> (batch, 16)."""
        for layer in self.layers:
            x = x + 0.01 * nnx.tanh(layer(x))
        return x


def _many_arrays() -> tuple[Any, Any]:
    tx = optax.sgd(0.1, momentum=0.9)
    trainer = Trainer(_Deep, tx, squares, strategy=DataParallel(), loggers=())
    x, y = np.random.default_rng(0).normal(size=(2, 4096, 16)).astype(np.float32)
    return trainer, {"x": x, "y": y}
