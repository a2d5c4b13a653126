"""Makes the folders in ``vision``: tiny random models, by transformers and timm.

The script works like `make_goldens.py`, for models of images. ``logits.npz`` has
``images``, float32 (2, 3, 16, 16), in the layout of transformers, and ``logits``,
float32 (2, classes), computed in evaluation mode. For models that compute features,
``logits`` are the pooled features, and ``features`` are the last outputs, float32 (2,
seq, width). The statistics of the norms are random too.

The folder of a ResNet of timm has the names and shapes of arrays instead of a file of
weights, because such a model has at least five million parameters. `drawn.draw` makes
the weights. ``timm.json`` has, for architectures of timm, the number of parameters, a
checksum of the names and shapes of all arrays, and what arrays do not show.
``sizes.json`` has the numbers of parameters of published models in transformers.

The tests do not run this script. To make the folders again: ``pip install torch
transformers timm safetensors``, then ``python make_vision.py``, with the names of
folders to make only these.
"""

import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers
from drawn import draw
from timm.models import save_for_hf

HERE = Path(__file__).parent / "vision"
SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "layer_norm_eps": 1e-3,
}
DINOV3: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    "rope_theta": 20.0,
}
MODELS: dict[str, tuple[Any, Any]] = {
    "vit": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
            num_labels=6,
        ),
    ),
    "resnet": (
        transformers.ResNetForImageClassification,
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[32, 64], depths=[2, 1], num_labels=6
        ),
    ),
    "resnet-basic": (
        transformers.ResNetForImageClassification,
        transformers.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 2],
            layer_type="basic",
            num_labels=6,
        ),
    ),
    # Patches of 5 pixels leave out one row and one column of an image.
    "siglip": (
        transformers.SiglipVisionModel,
        transformers.SiglipVisionConfig(**SIGLIP, patch_size=5),
    ),
    "siglip-classifier": (
        transformers.SiglipForImageClassification,
        transformers.SiglipConfig(
            vision_config={**SIGLIP, "patch_size": 4, "hidden_act": "gelu"},
            num_labels=6,
        ),
    ),
    "dinov3": (
        transformers.DINOv3ViTModel,
        transformers.DINOv3ViTConfig(**DINOV3, num_register_tokens=3),
    ),
    "dinov3-gated": (
        transformers.DINOv3ViTModel,
        transformers.DINOv3ViTConfig(
            **DINOV3,
            use_gated_mlp=True,
            hidden_act="silu",
            query_bias=False,
            value_bias=False,
        ),
    ),
}
TINY: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 1.5}
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "timm-vit": (
        "vit_base_patch16_224",
        {**TINY, "img_size": 16, "patch_size": 4, "num_classes": 6},
    ),
    "timm-registers": (
        "vit_medium_patch16_reg4_gap_256",
        {
            **TINY,
            "img_size": 16,
            "patch_size": 4,
            "num_classes": 6,
            "reg_tokens": 3,
            "class_token": True,
            "init_values": 0.5,
            "qk_norm": True,
            "qkv_bias": False,
        },
    ),
    "timm-clip": (
        "vit_base_patch16_clip_quickgelu_224",
        {
            **TINY,
            "img_size": 16,
            "patch_size": 4,
            "num_classes": 6,
            "reg_tokens": 2,
            "fc_norm": True,
        },
    ),
    "timm-siglip": (
        "vit_so400m_patch14_siglip_384",
        {**TINY, "img_size": 16, "patch_size": 5, "num_classes": 0},
    ),
    "timm-resnet": ("resnet50", {"layers": (1, 1, 1, 1), "num_classes": 6}),
}
"""The architecture and the other arguments of each golden of timm."""

PUBLISHED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "siglip-base-patch16-224": (transformers.SiglipVisionModel, {}),
    "siglip-so400m-patch14-384": (
        transformers.SiglipVisionModel,
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
    ),
    "siglip2-giant-opt-patch16-384": (
        transformers.SiglipVisionModel,
        {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "image_size": 384,
        },
    ),
    "siglip2-large-patch16-512": (
        transformers.SiglipVisionModel,
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 512,
        },
    ),
} | {
    f"dinov3-{name}": (
        transformers.DINOv3ViTModel,
        {
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "num_register_tokens": 4,
            "use_gated_mlp": is_gated,
            "query_bias": has_bias,
            "value_bias": has_bias,
        },
    )
    for name, width, mlp, depth, heads, is_gated, has_bias in [
        ("vits16", 384, 1536, 12, 6, False, True),
        ("vits16plus", 384, 1536, 12, 6, True, True),
        ("vitb16", 768, 3072, 12, 12, False, True),
        ("vitl16", 1024, 4096, 24, 16, False, True),
        ("vith16plus", 1280, 5120, 32, 20, True, True),
        ("vit7b16", 4096, 8192, 40, 32, True, False),
    ]
}
STARTS = (
    "vit_",
    *(f"resnet{depth}" for depth in (18, 34, 26, 50, 101, 152, 200)),
)


def randomise(model: torch.nn.Module) -> None:
    """Draws random weights and statistics that all affect the output."""
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if not x.is_floating_point() or not x.numel():
                continue
            if name.endswith("running_var"):
                x.copy_(0.5 + torch.rand_like(x))
            elif x.ndim <= 1 or "cls_token" in name or "position" in name:
                x.add_(0.3 * torch.randn_like(x))
            else:
                x.copy_(torch.randn_like(x) * (1.5 / x[0].numel() ** 0.5))


def draw_all(model: torch.nn.Module, folder: Path) -> None:
    """Draws weights that tests can draw too, and writes their names and shapes."""
    shapes = {}
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if x.is_floating_point():
                x.copy_(torch.from_numpy(draw(name, x.shape)))
                shapes[name] = list(x.shape)
    folder.mkdir(exist_ok=True)
    (folder / "shapes.json").write_text(json.dumps(shapes, indent=0) + "\n")


def run(model: torch.nn.Module, images: torch.Tensor) -> dict[str, np.ndarray]:
    """Returns logits, or the pooled features and the last outputs."""
    with torch.no_grad():
        if hasattr(model, "forward_features"):
            found = {"logits": model(images)}
            if not model.num_classes:
                found["features"] = model.forward_features(images)
        else:
            out = model(images)
            found = {"logits": getattr(out, "logits", None)}
            if found["logits"] is None:
                found["logits"] = out.pooler_output
                found["features"] = out.last_hidden_state
    return {name: x.numpy() for name, x in found.items()}


def make(name: str) -> None:
    """Makes a folder."""
    torch.manual_seed(0)
    folder = HERE / name
    if name in TIMM:
        architecture, args = TIMM[name]
        model = timm.create_model(architecture, **args).eval()
        randomise(model)
        if "resnet" in name:
            draw_all(model, folder)
        save_for_hf(model, folder, safe_serialization=True)
        again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        if "resnet" in name:
            (folder / "model.safetensors").unlink()
    else:
        kind, config = MODELS[name]
        model = kind(config).eval()
        randomise(model)
        model.save_pretrained(folder)
        again = kind.from_pretrained(folder).eval()
    images = torch.randn(2, 3, 16, 16)
    found = run(again, images)
    print(f"{name}: logits {float(found['logits'].std()):.2f}")  # noqa: T201
    np.savez_compressed(folder / "logits.npz", images=images.numpy(), **found)


def describe(model: torch.nn.Module) -> list[int]:
    """Returns the number of parameters, and a checksum of names and shapes."""
    arrays = model.state_dict()
    lines = sorted(f"{name} {list(x.shape)}" for name, x in arrays.items())
    count = sum(x.numel() for x in model.parameters())
    return [count, zlib.crc32("\n".join(lines).encode())]


def describe_numbers(name: str) -> list[Any]:
    """Returns what the arrays do not show: heads, GELU, epsilon, pool, last norm."""
    with torch.device("meta"):
        model = timm.create_model(name, depth=1)
    block = model.blocks[0]
    act = type(block.mlp.act).__name__
    norm = next(x for x in model.modules() if isinstance(x, torch.nn.LayerNorm))
    has_norm = isinstance(model.fc_norm, torch.nn.LayerNorm)
    return [block.attn.num_heads, act, norm.eps, model.global_pool, has_norm]


def is_plain(model: torch.nn.Module) -> bool:
    """Whether a model is a vision transformer with the usual blocks and norms."""
    is_vit = type(model).__name__ == "VisionTransformer"
    names = {type(x).__name__ for x in model.blocks[0].children()} if is_vit else set()
    return {"LayerNorm", "Attention", "Mlp"} <= names


def describe_timm() -> dict[str, list[Any]]:
    """Describes the models of timm that have the size of their default data."""
    found: dict[str, list[Any]] = {}
    for name in timm.list_models():
        if name.startswith(STARTS):
            config = timm.get_pretrained_cfg(name)
            side = config.input_size[-1]
            args = {"img_size": side} if name.startswith("vit_") else {}
            with torch.device("meta"):
                try:
                    model = timm.create_model(name, num_classes=1000, **args)
                except TypeError:  # a hybrid, or another model that begins with vit_
                    continue
            found[name] = describe(model)
            if is_plain(model):
                found[name] += describe_numbers(name)
    return found


def main() -> None:
    """Makes all folders, or only those that the command line names."""
    for name in sys.argv[1:] or [*MODELS, *TIMM]:
        make(name)
    if sys.argv[1:]:
        return
    sizes = {}
    for name, (kind, args) in PUBLISHED.items():
        with torch.device("meta"):
            model = kind(kind.config_class(**args))
        mask = args["hidden_size"] if "num_register_tokens" in args else 0
        sizes[name] = sum(x.numel() for x in model.parameters()) - mask
    for file, content in (("sizes", sizes), ("timm", describe_timm())):
        lines = [f"{json.dumps(name)}: {json.dumps(x)}" for name, x in content.items()]
        (HERE / f"{file}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    modules = (torch, transformers, timm, np)
    versions = {m.__name__: m.__version__ for m in modules}
    (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
