"""Chooses ``remat="auto"``: the policy that keeps the most values and fits into memory.

Formulas rank the policies, and the compiler says what a step needs. Each compiled step
corrects the formulas, so that two or three steps are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.layers.stack.scan import Remat
from nnx_parallel.precision import format_bytes
from nnx_parallel.training.compilation import Program
from nnx_parallel.training.diagnostics import is_out_of_memory

Ranker = Callable[[Any, Any, str], Mapping[Remat, float]]
"""A function of a Trainer, a batch and a player's name.

It returns the bytes of a step on a device by policy. The policy that keeps the most
values comes first.
"""

_rankers: list[Ranker] = []
# Memory that a step needs at least, in parts of the limit, if the compiler only says
# that the step does not fit.
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


@dataclass(kw_only=True)
class Choice:
    """A search for the policy that keeps the most values and fits.

    Attributes:
        ranked: Estimated bytes by policy, the policy that keeps the most values first.
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
            if self.ranked[remat] * self._factor <= self.limit:
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


def start_best(
    ranked: Mapping[Remat, float],
    device: Any,
    start: Callable[[Remat], tuple[Any, Program]],
) -> tuple[Remat, tuple[Any, Program], str]:
    """Compiles steps until the best policy is known. All processes must call this.

    Args:
        ranked: Estimated bytes by policy, as `rank_remats` returns them.
        device: A device of this process.
        start: Function that compiles a step with a policy.

    Returns:
        The policy, the result of ``start`` for it, and a sentence for the user.

    Raises:
        jax.errors.JaxRuntimeError: If no policy fits and the compiler says so.
    """
    policies: list[Remat] = [*ranked]
    first, last = policies[0], policies[-1]
    limits = allgather_object("memory of a device", memory_limit(device))
    if None in limits:
        note = (
            f"remat='auto' chose {first!r}, because the memory of a {device.platform} "
            "device is not known."
        )
        return first, start(first), note
    started: dict[Remat, Any] = {}
    choice = Choice(ranked=ranked, limit=_USABLE * min(limits))
    while (remat := choice.next()) is not None:
        need = None
        try:
            started[remat] = start(remat)
            need = step_bytes(started[remat][1].compiled)
        except jax.errors.JaxRuntimeError as error:
            if remat == last or not is_out_of_memory(error):
                raise
        # The allocators of two processes may differ a little.
        needs = allgather_object("memory of the step", need)
        choice.note(remat, None if None in needs else max(needs))
    best = choice.best or last
    return best, started[best], str(choice)


class AutoStep:
    """A step whose ``remat`` is chosen when it gets its first batch.

    Args:
        start: `Programs.start`; it returns the chosen step and its program.
    """

    def __init__(self, start: Callable[[Any, Any], tuple[Any, Program]]) -> None:
        self._start, self._step = start, None

    def __call__(self, state: Any, batch: Any) -> Any:
        """Runs the step."""
        return self._chosen(state, batch)(state, batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lowers the step, as ``jax.jit`` does."""
        return self._chosen(state, batch).lower(state, batch)

    def trace(self, state: Any, batch: Any) -> jax.stages.Traced:
        """Traces the step, as ``jax.jit`` does."""
        return self._chosen(state, batch).trace(state, batch)

    def _chosen(self, state: Any, batch: Any) -> Any:
        if self._step is None:
            self._step, _ = self._start(state, batch)
        return self._step


def step_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes that a compiled step needs on a device."""
    memory: Any = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + max(0, new)
        + memory.generated_code_size_in_bytes
    )
