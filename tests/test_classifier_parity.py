"""The tensor-parallel and pipelined classifier has the same numbers as one device."""

import math
from dataclasses import replace
from functools import cache

import jax
import pytest

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Interleaved,
    Pipeline,
    Strategy,
    TensorParallel,
    ZeroBubble,
)
from nnx_parallel.models import MLPClassifier, classification_loss
from tests.parity.checks import assert_parts, assert_same_numbers
from tests.parity.models import CLASSES, CLASSIFIER, Case, label_batch
from tests.parity.runs import Run, measure
from tests.parity.strategies import ONE_DEVICE

CONFIG = replace(CLASSIFIER, num_layers=4, embed_dim=32, mlp_dim=64)
CASE = Case(
    build=lambda rngs: MLPClassifier(CONFIG, rngs=rngs),
    loss=classification_loss,
    make_batch=label_batch(CLASSES),
)
MICROBATCHES = {1: 1, 2: 4, 4: 8}
"""Number of microbatches, by number of stages."""

TENSOR: dict[str, Strategy] = {
    "tp2": TensorParallel(2),
    "tp4": TensorParallel(4),
    "tp4_sequence": TensorParallel(4, sequence=True),
    "tp4_ring": TensorParallel(4, overlap="ring"),
    "dp2_tp2_ring": Composite(DataParallel(2), TensorParallel(2, overlap="ring")),
    "fsdp2_tp2_prefetch": Composite(
        FSDP(2, min_size=0, prefetch="first"), TensorParallel(2)
    ),
}
PIPELINES: dict[str, Strategy] = {
    "pp2_dp2": Composite(Pipeline(2), DataParallel(2)),
    "pp2_tp2": Composite(Pipeline(2, Interleaved(chunks=2)), TensorParallel(2)),
    "pp4_dp2": Composite(Pipeline(4, ZeroBubble()), DataParallel(2)),
    "pp4_tp2": Composite(Pipeline(4), TensorParallel(2, overlap="ring")),
    "pp2_dp2_tp2": Composite(Pipeline(2), DataParallel(2), TensorParallel(2)),
}
CHOSEN = {"tp4_ring", "pp2_tp2"}


@cache
def one_device(microbatches: int) -> Run:
    return measure(CASE, ONE_DEVICE.strategy(CASE), ONE_DEVICE.devices(), microbatches)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(
            *item, marks=pytest.mark.deep if item[0] in CHOSEN else pytest.mark.slow
        )
        for item in (TENSOR | PIPELINES).items()
    ],
)
# The images have no sequences, and strategies that split sequences warn of that.
@pytest.mark.filterwarnings("ignore:TensorParallel.* should split activations")
def test_training_matches_one_device(name: str, strategy: Strategy):
    sizes = {axis: size or 1 for axis, size in strategy.axis_sizes.items()}
    stages = sizes.get("pipe", 1)
    devices = jax.devices()[: math.prod(sizes.values())]
    run = measure(CASE, strategy, devices, MICROBATCHES[stages])
    assert_same_numbers(run, one_device(MICROBATCHES[stages]))
    blocks = run.end.params["blocks"]["layer"]
    # The MLP's first kernel is split by columns, its second by rows; stages split
    # layers.
    split = {name: sizes.get(name, 1) for name in ("pipe", "tensor", "fsdp")}
    for kernel in (blocks["up"]["kernel"], blocks["down"]["kernel"]):
        assert_parts(kernel, math.prod(split.values()))
    if name in PIPELINES:
        assert_parts(blocks["down"]["bias"], stages)
