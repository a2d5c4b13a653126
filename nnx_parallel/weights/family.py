"""Families of published models: their ``config.json``, names in files, and presets.

A *field* is an argument of a config of this library, such as `GPTConfig`. A *setting*
is an entry of a ``config.json`` in the format of transformers. A `Family` defines how
to compute fields from settings and settings from fields. A `Published` model has a list
of families, and reads and writes their files.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from flax import nnx

from nnx_parallel.errors import WeightsError, suggest, warn_user
from nnx_parallel.weights.files import find_folder, read_config
from nnx_parallel.weights.names import Entry, name_at, rename_tensors
from nnx_parallel.weights.pretrained import Pretrained
from nnx_parallel.weights.quantised import read_quantization

Values = Mapping[str, Any]
"""Fields by name, or settings by name."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that share a ``model_type`` in transformers.

    Attributes:
        model: The model's class in this library, such as ``"GPT"``.
        model_type: The family's name in ``config.json``.
        architecture: The model's class in transformers.
        parts: Values of fields that all models of the family have, unless a setting
            overrides them.
        marks: Fields that are true or have a value in all models of the family. They
            choose the family of a model that was not read from files (`nearest`).
        settings: The setting that has the same value as a field, by field.
        defaults: Values of settings that a file may leave out. A setting in
            ``settings`` without a default is required.
        valid: Valid values of settings that have no field.
        read: Function that computes the other fields from settings.
        write: Function that computes the other settings from fields.
        names: Function that makes the table of names in files from fields.
        prefix: Start of the names in files, except the names of the head.
        ignored: A regex for names of arrays in files that the model does not need.
        left_out: Function that makes a regex from settings, for the names of parts in
            files that the model does not have. A warning names the parts that are left
            out.
        presets: Fields of published models, by name of the model.
        part: Name of the entry of ``config.json`` that has the settings of the model,
            if the model is a part of a larger one.
        unpack: Function that computes settings by name from the content of
            ``config.json``, if the file arranges them differently.
        pack: Function that arranges settings as in the file; the inverse of ``unpack``.
        new_head: Fields of a model that gets a head, if the files have no head.
        constants: Function that makes arrays that files must have but the model does
            not have, from fields.
    """

    model: str
    model_type: str
    architecture: str
    parts: Values
    marks: tuple[str, ...] = ()
    settings: Mapping[str, str]
    defaults: Values
    valid: Mapping[str, tuple]
    read: Callable[[Values], Values]
    write: Callable[[Values], Values]
    names: Callable[[Values], Sequence[Entry]]
    prefix: str = "model."
    ignored: str
    left_out: Callable[[Values], str] = lambda settings: ""
    presets: Mapping[str, Values] = field(default_factory=dict)
    part: str = "text_config"
    unpack: Callable[[Values], Values] = dict
    pack: Callable[[Values], Values] = dict
    new_head: Values = field(default_factory=dict)
    constants: Callable[[Values], Mapping[str, np.ndarray]] = lambda fields: {}


def family_of(config: Any, families: Sequence[Family]) -> Family:
    """Returns the family with the format in which a model is written.

    This is the family of the files from which the model was read, if it can still
    represent the model, and otherwise the `nearest` family.
    """
    fields = config.fields
    for family in families:
        if family.model_type == fields.get("family"):
            try:
                _write(config, family)
            except (ValueError, AttributeError):  # the family cannot represent a field
                break
            return family
    return nearest(fields, families)


def nearest(fields: Values, families: Sequence[Family]) -> Family:
    """Returns the family with the same ``positions`` and the most true `marks`.

    If several families have equally many true marks, the last of them is chosen. So a
    new family needs marks that no other family has, unless another family has the same
    models.
    """
    alike = [
        family
        for family in families
        if family.parts.get("positions") == fields.get("positions")
        and all(fields[mark] for mark in family.marks)
    ]
    return sorted(alike, key=lambda family: len(family.marks))[-1]


def read_fields(
    content: Values, families: Sequence[Family]
) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a ``config.json``, and the fields of its model.

    Raises:
        ValueError: If the file describes a model of another type, or if a setting is
            missing, has the wrong type, or is not supported.
    """
    given = _part_config(content, families[0].part) or content
    # A file of timm has the name of an architecture instead of a type.
    is_timm = "model_type" not in given and "architecture" in given
    kind, model = "timm" if is_timm else given.get("model_type"), families[0].model
    kinds = [family.model_type for family in families]
    if kind not in kinds:
        known = f"one of: {', '.join(kinds)}" if kinds[1:] else repr(*kinds)
        raise ValueError(
            f"config.json has model_type {kind!r}. {model} can read only {known}."
        )
    family = families[kinds.index(kind)]
    read_quantization(content)
    given = family.unpack(given)
    for key, valid in family.valid.items():
        if (found := given.get(key)) is not None and found not in valid:
            raise ValueError(
                f"config.json has {key}={found!r}, which {model} does not support: it "
                f"must be {' or '.join(map(repr, valid))}, or absent."
            )
    settings = {**family.defaults, **given}
    _check_counts(settings, family)
    try:
        same = {ours: settings[name] for ours, name in family.settings.items()}
        return family, {**family.parts, **same, **family.read(settings)}
    except KeyError as error:
        raise ValueError(
            f"config.json has no {error}, but its model_type {kind!r} needs it."
        ) from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"config.json of model_type {kind!r} has a setting with a wrong type: "
            f"{error}."
        ) from error


_PARTS = {"text_config": "language model", "vision_config": "vision model"}
"""Parts of larger models, by the name of their settings in ``config.json``."""

_OUTER = {
    "text_config": ("tie_word_embeddings",),
    "vision_config": ("architectures", "id2label", "num_labels"),
}
"""Settings of a part that are outside of its entry in ``config.json``."""


def _part_config(content: Values, part: str) -> Values | None:
    """Returns the settings of a model that is a part of another model."""
    inner = content.get(part)
    if not isinstance(inner, Mapping) or not inner:
        return None
    name = "tie_word_embeddings"
    outer = {name: content[name] for name in _OUTER[part] if name in content}
    if name in outer and inner.get(name, outer[name]) != outer[name]:
        raise ValueError(
            f"config.json has {name}={outer[name]!r}, but its {part} has "
            f"{inner[name]!r}. Remove the one that is wrong."
        )
    return {**inner, **outer}


_COUNTS = {
    10_000: "num_layers",
    65_536: "num_heads num_kv_heads num_experts num_local_experts num_experts_per_tok "
    "n_routed_experts n_shared_experts n_group topk_group sliding_window_pattern "
    "interleave_moe_layer_step no_rope_layer_interval full_attention_interval "
    "decoder_sparse_step",
    2**31 - 1: "vocab_size seq_len embed_dim head_dim mlp_dim width num_labels "
    "moe_intermediate_size sliding_window attention_chunk_size floor_scale "
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
}
"""The largest valid value of some fields, and of some settings that have no field."""


def _check_counts(settings: Values, family: Family) -> None:
    """Checks counts and sizes, because code that follows loops over them."""
    for most, names in _COUNTS.items():
        for ours in names.split():
            name = family.settings.get(ours, ours)
            found = settings.get(name)
            if found is not None and not (type(found) is int and 1 <= found <= most):
                raise ValueError(
                    f"config.json has {name}={found!r}. It must be a whole number from "
                    f"1 to {most:,}."
                )


_UNCHECKED = {"dropout", "attention", "remat", "z_loss", "family"}
"""Fields that files do not store: the family, and fields that only training uses."""


def write_settings(config: Any, families: Sequence[Family]) -> dict[str, Any]:
    """Returns the ``config.json`` of a model, for transformers 4.53 and later.

    Raises:
        ValueError: If the model has a field that no family can represent.
    """
    return _write(config, family_of(config, families))


def _write(config: Any, family: Family) -> dict[str, Any]:
    fields = config.fields
    settings = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **{name: fields[ours] for ours, name in family.settings.items()},
        **family.write(fields),
    }
    packed = dict(family.pack(settings))
    again = type(config)(**read_fields(packed, [family])[1]).fields
    for name in fields:
        if name not in _UNCHECKED and fields[name] != again[name]:
            values = (x[name] for x in (fields, again))
            ours, theirs = (getattr(x, "__name__", x) for x in values)
            raise ValueError(
                f"{type(config).__name__}.{name} is {ours!r}. The most similar model "
                f"in {_library(family)}, {family.architecture}, has {theirs!r}. No "
                "model there matches this config."
            )
    return packed


def _library(family: Family) -> str:
    return "timm" if family.model_type == "timm" else "transformers"


class Published(nnx.Module):
    """A model that also exists in transformers or timm; reads and writes its folders.

    A subclass sets ``families`` and ``config_type``. Its config has a property
    ``fields``: a mapping of all fields, with numbers instead of ``None``.
    """

    families: ClassVar[Sequence[Family]]
    config_type: ClassVar[Any]
    config: Any

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: Any = None, **overrides: Any
    ) -> Pretrained:
        """Returns a model with weights from a folder of transformers or of timm.

        Args:
            path: The folder with ``config.json`` and safetensors files, or the name of
                a repository, ``org/model``, if `huggingface_hub` is installed.
            dtype: Dtype of the parameters; see `Pretrained`.
            overrides: Fields of the model's config to set, such as ``remat``. If
                ``num_classes`` differs from the files, or if the files have no head,
                the head gets new parameters.

        Returns:
            A function for ``Trainer(model=...)``. Each device will read its shards.

        Raises:
            ValueError: If the config belongs to another type of model, or has a setting
                that is not supported.
            WeightsError: If files are damaged, or if config and files disagree.

        Warns:
            UserWarning: If the folder has parts that the model does not have. They are
                left out: the other parts of a larger model, such as a model of text and
                images, or layers that predict further tokens.
        """
        folder = find_folder(path)
        content = read_config(folder)
        family, read = read_fields(content, cls.families)
        base = cls.config_type(**read)
        saved = base.fields
        if overrides.get("num_classes") and not saved.get("num_classes"):
            overrides = {**family.new_head, **overrides}
        config = replace(base, **overrides)
        fields = config.fields
        build: Any = partial(cls, config)  # called with `rngs=`
        source = Pretrained(
            build,
            folder,
            family.names(fields),
            dtype=dtype,
            ignored=_ignored(family, saved),
            block_size=read_quantization(content),
        )
        inner = _part_config(content, family.part)
        left_out = family.left_out(inner or content)
        _rename(source, family, left_out, is_part=inner is not None)
        missing = _missing_heads(source, family)
        differs = fields.get("num_classes") != saved.get("num_classes")
        if differs or (missing and "num_classes" in overrides):
            source.new = r"^head\."
        elif missing:
            remedy = ", or pass num_classes= for a new head" * ("num_classes" in fields)
            raise WeightsError(
                f"{str(folder)!r} has no array {missing[0]!r}, so a class without a "
                f"head wrote it. Write it with {family.architecture}{remedy}."
            )
        return source

    @property
    def family(self) -> Family:
        """The family with the format in which the model is written (`family_of`)."""
        return family_of(self.config, self.families)

    def names_in_files(self) -> Sequence[Entry]:
        """Returns the table of names for files in the format of the `family`."""
        return self.family.names(self.config.fields)

    def config_in_files(self) -> dict[str, Any]:
        """Returns the model's ``config.json``, in the format of the `family`."""
        return write_settings(self.config, self.families)

    def constants_in_files(self) -> Mapping[str, np.ndarray]:
        """Returns arrays that files must have but the model does not have, by name."""
        return self.family.constants(self.config.fields)


def _ignored(family: Family, saved: Values) -> str:
    """Returns a regex for names in files that a model may leave unused.

    A model with other fields than the ``saved`` ones may have another head.
    """
    heads = [
        f"^{re.escape(theirs)}$"
        for ours, theirs, _ in family.names(saved)
        if ours.startswith(("head.", "pooling.")) and "num_classes" in saved
    ]
    return "|".join([family.ignored, *heads])


def _rename(
    source: Pretrained, family: Family, left_out: str, *, is_part: bool
) -> None:
    """Gives arrays the names of the family, and drops other parts of the model.

    ``left_out`` is a regex for names of such parts within the model that is read.
    """
    given = source.tensors
    source.tensors, start = rename_tensors(given, source.names, family.prefix)
    known = {theirs for _, theirs, _ in source.names}
    others = {
        name: name.removeprefix("model.").partition(".")[0]
        for name in given
        if is_part
        and not name.startswith(start)
        and name not in known
        and not re.search(source.ignored or family.ignored, name)
    }
    for name in source.tensors if left_out else ():
        if found := re.search(left_out, name):
            others[name] = found[0]
    if not others:
        return
    for name in others:
        del source.tensors[name]
    parts = set(others.values())
    warn_user(
        f"{str(source.path)!r} has a larger model than {family.architecture}. Only its "
        f"{_PARTS[family.part]} is read. Left out: {', '.join(sorted(parts))} "
        f"({len(others)} arrays)."
    )


def _missing_heads(source: Pretrained, family: Family) -> list[str]:
    """Returns names of the head that the files lack, if they have the other arrays."""
    names = [theirs for _, theirs, _ in source.names]
    first = next((n for n in names if n.startswith(family.prefix)), "")
    if name_at(first, (0, 0)) not in source.tensors:
        return []
    heads = [name for name in names if not name.startswith(family.prefix)]
    return [name for name in heads if name not in source.tensors]


class WithPresets(abc.ABCMeta):
    """Metaclass of configs. The error of a missing preset names the valid presets."""

    if not TYPE_CHECKING:  # a type checker must not accept every name

        def __getattr__(cls, name: str) -> Any:
            """Raises an error that says how presets are named."""
            text = f"{cls.__name__} has no attribute {name!r}."
            # `dataclass` asks for the default of each field.
            is_field = name in vars(cls).get("__annotations__", ())
            if not (is_field or name.startswith("_")):
                known = {x: y for base in cls.__mro__ for x, y in vars(base).items()}
                sizes = [x for x, y in known.items() if isinstance(y, classmethod)]
                made = ", ".join(f"{x}()" for x in sizes if x != "preset")
                text += f"{suggest(name, known)} Configs of given sizes: {made}."
                if "preset" in known:
                    text += (
                        f" Published models: {cls.__name__}.preset(NAME). The error of "
                        "a wrong NAME lists the valid names."
                    )
            raise AttributeError(text)


def find_preset(name: str, presets: Mapping[str, Values]) -> Values:
    """Returns the fields of a published model.

    Raises:
        ValueError: If no preset has this name; the error lists the names.
    """
    if name not in presets:
        raise ValueError(f"Unknown preset {name!r}. Presets: {', '.join(presets)}.")
    return presets[name]


def period_of(kinds: Sequence) -> int:
    """Returns the length of the shortest pattern that repeats to give ``kinds``.

    The length divides the number of layers.
    """
    count = len(kinds)
    lengths = (n for n in range(1, count + 1) if count % n == 0)
    return next(n for n in lengths if [*kinds] == [*kinds[:n]] * (count // n))


def alternate(tables: Sequence[Sequence[Entry]]) -> list[Entry]:
    """Returns the table of names of a model in which blocks of several kinds alternate.

    ``tables`` has one table for each block of a group. A table is written as if all
    blocks of the model had the kind of this block.
    """
    if not tables[1:]:
        return [*tables[0]]
    found: dict[str, Entry] = {}
    for i, table in enumerate(tables):
        for ours, theirs, pattern in table:
            path = ours.replace("blocks.layer.", f"blocks.layer.{i}.", 1)
            if path != ours:
                theirs = theirs.replace("{}", f"{{{i}::{len(tables)}}}", 1)
            found[path] = path, theirs, pattern
    return [*found.values()]


_DIMS = {
    "query": ("embed", "heads head_dim"),
    "key": ("embed", "kv_heads head_dim"),
    "value": ("embed", "kv_heads head_dim"),
    "out": ("heads head_dim", "embed"),
    "up": ("embed", "mlp"),
    "gate": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "router": ("embed", "expert"),
    "query_norm": ("", "head_dim"),
    "key_norm": ("", "head_dim"),
}
"""Dims of a layer's input and output, by the last part of the layer's name."""


def block_entries(
    theirs: str,
    layers: Mapping[str, str],
    biased: Container[str] | None = None,
    patterns: Mapping[str, tuple[str, str]] | None = None,
    ours: str = "blocks.layer.",
) -> list[Entry]:
    """Returns entries for the layers in each block of a `Stack`, or in a module.

    Args:
        theirs: Start of the names in files, with ``{}`` for the number of the block.
        layers: Names of layers in files, by our names. Names of experts have a second
            ``{}``.
        biased: The last parts of the names of layers that have a bias; ``None`` means
            all layers.
        patterns: Patterns of kernel and bias, by the last part of a layer's name, for
            layers that differ from `torch.nn.Linear`.
        ours: Start of our names.
    """
    found = []
    for layer, name in layers.items():
        last = layer.rpartition(".")[2]
        ins, outs = _DIMS.get(last, ("", "embed"))
        left, right = (f"({x})" if " " in x else x for x in (outs, ins))
        kernel = f"{left} {right}".strip() + " -> " + f"{ins} {outs}".strip()
        weight, bias = (patterns or {}).get(last, (kernel, f"{left} -> {outs}"))
        path, name = f"{ours}{layer}", f"{theirs}{name}"
        kind = ".scale" if last.endswith("norm") else ".kernel"
        # Routers and experts hold arrays directly, not layers that have a kernel.
        is_array = last == "router" or "{}" in layers[layer]
        found.append((path if is_array else path + kind, f"{name}.weight", weight))
        if biased is None or last in biased:
            found.append((f"{path}.bias", f"{name}.bias", bias))
    return found
