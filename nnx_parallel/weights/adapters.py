"""Reads and writes adapters (`layers.lora`) in the format of PEFT."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from nnx_parallel.errors import WeightsError
from nnx_parallel.layers.lora import AdaptedInBits, lora
from nnx_parallel.layers.quantised import Base
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
from nnx_parallel.weights.names import (
    DIM,
    WEIGHTS,
    Entry,
    Rule,
    find_numbers,
    numbered_rules,
    with_numbers,
)
from nnx_parallel.weights.pretrained import Pretrained

_PREFIX = "base_model.model."
"""Start of the names in PEFT's files, before the names in the base model."""

_READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
"""Settings of PEFT's LoraConfig from which each adapter's rank and scale follow."""

_WITHOUT_EFFECT = {
    # The arrays in the file show which layers have adapters.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # These settings describe where the adapters come from, and how PEFT trains them.
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping"),
    *("peft_version", "inference_mode", "lora_dropout", "runtime_config"),
    # PEFT stores factors in one order, whichever order the kernel has.
    "fan_in_fan_out",
    # PEFT uses each of these only with a certain value of another setting. That
    # setting is checked.
    *("megatron_core", "qalora_group_size", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config"),
}
"""Settings that do not change the outputs of the adapters in a file."""

_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights as they are."""


class _ReadAdapters(Pretrained):
    """A source with adapters, which reads their factors too."""

    kinds = (nnx.LoRAParam,)

    def read_arrays(self, arrays: Mapping[tuple, jax.ShapeDtypeStruct]) -> dict:
        """Reads the base model's arrays and the factors."""
        base: Any = self.build
        return base.read_arrays(arrays) | super().read_arrays(arrays)


def load_adapters(
    model: ModelFn,
    path: str | Path,
    *,
    names: Sequence[Entry] | None = None,
    base: Base | None = None,
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
        base: How the kernels of adapted layers are stored, as in `layers.lora`.

    Raises:
        WeightsError: If a setting in the folder is not supported, if shapes differ, or
            if an adapter belongs to a part of a fused kernel or to an array that the
            table does not name.
    """
    folder = find_folder(path)
    config = read_config(folder, "adapter_config.json")
    _check_settings(config)
    if names is None:
        if not isinstance(model, Pretrained):
            raise WeightsError(
                "The base model does not come from files: pass names=, its table of "
                "names."
            )
        names = model.names
    file = folder / "adapter_model.safetensors"
    given = open_tensors(file)
    entries: list[Entry] = []
    strengths: dict[tuple[int, float], list[str]] = {}
    for kernel in (Rule.of(entry) for entry in names if entry[0].endswith(".kernel")):
        layers = _adapted_layers(kernel, given)
        for layer, modules in layers.items():
            strengths.setdefault(_strength(config, layer, modules), []).append(layer)
        if layers:
            entries += _factors(kernel)
    if not strengths:
        raise WeightsError(
            f"{str(file)!r} has no adapter for a layer of the model. The first arrays "
            f"in the file: {', '.join(sorted(given)[:4])}."
        )
    adapted: Any = model
    for (rank, scale), layers in strengths.items():
        targets = f"^({'|'.join(map(re.escape, layers))})$"
        adapted = lora(
            adapted, targets=targets, rank=rank, alpha=rank * scale, base=base
        )
    return _ReadAdapters(adapted, file, entries)


def _check_settings(config: Mapping[str, Any]) -> None:
    """Checks that every setting that changes an adapter's computation is supported."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise WeightsError(
            f"adapter_config.json has peft_type={kind!r}, which this library does not "
            "support: it must be 'LORA', or absent."
        )
    start = config.get("init_lora_weights", True)
    if (start.lower() if isinstance(start, str) else start) not in _STARTS:
        raise WeightsError(
            f"adapter_config.json has init_lora_weights={start!r}, which this library "
            "does not support: with this value PEFT may change the weights of the base "
            f"model. Supported values: {', '.join(map(repr, _STARTS))}. For pissa, "
            "olora, corda and lora_ga, PEFT's save_pretrained("
            "path_initial_model_for_weight_conversion=...) writes adapters that fit "
            "the unchanged base model."
        )
    known = _READ | _WITHOUT_EFFECT | {"peft_type", "init_lora_weights"}
    for key in sorted(config.keys() - known):
        # The value "none" is the default of the setting bias.
        if config[key] and config[key] != "none":
            raise WeightsError(
                f"adapter_config.json has {key}={config[key]!r}, which this library "
                "does not support: it must be None or empty, or absent."
            )


def _adapted_layers(kernel: Rule, given: Collection[str]) -> dict[str, list[str]]:
    """Returns the adapted layers that an entry names, with their modules in PEFT.

    The keys are paths of layers in our model. A stacked layer has several modules.
    """
    name, layer = _name(kernel, "a"), kernel.ours.removesuffix(".kernel")
    found: dict[str, list[str]] = {}
    for match in filter(None, (find_numbers(name, each) for each in sorted(given))):
        modules = found.setdefault(with_numbers(layer, match), [])
        modules.append(match[0].removeprefix(_PREFIX).removesuffix(".lora_A.weight"))
    return found


def _strength(
    config: Mapping[str, Any], layer: str, modules: Sequence[str]
) -> tuple[int, float]:
    """Returns the rank and the scale that the modules of a layer share.

    Raises:
        WeightsError: If modules differ, or if a setting has the wrong type.
    """
    found = set()
    try:
        for module in modules:
            rank = _matching(config.get("rank_pattern"), module, config.get("r", 8))
            alpha = config.get("lora_alpha", 8)
            alpha = _matching(config.get("alpha_pattern"), module, alpha)
            is_rs = config.get("use_rslora")
            found.add((rank, alpha / (math.sqrt(rank) if is_rs else rank)))
    except (TypeError, AttributeError, ValueError, ArithmeticError, re.error) as error:
        raise WeightsError(
            "adapter_config.json has an invalid value for one of the settings "
            f"{', '.join(sorted(_READ))}: {error}."
        ) from error
    if len(found) > 1:
        raise WeightsError(
            f"By rank_pattern or alpha_pattern, adapter_config.json gives the layers "
            f"of `{layer}` several ranks and scales: {sorted(found)}. The layers of a "
            "stack must have the same rank and the same scale."
        )
    return found.pop()


def _matching(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches a module, as PEFT does."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


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
        WeightsError: If the folder is not empty, if the model has no adapters, or if an
            adapter belongs to a part of a fused kernel.
    """
    params = {dotted(p): x for p, x in nnx.to_flat_state(nnx.state(model, WEIGHTS))}
    arrays = {path: leaf.get_value() for path, leaf in params.items()}
    factors = {p for p, leaf in params.items() if isinstance(leaf, nnx.LoRAParam)}
    if not factors:
        raise WeightsError(
            f"The {type(model).__name__} has no adapters. layers.lora adds adapters."
        )
    rules: dict[str, Rule] = {}
    strengths: dict[str, tuple[int, float]] = {}
    found: set[str] = set()  # names of arrays of the base model
    layers: Any = {dotted(path): module for path, module in nnx.iter_modules(model)}
    arrays |= {
        f"{path}.kernel": jax.eval_shape(lambda x: x.kernel.get_value(), layer)
        for path, layer in layers.items()
        if isinstance(layer, AdaptedInBits)
    }
    for rule in numbered_rules(table_of(model, names), arrays):
        if (kernel := arrays.get(rule.ours)) is None:
            continue
        theirs = rule.names(kernel.shape).values()
        found.update(theirs)
        path, _, last = rule.ours.rpartition(".")
        if last == "kernel" and f"{path}.lora_a" in factors:
            rules |= {entry[0]: Rule.of(entry) for entry in _factors(rule)}
            strength = arrays[f"{path}.lora_a"].shape[-1], layers[path].lora_scale
            strengths |= {name.removesuffix(".weight"): strength for name in theirs}
    if missing := sorted(factors - rules.keys()):
        raise WeightsError(f"The table of names lacks the kernel of `{missing[0]}`.")
    config = _write_settings(model, base, strengths, found)

    def write_texts(folder: Path, described: list[Described]) -> None:
        write_json(folder / "adapter_config.json", config)

    made = describe_arrays(rules, arrays, dtype)
    save_arrays(directory, *made, write_texts, stem="adapter_model")


def _write_settings(
    model: nnx.Module,
    base: str,
    strengths: Mapping[str, tuple[int, float]],
    names: Collection[str],
) -> dict[str, Any]:
    """Returns the ``adapter_config.json``.

    Args:
        model: The model.
        base: Folder or name of the base model.
        strengths: Rank and scale, by name of an adapted module in PEFT.
        names: Names of all arrays of the base model.
    """
    # PEFT has task names for text models but not for image models.
    ends = ("ForCausalLM", "LMHeadModel")
    is_text = isinstance(model, Published) and model.family.architecture.endswith(ends)
    (most, _), *others = Counter(strengths.values()).most_common()
    ranks, alphas = {}, {}
    for strength, _ in others:
        group = {module for module, each in strengths.items() if each == strength}
        for end in _shortest_ends(group, strengths.keys() - group):
            ranks[end], alphas[end] = strength[0], math.prod(strength)
    # Modules of PyTorch are the starts of the names of arrays.
    modules = {start for name in names for start in _starts(name)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_text else None,
        "base_model_name_or_path": base,
        "r": most[0],
        "lora_alpha": math.prod(most),
        "rank_pattern": dict(sorted(ranks.items())),
        "alpha_pattern": dict(sorted(alphas.items())),
        "target_modules": _shortest_ends(strengths, modules - strengths.keys()),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _shortest_ends(modules: Collection[str], others: Collection[str]) -> list[str]:
    """Returns ends of names that match all ``modules`` and none of the ``others``.

    PEFT adapts each module whose name has one of these ends. For ``["dense"]``, it
    would adapt all layers of a ViT with this name, in the attention and in the MLP.
    """
    taken = {end for module in others for end in _ends(module)}
    fitting = (
        next((end for end in _ends(module) if end not in taken), module)
        for module in modules
    )
    return sorted(set(fitting))


def _ends(name: str) -> list[str]:
    """Returns the ends of a dotted name, from its last part to the complete name."""
    parts = name.split(".")
    return [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]


def _starts(name: str) -> list[str]:
    """Returns the starts of a dotted name, without the complete name."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _factors(kernel: Rule) -> list[Entry]:
    """Returns entries for a kernel's factors. In PEFT, A is (rank, in), B (out, rank).

    Raises:
        WeightsError: If the kernel is a part of an array in files, or has more than two
            dims there.
    """
    groups = DIM.findall(kernel.left)
    if kernel.num_parts or kernel.span or len(groups) != 2:
        raise WeightsError(
            f"`{kernel.ours}` is a part of the fused kernel {kernel.theirs!r}. PEFT "
            "can adapt only the complete kernel. Merge the adapters, and use "
            "save_pretrained."
        )
    dims = [(g, set(re.findall(r"\w+", g))) for g in DIM.findall(kernel.right)]
    sides = []
    for group in groups:
        names = set(re.findall(r"\w+", group))
        at = [i for i, (_, own) in enumerate(dims) if own & names]
        given = [f"{name}={size}" for name, size in kernel.given if name in names]
        ours = " ".join(dims[i][0] for i in at)
        sides.append((at, group, ours, ", " + " ".join(given) if given else ""))
    # The input dims are the first dims of our kernel.
    (_, ins, our_ins, in_sizes), (_, outs, our_outs, out_sizes) = sorted(sides)
    path = kernel.ours.removesuffix("kernel")
    patterns = {
        "a": f"rank {ins} -> {our_ins} rank{in_sizes}",
        "b": f"{outs} rank -> rank {our_outs}{out_sizes}",
    }
    return [
        (f"{path}lora_{x}", _name(kernel, x), pattern)
        for x, pattern in patterns.items()
    ]


def _name(kernel: Rule, factor: str) -> str:
    layer = kernel.theirs.removesuffix(".weight")
    return f"{_PREFIX}{layer}.lora_{factor.upper()}.weight"
