"""The loop of a fit, on one screen: batch, step, metrics, evaluation, checkpoint."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import jax

from nnx_parallel.agreements import agree_on_batch, agree_on_program
from nnx_parallel.audit import audit
from nnx_parallel.callbacks import Hooks
from nnx_parallel.checkpoint import Storage
from nnx_parallel.data import Feed, own_array
from nnx_parallel.engine import Engine, EvalGuard
from nnx_parallel.errors import CheckpointError
from nnx_parallel.memory import explaining_memory
from nnx_parallel.profiling import Tracer
from nnx_parallel.progress import Progress
from nnx_parallel.recorder import Recorder
from nnx_parallel.replicas import check_replicas
from nnx_parallel.step import Batch
from nnx_parallel.supervision import Supervision
from nnx_parallel.throughput import Throughput, count_tokens

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
    storage: Storage
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

    def _feed(self, data: Iterable[Batch], step: int, num_steps: int) -> Feed:
        before = copy.copy(self.progress.position)
        skip, state = self.progress.position.open(data, step, num_steps)
        try:
            return Feed(
                data,
                self.engine.shard_batch,
                limit=num_steps - step,
                skip=skip,
                state=state,
                first_step=step,
                lockstep=self.supervision.lockstep,
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
    return _Repeat([jax.tree.map(own_array, batch) for batch in first])


class _Repeat:
    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self._batches)
