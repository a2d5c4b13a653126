"""Every setting of a ``config.json`` that changes numbers, compared with transformers.

`tests/goldens/make_configs.py` drew the files, and recorded the values with which
transformers builds their models.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_parallel.models import GPTConfig, YarnScaling, config_from_hf
from nnx_parallel.models.rotary import frequencies

pytestmark = pytest.mark.models

GOLDEN = Path(__file__).parent / "goldens" / "configs.json"
FILES = json.loads(GOLDEN.read_text())["files"]
BY_TYPE = {
    kind: [*files]
    for kind, files in groupby(FILES, lambda file: file["given"]["model_type"])
}


def rotations(config: GPTConfig) -> list[list[float] | None]:
    """Returns each layer's frequencies, followed by the amplitude, or ``None``."""
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
    for kind, is_rotated in zip(config.kinds, config.rotated, strict=True):
        of_kind = local if kind == "local" and config.is_mixed else plain
        found.append(of_kind if is_rotated else [0.0, 1.0])
    return found


def differences(config: GPTConfig, resolved: dict[str, Any]) -> dict[str, tuple]:
    """Returns our value and transformers' value of each setting that differs."""
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
    pairs = {name: (ours.get(name), theirs) for name, theirs in resolved.items()}
    theirs = [resolved["rotations"][i] for i in resolved["rotation_of_layers"]]
    for index, pair in enumerate(zip(rotations(config), theirs, strict=True)):
        pairs[f"rotation of layer {index}"] = pair
    del pairs["rotations"], pairs["rotation_of_layers"]
    return {name: pair for name, pair in pairs.items() if not is_close(*pair)}


def is_close(ours: Any, theirs: Any) -> bool:
    if (
        isinstance(theirs, float | list)
        and ours is not None
        and None
        not in (
            *np.ravel(np.asarray(ours, object)),
            *np.ravel(np.asarray(theirs, object)),
        )
    ):
        same_size = np.shape(ours) == np.shape(theirs)
        return same_size and np.allclose(ours, theirs, rtol=2e-6, atol=0)
    return ours == theirs


@pytest.mark.parametrize("kind", BY_TYPE)
def test_settings_are_read_as_in_transformers(kind: str) -> None:
    """A file may also be refused, with the name of a setting."""
    wrong, refused = [], []
    for file in BY_TYPE[kind]:
        try:
            config = config_from_hf(file["given"])
        except ValueError as error:
            refused.append(str(error))
            continue
        if found := differences(config, file["resolved"]):
            wrong.append((file["given"], found))
    assert not wrong
    assert all("config.json has" in text for text in refused), refused
    assert len(refused) < len(BY_TYPE[kind]) / 2, refused
