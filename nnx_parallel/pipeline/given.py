"""What a pipelined function is, and what it is run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.pipeline.parts import Arrays
from nnx_parallel.sharding.model import flatten

Function = Callable[[Arrays, Arrays, Any, Any], tuple[Any, Arrays]]
"""``(params, variables, batch, key) -> (outputs, variables after)``, flat dicts."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a pipelined function is run on.

    Attributes:
        params: Trained parameters, by path.
        variables: All other arrays of the model, by path.
        batch: Microbatches, along a leading dim.
        keys: A random key for each.
    """

    params: Arrays
    variables: Arrays
    batch: Any
    keys: jax.Array

    @classmethod
    def of(
        cls, params: Any, variables: Any, microbatches: Any, key: jax.Array
    ) -> Given:
        """From nested arrays; each microbatch gets a key of its own.

        One microbatch alone is the whole batch and takes the key as it is.
        """
        count = jax.tree.leaves(microbatches)[0].shape[0]
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(count))
        return cls(
            params=flatten(params),
            variables=flatten(variables),
            batch=microbatches,
            keys=keys if count > 1 else key[None],
        )

    def take(self, index: jax.Array) -> tuple[Any, jax.Array]:
        """One microbatch and its key."""
        index = jnp.maximum(index, 0)
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False),
            (self.batch, self.keys),
        )
