"""What placement knows of an array: its path, shape, and the meaning of its dims."""

from __future__ import annotations

import difflib
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.errors import SpecRankError

LOGICAL_AXES = (
    "batch",
    "seq",
    "embed",
    "mlp",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "layers",
    "expert",
)
"""The names that this library's models give to their dims."""

Names = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """One array of a model as rules see it.

    Attributes:
        path: Dotted path in the model, such as ``blocks.mlp.up.kernel``.
        shape: Global shape.
        dtype: dtype of the elements.
        names: Logical (or mesh) axis of each dim, ``None`` for a dim without one;
            ``None`` as a whole for an array without names.
        kind: Class of its NNX Variable: ``Param``, ``BatchStat``, ``RngKey``.
        is_param: Whether it is a parameter (any subclass of ``nnx.Param``).
    """

    path: str
    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike = jnp.float32
    names: Names | None = None
    kind: str = "Param"
    is_param: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_stacked(self) -> bool:
        """Whether dim 0 enumerates the layers of a `Stack`."""
        return bool(self.names) and self.names[0] == "layers"


def dotted(path: tuple[Hashable, ...]) -> str:
    """A path of attribute names and indices as users write it: ``blocks.0.kernel``."""
    return ".".join(str(part) for part in path)


def variables_of(model: object) -> Iterator[tuple[tuple[Hashable, ...], nnx.Variable]]:
    """Path and Variable of every array of a model, each shared one once."""
    yield from nnx.to_flat_state(nnx.state(model))


def array_info(path: tuple[Hashable, ...], variable: nnx.Variable) -> ArrayInfo:
    """Reads shape and names of a Variable, concrete or abstract.

    Raises:
        SpecRankError: If it has more names than dims.
    """
    value = variable.get_value()
    names = variable.get_metadata().get("out_sharding")
    names = tuple(names) if names else None
    if names is not None and len(names) > value.ndim:
        raise SpecRankError(
            f"`{dotted(path)}` has shape {value.shape} but {len(names)} names {names}. "
            f"Give one name, or None, for each of its {value.ndim} dims."
        )
    if names is not None:
        names = names + (None,) * (value.ndim - len(names))
    return ArrayInfo(
        path=dotted(path),
        shape=tuple(value.shape),
        dtype=value.dtype,
        names=names,
        kind=type(variable).__name__,
        is_param=isinstance(variable, nnx.Param),
    )


def flatten_pure(tree: Mapping) -> dict[str, jax.Array]:
    """A nested dict of arrays as one flat dict by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {dotted(tuple(key.key for key in path)): leaf for path, leaf in leaves}


def suggest(name: str, known: object) -> str:
    """`` Did you mean 'x'?`` for the nearest known name, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1)  # pyright: ignore[reportArgumentType]
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def is_inexact(x: Any) -> bool:
    """Whether gradients flow through it: floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
