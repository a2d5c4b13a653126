"""Writes a model's weights as a folder of safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_parallel.distributed.agreement import meet
from nnx_parallel.durable import make_directory, move, publish, sync
from nnx_parallel.errors import WeightsError, kind_of
from nnx_parallel.layers.experts.moe import RouterBias
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.tree import gather_at
from nnx_parallel.weights.family import Published
from nnx_parallel.weights.files import (
    INDEX,
    Described,
    code_of,
    num_bytes,
    read_config,
    write_tensors,
)
from nnx_parallel.weights.names import (
    WEIGHTS,
    Entry,
    Rule,
    groups_of,
    join_parts,
    own_names,
    rules_of,
)

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",
    "LICENSE*",
)
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
_LABELS = ("id2label", "label2id")  # copied if the number of labels is the same
_TIMM_LABELS = ("label_names", "label_descriptions")  # with the same condition


Make = Callable[[], np.ndarray]
"""A function that gathers an array on the host; all processes must call it."""


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
    """Writes a folder that transformers and `Pretrained` can read.

    The folder appears complete or not at all. In a run of several processes, all
    processes must call this function, and process 0 writes. The host holds only one
    complete array at a time.

    Args:
        directory: The folder, which must be empty or must not exist.
        model: The model, such as ``trainer.eval_model``.
        names: The table of names; ``None`` takes the model's table, which exists for
            models such as `GPT`.
        config: Content of ``config.json``; ``None`` takes the model's config.
        dtype: Dtype that floating-point arrays are cast to; ``None`` does not cast.
        source: The folder from which the model was read. Its tokenizer and generation
            settings are copied.
        max_file_bytes: Largest total size of the arrays in a file. A single array may
            be larger. If there are several files, an index is written too.

    Raises:
        WeightsError: If the folder is not empty, if the model has adapters, or if the
            table does not match the model.
    """
    constants: Mapping[str, np.ndarray] = {}
    if names is None and isinstance(model, Published):
        constants = model.constants_in_files()
        config = model.config_in_files() if config is None else config
    names = table_of(model, names)
    params = nnx.to_flat_state(nnx.state(model, WEIGHTS))
    if adapters := [path for path, leaf in params if isinstance(leaf, nnx.LoRAParam)]:
        raise WeightsError(
            f"The model has adapters (`{dotted(adapters[0])}`). Pass "
            "merge_lora(model), or write only the adapters with save_adapters."
        )
    arrays = {dotted(path): leaf.get_value() for path, leaf in params}
    rules = rules_of(names, {path: x.shape for path, x in arrays.items()})

    def write_texts(folder: Path, described: list[Described]) -> None:
        _write_texts(folder, config, described, source)

    made = describe_arrays(rules, arrays, dtype, _never_cast(params))
    for name, x in constants.items():
        made[0].append((name, x.shape, x.dtype))
        made[1][name] = partial(np.copy, x)
    save_arrays(directory, *made, write_texts, max_file_bytes)


def save_safetensors(path: str | Path, model: nnx.Module, *, dtype: Any = None) -> None:
    """Writes a model's weights to one file, under the names that the model gives them.

    A name is the dotted path of an array, such as ``blocks.layer.mlp.up.kernel``.
    ``Pretrained(build, path)`` reads the file onto any mesh. The file has all
    parameters, adapters too, and the statistics of `nnx.BatchNorm`. It appears complete
    or not at all. In a run of several processes, all processes must call this function,
    and process 0 writes.

    Args:
        path: The file, which must not exist.
        model: The model, such as ``trainer.eval_model``.
        dtype: Dtype that floating-point arrays are cast to; ``None`` does not cast.

    Raises:
        WeightsError: If the file exists, or if safetensors has no such dtype.

    Example:
        >>> import tempfile
        >>> from nnx_parallel.weights import Pretrained
        >>> build = lambda rngs: nnx.Linear(2, 3, rngs=rngs)
        >>> path = Path(tempfile.mkdtemp()) / "linear.safetensors"
        >>> save_safetensors(path, build(nnx.Rngs(0)))
        >>> sorted(Pretrained(build, path).tensors)
        ['bias', 'kernel']
    """
    target = Path(path)
    if os.path.lexists(target):
        raise WeightsError(f"{str(target)!r} exists. It is not overwritten.")
    params = nnx.to_flat_state(nnx.state(model, WEIGHTS))
    arrays = {dotted(path): leaf.get_value() for path, leaf in params}
    shapes = {path: x.shape for path, x in arrays.items()}
    rules = rules_of(own_names(shapes), shapes)
    described, makes = describe_arrays(rules, arrays, dtype, _never_cast(params))
    if jax.process_count() > 1:
        meet("save_safetensors")
    temporary = target.with_name(f".{target.name}.partial")
    writes = jax.process_index() == 0
    if writes:
        make_directory(target.parent)
    _write_file(temporary, described, makes, writes)
    if writes:
        sync(temporary)
        move(temporary, target)
    if jax.process_count() > 1:
        meet("save_safetensors: saved")


def table_of(model: nnx.Module, names: Sequence[Entry] | None) -> Sequence[Entry]:
    """Returns the given table of names, or the table of the model."""
    if names is not None:
        return names
    if isinstance(model, Published):
        return model.names_in_files()
    if not isinstance(model, nnx.Module):
        raise WeightsError(
            f"The model is {kind_of(model)}. It must be an nnx.Module, such as "
            "trainer.eval_model."
        )
    raise WeightsError(
        f"{type(model).__name__} has no table of names: pass names=[(our path, their "
        "name, pattern), ...]."
    )


def save_arrays(
    directory: str | Path,
    described: list[Described],
    makes: Mapping[str, Make],
    write_texts: Callable[[Path, list[Described]], None],
    max_file_bytes: int = 5 * 10**9,
    stem: str = "model",
) -> None:
    """Writes a folder on process 0; the folder appears complete or not at all.

    Args:
        directory: The folder.
        described: Name, shape and dtype of each array, in the order of writing.
        makes: By name, functions that gather the arrays.
        write_texts: Function that writes the folder's other files.
        max_file_bytes: Largest size of a file's arrays; see `save_pretrained`.
        stem: Start of the names of the files that hold arrays.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightsError(
            f"{str(target)!r} exists and is not empty. It is not overwritten: pass "
            "another directory."
        )
    if jax.process_count() > 1:
        # All processes must see an empty directory before any of them writes.
        meet(f"saving weights ({stem})")
    files = _files(described, max_file_bytes, stem)
    writes = jax.process_index() == 0
    temporary = target.with_name(f".{target.name}.partial")
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
        make_directory(temporary)
    for file, contents in files.items():
        _write_file(temporary / file, contents, makes, writes)
    if writes:
        if len(files) > 1:
            total = {"total_size": sum(map(num_bytes, described))}
            places = {name: file for file, own in files.items() for name, _, _ in own}
            index = {"metadata": total, "weight_map": places}
            write_json(temporary / INDEX, index)
        write_texts(temporary, described)
        publish(temporary, target)
    if jax.process_count() > 1:
        meet(f"weights saved ({stem})")


def _write_file(
    path: Path, contents: list[Described], makes: Mapping[str, Make], writes: bool
) -> None:
    """Writes arrays to a file; a process that does not write only helps to gather."""
    tensors = (makes[name]() for name, _, _ in contents)
    if writes:
        with path.open("wb") as out:
            write_tensors(out, contents, tensors)
    else:
        for _ in tensors:
            pass


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def _never_cast(params: Iterable[tuple[Any, nnx.Variable]]) -> set[str]:
    """Returns the paths of biases of routers: rounding would change chosen experts."""
    return {dotted(path) for path, leaf in params if isinstance(leaf, RouterBias)}


def describe_arrays(
    rules: Mapping[str, Rule],
    arrays: Mapping[str, jax.Array],
    dtype: Any,
    never_cast: Container[str] = (),
) -> tuple[list[Described], dict[str, Make]]:
    """Returns the arrays to write, in order, and functions that gather them."""
    described: list[Described] = []
    makes: dict[str, Make] = {}
    for group in groups_of(rules.values()):
        first = group[0]
        ours = [arrays[rule.ours] for rule in group]
        sizes = [rule.sizes(x.shape) for rule, x in zip(group, ours, strict=True)]
        kept = np.dtype(ours[0].dtype)
        is_cast = dtype is not None and jnp.issubdtype(kept, jnp.floating)
        is_cast &= first.ours not in never_cast
        written = np.dtype(jnp.dtype(dtype)) if is_cast else kept
        code_of(written)
        for index, name in first.names(ours[0].shape).items():
            described.append((name, first.shape_of_theirs(sizes[0]), written))
            makes[name] = _maker(group, ours, sizes, index, written)
    return described, makes


def _maker(
    rules: list[Rule],
    ours: list[jax.Array],
    sizes: list[dict[str, int]],
    index: tuple[int, ...],
    dtype: np.dtype,
) -> Make:
    def make() -> np.ndarray:
        parts = [gather_at(x, index) for x in ours]
        return join_parts(rules, parts, sizes).astype(dtype)

    return make


def _files(
    described: list[Described], max_bytes: int, stem: str
) -> dict[str, list[Described]]:
    """Returns the arrays of each file, by file name; fills the files in order."""
    files: list[list[Described]] = [[]]
    size = 0
    for each in described:
        if files[-1] and size + num_bytes(each) > max_bytes:
            files.append([])
            size = 0
        files[-1].append(each)
        size += num_bytes(each)
    if len(files) == 1:
        return {f"{stem}.safetensors": files[0]}
    return {
        f"{stem}-{i:05}-of-{len(files):05}.safetensors": own
        for i, own in enumerate(files, 1)
    }


def _write_texts(
    folder: Path,
    config: Mapping[str, Any] | None,
    described: list[Described],
    source: str | Path | None,
) -> None:
    given: dict[str, Any] = {}
    if source is not None:
        for pattern in _COPIED:
            for file in sorted(Path(source).glob(pattern)):
                if file.is_file():
                    shutil.copy(file, folder / file.name)
        if os.path.lexists(Path(source) / "config.json"):
            given = read_config(Path(source))
    if config is not None:
        widest = max(described, key=num_bytes)[2]
        kept = _kept_settings(config, given)
        # transformers 4 reads the second of these names.
        content = {**config, **kept, "dtype": widest.name, "torch_dtype": widest.name}
        write_json(folder / "config.json", content)


def _kept_settings(
    config: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns settings of the source's ``config.json`` that a new one keeps."""
    names = [*_KEPT]
    names += [n for n in _LABELS if len(given.get(n) or ()) == len(config.get(n, ()))]
    if "architecture" in config and "architecture" in given:  # both are of timm
        is_same = given.get("num_classes") == config["num_classes"]
        names += ["pretrained_cfg", *(_TIMM_LABELS if is_same else ())]
    return {name: given[name] for name in names if name in given}
