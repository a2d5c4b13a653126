"""Rotary position embeddings, and their scaling for longer sequences.

References:
    [1] Su et al., "RoFormer", 2021, section 3.2, https://arxiv.org/abs/2104.09864
    [2] Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023, section 2.3, https://arxiv.org/abs/2306.15595
    [3] Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.4.2,
    https://arxiv.org/abs/2407.21783
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp


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
            ("high_frequency", high > low, f"above low_frequency={low}"),
        )
        for name, is_met, rule in rules:
            if not is_met:
                found = getattr(self, name)
                raise ValueError(f"RopeScaling.{name} is {found!r}; it must be {rule}.")


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> jax.Array:
    """Returns the frequency of each pair of features, float32 ``(head_dim / 2,)``.

    The unit is radians per token.

    Args:
        head_dim: Width of a head; must be even.
        theta: Base of the wavelengths [1].
        scaling: Stretching of the wavelengths; ``None`` does not stretch them.
    """
    half = head_dim // 2
    plain = theta ** (-jnp.arange(half) / half)
    if scaling is None:
        return plain
    if scaling.original_len is None:
        return plain / scaling.factor
    low, high = scaling.low_frequency, scaling.high_frequency
    turns = plain * scaling.original_len / (2 * math.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def rotate(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotates queries or keys, so that scores depend only on distances [1].

    Feature i and feature i + head_dim / 2 are the coordinates of a point in the plane.
    The point is rotated by the angle ``position * frequencies[i]``, in float32 or
    wider.

    Args:
        x: ``(batch, seq, heads, head_dim)``, queries or keys.
        positions: int ``(seq,)``, or ``(batch, seq)``.
        frequencies: ``(head_dim / 2,)``, from `frequencies`.
    """
    of_all = (None,) * positions.ndim
    angles = positions[..., None] * frequencies[of_all]  # (seq, half) or (batch, ...)
    dims = (0, 2) if positions.ndim == 1 else (2,)
    cos = jnp.expand_dims(jnp.cos(angles), dims)  # (1 or batch, seq, 1, half)
    sin = jnp.expand_dims(jnp.sin(angles), dims)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    first, second = jnp.split(wide, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
