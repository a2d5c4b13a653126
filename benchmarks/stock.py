"""A transformer of Flax's layers: no names, no constraints, a list of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Place = Callable[[jax.Array], jax.Array]


def anywhere(x: jax.Array) -> jax.Array:
    """Leaves the sharding of an activation to the compiler."""
    return x


class StockBlock(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=num_heads, in_features=width, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, place: Place) -> jax.Array:
        """(batch, seq, width) -> (batch, seq, width)."""
        x = place(x + self.attention(place(self.attention_norm(x)), mask=mask))
        hidden = nnx.gelu(place(self.up(place(self.mlp_norm(x)))))
        return place(x + self.down(hidden))


class StockTransformer(nnx.Module):
    """Maps tokens to logits.

    Args:
        vocab_size: Number of tokens.
        width: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Attention heads.
        rngs: Keys for the parameters.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        num_layers: int,
        num_heads: int,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.blocks = nnx.List(
            [StockBlock(width, num_heads, rngs) for _ in range(num_layers)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array, place: Place = anywhere) -> jax.Array:
        """Logits of the token after each.

        Args:
            tokens: int (batch, seq).
            place: Function that constrains an activation; it does nothing by default.
        """
        mask = nnx.make_causal_mask(tokens)
        x = place(self.embed(tokens))
        for block in self.blocks:
            x = block(x, mask, place)
        return place(self.head(place(self.norm(x))))


def stock_loss(
    model: StockTransformer, batch: Mapping[str, jax.Array], place: Place = anywhere
) -> jax.Array:
    """Mean cross-entropy of each token given the earlier tokens."""
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = model(tokens, place)
    return jnp.mean(
        optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    )
