"""A fit from beginning to end: resumed, agreed upon, run, and left in good order."""

from __future__ import annotations

import dataclasses
import itertools
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nnx_parallel.agreements import agree_on_run
from nnx_parallel.callbacks import Hooks
from nnx_parallel.checkpoint import Storage
from nnx_parallel.checks import check_evaluation, check_num_steps, check_resumable
from nnx_parallel.data import check_data
from nnx_parallel.diagnosis import explain_non_finite
from nnx_parallel.engine import Engine
from nnx_parallel.errors import NonFiniteLossError
from nnx_parallel.loggers import Logger, LoggerGroup, default_loggers
from nnx_parallel.loop import Loop, repeat_first
from nnx_parallel.profiling import Tracer
from nnx_parallel.progress import Progress
from nnx_parallel.recorder import History, Recorder
from nnx_parallel.step import Batch, LossFn
from nnx_parallel.supervision import Supervision


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
    storage: Storage
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
        self.storage.agree_on_options()
        resumed = self.progress.resume()
        self.storage.check_ahead(self._step)
        if self._step < num_steps:
            self.storage.check_state(self.engine.plan.abstract)
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
            logger.message(self.storage.last_words(self._step))

    @property
    def _step(self) -> int:
        return int(self.engine.state.step)

    def _make_loggers(self) -> Sequence[Logger]:
        if self.loggers is not None and not self.fast_dev_run:
            return self.loggers
        return default_loggers(self.storage.local_directory)
