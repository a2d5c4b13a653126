"""Writes a model's parameters as a folder of safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from nnx_parallel.errors import WeightsError
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.tree import gather
from nnx_parallel.weights.files import (
    INDEX,
    Described,
    code_of,
    num_bytes,
    write_tensors,
)
from nnx_parallel.weights.names import Entry, Rule, groups_of, rules_of

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
)
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")


@runtime_checkable
class HasNames(Protocol):
    """A model that knows its names and its config in files of others."""

    def names_in_files(self) -> Sequence[Entry]:
        """The table of names of its parameters."""
        ...

    def config_in_files(self) -> dict[str, Any]:
        """Its ``config.json``."""
        ...


def save_pretrained(
    directory: str | Path,
    model: nnx.Module,
    *,
    names: Sequence[Entry] | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: Any = None,
    source: str | Path | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Writes a folder that transformers, vLLM and `Pretrained` read.

    The folder appears whole or not at all. With several processes all of them call
    this, and process 0 writes. An array at a time is whole on the host.

    Args:
        directory: The folder, which must not exist, or be empty.
        model: The model, such as ``trainer.model``.
        names: The table; ``None``: the model's own, as a `GPT` has one.
        config: What ``config.json`` has; ``None``: the model's own.
        dtype: What floating-point arrays are cast to; ``None``: kept.
        source: The folder that the model came from: its tokenizer and generation
            settings are copied.
        max_file_bytes: Arrays of a file, unless a single one is larger; several files
            get an index.

    Raises:
        WeightsError: If the folder has files, or the table does not fit the model.
    """
    target, own = Path(directory), cast(Any, model)
    if names is None:
        if not isinstance(own, HasNames):
            raise WeightsError(
                f"A {type(model).__name__} has no table of names of its own: pass "
                "names=[(our path, their name, pattern), ...]."
            )
        names = own.names_in_files()
        config = own.config_in_files() if config is None else config
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    arrays = {dotted(path): leaf.get_value() for path, leaf in params}
    rules = rules_of(names, {path: x.shape for path, x in arrays.items()})
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightsError(
            f"{str(target)!r} exists and is not empty: nothing is written over it. "
            "Pass another directory."
        )
    described, order = _describe(rules, arrays, dtype)
    writes = jax.process_index() == 0
    temporary = target.with_name(f".{target.name}.partial")
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    for file, contents in _files(described, max_file_bytes):
        tensors = (order[name]() for name, _, _ in contents)
        if writes:
            with (temporary / file).open("wb") as out:
                write_tensors(out, contents, tensors)
        else:  # takes part in bringing shards together
            for _ in tensors:
                pass
    if writes:
        files = _files(described, max_file_bytes)
        _write_texts(temporary, files, config, described, source)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.rename(target)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("save_pretrained")


Make = Callable[[], np.ndarray]


def _describe(
    rules: Mapping[str, Rule], arrays: Mapping[str, jax.Array], dtype: Any
) -> tuple[list[Described], dict[str, Make]]:
    """What is written, in order, and a function that brings each array together."""
    described: list[Described] = []
    makes: dict[str, Make] = {}
    for group in groups_of(rules):
        first = group[0]
        ours = [arrays[rule.ours] for rule in group]
        sizes = first.sizes(ours[0].shape)
        kept = np.dtype(ours[0].dtype)
        is_cast = dtype is not None and jnp.issubdtype(kept, jnp.floating)
        written = np.dtype(jnp.dtype(dtype)) if is_cast else kept
        code_of(written)
        for i, name in enumerate(first.names(ours[0].shape)):
            described.append((name, first.shape_of_theirs(sizes), written))
            layer = i if first.is_stacked else None
            makes[name] = _maker(first, ours, sizes, layer, written)
    return described, makes


def _maker(
    rule: Rule,
    ours: list[jax.Array],
    sizes: Mapping[str, int],
    layer: int | None,
    dtype: np.dtype,
) -> Make:
    def make() -> np.ndarray:
        parts = [gather(x if layer is None else x[layer]) for x in ours]
        return rule.to_theirs(parts, sizes).astype(dtype)

    return make


def _files(
    described: list[Described], max_bytes: int
) -> Iterator[tuple[str, list[Described]]]:
    """Names of files, and what each has: as many arrays as fit."""
    files: list[list[Described]] = [[]]
    size = 0
    for each in described:
        if files[-1] and size + num_bytes(each) > max_bytes:
            files.append([])
            size = 0
        files[-1].append(each)
        size += num_bytes(each)
    for i, own in enumerate(files):
        numbered = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        yield (numbered if len(files) > 1 else "model.safetensors"), own


def _write_texts(
    folder: Path,
    files: Iterator[tuple[str, list[Described]]],
    config: Mapping[str, Any] | None,
    described: list[Described],
    source: str | Path | None,
) -> None:
    places = {name: file for file, own in files for name, _, _ in own}
    if len(set(places.values())) > 1:
        total = {"total_size": sum(map(num_bytes, described))}
        index = {"metadata": total, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    given: dict[str, Any] = {}
    if source is not None:
        for pattern in _COPIED:
            for file in sorted(Path(source).glob(pattern)):
                if file.is_file():
                    shutil.copy(file, folder / file.name)
        theirs = Path(source) / "config.json"
        given = json.loads(theirs.read_text()) if theirs.is_file() else {}
    if config is not None:
        widest = max(described, key=num_bytes)[2]
        kept = {name: given[name] for name in _KEPT if name in given}
        # The second name is that of transformers 4.
        content = {**config, **kept, "dtype": widest.name, "torch_dtype": widest.name}
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
