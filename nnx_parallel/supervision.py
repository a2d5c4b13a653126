"""What watches over a fit: signals, requests to stop, steps that hang."""

from __future__ import annotations

from typing import Self

import jax

from nnx_parallel.callbacks import Hooks
from nnx_parallel.data import Lockstep
from nnx_parallel.distributed import Termination, Watchdog, exchange

SIGTERM = "SIGTERM, as a machine sends before it is taken away"


class Supervision:
    """Decides when a fit ends early, alike on all processes.

    Args:
        hooks: Where callbacks ask to stop.
        step_timeout: Seconds that a step, or a batch of the evaluation, may take;
            ``None`` watches nothing.
    """

    def __init__(self, hooks: Hooks, step_timeout: float | None) -> None:
        self.watchdog = Watchdog(step_timeout)
        self._hooks = hooks
        self._termination = Termination()
        self._agreed: str | None = None
        alone = jax.process_count() == 1
        self.lockstep = None if alone else Lockstep("batch", self._request)

    @property
    def stop_reason(self) -> str | None:
        """Why the fit ends after this step, or ``None``."""
        return self._request() if self.lockstep is None else self._agreed

    @property
    def is_terminated(self) -> bool:
        """Whether it ends because of a SIGTERM, to this process or another."""
        return self.stop_reason == SIGTERM

    def termination(self) -> str | None:
        """`SIGTERM` if one has come to this process: the others may not know yet."""
        return SIGTERM if self._termination.is_requested else None

    def note_termination(self) -> None:
        """Notes a SIGTERM that came before the fit, of which jax has told."""
        self._termination.is_requested = True

    def accept(self, reason: str) -> None:
        """Notes that all processes have agreed to stop."""
        self._agreed = reason

    def settle(self) -> None:
        """Asks all processes once more: they meet no more after the last batch.

        All processes call it at the end of the fit.
        """
        if self.lockstep is not None and self._agreed is None:
            found = exchange("end of the fit", self._request())
            self._agreed = next((x for x in found if x is not None), None)

    def check(self) -> None:
        """Called once a step."""
        self._termination.check()

    def _request(self) -> str | None:
        return self.termination() or self._hooks.stop_reason

    def __enter__(self) -> Self:
        self._termination.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.watchdog.disarm()
        self._termination.__exit__(*exc_info)
