"""Reads and writes adapters (`layers.lora`) in the format of PEFT."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from nnx_parallel.errors import WeightsError
from nnx_parallel.layers.lora import AdaptedSource, lora
from nnx_parallel.sharding.model import ModelFn
from nnx_parallel.sharding.names import dotted
from nnx_parallel.weights.export import (
    describe_arrays,
    save_arrays,
    table_of,
    write_json,
)
from nnx_parallel.weights.family import Published
from nnx_parallel.weights.files import Described, find_folder, open_tensors, read_config
from nnx_parallel.weights.names import Entry, Rule, numbered_rules
from nnx_parallel.weights.pretrained import Pretrained

# These settings change the computation of an adapter. Only these values are supported.
_NEUTRAL = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "use_qalora": False,
    "use_bdlora": None,
    "modules_to_save": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}


class _ReadAdapters(Pretrained):
    """A source with adapters, which reads their factors too."""

    kinds = (nnx.LoRAParam,)

    def read_arrays(self, arrays: Mapping[tuple, jax.ShapeDtypeStruct]) -> dict:
        """Reads the base model's arrays and the factors."""
        base: Any = self.build
        return base.read_arrays(arrays) | super().read_arrays(arrays)


def load_adapters(
    model: ModelFn, path: str | Path, *, names: Sequence[Entry] | None = None
) -> Pretrained:
    """Returns a model with the adapters from a folder in the format of PEFT.

    Each device reads its shards of the base model and of the adapters. To train the
    adapters further, give the Trainer ``wrt=nnx.LoRAParam``. `layers.merge_lora` adds
    the adapters to the kernels.

    Args:
        model: The base model, as a function that a Trainer takes, such as
            ``GPT.from_pretrained(folder)``.
        path: The folder with ``adapter_config.json`` and ``adapter_model.safetensors``,
            or the name of a repository.
        names: The table of names of the model without adapters. ``None`` takes the
            table of the base model, which must then come from files.

    Raises:
        WeightsError: If a setting in the folder is not supported, if shapes differ, or
            if an adapter belongs to a part of a fused kernel or to an array that the
            table does not name.
    """
    folder = find_folder(path)
    config = read_config(folder, "adapter_config.json")
    for key, only in _NEUTRAL.items():
        if (found := config.get(key, only)) not in (only, None):
            raise WeightsError(
                f"adapter_config.json has {key}={found!r}, which this library does "
                f"not support: it must be {only!r}, or absent."
            )
    if names is None:
        if not isinstance(model, Pretrained):
            raise WeightsError(
                "The base model does not come from files: pass names=, its table of "
                "names."
            )
        names = model.names
    file = folder / "adapter_model.safetensors"
    given = open_tensors(file)
    entries, layers = [], []
    for kernel in (Rule.of(entry) for entry in names if entry[0].endswith(".kernel")):
        if _name(kernel, "a").replace("{}", "0") in given:
            factors = _factors(kernel)
            entries += [(r.ours, r.theirs, f"{r.left} -> {r.right}") for r in factors]
            layer = re.escape(kernel.ours.removesuffix(".kernel"))
            layers.append(layer.replace(r"\{\}", r"\d+"))
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    if config.get("use_rslora"):  # it scales by alpha / sqrt(rank)
        alpha *= math.sqrt(rank)
    if not layers:
        raise WeightsError(
            f"{str(file)!r} has no adapter for a layer of the model. The first arrays "
            f"in the file: {', '.join(sorted(given)[:4])}."
        )
    adapted: AdaptedSource = lora(
        model, targets=f"^({'|'.join(layers)})$", rank=rank, alpha=alpha
    )
    return _ReadAdapters(adapted, file, entries)


def save_adapters(
    directory: str | Path,
    model: nnx.Module,
    *,
    base: str,
    names: Sequence[Entry] | None = None,
    dtype: Any = None,
) -> None:
    """Writes only a model's adapters (`layers.lora`), in the format of PEFT.

    ``PeftModel.from_pretrained(base_model, directory)`` reads them. In a run of several
    processes, all processes must call this function, and process 0 writes.

    Args:
        directory: The folder, which must be empty or must not exist.
        model: The model, such as ``trainer.eval_model``.
        base: Folder or name of the base model. It is recorded in
            ``adapter_config.json``.
        names: The table of names of the model without adapters; ``None`` takes the
            model's table.
        dtype: Dtype that the factors are cast to; ``None`` does not cast.

    Raises:
        WeightsError: If the folder is not empty, if the model has no adapters, if an
            adapter belongs to a part of a fused kernel, or if adapters have different
            ranks or scales.
    """
    params = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    arrays = {dotted(path): leaf.get_value() for path, leaf in params}
    if not arrays:
        raise WeightsError(
            f"The {type(model).__name__} has no adapters. layers.lora adds adapters."
        )
    rules, targets = {}, set()
    kernels = {path.replace("lora_a", "kernel") for path in arrays}
    for rule in numbered_rules(table_of(model, names), kernels):
        path, _, last = rule.ours.rpartition(".")
        if last == "kernel" and f"{path}.lora_a" in arrays:
            targets.add(rule.theirs.split(".")[-2])
            rules |= {each.ours: each for each in _factors(rule)}
    if missing := sorted(arrays.keys() - rules.keys()):
        raise WeightsError(f"The table of names lacks the kernel of `{missing[0]}`.")
    modules: list[Any] = [module for _, module in nnx.iter_modules(model)]
    scales = {m.lora_scale for m in modules if hasattr(m, "lora_scale")}
    ranks = {x.shape[-1] for path, x in arrays.items() if path.endswith("lora_a")}
    if len(scales) > 1 or len(ranks) > 1:
        raise WeightsError(
            f"Adapters have ranks {sorted(ranks)} and scales {sorted(scales)}, but a "
            "folder can hold only one rank and one scale."
        )
    (rank,), (scale,) = ranks, scales
    # PEFT has task names for text models but not for image models.
    ends = ("ForCausalLM", "LMHeadModel")
    is_text = isinstance(model, Published) and model.family.architecture.endswith(ends)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_text else None,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank * scale,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }

    def write_texts(folder: Path, described: list[Described]) -> None:
        write_json(folder / "adapter_config.json", config)

    made = describe_arrays(rules, arrays, dtype)
    save_arrays(directory, *made, write_texts, stem="adapter_model")


def _factors(kernel: Rule) -> list[Rule]:
    """Returns rules for a kernel's factors. In PEFT, A is (rank, in), B (out, rank)."""
    if kernel.num_parts or kernel.given:
        raise WeightsError(
            f"`{kernel.ours}` is a part of the fused kernel {kernel.theirs!r}. PEFT "
            "can adapt only the complete kernel. Merge the adapters, and use "
            "save_pretrained."
        )
    groups = re.findall(r"\([^)]*\)|\w+", kernel.left)
    dims = kernel.right.split()
    # The input dims are the first dims of our kernel.
    ins, outs = sorted(groups, key=lambda g: dims.index(re.findall(r"\w+", g)[0]))
    path = kernel.ours.removesuffix("kernel")
    patterns = {
        "a": f"rank {ins} -> {ins.strip('()')} rank",
        "b": f"{outs} rank -> rank {outs.strip('()')}",
    }
    return [
        Rule.of((f"{path}lora_{x}", _name(kernel, x), pattern))
        for x, pattern in patterns.items()
    ]


def _name(kernel: Rule, factor: str) -> str:
    layer = kernel.theirs.removesuffix(".weight")
    return f"base_model.model.{layer}.lora_{factor.upper()}.weight"
