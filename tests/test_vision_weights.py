"""ViT and ResNet compared with transformers and timm: outputs, files, heads, sizes.

`tests/goldens/make_vision.py` made the goldens, which are tiny random models.
"""

import json
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
from nnx_parallel.models.families.timm import RESNETS
from nnx_parallel.models.vit_config import PRESETS
from nnx_parallel.weights import Pretrained, save_pretrained
from nnx_parallel.weights.export import describe_arrays
from nnx_parallel.weights.family import read_fields, write_settings
from nnx_parallel.weights.names import rules_of
from tests.goldens.drawn import draw

pytestmark = pytest.mark.long

GOLDENS = Path(__file__).parent / "goldens" / "vision"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
KINDS: dict[str, Any] = {n: ResNet if "resnet" in n else ViT for n in NAMES}
STRATEGIES: dict[str, tuple[Strategy, int]] = {
    "alone": (DataParallel(1), 1),
    "fsdp": (FSDP(min_size=0), 8),
    "tensor": (Composite(TensorParallel(2), FSDP(min_size=0)), 8),
    "pipeline": (Composite(Pipeline(2), FSDP(min_size=0)), 8),
}


def square_loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """A loss for models of features, which have no classes."""
    return (model(batch["inputs"]) ** 2).mean()


def make_trainer(model: Any, strategy: str, loss: Any = classification_loss) -> Trainer:
    placed, num_devices = STRATEGIES[strategy]
    return Trainer(
        model,
        optax.sgd(0.002),
        loss,
        strategy=placed,
        num_microbatches=2 if strategy == "pipeline" else 1,
        devices=jax.devices()[:num_devices],
        loggers=(),
    )


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in this library's layout, and transformers' logits."""
    found = np.load(GOLDENS / name / "logits.npz")
    return np.moveaxis(found["images"], 1, -1), found["logits"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each golden; weights that are not in the repository are drawn."""
    found = {name: GOLDENS / name for name in NAMES}
    drawn = tmp_path_factory.mktemp("drawn") / "timm-resnet"
    shutil.copytree(GOLDENS / "timm-resnet", drawn)
    shapes = json.loads((drawn / "shapes.json").read_text())
    arrays = {name: draw(name, shape) for name, shape in shapes.items()}
    for name in [name for name in arrays if name.endswith("running_mean")]:
        counter = name.replace("running_mean", "num_batches_tracked")
        arrays[counter] = np.zeros((), np.int64)
    save_file(arrays, drawn / "model.safetensors")
    return found | {"timm-resnet": drawn}


def content(folder: Path) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def is_quick(name: str, strategy: str) -> bool:
    """Returns True for runs that are not only in the deep tests."""
    # A ResNet of timm has eight million parameters.
    return strategy == {"dinov3": "pipeline", "timm-siglip": "tensor"}.get(name, "fsdp")


RUNS = [
    pytest.param(
        name, strategy, marks=[] if is_quick(name, strategy) else [pytest.mark.deep]
    )
    for name in NAMES
    for strategy in STRATEGIES
    # A ResNet has no list of equal blocks.
    if KINDS[name] is ViT or strategy != "pipeline"
]


@pytest.mark.parametrize(("name", "strategy"), RUNS)
def test_outputs_and_files_match(
    name: str, strategy: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder, written = folders[name], tmp_path / "written"
    has_classes = "features" not in np.load(GOLDENS / name / "logits.npz")
    loss = classification_loss if has_classes else square_loss
    trainer = make_trainer(KINDS[name].from_pretrained(folder), strategy, loss)
    images, expected = golden(name)
    rows = np.concatenate([images] * 8)
    batch = {"inputs": rows, "labels": np.arange(16, dtype=np.int32) % 6}
    logits = trainer.predict([batch], lambda model, batch: model(batch["inputs"]))
    assert_close(logits[:2], expected)
    assert expected.std() > 0.1
    if not has_classes:
        features = trainer.predict(
            [batch], lambda m, batch: m.features(batch["inputs"])
        )
        assert_close(features[:2], np.load(folder / "logits.npz")["features"])
    save_pretrained(written, trainer.model, source=folder)
    check_files(folder, written)
    again = KINDS[name].from_pretrained(written)
    assert again.tensors.keys() == content(written).keys()
    if KINDS[name] is ResNet:  # training continues from the statistics of the norms
        losses = trainer.fit([batch] * 3, 3)["loss"]
        assert losses[-1] < losses[0]


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    bound = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=bound, rtol=0)


def check_files(folder: Path, written: Path) -> None:
    """Checks that a written folder has the arrays and settings of its source."""
    before, after = content(folder), content(written)
    if folder.name.startswith("siglip"):  # the version of transformers decides
        before = {with_prefix(key): x for key, x in before.items()}
    if folder.name == "siglip-classifier":  # which does not use its pool
        before = {k: x for k, x in before.items() if "vision_model.head." not in k}
    assert before.keys() == after.keys()
    for key, x in before.items():
        if "mask_token" not in key:  # only for training with masked patches
            same = (x.dtype, x.tobytes()) == (after[key].dtype, after[key].tobytes())
            assert same, key
    theirs, ours = config_of(folder), config_of(written)
    if "architecture" in theirs:  # the test of timm's settings is another one
        assert theirs["pretrained_cfg"] == ours["pretrained_cfg"]
        assert theirs["num_classes"] == ours["num_classes"]
        return
    theirs, ours = ({**x, **x.get("vision_config", {})} for x in (theirs, ours))
    changed = {"vision_use_head", "architectures", "vision_config"}
    names = (ours.keys() & theirs.keys()) - (
        changed if "classifier" in folder.name else set()
    )
    assert {k: theirs[k] for k in names} == {k: ours[k] for k in names}


def with_prefix(name: str) -> str:
    is_whole = name.startswith(("vision_model.", "classifier."))
    return name if is_whole else f"vision_model.{name}"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(
            name,
            strategy,
            marks=[]
            if (name, strategy) in {("dinov3", "tensor"), ("timm-registers", "fsdp")}
            else [pytest.mark.deep],
        )
        for name in NAMES
        for strategy in STRATEGIES
        if strategy != "alone" and KINDS[name] is ViT
    ],
)
def test_outputs_after_training_match_one_device(name: str, strategy: str) -> None:
    """Three steps of SGD with momentum 0.9."""
    images, _ = golden(name)
    rows = np.concatenate([images] * 8)
    rows = rows * np.linspace(0.5, 1.5, 16, dtype=np.float32)[:, None, None, None]
    batch = {"inputs": rows, "labels": np.arange(16, dtype=np.int32) % 6}
    has_classes = "features" not in np.load(GOLDENS / name / "logits.npz")
    found = {}
    for each in ("alone", strategy):
        placed, num_devices = STRATEGIES[each]
        trainer = Trainer(
            ViT.from_pretrained(GOLDENS / name),
            optax.sgd(0.01, momentum=0.9),
            classification_loss if has_classes else square_loss,
            strategy=placed,
            num_microbatches=2,
            devices=jax.devices()[:num_devices],
            loggers=(),
        )
        losses = trainer.fit([batch] * 3, 3)["loss"]
        out = trainer.predict([batch], lambda model, batch: model(batch["inputs"]))
        found[each] = losses, out
    np.testing.assert_allclose(found[strategy][0], found["alone"][0], rtol=1e-5)
    assert_close(found[strategy][1], found["alone"][1])
    assert found["alone"][0][-1] < found["alone"][0][0]


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


def table_of(config: Any, kind: Any) -> list[str]:
    """Names and shapes of all arrays in files, from the table of names."""
    model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    state = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    shapes = {".".join(map(str, path)): x.shape for path, x in state}
    arrays: Any = {
        path: jax.ShapeDtypeStruct(x, np.float32) for path, x in shapes.items()
    }
    rules = rules_of(model.names_in_files(), shapes)
    described, *_ = describe_arrays(rules, arrays, None)
    found = {name: list(shape) for name, shape, _ in described}
    found |= {name: [*x.shape] for name, x in model.constants_in_files().items()}
    return sorted(f"{name} {shape}" for name, shape in found.items())


TIMM = json.loads((GOLDENS / "timm.json").read_text())
QUICK = ("vit_so400m_patch14_siglip_384", "vit_base_patch14_reg4_dinov2", "resnet18")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.deep])
        for name in sorted({*PRESETS, *RESNETS} & TIMM.keys())
    ],
)
def test_architecture_has_arrays_of_timm(name: str) -> None:
    """Compares the names and shapes of all arrays, and the number of parameters."""
    config: Any
    if name in RESNETS:
        kind = ResNet
        content = {"architecture": name, "num_classes": 1000, "pretrained_cfg": {}}
        config = ResNetConfig(**read_fields(content, ResNet.families)[1])
    else:
        kind, config = ViT, ViTConfig.preset(name, num_classes=1000)
        assert config.num_params == TIMM[name][0]
    lines = table_of(config, kind)
    assert zlib.crc32("\n".join(lines).encode()) == TIMM[name][1]


def test_all_presets_of_timm_are_compared() -> None:
    ours = {name for name in PRESETS if name.startswith("vit_")}
    assert len(ours) == 104
    assert ours <= TIMM.keys()
    acts = {"GELU": "gelu", "GELUTanh": "gelu", "QuickGELU": "quick_gelu"}
    pools = {"token": "class", "avg": "mean", "map": "attention"}
    for name in sorted(ours):
        count, _, heads, act, epsilon, pool, pool_norm = TIMM[name]
        config = ViTConfig.preset(name, num_classes=1000)
        found = config.activation, config.exact_gelu, config.norm_epsilon, config.pool
        assert found == (acts[act], act == "GELU", epsilon, pools[pool]), name
        assert (config.num_params, config.num_heads) == (count, heads), name
        assert config.pool_norm is pool_norm, name


def test_presets_have_published_sizes() -> None:
    sizes = json.loads((GOLDENS / "sizes.json").read_text())
    for name, size in sizes.items():
        assert ViTConfig.preset(name).num_params == size, name
    with pytest.raises(ValueError, match=r"Unknown preset 'vit'. Presets: "):
        ViTConfig.preset("vit")


@pytest.mark.parametrize("name", ["siglip-base-patch16-224", "dinov3-vit7b16"])
def test_preset_has_config_of_transformers(name: str) -> None:
    config = ViTConfig.preset(name)
    written = write_settings(config, ViT.families)
    assert read_fields(written, ViT.families)[1]["family"] == config.family
    assert written["hidden_size"] == config.embed_dim


def test_timm_config_is_written_with_arguments_that_differ(tmp_path: Path) -> None:
    """The architecture with the fewest differences is chosen."""
    preset = ViTConfig.preset("vit_base_patch16_siglip_384", num_classes=3)
    written = write_settings(preset, ViT.families)
    assert written["architecture"] == "vit_base_patch16_siglip_384"
    assert written["model_args"] == {"img_size": 384, "global_pool": "map"}
    changed = replace(preset, num_layers=2, layer_scale=0.1)
    written = write_settings(changed, ViT.families)
    assert written["model_args"]["depth"] == 2
    assert written["model_args"]["init_values"] == 0.1
    assert ViTConfig(**read_fields(written, ViT.families)[1]) == changed
    changed = ViTConfig.preset("vit_base_patch14_reg4_dinov2", norm_epsilon=0.1)
    with pytest.raises(ValueError, match=r"norm_epsilon is 0.1. No architecture of ti"):
        write_settings(changed, ViT.families)


def test_model_without_files_can_be_written_for_timm(tmp_path: Path) -> None:
    config = ViTConfig.tiny(family="timm", pool="class", exact_gelu=True, qk_norm=True)
    model = ViT(config, rngs=nnx.Rngs(0))
    save_pretrained(tmp_path / "new", model)
    again: Any = ViT.from_pretrained(tmp_path / "new")(nnx.Rngs(1))
    images = jnp.ones((1, 8, 8, 3))
    np.testing.assert_array_equal(again(images), model(images))


def test_new_head_of_siglip_averages_patches(tmp_path: Path) -> None:
    """SiglipForImageClassification of transformers does the same."""
    source = ViT.from_pretrained(GOLDENS / "siglip", num_classes=3)
    model: Any = source(nnx.Rngs(0))
    assert (model.config.pool, model.pooling) == ("mean", None)
    images = golden("siglip")[0]
    pooled = model.features(images).mean(axis=1)
    np.testing.assert_allclose(model(images), model.head(pooled), rtol=1e-5, atol=1e-5)
    save_pretrained(tmp_path / "new", model)
    config = config_of(tmp_path / "new")
    assert config["architectures"] == ["SiglipForImageClassification"]
    assert config["vision_config"]["vision_use_head"] is False
    # The pool can be kept; transformers has no such classifier.
    kept: Any = ViT.from_pretrained(
        GOLDENS / "siglip", num_classes=3, pool="attention"
    )(nnx.Rngs(0))
    assert kept.pooling is not None
    with pytest.raises(ValueError, match=r"ViTConfig.pool is 'attention'. The most"):
        save_pretrained(tmp_path / "kept", kept)
    headless: Any = ViT.from_pretrained(GOLDENS / "siglip-classifier", num_classes=0)
    assert headless(nnx.Rngs(0))(images).shape == (2, 32)


def test_vision_model_of_larger_model_is_read(tmp_path: Path) -> None:
    """A folder of SiglipModel has a model of texts and an image model."""
    arrays = {with_prefix(k): x for k, x in content(GOLDENS / "siglip").items()}
    arrays["text_model.embeddings.token_embedding.weight"] = np.zeros((2, 2), "f4")
    arrays["logit_scale"] = np.zeros(1, np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    inner = config_of(GOLDENS / "siglip")
    config = {"architectures": ["SiglipModel"], "model_type": "siglip"}
    config |= {
        "vision_config": inner,
        "text_config": {"model_type": "siglip_text_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = (
        r"Only its vision model is read. Left out: logit_scale, text_model \(2 arr"
    )
    with pytest.warns(UserWarning, match=message):
        model: Any = ViT.from_pretrained(tmp_path)(nnx.Rngs(0))
    images, expected = golden("siglip")
    assert_close(np.asarray(model(images)), expected)


def test_image_size_of_rotary_model_can_change() -> None:
    """Coordinates of patches have no table, so any size is possible."""
    model: Any = ViT.from_pretrained(GOLDENS / "dinov3", image_size=24)(nnx.Rngs(0))
    assert model.features(np.ones((1, 24, 24, 3), np.float32)).shape == (1, 40, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": "class", "class_token": False}, "pool is 'class', which needs a"),
        ({"pool": "attention", "pool_norm": True}, "pool_norm is True, which needs"),
        ({"positions": "rotary", "embed_dim": 24}, "embed_dim / num_heads is 6"),
        ({"activation": "swiglu", "exact_gelu": True}, "needs activation='gelu'"),
        ({"qkv_bias": False}, "key_bias is True, which needs qkv_bias=True"),
        ({"num_registers": -1}, "num_registers is -1; it must be at least 0"),
        ({"positions": "learned"}, "positions is 'learned'; it must be one of"),
        ({"patch_size": 9, "trim": True}, "patch_size is 9; it must be at most"),
    ],
    ids=str,
)
def test_inconsistent_fields_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ViTConfig.tiny(**change)


VARIANTS: list[dict[str, Any]] = [
    {"pool": "attention", "num_classes": 0, "activation": "swiglu"},
    {"pool": "class", "num_registers": 2, "positions": "patches", "layer_scale": 0.1},
    {"positions": "rotary", "key_bias": False, "qk_norm": True, "pre_norm": True},
    {"patch_size": 3, "trim": True, "qkv_bias": False, "key_bias": False},
]


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_parameters_of_variants_are_counted(change: dict[str, Any]) -> None:
    config = ViTConfig.tiny(**change)
    model = nnx.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0)))
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(x.size for x in params) == config.num_params
    described = Composite(TensorParallel(2), FSDP(4, min_size=0)).describe(
        lambda rngs: ViT(config, rngs=rngs)
    )
    assert "does not split" not in described.summary()


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("siglip", {"norm_epsilon": 1e-6}),
    ("siglip", {"exact_gelu": True}),
    ("siglip-classifier", {"exact_gelu": False}),
    ("dinov3", {"rope_theta": 100.0}),
    ("dinov3", {"exact_gelu": False}),
    ("timm-clip", {"activation": "gelu"}),
    ("timm-registers", {"norm_epsilon": 1e-2}),
    ("timm-siglip", {"exact_gelu": False}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=str)
def test_each_setting_changes_outputs(name: str, change: dict[str, Any]) -> None:
    """Without this test, an ignored setting could pass its golden."""
    images, expected = golden(name)
    model: Any = ViT.from_pretrained(GOLDENS / name, **change)(nnx.Rngs(0))
    difference = np.abs(np.asarray(model(images)) - expected).max()
    assert difference > 5e-5 * np.abs(expected).max()  # five times the bound of parity


BAD: list[tuple[str, dict[str, Any], str]] = [
    (
        "vit",
        {"model_type": "deit"},
        "model_type 'deit'. ViT can read only one of: timm, siglip_vision_model, vit, "
        "dinov3_vit.",
    ),
    ("siglip", {"hidden_act": "relu"}, "has hidden_act='relu', which ViT does not"),
    ("dinov3", {"use_gated_mlp": True}, "hidden_act must be 'silu'"),
    ("dinov3", {"hidden_act": "gelu_new"}, "hidden_act must be 'gelu'"),
    ("dinov3", {"query_bias": False}, "query_bias and value_bias must be equal"),
    ("dinov3", {"mlp_bias": False}, "has mlp_bias=False, which ViT does not support"),
    (
        "timm-vit",
        {"architecture": "vit_base_patch16_rope_224"},
        "has architecture='vit_base_patch16_rope_224' of timm, which ViT does not",
    ),
    ("timm-vit", {"global_pool": "avg"}, "has global_pool='avg', but the architecture"),
    ("timm-resnet", {"architecture": "resnet50d"}, "which ResNet does not support"),
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


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("timm-vit", {"final_norm": False}, "has final_norm=False, which ViT does not"),
        ("timm-vit", {"block_fn": "X"}, "has block_fn='X' in model_args, which ViT"),
        ("timm-vit", {"norm_epsilon": 0.1}, "has norm_epsilon=0.1 in model_args"),
        ("timm-vit", {"global_pool": "max"}, "has global_pool='max', which ViT does"),
        ("timm-vit", {"in_chans": 1}, "has in_chans=1, which ViT does not support"),
        ("timm-vit", {"depth": 0}, "has depth=0. It must be a whole number from 1"),
        (
            "timm-vit",
            {"reg_tokens": -1},
            "has reg_tokens=-1. It must be a whole number",
        ),
        ("timm-resnet", {"avg_down": True}, "has avg_down=True, which ResNet does not"),
        ("timm-resnet", {"channels": [8, 16]}, "channels must begin with [64, 128"),
        ("timm-resnet", {"layers": [0]}, "has layers=[0]. It must be a list of"),
    ],
)
def test_unsupported_argument_of_timm_raises(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = config_of(GOLDENS / name)
    config["model_args"] |= change
    config.pop("global_pool", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        KINDS[name].from_pretrained(tmp_path)


def test_exporting_unsupported_model_raises(tmp_path: Path) -> None:
    for model, message in (
        (ViT(ViTConfig.tiny(qk_norm=True), rngs=nnx.Rngs(0)), "qk_norm is True"),
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


@pytest.mark.parametrize("head_dim", [64, 196, 412])
def test_rotation_has_an_angle_for_each_pair_of_features(head_dim: int) -> None:
    config = ViTConfig.tiny(embed_dim=2 * head_dim, num_heads=2, positions="rotary")
    model = ViT(config, rngs=nnx.Rngs(0))
    assert model(jnp.ones((1, 8, 8, 3))).shape == (1, 10)
