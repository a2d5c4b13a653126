"""The family Granite, with factors for embeddings, outputs and logits."""

from dataclasses import dataclass, replace
from typing import Any

from nnx_parallel.models.families import llama
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.weights.family import Values


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Factors that keep activations of wide and deep models in a good range.

    Attributes:
        embedding: Factor of embeddings.
        residual: Factor of the outputs of attention and of the MLP, before they are
            added to the residual stream.
        logit_divisor: Divisor of logits.

    Raises:
        ValueError: If a value is not above 0.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logit_divisor: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(
                    f"Multipliers.{name} is {value!r}; it must be above 0."
                )


_MULTIPLIERS = {
    "embedding": "embedding_multiplier",
    "residual": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}


def _read(settings: Values) -> dict[str, Any]:
    found = {ours: settings[name] for ours, name in _MULTIPLIERS.items()}
    return llama.read(settings) | {
        "multipliers": Multipliers(**found),
        "attention_scale": settings["attention_multiplier"],
    }


def _write(fields: Values) -> dict[str, Any]:
    multipliers = fields["multipliers"]
    found = {name: getattr(multipliers, ours) for ours, name in _MULTIPLIERS.items()}
    scale = fields["attention_scale"]
    return llama.write(fields) | found | {"attention_multiplier": scale}


_GRANITE_3 = {
    "seq_len": 131_072,
    "rope_theta": 1e7,
    "norm_epsilon": 1e-5,
    "tied": True,
}


def _multipliers(logit_divisor: float) -> Multipliers:
    return Multipliers(embedding=12.0, residual=0.22, logit_divisor=logit_divisor)


GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    marks=("multipliers",),
    defaults={
        **LLAMA.defaults,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_multiplier": 1.0,
    },
    read=_read,
    write=_write,
    presets={
        "granite3.3-2b": sized(
            _GRANITE_3,
            "40 2048 32 8 8192",
            vocab_size=49_159,
            attention_scale=1 / 64,
            multipliers=_multipliers(8.0),
        ),
        "granite3.3-8b": sized(
            _GRANITE_3,
            "40 4096 32 8 12800",
            vocab_size=49_159,
            attention_scale=1 / 128,
            multipliers=_multipliers(16.0),
        ),
    },
)
FAMILIES = (GRANITE,)
