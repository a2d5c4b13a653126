"""The loop of a fit, on one screen: batch, step, metrics, evaluation, checkpoint."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax

from nnx_parallel.audit import audit
from nnx_parallel.callbacks import Hooks
from nnx_parallel.checkpoint import Storage
from nnx_parallel.data import Feed, Position
from nnx_parallel.engine import Engine
from nnx_parallel.profiling import Tracer
from nnx_parallel.recorder import Recorder
from nnx_parallel.step import Batch
from nnx_parallel.throughput import Throughput, count_tokens


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a fit works with.

    Attributes:
        engine: State and compiled programs.
        storage: Checkpoints.
        position: Where the data stands.
        recorder: Metrics.
        tracer: Traces.
        hooks: The user's callbacks.
        eval_data: Batches to evaluate on, or ``None``.
        eval_every: Steps between evaluations; ``None`` for the last step alone.
    """

    engine: Engine
    storage: Storage
    position: Position
    recorder: Recorder
    tracer: Tracer
    hooks: Hooks
    eval_data: Iterable[Batch] | None = None
    eval_every: int | None = None

    def run(self, data: Iterable[Batch], num_steps: int) -> None:
        """Trains from the state's step until ``num_steps`` updates are done in all."""
        engine, recorder = self.engine, self.recorder
        step = int(engine.state.step)
        with self._feed(data, step, num_steps) as feed, self.tracer:
            for item in feed:
                if recorder.throughput is None:
                    self._compile(item.batch)
                with self.tracer.step(step):
                    engine.state, metrics = engine.train_step(engine.state, item.batch)
                step += 1
                self.position.advance(item.state)
                recorder.push(step, metrics, item.wait_seconds)
                saves = self.storage.is_due(step)
                if saves or self._evaluates(step) or self._ends(step, num_steps):
                    self._pause(step, num_steps, saves=saves)
                if self._ends(step, num_steps):
                    break

    def _feed(self, data: Iterable[Batch], step: int, num_steps: int) -> Feed:
        skip, state = self.position.open(data, step)
        return Feed(
            data,
            self.engine.shard_batch,
            limit=num_steps - step,
            skip=skip,
            state=state,
            first_step=step,
        )

    def _compile(self, batch: Batch) -> None:
        start = time.perf_counter()
        lowered = self.engine.train_step.lower(self.engine.state, batch)  # pyright: ignore[reportFunctionMemberAccess]
        compiled = lowered.compile()
        self.recorder.add_once(compile_seconds=time.perf_counter() - start)
        self.recorder.throughput = Throughput(
            num_rows=jax.tree.leaves(batch)[0].shape[0],
            num_tokens=count_tokens(batch),
            flops_per_device=_step_flops(compiled),
            device=self.engine.plan.layout.mesh.devices.flat[0],
        )

    def _evaluates(self, step: int) -> bool:
        is_due = bool(self.eval_every) and step % self.eval_every == 0
        return is_due and self.eval_data is not None

    def _ends(self, step: int, num_steps: int) -> bool:
        return step == num_steps or self.hooks.wants_stop

    def _pause(self, step: int, num_steps: int, *, saves: bool) -> None:
        """Evaluates and saves, once every step so far is known to be finite.

        Hooks that run here may end the fit: then this step is evaluated and saved.
        """
        self.recorder.flush()
        metrics = self.recorder.last_row()
        wants_eval = saves and self.storage.ranks_by_eval
        if wants_eval or self._evaluates(step) or self._ends(step, num_steps):
            metrics |= self._evaluate(step)
        if self.storage.options and (saves or self._ends(step, num_steps)):
            position = self.position.to_json()
            self.storage.save(self.engine.state, step, position, metrics)
        self.recorder.restart_clock()

    def _evaluate(self, step: int) -> dict[str, float]:
        if self.eval_data is None:
            return {}
        found = self.engine.evaluate(self.eval_data)
        self.recorder.record("eval", step, found)
        self.hooks.eval_end(step, found)
        return {f"eval_{name}": value for name, value in found.items()}


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
    return _Repeat(list(itertools.islice(data, count)))


class _Repeat:
    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self._batches)
