"""Programs compiled for TPUs that are not there, by `libtpu` in a child process."""

import os
import subprocess
import sys

import pytest

HEADER = """
import os
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
import jax, numpy as np, optax
from flax import nnx
from jax.experimental import topologies
from models import GPT, GPTConfig, next_token_loss
from nnx_parallel import *
from nnx_parallel.planning import plan_state
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.step import StepOptions, make_train_step

def plan_gpt(config, strategy, topology_name):
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=topology_name
    )
    layout = strategy.layout(strategy.make_mesh(topology.devices))
    model = abstract_model(lambda rngs: GPT(config, rngs=rngs), nnx.Rngs(0))
    precision = Precision.mixed_bfloat16()
    return plan_state(model, layout, optax.adamw(1e-3), precision=precision)

def memory_of(step, plan, rows, seq_len):
    sharding = plan.layout.sharding(plan.layout.batch_spec(rows))
    tokens = jax.ShapeDtypeStruct((rows, seq_len + 1), np.int32, sharding=sharding)
    lowered = step.lower(plan.abstract, {"tokens": tokens})
    return lowered.compile().memory_analysis()
"""


def numbers_from(script: str) -> list[int]:
    """The integers that a script prints; it has the names of `HEADER`."""
    pytest.importorskip("libtpu")
    run = subprocess.run(
        [sys.executable, "-c", HEADER + script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stderr
    return [int(number) for number in run.stdout.split()]
