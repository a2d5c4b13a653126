"""ViT and ResNet compared with transformers: logits, files in both directions, heads.

`tests/goldens/make_vision.py` made the goldens, which are tiny random models.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import WeightsError
from nnx_parallel.models import (
    ResNet,
    ResNetConfig,
    ViT,
    ViTConfig,
    classification_loss,
)
from nnx_parallel.weights import Pretrained, save_pretrained

GOLDENS = Path(__file__).parent / "goldens" / "vision"
KINDS: dict[str, Any] = {"vit": ViT, "resnet": ResNet, "resnet-basic": ResNet}
STRATEGIES: dict[str, tuple[Strategy, int]] = {
    "alone": (DataParallel(1), 1),
    "fsdp": (FSDP(min_size=0), 8),
    "tensor": (Composite(TensorParallel(2), FSDP(min_size=0)), 8),
    "pipeline": (Composite(Pipeline(2), FSDP(min_size=0)), 8),
}


def make_trainer(model: Any, strategy: str) -> Trainer:
    placed, num_devices = STRATEGIES[strategy]
    return Trainer(
        model,
        optax.sgd(0.05),
        classification_loss,
        strategy=placed,
        num_microbatches=2 if strategy == "pipeline" else 1,
        devices=jax.devices()[:num_devices],
        loggers=(),
    )


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in this library's layout, and transformers' logits."""
    found = np.load(GOLDENS / name / "logits.npz")
    return np.moveaxis(found["images"], 1, -1), found["logits"]


def content(folder: Path) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("vit", "fsdp"),
        ("resnet", "fsdp"),
        pytest.param("resnet-basic", "fsdp", marks=pytest.mark.deep),
        *(
            pytest.param(name, strategy, marks=pytest.mark.deep)
            for name in KINDS
            for strategy in STRATEGIES
            # A ResNet has no list of equal blocks.
            if strategy != "fsdp" and (name == "vit" or strategy != "pipeline")
        ),
    ],
)
def test_logits_and_files_match_transformers(
    name: str, strategy: str, tmp_path: Path
) -> None:
    folder, written = GOLDENS / name, tmp_path / "written"
    trainer = make_trainer(KINDS[name].from_pretrained(folder), strategy)
    images, expected = golden(name)
    rows = np.concatenate([images] * 8)
    batch = {"inputs": rows, "labels": np.arange(16, dtype=np.int32) % 6}
    logits = trainer.predict([batch], lambda model, batch: model(batch["inputs"]))
    np.testing.assert_allclose(logits[:2], expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1
    save_pretrained(written, trainer.model, source=folder)
    before, after = content(folder), content(written)
    assert before.keys() == after.keys()
    for key, x in before.items():
        assert (x.dtype, x.tobytes()) == (after[key].dtype, after[key].tobytes()), key
    # transformers would read the same config: settings in both files are equal.
    theirs, ours = config_of(folder), config_of(written)
    assert {k: theirs[k] for k in ours.keys() & theirs.keys()} == {
        k: x for k, x in ours.items() if k in theirs
    }
    again = KINDS[name].from_pretrained(written)
    assert again.tensors.keys() == after.keys()
    # The statistics of the norms were read, and training continues from them.
    losses = trainer.fit([batch] * 3, 3)["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("name", "prefix"), [("vit", "vit."), ("resnet", "resnet.")])
def test_folder_of_base_class_needs_a_new_head(
    name: str, prefix: str, tmp_path: Path
) -> None:
    given = content(GOLDENS / name)
    arrays = {n.removeprefix(prefix): x for n, x in given.items() if prefix in n}
    save_file(arrays, tmp_path / "model.safetensors")
    shutil.copy(GOLDENS / name / "config.json", tmp_path)
    with pytest.raises(
        WeightsError, match=r"without a head wrote it.*num_classes= for"
    ):
        KINDS[name].from_pretrained(tmp_path)
    num_classes = config_of(GOLDENS / name).get("num_labels", 6)
    found = KINDS[name].from_pretrained(tmp_path, num_classes=num_classes)
    nnx.eval_shape(lambda: found.build_shapes(nnx.Rngs(0)))
    assert found.tensors.keys() == {n for n in given if prefix in n}


def test_new_head_is_initialized_for_other_classes(tmp_path: Path) -> None:
    for name, kind in (("vit", ViT), ("resnet", ResNet)):
        model: Any = kind.from_pretrained(GOLDENS / name, num_classes=3)(nnx.Rngs(0))
        theirs = content(GOLDENS / name)
        assert model.head.kernel.shape[-1] == 3
        assert np.any(model.head.kernel[...])
        norm = model.stem_norm if name == "resnet" else model.norm
        key = "resnet.embedder.embedder.normalization" if name == "resnet" else None
        expected = theirs[f"{key or 'vit.layernorm'}.weight"]
        np.testing.assert_array_equal(norm.scale[...], expected)
        save_pretrained(tmp_path / name, model, source=GOLDENS / name)
        assert len(config_of(tmp_path / name)["id2label"]) == 3
    broken = Pretrained(
        lambda rngs: ViT(ViTConfig.tiny(pool="class"), rngs=rngs),
        GOLDENS / "vit",
        model_names(),
        new="^nothing",
    )
    with pytest.raises(WeightsError, match="Config and files disagree"):
        broken(nnx.Rngs(0))


def model_names() -> Any:
    model = nnx.eval_shape(lambda: ViT(ViTConfig.tiny(pool="class"), rngs=nnx.Rngs(0)))
    return model.names_in_files()


def test_parameter_counts_match_published_models() -> None:
    for config, expected in (
        (ViTConfig.b16(pool="class"), 86_567_656),  # google/vit-base-patch16-224
        (ViTConfig.b16(), 86_566_120),
    ):
        assert config.num_params == expected
        model = nnx.eval_shape(lambda c=config: ViT(c, rngs=nnx.Rngs(0)))
        params = jax.tree.leaves(nnx.state(model, nnx.Param))
        assert sum(x.size for x in params) == expected
    model = nnx.eval_shape(lambda: ResNet(ResNetConfig.resnet50(), rngs=nnx.Rngs(0)))
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(x.size for x in params) == 25_557_032  # microsoft/resnet-50


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("vit", {"model_type": "deit"}, "model_type 'deit'. ViT can read only 'vit'."),
    (
        "vit",
        {"hidden_act": "relu"},
        "has hidden_act='relu', which ViT does not support",
    ),
    ("vit", {"qkv_bias": False}, "it must be True, or absent"),
    ("resnet", {"depths": [10**9]}, "has depths=[1000000000]. It must be a list of"),
    ("vit", {"num_hidden_layers": 10**9}, "a whole number from 1 to 10,000"),
    ("vit", {"image_size": [16, 8]}, "has image_size=[16, 8]; it must be the side"),
    ("resnet", {"hidden_sizes": [32, 48]}, "for embedding_size=8 and layer_type"),
    ("resnet", {"downsample_in_bottleneck": True}, "it must be False, or absent"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD)
def test_unsupported_config_raises(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = config_of(GOLDENS / name) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        KINDS[name].from_pretrained(tmp_path)


def test_exporting_unsupported_model_raises(tmp_path: Path) -> None:
    for model, message in (
        (ViT(ViTConfig.tiny(), rngs=nnx.Rngs(0)), "ViTConfig.pool is 'mean'"),
        (ResNet(ResNetConfig.tiny(), rngs=nnx.Rngs(0)), "is_small is True"),
        (
            ResNet(
                replace(ResNetConfig.tiny(), is_small=False, activation=jax.nn.silu),
                rngs=nnx.Rngs(0),
            ),
            "activation is 'silu'",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            save_pretrained(tmp_path / "new", model)
    with pytest.raises(ValueError, match=r"ViTConfig.pool is 'max'; it must be one of"):
        ViTConfig.tiny(pool="max")
    assert not (tmp_path / "new").exists()


def test_merged_dim_needs_sizes(tmp_path: Path) -> None:
    def small(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(12, 4, use_bias=False, rngs=rngs)

    names = [("kernel", "w", "out c p q -> (p q c) out, c=3 p=2 q=2")]
    save_pretrained(tmp_path / "mine", small(nnx.Rngs(1)), names=names)
    assert content(tmp_path / "mine")["w"].shape == (4, 3, 2, 2)
    model: Any = Pretrained(small, tmp_path / "mine", names)(nnx.Rngs(0))
    expected: Any = small(nnx.Rngs(1))
    np.testing.assert_array_equal(model.kernel[...], expected.kernel[...])
    names = [("kernel", "w", "out c p q -> (p q c) out, c=3")]
    with pytest.raises(WeightsError, match=r"Dim \(p q c\) of `kernel` has size 12"):
        Pretrained(small, tmp_path / "mine", names)(nnx.Rngs(0))
