"""Makes ``rope.json``: the frequencies of transformers' rotations, and their factors.

Each entry has the ``config`` of a Llama, the ``frequencies`` of its rotation by the
length of the sequence, and the ``amplitude`` of rotated queries and keys. The tests do
not run this script. To make the file again: ``pip install torch transformers``, then
``python make_rope.py``.
"""

import json
from pathlib import Path

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 10 for i in range(16)],
    "long_factor": [1 + i for i in range(16)],
    "original_max_position_embeddings": 1024,
}
ROTATIONS = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    YARN,
    YARN | {"rope_theta": 1e6, "beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"truncate": False},
    YARN | {"attention_factor": 1.5},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    YARN | {"mscale": 0.7},
    YARN | {"factor": None},
    YARN | {"factor": 0.5},
    YARN | {"original_max_position_embeddings": 8, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0},
    LONG,
    LONG | {"factor": 8.0},
    LONG | {"attention_factor": 1.5},
    LONG | {"original_max_position_embeddings": 4096},
]


def main() -> None:
    """Writes the file."""
    found = []
    for rotation in ROTATIONS:
        rotation = {"rope_theta": 10_000.0, **rotation}
        config = LlamaConfig(**SIZES, rope_parameters=dict(rotation))
        make = ROPE_INIT_FUNCTIONS[rotation["rope_type"]]
        of_each = {length: make(config, None, length) for length in (1024, 1025)}
        found.append(
            {
                "config": {**SIZES, "rope_parameters": rotation},
                "frequencies": {k: x[0].tolist() for k, x in of_each.items()},
                "amplitude": of_each[1024][1],
            }
        )
    file = Path(__file__).parent / "rope.json"
    file.write_text("\n".join(["[", ",\n".join(map(json.dumps, found)), "]", ""]))


if __name__ == "__main__":
    main()
