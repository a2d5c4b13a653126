"""The family SmolLM3, in which some layers do not rotate queries and keys."""

from dataclasses import replace
from typing import Any

from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.weights.family import Values


def _read(settings: Values) -> dict[str, Any]:
    rotated = llama.read_rotated(settings)
    types = (
        ["full_attention" if x else "sliding_attention" for x in rotated]
        if settings["use_sliding_window"]
        else ()
    )
    layers = {} if all(rotated) else {"rotated_layers": rotated}
    return llama.read(settings, types) | layers


def _write(fields: Values) -> Values:
    count, window = fields["num_layers"], fields["window"]
    rotated = fields["rotated_layers"] or (True,) * count
    return llama.write(fields) | {
        "no_rope_layers": [int(x) for x in rotated],
        "use_sliding_window": window is not None,
    }


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    marks=("rotated_layers",),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    read=_read,
    write=_write,
    presets={
        "smollm3-3b": sized(
            {"vocab_size": 128_256, "seq_len": 65_536, "norm_epsilon": 1e-6},
            "36 2048 16 4 11008",
            rope_theta=5e6,
            rotated_layers=(True, True, True, False),
            tied=True,
        ),
    },
)
FAMILIES = (SMOLLM3,)
