"""A family of published models: its ``config.json``, its names in files, its presets.

A *field* is an argument of a config of this library, such as `GPTConfig`. A *setting*
is an entry of a ``config.json``, as transformers writes it. A `Family` says how they
follow from each other. A `Published` model reads and writes its families.
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
"""Fields, or settings, by name."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models that have one ``model_type`` in transformers.

    Attributes:
        model: The class of the model here, such as ``"GPT"``.
        model_type: The family's name in ``config.json``.
        architecture: The class of the model in transformers.
        parts: Fields that its models share, unless a setting differs.
        marks: Fields that are set in its models; `nearest` compares them.
        settings: The setting that has the value of a field, by field.
        defaults: Values of settings that a file leaves out; without a default, a
            setting in ``settings`` is required.
        valid: Valid values of settings that have no field.
        read: Makes the other fields from settings.
        write: Makes the other settings from fields.
        names: Makes the table of names in files from fields.
        ignored: A regex for arrays in files that the model does not need.
        presets: Fields of published models, by name.
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
    """The family with the same positions and the most marks; of several, the last."""
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
    """The family of a ``config.json``, and the fields of its model.

    Raises:
        ValueError: If it is another type of model, or a setting is missing, has the
            wrong type, or has no counterpart here.
    """
    inner = content.get("text_config")
    given = dict(inner if isinstance(inner, Mapping) and inner else content)
    kind, model = given.get("model_type"), families[0].model
    kinds = [family.model_type for family in families]
    if kind not in kinds:
        known = f"one of: {', '.join(kinds)}" if kinds[1:] else repr(*kinds)
        raise ValueError(
            f"config.json has model_type {kind!r}. A {model} is made of {known}."
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
"""The largest value of fields, and of settings that have no field."""


def _check_counts(settings: Values, family: Family) -> None:
    """Checks counts and sizes, before a loop relies on one."""
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
"""Fields that only training uses: files leave them out."""


def write_settings(config: Any, families: Sequence[Family]) -> dict[str, Any]:
    """The ``config.json`` of a model, as transformers 4.53 and later read it.

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
    """A model that transformers has too: it reads and writes folders of weights.

    A subclass sets ``families`` and ``config_type``. Its config has a mapping
    ``fields``: all fields, with numbers in place of ``None``.
    """

    families: ClassVar[Sequence[Family]]
    config_type: ClassVar[Any]
    config: Any

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: Any = None, **overrides: Any
    ) -> Pretrained:
        """A model with the weights of a folder, as transformers writes it.

        Args:
            path: The folder, with ``config.json`` and files of safetensors; or the name
                of a repository, ``org/model``, where `huggingface_hub` is installed.
            dtype: Dtype of the parameters; see `Pretrained`.
            overrides: Fields of the model's config to set, such as ``remat``. With
                another ``num_classes`` the head is a new one.

        Returns:
            An argument for ``Trainer(model=...)``: each device reads its shards.

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
        """The family that is nearest to the model's shape."""
        return nearest(self.config.fields, self.families)

    def names_in_files(self) -> Sequence[Entry]:
        """The table of the parameters' names in files of transformers."""
        return self.family.names(self.config.fields)

    def config_in_files(self) -> dict[str, Any]:
        """The model's ``config.json``, as transformers reads it."""
        return write_settings(self.config, self.families)

    def constants_in_files(self) -> dict[str, np.ndarray]:
        """Arrays in files that the model lacks, by name."""
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
"""Dims of a layer's input and output, by the last name of the layer."""


def block_entries(
    theirs: str,
    layers: Mapping[str, str],
    biased: Container[str] | None = None,
    patterns: Mapping[str, tuple[str, str]] | None = None,
) -> list[Entry]:
    """Entries of the layers in each block of a `Stack`, by ``_DIMS``.

    Args:
        theirs: The beginning of their names, with ``{}`` for the number of the block.
        layers: Their name of a layer, by ours. Experts have a second ``{}``.
        biased: Last names of layers that have a bias; ``None``: all have one.
        patterns: Patterns of kernel and bias that differ from `torch.nn.Linear`.
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
        is_array = last == "router" or "{}" in layers[ours]  # in a mixture of experts
        found.append((path if is_array else path + kind, f"{name}.weight", weight))
        if biased is None or last in biased:
            found.append((f"{path}.bias", f"{name}.bias", bias))
    return found
