"""Pipeline schedules: simulated, compiled and measured.

The simulated devices share the cores of one machine, and each runs every slot that any
stage has in a tick, masked if it belongs to another stage. So a tick takes the sum over
stages of the time that it would take on real devices: both are proportional to the
number of ticks with a slot, times the slot's cost. The measurement distinguishes
schedules by their ticks, as real devices do, but not by the communication that they
overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table as Grid

from benchmarks.pipeline_slots import slot_runs
from benchmarks.timing import Ratio, Runner, Table, circumstances, interleave
from nnx_parallel import (
    GPipe,
    Interleaved,
    OneFOneB,
    Pipeline,
    TrainState,
    ZeroBubble,
    audit,
)
from nnx_parallel import schedules as pipelines
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.schedules import Schedule
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.state import StatePlan, init_state, plan_state
from nnx_parallel.training.step import StepOptions, make_train_step

CONFIG = GPTConfig.tiny(num_layers=16, seq_len=32, embed_dim=64, vocab_size=512)
ROWS = 8  # of a microbatch
TX = optax.adamw(1e-3)
SCHEDULES = {
    "GPipe": GPipe(),
    "1F1B": OneFOneB(),
    "Interleaved(2)": Interleaved(2),
    "ZeroBubble": ZeroBubble(),
}
QUICK = [(2, 8), (4, 8), (8, 8)]
FULL = [(stages, count) for stages in (2, 4, 8) for count in (4, 8, 16, 32, 64)]
COMPARED = (4, 8)


@dataclass
class Sweep:
    """The figures, which are printed as grids and written as a table."""

    figures: Table
    grids: list[Grid] = field(default_factory=list)

    def show(self) -> None:
        """Prints the grids."""
        console = Console(width=120)
        for key, value in circumstances().items():
            console.print(f"{key}: {value}", highlight=False)
        for grid in self.grids:
            console.print(grid)

    def write(self, path: str) -> None:
        """Writes figures and circumstances as JSON."""
        self.figures.write(path)


def measure(rounds: int = 5, full: bool = False) -> Sweep:
    """All schedules for some numbers of stages and microbatches, or for all."""
    tokens = ROWS * CONFIG.seq_len
    sweep = Sweep(
        Table(
            f"Pipeline schedules: a GPT of {CONFIG.num_params:,} parameters in "
            f"{CONFIG.num_layers} layers, {tokens} tokens in a microbatch"
        )
    )
    sweep.grids += [_schedules(sweep.figures, FULL if full else QUICK, rounds)]
    sweep.grids += [_predictions(sweep.figures, *COMPARED, rounds)]
    return sweep


@dataclass
class Made:
    """A step, compiled and with its state.

    Attributes:
        plan: Structure and sharding of every array.
        table: The schedule.
        state: The current state.
        batch: The batch of every step, on the devices.
        compiled: The step.
    """

    plan: StatePlan
    table: pipelines.Table
    state: TrainState
    batch: Any
    compiled: jax.stages.Compiled

    def runner(self) -> Runner:
        """The step, to be timed."""
        return Runner(self.compiled, self.state, self.batch)


def make(schedule: Schedule, num_stages: int, num_microbatches: int) -> Made:
    """A training step of `CONFIG`."""
    strategy = Pipeline(num_stages, schedule)
    layout = strategy.layout(strategy.make_mesh(jax.devices()[:num_stages]))
    plan = plan_state(abstract_model(_build, nnx.Rngs(0)), layout, TX)
    state = jax.jit(
        lambda: init_state(plan, _build, nnx.Rngs(0), 0), out_shardings=plan.shardings
    )()
    shape = (ROWS * num_microbatches, CONFIG.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, shape, np.int32)
    rows = layout.sharding(layout.batch_spec(len(tokens)))
    batch = {"tokens": jax.device_put(tokens, rows)}
    options = StepOptions(num_microbatches=num_microbatches)
    step = make_train_step(plan, next_token_loss, options)
    compiled = step.lower(state, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
    table = schedule.table(num_stages, num_microbatches)
    return Made(plan, table, state, batch, compiled)


def _build(rngs: nnx.Rngs) -> GPT:
    return GPT(CONFIG, rngs=rngs)


def _schedules(figures: Table, sizes: list[tuple[int, int]], rounds: int) -> Grid:
    grid = Grid(title=figures.title)
    for name in ("stages", "microbatches", "schedule", "efficiency, simulated"):
        grid.add_column(name)
    for name in ("GFLOPs per device", "of them useful", "temporaries, MB", "step, ms"):
        grid.add_column(name, justify="right")
    for num_stages, count in sizes:
        made = {k: make(each, num_stages, count) for k, each in SCHEDULES.items()}
        runs = {name: step.runner() for name, step in made.items()}
        seconds = interleave(runs, rounds, warm_up=2)
        for name, step in made.items():
            found = _figures(step, float(np.median(seconds[name])))
            figures.add(f"{name}, {num_stages} stages, {count} microbatches", found)
            grid.add_row(
                str(num_stages),
                str(count),
                name,
                f"{found['efficiency']:.1%}",
                f"{found['flops'] / 1e9:.3f}",
                f"{found['useful']:.1%}",
                f"{found['temporary_bytes'] / 1e6:.2f}",
                f"{1e3 * found['seconds']:.0f}",
            )
        grid.add_section()
    return grid


def _figures(made: Made, seconds: float) -> dict[str, float]:
    report = audit(made.compiled, taken=_taken(made.table))
    work = CONFIG.flops_per_token(CONFIG.seq_len) * CONFIG.seq_len * ROWS
    assert report.temporary_bytes is not None
    return {
        "efficiency": made.table.simulate().efficiency,
        "flops": report.flops,
        "useful": work
        * made.table.num_microbatches
        / (report.flops * made.table.num_stages),
        "temporary_bytes": report.temporary_bytes,
        "seconds": seconds,
    }


def _taken(table: pipelines.Table) -> dict[str, float]:
    """The share of ticks in which the devices run a slot, masked or not."""
    edges = table.num_microbatches / table.num_ticks
    forward = float(table.forward.any.mean())
    found = {"before": edges, "after": edges, "before_backward": edges}
    found |= {"forward": forward}
    backward = float(table.backward_input.any.mean())
    if not table.is_split:
        return found | {"backward": backward}
    weight = float(table.backward_weight.any.mean())
    return found | {"backward_input": backward, "backward_weight": weight}


def _predictions(figures: Table, num_stages: int, count: int, rounds: int) -> Grid:
    """The time that the simulator predicts from slots, over the step's time."""
    grid = Grid(
        title=f"Simulator against measurement: {num_stages} stages, {count} "
        "microbatches, slots timed alone in the same rounds"
    )
    grid.add_column("schedule")
    for name in ("predicted, ms", "measured, ms", "measured / predicted"):
        grid.add_column(name, justify="right")
    for name, schedule in SCHEDULES.items():
        made = make(schedule, num_stages, count)
        slots = slot_runs(made.plan, made.state, made.batch, made.table)
        # The step donates its state, so it gets a copy.
        own = make_copy(made)
        seconds = interleave({**slots, "step": own}, 3 * rounds, warm_up=2)
        predicted = _predict(made.table, seconds)
        ratio = Ratio.of(seconds["step"], predicted)
        for part in slots:
            part_ms = 1e3 * float(np.median(seconds[part]))
            figures.add(f"{name}: {part} alone, ms", part_ms)
        figures.add(f"{name}: measured / predicted", ratio)
        medians = (
            1e3 * float(np.median(each)) for each in (predicted, seconds["step"])
        )
        grid.add_row(name, *(f"{each:.1f}" for each in medians), str(ratio))
    return grid


def make_copy(made: Made) -> Runner:
    """The step on a copy of its state."""
    shardings = jax.tree.map(lambda x: x.sharding, made.state)
    copy = jax.jit(lambda tree: jax.tree.map(lambda x: x.copy(), tree))
    state = jax.device_put(copy(made.state), shardings)
    return Runner(made.compiled, state, made.batch)


def _predict(table: pipelines.Table, seconds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Seconds of a step in each round, computed from the seconds of its parts."""

    def ticks(index: int) -> float:
        at = {part: float(values[index]) for part, values in seconds.items()}
        if not table.is_split:  # one cost for both halves
            costs = at["forward"], at["backward"], 0.0
        else:
            costs = at["forward"], at["backward_input"], at["backward_weight"]
        return table.simulate(*costs).total_time

    edges = seconds["before"] + seconds["after"] + seconds["before_backward"]
    scan = np.asarray([ticks(index) for index in range(len(edges))])
    return scan + table.num_microbatches * edges + seconds["update"]
