"""Rotary position embeddings, and their scaling for longer sequences.

References:
    [1] Su et al., "RoFormer", 2021, section 3.2, https://arxiv.org/abs/2104.09864
    [2] Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023, section 2.3, https://arxiv.org/abs/2306.15595
    [3] Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.4.2,
    https://arxiv.org/abs/2407.21783
    [4] Peng et al., "YaRN: Efficient Context Window Extension of Large Language
    Models", 2023, sections 3.2 and 3.4, https://arxiv.org/abs/2309.00071
    [5] Ding et al., "LongRoPE", 2024, section 3, https://arxiv.org/abs/2402.13753
    [6] Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025,
    https://arxiv.org/abs/2501.19399
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from nnx_parallel.sharding.constrain import active_platform


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Slower rotation, for sequences longer than in a model's first training.

    Without ``original_len``, all frequencies are divided by ``factor`` [2]. With
    ``original_len``, the change depends on the wavelength, as in Llama 3.1 [3]. If the
    wavelength exceeds ``original_len / low_frequency`` tokens, the frequency is divided
    by ``factor``. If the wavelength is shorter than ``original_len / high_frequency``
    tokens, the frequency does not change. Between these two wavelengths, the change is
    gradual.

    Attributes:
        factor: Divisor of slow frequencies.
        original_len: Length in tokens of the sequences in the first training.
        low_frequency: Limit, in turns per ``original_len`` tokens. Frequencies below it
            are divided by ``factor``.
        high_frequency: Limit, in turns per ``original_len`` tokens. Frequencies above
            it do not change.

    Raises:
        ValueError: If a value is out of range.
    """

    factor: float
    original_len: int | None = None
    low_frequency: float = 1.0
    high_frequency: float = 4.0

    def __post_init__(self) -> None:
        length, low, high = self.original_len, self.low_frequency, self.high_frequency
        rules = (
            ("factor", self.factor > 0, "above 0"),
            ("original_len", length is None or length >= 1, "at least 1, or None"),
            ("low_frequency", low > 0, "above 0"),
            ("high_frequency", high >= low, f"at least low_frequency={low}"),
        )
        _check(self, rules)

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys, which is 1."""
        return 1.0

    def stretch(self, plain: jax.Array, theta: float, length: int) -> jax.Array:
        """Returns the new frequencies, ``(rotary_dim / 2,)``, like ``plain``.

        ``theta`` is the base of the plain frequencies, and ``length`` is the length of
        the sequence. This scaling needs neither of them.
        """
        if self.original_len is None:
            return plain / self.factor
        low, high = self.low_frequency, self.high_frequency
        turns = plain * self.original_len / (2 * math.pi)
        if high == low:
            return jnp.where(turns > low, plain, plain / self.factor)
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Growth of queries with their position, so that scores are larger [6].

    A query at position p is multiplied by ``1 + rate * ln(1 + (p + ahead) // length)``.

    Attributes:
        rate: Factor of the logarithm.
        length: Number of positions after which the factor changes.
        ahead: Number that is added to positions: 0, or 1 as in Llama 4.

    Raises:
        ValueError: If a value is out of range.
    """

    rate: float
    length: int
    ahead: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("rate", self.rate >= 0, "at least 0"),
            ("length", self.length >= 1, "at least 1"),
            ("ahead", self.ahead in (0, 1), "0 or 1"),
        )
        _check(self, rules)

    def __call__(self, query: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns queries ``(batch, seq, heads, head_dim)``, larger at late positions.

        ``positions`` is int ``(seq,)`` or ``(batch, seq)``. The product is in float32
        or wider.
        """
        return (query * self.factors(positions)).astype(query.dtype)

    def factors(self, positions: jax.Array) -> jax.Array:
        """Returns the factors, float32 ``(1 or batch, seq, 1, 1)``."""
        turns = ((positions + self.ahead) // self.length).astype(jnp.float32)
        factors = 1 + self.rate * jnp.log1p(turns)
        return jnp.expand_dims(factors, (0, 2, 3) if positions.ndim == 1 else (2, 3))


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Slower rotation for longer sequences, with larger scores: YaRN [4].

    A frequency of at least ``fast`` turns per ``original_len`` tokens does not change.
    A frequency of at most ``slow`` turns is divided by ``factor``. Between these two,
    the change grows linearly with the index of the frequency.

    Attributes:
        factor: Divisor of slow frequencies.
        original_len: Length in tokens of the sequences in the first training.
        fast: Limit, in turns per ``original_len`` tokens; faster frequencies stay.
        slow: Limit, in turns per ``original_len`` tokens; slower frequencies are
            divided by ``factor``.
        truncate: True to round the index of the frequency at each limit to an integer,
            away from the other limit.
        attention_factor: Factor of rotated queries and of rotated keys. ``None`` means
            ``0.1 * ln(factor) + 1``, but 1 if ``factor`` is less than 1.
        growth: Growth of scores with the position, as in Ministral 3: a query at
            position p is multiplied by ``1 + growth * ln(1 + p // original_len)``.

    Raises:
        ValueError: If a value is out of range.

    Example:
        >>> round(YarnScaling(factor=4.0, original_len=4096).amplitude, 4)
        1.1386
    """

    factor: float
    original_len: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    growth: float = 0.0

    def __post_init__(self) -> None:
        scale = self.attention_factor
        rules = (
            ("factor", self.factor > 0, "above 0"),
            ("original_len", self.original_len >= 1, "at least 1"),
            ("slow", self.slow > 0, "above 0"),
            ("fast", self.fast >= self.slow, f"at least slow={self.slow}"),
            ("attention_factor", scale is None or scale > 0, "above 0, or None"),
            ("growth", self.growth >= 0, "at least 0"),
        )
        _check(self, rules)

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(max(self.factor, 1.0)) + 1.0

    def grow(self, query: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns queries ``(batch, seq, heads, head_dim)``, larger at late positions.

        ``positions`` is int ``(seq,)`` or ``(batch, seq)``.
        """
        growth = Growth(rate=self.growth, length=self.original_len)
        # The factors are rounded first, as in transformers' Ministral 3.
        return query * growth.factors(positions).astype(query.dtype)

    def stretch(self, plain: jax.Array, theta: float, length: int) -> jax.Array:
        """Returns the new frequencies, ``(rotary_dim / 2,)``, like ``plain``.

        ``theta`` is the base of the plain frequencies. The new frequencies do not
        depend on the ``length`` of the sequence.
        """
        half = plain.shape[0]

        def index(turns: float) -> float:
            """Returns the index at which a frequency has this number of turns."""
            wavelength = self.original_len / turns
            return half * math.log(wavelength / (2 * math.pi)) / math.log(theta)

        low, high = index(self.fast), index(self.slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The upper bound is the number of features, not of frequencies, as in [4].
        low, high = max(low, 0), min(high, 2 * half - 1)
        high = high + 0.001 if low == high else high
        stretched = jnp.clip((jnp.arange(half) - low) / (high - low), 0, 1)
        return plain * (1 - stretched + stretched / self.factor)


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """Slower rotation with a divisor for each frequency, as in Phi-4-mini [5].

    The divisors depend on the length of a batch's rows or, in generation, on the length
    of the cache. Up to the length ``original_len``, the divisors are ``short``. For
    greater lengths they are ``long``.

    Attributes:
        short: The divisor of each frequency in short sequences.
        long: The divisor of each frequency in long sequences.
        original_len: Largest length in tokens at which a sequence counts as short.
        attention_factor: Factor of rotated queries and of rotated keys.

    Raises:
        ValueError: If a value is out of range.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_len: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        short, long = self.short, self.long
        rules = (
            ("short", min(short, default=0) > 0, "numbers above 0"),
            ("long", min(long, default=0) > 0, "numbers above 0"),
            (
                "long",
                len(short) == len(long),
                f"as many numbers as short, {len(short)}",
            ),
            ("original_len", self.original_len >= 1, "at least 1"),
            ("attention_factor", self.attention_factor > 0, "above 0"),
        )
        _check(self, rules)

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys."""
        return self.attention_factor

    def stretch(self, plain: jax.Array, theta: float, length: int) -> jax.Array:
        """Returns the new frequencies, ``(rotary_dim / 2,)``, like ``plain``.

        ``length`` is the length of the sequence. The base ``theta`` is not needed.
        """
        return plain / jnp.array(
            self.long if length > self.original_len else self.short
        )


Scaling = RopeScaling | YarnScaling | LongRopeScaling
"""Changes of the rotation for sequences longer than in a model's first training."""


def _check(scaling: Scaling | Growth, rules: Iterable[tuple[str, bool, str]]) -> None:
    for name, is_met, rule in rules:
        if not is_met:
            kind, found = type(scaling).__name__, getattr(scaling, name)
            raise ValueError(f"{kind}.{name} is {found!r}; it must be {rule}.")


def frequencies(
    rotary_dim: int, theta: float, scaling: Scaling | None = None, length: int = 1
) -> jax.Array:
    """Returns the frequency of each pair of features, float32 ``(rotary_dim / 2,)``.

    The unit is radians per token.

    Args:
        rotary_dim: Number of features of a head that rotate; must be even.
        theta: Base of the wavelengths [1].
        scaling: Stretching of the wavelengths; ``None`` does not stretch them.
        length: Length of the sequence, which matters to a `LongRopeScaling`.
    """
    half = rotary_dim // 2
    plain = theta ** (-jnp.arange(half) / half)
    return plain if scaling is None else scaling.stretch(plain, theta, length)


def rotate(
    x: jax.Array,
    positions: jax.Array,
    frequencies: jax.Array,
    amplitude: float | jax.Array = 1.0,
) -> jax.Array:
    """Rotates queries or keys, so that scores depend only on distances [1].

    The first ``rotary_dim`` features of a head rotate, and the others do not change.
    Feature i and feature i + rotary_dim / 2 are the coordinates of a point in the
    plane. The point is rotated by the angle ``position * frequencies[i]``, in float32
    or wider.

    Args:
        x: ``(batch, seq, heads, head_dim)``, queries or keys.
        positions: int ``(seq,)``, or ``(batch, seq)``.
        frequencies: ``(rotary_dim / 2,)``, from `frequencies`.
        amplitude: Factor of the features that rotate.
    """
    of_all = (None,) * positions.ndim
    return rotate_by(x, positions[..., None] * frequencies[of_all], amplitude)


def rotate_by(
    x: jax.Array, angles: jax.Array, amplitude: float | jax.Array = 1.0
) -> jax.Array:
    """Rotates queries or keys (batch, seq, heads, head_dim) like `rotate`, by angles.

    ``angles``, in radians, are (seq, rotary_dim / 2) or (batch, seq, rotary_dim / 2).
    """
    dims = (0, 2) if angles.ndim == 2 else (2,)
    cos = jnp.expand_dims(jnp.cos(angles), dims)  # (1 or batch, seq, 1, half)
    sin = jnp.expand_dims(jnp.sin(angles), dims)
    if not isinstance(amplitude, float) or amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    rotated = _swapped if active_platform() == "tpu" else _split
    return rotated(x, cos, sin).astype(x.dtype)


def _split(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the two halves of the features, and joins them."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    half = cos.shape[-1]
    ends = [half] if 2 * half == x.shape[-1] else [half, 2 * half]
    first, second, *kept = jnp.split(wide, ends, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*rotated, *kept], axis=-1)


def _swapped(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates with a matrix that swaps the halves; equals `_split` for finite ``x``.

    A TPU computes on tiles of 128 features, so the halves of a head of 128 features
    would be written as half-empty tiles. The product with the matrix is exact, because
    each column has only one 1. For Qwen3 4B on v6e, this saves 7 % of a step's cycles.
    The gradient of a bfloat16 ``x`` is rounded twice here, but once in `_split`.
    """
    size, half = x.shape[-1], cos.shape[-1]
    swap = jnp.roll(jnp.eye(2 * half, dtype=x.dtype), half, axis=0)
    swap = jnp.pad(swap, [(0, size - 2 * half)] * 2)
    # The policy `dots` of remat keeps products without a batch dim. Heads are a batch
    # dim here, so it does not keep this one.
    swaps = jnp.broadcast_to(swap, (x.shape[2], size, size))
    other = jnp.einsum("bshi,hij->bshj", x, swaps, precision="highest")
    rest = [(0, 0)] * (cos.ndim - 1) + [(0, size - 2 * half)]
    cos = jnp.pad(jnp.concatenate([cos, cos], -1), rest, constant_values=1.0)
    sin = jnp.pad(jnp.concatenate([-sin, sin], -1), rest)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return x.astype(dtype) * cos + other.astype(dtype) * sin
