"""Processes take their batches in step, so that nobody waits for one that ran dry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nnx_parallel.data.batches import Signature
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import BatchShapeError


@dataclass(frozen=True, kw_only=True)
class BatchStatus:
    """What all processes have found before a batch, the same on each.

    Attributes:
        ended: The processes whose data has ended.
        all_ended: Whether that is all of them.
        stop_reason: Why the run is to stop before this batch, or ``None``.
        problems: What is wrong with the batch, by process.
        signatures: Shape and dtype of each array, by process; ``None`` without batch.
    """

    ended: list[int]
    all_ended: bool
    stop_reason: str | None
    problems: dict[int, str]
    signatures: list[Signature | None]

    def check_batches(self, index: int) -> None:
        """Checks that all processes have usable batches of the same shapes.

        Args:
            index: The batch's number, for messages.

        Raises:
            BatchShapeError: On all processes, if not. It names the processes.
        """
        for process, text in self.problems.items():
            raise BatchShapeError(f"Process {process} has no usable batch: {text}")
        first = self.signatures[0]
        for process, other in enumerate(self.signatures):
            if other != first and first is not None and other is not None:
                raise _difference(index, process, first, other)


@dataclass(frozen=True)
class BatchAgreement:
    """Meets the other processes before each batch, beside the devices.

    Args:
        name: Of what is read; two that read at once need two names.
        stop_reason: Says whether, and why, this process wants to stop.
    """

    name: str
    stop_reason: Callable[[], str | None] = lambda: None

    def meet(
        self, signature: Signature | None, problem: str | None = None
    ) -> BatchStatus:
        """Waits for all processes to have a batch, or none.

        Args:
            signature: Of this process's batch; ``None`` if its data has ended, or its
                batch is none.
            problem: What is wrong with the batch, or ``None``.
        """
        found = allgather_object(self.name, [signature, problem, self.stop_reason()])
        reasons = [reason for *_, reason in found if reason is not None]
        dry = [i for i, (x, text, _) in enumerate(found) if x is None and text is None]
        return BatchStatus(
            ended=dry,
            all_ended=len(dry) == len(found),
            stop_reason=reasons[0] if reasons else None,
            problems={i: x[1] for i, x in enumerate(found) if x[1] is not None},
            signatures=[x[0] for x in found],
        )


def _difference(
    index: int, process: int, first: Signature, other: Signature
) -> BatchShapeError:
    lines = [
        f"{name}: process 0 has {_spell(first.get(name))}, process {process} has "
        f"{_spell(other.get(name))}"
        for name in dict.fromkeys((*first, *other))
        if first.get(name) != other.get(name)
    ]
    return BatchShapeError(
        f"Processes 0 and {process} have batches {index} of different shapes:\n  "
        + "\n  ".join(lines)
        + "\nEvery process "
        "gives an equal share of the rows of each batch, never the global batch: split "
        "them by trainer.data_share, and drop or pad what does not divide."
    )


def _spell(found: Any) -> str:
    if found is None:
        return "no such array"
    shape, dtype = found
    return f"{dtype}[{', '.join(map(str, shape))}]"
