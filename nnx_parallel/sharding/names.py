"""An array as placement sees it: its path, its shape, and the meaning of its dims."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_parallel.errors import SpecRankError

# One of these that no strategy maps leaves its dim free. An unknown name is an error,
# so that a misspelt one does not replicate its dim silently (`Layout.axes_of`).
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
    # The defaults make a parameter of a leaf that is no Variable: FSDP splits it, and
    # strict rules must match it.
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
        """True if dim 0 enumerates the layers of a `Stack`."""
        # `Stack` puts this name in front of those of its block's dims.
        return bool(self.names) and self.names[0] == "layers"


def dotted(path: tuple[Hashable, ...]) -> str:
    """A path of attribute names and indices as users write it: ``blocks.0.kernel``."""
    return ".".join(str(part) for part in path)


def path_of(keys: tuple[Any, ...], separator: str = ".") -> str:
    """A JAX key path as users write it: ``0.mu.blocks.kernel``.

    Example:
        >>> leaves = jax.tree_util.tree_leaves_with_path({"blocks": [{"kernel": 1}]})
        >>> path_of(leaves[0][0])
        'blocks.0.kernel'
    """
    return jax.tree_util.keystr(keys, simple=True, separator=separator)


def variables_of(model: object) -> Iterator[tuple[tuple[Hashable, ...], nnx.Variable]]:
    """Path and Variable of every array of a model, each shared one once."""
    yield from nnx.to_flat_state(nnx.state(model))


def array_info(path: tuple[Hashable, ...], variable: nnx.Variable) -> ArrayInfo:
    """Reads shape and names of a Variable, concrete or abstract.

    Raises:
        SpecRankError: If it has more names than dims.
    """
    value = variable.get_value()
    # The key under which Flax keeps the names of nnx.with_partitioning.
    names = variable.get_metadata().get("out_sharding")
    names = tuple(names) if names else None
    if names is not None:
        if len(names) > value.ndim:
            raise SpecRankError(
                f"`{dotted(path)}` has shape {value.shape} but {len(names)} names "
                f"{names}. Give one name, or None, for each of its {value.ndim} dims."
            )
        # As in a PartitionSpec: dims without a name come last.
        names += (None,) * (value.ndim - len(names))
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
    return {path_of(keys): leaf for keys, leaf in leaves}


def is_inexact(x: Any) -> bool:
    """True if gradients flow through it: floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
