"""A model with weights from files, which are read into their shards."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from nnx_parallel.errors import WeightsError
from nnx_parallel.init import build_and_read
from nnx_parallel.sharding.model import arrays_of, build_model
from nnx_parallel.sharding.names import dotted
from nnx_parallel.weights.exchange import SharedReader
from nnx_parallel.weights.files import Tensor, open_tensors
from nnx_parallel.weights.names import (
    WEIGHTS,
    Entry,
    Rule,
    check_numbers,
    check_tensors,
    numbered_rules,
    own_names,
    rules_of,
)
from nnx_parallel.weights.quantised import BlockSize, join_scales
from nnx_parallel.weights.shards import Shards


class Pretrained:
    """A function from ``nnx.Rngs`` to a model with parameters from safetensors.

    Pass it as the model to a Trainer, or to a strategy's ``init``. Then the arrays are
    read into their shards, under any strategy. In a run of several processes, all
    processes together read each byte once, and exchange it. No process holds more than
    its shards and the arrays of the file that it is reading. A direct call returns the
    complete model on one device. ``names`` must have all parameters, and all statistics
    of `nnx.BatchNorm`. Variables of other types keep the model's initial values.

    Args:
        build: Function that builds the model, as for a Trainer.
        path: A folder of safetensors files, with or without an index, or a single file.
        names: The table of names; see `nnx_parallel.weights.names`. ``None`` if the
            files have the names that the model gives its arrays, as `save_safetensors`
            writes them.
        dtype: Dtype that parameters are cast to. ``"keep"`` keeps the dtype that each
            array has in the files. ``None`` takes the dtype that ``build`` gives.
        ignored: A regex for names of arrays in the files that the model does not need.
            The regex may match anywhere in the name.
        block_size: Number of rows and of columns that share a scale in arrays of FP8;
            see `nnx_parallel.weights.quantised`. ``None`` if no array has FP8.
        new: A regex for paths of the model's parameters. It may match anywhere in the
            path. Matching parameters are not read and keep the model's initial values.
            An example is a head for other classes.

    Raises:
        WeightsError: If files are damaged, or if names or shapes do not match. These
            checks come before any array is read. The error is also raised if an array
            that is read has values that are not finite.

    Example:
        >>> import tempfile
        >>> rngs = nnx.Rngs(0)
        >>> names = [("kernel", "w", "o i -> i o"), ("bias", "b", "o -> o")]
        >>> folder = Path(tempfile.mkdtemp()) / "model"
        >>> from nnx_parallel.weights import save_pretrained
        >>> save_pretrained(folder, nnx.Linear(2, 3, rngs=rngs), names=names)
        >>> model = Pretrained(lambda rngs: nnx.Linear(2, 3, rngs=rngs), folder, names)
        >>> model.tensors["w"].shape
        (3, 2)
    """

    kinds: tuple[type[nnx.Variable], ...] = WEIGHTS
    """Types of Variables that the table must name."""

    def __init__(
        self,
        build: Callable[[nnx.Rngs], nnx.Module],
        path: str | Path,
        names: Sequence[Entry] | None = None,
        *,
        dtype: Any = None,
        ignored: str | None = None,
        block_size: BlockSize | None = None,
        new: str | None = None,
    ) -> None:
        self.build, self.path = build, Path(path)
        self.new = new
        self.dtype = dtype if dtype in (None, "keep") else jnp.dtype(dtype)
        self.ignored = ignored
        self.tensors = join_scales(open_tensors(self.path), block_size)
        if names is None:
            names = own_names({name: x.shape for name, x in self.tensors.items()})
        self.names = tuple(names)

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the model with its weights, unsharded, on the default device.

        Initial values are computed only for arrays that are not in the files.

        Raises:
            WeightsError: If a function is being traced, because a traced program cannot
                read files.
        """
        probe = jnp.zeros(())
        if isinstance(probe, Tracer):
            raise WeightsError(
                f"The weights of {str(self.path)!r} cannot be read while a function is "
                "traced, such as a Trainer's model=lambda rngs: ... Pass the result of "
                "from_pretrained as model=, without a lambda, or build and change the "
                "model outside of the function."
            )
        place = jax.sharding.SingleDeviceSharding(probe.devices().pop())
        return build_and_read(self, rngs, place)

    def build_shapes(self, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the model with the right shapes and dtypes; reads no arrays."""
        model = build_model(self.build, rngs)
        variables = self._variables(model)
        arrays = {dotted(path): x for path, x in arrays_of(model).items()}
        shapes = {path: arrays[path].shape for path in variables}
        rules = rules_of(self.names, shapes)
        read = {path: rule for path, rule in rules.items() if not self._is_new(path)}
        check_numbers(read, shapes, self.tensors)
        check_tensors(read, shapes, self._wanted(rules, read, shapes), self.ignored)
        self._check_kinds(read, {path: arrays[path] for path in read})
        if self.dtype is not None:
            for path, variable in variables.items():
                x, is_param = variable.get_value(), isinstance(variable, nnx.Param)
                if path in read and (is_param or self.dtype == "keep"):
                    variable.set_value(x.astype(self._dtype_of(read[path], x.shape)))
        return model

    def _variables(self, model: nnx.Module) -> dict[str, nnx.Variable]:
        found = nnx.to_flat_state(nnx.state(model, self.kinds))
        return {dotted(path): leaf for path, leaf in found}

    def _is_new(self, path: str) -> bool:
        return self.new is not None and re.search(self.new, path) is not None

    def _wanted(
        self, rules: Mapping[str, Rule], read: Mapping[str, Rule], shapes: Mapping
    ) -> dict[str, Tensor]:
        """Returns the files' arrays, without arrays that new parameters replace."""
        names = {p: set(rule.names(shapes[p]).values()) for p, rule in rules.items()}
        used = set().union(*(names[path] for path in read))
        new = set().union(*(names[path] for path in rules.keys() - read.keys())) - used
        return {name: x for name, x in self.tensors.items() if name not in new}

    def _check_kinds(self, rules: Mapping[str, Rule], arrays: Mapping) -> None:
        """Checks that integers are not read as real numbers, and the reverse.

        Integers may be elements of a quantised array, which need scales.
        """
        for path, rule in rules.items():
            x = arrays[path]
            is_real = jnp.issubdtype(x.dtype, jnp.inexact)
            for name in rule.names(x.shape).values():
                found = self.tensors[name].value_dtype
                if jnp.issubdtype(found, jnp.inexact) != is_real:
                    raise WeightsError(
                        f"{name!r} has dtype {found} in the files, but `{path}` has "
                        f"dtype {x.dtype}. Integers are not cast to real numbers, or "
                        "real numbers to integers: write the files in the model's kind "
                        "of dtype."
                    )

    def _dtype_of(self, rule: Rule, shape: Sequence[int]) -> Any:
        if self.dtype != "keep":
            return self.dtype
        kinds = {self.tensors[name].value_dtype for name in rule.names(shape).values()}
        return np.result_type(*kinds)

    def read_arrays(self, arrays: Mapping[tuple, jax.ShapeDtypeStruct]) -> dict:
        """Reads the arrays that the table names, with the shardings of ``arrays``.

        Keys are paths. Arrays that the table does not name are left out.
        """
        given = {dotted(path): path for path in arrays}
        rules = {
            given[rule.ours]: rule
            for rule in numbered_rules(self.names, given)
            if rule.ours in given and not self._is_new(rule.ours)
        }
        return _read(rules, self.tensors, arrays)


def _read(
    rules: Mapping[tuple, Rule],
    tensors: Mapping[str, Tensor],
    arrays: Mapping[tuple, jax.ShapeDtypeStruct],
) -> dict[tuple, jax.Array]:
    """Reads an array for each rule. Parts of the same arrays are read together."""
    found: dict[tuple, jax.Array] = {}
    groups: dict[str, list[tuple]] = defaultdict(list)
    for path, rule in rules.items():
        groups[rule.theirs].append(path)
    shared: SharedReader | None = None
    for paths in groups.values():
        group = [Shards(rules[path], arrays[path]) for path in paths]
        # Every process takes the same branch: `is_fully_addressable` may differ.
        if len({x.process_index for x in group[0].sharding.device_set}) == 1:
            _read_alone(group, tensors)
        else:
            shared = shared or SharedReader(tensors)
            shared.read(group)
        found |= {p: s.assemble() for p, s in zip(paths, group, strict=True)}
    if shared is not None:
        shared.finish()
    return found


def _read_alone(group: Sequence[Shards], tensors: Mapping[str, Tensor]) -> None:
    """Fills the shards from memory maps; each array in files is read once."""
    for index, name in group[0].names.items():
        if any(shards.wants(index) for shards in group):
            elements = tensors[name].view()
            for shards in group:
                shards.fill(index, tensors[name], elements)
