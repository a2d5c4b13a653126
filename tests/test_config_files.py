"""Every setting of a ``config.json`` that changes numbers, compared with transformers.

`tests/goldens/make_configs.py` drew the files, and recorded the values with which
transformers builds their models.
"""

import json
import math
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from nnx_parallel.models import (
    Gemma3n,
    Gemma3nConfig,
    GPTConfig,
    YarnScaling,
    config_from_hf,
)
from nnx_parallel.models.rotary import frequencies
from nnx_parallel.weights.family import read_fields

GOLDEN = Path(__file__).parent / "goldens" / "configs.json"
FILES = json.loads(GOLDEN.read_text())["files"]
BY_TYPE = {
    kind: [*files]
    for kind, files in groupby(FILES, lambda file: file["given"]["model_type"])
}

NAMED = r"config\.json (has|stretches) |Gemma3nConfig\.rope_scaling is YarnScaling"
"""Start of the message for a setting that is not supported."""


def read(content: dict[str, Any]) -> GPTConfig | Gemma3nConfig:
    if content["model_type"].startswith("gemma3n"):
        return Gemma3nConfig(**read_fields(content, Gemma3n.families)[1])
    return config_from_hf(content)


def rotations(config: GPTConfig | Gemma3nConfig) -> list[list[float] | None]:
    """Returns each layer's frequencies, followed by the amplitude, or ``None``."""
    if isinstance(config, Gemma3nConfig):
        dim, bases = config.head_dim, (config.rope_theta, config.local_rope_theta)
        whole = frequencies(dim, bases[0], config.rope_scaling).tolist()
        of_kinds = {"global": whole, "local": frequencies(dim, bases[1]).tolist()}
        return [[*of_kinds[kind], 1.0] for kind in config.layer_kinds]
    if config.positions != "rope":
        return [None] * config.num_layers
    dim, scaling = config.rotary_dim or config.sizes["head_dim"], config.rope_scaling
    dim = dim if config.latents is None else config.latents.rotary_dim
    speeds = frequencies(dim, config.rope_theta, scaling).tolist()
    plain = [*speeds, 1.0 if scaling is None else scaling.amplitude]
    local = plain
    if config.local_rope_theta is not None:
        local = [*frequencies(dim, config.local_rope_theta).tolist(), 1.0]
    found = []
    for i, kind in enumerate(config.kinds):
        of_kind = local if kind == "local" and config.is_mixed else plain
        found.append(of_kind if config.rotated[i] else [0.0, 1.0])
    memories = config.with_memory
    return [
        None if has_memory else each
        for each, has_memory in zip(found, memories, strict=True)
    ]


def values_of_gemma3n(config: Gemma3nConfig) -> dict[str, Any]:
    count = config.num_layers
    return {
        "windows": [
            config.window + 1 if kind == "local" else None
            for kind in config.layer_kinds
        ],
        "softcap": None,
        "logit_softcap": config.logit_softcap,
        "epsilon": config.norm_epsilon,
        "tied": True,
        "num_params": config.num_params,
        "scale": 1.0,
        "widths": [*config.mlp_dim],
        "sparsity": [*config.sparsity],
        "shared": [i >= config.first_shared for i in range(count)],
        "streams": config.num_streams,
        "stream_options": [0, True],
        "clip": config.coefficient_clip,
        "laurel": config.laurel_dim,
        "layer_inputs": [config.layer_vocab_size, config.layer_input_dim],
        "activations": ["GELUTanh"],
    }


def values_of_gpt(config: GPTConfig) -> dict[str, Any]:
    fields, window = config.fields, config.window
    windows = [
        # In transformers, the window also counts the key of the query's own token.
        None if kind == "global" or window is None else window + 1
        for kind in config.kinds
    ]
    ours: dict[str, Any] = {
        "windows": windows,
        "softcap": config.softcap,
        "logit_softcap": config.logit_softcap,
        "epsilon": config.norm_epsilon,
        "tied": config.tied,
        "num_params": config.num_params,
        "scale": fields["attention_scale"],
    }
    growth = config.query_growth and [
        config.query_growth.rate,
        config.query_growth.length,
    ]
    ours |= {
        "chunks": [config.chunk if x == "local" else None for x in config.kinds],
        "late_norms": [config.late_qk_norm and x for x in config.rotated],
        "growths": [None if x else growth for x in config.rotated],
        "with_experts": [*config.with_experts],
    }
    if (experts := config.experts) is not None:
        ours["experts"] = [experts.top_k, experts.normalise]
        ours["groups"] = [experts.num_groups, experts.top_groups, experts.scale]
        ours["dense_layers"] = config.dense_layers
    if isinstance(scaling := config.rope_scaling, YarnScaling):
        ours["growth"] = [scaling.growth, scaling.original_len]
    if (multipliers := config.multipliers) is not None:
        ours["embedding_multiplier"] = multipliers.embedding
        ours["residual_multiplier"] = multipliers.residual
        ours["logits_scaling"] = multipliers.logit_divisor
    return ours | values_of_memories(config)


def values_of_memories(config: GPTConfig) -> dict[str, Any]:
    """Returns the sizes in a model in which some layers have linear attention."""
    delta, experts = config.delta_net, config.experts
    sizes = delta and [
        *(delta.num_key_heads, delta.num_value_heads),
        *(delta.key_dim, delta.value_dim, delta.conv_len),
    ]
    mixture = experts and [experts.num_experts, experts.mlp_dim, experts.shared_dim]
    return {
        "memories": [sizes if x else None for x in config.with_memory],
        "memory_epsilons": [config.norm_epsilon] * sum(config.with_memory),
        "widths": [
            mixture if x else [config.fields["mlp_dim"]] for x in config.with_experts
        ],
        "activations": ["SiLUActivation"],
    }


def differences(
    config: GPTConfig | Gemma3nConfig, resolved: dict[str, Any]
) -> dict[str, tuple]:
    """Returns our value and transformers' value of each setting that differs."""
    is_gpt = isinstance(config, GPTConfig)
    ours = values_of_gpt(config) if is_gpt else values_of_gemma3n(config)
    pairs = {name: (ours.get(name), theirs) for name, theirs in resolved.items()}
    theirs = [resolved["rotations"][i] for i in resolved["rotation_of_layers"]]
    for index, pair in enumerate(zip(rotations(config), theirs, strict=True)):
        pairs[f"rotation of layer {index}"] = pair
    del pairs["rotations"], pairs["rotation_of_layers"]
    return {name: pair for name, pair in pairs.items() if not is_close(*pair)}


def is_close(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, list):
        same_size = isinstance(ours, list | tuple) and len(ours) == len(theirs)
        return same_size and all(map(is_close, ours, theirs))
    if isinstance(theirs, float) and isinstance(ours, float | int):
        return math.isclose(ours, theirs, rel_tol=2e-6)
    return ours == theirs


@pytest.mark.parametrize("kind", BY_TYPE)
def test_settings_are_read_as_in_transformers(kind: str) -> None:
    """A file may also be refused, with the name of a setting."""
    wrong, refused = [], []
    for file in BY_TYPE[kind]:
        try:
            config = read(file["given"])
        except ValueError as error:
            refused.append(str(error))
            continue
        if found := differences(config, file["resolved"]):
            wrong.append((file["given"], found))
    assert not wrong
    assert all(re.match(NAMED, text) for text in refused), refused
    assert len(refused) < len(BY_TYPE[kind]) / 2, refused
