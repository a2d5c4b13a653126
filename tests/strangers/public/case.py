"""The type of a public model, and functions that most of the models share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from nnx_parallel.sharding.rules import Rules

COMMITS = {
    "AI-Hypercomputer/maxtext": "e591f30cbbf217ed67ef71263ec0538239f9c3b8",
    "google/flax": "18f8f311c275d57f46d95e41b15aa97b454754c0",
    "google/tunix": "c7d8950f12a9c55a976bf2e1a0d8b447d71c20b3",
    "jax-ml/bonsai": "36284254cf738d99c1c5d1e3a292d27656a0a365",
    "jax-ml/jax-ai-stack": "59de2e1f79348ac85ee26c463c3cede21d8908a5",
    "jinPrelude/minimal-rl-nnx": "c5eced1f0c904748009be62deddf0e670b444c5e",
    "p-doom/jasmine": "420859bc99eecf6b07a7e9edf65d5d145935f1e1",
    "pythoncrazy/jimm": "73f4bfbc0781dd73f93116e044a062e0bdabe49a",
    "timoklein/rejax": "caaebf65d4d061499cbaad2fc52001341eade688",
    "willisma/diffuse_nnx": "023afd23c7b62a8cdb00e840b36a4ab8fc970bba",
}
"""The commit of each repository that the models follow."""


@dataclass(frozen=True, kw_only=True)
class Public:
    """A model with its author's loss.

    Attributes:
        repository: Owner and name on GitHub.
        path: Path of the file with the model, at the commit in `COMMITS`.
        build: Builds the model from random streams.
        loss: The author's loss.
        wrt: The Variables that are trained.
        rules: Rules of the strategy, for names that this library does not know.
        is_built: True if the Trainer gets the built model, because functions of the
            model keep arrays or layers that a trace would lose.
    """

    repository: str
    path: str
    build: Callable[..., nnx.Module]
    loss: Callable[..., Any]
    wrt: Any = nnx.Param
    rules: tuple[Rules, ...] = ()
    is_built: bool = False


def bonsai(**models: tuple[Callable[..., nnx.Module], Callable]) -> dict[str, Public]:
    """Returns cases of Bonsai's repository, given build function and loss by name."""
    return {
        f"bonsai {name}": Public(
            repository="jax-ml/bonsai",
            path=f"bonsai/models/{name}/modeling.py",
            build=build,
            loss=loss,
        )
        for name, (build, loss) in models.items()
    }


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def heads(x: jax.Array, count: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], count, -1)


def attend(q, k, v, mask=None) -> jax.Array:
    """Attention over arrays of shape (rows, length, heads, size)."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhts,bshk->bthk", nnx.softmax(scores), v)
