"""Finds the layers of a model whose products run in 8 bits, and sets their recipe."""

import re
import string
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from nnx_parallel.errors import EightBitError
from nnx_parallel.layers.dense import Dense
from nnx_parallel.layers.eight_bit import (
    RoundingKey,
    eight_bit_matmul,
    noting_layers,
)
from nnx_parallel.layers.experts.moe import MoE
from nnx_parallel.precision import EightBit
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import is_inside, stacks_of
from nnx_parallel.sharding.rules import check_regex

KINDS = (Dense, MoE, nnx.Linear, nnx.LinearGeneral, nnx.Einsum)

_FAST_TPUS = {
    "int8": ("TPU v5", "TPU v6"),
    "float8": ("TPU7", "TPU v7"),
}
"""Prefixes of the kinds of TPUs on which an 8-bit product takes fewer cycles than a
bfloat16 product, by the estimates of libtpu 0.0.50."""


def layers_in_eight_bits(model: nnx.Module, recipe: EightBit) -> dict[str, Any]:
    """Returns the layers whose products run in 8 bits, by dotted path.

    Raises:
        EightBitError: If no layer matches, or if the products of a layer that matches
            cannot run in 8 bits.
        RuleError: If the recipe's regex is invalid.
    """
    if recipe.layers is not None:
        check_regex("Precision(layers=)", recipe.layers)
    stacks = stacks_of(model)
    known = {p: m for p, m in nnx.iter_modules(model) if isinstance(m, KINDS)}
    found = {
        dotted(path): layer
        for path, layer in known.items()
        if (
            is_inside(path, stacks)
            if recipe.layers is None
            else re.search(recipe.layers, dotted(path))
        )
    }
    if not found:
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise EightBitError(
            f"layers={recipe.layers!r} selects no layer of {type(model).__name__} for "
            "8-bit products. `layers` is a regex for dotted paths, and None selects "
            f"all layers inside of a Stack. Layers ({kinds}): "
            f"{', '.join(map(dotted, known)) or 'there are none'}."
        )
    if recipe.rounding == "stochastic" and all(
        isinstance(layer, MoE) for layer in found.values()
    ):
        raise EightBitError(
            f"layers={recipe.layers!r} selects only experts: {sorted(found)}. The "
            "order of their rows depends on the strategy, so they do not support "
            "rounding='stochastic'. Pass rounding='nearest', or select more layers."
        )
    for path, layer in found.items():
        if why := _why_not(layer) or _why_no_blocks(layer, recipe):
            raise EightBitError(
                f"The products of `{path}` cannot run in 8 bits: {why}. Change layers= "
                "so that it does not match this layer."
            )
    return found


def _why_not(layer: Any) -> str:
    """Returns the reason why a layer's products cannot run in 8 bits, or ""."""
    if getattr(layer, "preferred_element_type", None) is not None:
        return "it uses preferred_element_type"
    if isinstance(layer, nnx.Einsum):
        if layer.einsum_op is not jnp.einsum:
            return "it has another einsum_op"
        return _Labels.of(layer.einsum_str).why_not()
    if getattr(layer, "batch_axis", None):
        return "it uses batch_axis"
    product = getattr(layer, "dot_general", None)
    is_plain = product in (None, jax.lax.dot_general)
    if not is_plain or getattr(layer, "dot_general_cls", None) is not None:
        return "it has a dot_general or dot_general_cls already"
    return ""


def _why_no_blocks(layer: Any, recipe: EightBit) -> str:
    """Returns the reason why a layer's dims have no complete blocks, or ""."""
    if (block := recipe.block) is None:
        return ""
    sizes = _contracted(layer, recipe.gradient is not None)
    bad = [f"{size:,} {name}" for name, size in sizes.items() if size % block]
    if not bad:
        return ""
    return (
        f"it has {' and '.join(bad)}. A block of the MX format has {block} elements "
        f"along the contracted dims, so these numbers must be multiples of {block}"
    )


def _contracted(layer: Any, in_gradient: bool) -> dict[str, int]:
    """Returns the sizes that products contract; ``in_gradient`` adds the outputs."""
    if isinstance(layer, MoE):
        embed, width = layer.up.shape[-2:]
        return {"inputs": embed, "hidden elements": width}
    ins, outs = _shape_of(layer)
    sizes = {"inputs": ins, "outputs": outs} if in_gradient else {"inputs": ins}
    return {name: int(np.prod(dims)) for name, dims in sizes.items()}


def _shape_of(layer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the sizes of the inputs and of the outputs in a layer's kernel."""
    if isinstance(layer, Dense):
        num, shape = len(layer.in_names), layer.kernel.shape
        shape = shape[len(shape) - num - len(layer.out_names) :]
        return shape[:num], shape[num:]
    if isinstance(layer, nnx.Einsum):
        labels, shape = _Labels.of(layer.einsum_str), layer.kernel_shape
        ins = tuple(shape[d] for d in labels.contracted)
        return ins, tuple(n for d, n in enumerate(shape) if d not in labels.contracted)
    both = layer.in_features, layer.out_features
    ins, outs = (tuple(int(size) for size in np.ravel(sizes)) for sizes in both)
    return ins, outs


def describe_products(model: nnx.Module, recipe: EightBit, device_kind: str) -> str:
    """Describes the dtypes of the three products of each selected layer.

    The text names TPUs that compute these products in a wider dtype.
    """
    paths = [f"`{path}`" for path in layers_in_eight_bits(model, recipe)]
    shown = ", ".join(paths[:8]) + ", ..." * (len(paths) > 8)
    into, back = recipe.forward, recipe.gradient
    of_input = f"{back} * {into}" if back else "in the compute dtype"
    in_blocks = f" in blocks of {recipe.block}" if recipe.block else ""
    text = (
        f"8 bits{in_blocks}: forward products {into} * {into}, gradients of inputs "
        f"{of_input}, gradients of kernels in the compute dtype: {shown}"
    )
    if recipe.rounding == "stochastic":
        text += ". Gradients are rounded at random, except in experts"
    if recipe.block:
        return text + (
            ". The products run in the compute dtype with the values of the 8-bit "
            "numbers, so only gathers are faster"
        )
    fast = _FAST_TPUS["int8" if into == "int8" else "float8"]
    if device_kind.startswith("TPU") and not device_kind.startswith(fast):
        text += (
            f". {device_kind} computes {into} products in a wider dtype, so they are "
            "not faster"
        )
    return text


@contextmanager
def checking_layers(model: nnx.Module, recipe: EightBit | None) -> Iterator[None]:
    """Checks that the trace of a loss calls every layer that a regex selects.

    A loss may read the kernel of a layer without a call of the layer. Then its products
    do not run in 8 bits.

    Raises:
        EightBitError: At the end, if a selected layer was not called.
    """
    with noting_layers() as called:
        yield
    if recipe is None or recipe.layers is None:
        return
    if missing := sorted(layers_in_eight_bits(model, recipe).keys() - called):
        raise EightBitError(
            f"layers={recipe.layers!r} selects {missing}, but the loss does not call "
            "these layers, so their products would not run in 8 bits. Change layers= "
            "so that it does not match them."
        )


def set_recipe(model: nnx.Module, recipe: EightBit, key: Array | None = None) -> None:
    """Makes the products of the selected layers run in 8 bits, in place.

    The recipe of a layer has the path of the layer as its ``layers``.

    Args:
        model: The model.
        recipe: The layers and dtypes.
        key: Key of the step. For stochastic rounding, each layer gets a key that is
            derived from it. ``None`` rounds to the nearest numbers.
    """
    key = key if recipe.rounding == "stochastic" else None
    for path, layer in layers_in_eight_bits(model, recipe).items():
        of_layer = replace(recipe, layers=path)
        of_gradient = None
        if key is not None and not isinstance(layer, MoE):
            of_gradient = _key_of(layer, path, key)
        if isinstance(layer, Dense):
            layer.rounding_key = of_gradient
        if isinstance(layer, Dense | MoE):
            layer.recipe = of_layer
        elif isinstance(layer, nnx.Einsum):
            layer.einsum_op = nnx.data(Einsum(of_layer, of_gradient))
        else:
            # All methods of the layer use this attribute.
            layer.dot_general = nnx.data(DotGeneral(of_layer, of_gradient))


def _key_of(layer: Any, path: str, key: Array) -> RoundingKey:
    """Derives the key of a layer from its path, or the keys of a stack's layers."""
    # Python's `hash` of a text differs between processes.
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    shape = layer.kernel.shape
    ndim = sum(map(len, _shape_of(layer)))
    return RoundingKey(jax.random.split(key, shape[: len(shape) - ndim]))


class _Labels(NamedTuple):
    """The labels of an einsum of an input and a kernel, such as ``bsd,dh->bsh``."""

    x: str
    w: str
    out: str

    @classmethod
    def of(cls, text: str, num_dims: int | None = None) -> Self:
        """Parses the text of an einsum.

        Args:
            text: The text. ``...`` stands for dims of the input without a label.
            num_dims: The number of the input's dims; ``None`` ignores ``...``.
        """
        operands, _, out = text.replace(" ", "").partition("->")
        x, _, w = operands.partition(",")
        unused = [c for c in string.ascii_letters if c not in text]
        count = 0 if num_dims is None else num_dims - len(x.replace("...", ""))
        more = "".join(unused[:count])
        return cls(x.replace("...", more), w, out.replace("...", more))

    @property
    def contracted(self) -> tuple[int, ...]:
        """The dims of the kernel that are contracted."""
        return tuple(d for d, label in enumerate(self.w) if label not in self.out)

    def why_not(self) -> str:
        """Returns the reason why this is not a product of the whole kernel, or ""."""
        x, w, out = map(set, self)
        rules = {
            "'...' in its kernel": "..." in self.w,
            "a label twice in an operand": any(len(set(s)) < len(s) for s in self),
            f"the labels {sorted(x & w & out)} in its input, kernel and output": bool(
                x & w & out
            ),
            f"the labels {sorted((x ^ w) - out)} in only one operand": bool(
                (x ^ w) - out
            ),
            "no label that is contracted": not (x & w) - out,
        }
        found = [text for text, is_bad in rules.items() if is_bad]
        return f"its einsum_str has {found[0]}" if found else ""


class _Product(nnx.Module):
    """A product in 8 bits, in place of the plain product of a stock layer.

    Args:
        recipe: The dtypes of the product.
        key: Key for the rounding of gradients, or ``None``.
    """

    def __init__(self, recipe: EightBit, key: RoundingKey | None) -> None:
        self.recipe = recipe
        self.key = nnx.data(key)

    def multiply(
        self, x: Array, w: Array, x_dims: Sequence[int], w_dims: tuple[int, ...]
    ) -> Array:
        """Contracts dims of ``x`` with dims of ``w``."""
        num = len(w_dims)
        x = jnp.moveaxis(x, x_dims, range(-num, 0))
        key = None if self.key is None else self.key[...]
        dims = None if w_dims == (*range(num),) else w_dims
        return eight_bit_matmul(x, w, num, self.recipe, key=key, w_dims=dims)


class DotGeneral(_Product):
    """Replaces ``jax.lax.dot_general``."""

    def __call__(self, x: Array, w: Array, dimension_numbers: Any, **_: Any) -> Array:
        """Contracts dims of ``x`` and ``w``; ignores options."""
        (x_dims, w_dims), _ = dimension_numbers
        return self.multiply(x, w, x_dims, tuple(w_dims))


class Einsum(_Product):
    """Replaces ``jnp.einsum``."""

    def __call__(self, text: str, x: Array, w: Array, **_: Any) -> Array:
        """Computes ``jnp.einsum(text, x, w)``; ignores options."""
        labels = _Labels.of(text, x.ndim)
        if why := labels.why_not():
            raise EightBitError(
                f"A call of `{self.recipe.layers}` cannot run in 8 bits: {why}."
            )
        x_dims = [labels.x.index(labels.w[d]) for d in labels.contracted]
        y = self.multiply(x, w, x_dims, labels.contracted)
        made = [c for c in labels.x + labels.w if c in labels.out]
        return y.transpose([made.index(c) for c in labels.out])
