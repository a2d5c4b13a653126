"""The code that a user adds to train these models: data, names, pipeline blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from nnx_parallel.layers import Stack
from nnx_parallel.sharding import TRANSFORMER_NAMES, LogicalRules, PathNames
from nnx_parallel.sharding.rules import Rules
from tests.strangers import language, scanned, sequences, vision

NUM_STEPS, ROWS = 3, 8


def make_batches() -> list[dict]:
    """Batches, one for each kind of model."""

    def batch(seed: int) -> dict:
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=(ROWS, *shape)).astype(np.float32)

        tokens = rng.integers(1, 64, size=(2, ROWS, 13), dtype=np.int32)
        return {
            "tokens": tokens[0],
            "inputs": tokens[1] * (np.arange(13) < rng.integers(4, 13, (ROWS, 1))),
            "image": normal(8, 8, 1),
            "noise": normal(8, 8, 1),
            "label": rng.integers(10, size=ROWS, dtype=np.int32),
            "time": rng.uniform(size=ROWS).astype(np.float32),
            "past": normal(12, 3),
            "future": normal(4),
            "rows": normal(scanned.WIDTH),
            "video": normal(2, 8, 8, 1),
            "patches": rng.uniform(size=(ROWS, 8)).astype(np.float32),
        }

    return [batch(seed) for seed in range(NUM_STEPS)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model in the style of public code, and what a user adds to train it.

    Attributes:
        shape: What is particular about the model's form, for the how-to.
        build: Builds the model.
        loss: Its loss.
        names: Logical axes of the dims, which tensor parallelism needs.
        rules: Rules of the strategy.
        wrt: The Variables that are trained.
        blocks: Path of the model's list of equal blocks, which a loop calls.
    """

    shape: str
    build: Callable[..., nnx.Module]
    loss: Callable[..., Any]
    names: PathNames | None = None
    rules: tuple[Rules, ...] = ()
    wrt: Any = nnx.Param
    blocks: str | None = None


def stacked(case: Case, rngs: nnx.Rngs) -> nnx.Module:
    """The model with its blocks in a `Stack`, the only entry of the list of blocks."""
    model = case.build(rngs)
    parent, name = _find(model, case.blocks)
    setattr(parent, name, nnx.List([Stack.of(getattr(parent, name))]))
    return model


def unstacked(case: Case, model: nnx.Module) -> nnx.Module:
    """The model with its blocks in a list again, as originally written."""
    parent, name = _find(model, case.blocks)
    setattr(parent, name, nnx.List(getattr(parent, name)[0].unstack()))
    return model


def _find(model: Any, path: str | None) -> tuple[Any, str]:
    assert path is not None
    *parents, name = path.split(".")
    for each in parents:
        model = getattr(model, each)
    return model, name


def adapted(rngs: nnx.Rngs) -> nnx.Module:
    return language.with_lora(language.Llama(rngs), 4, rngs)


MLP = ((r"linear1\.kernel", ("embed", "mlp")), (r"linear2\.kernel", ("mlp", "embed")))

CASES = {
    "llama": Case(
        shape="a config, a list of layers, embeddings as the head (Llama, Qwen)",
        build=language.Llama,
        loss=language.next_token_loss,
        names=TRANSFORMER_NAMES,
        blocks="layers",
    ),
    "gemma": Case(
        shape="einsums that name mesh axes, layers that return `(cache, x)` (Gemma)",
        build=language.Gemma,
        loss=language.next_token_loss,
    ),
    "lm1b": Case(
        shape="logical names, layers by `setattr`, dropout (Flax's lm1b)",
        build=language.TransformerLM,
        loss=language.next_token_loss,
        rules=(LogicalRules({"kv": None}),),
    ),
    "seq2seq": Case(
        shape="an encoder, and a decoder with cross-attention (T5, Whisper)",
        build=language.Seq2Seq,
        loss=language.translation_loss,
        names=TRANSFORMER_NAMES,
        blocks="decoder",
    ),
    "lora": Case(
        shape="`nnx.LoRA` around the layers of a built model",
        build=adapted,
        loss=language.next_token_loss,
        wrt=nnx.LoRAParam,
        names=PathNames(
            (r"(q|gate|up)_proj\.base_module\.kernel", ("embed", "mlp")),
            (r"(q|gate|up)_proj\.lora_b", (None, "mlp")),
            (r"(o|down)_proj\.base_module\.kernel", ("mlp", "embed")),
            (r"(o|down)_proj\.lora_a", ("mlp", None)),
        ),
        blocks="layers",
    ),
    "cnn": Case(
        shape="convolutions, batch statistics, dropout",
        build=vision.CNN,
        loss=vision.classification_loss,
        names=PathNames(*MLP),
    ),
    "vit": Case(
        shape="a class token, layers in a `nnx.Sequential` (ViT)",
        build=vision.VisionTransformer,
        loss=vision.classification_loss,
        names=PathNames(
            (r"mlp\.layers\.0\.kernel", ("embed", "mlp")),
            (r"mlp\.layers\.2\.kernel", ("mlp", "embed")),
            *TRANSFORMER_NAMES.pairs,
            optional=True,
        ),
        blocks="encoder.layers",
    ),
    "unet": Case(
        shape="convolutions down and up, lists of different blocks (U-Net)",
        build=vision.UNet,
        loss=vision.denoising_loss,
        names=PathNames(
            (r"conv1\.kernel", (None, None, "embed", "mlp")),
            (r"conv2\.kernel", (None, None, "mlp", "embed")),
            (r"\.time\.kernel", ("embed", "mlp")),
        ),
    ),
    "clip": Case(
        shape="two towers in a dict, a contrastive loss (CLIP)",
        build=vision.CLIP,
        loss=vision.contrastive_loss,
        names=PathNames(
            (r"layers\.0\.kernel", ("embed", "mlp")),
            (r"layers\.2\.kernel", ("mlp", "embed")),
            (r"words\.embedding", ("vocab", "embed")),
        ),
    ),
    "vae": Case(
        shape="noise in the forward pass, a loss by `sow` and `pop` (Flax's VAE)",
        build=vision.VAE,
        loss=vision.evidence_loss,
        names=PathNames(
            (r"encoder\.kernel|decoder\.layers\.0\.kernel", ("embed", "mlp")),
            (r"(mean|std)\.kernel|decoder\.layers\.2\.kernel", ("mlp", "embed")),
        ),
    ),
    "lstm": Case(
        shape="`nnx.RNN` and `nnx.Bidirectional`, their carry from `rngs`",
        build=sequences.Forecaster,
        loss=sequences.forecast_loss,
        names=PathNames(
            (r"cell\.[ih][ifgo]_?\.kernel", ("embed", "mlp")),
            (r"cell\.[ih][ifgo]_?\.bias", ("mlp",)),
        ),
    ),
    "mamba": Case(
        shape="raw parameters, an associative scan, a plain list (Mamba)",
        build=sequences.Mamba,
        loss=sequences.forecast_loss,
        names=PathNames(
            (r"(in|dt)_proj\.kernel", ("embed", "mlp")),
            (r"(x|out)_proj\.kernel", ("mlp", "embed")),
            (r"conv_weight", (None, "mlp")),
            (r"A_log", ("mlp", None)),
            (r"blocks\.\d+(\.layer)?\.D", ("mlp",)),
        ),
        blocks="blocks",
    ),
    "scan": Case(
        shape="layers of `nnx.vmap`, run by `nnx.scan` and `nnx.remat`",
        build=scanned.Rematted,
        loss=scanned.squares,
        names=PathNames(
            (r"up\.kernel", ("embed", "mlp")), (r"down\.kernel", ("mlp", "embed"))
        ),
    ),
    "critics": Case(
        shape="an ensemble of `nnx.vmap`, called by it too",
        build=scanned.Critics,
        loss=scanned.value_loss,
        names=PathNames(
            (r"layers\.0\.kernel", ("embed", "mlp")),
            (r"layers\.3\.kernel", ("mlp", "embed")),
        ),
    ),
}


def table() -> list[str]:
    """The table of cases in the how-to."""
    lines = ["| a model with | names | `Pipeline` |", "|---|---|---|"]
    for case in CASES.values():
        ending = ", one of them by a rule" if case.rules else ""
        is_known = case.names is TRANSFORMER_NAMES
        by_path = "`TRANSFORMER_NAMES`" if is_known else "`PathNames`"
        names = by_path if case.names else f"in the model{ending}"
        lines.append(f"| {case.shape} | {names} | {'yes' if case.blocks else 'no'} |")
    return lines
