"""The dtypes of parameters, computation and gradients; texts of bytes and times."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nnx_parallel.errors import suggests_names

# Short names that NumPy does not know. NumPy counts bytes: its "f4" is a float32.
_SHORT_NAMES = {"bf16": jnp.bfloat16, "fp16": "f2", "fp32": "f4", "fp64": "f8"}


Rounding = Literal["nearest", "stochastic"]
"""How the gradient of an output is rounded to 8 bits."""


@dataclass(frozen=True, kw_only=True, repr=False)
class EightBit:
    """The layers whose products run in 8 bits, and the dtypes.

    `Precision.int8`, `Precision.fp8` and `Precision.mxfp8` create it.

    Attributes:
        forward: Dtype of activations and kernels in the forward pass: ``int8`` or
            ``float8_e4m3fn``. The kernel has this dtype in the backward pass too.
        gradient: Dtype of the output's gradient in the product for the gradient of the
            input. If it is ``None``, this product runs in the compute dtype.
        layers: Regex that is searched in the dotted paths of layers. ``None``: the
            layers inside of a `Stack`.
        block: Number of contracted elements that share a scale. 32 means the MX format,
            whose scales are powers of 2. With ``None``, all contracted elements share a
            scale.
        rounding: ``"stochastic"`` rounds the gradient at random to one of the two
            nearest 8-bit numbers, so that the mean is exact. Each step and layer has a
            random key. Experts always round to the nearest number.
    """

    forward: str
    gradient: str | None
    layers: str | None = None
    block: int | None = None
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        for name, least in (("forward", ()), ("gradient", (None,))):
            is_int8 = self.forward == "int8"
            valid = ("int8",) if is_int8 else ("float8_e4m3fn", "float8_e5m2")
            if (found := getattr(self, name)) not in (*valid, *least):
                raise ValueError(
                    f"The 8-bit dtype {name}={found!r} is invalid; valid dtypes are "
                    f"{[*valid, *least]}. Both operands of a product are integers, or "
                    "both are floats."
                )
        if self.block not in (32, None) or (self.block and self.forward == "int8"):
            raise ValueError(
                f"EightBit(forward={self.forward!r}, block={self.block!r}): blocks of "
                "the MX format have 32 float8 elements. block must be None, or 32 with "
                "float8 dtypes."
            )

        if self.rounding not in (valid := get_args(Rounding)):
            raise ValueError(
                f"rounding={self.rounding!r} is invalid; valid values are {valid}."
            )
        if self.rounding == "stochastic" and self.gradient is None:
            raise ValueError(
                "rounding='stochastic' is for gradients, but gradient=None does not "
                "round them. Pass rounding='nearest', or an 8-bit dtype for gradients."
            )

    def __repr__(self) -> str:
        # A checkpoint compares this text, so fields that older versions lack appear
        # only if they are set.
        text = f"EightBit(forward={self.forward!r}, gradient={self.gradient!r}, "
        text += f"layers={self.layers!r}"
        text += f", block={self.block}" * (self.block is not None)
        text += f", rounding={self.rounding!r}" * (self.rounding != "nearest")
        return f"{text})"


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of mixed-precision training [1].

    A parameter is cast to ``compute`` before it is gathered, so a sharded step in
    bfloat16 sends half the bytes of a step in float32. If the gradient of a product
    needs a sum over devices, the compiler inserts the sum and computes it in the
    product's dtype. A dtype can be given as a name, such as ``"float32"``, or as a
    short name: ``"bf16"``, ``"fp16"`` or ``"fp32"``.

    Attributes:
        params: Dtype of stored parameters, and so of the optimizer state. ``None``
            keeps the dtype that the model gives the parameters.
        compute: Dtype of parameters inside the loss. ``None`` means the stored dtype.
        reduction: Dtype in which gradients are summed over microbatches, their norm is
            computed, and they are passed to the optimizer. ``None`` means float32, or
            the parameter's dtype if it is wider. Plain NNX passes bfloat16 gradients of
            bfloat16 parameters to the optimizer, so its losses differ from this
            library's by about 1e-4.
        inputs: Dtype of a batch's floating-point arrays in the loss or a prediction.
            ``None`` does not cast them, because a cast would also round targets and
            weights. A layer that does not cast its inputs computes in their dtype.
        products: The products that run in 8 bits (`int8`, `fp8`, `mxfp8`), or ``None``.

    Example:
        >>> Precision.mixed_bfloat16().compute
        dtype(bfloat16)

    References:
        [1] Micikevicius et al., "Mixed Precision Training", 2018, section 3,
        https://arxiv.org/abs/1710.03740
    """

    params: DTypeLike | None = None
    compute: DTypeLike | None = None
    reduction: DTypeLike | None = None
    inputs: DTypeLike | None = None
    products: EightBit | None = None

    def __post_init__(self) -> None:
        # The fields are listed, because a subclass may have fields that are not dtypes.
        for field in ("params", "compute", "reduction", "inputs"):
            given = getattr(self, field)
            if given is None:
                continue
            try:
                # Fields are stored as NumPy dtypes, so that different names of a dtype
                # compare equal.
                dtype: Any = as_dtype(given)
            except TypeError:
                dtype = repr(given)
            if isinstance(dtype, str) or not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(
                    f"Precision.{field} is {dtype}; it must be a floating-point "
                    "dtype: float32, bfloat16 or float16."
                )
            object.__setattr__(self, field, dtype)
        if not isinstance(self.products, EightBit | None):
            raise ValueError(
                f"Precision.products is {self.products!r}; it must be an EightBit or "
                "None. Precision.int8(), fp8() and mxfp8() set it."
            )

    def gradient_dtype(self, dtype: DTypeLike) -> np.dtype:
        """Returns the dtype for the sum of gradients that have ``dtype``."""
        # A complex gradient cast to a real dtype would lose its imaginary part.
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        if self.reduction is None or is_complex:
            return sum_dtype(jnp.dtype(dtype))
        return jnp.dtype(self.reduction)

    @property
    def needs_loss_scale(self) -> bool:
        """True if the loss is computed in float16."""
        # float16 rounds small gradients to 0. bfloat16 has the range of float32.
        compute = self.params if self.compute is None else self.compute
        return compute == jnp.float16

    @classmethod
    def mixed_bfloat16(cls) -> Precision:
        """Parameters and sums of gradients in float32, and products in bfloat16."""
        return cls(compute=jnp.bfloat16)

    @classmethod
    def mixed_float16(cls) -> Precision:
        """Parameters and gradient sums in float32, float16 products, a loss scale."""
        return cls(compute=jnp.float16)

    @classmethod
    def int8(
        cls,
        layers: str | None = None,
        *,
        gradient: bool = True,
        rounding: Rounding = "nearest",
        compute: DTypeLike | None = jnp.bfloat16,
    ) -> Precision:
        """Runs products of layers in int8. All else is as in `mixed_bfloat16`.

        A token and an output channel of a kernel have one scale each [1]. The scales do
        not depend on the strategy. An 8-bit number differs between strategies only if
        the order of a sum changes the activation that is rounded. The gradients of
        kernels are computed in ``compute``.

        Args:
            layers: Regex that is searched in the dotted path of each layer, such as
                ``"mlp"``. ``None``: all layers inside of a `Stack`.
            gradient: True if the gradient of a layer's input is an int8 product too.
            rounding: ``"stochastic"`` rounds the gradient of a layer's output up or
                down at random, so that its mean is exact (`EightBit`). The numbers are
                the same under every strategy, and after a restore. Experts round to the
                nearest number, and a `Pipeline` raises an error.
            compute: Dtype of all other computation.

        Raises:
            ValueError: If ``gradient`` is not a bool.

        Example:
            >>> Precision.int8("mlp").products
            EightBit(forward='int8', gradient='int8', layers='mlp')

        References:
            [1] Wortsman et al., "Stable and low-precision training for large-scale
            vision-language models", 2023, section 2.2,
            https://arxiv.org/abs/2304.13013
        """
        if not isinstance(gradient, bool):
            raise ValueError(f"int8(gradient={gradient!r}): it must be True or False.")
        products = EightBit(
            forward="int8",
            gradient="int8" if gradient else None,
            layers=layers,
            rounding=rounding,
        )
        return cls(compute=compute, products=products)

    @classmethod
    def fp8(
        cls,
        layers: str | None = None,
        *,
        gradient: DTypeLike | None = "float8_e4m3fn",
        rounding: Rounding = "nearest",
        compute: DTypeLike | None = jnp.bfloat16,
    ) -> Precision:
        """Runs products of layers in float8 [1], with the same scales as `int8`.

        Args:
            layers: Regex for dotted paths, as in `int8`.
            gradient: Dtype of gradients in the product for the gradient of the input:
                ``"float8_e4m3fn"``, ``"float8_e5m2"``, or ``None`` for ``compute``.
                Each token has a scale, so the range of e5m2 is not needed.
            rounding: As in `int8`.
            compute: Dtype of all other computation.

        Example:
            >>> Precision.fp8().products.forward
            'float8_e4m3fn'

        References:
            [1] Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3,
            https://arxiv.org/abs/2209.05433
        """
        name = None if gradient is None else as_dtype(gradient).name
        products = EightBit(
            forward="float8_e4m3fn", gradient=name, layers=layers, rounding=rounding
        )
        return cls(compute=compute, products=products)

    @classmethod
    def mxfp8(
        cls,
        layers: str | None = None,
        *,
        gradient: DTypeLike | None = "float8_e4m3fn",
        rounding: Rounding = "nearest",
        compute: DTypeLike | None = jnp.bfloat16,
    ) -> Precision:
        """Runs products of layers in the MX format [1]: float8 in blocks of 32.

        Each 32 consecutive elements along the contracted dims share a scale, which is a
        power of 2. As in [2], the scale is rounded up, so that no element saturates.
        Blocks are parts of the global arrays, so they do not depend on the strategy.
        The kernel is rounded twice: in blocks along its inputs for the forward product,
        and in blocks along its outputs for the gradient of the input. The gradients of
        kernels are computed in ``compute``, because they would need blocks of tokens,
        which layouts split.

        Args:
            layers: Regex for dotted paths, as in `int8`. 32 must divide the inputs of
                these layers, and their outputs unless ``gradient`` is ``None``.
            gradient: Dtype of gradients in the product for the gradient of the input:
                ``"float8_e4m3fn"``, as in [2], ``"float8_e5m2"``, or ``None`` for
                ``compute``.
            rounding: As in `int8`.
            compute: Dtype of all other computation.

        Example:
            >>> Precision.mxfp8().products.block
            32

        References:
            [1] Open Compute Project, "OCP Microscaling Formats (MX) Specification",
            version 1.0, 2023, sections 5 and 6
            [2] Mishra et al., "Recipes for Pre-training LLMs with MXFP8", 2025,
            https://arxiv.org/abs/2506.08027
        """
        plain = cls.fp8(layers, gradient=gradient, rounding=rounding, compute=compute)
        assert plain.products is not None
        return replace(plain, products=replace(plain.products, block=32))


def as_dtype(dtype: Any) -> np.dtype:
    """Converts any spelling of a dtype, including short names such as ``"bf16"``."""
    return jnp.dtype(_SHORT_NAMES.get(dtype, dtype))


def sum_dtype(*values: Any) -> np.dtype:
    """Returns the dtype in which to sum values: float32, or a wider dtype.

    Values are arrays, numbers or dtypes. Integers are summed as floats of JAX's default
    width, which is 64 bits under ``jax_enable_x64``.

    Example:
        >>> sum_dtype(jnp.bfloat16), sum_dtype(jnp.ones(2), 3)
        (dtype('float32'), dtype('float32'))
    """
    # `float` is a weak type in JAX: it promotes integers to floats, but it does not
    # widen floats.
    return jnp.promote_types(jnp.result_type(*values, float), jnp.float32)


def cast_floating(tree: Any, dtype: DTypeLike | None) -> Any:
    """Casts the floating-point arrays of a pytree, and keeps all other leaves.

    With ``dtype=None``, a valid value of `Precision`'s fields, nothing is cast.

    Example:
        >>> tree = cast_floating({"x": jnp.ones(2), "n": 3}, jnp.bfloat16)
        >>> tree["x"].dtype, tree["n"]
        (dtype(bfloat16), 3)
    """
    if dtype is None:
        return tree
    target = as_dtype(dtype)

    def cast(leaf: Any) -> Any:
        is_floating = jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)
        return leaf.astype(target) if is_floating else leaf

    return jax.tree.map(cast, tree)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scale for float16 gradients [1].

    Attributes:
        scale: float32 scalar by which the loss is multiplied.
        good_steps: int32 scalar, number of finite steps since the last change.

    References:
        [1] Micikevicius et al., "Mixed Precision Training", 2018, section 3.2,
        https://arxiv.org/abs/1710.03740
    """

    scale: jax.Array
    good_steps: jax.Array

    @classmethod
    def create(cls, initial: float = 2.0**15) -> LossScale:
        """Returns the loss scale before the first step."""
        return cls(scale=jnp.float32(initial), good_steps=jnp.int32(0))

    def adjust(self, is_finite: jax.Array, growth_interval: int = 2000) -> LossScale:
        """Halves the scale after an overflow and doubles it after many finite steps."""
        grown = self.good_steps + 1 >= growth_interval
        larger = self.scale * jnp.where(grown, 2, 1)
        scale = jnp.where(is_finite, larger, self.scale / 2)
        good_steps = jnp.where(is_finite & ~grown, self.good_steps + 1, 0)
        # The scale stays at least 1: if gradients overflow at a scale of 1, the loss
        # itself is not finite, and a smaller scale does not help.
        return LossScale(scale=jnp.clip(scale, 1.0, 2.0**24), good_steps=good_steps)


def array_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Returns the bytes of an array or a shard, or of the words of random keys."""
    # NumPy does not know JAX's dtypes of random keys, but these have an `itemsize`.
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return math.prod(shape) * (dtype if is_key else jnp.dtype(dtype)).itemsize


def format_bytes(count: float) -> str:
    """Formats a number of bytes in binary units, with four significant digits.

    Example:
        >>> format_bytes(1536), format_bytes(2**31)
        ('1.5 KiB', '2 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def format_number(value: float) -> str:
    """Formats a metric for a line of text.

    Example:
        >>> format_number(2.41312), format_number(0.0003), format_number(12_345)
        ('2.413', '3.00e-04', '1.23e+04')
    """
    is_plain = value == 0 or 0.01 <= abs(value) < 1000
    kind = ".3f" if is_plain or not math.isfinite(value) else ".2e"
    return f"{value:{kind}}"


def format_clock(seconds: float) -> str:
    """Formats a duration.

    Example:
        >>> format_clock(272), format_clock(3725), format_clock(90_000)
        ('4:32', '1:02:05', '1d 1h 00m')
    """
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}h {minute:02}m"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
