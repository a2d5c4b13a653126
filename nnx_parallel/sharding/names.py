"""The vocabulary of placement: mesh axes, logical axes of dims, and paths of arrays."""

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# If no strategy maps a name in this list, the name does not split its dim. A name that
# is not in this list must be mapped. Otherwise it is an error, so that a misspelt name
# does not silently replicate its dim (`Layout.axes_of`).
LOGICAL_AXES = (
    "batch", "seq", "embed", "mlp", "heads", "kv_heads", "head_dim", "vocab", "layers",
    "expert", "latent",
)  # fmt: skip

"""The names that this library's models give to their dims."""

# An axis that is called "sp" splits long sequences. Some libraries call sequence
# parallelism "sp", but it uses the axis "tensor".
AXIS_NAMES = {
    "pipe": ("pp", "pipeline", "stage", "stages"),
    "data": ("dp", "ddp", "replica", "replicas"),
    "fsdp": (),
    "expert": ("ep", "experts"),
    "context": ("cp", "sp", "sequence"),
    "tensor": ("tp", "mp", "mdl", "model"),
}

"""Our mesh axes, each with its usual names in the models of other libraries."""

MeshAxes = str | tuple[str, ...] | None

"""Mesh axes as users write them."""

DimAxes = tuple[tuple[str, ...], ...]

"""The mesh axes of each dim of an array: ``((), ("tensor", "fsdp"))``."""


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """The description of an array, from which rules decide where it lives.

    Attributes:
        path: Dotted path in the model, such as ``blocks.mlp.up.kernel``.
        shape: Global shape.
        dtype: dtype of the elements.
        names: Logical (or mesh) axis of each dim, ``None`` for a dim without a name.
            If no dim has a name, ``names`` is ``None``.
        kind: Class of its NNX Variable: ``Param``, ``BatchStat``, ``RngKey``.
        is_param: True for a parameter (any subclass of ``nnx.Param``).
        flops: Floating-point operations of the products with it in a forward pass, if
            the names were derived from the loss; 0 otherwise.
        splits_layers: False if the array's layers do not run in stages of a pipeline,
            or if the stages have different numbers of layers.
    """

    path: str
    shape: tuple[int, ...]
    # The defaults suit a leaf that is not a Variable: FSDP splits it, and strict rules
    # must match it.
    dtype: jax.typing.DTypeLike = jnp.float32
    names: tuple[MeshAxes, ...] | None = None
    kind: str = "Param"
    is_param: bool = True
    flops: float = 0.0
    splits_layers: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_stacked(self) -> bool:
        """True if dim 0 enumerates the layers of a `Stack`."""
        # `Stack` puts this name in front of the names of its block's dims.
        return bool(self.names) and self.names[0] == "layers"


def dotted(path: tuple[Hashable, ...]) -> str:
    """Joins attribute names and indices to a dotted path: ``blocks.0.kernel``."""
    return ".".join(map(str, path))


def path_of(keys: tuple[Any, ...], separator: str = ".") -> str:
    """Converts a JAX key path to the path that users write.

    Example:
        >>> leaves = jax.tree_util.tree_leaves_with_path({"blocks": [{"kernel": 1}]})
        >>> path_of(leaves[0][0])
        'blocks.0.kernel'
    """
    return jax.tree_util.keystr(keys, simple=True, separator=separator)


def as_tuple(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns names as a tuple, given one name, several names or ``None``."""
    return (names,) if isinstance(names, str) else tuple(names or ())
