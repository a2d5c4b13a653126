"""Which stack of a model runs in stages, and how its layers are shared among them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from nnx_parallel.errors import PipelineError
from nnx_parallel.layers.stack.build import find_blocks
from nnx_parallel.layers.stack.stack import Stack
from nnx_parallel.schedules.slots import share_layers
from nnx_parallel.sharding.model import Path
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import variables_of


@dataclass(frozen=True)
class Division:
    """Layers of a stack, shared among the chunks of all stages.

    All chunks run one program of as many layers as the longest has. One with fewer runs
    a layer more than it has, whose output is thrown away: every tick costs as much as
    its busiest stage pays, so that nothing is lost by it.

    Attributes:
        num_layers: Layers of the stack.
        num_stages: Number of stages.
        num_chunks: Chunks of each.
    """

    num_layers: int
    num_stages: int
    num_chunks: int

    @cached_property
    def counts(self) -> np.ndarray:
        """Layers of each virtual stage, of shape (chunks * stages,)."""
        parts = self.num_stages * self.num_chunks
        return np.array(share_layers(self.num_layers, parts), np.int32)

    @property
    def is_even(self) -> bool:
        """True if all chunks have as many layers."""
        return self.num_layers % (self.num_stages * self.num_chunks) == 0

    @cached_property
    def order(self) -> np.ndarray:
        """The layer in each place, of shape (stages * chunks * places of a chunk,).

        A stage's chunks are side by side. A place without a layer has a copy
        of the chunk's last: values of which a block makes no infinities.
        """
        ends = self.counts.cumsum()
        place = np.arange(self.counts.max())
        # (chunks * stages, places)
        layers = (ends - self.counts)[:, None] + np.minimum(
            place, self.counts[:, None] - 1
        )
        shape = (self.num_chunks, self.num_stages, -1)
        return layers.reshape(shape).swapaxes(0, 1).ravel()

    @cached_property
    def places(self) -> np.ndarray:
        """The place of each layer, of shape (layers,)."""
        # The first of its copies: those that only fill up come after it.
        return np.unique(self.order, return_index=True)[1]

    def to_stages(
        self, x: jax.Array, stored: NamedSharding, placed: NamedSharding
    ) -> jax.Array:
        """An array of layers ``(layers, ...)`` as stages run them: ``(places, ...)``.

        Once a step each device sends its part of all layers, along another dim,
        to the stages of these layers.
        """
        # First every device has all layers of its part: otherwise the partitioner
        # splits the gather by its indices, and sends twice.
        x = jax.lax.with_sharding_constraint(x[self.order], stored)
        return jax.lax.with_sharding_constraint(x, placed)

    def to_store(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """The inverse of `to_stages`, in the sharding of ``(layers, ...)``."""
        x = jax.lax.with_sharding_constraint(x, sharding)
        return jax.lax.with_sharding_constraint(x[self.places], sharding)


def find_stack(model: nnx.Module, wanted: str | None) -> tuple[Path, Stack] | None:
    """The stack that runs in stages: with most elements, or at a given path."""
    stacks = _stacks_of(model)
    if wanted is not None:
        return next((s for s in stacks.items() if dotted(s[0]) == wanted), None)
    # Stacks are in the order of paths, so that all processes choose the same one.
    return max(sorted(stacks.items(), key=_name), key=_size, default=None)


def check_stacks(model: nnx.Module, wanted: str | None, parts: tuple[int, int]) -> None:
    """Refuses a model without a stack for these stages and chunks.

    Raises:
        PipelineError: If the model has no stack, or not one at the given path; if the
            stack has fewer layers than there are chunks of stages, or contains another
            stack.
    """
    stacks, (num_stages, num_chunks) = _stacks_of(model), parts
    name = type(model).__name__
    if not stacks:
        raise PipelineError(
            f"{name} has no Stack. A Pipeline spreads the layers of one "
            "nnx_parallel.layers.Stack over its stages: put the model's repeated "
            f"blocks into one Stack, as Stack.of(blocks) does{_hint(model)}; or use "
            "FSDP or TensorParallel, which need no Stack."
        )
    found = find_stack(model, wanted)
    if found is None:
        raise PipelineError(
            f"Pipeline(stack={wanted!r}), but {name} has Stacks "
            f"{sorted(map(dotted, stacks))}. Give the path of one of them, or leave "
            "stack out: the one with most parameters then runs in stages."
        )
    path, stack = found
    for other in stacks:
        longer, shorter = sorted((path, other), key=len, reverse=True)
        if other != path and longer[: len(shorter)] == shorter:
            raise PipelineError(
                f"The Stack `{dotted(longer)}` is inside of `{dotted(shorter)}`. A "
                "stage runs whole layers of one Stack: take the inner one apart, "
                "nnx.List(stack.unstack())."
            )
    if stack.num_layers < num_stages * num_chunks:
        valid = stack.num_layers // num_chunks
        each, those = "", "There"
        if num_chunks > 1:
            each, those = f" of {num_chunks} chunks", f"With {num_chunks} chunks there"
        raise PipelineError(
            f"`{dotted(path)}` has {stack.num_layers} layers, fewer than {num_stages} "
            f"stages{each}, which need at least one each. {those} can be "
            f"{f'1 to {valid}' if valid else 'no'} stages."
        )


def describe_stacks(
    model: nnx.Module, wanted: str | None, parts: tuple[int, int]
) -> tuple[str, ...]:
    """Notes for `describe`: uneven stages, and stacks around the pipeline."""
    if (found := find_stack(model, wanted)) is None:
        return ()
    path, stack = found
    division, notes = Division(stack.num_layers, *parts), []
    counts, chunks = division.counts, f" of {parts[1]} chunks" * (parts[1] > 1)
    if not division.is_even and counts.min():
        idle = 1 - counts.mean() / counts.max()
        notes.append(
            f"uneven: {parts[0]} stages{chunks} share the {stack.num_layers} layers of "
            f"`{dotted(path)}` as {', '.join(map(str, counts))}: {idle:.1%} of their "
            "time is idle for this reason, and each step sends the weights to their "
            "stages and the gradients back."
        )
    for other, each in sorted(_stacks_of(model).items(), key=_name):
        if other[: len(path)] != path:
            notes.append(
                f"around the pipeline: `{dotted(other)}`, {each.num_layers} layers; "
                "all devices share the rows of each microbatch there."
            )
    return tuple(notes)


def _stacks_of(model: nnx.Module) -> dict[Path, Stack]:
    return {p: m for p, m in nnx.iter_modules(model) if isinstance(m, Stack)}


def _name(found: tuple[Path, Stack]) -> str:
    return dotted(found[0])


def _size(found: tuple[Path, Stack]) -> int:
    arrays: Any = (v.get_value() for _, v in variables_of(found[1], nnx.Param))
    return sum(x.size for x in arrays)


def _hint(model: nnx.Module) -> str:
    """The line that makes a stack of a model's list of blocks; empty if it has none."""
    path, count = find_blocks(model)
    if not count:
        return ""
    code = "model" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return (
        f" (`{dotted(path)}` has {count} alike: if a loop passes x through them all, "
        f"{code} = nnx.List([Stack.of({code})]) is enough)"
    )
