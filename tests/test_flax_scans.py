"""Layers vmapped and scanned by Flax: FSDP gathers one layer at a time."""

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import FSDP, Composite, Strategy, TensorParallel, audit
from nnx_parallel.programs import walk
from nnx_parallel.sharding.model import abstract_model
from tests.parity.checks import assert_gradients_close
from tests.pipelines import ONE_DEVICE, make_trainer, one_step
from tests.steps import QUICKLY
from tests.strangers.scanned import LAYERS, WIDTH, ByHand, Jitted, Rematted, Scanned

BATCH = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


def loss(model: Any, batch: Any) -> jax.Array:
    return (model(batch) ** 2).mean()


def gathers(build: Any, strategy: Strategy) -> Counter:
    """Counts a step's all-gathers by their bytes."""
    trainer = make_trainer(build, loss, strategy, num_microbatches=1)
    step: Any = trainer.train_step
    step = step.lower(trainer.state, trainer.shard_batch(BATCH)).compile(QUICKLY)
    found = Counter()
    for each in audit(step).collectives:
        if each.kind == "all-gather":
            found[each.bytes_each] += each.count
    return found


KERNEL = 4 * 4 * WIDTH**2  # bytes of one layer's kernel


DEEP = pytest.mark.deep


@pytest.mark.parametrize(
    "build",
    [Jitted, *(pytest.param(m, marks=DEEP) for m in (Scanned, Rematted, ByHand))],
)
def test_layers_are_gathered_one_by_one(build: Any) -> None:
    found = gathers(build, FSDP(4, min_size=4 * WIDTH**2))
    assert max(found) == KERNEL
    # Two kernels per layer, forward and backward; the head's kernel has the same size.
    assert 4 * LAYERS <= found[KERNEL] <= 4 * LAYERS + 2


@pytest.mark.parametrize(
    ("build", "num_microbatches"),
    [
        (ByHand, 1),
        pytest.param(Scanned, 2, marks=DEEP),
        pytest.param(Rematted, 1, marks=DEEP),
    ],
)
def test_training_matches_one_device(build: Any, num_microbatches: int) -> None:
    def train(strategy: Strategy) -> tuple:
        count = num_microbatches
        trainer = make_trainer(build, loss, strategy, num_microbatches=count)
        found = one_step(trainer, BATCH)
        # The loop of an evaluation also gathers each layer.
        return *found, trainer.evaluate([BATCH]) if build is ByHand else {}

    expected, found = train(ONE_DEVICE), train(FSDP(4, min_size=0))
    assert_gradients_close(found[0], expected[0])
    for path, value in expected[1].items():
        np.testing.assert_allclose(found[1][path], value, rtol=1e-5, atol=1e-6)
    for i in (2, 3):
        for name, value in expected[i].items():
            np.testing.assert_allclose(found[i][name], value, rtol=1e-5)


def test_remat_of_model_is_kept() -> None:
    def num_products(build: Any) -> int:
        """Number of products in a step; the body of a loop counts once."""
        trainer = make_trainer(build, loss, FSDP(4, min_size=0), num_microbatches=1)
        arguments = trainer.state, trainer.shard_batch(BATCH)
        traced = jax.make_jaxpr(trainer.train_step)(*arguments)
        names = [eqn.primitive.name for eqn, _ in walk(traced.jaxpr)]
        return names.count("dot_general")

    # Three products per layer are computed again; the compiler may drop the last one.
    assert num_products(Rematted) >= num_products(Scanned) + 2


def test_layers_dim_is_described_and_never_split() -> None:
    rows = FSDP(8, min_size=0).describe(Scanned).rows
    rows = {row.info.path: row for row in rows}
    for path in ("blocks.up.kernel", "blocks.mix", "blocks.norm.scale"):
        place = rows[path].placement
        assert place.stored[0] is None
        assert "dim 0: layers, gathered one by one" in place.reason
        assert rows[path].info.names[0] == "layers"  # pyright: ignore[reportOptionalSubscript]
    assert "layers" not in rows["head.kernel"].placement.reason
    assert rows["head.kernel"].info.names is None


class Named(nnx.Module):
    """A block whose kernel has names; the layers' name may be in Flax's metadata."""

    def __init__(self, metadata: dict, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(
            nnx.initializers.normal(), ("embed", "mlp"), eager_sharding=False
        )

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0, **metadata)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=init, rngs=rngs)

        self.blocks = make(rngs)


@pytest.mark.parametrize(
    "metadata", [{}, {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}]
)
def test_layer_names_gain_layers_dim(metadata: dict) -> None:
    strategy = Composite(FSDP(4, min_size=0), TensorParallel(2))
    rows = strategy.describe(lambda rngs: Named(metadata, rngs)).rows
    (kernel,) = (row for row in rows if row.info.path == "blocks.kernel")
    assert kernel.info.names == ("layers", "embed", "mlp")
    assert tuple(kernel.placement.stored) == (None, "fsdp", "tensor")


def test_unvmapped_layers_have_no_layers_dim() -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Conv(4, 4, (4,), rngs=rngs)])

    for _, variable in nnx.to_flat_state(nnx.state(abstract_model(build, nnx.Rngs(0)))):
        assert not variable.get_metadata().get("out_sharding")
