"""Products with named dims: `Dense` and `Embed`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from nnx_parallel.layers.matmul import matmul
from nnx_parallel.sharding import constrain
from nnx_parallel.sharding.context import check_names, constrain_param


def named(initializer: Initializer, *names: str | None) -> Initializer:
    """An initializer whose parameter carries the logical axes of its dims.

    They are Flax's own ``out_sharding`` metadata; ``eager_sharding=False`` because no
    mesh is known when a model is built.
    """
    return nnx.with_partitioning(initializer, names, eager_sharding=False)


class Dense(nnx.Module):
    """A linear map from named dims to named dims.

    The kernel has shape ``(*in_dims, *out_dims)`` and is placed by its names: under
    `TensorParallel` a kernel from ``embed`` to ``mlp`` is split by columns and one
    from ``mlp`` to ``embed`` by rows, so that the pair communicates once [1]. Under
    sequence parallelism its input is gathered along ``seq`` before the product, or its
    output scattered after it; the strategy says whether the two overlap (`matmul`).

    Args:
        in_dims: Names and sizes of the dims to contract, the input's last ones.
        out_dims: Names and sizes of the dims that replace them.
        rngs: Key for the kernel.
        use_bias: Whether to add a bias of shape ``out_dims``.
        kernel_init: Initializer; by default normal with variance 1 / fan-in.

    Example:
        >>> query = Dense({"embed": 32}, {"heads": 4, "head_dim": 8}, rngs=nnx.Rngs(0))
        >>> query(jnp.ones((2, 16, 32))).shape
        (2, 16, 4, 8)

    References:
        [1] Shoeybi et al., "Megatron-LM", 2019, section 3,
        https://arxiv.org/abs/1909.08053
    """

    def __init__(
        self,
        in_dims: Mapping[str, int],
        out_dims: Mapping[str, int],
        *,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        kernel_init: Initializer | None = None,
    ) -> None:
        names = (*in_dims, *out_dims)
        check_names(names)
        shape = (*in_dims.values(), *out_dims.values())
        self.num_in_dims = len(in_dims)
        self.in_names = tuple(in_dims)
        self.out_names = tuple(out_dims)
        if kernel_init is None:
            fan_in = math.prod(in_dims.values())
            kernel_init = nnx.initializers.normal(fan_in**-0.5)
        self.kernel = nnx.Param(
            named(kernel_init, *names)(rngs.params(), shape, jnp.float32),
            num_in_dims=self.num_in_dims,
        )
        self.bias = nnx.data(None)
        if use_bias:
            zeros = named(nnx.initializers.zeros_init(), *out_dims)
            self.bias = nnx.Param(
                zeros(rngs.params(), tuple(out_dims.values()), jnp.float32)
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Contracts the last dims of ``x`` with the kernel.

        Args:
            x: ``(*leading, *in_dims)``; two leading dims are ``batch`` and ``seq``.

        Returns:
            ``(*leading, *out_dims)``.
        """
        y = matmul(x, self.kernel[...], self.in_names, self.out_names)
        if self.bias is None:
            return y
        bias = self.bias[...]
        return y + jnp.reshape(bias, (1,) * (y.ndim - bias.ndim) + bias.shape)


class Embed(nnx.Module):
    """A table of ``vocab`` rows of ``embed`` numbers, for lookup and for logits.

    Args:
        vocab_size: Rows.
        embed_dim: Columns.
        rngs: Key for the table.
        vocab_name: Logical axis of the rows; ``seq`` for learned positions.
        embedding_init: Initializer; by default normal with standard deviation 0.02.

    Example:
        >>> embed = Embed(64, 8, rngs=nnx.Rngs(0))
        >>> hidden = embed(jnp.zeros((2, 5), jnp.int32))
        >>> hidden.shape, embed.attend(hidden).shape
        ((2, 5, 8), (2, 5, 64))
    """

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        *,
        rngs: nnx.Rngs,
        vocab_name: str | None = "vocab",
        embedding_init: Initializer | None = None,
    ) -> None:
        init = embedding_init or nnx.initializers.normal(0.02)
        self.vocab_name = vocab_name
        self.embedding = nnx.Param(
            named(init, vocab_name, "embed")(
                rngs.params(), (vocab_size, embed_dim), jnp.float32
            )
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks rows up: int ``(batch, seq)`` to ``(batch, seq, embed)``.

        A token outside the vocabulary gives NaN, and so a loss that is not finite.
        """
        # Constrained here, the gradient of the table is summed as rows of the batch
        # and cut afterwards; else its shards would pull the activations apart.
        table = constrain_param(self.embedding[...], self.vocab_name, "embed")
        tokens = jnp.where(tokens < 0, table.shape[0], tokens.astype(jnp.int32))
        rows = jnp.take(table, tokens, axis=0, mode="fill")
        # Whole along `seq` first: a table split by rows is else gathered for a lookup
        # whose rows are split as well.
        rows = constrain_param(rows, "batch", "seq", "embed")
        return constrain(rows, "batch", "seq", "embed")

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits against every row: ``(batch, seq, embed)`` to ``(..., vocab)``."""
        logits = matmul(x, self.embedding[...], ("embed",), ("vocab",), w_dims=(1,))
        return constrain(logits, "batch", "seq", "vocab")
