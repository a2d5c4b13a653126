"""LoRA: adds small trained factors to the frozen kernels of linear layers.

An adapted layer has two additional parameters. The paths of all other parameters do not
change, so that weights, names and checkpoints of the base model still fit.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import new_class
from typing import Any, TypeVar, cast, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from nnx_parallel.errors import ModelError
from nnx_parallel.layers.dense import Dense, matmul
from nnx_parallel.precision import sum_dtype
from nnx_parallel.sharding.model import ModelFn, ReadsArrays, build_model
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

    kernel: nnx.Param
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
        names = names_of(self.kernel)
        if not names:
            return
        names += (None,) * (_ndim(self.kernel) - len(names))
        lead, first_out = self._split()
        of_a, of_b = (*names[:first_out], None), (*names[:lead], None)
        for factor, own in (self.lora_a, of_a), (self.lora_b, of_b + names[first_out:]):
            factor.set_metadata(out_sharding=own, eager_sharding=False)

    def delta(self) -> Array:
        """Computes the product of the factors, with the kernel's shape.

        The dtype is float32, or the kernel's dtype if it is wider.
        """
        lead, _ = self._split()
        kernel, a, b = (x.get_value() for x in (self.kernel, self.lora_a, self.lora_b))
        stacked = kernel.shape[:lead]
        # (*layers, in, rank) by (*layers, rank, out) -> (*layers, in, out)
        a = a.reshape(*stacked, -1, a.shape[-1]).astype(sum_dtype(kernel))
        b = b.reshape(*stacked, b.shape[lead], -1).astype(a.dtype)
        return (self.lora_scale * (a @ b)).reshape(kernel.shape)

    def _split(self) -> tuple[int, int]:
        """Returns the number of dims of layers, and the index of the first out dim."""
        kernel, a, b = map(_ndim, (self.kernel, self.lora_a, self.lora_b))
        return a + b - kernel - 2, a - 1


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
        """Reads the arrays that the source has in files; the dict may be empty."""
        source: Any = self.source
        return source.read_arrays(arrays) if isinstance(source, ReadsArrays) else {}


@overload
def lora(
    model: Model, *, targets: str, rank: int = ..., alpha: float | None = ...
) -> Model: ...


@overload
def lora(
    model: ModelFn, *, targets: str, rank: int = ..., alpha: float | None = ...
) -> AdaptedSource: ...


def lora(
    model: nnx.Module | ModelFn,
    *,
    targets: str,
    rank: int = 8,
    alpha: float | None = None,
    rngs: nnx.Rngs | None = None,
) -> Any:
    r"""Adds low-rank adapters [1] to the kernels of some layers of a model.

    An adapted layer computes ``layer(x) + (alpha / rank) * (x @ A) @ B``. At first the
    adapters do not change the output, because B is zeros. Pass ``wrt=nnx.LoRAParam`` to
    the Trainer, so that only the factors A and B are trained and have optimizer state.
    The dims of the factors have the names of the kernel's dims, so that every strategy
    places them like the kernel. In a `Stack`, each layer has separate factors.

    Args:
        model: A model, or a function of ``nnx.Rngs`` that builds a model, as for a
            Trainer. For a model, the result is an adapted copy that shares its arrays.
            For a function, the result is a function that builds an adapted model.
        targets: A regex that is searched in the dotted path of each layer, such as
            ``r"attention\.(query|value)"``.
        rank: Width of the factors.
        alpha: Strength of the adapters. ``None``: the rank, so that
            ``alpha / rank`` is 1.
        rngs: Keys for the factors, if ``model`` is a model; by default ``Rngs(0)``. A
            function gets keys when it is called.

    Raises:
        ModelError: If no layer matches, or if a matching layer cannot be adapted or
            already has adapters.
        RuleError: If ``targets`` is not a valid regex.
        ValueError: If ``rank`` is below 1, or if ``alpha`` is not a number.

    Example:
        >>> model = lora(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), targets="", rank=2)
        >>> model.lora_a.shape, model.lora_b.shape
        ((4, 2), (2, 6))
        >>> type(merge_lora(model)).__name__
        'Linear'

    References:
        [1] Hu et al., "LoRA", 2021, section 4, https://arxiv.org/abs/2106.09685
    """
    check_regex("lora(targets=)", targets)
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora(rank={rank!r}): it must be an int of at least 1.")
    if alpha is not None and not isinstance(alpha, int | float):
        raise ValueError(f"lora(alpha={alpha!r}): it must be a number, or None.")
    scale = 1.0 if alpha is None else alpha / rank

    def adapt(model: nnx.Module, rngs: nnx.Rngs) -> None:
        for layer in _find(model, targets):
            _adapt(layer, rank, scale, rngs)

    if not isinstance(model, nnx.Module):
        return AdaptedSource(source=model, adapt=adapt)
    # New Variables hold the same arrays, so that the given model does not change.
    copied = nnx.merge(*nnx.split(model), copy=True)
    adapt(copied, rngs or nnx.Rngs(0))
    return copied


def merge_lora(model: Model) -> Model:
    """Adds the adapters of a model to its kernels, and removes the adapters.

    The given model does not change. The result is a new model that shares all arrays
    except kernels that had adapters. These kernels keep their dtype and sharding.

    Raises:
        ModelError: If the model has no adapters.
    """
    merged = nnx.merge(*nnx.split(model), copy=True)
    layers = [m for _, m in nnx.iter_modules(merged) if isinstance(m, Adapted)]
    if not layers:
        raise ModelError(f"{type(model).__name__} has no adapters to merge.")
    for layer in layers:
        kernel = layer.kernel.get_value()
        add = jax.jit(_add_delta, out_shardings=kernel.sharding)
        layer.kernel.set_value(add(kernel, layer.delta()))
        del layer.lora_a, layer.lora_b, layer.lora_scale
        layer.__class__ = type(layer).__bases__[1]
    return merged


def _add_delta(kernel: Array, delta: Array) -> Array:
    return (kernel.astype(delta.dtype) + delta).astype(kernel.dtype)


def _find(model: nnx.Module, targets: str) -> Iterator[nnx.Module]:
    """Yields the layers whose paths match."""
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
        yield layer


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
    layer.__class__ = _adapted(type(layer))
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
def _adapted(kind: type[nnx.Module]) -> type[nnx.Module]:
    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": __name__, "__doc__": kind.__doc__}

    return new_class(f"LoRA{kind.__name__}", (Adapted, kind), exec_body=fill)
