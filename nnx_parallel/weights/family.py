"""A family of published models: its ``config.json``, its names in files, its presets.

A *field* is an argument of a config of this library, such as `GPTConfig`. A *setting*
is an entry of a ``config.json`` in the format of transformers. A `Family` defines how
fields and settings follow from each other. A `Published` model has a list of families,
and reads and writes their files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flax import nnx

from nnx_parallel.weights.files import find_folder, read_config
from nnx_parallel.weights.names import Entry
from nnx_parallel.weights.pretrained import Pretrained

Values = Mapping[str, Any]
"""Fields by name, or settings by name."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that share a ``model_type`` in transformers.

    Attributes:
        model: The class of the model here, such as ``"GPT"``.
        model_type: The family's name in ``config.json``.
        architecture: The class of the model in transformers.
        parts: Values of fields in all models of the family, unless a setting differs.
        marks: Fields that are true or have a value in models of the family. A model is
            written as the family with the most marks that it has, among equals as the
            last one (`nearest`), so a new family needs marks that no other has.
        settings: For each field, the setting that has the same value.
        defaults: Values of settings that a file may leave out. A setting in
            ``settings`` without a default is required.
        valid: Valid values of settings that have no field.
        read: Function that makes the other fields from settings.
        write: Function that makes the other settings from fields.
        names: Function that makes the table of names in files from fields.
        ignored: A regex for arrays in files that the model does not need.
        presets: Fields of published models, by name of the model.
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
    ignored: str
    presets: Mapping[str, Values] = field(default_factory=dict)


def nearest(fields: Values, families: Sequence[Family]) -> Family:
    """Returns the last family with the same ``positions`` and the most marks."""
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
        ValueError: If it is another type of model, or if a setting is missing, has the
            wrong type, or has no counterpart here.
    """
    inner = content.get("text_config")
    given = dict(inner if isinstance(inner, Mapping) and inner else content)
    kind, model = given.get("model_type"), families[0].model
    kinds = [family.model_type for family in families]
    if kind not in kinds:
        known = f"one of: {', '.join(kinds)}" if kinds[1:] else repr(*kinds)
        raise ValueError(
            f"config.json has model_type {kind!r}. A {model} can be read from {known}."
        )
    family = families[kinds.index(kind)]
    for key, valid in family.valid.items():
        if (found := given.get(key)) is not None and found not in valid:
            raise ValueError(
                f"config.json has {key}={found!r}. A {model} has no counterpart of it: "
                f"it must be {' or '.join(map(repr, valid))}, or absent."
            )
    settings = {**family.defaults, **given}
    _check_counts(settings, family)
    try:
        same = {ours: settings[name] for ours, name in family.settings.items()}
        return family, {**family.parts, **same, **family.read(settings)}
    except KeyError as error:
        raise ValueError(
            f"config.json has no {error} and is of model_type {kind!r}, which needs it."
        ) from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"config.json of model_type {kind!r} has a setting of the wrong kind: "
            f"{error}."
        ) from error


_COUNTS = {
    10_000: "num_layers",
    65_536: "num_heads num_kv_heads num_experts num_local_experts num_experts_per_tok "
    "sliding_window_pattern",
    2**31 - 1: "vocab_size seq_len embed_dim head_dim mlp_dim width num_labels "
    "moe_intermediate_size sliding_window",
}
"""The largest values of fields, and of settings that have no field."""


def _check_counts(settings: Values, family: Family) -> None:
    """Checks counts and sizes before a loop uses them."""
    for most, names in _COUNTS.items():
        for ours in names.split():
            name = family.settings.get(ours, ours)
            found = settings.get(name)
            if found is not None and not (type(found) is int and 1 <= found <= most):
                raise ValueError(
                    f"config.json has {name}={found!r}. It must be a whole number from "
                    f"1 to {most:,}."
                )


_TRAINING = {"dropout", "attention", "remat", "z_loss"}
"""Fields that only training uses, so files do not have them."""


def write_settings(config: Any, families: Sequence[Family]) -> dict[str, Any]:
    """Returns the ``config.json`` of a model, for transformers 4.53 and later.

    Raises:
        ValueError: If no model of the families has this shape.
    """
    fields = config.fields
    family = nearest(fields, families)
    settings = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **{name: fields[ours] for ours, name in family.settings.items()},
        **family.write(fields),
    }
    again = type(config)(**read_fields(settings, [family])[1]).fields
    for name in fields:
        if name not in _TRAINING and fields[name] != again[name]:
            values = (x[name] for x in (fields, again))
            ours, theirs = (getattr(x, "__name__", x) for x in values)
            raise ValueError(
                f"{type(config).__name__}.{name} is {ours!r}. The nearest model of "
                f"transformers, {family.architecture}, has {theirs!r}: no model there "
                "has this shape."
            )
    return settings


class Published(nnx.Module):
    """A model that transformers has too; reads and writes folders of its weights.

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
        """Returns a model with weights from a folder in the format of transformers.

        Args:
            path: The folder, with ``config.json`` and files of safetensors; or the name
                of a repository, ``org/model``, if `huggingface_hub` is installed.
            dtype: Dtype of the parameters; see `Pretrained`.
            overrides: Fields of the model's config to set, such as ``remat``. If
                ``num_classes`` differs from the files, the head gets new parameters.

        Returns:
            An argument for ``Trainer(model=...)``. Each device will read its shards.

        Raises:
            ValueError: If the config belongs to another kind of model.
            WeightsError: If files are damaged, or config and files disagree.
        """
        folder = find_folder(path)
        family, saved = read_fields(read_config(folder), cls.families)
        config = replace(cls.config_type(**saved), **overrides)
        fields = config.fields
        build: Any = partial(cls, config)  # called with `rngs=`
        has_head = fields.get("num_classes") == saved.get("num_classes")
        return Pretrained(
            build,
            folder,
            family.names(fields),
            dtype=dtype,
            ignored=family.ignored,
            new=None if has_head else r"^head\.",
        )

    @property
    def family(self) -> Family:
        """The family that is nearest to the shape of the model."""
        return nearest(self.config.fields, self.families)

    def names_in_files(self) -> Sequence[Entry]:
        """Returns the table of the parameters' names in files of transformers."""
        return self.family.names(self.config.fields)

    def config_in_files(self) -> dict[str, Any]:
        """Returns the model's ``config.json``, in the format of transformers."""
        return write_settings(self.config, self.families)

    def constants_in_files(self) -> dict[str, np.ndarray]:
        """Returns arrays that files must have but the model does not, by name."""
        return {}


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
) -> list[Entry]:
    """Returns entries for the layers in each block of a `Stack`, with their dims.

    Args:
        theirs: Start of the names in files, with ``{}`` for the number of the block.
        layers: Names of layers in files, by our names. Experts have a second ``{}``.
        biased: Layers that have a bias, by the last part of their names; ``None`` means
            all.
        patterns: Patterns of kernel and bias, where they differ from `torch.nn.Linear`.
    """
    found = []
    for ours, name in layers.items():
        last = ours.rpartition(".")[2]
        ins, outs = _DIMS.get(last, ("", "embed"))
        left, right = (f"({x})" if " " in x else x for x in (outs, ins))
        kernel = f"{left} {right}".strip() + " -> " + f"{ins} {outs}".strip()
        weight, bias = (patterns or {}).get(last, (kernel, f"{left} -> {outs}"))
        path, name = f"blocks.layer.{ours}", f"{theirs}{name}"
        kind = ".scale" if last.endswith("norm") else ".kernel"
        is_array = last == "router" or "{}" in layers[ours]  # of a mixture of experts
        found.append((path if is_array else path + kind, f"{name}.weight", weight))
        if biased is None or last in biased:
            found.append((f"{path}.bias", f"{name}.bias", bias))
    return found
