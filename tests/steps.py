"""Training steps that are compiled from shapes; nothing runs or is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel import Strategy, audit
from nnx_parallel.audit import Report
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.state import StatePlan, plan_state
from nnx_parallel.training.step import StepOptions, make_train_step

TX = optax.adamw(1e-3)

QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Turns off machine-code optimizations, which come after all that the tests examine."""


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A compiled step, with the plan of its state.

    Attributes:
        plan: Structure and placement of every array.
        num_devices: Devices of the mesh.
        memory: The compiler's memory statistics, per device.
        report: Audit of its FLOPs and transfers.
    """

    plan: StatePlan
    num_devices: int
    memory: Any
    report: Report


def compile_step(
    build: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[[Any, Any], Any],
    strategy: Strategy,
    *,
    num_rows: int,
    seq_len: int,
    num_microbatches: int = 1,
) -> CompiledStep:
    """Compiles an AdamW step on token batches, on the devices that a strategy needs."""
    plan = plan_step(build, strategy)
    step = make_train_step(plan, loss, StepOptions(num_microbatches=num_microbatches))
    compiled = lower_step(step, plan, num_rows, seq_len).compile(QUICKLY)
    return CompiledStep(
        plan=plan,
        num_devices=plan.layout.mesh.size,
        memory=compiled.memory_analysis(),
        report=audit(compiled),
    )


def plan_step(build: Callable[[nnx.Rngs], nnx.Module], strategy: Strategy) -> StatePlan:
    """The plan of a model under AdamW, for as many devices as the strategy needs."""
    sizes = strategy.axis_sizes.values()
    mesh = strategy.make_mesh(jax.devices()[: math.prod(n or 1 for n in sizes)])
    return plan_state(abstract_model(build, nnx.Rngs(0)), strategy.layout(mesh), TX)


def lower_step(
    step: Callable, plan: StatePlan, num_rows: int, seq_len: int
) -> jax.stages.Lowered:
    """Lowers a step on batches of tokens for the mesh of its plan."""
    rows = plan.layout.sharding(plan.layout.batch_spec(num_rows))
    tokens = jax.ShapeDtypeStruct((num_rows, seq_len + 1), np.int32, sharding=rows)
    return step.lower(plan.abstract, {"tokens": tokens})  # pyright: ignore[reportFunctionMemberAccess]


@cache
def compile_gpt(
    config: GPTConfig, strategy: Strategy, num_rows: int, num_microbatches: int = 1
) -> CompiledStep:
    """The step of a GPT at its full sequence length."""
    return compile_step(
        lambda rngs: GPT(config, rngs=rngs),
        next_token_loss,
        strategy,
        num_rows=num_rows,
        seq_len=config.seq_len,
        num_microbatches=num_microbatches,
    )
