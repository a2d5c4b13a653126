"""Muon's update: FLOPs and bytes divided by the minimum, by `audit`; it is not timed.

The minimum is that each device orthogonalizes its share of the matrices, gets this
share once, and sends it back once. If parameters are replicated, each device also gets
all other results. `optax.contrib.muon` leaves this to the partitioner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from benchmarks.timing import Table
from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    audit,
)
from nnx_parallel.models import GPT, GPTConfig
from nnx_parallel.optimizers import muon, muon_dimension_numbers
from nnx_parallel.optimizers.steps import update_in_place
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.model import abstract_model, flatten, nest
from nnx_parallel.sharding.specs import dim_axes
from nnx_parallel.state import StatePlan, plan_state

STEPS = 5
STRATEGIES: dict[str, Strategy] = {
    "FSDP(8)": FSDP(8),
    "TP 2 x FSDP 4": Composite(TensorParallel(2), FSDP(4)),
    "Pipeline 2 x FSDP 4": Composite(Pipeline(2), FSDP(4)),
    "DataParallel(8)": DataParallel(8),
}
OPTIMIZERS = {"optax.contrib.muon": optax.contrib.muon, "muon": muon}


class Cost(NamedTuple):
    """FLOPs and bytes in collectives of one device."""

    flops: float
    bytes: float


def measure(rounds: int = 1) -> Table:
    """The ratios of both optimizers, for layers that 8 devices share evenly or not."""
    del rounds
    table = Table("Muon's update over the least FLOPs and bytes, width 64, 8 devices")
    for num_layers in (8, 6):
        for name, strategy in STRATEGIES.items():
            for optimizer, make in OPTIMIZERS.items():
                plan = plan_gpt(config(num_layers), strategy, make)
                flops, sent = ratios(plan)
                start = f"{num_layers} layers, {name}, {optimizer}"
                table.add(f"{start}: FLOPs", f"{flops:.2f}")
                table.add(f"{start}: bytes", f"{sent:.2f}")
    return table


def config(num_layers: int) -> GPTConfig:
    """A GPT, whose kernels have 1 to 4 dims of width."""
    return GPTConfig.tiny(num_layers=num_layers, embed_dim=64, vocab_size=64)


def plan_gpt(
    config: GPTConfig,
    strategy: Strategy,
    make: Callable[..., optax.GradientTransformation],
    devices: Sequence[Any] | None = None,
    **settings: Any,
) -> StatePlan:
    """The plan of a GPT that an optimizer like Muon trains."""
    layout = strategy.layout(strategy.make_mesh(devices))
    model = abstract_model(lambda rngs: GPT(config, rngs=rngs), nnx.Rngs(0))
    return plan_state(
        model,
        layout,
        lambda model: make(
            1e-2,
            muon_weight_dimension_numbers=muon_dimension_numbers(model),
            **settings,
        ),
    )


def update(plan: StatePlan, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """Updates and state as a step computes them."""
    with using(plan.layout):
        return update_in_place(plan, grads, opt_state, params)


def compile_update(plan: StatePlan) -> jax.stages.Compiled:
    """Only the update, from gradients in the optimizer's shards to updates there."""
    places = {path: plan.placements[path] for path in flatten(plan.abstract.params)}
    shardings = nest({p: plan.layout.sharding(x.optimizer) for p, x in places.items()})
    state = plan.abstract
    grads: Any = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        state.params,
        shardings,
    )
    run = jax.jit(
        lambda grads, opt_state, params: update(plan, grads, opt_state, params),
        out_shardings=(shardings, plan.shardings.opt_state),
    )
    return run.lower(grads, state.opt_state, grads).compile()


def ratios(plan: StatePlan) -> Cost:
    """Returns FLOPs and bytes over the minimum; plain bytes if the minimum is zero."""
    report, least = audit(compile_update(plan)), least_cost(plan)
    return Cost(report.flops / least.flops, report.bytes() / least.bytes)


def least_cost(plan: StatePlan) -> Cost:
    """Returns a device's minimal work, if all matrices are kernels in float32."""
    sizes, flops, sent = plan.layout.mesh.shape, 0.0, 0.0
    for path, x in flatten(plan.abstract.params).items():
        if path[-1] != "kernel":
            continue
        # (layers, *rows, *columns), of which the embedding is never the last of rows
        num_rows = 2 if path[-2] == "out" else 1
        layers, dims = x.shape[0], x.shape[1:]
        sides = math.prod(dims[:num_rows]), math.prod(dims[num_rows:])
        short, long = sorted(sides)
        flops += (
            layers
            * STEPS
            * 2
            * short**2
            * (2 * long + short)
            / math.prod(sizes.values())
        )
        spec = dim_axes(plan.placements[path].optimizer, x.ndim)
        in_matrix = {axis for dim in spec[1:] for axis in dim}
        split = math.prod(sizes[axis] for dim in spec for axis in dim)
        shard = 4 * x.size / split
        copies = math.prod(sizes.values()) / split
        sent += 2 * shard / copies if in_matrix else 0
        sent += shard if copies > 1 else 0
    return Cost(flops, sent)
