"""Chooses ``remat="auto"``: the policy that keeps the most values and fits into memory.

Formulas rank the policies. The compiler reports the bytes of a step, and this figure
corrects the formulas. So most searches compile two or three steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.layers.stack.scan import Remat
from nnx_parallel.precision import array_bytes, format_bytes
from nnx_parallel.sharding.offload import HOST
from nnx_parallel.training.compilation import Program
from nnx_parallel.training.diagnostics import Refusal, is_out_of_memory

Ranker = Callable[[Any, Any, str], Mapping[Remat, float]]
"""A function of a Trainer, a batch and a player's name.

It returns the bytes of a step on a device by policy. The policy that keeps the most
values comes first.
"""

_rankers: list[Ranker] = []
# If the compiler only says that a step does not fit, the step is assumed to need this
# multiple of the limit.
_REFUSED = 1.05
# The rest of the memory is for the next batches, and for gaps between arrays.
_USABLE = 0.97


def rank_with(ranker: Ranker) -> None:
    """Sets the function that ranks policies. The plan module sets it."""
    _rankers[:] = [ranker]


def rank_remats(trainer: Any, batch: Any, player: str) -> Mapping[Remat, float]:
    """Ranks policies for a Trainer's step with the function of `rank_with`."""
    (ranker,) = _rankers
    return ranker(trainer, batch, player)


def memory_limit(device: Any) -> int | None:
    """Returns the memory of a device in bytes; ``None`` if it is not known."""
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_in_use(device: Any) -> int:
    """Returns the bytes of all arrays on a device; 0 if they are not known."""
    return (device.memory_stats() or {}).get("bytes_in_use", 0)


def argument_bytes(arguments: Any) -> int:
    """Returns the bytes of a step's arguments in the memory of a device."""
    total = 0
    for x in jax.tree.leaves(arguments):
        sharding = getattr(x, "sharding", None)
        if sharding is not None and sharding.memory_kind != HOST:
            total += array_bytes(sharding.shard_shape(x.shape), x.dtype)
    return total


@dataclass(kw_only=True)
class Choice:
    """A search for the policy that keeps the most values and fits.

    Attributes:
        ranked: Estimated bytes by policy, the policy that keeps the most values first.
            The bytes are NaN if they cannot be estimated. Then the policies are
            compiled in this order until one fits.
        limit: Bytes that a program gets on a device.
    """

    ranked: Mapping[Remat, float]
    limit: float
    _factor: float = field(default=1.0, init=False)
    _needs: dict[Remat, float] = field(default_factory=dict, init=False)

    def next(self) -> Remat | None:
        """Returns the policy to compile next, or ``None`` if the search is over."""
        order: list[Remat] = [*self.ranked]
        fit = self.best
        end = len(order) if fit is None else order.index(fit)
        known = [i for i, x in enumerate(order) if self._needs.get(x, 0) > self.limit]
        rest = order[max(known, default=-1) + 1 : end]
        for remat in rest:
            estimate = self.ranked[remat] * self._factor
            if math.isnan(estimate) or estimate <= self.limit:
                return remat
        return rest[-1] if rest and fit is None else None

    def note(self, remat: Remat, need: float | None) -> None:
        """Records the bytes of a compiled step; ``None`` if the compiler refused it."""
        self._needs[remat] = need or _REFUSED * self.limit
        self._factor = self._needs[remat] / self.ranked[remat]

    @property
    def best(self) -> Remat | None:
        """The policy that keeps the most values among those that fit."""
        for remat in self.ranked:
            if self._needs.get(remat, math.inf) <= self.limit:
                return remat
        return None

    def __str__(self) -> str:
        order: list[Remat] = [*self.ranked]
        remat, limit = self.best, format_bytes(self.limit)
        if remat is None:
            return (
                f"remat='auto': no policy fits. With {order[-1]!r} the step needs "
                f"{self._text(order[-1])}, and a program gets {limit} on a device."
            )
        text = (
            f"remat='auto' chose {remat!r}: the step needs {self._text(remat)} of the "
            f"{limit} that a program gets on a device"
        )
        if (at := order.index(remat)) > 0:
            text += f", and {self._text(order[at - 1])} with {order[at - 1]!r}"
        return f"{text}."

    def _text(self, remat: Remat) -> str:
        """Returns the measured or, with a ``~``, the estimated bytes of a step."""
        if remat in self._needs:
            return format_bytes(self._needs[remat])
        return f"~{format_bytes(self.ranked[remat] * self._factor)}"


@dataclass(kw_only=True, frozen=True)
class Search:
    """The facts with which `start_best` searches for a policy.

    Attributes:
        rank: Function that ranks policies as `rank_remats` does. It is only called if
            the memory of all devices is known.
        levels: The policies to compile if ``rank`` raises an error. The policy that
            keeps the most values comes first.
        device: A device of this process.
        arguments: Bytes of the step's arguments on a device.
    """

    rank: Callable[[], Mapping[Remat, float]]
    levels: Sequence[Remat]
    device: Any
    arguments: int

    def ranked(self) -> tuple[Mapping[Remat, float], str]:
        """Returns estimated bytes by policy, and a sentence if there are none."""
        try:
            return self.rank(), ""
        except Exception as error:  # any error of a loss that has other rows
            text = str(error).strip().splitlines()
            reason = (text or [type(error).__name__])[0]
            note = f" Formulas could not rank the policies: {reason}"
            return dict.fromkeys(self.levels, math.nan), note


class Best(NamedTuple):
    """A chosen policy.

    Attributes:
        remat: The policy.
        started: The step and its program.
        note: A sentence for the user.
        fits: False if the step needs more memory than a device has.
    """

    remat: Remat
    started: tuple[Any, Program]
    note: str
    fits: bool = True


def start_best(search: Search, start: Callable[[Remat], tuple[Any, Program]]) -> Best:
    """Compiles steps until the best policy is found. All processes must call this.

    Args:
        search: The facts.
        start: Function that compiles a step with a policy.

    Raises:
        jax.errors.JaxRuntimeError: If no policy fits and the compiler says so.
    """
    device, first = search.device, search.levels[0]
    mine = memory_limit(device), memory_in_use(device)
    limits, in_use = zip(*allgather_object("memory of a device", mine), strict=True)
    if None in limits:
        note = (
            f"remat='auto' chose {first!r}, because the memory of a {device.platform} "
            "device is not known."
        )
        return Best(first, start(first), note)
    ranked, why = search.ranked()
    policies: list[Remat] = [*ranked]
    last = policies[-1]
    started: dict[Remat, Any] = {}
    choice = Choice(ranked=ranked, limit=_USABLE * min(limits))
    while remat := choice.next():
        need: float | None = None
        try:
            started[remat] = start(remat)
            need = step_bytes(started[remat][1].compiled, max(in_use))
            is_known = need is not None
        except jax.errors.JaxRuntimeError as error:
            if remat == last or not is_out_of_memory(error):
                raise
            need, is_known = refused_bytes(str(error), search.arguments), True
        # The allocators of two processes may differ a little.
        needs = allgather_object("memory of the step", (need, is_known))
        if not all(known for _, known in needs):
            note = (
                f"remat='auto' chose {remat!r}, because the memory of a compiled step "
                f"is not known.{why}"
            )
            return Best(remat, started[remat], note)
        sizes = [size for size, _ in needs]
        choice.note(remat, None if None in sizes else max(sizes))
    best = choice.best or last
    return Best(best, started[best], f"{choice}{why}", choice.best is not None)


def refused_bytes(text: str, arguments: int) -> float | None:
    """Returns the bytes that a refused step needs by the compiler's error."""
    found = Refusal.of(text)
    return found and found.used + (0 if found.has_arguments else arguments)


class AutoStep:
    """A step whose ``remat`` is chosen when it gets the first batch of each shape.

    Args:
        choose: Function that returns the chosen step for a state and a batch.
    """

    def __init__(self, choose: Callable[[Any, Any], Any]) -> None:
        self._chosen = choose

    def __call__(self, state: Any, batch: Any) -> Any:
        """Runs the step."""
        return self._chosen(state, batch)(state, batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lowers the step, as ``jax.jit`` does."""
        return self._chosen(state, batch).lower(state, batch)

    def trace(self, state: Any, batch: Any) -> jax.stages.Traced:
        """Traces the step, as ``jax.jit`` does."""
        return self._chosen(state, batch).trace(state, batch)


def shapes_key(batch: Any) -> tuple:
    """Returns a key that is equal for batches with equal shapes and dtypes."""
    leaves, structure = jax.tree.flatten(batch)
    shapes = ((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
    return structure, *shapes


def step_bytes(compiled: jax.stages.Compiled, in_use: int = 0) -> int | None:
    """Returns the bytes that a compiled step needs on a device, if they are known.

    Args:
        compiled: The step.
        in_use: Bytes of all arrays on a device. Arrays besides the step's arguments
            are added to the result, because they stay on the device.
    """
    memory: Any = compiled.memory_analysis()
    if memory is None:
        return None
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (
        max(in_use, memory.argument_size_in_bytes)
        + memory.temp_size_in_bytes
        + max(0, new)
        + memory.generated_code_size_in_bytes
    )
