"""Vision transformers and residual networks of timm (pytorch-image-models).

A ``config.json`` of timm has the name of an architecture, and arguments that differ
from it in ``model_args``. So this file has the arguments of the architectures that
`ViT` and `ResNet` can represent. ``pretrained_cfg`` describes the data, such as the
mean and standard deviation of images, and may have the size of images.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from nnx_parallel.models.families.resnet import (
    conv_entries,
    convolutions,
    counters,
    read_depths,
)
from nnx_parallel.models.families.vit import (
    biased_layers,
    fused,
    head_entries,
    norm_entries,
    patch_entries,
    read_images,
    scale_entries,
)
from nnx_parallel.weights.family import Family, Values, block_entries
from nnx_parallel.weights.names import Entry

_TRAINING = {
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate"),
    *("attn_drop_rate", "drop_path_rate", "drop_block_rate"),
    *("weight_init", "fix_init", "zero_init_last", "pretrained_strict", "out_indices"),
}
"""Arguments that change only training, and are ignored."""

_DYNAMIC = {"dynamic_img_size", "dynamic_img_pad"}
"""Arguments that change only the result for images of other sizes; also ignored."""

_FIXED = ("norm_epsilon", "block")
"""Parts of an architecture that no argument in ``model_args`` can change."""


def _unpack(content: Values, base: Family, known: Mapping[str, Values]) -> Values:
    """Returns the arguments of timm's model, from the architecture and the file."""
    name, model = content["architecture"], base.model
    if name not in known:
        raise ValueError(
            f"config.json has architecture={name!r} of timm, which {model} does not "
            f"support. It supports: {', '.join(known)}."
        )
    given = content.get("model_args") or {}
    data = content.get("pretrained_cfg") or content
    found: dict[str, Any] = {}
    if isinstance(size := data.get("input_size"), list | tuple) and len(size) == 3:
        found["in_chans"] = size[0]
        if data.get("fixed_input_size"):
            found["img_size"] = size[1:]
    for source in (data, content):
        if (count := source.get("num_classes")) is not None:
            found["num_classes"] = count
    if data is not content and (pool := data.get("global_pool")) is not None:
        found["global_pool"] = pool
    read = {*base.settings.values(), *base.valid, *base.defaults} - {*_FIXED}
    if unknown := sorted(given.keys() - read - _TRAINING - _DYNAMIC):
        raise ValueError(
            f"config.json has {unknown[0]}={given[unknown[0]]!r} in model_args, which "
            f"{model} does not support. Remove it if it does not change the model."
        )
    settings = {**found, **known[name], **given, "model_type": "timm"}
    pool = settings.get("global_pool", base.defaults["global_pool"])
    if content.get("global_pool", pool) != pool:
        raise ValueError(
            f"config.json has global_pool={content['global_pool']!r}, but the "
            f"architecture {name!r} with its model_args has {pool!r}. timm uses the "
            "latter. Add the right one to model_args."
        )
    return settings


def _read_count(settings: Values, name: str, least: int) -> int:
    found = settings[name]
    if type(found) is not int or not least <= found <= 2**31 - 1:
        raise ValueError(
            f"config.json has {name}={found!r}. It must be a whole number from {least} "
            f"to {2**31 - 1:,}."
        )
    return found


def _pack(settings: Values, known: Mapping[str, Values], layers: Values) -> Values:
    """Returns the content of a ``config.json``.

    It names the architecture that has the most arguments in common with the model.
    ``layers`` are the names of the first and last layers.
    """
    args = {k: x for k, x in settings.items() if k not in _OUTER}
    always = {name: args[name] for name in ("img_size", "global_pool") if name in args}
    differing = {
        name: {k: x for k, x in args.items() if k not in ours or ours[k] != x}
        for name, ours in known.items()
    }
    side = settings.get("img_size", 224)

    def distance(name: str) -> tuple[int, bool]:
        # An argument that cannot be changed counts more than all others.
        count = sum(100 if k in _FIXED else 1 for k in differing[name])
        return count, not name.endswith(f"_{side}")

    name = min(known, key=distance)
    for fixed in differing[name].keys() & {*_FIXED}:
        raise ValueError(
            f"{fixed} is {args[fixed]!r}. No architecture of timm that this library "
            f"supports has this value; the most similar is {name!r}."
        )
    return {
        "architecture": name,
        "num_classes": settings["num_classes"],
        "num_features": settings["num_features"],
        "global_pool": settings["global_pool"],
        "model_args": {**differing[name], **always},
        "pretrained_cfg": {
            "input_size": [3, side, side],
            "fixed_input_size": "img_size" in settings,
            "num_classes": settings["num_classes"],
            **layers,
        },
    }


_OUTER = ("model_type", "architectures", "num_classes", "num_features")

_POOLS = {"class": "token", "mean": "avg", "attention": "map"}
_LAYERS = {
    "query": "attn.qkv",
    "key": "attn.qkv",
    "value": "attn.qkv",
    "query_norm": "attn.q_norm",
    "key_norm": "attn.k_norm",
    "out": "attn.proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "attention_norm": "norm1",
    "mlp_norm": "norm2",
}
_SCALES = {
    "attention_scale": "blocks.{}.ls1.gamma",
    "mlp_scale": "blocks.{}.ls2.gamma",
}
_POOL = {
    "query": "q",
    "key": "kv",
    "value": "kv",
    "out": "proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "mlp_norm": "norm",
}
_POOL_PATTERNS = {
    "query": (
        "(heads head_dim) embed -> embed heads head_dim",
        "(heads head_dim) -> heads head_dim",
    ),
    **fused("key", "value"),
}


def _vit_names(fields: Values) -> list[Entry]:
    norms = ("query_norm", "key_norm")
    layers = {k: x for k, x in _LAYERS.items() if fields["qk_norm"] or k not in norms}
    patterns = fused("query", "key", "value")
    classes = ("class_token", "cls_token", "1 1 embed -> embed")
    registers = ("registers", "reg_token", "1 n embed -> n embed")
    table = ("positions.embedding", "pos_embed", "1 seq embed -> seq embed")
    pool = block_entries("attn_pool.", _POOL, patterns=_POOL_PATTERNS, ours="pooling.")
    pool += [("pooling.probe", "attn_pool.latent", "1 1 embed -> embed")]
    return [
        *([classes] if fields["class_token"] else []),
        *([registers] if fields["num_registers"] else []),
        table,
        *patch_entries(fields, "patch_embed.proj"),
        *(norm_entries("pre_norm", "norm_pre") if fields["pre_norm"] else []),
        *block_entries("blocks.{}.", layers, biased_layers(fields), patterns),
        *scale_entries(fields, _SCALES),
        *norm_entries("norm", "fc_norm" if fields["pool_norm"] else "norm"),
        *(pool if fields["pool"] == "attention" else []),
        *head_entries(fields, "head"),
    ]


def _vit_fields(settings: Values) -> dict[str, Any]:
    pools = {theirs: ours for ours, theirs in _POOLS.items()}
    pool, norm = settings["global_pool"], settings["fc_norm"]
    qkv_bias, act = settings["qkv_bias"], settings["act_layer"]
    scale = settings["init_values"]
    return {
        "pool": pools[pool],
        "pool_norm": pool == "avg" if norm is None else norm,
        "positions": "patches" if settings["no_embed_class"] else "tokens",
        "mlp_dim": int(settings["embed_dim"] * settings["mlp_ratio"]),
        "activation": "quick_gelu" if act == "quick_gelu" else "gelu",
        "exact_gelu": act == "gelu",
        "qkv_bias": qkv_bias,
        "key_bias": qkv_bias,
        "layer_scale": float(scale) if scale else None,
        "norm_epsilon": settings["norm_epsilon"],
        "num_classes": _read_count(settings, "num_classes", 0),
        "num_registers": _read_count(settings, "reg_tokens", 0),
    }


def _read_vit(settings: Values) -> Values:
    sides = {"image_size": settings["img_size"], "patch_size": settings["patch_size"]}
    return {**_vit_fields(settings), **read_images(sides)}


def _ratio(fields: Values) -> float:
    """Returns the ratio from which timm computes the width inside an MLP."""
    width, mlp = fields["embed_dim"], fields["mlp_dim"]
    ratio = mlp / width
    return ratio if int(width * ratio) == mlp else (mlp + 0.5) / width


def _write_vit(fields: Values) -> Values:
    act = "gelu" if fields["exact_gelu"] else "gelu_tanh"
    is_mean = fields["pool"] == "mean"
    return {
        "num_classes": fields["num_classes"],
        "num_features": fields["embed_dim"],
        "img_size": fields["image_size"],
        "patch_size": fields["patch_size"],
        "global_pool": _POOLS[fields["pool"]],
        "fc_norm": None if fields["pool_norm"] == is_mean else fields["pool_norm"],
        "no_embed_class": fields["positions"] == "patches",
        "mlp_ratio": _ratio(fields),
        "act_layer": "quick_gelu" if fields["activation"] == "quick_gelu" else act,
        "qkv_bias": fields["qkv_bias"],
        "init_values": fields["layer_scale"],
        "reg_tokens": fields["num_registers"],
        "norm_epsilon": fields["norm_epsilon"],
    }


_VIT_DEFAULTS = {
    "img_size": 224,
    "patch_size": 16,
    "num_classes": 1000,
    "global_pool": "token",
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "qk_norm": False,
    "init_values": None,
    "class_token": True,
    "no_embed_class": False,
    "reg_tokens": 0,
    "pre_norm": False,
    "fc_norm": None,
    "act_layer": "gelu",
    "norm_epsilon": 1e-6,
}
_SIZES = {
    "tiny": (12, 192, 3, 768),
    "xsmall": (10, 256, 4, 1024),
    "small": (12, 384, 6, 1536),
    "medium": (12, 512, 8, 2048),
    "mediumd": (20, 512, 8, 2048),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
    "huge": (32, 1280, 16, 5120),
    "giant": (40, 1408, 16, 6144),
    "giantopt": (40, 1536, 16, 6144),
    "gigantic": (48, 1664, 16, 8192),
    "so150m": (18, 896, 14, 2304),
    "so400m": (27, 1152, 16, 4304),
    "wee": (14, 256, 4, 1280),
    "little": (14, 320, 5, 1792),
    "betwixt": (12, 640, 10, 2560),
}
_CLIP = {"pre_norm": True, "norm_epsilon": 1e-5}
_MAP = {"class_token": False, "global_pool": "map"}
_GAP = {"class_token": False, "global_pool": "avg"}
_DINO = {"init_values": 1e-5, "img_size": 518}
_REG = {**_GAP, "no_embed_class": True}
_TANH = {"act_layer": "gelu_tanh"}
_STYLES: dict[str, Values] = {
    "": {},
    "clip": _CLIP,
    "clip_quickgelu": {**_CLIP, "act_layer": "quick_gelu"},
    "dinov2": _DINO,
    "reg4_dinov2": {**_DINO, "reg_tokens": 4, "no_embed_class": True},
    "siglip": _MAP,
    "siglip_gap": {**_GAP, "fc_norm": False},
    "gap": {**_GAP, "fc_norm": False},
    "reg1_gap": {**_REG, "reg_tokens": 1, "init_values": 1e-5},
    "reg4_gap": {**_REG, "reg_tokens": 4, "init_values": 1e-5},
}
"""Arguments by the part of an architecture's name that follows the size of patches."""

_MODELS = """
tiny 16 224 384 | small 8 224 | small 16 224 384 | small 32 224 384 | base 8 224
base 16 224 384 | base 32 224 384 | large 14 224 | large 16 224 384 | large 32 224 384
huge 14 224 | giant 14 224 | gigantic 14 224
xsmall 16 clip 224 | medium 16 clip 224 | medium 32 clip 224 | base 16 clip 224 384
base 32 clip 224 256 384 448 | large 14 clip 224 336 | huge 14 clip 224 336 378
giant 14 clip 224 | gigantic 14 clip 224 378 | base 16 clip_quickgelu 224
base 32 clip_quickgelu 224 | large 14 clip_quickgelu 224 336
huge 14 clip_quickgelu 224 378 | gigantic 14 clip_quickgelu 224
small 14 dinov2 | base 14 dinov2 | large 14 dinov2
small 14 reg4_dinov2 | base 14 reg4_dinov2 | large 14 reg4_dinov2
base 16 siglip 224 256 384 512 | base 32 siglip 256 | large 16 siglip 256 384 512
so400m 14 siglip 224 378 384 | so400m 16 siglip 256 384 512 | giantopt 16 siglip 256 384
base 16 siglip_gap 224 256 384 512 | base 32 siglip_gap 256
large 16 siglip_gap 256 384 512 | so400m 14 siglip_gap 224 378 384 448 896
so400m 16 siglip_gap 256 384 512 | giantopt 16 siglip_gap 256 384
medium 16 gap 240 256 384 | base 16 gap 224 | huge 14 gap 224 | huge 16 gap 448
giant 16 gap 224 | wee 16 reg1_gap 256 | little 16 reg1_gap 256 | little 16 reg4_gap 256
medium 16 reg1_gap 256 | medium 16 reg4_gap 256 | mediumd 16 reg4_gap 256 384
betwixt 16 reg1_gap 256 | betwixt 16 reg4_gap 256 384 | base 16 reg4_gap 256
so150m 16 reg4_gap 256 384
"""
"""Sizes and patches, styles, and images of the architectures in timm."""

_OTHERS: dict[str, Values] = {
    "vit_base_patch16_gap_224": {"num_heads": 16},
    "vit_base_patch16_reg4_gap_256": {"init_values": None},
    "vit_base_patch32_siglip_256": _TANH,
    "vit_base_patch32_siglip_gap_256": _TANH,
    "vit_large_patch16_siglip_512": _TANH,
    "vit_large_patch16_siglip_gap_512": _TANH,
}
"""Arguments of architectures that differ from their size and style."""

_STARTS: dict[str, Values] = {
    "vit_medium_patch16_gap": {"qkv_bias": False, "init_values": 1e-6},
    "vit_so150m_patch16_reg4_gap": {
        "no_embed_class": False,
        "init_values": None,
        "fc_norm": False,
    },
    "vit_so400m_patch16": _TANH,
    "vit_giantopt": _TANH,
}
"""The same, by the start of the name."""


def _architectures() -> Iterator[tuple[str, dict[str, Any]]]:
    for model in _MODELS.strip().replace("\n", " | ").split(" | "):
        size, patch, *others = model.split()
        style = "" if others[0].isdigit() else others.pop(0)
        depth, width, heads, mlp = _SIZES[size]
        for image in others or [""]:
            parts = [f"vit_{size}_patch{patch}", style, image]
            name = "_".join(filter(None, parts))
            found = {
                **_VIT_DEFAULTS,
                "embed_dim": width,
                "depth": depth,
                "num_heads": heads,
                "mlp_ratio": _ratio({"embed_dim": width, "mlp_dim": mlp}),
                "patch_size": int(patch),
                **({"img_size": int(image)} if image else {}),
                **_STYLES[style],
                **_OTHERS.get(name, {}),
            }
            for start, args in _STARTS.items():
                found |= args if name.startswith(start) else {}
            yield name, found


_VITS = dict(_architectures())
# timm gives sizes of images only in `pretrained_cfg`, and its default is 224.
_VIT_ARGS = {
    name: {k: x for k, x in args.items() if k not in ("img_size", "num_classes")}
    for name, args in _VITS.items()
}
_VIT_FIRST_AND_LAST = {"first_conv": "patch_embed.proj", "classifier": "head"}
_VIT_SETTINGS = {
    "num_layers": "depth",
    "embed_dim": "embed_dim",
    "num_heads": "num_heads",
    "class_token": "class_token",
    "pre_norm": "pre_norm",
    "qk_norm": "qk_norm",
}

VIT = Family(
    model="ViT",
    model_type="timm",
    architecture="VisionTransformer",
    parts={"positions": "patches"},
    settings=_VIT_SETTINGS,
    defaults=_VIT_DEFAULTS,
    valid={
        "in_chans": (3,),
        "global_pool": ("token", "avg", "map"),
        "act_layer": ("gelu", "gelu_tanh", "quick_gelu"),
        "norm_epsilon": (1e-5, 1e-6),
        "pos_embed": ("learn",),
        "final_norm": (True,),
        "proj_bias": (True,),
        "scale_attn_norm": (False,),
        "scale_mlp_norm": (False,),
        "pool_include_prefix": (False,),
        "use_naflex": (False,),
    },
    read=_read_vit,
    write=_write_vit,
    names=_vit_names,
    part="vision_config",
    unpack=lambda content: _unpack(content, VIT, _VIT_ARGS),
    pack=lambda settings: _pack(settings, _VIT_ARGS, _VIT_FIRST_AND_LAST),
    prefix="",
    ignored=r"(?!)",  # nothing
    presets={
        name: {**_read_vit(args), **{k: args[x] for k, x in _VIT_SETTINGS.items()}}
        for name, args in _VITS.items()
    },
)

_DEPTHS = {
    "resnet18": ("basic", (2, 2, 2, 2)),
    "resnet34": ("basic", (3, 4, 6, 3)),
    "resnet26": ("bottleneck", (2, 2, 2, 2)),
    "resnet50": ("bottleneck", (3, 4, 6, 3)),
    "resnet101": ("bottleneck", (3, 4, 23, 3)),
    "resnet152": ("bottleneck", (3, 8, 36, 3)),
    "resnet200": ("bottleneck", (3, 24, 36, 3)),
}
_RESNET_DEFAULTS = {
    "global_pool": "avg",
    "num_classes": 1000,
    "channels": (64, 128, 256, 512),
    "layers": (),
}
RESNETS = {
    name: {"block": block, "layers": depths}
    for name, (block, depths) in _DEPTHS.items()
}
"""Arguments of the supported residual networks, by architecture."""

_WIDTH = 64


def _resnet_convs(fields: Values) -> Iterator[tuple[str, str, str]]:
    yield "stem", "conv1", "bn1"
    names = [f"conv{i}" for i in (1, 2, 3)]
    block = "layer{next}.{layer}."
    for ours, conv in convolutions(fields, block, "downsample.0", names):
        start, _, last = conv.rpartition(".")
        norm = f"{start}.1" if last == "0" else f"{start}.{last.replace('conv', 'bn')}"
        yield ours, conv, norm


def _resnet_names(fields: Values) -> list[Entry]:
    return [
        ("head.kernel", "fc.weight", "classes into -> into classes"),
        ("head.bias", "fc.bias", "classes -> classes"),
        *conv_entries(_resnet_convs(fields)),
    ]


def _read_resnet(settings: Values) -> Values:
    depths = read_depths(settings, "layers")
    channels = [_WIDTH * 2**stage for stage in range(len(depths))]
    if list(settings["channels"])[: len(depths)] != channels:
        raise ValueError(
            f"config.json has channels={settings['channels']}. The stem of timm has "
            f"{_WIDTH} channels, and ResNet doubles them with each stage: channels "
            f"must begin with {channels}."
        )
    return {
        "stage_sizes": depths,
        "block": settings["block"],
        "num_classes": _read_count(settings, "num_classes", 1),
    }


def _write_resnet(fields: Values) -> Values:
    depths = fields["stage_sizes"]
    widest = _WIDTH * 2 ** (len(depths) - 1) * (1 if fields["block"] == "basic" else 4)
    channels = tuple(_WIDTH * 2**stage for stage in range(len(depths)))
    is_usual = len(depths) == 4
    return {
        "block": fields["block"],
        "layers": tuple(depths),
        "num_classes": fields["num_classes"],
        "num_features": widest,
        "global_pool": "avg",
        **({} if is_usual else {"channels": channels}),
    }


RESNET = Family(
    model="ResNet",
    model_type="timm",
    architecture="ResNet",
    parts={"is_small": False, "activation": jax.nn.relu, "width": _WIDTH},
    settings={},
    defaults=_RESNET_DEFAULTS,
    valid={
        "in_chans": (3,),
        "global_pool": ("avg",),
        "cardinality": (1,),
        "base_width": (64,),
        "stem_width": (64,),
        "stem_type": ("",),
        "output_stride": (32,),
        "replace_stem_pool": (False,),
        "block_reduce_first": (1,),
        "down_kernel_size": (1,),
        "avg_down": (False,),
        "act_layer": ("relu",),
        "norm_layer": ("batchnorm", "batchnorm2d"),
    },
    read=_read_resnet,
    write=_write_resnet,
    names=_resnet_names,
    constants=lambda fields: counters(_resnet_convs(fields)),
    unpack=lambda content: _unpack(content, RESNET, RESNETS),
    pack=lambda settings: _pack(
        settings, RESNETS, {"first_conv": "conv1", "classifier": "fc"}
    ),
    prefix="",
    ignored=r"\.num_batches_tracked$",
)
