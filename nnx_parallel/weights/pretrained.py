"""A model with weights from files: each device reads its shards, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from nnx_parallel.errors import WeightsError
from nnx_parallel.sharding.model import arrays_of, build_model
from nnx_parallel.sharding.names import dotted
from nnx_parallel.weights.files import Tensor, code_of, open_tensors
from nnx_parallel.weights.names import Entry, Rule, check_tensors, rules_of


class Pretrained:
    """A function from ``nnx.Rngs`` to a model whose parameters come from safetensors.

    Pass it to a Trainer, or a strategy's ``init``, as the model: each device's shards
    are then read straight from the files, under any strategy, and no process holds
    more than its shards and the slice that it is reading. Called by hand it returns the
    whole model. Parameters that ``names`` does not have are an error; Variables of
    other types start as the model makes them.

    Args:
        build: Builds the model, as a Trainer takes it.
        path: A folder of safetensors, with its index if there are several files; or a
            file.
        names: The table (`nnx_parallel.weights.names`).
        dtype: What parameters are cast to, ``"keep"`` for what each has in the files;
            ``None``: what ``build`` gives them.
        ignored: A regex, searched in the names of arrays that the model does not need.

    Raises:
        WeightsError: If files are damaged, or names or shapes do not fit: before any
            array is read. While reading: if an array has values that are not finite.

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

    def __init__(
        self,
        build: Callable[[nnx.Rngs], nnx.Module],
        path: str | Path,
        names: Sequence[Entry],
        *,
        dtype: Any = None,
        ignored: str | None = None,
    ) -> None:
        self.build, self.path, self.names = build, Path(path), tuple(names)
        self.dtype = dtype if dtype in (None, "keep") else jnp.dtype(dtype)
        self.ignored = ignored
        self.tensors = open_tensors(self.path)

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model with its weights, whole on the default device.

        Raises:
            WeightsError: If a function is traced: its program would read no file.
        """
        probe = jnp.zeros(())
        if isinstance(probe, Tracer):
            raise WeightsError(
                f"The weights of {str(self.path)!r} cannot be read while a function is "
                "traced, such as model=lambda rngs: ... of a Trainer. Pass what "
                "from_pretrained returns itself, or change the model that it builds "
                "outside of the function."
            )
        model = self.build_shapes(rngs)
        params = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
        place = jax.sharding.SingleDeviceSharding(probe.devices().pop())
        arrays = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            for path, leaf in params.items()
        }
        for path, array in self.read_arrays(arrays).items():
            params[path].set_value(array)
        return model

    def build_shapes(self, rngs: nnx.Rngs) -> nnx.Module:
        """The model with parameters of the right shapes and dtypes, not yet read."""
        model = build_model(self.build, rngs)
        shapes = {path: x.shape for path, x in _params(model).items()}
        rules = rules_of(self.names, shapes)
        check_tensors(rules, shapes, self.tensors, self.ignored)
        if self.dtype is not None:
            for path, variable in _variables(model).items():
                x = variable.get_value()
                variable.set_value(x.astype(self._dtype_of(rules[path], x.shape)))
        return model

    def _dtype_of(self, rule: Rule, shape: Sequence[int]) -> Any:
        if self.dtype != "keep":
            return self.dtype
        kinds = {self.tensors[name].dtype for name in rule.names(shape)}
        return np.result_type(*kinds)

    def read_arrays(self, arrays: Mapping[tuple, jax.ShapeDtypeStruct]) -> dict:
        """Reads the parameters among these arrays, each into its sharding, by path."""
        given = {dotted(path): path for path in arrays}
        found = {}
        for rule in map(Rule.of, self.names):
            if path := given.get(rule.ours):
                found[path] = _read(rule, self.tensors, arrays[path])
        return found


def _variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {dotted(path): leaf for path, leaf in params}


def _params(model: nnx.Module) -> dict[str, Any]:
    arrays = {dotted(path): x for path, x in arrays_of(model).items()}
    return {path: arrays[path] for path in _variables(model)}


def _read(
    rule: Rule, tensors: Mapping[str, Tensor], array: jax.ShapeDtypeStruct
) -> jax.Array:
    sizes = rule.sizes(array.shape)
    names = rule.names(array.shape)
    shards: dict[Any, np.ndarray] = {}  # of this process, each read once

    def shard(index: Any) -> np.ndarray:
        bounds = [s.indices(n)[:2] for s, n in zip(index, array.shape, strict=True)]
        key = tuple(bounds)
        if key not in shards:
            shape = [last - first for first, last in bounds]
            out = np.empty(shape, array.dtype)
            own = names[slice(*bounds[0])] if rule.is_stacked else names
            inner = tuple(index[1:] if rule.is_stacked else index)
            for i, name in enumerate(own):
                part = rule.to_ours(tensors[name].view(), sizes)[inner]
                _check_finite(name, tensors[name], part)
                _copy(part, out[i] if rule.is_stacked else out)
            shards[key] = out
        return shards[key]

    return jax.make_array_from_callback(array.shape, array.sharding, shard)


def _copy(part: np.ndarray, out: np.ndarray) -> None:
    """Copies an array, transposed ones in strips that stay in the cache.

    16 rows at a time of bfloat16 (8192, 256) take 1.5 ms, and at once 17 ms.
    """
    if part.dtype == out.dtype:  # NumPy copies bfloat16 one by one, integers not
        part, out = _bits(part), _bits(out)
    slowest = int(np.argmax(part.strides)) if part.ndim else 0
    if slowest == 0:
        out[...] = part
        return
    for start in range(0, part.shape[slowest], 16):
        rows = (slice(None),) * slowest + (slice(start, start + 16),)
        out[rows] = part[rows]


_EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000, "F64": 0x7FF0 << 48}
"""Bits that are all set where a number is infinite, or none."""


def _check_finite(name: str, tensor: Tensor, part: np.ndarray) -> None:
    exponent = _EXPONENTS.get(code_of(tensor.dtype))
    if exponent is None:
        return
    # By bits: `np.isfinite` of bfloat16 takes ten times as long.
    bits = _bits(part)
    mask = bits.dtype.type(exponent)
    if ((bits & mask) == mask).any():
        raise WeightsError(
            f"{name!r} in {str(tensor.file)!r} has values that are not finite."
        )


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")
