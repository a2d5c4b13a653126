"""The loop of a fit, on one screen: batch, step, metrics, evaluation, checkpoint.

How far a run has come: its state and its data, saved and found again together.

What watches over a fit: signals, requests to stop, steps that hang.

A fit from beginning to end: resumed, agreed upon, run, and left in good order.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import jax

from nnx_parallel.audit.report import audit
from nnx_parallel.checkpoint.manager import CheckpointManager
from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.checkpoint.recovery import (
    check_ahead,
    check_options,
    check_state,
    resume,
)
from nnx_parallel.data.agreement import BatchAgreement
from nnx_parallel.data.batches import copy_if_writeable
from nnx_parallel.data.position import DataState
from nnx_parallel.data.prefetch import PrefetchIterator, check_data
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.distributed.watchdog import Termination, Watchdog
from nnx_parallel.errors import CheckpointError, NonFiniteLossError
from nnx_parallel.loggers.logger import Logger, LoggerGroup, default_loggers
from nnx_parallel.training.callbacks import Hooks
from nnx_parallel.training.diagnostics import (
    agree_on_batch,
    agree_on_program,
    agree_on_run,
    check_evaluation,
    check_num_steps,
    check_replicas,
    check_resumable,
    explain_non_finite,
    explaining_memory,
)
from nnx_parallel.training.evaluation import Engine, EvalGuard
from nnx_parallel.training.optimizers import warn_of_changes
from nnx_parallel.training.profiling import Tracer
from nnx_parallel.training.recorder import History, Recorder, Throughput, count_tokens
from nnx_parallel.training.step import Batch, LossFn


class Progress:
    """The state and the position in the data, which move together.

    Args:
        engine: Holds the state.
        storage: Where it is saved.
    """

    def __init__(self, engine: Engine, storage: CheckpointManager) -> None:
        self.position = DataState()
        self._metrics: dict[int, dict[str, float]] = {}
        self._engine = engine
        self._storage = storage
        self._is_counting = self._is_evaluated = False

    def measured(self, step: int, metrics: dict[str, float]) -> None:
        """Notes the metrics of a step, for a save that a hook may ask for."""
        self._metrics = {step: dict(metrics)}
        self._is_evaluated = False

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Notes an evaluation of the step, besides what was measured of it."""
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self._metrics = {step: self.metrics_of(step) | named}
        self._is_evaluated = True

    def is_evaluated(self, step: int) -> bool:
        """Whether this fit has evaluated the step."""
        return self._is_evaluated and step in self._metrics

    def metrics_of(self, step: int) -> dict[str, float]:
        """What was noted of a step; nothing of any but the last one noted."""
        return dict(self._metrics.get(step, {}))

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """While a fit counts steps from the state that it has found."""
        self._is_counting, self._is_evaluated = True, False
        try:
            yield
        finally:
            self._is_counting = False

    def save(self) -> None:
        """Saves the present state under its step, and waits until it is on disk."""
        state = self._engine.state
        try:
            step, position = int(state.step), self.position.to_json()
            metrics = self._metrics.get(step, {})
            self._storage.save(state, step, position, metrics, once=False)
        finally:
            self._storage.close()

    def restore(
        self,
        step: int | Literal["best"] | None,
        directory: str | os.PathLike | None,
        *,
        weights_only: bool,
    ) -> None:
        """Replaces the state by a saved one.

        That of another run is what this one begins with: it still resumes from its own
        checkpoints, as it does when the same program is started again.

        Raises:
            CheckpointError: If a fit is at work, whose count of steps a state of
                another step would contradict.
        """
        if self._is_counting and not weights_only:
            raise CheckpointError(
                "restore() in the middle of a fit, which counts its steps from the "
                "state that it began with. Call trainer.stop(reason), and restore and "
                "fit again after that; or restore weights_only=True."
            )
        where = self._storage.options if directory is None else Checkpoint(directory)
        storage = CheckpointManager(where, read_only=True)
        try:
            if weights_only:
                state = storage.restore_weights(self._engine.state, step)
            else:
                state, position = storage.restore(self._engine.plan.abstract, step)
                self.position = DataState.from_json(position)
            if self._engine.is_fresh and storage.directory != self._storage.directory:
                self._engine.start_from(state)
            else:
                self._engine.state = state
        finally:
            storage.close()

    def resume(self) -> str | None:
        """Takes up the newest checkpoint, if nothing has been trained yet.

        Returns:
            What was done, or ``None`` for nothing.
        """
        if not self._engine.is_fresh:
            return None
        found = resume(self._storage, self._engine.plan.abstract)
        if found is None:
            return None
        state, position, notes = found
        warn_of_changes(self._engine.plan, state)
        self._engine.state = state
        self.position = DataState.from_json(position)
        done = f"Resumed from step {int(state.step)} in '{self._storage.directory}'."
        return "\n".join([*notes, done])


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
        self.agreement = None if alone else BatchAgreement("batch", self._request)

    @property
    def stop_reason(self) -> str | None:
        """Why the fit ends after this step, or ``None``."""
        return self._request() if self.agreement is None else self._agreed

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
        if self.agreement is not None and self._agreed is None:
            found = allgather_object("end of the fit", self._request())
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


_STEPS_TO_FIRST_METRICS = 4


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a fit works with.

    Attributes:
        engine: State and compiled programs.
        storage: Checkpoints.
        progress: Where the data stands.
        recorder: Metrics.
        tracer: Traces.
        hooks: The user's callbacks.
        supervision: Says when to stop early.
        eval_data: Batches to evaluate on, or ``None``.
        eval_every: Steps between evaluations; ``None`` for the last step alone.
        check_replicas_every: Steps between comparisons of replicas; 0 makes none.
    """

    engine: Engine
    storage: CheckpointManager
    progress: Progress
    recorder: Recorder
    tracer: Tracer
    hooks: Hooks
    supervision: Supervision
    eval_data: Iterable[Batch] | None = None
    eval_every: int | None = None
    check_replicas_every: int = 0

    def run(self, data: Iterable[Batch], num_steps: int) -> None:
        """Trains from the state's step until ``num_steps`` updates are done in all."""
        engine, recorder = self.engine, self.recorder
        step = first_step = int(engine.state.step)
        with (
            self._feed(data, step, num_steps) as feed,
            self.tracer,
            self.progress.counting(),
        ):
            for item in feed:
                if item.stop_reason is not None:
                    self.supervision.accept(item.stop_reason)
                    if step > first_step:
                        self._pause(step, num_steps, saves=False)
                    break
                if recorder.throughput is None:
                    self._compile(item.batch)
                with (
                    self.tracer.step(step, engine.state),
                    self._explaining_memory(),
                ):
                    engine.state, metrics = engine.train_step(engine.state, item.batch)
                step += 1
                self.progress.position.advance(item.state)
                if step > first_step + _STEPS_TO_FIRST_METRICS:
                    engine.first_batch = None
                self.supervision.watchdog.arm(step)
                self.supervision.check()
                self.storage.poll()
                if self.check_replicas_every and step % self.check_replicas_every == 0:
                    check_replicas(engine.state, step)
                with self._explaining_memory():
                    recorder.push(step, metrics, item.wait_seconds)
                saves = self.storage.is_due(step)
                if self.storage.is_preempted:
                    self.supervision.note_termination()
                ends = self._ends(step, num_steps)
                if saves or ends or self._evaluates(step):
                    ends = self._pause(step, num_steps, saves=saves)
                if ends:
                    break
            self.tracer.stop(engine.state)

    def _feed(
        self, data: Iterable[Batch], step: int, num_steps: int
    ) -> PrefetchIterator:
        before = copy.copy(self.progress.position)
        skip, state = self.progress.position.open(data, step, num_steps)
        try:
            return PrefetchIterator(
                data,
                self.engine.shard_batch,
                limit=num_steps - step,
                skip=skip,
                state=state,
                first_step=step,
                agreement=self.supervision.agreement,
            )
        except Exception:
            self.progress.position = before  # data that is refused moves nothing
            raise

    def _compile(self, batch: Batch) -> None:
        start = time.perf_counter()
        self.engine.first_batch = batch
        agree_on_batch(batch)
        lowered = self.engine.train_step.lower(self.engine.state, batch)  # pyright: ignore[reportFunctionMemberAccess]
        agree_on_program(lowered)
        with self._explaining_memory():
            compiled = lowered.compile()
        analysis = compiled.memory_analysis()
        self.engine.temporary_bytes = getattr(analysis, "temp_size_in_bytes", None)
        self.recorder.add_once(compile_seconds=time.perf_counter() - start)
        self.recorder.throughput = Throughput(
            num_rows=jax.tree.leaves(batch)[0].shape[0],
            num_tokens=count_tokens(batch),
            flops_per_device=_step_flops(compiled),
            device=self.engine.plan.layout.mesh.local_devices[0],
        )

    def _explaining_memory(self) -> AbstractContextManager[None]:
        options = self.engine.options
        return explaining_memory(
            self.engine.plan, options.num_microbatches, self.engine.temporary_bytes
        )

    def _evaluates(self, step: int) -> bool:
        is_due = bool(self.eval_every) and step % self.eval_every == 0
        return is_due and self.eval_data is not None

    def _ends(self, step: int, num_steps: int) -> bool:
        return step == num_steps or self.supervision.stop_reason is not None

    def _pause(self, step: int, num_steps: int, *, saves: bool) -> bool:
        """Evaluates and saves, once every step so far is known to be finite.

        Hooks that run here may end the fit: then this step is evaluated and saved. If
        the evaluation fails and there is one process, what has been trained is saved
        before the error ends it. A step is evaluated once.

        Returns:
            Whether the fit ends here. A request that comes while this step is saved
            ends it after the next one, which is then saved too.
        """
        self.recorder.flush()
        self.supervision.watchdog.disarm()
        if not self.progress.is_evaluated(step):
            self.progress.measured(step, self.recorder.last_row())
            wants_eval = saves and self.storage.ranks_by_eval
            if wants_eval or self._evaluates(step) or self._ends(step, num_steps):
                with self._saving_if_it_fails(step):
                    self._evaluate(step)
        ends = self._ends(step, num_steps)
        if saves or ends:
            self._save(step, may_skip=not ends)
        self.recorder.restart_clock()
        if not ends:
            self.supervision.watchdog.arm(step)
        return ends

    def _save(self, step: int, *, may_skip: bool = False) -> None:
        if self.storage.options:
            position = self.progress.position.to_json()
            metrics = self.progress.metrics_of(step)
            self.storage.save(
                self.engine.state, step, position, metrics, may_skip=may_skip
            )

    @contextlib.contextmanager
    def _saving_if_it_fails(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.storage.options and jax.process_count() == 1:
                try:
                    self._save(step)
                    error.add_note(
                        f"Step {step} is saved. To evaluate it alone, restore it and "
                        "call trainer.evaluate(...)."
                    )
                except CheckpointError as failure:
                    error.add_note(f"Besides: {failure}")
            raise

    def _evaluate(self, step: int) -> None:
        # After a SIGTERM there are seconds left, which the checkpoint needs.
        if self.eval_data is None or self.supervision.is_terminated:
            return
        watchdog = self.supervision.watchdog
        guard = EvalGuard(
            start_clock=partial(watchdog.arm, step, "batch of the evaluation"),
            stop_clock=watchdog.disarm,
            stop_reason=self.supervision.termination,
        )
        try:
            found = self.engine.evaluate(self.eval_data, guard=guard)
        finally:
            watchdog.disarm()
        if found:
            self.progress.evaluated(step, found)
            self.recorder.record("eval", step, found)
            self.hooks.eval_end(step, found)


def _step_flops(compiled: jax.stages.Compiled) -> float | None:
    """FLOPs of a compiled step, or ``None`` where its text cannot be had.

    A compiler plugin newer than jaxlib can hold instructions that jaxlib cannot print.
    """
    try:
        return audit(compiled).flops
    except (jax.errors.JaxRuntimeError, ValueError, KeyError, IndexError):
        return None


def repeat_first(data: Iterable[Batch], count: int) -> Iterable[Batch]:
    """The first ``count`` batches, over and over; iterable anew."""
    first = itertools.islice(data, count)
    return _Repeat([jax.tree.map(copy_if_writeable, batch) for batch in first])


class _Repeat:
    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self._batches)


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """What every fit of a Trainer needs.

    Attributes:
        engine: State and compiled programs.
        storage: Checkpoints.
        progress: Where the data stands.
        tracer: Traces.
        hooks: The user's callbacks.
        loss: The user's loss, on which processes agree.
        loggers: The user's loggers; ``None`` for the default ones.
        log_every: Steps between logged metrics.
        fast_dev_run: Two steps and one batch of evaluation.
        overfit_batches: Train on this many batches over and over; 0 takes all.
        step_timeout: Seconds that a step, or a batch of the evaluation, may take;
            ``None`` watches nothing.
        check_replicas_every: Steps between comparisons of replicas; 0 makes none.
    """

    engine: Engine
    storage: CheckpointManager
    progress: Progress
    tracer: Tracer
    hooks: Hooks
    loss: LossFn
    loggers: Sequence[Logger] | None
    log_every: int
    fast_dev_run: bool
    overfit_batches: int
    step_timeout: float | None
    check_replicas_every: int

    def run(
        self,
        data: Iterable[Batch],
        num_steps: int,
        eval_data: Iterable[Batch] | None,
        eval_every: int | None,
    ) -> History:
        """Trains until ``num_steps`` updates are done in all; see `Trainer.fit`."""
        check_num_steps(num_steps)
        check_data(data)
        check_evaluation(eval_data, eval_every)
        num_steps = int(num_steps)
        eval_every = None if eval_every is None else int(eval_every)
        logger = LoggerGroup(self._make_loggers())
        recorder = Recorder(logger, self.hooks.step_end, log_every=self.log_every)
        if self.overfit_batches:
            data = repeat_first(data, self.overfit_batches)
        supervision = Supervision(self.hooks, self.step_timeout)
        loop = Loop(
            engine=self.engine,
            storage=self.storage,
            progress=self.progress,
            recorder=recorder,
            tracer=self.tracer,
            hooks=self.hooks,
            supervision=supervision,
            eval_data=eval_data,
            eval_every=eval_every,
            check_replicas_every=self.check_replicas_every,
        )
        try:
            with supervision:
                self._run(loop, logger, data, num_steps)
            history = recorder.history()
            self.hooks.fit_end(history)
        except NonFiniteLossError as error:
            explained = explain_non_finite(self.engine, self.storage)
            raise NonFiniteLossError(f"{error} {explained}") from None
        except BaseException:
            # The other processes may not be at the same place: nothing to wait for.
            self.storage.abandon_if_shared()
            raise
        finally:
            with self.storage:
                logger.finish()
        if supervision.is_terminated:
            raise SystemExit(0 if self.storage.options else 128 + signal.SIGTERM)
        return history

    def _run(
        self, loop: Loop, logger: LoggerGroup, data: Iterable[Batch], num_steps: int
    ) -> None:
        check_options(self.storage)
        resumed = self.progress.resume()
        check_ahead(self.storage, self._step)
        if self._step < num_steps:
            check_state(self.storage, self.engine.plan.abstract)
        if self.fast_dev_run:
            num_steps = min(num_steps, self._step + 2)
            if loop.eval_data is not None:
                first = list(itertools.islice(loop.eval_data, 1))
                loop = dataclasses.replace(loop, eval_data=first)
        settings = self.storage.description | {
            "num_steps": num_steps,
            "evaluates": [loop.eval_data is not None, loop.eval_every],
        }
        if self.storage.options is not None and self._step == 0:
            check_resumable(data)  # a resumed run hears of it where batches are skipped
        agree_on_run(self.engine.plan, self.loss, settings, self._step)
        logger.start(first_step=self._step, num_steps=num_steps)
        if resumed:
            logger.message(resumed)
        self.hooks.fit_start()
        if self._step < num_steps:
            loop.run(data, num_steps)
        else:
            self.progress.position.pass_over(data, num_steps)
            logger.message(f"All {num_steps} steps are done: nothing to train.")
        self.storage.wait()  # a SIGTERM that comes now does not cut it short
        loop.supervision.settle()
        reason = loop.supervision.stop_reason
        if reason is not None:
            logger.message(f"Stopped at step {self._step}: {reason}")
        if loop.supervision.is_terminated:
            logger.message(self.storage.exit_message(self._step))

    @property
    def _step(self) -> int:
        return int(self.engine.state.step)

    def _make_loggers(self) -> Sequence[Logger]:
        if self.loggers is not None and not self.fast_dev_run:
            return self.loggers
        return default_loggers(self.storage.local_directory)
