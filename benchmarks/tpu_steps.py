"""Training steps compiled for TPUs without TPUs: memory, text, and seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from nnx_parallel import Precision, Strategy
from nnx_parallel.audit.transfers import compile_with_text
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.state import plan_state
from nnx_parallel.training.step import StepOptions, make_train_step

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "PYTHONPATH": os.pathsep.join(sys.path),
}
"""Variables of a process that compiles for TPUs without one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its sequences, and the chips that train it.

    Attributes:
        config: Its shape; ``seq_len`` is the length of a sequence.
        strategy: How it is trained.
        topology: The chips, with the links that close the torus of whole cubes.
        rows: Sequences per step.
        microbatches: Number of parts of a step's rows, which run one after another.
        options: Compiler options that are added; ``None`` removes an option.
        precision: The dtypes of parameters and products.
    """

    config: Callable[[], GPTConfig]
    strategy: Strategy
    topology: str
    rows: int = 1
    microbatches: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision = field(default_factory=Precision.mixed_bfloat16)


def figures_of(benchmark: str, name: str) -> dict[str, float]:
    """Figures of one case, compiled in a process that a failed check may end.

    Args:
        benchmark: The module, whose last line of output is JSON.
        name: The case, which is the argument of the module.
    """
    return last_line([sys.executable, "-m", benchmark, name])


def last_line(command: list[str]) -> dict[str, float]:
    """The last line of a process that compiles for TPUs, read as JSON."""
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ENVIRONMENT,
    )
    if run.returncode:
        raise RuntimeError(f"{command[:4]} failed: {run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def compile_step(case: Case) -> tuple[str, dict[str, float]]:
    """The text of a step for abstract TPUs, and its bytes and seconds.

    AdamW, and parameters in float32.
    """
    devices = Topology.parse(case.topology).described()
    config, strategy = case.config(), case.strategy
    layout = strategy.layout(strategy.make_mesh(devices))
    model = abstract_model(lambda rngs: GPT(config, rngs=rngs), nnx.Rngs(0))
    plan = plan_state(model, layout, optax.adamw(1e-3), precision=case.precision)
    options = StepOptions(
        num_microbatches=case.microbatches, compiler_options=case.options or None
    )
    step: Any = make_train_step(plan, next_token_loss, options)
    rows = layout.sharding(layout.batch_spec(case.rows))
    shape = (case.rows, config.seq_len + 1)
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=rows)
    start = time.perf_counter()
    compiled, text = compile_with_text(step.lower(plan.abstract, {"tokens": tokens}))
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return text, {
        "chips": len(devices),
        # The state is donated: its outputs reuse the memory of its inputs.
        "memory": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "state": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "seconds": seconds,
    }
