"""Compiles programs for described TPUs, by `libtpu` in a child process."""

import os
import subprocess
import sys

import pytest

HEADER = """
import os, sys
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
import jax, numpy as np, optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from nnx_parallel.audit.transfers import compile_with_text
from nnx_parallel.audit import audit
from nnx_parallel.errors import ProgramTextError
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel import *
from nnx_parallel.layers.attention import attention
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.state import plan_state
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.training.step import StepOptions, make_train_step

def devices_of(topology_name):
    return Topology.parse(topology_name).described()

def plan_gpt(config, strategy, topology_name):
    layout = strategy.layout(strategy.make_mesh(devices_of(topology_name)))
    model = abstract_model(lambda rngs: GPT(config, rngs=rngs), nnx.Rngs(0))
    precision = Precision.mixed_bfloat16()
    return plan_state(model, layout, optax.adamw(1e-3), precision=precision)

def lower_gpt(step, plan, rows, seq_len):
    sharding = plan.layout.sharding(plan.layout.batch_spec(rows))
    tokens = jax.ShapeDtypeStruct((rows, seq_len + 1), np.int32, sharding=sharding)
    return step.lower(plan.abstract, {"tokens": tokens})

def memory_of(step, plan, rows, seq_len):
    return lower_gpt(step, plan, rows, seq_len).compile().memory_analysis()
"""


def numbers_from(script: str, *arguments: str) -> list[int]:
    """Runs a script after `HEADER`, and returns the integers that it prints."""
    pytest.importorskip("libtpu")
    run = subprocess.run(
        [sys.executable, "-c", HEADER + script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    return [int(number) for number in run.stdout.split()]
