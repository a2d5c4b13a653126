"""Everything that a run continues from, saved and restored as one."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
from flax import nnx

from nnx_parallel.checkpoint.manager import CheckpointManager
from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.data.position import DataState, is_one_shot
from nnx_parallel.distributed.agreement import strip_addresses
from nnx_parallel.errors import CheckpointError
from nnx_parallel.sharding.model import ModelFn
from nnx_parallel.state import StatePlan, TrainState, init_state
from nnx_parallel.training.optimizers import warn_of_changes


class RunState:
    """The training state, the position in the data, and the newest metrics of a run.

    A checkpoint holds all three, so that a resumed run computes the next step from the
    next batch. Metrics follow the other two when a fit pauses to evaluate or save.

    Args:
        plan: The place of every array.
        source: The model, or the function that builds it.
        seed: Of the model and of the loss's random numbers.
        checkpoints: The run's own checkpoints.

    Attributes:
        data: Position in the data.
        metrics: Of the step at which the fit last paused, named by ``"step"``, with
            those of its evaluation.
        is_fresh: Whether the state is the first one: neither trained nor restored.
    """

    def __init__(
        self,
        plan: StatePlan,
        source: nnx.Module | ModelFn,
        seed: int,
        checkpoints: CheckpointManager,
    ) -> None:
        self.checkpoints = checkpoints
        self.data = DataState()
        self.metrics: dict[str, float] = {}
        self.is_fresh = True
        self._plan = plan
        self._source, self._seed = source, seed
        self._state: TrainState | None = None
        self._is_counting = False

    @property
    def state(self) -> TrainState:
        """The training state, built on first use."""
        # Not in the constructor: a run that resumes would build it for nothing.
        if self._state is None:
            rngs = nnx.Rngs(self._seed)
            self._state = init_state(self._plan, self._source, rngs, self._seed)
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state
        self.is_fresh = False

    @property
    def step(self) -> int:
        """Updates done; waits for the newest one."""
        return int(self.state.step)

    @contextlib.contextmanager
    def counting_steps(self) -> Iterator[None]:
        """Context in which a fit counts steps from the state that it found."""
        # Metrics of an earlier fit may be of a step that this one reaches again.
        self._is_counting, self.metrics = True, {}
        try:
            yield
        finally:
            self._is_counting = False

    def save(
        self, step: int | None = None, *, once: bool = True, may_skip: bool = False
    ) -> None:
        """Starts to save this run under a step; see the manager's ``save``.

        Args:
            step: The step as a fit counts, which is the state's unless a callback has
                moved that; by default the state's.
            once: As of the manager.
            may_skip: As of the manager.
        """
        step = self.step if step is None else step
        # All processes meet in `to_json`, also where the save has nothing to do.
        position = self.data.to_json()
        metrics = self.metrics if self.metrics.get("step") == step else {}
        self.checkpoints.save(
            self.state, step, position, metrics, once=once, may_skip=may_skip
        )

    def restore(
        self,
        step: int | Literal["best"] | None,
        directory: str | os.PathLike | None,
        *,
        weights_only: bool,
    ) -> None:
        """Replaces the state by a saved one; see `Trainer.restore`."""
        if self._is_counting and not weights_only:
            raise CheckpointError(
                "restore() in the middle of a fit, which counts its steps from the "
                "state that it began with. Call trainer.stop(reason), and restore and "
                "fit again after that; or restore weights_only=True."
            )
        own = self.checkpoints
        where = own.options if directory is None else Checkpoint(directory)
        with CheckpointManager(where, read_only=True) as source:
            if weights_only:
                state = source.restore_weights(self.state, step)
            else:
                state, position = source.restore(self._plan.abstract, step)
                self.data, self.metrics = DataState.from_json(position), {}
        is_fresh = self.is_fresh and source.directory != own.directory
        self.state = state
        # Another run's state is a beginning: the same program, started again, must
        # resume from its own checkpoints and not begin once more.
        self.is_fresh = is_fresh

    def resume(
        self, state: TrainState, position: Mapping[str, Any], notes: list[str]
    ) -> str:
        """Continues from a checkpoint of this run; returns a message that says so."""
        warn_of_changes(self._plan, state)
        self.state, self.data = state, DataState.from_json(position)
        done = f"Resumed from step {self.step} in '{self.checkpoints.directory}'."
        return "\n".join([*notes, done])


def warn_of_one_shot(data: object) -> None:
    """Warns of data in which a resumed run could not find its place."""
    if is_one_shot(data):
        warnings.warn(
            f"The run saves checkpoints, but its data is a one-shot iterator "
            f"({type(data).__name__}), whose position cannot be saved: a resumed run "
            "skips as many batches as were used, which is right only if the iterator "
            "then starts at its beginning. Pass an object whose `__iter__` starts "
            "again, or a Grain dataset.",
            stacklevel=5,  # the call of `Trainer.fit`
        )


def describe_run(
    plan: StatePlan, strategy: object, num_microbatches: int, seed: int
) -> dict[str, Any]:
    """Description of a run in its checkpoints, as JSON can hold it."""
    return {
        "strategy": strip_addresses(repr(strategy)),
        "mesh": dict(plan.layout.mesh.shape),
        "model": plan.model_name,
        "optimizer": _optimizer_names(plan.abstract.opt_state),
        "num_params": sum(x.size for x in jax.tree.leaves(plan.abstract.params)),
        "num_microbatches": num_microbatches,
        "seed": seed,
    }


def _optimizer_names(opt_state: Any) -> str:
    """The kinds of an optimizer's states, outermost first: all that Optax shows."""
    names: dict[str, None] = {}

    def visit(node: Any) -> bool:
        if hasattr(node, "_fields"):
            names[type(node).__name__] = None
        return False  # no leaf: `is_leaf` is the one way to see inner nodes in order

    jax.tree.leaves(opt_state, is_leaf=visit)
    return ", ".join(name for name in names if name != "EmptyState")
