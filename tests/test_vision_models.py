"""ResNet and ViT: published sizes, and one device's numbers under every strategy."""

import re
from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.models import (
    ResNet,
    ResNetConfig,
    ViT,
    ViTConfig,
    classification_loss,
)
from tests.parity.checks import (
    assert_params_close,
    assert_placed,
    assert_same_numbers,
    axes_in_use,
)
from tests.parity.models import CLASSES, Case, label_batch
from tests.parity.runs import (
    Run,
    described,
    measure,
    to_host,
)
from tests.parity.strategies import ONE_DEVICE, PLANS

pytestmark = pytest.mark.long

# At the kink of a ReLU, rounding would decide the gradient.
RESNET = ResNetConfig.tiny(num_classes=CLASSES, width=32, activation=jax.nn.silu)
BOTTLENECK = ResNetConfig.tiny(
    num_classes=CLASSES, width=16, block="bottleneck", activation=jax.nn.silu
)
VIT = ViTConfig.tiny(num_classes=CLASSES, dropout=0.1)
CASES = {
    "resnet": Case(
        build=lambda rngs: ResNet(RESNET, rngs=rngs),
        loss=classification_loss,
        make_batch=label_batch(8, 8, 3),
    ),
    "bottleneck": Case(
        build=lambda rngs: ResNet(BOTTLENECK, rngs=rngs),
        loss=classification_loss,
        make_batch=label_batch(8, 8, 3),
    ),
    "vit": Case(
        build=lambda rngs: ViT(VIT, rngs=rngs),
        loss=classification_loss,
        make_batch=label_batch(8, 8, 3),
    ),
}
MICROBATCHES = 2


@cache
def alone(model: str) -> Run:
    case = CASES[model]
    return measure(case, ONE_DEVICE.strategy(case), ONE_DEVICE.devices(), MICROBATCHES)


def assert_parity(model: str, strategy: Strategy, devices: Sequence) -> None:
    run = measure(CASES[model], strategy, devices, MICROBATCHES)
    assert_same_numbers(run, alone(model))
    description = described(CASES[model], strategy, devices)
    assert_placed(run.end, description)
    assert axes_in_use(run) >= set(strategy.axis_sizes) - {"data"}


@pytest.mark.slow
@pytest.mark.xdist_group("vision")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", CASES)
def test_training_matches_one_device(model: str, plan: str) -> None:
    strategy = PLANS[plan].strategy(CASES[model])
    assert_parity(model, strategy, PLANS[plan].devices())


def test_batch_statistics_cover_all_rows() -> None:
    """With two rows per device, losses and statistics match one device."""
    config = ResNetConfig.tiny(stage_sizes=(1,), width=8, activation=jax.nn.silu)
    batch = label_batch(8, 8, 3)(np.random.default_rng(0))
    batch = {"inputs": batch["inputs"][:16], "labels": batch["labels"][:16] % 10}
    found = {}
    for num_devices in (1, 8):
        trainer = Trainer(
            lambda rngs: ResNet(config, rngs=rngs),
            optax.sgd(0.1),
            classification_loss,
            strategy=FSDP(min_size=0),
            devices=jax.devices()[:num_devices],
            loggers=(),
        )
        losses = trainer.fit([batch] * 3, num_steps=3)["loss"]
        found[num_devices] = losses, to_host(trainer.state.variables)
    np.testing.assert_allclose(found[8][0], found[1][0], rtol=1e-5)
    assert any("norm.mean" in path for path in found[1][1])
    assert_params_close(found[8][1], found[1][1])


@pytest.mark.slow
@pytest.mark.xdist_group("vision")
def test_pipelined_vit_matches_one_device() -> None:
    strategy = Composite(Pipeline(2), FSDP(2, min_size=0), TensorParallel(2))
    assert_parity("vit", strategy, jax.devices())


def num_params(model: nnx.Module) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("config", "millions"),
    [(ResNetConfig.resnet18(), 11.69), (ResNetConfig.resnet50(), 25.56)],
    ids=["18", "50"],
)
def test_resnets_have_published_sizes(config: ResNetConfig, millions: float) -> None:
    model = nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0)))
    assert num_params(model) == pytest.approx(millions * 1e6, rel=1e-3)
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    assert nnx.eval_shape(lambda m, x: m(x), model, images).shape == (2, 1000)


@pytest.mark.parametrize("config", [ViTConfig.tiny(), ViTConfig.b16(), ViTConfig.g14()])
def test_vit_counts_its_parameters(config: ViTConfig) -> None:
    model = nnx.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0)))
    assert num_params(model) == config.num_params


@pytest.mark.parametrize(
    ("config", "millions"),
    [(ViTConfig.b16(), 86.6), (ViTConfig.g14(), 1011)],
    ids=["B/16", "g/14"],
)
def test_vits_have_published_sizes(config: ViTConfig, millions: float) -> None:
    assert config.num_params == pytest.approx(millions * 1e6, rel=2e-3)


def test_presets_can_be_overridden() -> None:
    assert not ResNetConfig.tiny(is_small=False).is_small
    assert ViTConfig.g14(mlp_dim=5632).mlp_dim == 5632


def test_tensor_parallelism_splits_convolution_block() -> None:
    told = TensorParallel(8).describe(CASES["bottleneck"].build)
    stored = {row.info.path: row.placement.stored for row in told.rows}
    assert stored["blocks.0.up.kernel"][3] == "tensor"
    assert stored["blocks.0.down.kernel"][2] == "tensor"
    assert stored["blocks.0.up_norm.scale"][0] == "tensor"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ResNetConfig.tiny(block="wide"),
            "ResNetConfig.block is 'wide'; it must be one of ('basic', 'bottleneck').",
        ),
        (
            lambda: ResNetConfig.tiny(stage_sizes=(1, 0)),
            "ResNetConfig.stage_sizes is (1, 0); there must be at least 1 stage, "
            "with at least 1 block in each.",
        ),
        (
            lambda: ResNetConfig.tiny(width=0),
            "ResNetConfig.width is 0; it must be at least 1.",
        ),
        (
            lambda: ViTConfig.tiny(patch_size=3),
            "ViTConfig.patch_size is 3, which does not divide image_size=8. Change one "
            "of them.",
        ),
        (
            lambda: ViTConfig.tiny(num_layers=0),
            "ViTConfig.num_layers is 0; it must be at least 1.",
        ),
        (
            lambda: ViTConfig.tiny(dropout=1.0),
            "ViTConfig.dropout is 1.0; it must be a probability in [0, 1).",
        ),
        (
            lambda: nnx.eval_shape(
                lambda: ViT(VIT, rngs=nnx.Rngs(0))(jnp.ones((1, 6, 8, 3)))
            ),
            "Images have shape (1, 6, 8, 3); for ViTConfig.image_size=8 they must be "
            "(batch, 8, 8, 3).",
        ),
    ],
)
def test_invalid_config_raises(make, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
