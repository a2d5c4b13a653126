"""Agreement of all processes on each batch, before it is placed.

A process without a batch, or with one of another shape, would compile another program
or none: the others would wait in a collective that it never enters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nnx_parallel.distributed.agreement import allgather_object, differences
from nnx_parallel.errors import BatchShapeError, DataError, DataExhaustedError

Signature = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each array of a batch, by its path."""


@dataclass(frozen=True)
class BatchAgreement:
    """Compares the next batch of each process, without using a device.

    Args:
        name: Name of what is read; two iterators that read at once need two names.
        stop_reason: Returns why this process wants to stop, or ``None``.
    """

    name: str
    stop_reason: Callable[[], str | None] = lambda: None

    def check(
        self,
        signature: Signature | None,
        problem: DataError | None = None,
        *,
        index: int,
        num_read: int,
    ) -> str | None:
        """Waits until each process has a batch, or knows that it has none.

        Args:
            signature: Signature of this process's batch; ``None`` if its data has
                ended or the batch cannot be used.
            problem: Why the batch cannot be used, or ``None``.
            index: Number of the batch, for messages.
            num_read: Batches that this process has read before, for messages.

        Returns:
            Why all processes stop before this batch; ``None`` if they use it, or if
            the data of all has ended.

        Raises:
            DataError: ``problem``, on the process that has it.
            BatchShapeError: On all others, and if shapes or dtypes differ.
            DataExhaustedError: If the data of some processes has ended, but not of all.
        """
        text = None if problem is None else str(problem)
        # Not `multihost_utils.process_allgather`: that runs a program, on a thread that
        # prefetches. Processes that launch programs in different orders deadlock.
        found = allgather_object(self.name, [signature, text, self.stop_reason()])
        signatures, problems, reasons = zip(*found, strict=True)
        for reason in reasons:
            if reason is not None:  # first of all: a run that stops needs no batch
                return reason
        if problem is not None:
            raise problem  # with its own traceback; the others quote its text
        ended = [
            i for i, (x, text, _) in enumerate(found) if x is None and text is None
        ]
        if ended and len(ended) < len(found):
            raise DataExhaustedError(
                f"Data of processes {ended} ended after {num_read} batches; others "
                "have more. Every process must give its share of every batch: split "
                "the rows of each batch, or drop what does not divide."
            )
        for process, text in enumerate(problems):
            if text is not None:
                raise BatchShapeError(f"Process {process} has no usable batch: {text}")
        for process, other in enumerate(signatures):
            if other != signatures[0]:
                raise _difference(index, process, signatures[0], other)
        return None


def _difference(
    index: int, process: int, first: Signature, other: Signature
) -> BatchShapeError:
    return BatchShapeError(
        f"Processes 0 and {process} have batches {index} of different shapes:\n  "
        + "\n  ".join(differences(process, first, other, _format))
        + "\nEvery process gives an equal share of the rows of each batch, never the "
        "global batch: split them by trainer.data_share, and drop or pad what does not "
        "divide."
    )


def _format(found: Any) -> str:
    if found is None:
        return "no such array"
    shape, dtype = found
    return f"{dtype}[{', '.join(map(str, shape))}]"
