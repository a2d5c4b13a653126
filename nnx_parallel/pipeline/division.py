"""Finds the stack that runs in stages, and shares its layers among the stages."""

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
    """The layers of a stack, shared among the chunks of all stages.

    All chunks run the same program, which has as many layers as the longest chunk. A
    shorter chunk runs one layer too many, and discards that layer's output. This costs
    no time, because every tick takes as long as its busiest stage.

    Attributes:
        num_layers: Number of layers of the stack.
        num_stages: Number of stages.
        num_chunks: Number of chunks of each stage.
    """

    num_layers: int
    num_stages: int
    num_chunks: int

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of layers of each virtual stage, of shape (chunks * stages,)."""
        parts = self.num_stages * self.num_chunks
        return np.array(share_layers(self.num_layers, parts), np.int32)

    @property
    def is_even(self) -> bool:
        """True if all chunks have the same number of layers."""
        return self.num_layers % (self.num_stages * self.num_chunks) == 0

    @cached_property
    def order(self) -> np.ndarray:
        """The layer in each place, of shape (stages * chunks * places of a chunk,).

        A stage's chunks are side by side. A place without a layer gets a copy of the
        chunk's last layer, so that the block computes finite numbers there.
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
        # The first place of a layer is its real place. Copies in empty places come
        # later.
        return np.unique(self.order, return_index=True)[1]

    def to_stages(
        self, x: jax.Array, stored: NamedSharding, placed: NamedSharding
    ) -> jax.Array:
        """Arranges layers for the stages: ``(layers, ...)`` to ``(places, ...)``.

        Once per step, each device sends its part of all layers to the stages of these
        layers. The stored arrays are split along a dim other than ``layers``.
        """
        # In the stored sharding every device has its part of all layers. Without this
        # constraint the partitioner splits the gather by its indices, and sends twice.
        x = jax.lax.with_sharding_constraint(x[self.order], stored)
        return jax.lax.with_sharding_constraint(x, placed)

    def to_store(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """Inverts `to_stages`. The result ``(layers, ...)`` has the given sharding."""
        x = jax.lax.with_sharding_constraint(x, sharding)
        return jax.lax.with_sharding_constraint(x[self.places], sharding)


def find_stack(model: nnx.Module, wanted: str | None) -> tuple[Path, Stack] | None:
    """Finds the stack that runs in stages: the largest, or the one at a given path."""
    stacks = _stacks_of(model)
    if wanted is not None:
        return next((s for s in stacks.items() if dotted(s[0]) == wanted), None)
    # Stacks are sorted by path, so that all processes choose the same one.
    return max(sorted(stacks.items(), key=_name), key=_size, default=None)


def check_stacks(model: nnx.Module, wanted: str | None, parts: tuple[int, int]) -> None:
    """Checks that a model has a stack for ``parts`` = (stages, chunks of a stage).

    Raises:
        PipelineError: If the model has no stack, or no stack at the given path; if the
            stack has fewer layers than there are chunks on all stages; or if it
            contains another stack or is inside one.
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
            "stack out: the Stack with most parameters then runs in stages."
        )
    path, stack = found
    for other in stacks:
        longer, shorter = sorted((path, other), key=len, reverse=True)
        if other != path and longer[: len(shorter)] == shorter:
            raise PipelineError(
                f"The Stack `{dotted(longer)}` is inside of `{dotted(shorter)}`. A "
                "stage runs whole layers of one Stack: replace the inner Stack by "
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
    """Returns notes for `describe` on uneven stages and stacks outside the pipeline."""
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
    """Returns code that turns the model's list of blocks into a stack, or nothing."""
    path, count = find_blocks(model)
    if not count:
        return ""
    code = "model" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
    return (
        f" (`{dotted(path)}` has {count} alike: if a loop passes x through all of "
        f"them, {code} = nnx.List([Stack.of({code})]) is enough)"
    )
