"""LoRA: adds small trained factors to the frozen kernels of linear layers.

An adapted layer has two additional parameters. The paths of all other parameters do not
change, so that weights, names and checkpoints of the base model still fit. The
exception is a base in 4 or 8 bits, in which codes and scales replace the kernel.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import new_class
from typing import Any, TypeVar, cast, get_args, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nnx_parallel.errors import ModelError
from nnx_parallel.layers.dense import Dense, matmul
from nnx_parallel.layers.quantised import (
    Base,
    QuantisedParam,
    block_dim,
    block_of,
    dequantise,
    quantise_blocks,
)
from nnx_parallel.precision import sum_dtype
from nnx_parallel.sharding.model import (
    ModelFn,
    ReadsArrays,
    abstract_model,
    arrays_of,
    build_model,
)
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import names_of
from nnx_parallel.sharding.rules import check_regex

Model = TypeVar("Model", bound=nnx.Module)

KINDS = (Dense, nnx.Linear, nnx.LinearGeneral)
"""Layers that can be adapted; their kernels are ``(*in_dims, *out_dims)``."""


class Adapted(nnx.Module):
    """The factors that an adapted layer adds to its base layer.

    Attributes:
        lora_a: ``(*in_dims, rank)``, after the dim of layers if the kernel has one.
        lora_b: ``(rank, *out_dims)``, after the same dim of layers. It starts as zeros.
        lora_scale: Factor of the product of ``lora_a`` and ``lora_b``.
    """

    kernel: Any
    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    lora_scale: float

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        """Returns the sum of the base layer's output and the factors' output."""
        layer = cast(Callable[..., Array], super().__call__)
        y = layer(x, *args, **kwargs)
        a, b = (factor[...].astype(y.dtype) for factor in (self.lora_a, self.lora_b))
        num_in, num_out = a.ndim - 1, b.ndim - 1
        axes = getattr(self, "axis", range(-num_in, 0))
        x = jnp.moveaxis(x.astype(y.dtype), tuple(axes), tuple(range(-num_in, 0)))
        in_names = getattr(self, "in_names", (None,) * num_in)
        out_names = getattr(self, "out_names", (None,) * num_out)
        # The scale multiplies the smallest array, which is (*leading, rank).
        narrow = matmul(x, a, in_names, (None,)) * self.lora_scale
        return y + matmul(narrow, b, (None,), out_names)

    def follow_names(self) -> None:
        """Gives the factors the current names of the kernel's dims."""
        names = names_of(self._stored)
        if not names:
            return
        names += (None,) * (_ndim(self._stored) - len(names))
        lead, first_out = self._split()
        of_a, of_b = (*names[:first_out], None), (*names[:lead], None)
        for factor, own in (self.lora_a, of_a), (self.lora_b, of_b + names[first_out:]):
            factor.set_metadata(out_sharding=own, eager_sharding=False)

    def delta(self) -> Array:
        """Computes the product of the factors, with the kernel's shape.

        The dtype is float32, or the kernel's dtype if it is wider.
        """
        lead, _ = self._split()
        a, b = (x.get_value() for x in (self.lora_a, self.lora_b))
        shape = (*a.shape[:-1], *b.shape[lead + 1 :])
        stacked = shape[:lead]
        # (*layers, in, rank) by (*layers, rank, out) -> (*layers, in, out)
        a = a.reshape(*stacked, -1, a.shape[-1])
        a = a.astype(sum_dtype(self._stored.get_value()))
        b = b.reshape(*stacked, b.shape[lead], -1).astype(a.dtype)
        return (self.lora_scale * (a @ b)).reshape(shape)

    def take_kernel(self) -> nnx.Param:
        """Returns the kernel as a parameter, for a layer without adapters."""
        return self.kernel

    @property
    def _stored(self) -> nnx.Variable:
        """The Variable that has the names and the number of the kernel's dims."""
        return self.kernel

    def _split(self) -> tuple[int, int]:
        """Returns the number of dims of layers, and the index of the first out dim."""
        kernel, a, b = map(_ndim, (self._stored, self.lora_a, self.lora_b))
        return a + b - kernel - 2, a - 1


class AdaptedInBits(Adapted):
    """An adapted layer whose frozen kernel is stored in 4 or 8 bits (`quantised`).

    Attributes:
        kernel_codes: Codes with the dims of the kernel; the names are the kernel's.
        kernel_scale: Bits of the scales, with an entry for each block.
        kernel_dtype: Dtype of the kernel before it was quantised.
    """

    kernel_codes: QuantisedParam
    kernel_scale: QuantisedParam
    kernel_dtype: str

    @property
    def kernel(self) -> nnx.Param:
        """The kernel in the compute dtype; it is computed at each access."""
        value = dequantise(self.kernel_codes[...], self.kernel_scale[...])
        # The factors are float32, unless a `Precision` casts them. It would cast a
        # kernel that is not quantised to the same dtype.
        cast = self.lora_a.get_value().dtype
        return nnx.Param(value.astype(self.kernel_dtype if cast == "float32" else cast))

    def take_kernel(self) -> nnx.Param:
        """Replaces codes and scales by a kernel with its former dtype and its names."""
        codes, bits = (x.get_value() for x in (self.kernel_codes, self.kernel_scale))
        restore = jax.jit(
            lambda *parts: dequantise(*parts).astype(self.kernel_dtype),
            out_shardings=codes.sharding,
        )
        kernel = nnx.Param(restore(codes, bits), **self.kernel_codes.get_metadata())
        del self.kernel_codes, self.kernel_scale, self.kernel_dtype
        return kernel

    @property
    def _stored(self) -> nnx.Variable:
        return self.kernel_codes

    def follow_names(self) -> None:
        """Gives scales and factors the current names of the kernel's dims."""
        super().follow_names()
        if names := list(names_of(self.kernel_codes)):
            codes, bits = (
                x.get_value() for x in (self.kernel_codes, self.kernel_scale)
            )
            names += [None] * (codes.ndim - len(names))
            # An axis may divide this dim, but not the number of blocks.
            names[block_dim(codes, bits)] = None
            self.kernel_scale.set_metadata(
                out_sharding=tuple(names), eager_sharding=False
            )


class _Recomputed(nnx.Module):
    """A layer whose backward pass computes the kernel again.

    Otherwise the kernels of all layers would be kept in the compute dtype.
    """

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Array:
        layer = cast(Callable[..., Array], super().__call__)
        return jax.checkpoint(lambda x: layer(x, *args, **kwargs))(x)


@dataclass(frozen=True, kw_only=True)
class AdaptedSource:
    """A function that takes rngs and builds an adapted model (`lora`)."""

    source: ModelFn
    adapt: Callable[[nnx.Module, nnx.Rngs], None]

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        """Builds the model, with weights from files if it has any, and the factors."""
        reads = isinstance(self.source, ReadsArrays)
        return self._adapted(
            self.source(rngs) if reads else build_model(self.source, rngs), rngs
        )

    def build_shapes(self, rngs: nnx.Rngs) -> nnx.Module:
        """Builds the model without reading weights from files."""
        return self._adapted(build_model(self.source, rngs), rngs)

    def _adapted(self, model: nnx.Module, rngs: nnx.Rngs) -> nnx.Module:
        self.adapt(model, rngs)
        return model

    def read_arrays(self, arrays: Mapping) -> dict:
        """Reads the arrays that the source has in files; the dict may be empty.

        A kernel that is quantised is read with the sharding of its codes, and becomes
        codes and scales before the next kernel is read. So at most one kernel of the
        model (with all its layers) is in memory in the source's dtype.
        """
        source: Any = self.source
        if not isinstance(source, ReadsArrays):
            return {}
        codes = [path for path in arrays if path[-1] == "kernel_codes"]
        kernels = arrays_of(abstract_model(self.source, nnx.Rngs(0))) if codes else {}
        pairs = {
            kernel: (path, (*path[:-1], "kernel_scale"))
            for path in codes
            # A source inside of this source may have quantised other kernels.
            if (kernel := (*path[:-1], "kernel")) in kernels
        }
        taken = {path for pair in pairs.values() for path in pair}
        found = source.read_arrays({p: x for p, x in arrays.items() if p not in taken})
        for path, pair in pairs.items():
            like = [arrays[part] for part in pair]
            x, place = kernels[path], like[0].sharding
            x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            if read := source.read_arrays({path: x}):
                found |= zip(pair, _quantise_like(read[path], *like), strict=True)
        return found


@overload
def lora(
    model: Model,
    *,
    targets: str,
    rank: int = ...,
    alpha: float | None = ...,
    base: Base | None = ...,
    rngs: nnx.Rngs | None = ...,
) -> Model: ...


@overload
def lora(
    model: ModelFn,
    *,
    targets: str,
    rank: int = ...,
    alpha: float | None = ...,
    base: Base | None = ...,
) -> AdaptedSource: ...


def lora(
    model: nnx.Module | ModelFn,
    *,
    targets: str,
    rank: int = 8,
    alpha: float | None = None,
    base: Base | None = None,
    rngs: nnx.Rngs | None = None,
) -> Any:
    r"""Adds low-rank adapters [1] to the kernels of some layers of a model.

    An adapted layer computes ``layer(x) + (alpha / rank) * (x @ A) @ B``. At first the
    adapters do not change the output, because B is zeros. Pass ``wrt=nnx.LoRAParam`` to
    the Trainer, so that only the factors A and B are trained and have optimizer state.
    The dims of the factors have the names of the kernel's dims, so that every strategy
    places them like the kernel. In a `Stack`, each layer has separate factors.

    With ``base``, the kernels of these layers are stored in few bits [2], as integers
    that are never trained: codes, and a float32 scale for each block of 64 numbers
    along a dim of the kernel (fewer if 64 does not divide the dim). In all passes, a
    layer computes its kernel from them, in float32, and casts it to the compute dtype.
    Codes and scales are the same under every strategy, and a checkpoint has them.

    Args:
        model: A model, or a function of ``nnx.Rngs`` that builds a model, as for a
            Trainer. For a model, the result is an adapted copy that shares its arrays.
            For a function, the result is a function that builds an adapted model.
        targets: A regex that is searched in the dotted path of each layer, such as
            ``r"attention\.(query|value)"``.
        rank: Width of the factors.
        alpha: Strength of the adapters. ``None``: the rank, so that
            ``alpha / rank`` is 1.
        base: ``"nf4"`` stores the kernels as 4-bit NormalFloat (4.5 bits per number),
            ``"int8"`` as integers (8.5 bits). ``None`` keeps them as they are.
        rngs: Keys for the factors, if ``model`` is a model; by default ``Rngs(0)``. A
            function gets keys when it is called.

    Raises:
        ModelError: If no layer matches, or if a matching layer cannot be adapted or
            quantised, or already has adapters.
        RuleError: If ``targets`` is not a valid regex.
        ValueError: If ``rank`` is below 1, if ``base`` is invalid, or if ``alpha`` is
            not a number.

    Example:
        >>> model = lora(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), targets="", rank=2)
        >>> model.lora_a.shape, model.lora_b.shape
        ((4, 2), (2, 6))
        >>> type(merge_lora(model)).__name__
        'Linear'

    References:
        [1] Hu et al., "LoRA", 2021, section 4, https://arxiv.org/abs/2106.09685
        [2] Dettmers et al., "QLoRA", 2023, section 3, https://arxiv.org/abs/2305.14314
    """
    check_regex("lora(targets=)", targets)
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora(rank={rank!r}): it must be an int of at least 1.")
    if base not in (None, *get_args(Base)):
        raise ValueError(f"lora(base={base!r}): it must be 'nf4', 'int8' or None.")
    if alpha is not None and not isinstance(alpha, int | float):
        raise ValueError(f"lora(alpha={alpha!r}): it must be a number, or None.")
    scale = 1.0 if alpha is None else alpha / rank

    def adapt(model: nnx.Module, rngs: nnx.Rngs) -> None:
        for path, layer in [*_find(model, targets)]:
            block = _block_of(path, layer) if base else None
            _adapt(layer, rank, scale, rngs)
            if base and block:
                _quantise_kernel(layer, base, *block)

    if not isinstance(model, nnx.Module):
        return AdaptedSource(source=model, adapt=adapt)
    # New Variables hold the same arrays, so that the given model does not change.
    copied = nnx.merge(*nnx.split(model), copy=True)
    adapt(copied, rngs or nnx.Rngs(0))
    return copied


def merge_lora(model: Model) -> Model:
    """Adds the adapters of a model to its kernels, and removes the adapters.

    The given model does not change. The result is a new model that shares all arrays
    except kernels that had adapters. These kernels keep their dtype and sharding. A
    kernel in 4 or 8 bits gets the dtype that it had before it was quantised.

    Raises:
        ModelError: If the model has no adapters.
    """
    merged = nnx.merge(*nnx.split(model), copy=True)
    layers = [m for _, m in nnx.iter_modules(merged) if isinstance(m, Adapted)]
    if not layers:
        raise ModelError(f"{type(model).__name__} has no adapters to merge.")
    for layer in layers:
        delta, kernel = layer.delta(), layer.take_kernel()
        value = kernel.get_value()
        add = jax.jit(_add_delta, out_shardings=value.sharding)
        kernel.set_value(add(value, delta))
        del layer.lora_a, layer.lora_b, layer.lora_scale
        layer.__class__ = type(layer).__bases__[-1]
        layer.kernel = kernel
    return merged


def _add_delta(kernel: Array, delta: Array) -> Array:
    return (kernel.astype(delta.dtype) + delta).astype(kernel.dtype)


def _find(model: nnx.Module, targets: str) -> Iterator[tuple[str, nnx.Module]]:
    """Yields the layers whose paths match, with their paths."""
    found = {dotted(path): module for path, module in nnx.iter_modules(model)}
    fitting = {path: m for path, m in found.items() if isinstance(m, KINDS)}
    matching = {path: m for path, m in fitting.items() if re.search(targets, path)}
    if not matching:
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise ModelError(
            f"lora(targets={targets!r}) matches no layer of {type(model).__name__} "
            f"that can be adapted ({kinds}). Layers that can be adapted: "
            f"{', '.join(fitting) or 'none'}."
        )
    for path, layer in matching.items():
        if isinstance(layer, Adapted):
            raise ModelError(
                f"`{path}` already has adapters. Merge them first, with merge_lora."
            )
        if getattr(layer, "batch_axis", None):
            raise ModelError(
                f"`{path}` has a kernel for each entry of batch_axis. lora cannot "
                "adapt such layers. Choose targets that do not match it."
            )
        yield path, layer


def _block_of(path: str, layer: Any) -> tuple[int, int]:
    """Returns the dim along which a layer's kernel has blocks, and their size."""
    kernel, (num_in, num_out) = layer.kernel.get_value(), _num_dims(layer)
    block = block_of(kernel.shape, kernel.ndim - num_in - num_out, num_in)
    if block is None or not jnp.issubdtype(kernel.dtype, jnp.floating):
        raise ModelError(
            f"`{path}` has a kernel of shape {kernel.shape} and dtype {kernel.dtype}, "
            "which lora(base=) cannot quantise. A kernel must be floating-point, and "
            "have a dim of the input or output that is a multiple of 16. Choose "
            "targets that do not match this layer."
        )
    return block


_quantise = jax.jit(quantise_blocks, static_argnums=(1, 2, 3))


def _quantise_kernel(layer: Any, base: Base, dim: int, size: int) -> None:
    """Replaces the kernel of an adapted layer by codes and scales, in place."""
    kernel = layer.kernel
    codes, bits = _quantise(value := kernel.get_value(), base, dim, size)
    del layer.kernel
    layer.__class__ = _adapted(type(layer).__bases__[-1], AdaptedInBits, _Recomputed)
    layer.kernel_codes = QuantisedParam(codes, **kernel.get_metadata())
    layer.kernel_scale = QuantisedParam(bits)
    layer.kernel_dtype = value.dtype.name
    layer.follow_names()


def _quantise_like(
    x: Array, codes: jax.ShapeDtypeStruct, bits: jax.ShapeDtypeStruct
) -> tuple[Array, Array]:
    """Quantises an array to codes and scales with known shapes and shardings."""
    places, dim = (codes.sharding, bits.sharding), block_dim(codes, bits)
    base: Base = "int8" if codes.dtype == jnp.int8 else "nf4"
    quantise = jax.jit(quantise_blocks, static_argnums=(1, 2, 3), out_shardings=places)
    return quantise(x, base, dim, x.shape[dim] // bits.shape[dim])


def _adapt(layer: Any, rank: int, scale: float, rngs: nnx.Rngs) -> None:
    """Turns a layer into an adapted layer, in place."""
    kernel = layer.kernel.get_value()
    num_in, num_out = _num_dims(layer)
    lead = kernel.ndim - num_in - num_out
    stacked, ins = kernel.shape[:lead], kernel.shape[lead : lead + num_in]
    # This is PEFT's kaiming_uniform(a=sqrt(5)): uniform within 1 / sqrt(fan_in).
    bound = math.prod(ins) ** -0.5
    shape = (*stacked, *ins, rank)
    a = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
    b = jnp.zeros((*stacked, rank, *kernel.shape[lead + num_in :]), jnp.float32)
    layer.__class__ = _adapted(type(layer), Adapted)
    layer.lora_a = nnx.LoRAParam(a, num_in_dims=num_in)
    layer.lora_b = nnx.LoRAParam(b, num_in_dims=1)
    layer.lora_scale = scale
    layer.follow_names()


def _num_dims(layer: Any) -> tuple[int, int]:
    """Returns the number of in dims and of out dims of a layer's kernel."""
    match layer:
        case Dense():
            return len(layer.in_names), len(layer.out_names)
        case nnx.LinearGeneral():
            return len(layer.in_features), len(layer.out_features)
    return 1, 1


def _ndim(variable: nnx.Variable) -> int:
    return variable.get_value().ndim


# Because of the cache, each base class has only one adapted class. Otherwise JAX would
# treat two models of equal structure as different.
@cache
def _adapted(kind: type[nnx.Module], *bases: type[nnx.Module]) -> type[nnx.Module]:
    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": __name__, "__doc__": kind.__doc__}

    name = f"{'Q' * (len(bases) > 1)}LoRA{kind.__name__}"
    return new_class(name, (*bases, kind), exec_body=fill)
