"""One fit: a loop over batches with steps, metrics, evaluations and checkpoints."""

import contextlib
import copy
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from nnx_parallel.data.batches import BatchAgreement, data_share
from nnx_parallel.data.position import Epochs, Repeated, warn_of_one_shot
from nnx_parallel.data.prefetch import PlacedBatch, PrefetchIterator, check_data
from nnx_parallel.data.reading import Cursor
from nnx_parallel.data.rows import (
    LastBatch,
    Pad,
    SmallerBatches,
    check_last_batch,
    count_rows,
)
from nnx_parallel.distributed.agreement import allgather_object, count_step
from nnx_parallel.distributed.causes import note_step
from nnx_parallel.distributed.runtime import (
    INTERRUPT,
    PREEMPTED,
    Termination,
    Watchdog,
    make_interrupt,
)
from nnx_parallel.errors import (
    CheckpointError,
    NonFiniteLossError,
    ParallelWarning,
    warn_user,
)
from nnx_parallel.loggers.logger import Logger, LoggerGroup, default_loggers
from nnx_parallel.precision import format_clock
from nnx_parallel.state import TrainState
from nnx_parallel.training.arguments import Debugging, Faults
from nnx_parallel.training.callback import Callback
from nnx_parallel.training.diagnostics import (
    agree_on_batch,
    agree_on_run,
    check_evaluation,
    check_replicas,
    explain_non_finite,
    explaining_memory,
    shapes_of,
)
from nnx_parallel.training.evaluation import Programs
from nnx_parallel.training.goodput import Stragglers, WallTime
from nnx_parallel.training.history import History
from nnx_parallel.training.recorder import Recorder, Throughput, Tracer, Values
from nnx_parallel.training.run_state import RunState
from nnx_parallel.training.step import Batch, Metrics
from nnx_parallel.training.verification import replay

SIGTERM = "SIGTERM, which a machine sends before it is taken away"
_SIGNALS = (SIGTERM, INTERRUPT)  # after these there is no time for an evaluation

_STEPS_TO_FIRST_METRICS = 4
"""After so many steps, the first metrics are known. They arrive up to 2 steps late."""


@dataclass(kw_only=True)
class Loop:
    """One fit, with the arguments and errors of `Trainer.fit`."""

    trainer: Any  # passed to the callbacks
    run: RunState
    programs: Programs
    loggers: Sequence[Logger] | None
    callbacks: Sequence[Callback]
    log_every: int
    faults: Faults
    debugging: Debugging
    warm_start: str | os.PathLike | None
    data: Iterable[Batch]
    num_steps: int
    num_epochs: int | None
    eval_data: Iterable[Batch] | None
    eval_every: int | None
    last_batch: LastBatch | None

    def __post_init__(self) -> None:
        self._is_alone = jax.process_count() == 1
        self._wall, self._stragglers = WallTime(), Stragglers()
        check_data(self.data)
        check_last_batch(self.last_batch)
        self.eval_every = check_evaluation(self.eval_data, self.eval_every)
        for callback in self.callbacks:
            if callback.needs_evaluation and self.eval_data is None:
                raise ValueError(
                    f"{callback!r} needs evaluations: pass eval_data and eval_every to "
                    "fit."
                )
        if count := self.debugging.overfit_batches:
            self.data = Repeated(self.data, count)
        self._epochs = Epochs(self.data, self.num_epochs) if self.num_epochs else None
        directory = self.run.checkpoints.local_directory
        is_trial, profile = self.debugging.fast_dev_run, self.debugging.profile
        loggers = self.loggers
        if loggers is None or is_trial:
            loggers = default_loggers(directory)
        self._logger = LoggerGroup(loggers, warns=self.run.checkpoints.warns)
        skip = self.faults.skip
        self._recorder = Recorder(
            self._logger,
            self._on_step_end,
            self.log_every,
            skip_limit=skip.limit if skip else 0,
            is_state_finite=lambda: not self.run.broken_arrays(),
        )
        # A trace is a file, and a trial run writes no files.
        self._tracer = Tracer(None if is_trial else profile, directory)
        timeout, durations = self.faults.step_timeout, self._recorder.step_seconds
        self._watchdog = Watchdog(timeout, durations)
        self._termination = Termination(saves=self.run.checkpoints.options is not None)
        self._stop_request: str | None = None
        self._agreed_stop: str | None = None
        self._began: tuple[int, float] | None = None  # the first step and its time
        self._first_batch: Batch | None = None
        self._recent: dict[int, Batch] = {}  # batches of steps in flight, by step
        self._steps: dict[str, Any] = {}  # compiled steps by player
        self._temporary_bytes: int | None = None
        self._evaluated_step: int | None = None
        self._replayed: set[Programs] = set()

    def stop(self, reason: str) -> None:
        """Requests that the fit ends after the current step."""
        self._stop_request = reason

    def log(self, metrics: Values | str) -> None:
        """Logs numbers for the newest step, or a text."""
        if isinstance(metrics, str):
            self._logger.message(metrics)
            return
        self._logger.log(self.run.step, {name: float(x) for name, x in metrics.items()})

    def fit(self) -> History:
        """Runs the fit; see `Trainer.fit`."""
        checkpoints = self.run.checkpoints
        try:
            with self._termination:
                self.run.announce()
                self._fit()
            history = self._recorder.history()
            for callback in self.callbacks:
                callback.on_fit_end(self.trainer, history)
        except NonFiniteLossError as error:
            note_step(self._recorder.bad_step)  # later steps have begun already
            why = self._explain_non_finite()
            raise NonFiniteLossError(f"{error} {why}") from None
        except BaseException:
            # This process must not wait for others, which may never reach this line.
            checkpoints.abandon_if_shared()
            raise
        finally:
            with contextlib.ExitStack() as stack:
                # The loggers finish last, so that they log a save that ends here.
                stack.callback(self._logger.finish)
                stack.callback(setattr, checkpoints, "report", str)
                stack.enter_context(checkpoints)
        if self._stop_reason == SIGTERM:
            # This also ends a fit after its last step: the script may have more to do.
            # Without checkpoints another start would begin again, and never end.
            raise SystemExit(PREEMPTED if checkpoints.options else 1)
        if self._stop_reason == INTERRUPT:
            raise make_interrupt(INTERRUPT)
        return history

    def _explain_non_finite(self) -> str:
        state, saved = self.run.state, self.run.checkpoints.latest_step
        batch = self._recent.get(self._recorder.bad_step)
        labels = []
        if batch is not None:
            labels = self.programs.label_ranges(state, batch, self.run.wrt)
        return explain_non_finite(state, saved, labels, batch)

    def _resume(self) -> str:
        """Resumes the run, and notes its step for the launcher."""
        resumed = self.run.resume()
        note_step(self.run.step)
        return resumed

    def _fit(self) -> None:
        run, checkpoints, logger = self.run, self.run.checkpoints, self._logger
        programs = self.programs
        # Options are checked first, because they decide which collectives a save runs.
        checkpoints.check_options()
        resumed = self._resume()
        if self._epochs:
            count = self._epochs.num_steps(self.last_batch)
            self.num_steps = run.data.passed_steps(count)
            if not self.num_steps:
                self._open_data(run.step)
                self.num_steps = run.data.first_step + count
        checkpoints.check_ahead(run.step)
        if run.step < self.num_steps:
            # A state that cannot be saved fails here, not after hours of training.
            checkpoints.check_state(programs.plan.abstract)
        if self.debugging.fast_dev_run:
            self.num_steps = min(self.num_steps, run.step + 2)
            if self.eval_data is not None:
                self.eval_data = list(itertools.islice(self.eval_data, 1))
        # A resumed run warns later, when it skips batches.
        if checkpoints.options and run.step == 0:
            warn_of_one_shot(self.data)
        if checkpoints.ranks_by_eval and self.eval_data is None:
            checkpoints.check_best((), "a fit without eval_data")
        # The programs of the processes depend on these settings, so they must agree.
        settings = checkpoints.description | {
            "num_steps": self.num_steps,
            "compiler_options": programs.compiler_options,
            "evaluates": [self.eval_data is not None, self.eval_every],
        }
        agree_on_run(programs.plan, programs.losses, settings, run.step)
        logger.start(first_step=run.step, num_steps=self.num_steps)
        logger.configure(run.config(self.num_steps))
        checkpoints.report = self._report_save
        header = run.header(self.num_steps, *programs.compiler_options)
        for text in filter(None, (header, resumed)):
            logger.message(text)
        for callback in self.callbacks:
            callback.on_fit_start(self.trainer)
        # The step is read again, because a hook may have restored another step.
        ended = [c.end_reason for c in self.callbacks if c.end_reason]
        if ended:  # a restored reason, which is the same on all processes
            self.stop(ended[0])
        elif run.step < self.num_steps:
            self._train()
        else:
            self._pass_over(is_first=bool(header))
        # The wait is inside the context of `_termination`. Outside this context, a
        # SIGTERM would end the save early.
        self._wait_for_save()
        self._summarise()
        if not self._is_alone and self._agreed_stop is None:
            # After the last batch, any process may have received a request to stop.
            found = allgather_object("end of the fit", self._requested_stop())
            self._agreed_stop = next((x for x in found if x is not None), None)
        if self._stop_reason is not None:
            logger.message(f"Stopped at step {run.step}: {self._stop_reason}")
        if self._stop_reason in _SIGNALS:
            logger.message(checkpoints.exit_message(run.step))

    def _pass_over(self, *, is_first: bool) -> None:
        """Ends a fit that has no steps to train."""
        if not is_first:  # a restarted program may find that all is done
            warn_user(
                f"This fit trains nothing: {self.num_steps} steps are asked for, and "
                f"{self.run.step} are done already. num_steps and num_epochs are the "
                "totals of the run, including earlier fits.",
                ParallelWarning,
            )
        self.run.data.pass_over(self.data, self.num_steps, self.run.step)
        self._logger.message(f"All {self.num_steps} steps are done: nothing to train.")

    def _wait_for_save(self) -> None:
        with self._wall.measure("saves"):
            self.run.save_last()
            self.run.checkpoints.wait()

    def _summarise(self) -> None:
        """Logs the steps, the time, the best evaluation and where the run is saved."""
        if self._began is None:
            return
        # The time until the next start is lost only if an error or a SIGTERM ended the
        # fit.
        has_ended = self._stop_reason != SIGTERM
        self._logger.account(self.run.step, self._wall.seconds, has_ended=has_ended)
        # After a signal, the last message reports the signal instead.
        if self._stop_reason in _SIGNALS:
            return
        first_step, start = self._began
        run, options = self.run, self.run.checkpoints.options
        name, mode = "eval_loss", "min"
        if options and options.keep_best and self.run.checkpoints.ranks_by_eval:
            name, mode = options.keep_best, options.best_mode or mode
        spent = format_clock(time.monotonic() - start)
        saved = "Not saved: the Trainer has no checkpoint=."
        if options is not None:
            directory = self.run.checkpoints.directory
            saved = f"Step {self.run.checkpoints.last_saved} is saved in '{directory}'."
        count = run.step - first_step
        rates = self._recorder.history().get("learning_rate", ())
        # A schedule that ends at 0 may be off by a rounding.
        most = np.abs(rates).max(initial=0)
        zeros = np.count_nonzero(np.abs(rates) <= 1e-6 * most)
        if zeros > max(2, len(rates) // 10):
            warn_user(
                f"The learning rate was 0 in {zeros} of {len(rates)} steps, which "
                "changed nothing. Is the schedule shorter than the run? The schedule "
                "must cover all steps of the run.",
                ParallelWarning,
            )
        parts = [
            f"Trained {count:,} step{'s' * (count != 1)} in {spent}.",
            self._recorder.best_eval(name, mode),
            saved,
        ]
        self._logger.message(" ".join(filter(None, parts)))
        if goodput := self._logger.goodput():
            self._logger.message(goodput)

    def _report_save(self, text: str) -> None:
        if self._stop_reason not in _SIGNALS:  # the last message reports signals
            self._logger.message(text)

    def _train(self) -> None:
        self._began = self.run.step, time.monotonic()
        self._wall.note_start()
        self._logger.account(self.run.step, self._wall.seconds)
        self.run.excuse_arrays()
        if self.run.checkpoints.must_copy_again(self.run.step):
            with self._wall.measure("saves"):
                self.run.copy(self.run.step)
        self._run_steps()
        if skipped := self._recorder.skip_message():
            self._logger.message(skipped)

    def _run_steps(self) -> None:
        run, checkpoints = self.run, self.run.checkpoints
        step = first_step = run.step
        check_every = self.faults.check_replicas_every
        with (
            # The watchdog is disarmed last, because closing the data may hang.
            contextlib.ExitStack() as stack,
            self._prefetch(first_step) as batches,
            self._tracer,
            run.counting_steps(),
        ):
            stack.callback(self._watchdog.disarm)
            for item in self._watchdog.reading(batches):
                if item.stop_reason is not None:
                    # All processes stop here, so no process waits for others in a step.
                    self._agreed_stop = item.stop_reason
                    if step > first_step:
                        self._pause(step, saves=False)
                    break
                if step == first_step:
                    # The compile time must not count towards the step's time or limit.
                    self._compile(item)
                    # Before this line, Ctrl-C may end the fit at once: nothing is lost.
                    self._termination.defers = True
                else:
                    self._note_times(item)
                with self._beginning(step):
                    # This is one statement, so no variable refers to the donated state.
                    run.state, metrics = self._run_step(step, item.batch)
                step += 1
                # A hook may save, so the position must be at the state's step.
                run.data.advance(step, item)
                self._begin_metrics(step - first_step, item.batch)
                # The watchdog is armed here, so that it covers hooks and data waits.
                self._watchdog.arm(step)
                self._termination.check()  # warns if another handler has replaced it
                # If a save failed in the background, `poll` raises the error.
                checkpoints.poll()
                if check_every and step % check_every == 0:
                    # The check comes before the hooks, so no hook saves unequal copies.
                    check_replicas(run.state, step)
                # This waits for an earlier step, whose hooks may stop the fit.
                self._push(step, metrics, item.wait_seconds)
                # All processes must call `is_due` once in every step. Through these
                # calls they agree on the step at which jax announces a preemption.
                saves = checkpoints.is_due(step, is_time=item.saves)
                if checkpoints.is_preempted:
                    self._termination.is_requested = True
                # `_ends` is called only once: a signal between two calls would end the
                # fit without a save.
                ends = self._ends(step)
                if saves or ends or self._pauses(step):
                    ends = self._pause(step, saves=saves)
                if ends:
                    break
            else:
                self._end_epochs(step)
                if step > first_step:
                    self._pause(step, saves=False)
            self._tracer.stop(run.state)

    @contextlib.contextmanager
    def _beginning(self, step: int) -> Iterator[None]:
        """Makes a context in which a step is dispatched."""
        count_step()
        note_step(step + 1)
        with (
            self._tracer.step(step, self.run.state),
            self._explaining_memory(),
            self._wall.dispatching(),
        ):
            yield

    def _push(self, step: int, metrics: Metrics, wait_seconds: float) -> None:
        with self._explaining_memory():
            self._wall.measure_step(metrics)
            self._recorder.push(step, metrics, wait_seconds, self._player(step))
        if self._wall.is_due() and (row := self._recorder.last_row()):
            self._logger.account(int(row["step"]), self._wall.seconds)

    def _note_times(self, item: PlacedBatch[Batch]) -> None:
        """Counts the wait for a batch, and compares the processes' times rarely."""
        recorder, wall = self._recorder, self._wall
        wall.note_wait(item.wait_seconds, is_idle=recorder.is_idle())
        if not self._is_alone:
            slow = self._stragglers.note(
                read_seconds=item.read_seconds,
                wait_seconds=item.wait_seconds,
                dispatch_seconds=wall.dispatch_seconds,
                blocked_seconds=recorder.blocked_seconds,
            )
            for text in slow:
                self._logger.message(text)

    def _run_step(self, step: int, batch: Batch) -> tuple[TrainState, Metrics]:
        """Runs a step, with a replay if one is due."""
        self._recent[step + 1] = batch
        self._recent.pop(step - self._recorder.max_behind, None)
        every, programs = self.faults.verify_every, self.programs.at(step)
        players = self.programs.players
        # Each player's steps are counted, because a count of all steps could always be
        # due in the turn of the same player.
        count = players.count(step) if players else step + 1
        if every and count % every == 0:
            if programs not in self._replayed:
                self._watchdog.disarm()  # the first replay compiles
                self._replayed.add(programs)
            return replay(programs, self.run.state, batch)
        return self._steps[programs.plan.player](self.run.state, batch)

    def _player(self, step: int) -> str:
        """Returns the player of the step after which ``step`` updates are done."""
        return self.programs.at(step - 1).plan.player

    def _end_epochs(self, step: int) -> None:
        # An epoch ends when its data ends, even if `len(data)` promised more batches.
        if missing := self.num_steps - step:
            self._logger.message(
                f"Done at step {step}, not {self.num_steps}: {missing} batches of the "
                f"{self.num_epochs} epochs were left out, or missing."
            )
        self.num_steps = step
        self._logger.shorten(step)

    def _open_data(self, step: int) -> Cursor:
        run, before = self.run, copy.copy(self.run.data)
        _, shares = data_share(self.programs.plan.layout)
        try:
            return run.data.open(
                self.data,
                step,
                epochs=self._epochs,
                last_batch=self.last_batch,
                shares=shares,
            )
        except BaseException:  # also a Ctrl-C
            run.data = before  # refused data must not change the position
            raise

    def _prefetch(self, step: int) -> PrefetchIterator:
        run, before = self.run, copy.copy(self.run.data)
        cursor = self._open_data(step)
        run.data.num_steps = self.num_steps
        try:
            placed = PrefetchIterator(
                cursor,
                self.programs.shard_batch,
                limit=self.num_steps - step,
                smaller=SmallerBatches(
                    self.last_batch, run.data.num_rows, run.data.num_dropped
                ),
                first_step=step,
                agreement=BatchAgreement(
                    "batch", self._requested_stop, run.checkpoints.is_time
                ),
            )
        except BaseException:  # also a Ctrl-C
            run.data = before
            raise
        if run.data.note:
            self._logger.message(run.data.note)
            run.data.note = ""
        return placed

    def _compile(self, item: PlacedBatch[Batch]) -> None:
        """Measures the start of the fit, and compiles the steps of all players."""
        self._wall.note_first_wait(item.wait_seconds)
        with self._wall.measure("compile"):
            self._compile_steps(item.batch)
        seconds = self._wall.seconds
        self._recorder.add_compilation(seconds["compile"])
        self._logger.account(self.run.step, seconds)

    def _compile_steps(self, batch: Batch) -> None:
        """Compiles the steps of all players, after checks that processes agree."""
        self._first_batch = batch
        agree_on_batch(batch)
        facts = {"batch": shapes_of(batch), "num_rows": count_rows(batch)}
        self._logger.configure(facts)
        if self.programs.players:
            self._trace_turns(batch)
        for player, programs in self.programs.turns.items():
            if isinstance(self.last_batch, Pad):
                programs.check_padding(self.run.state, batch, self.last_batch.weights)
            with self._explaining_memory():
                started = programs.start(self.run.state, batch, self.warm_start)
            self._steps[player], program = started
            if program.note:
                self._logger.message(program.note)
            analysis = program.compiled.memory_analysis()
            found = getattr(analysis, "temp_size_in_bytes", None)
            if found is not None:
                self._temporary_bytes = max(found, self._temporary_bytes or 0)
            mesh = self.programs.plan.layout.mesh
            throughput = Throughput.of(program.compiled, batch, mesh)
            if self.programs.players:
                # The times are means over the steps of several players. The FLOPs of
                # these steps differ, so FLOP/s would be wrong.
                throughput = replace(throughput, hardware_flops=None)
            self._recorder.throughput = throughput

    def _begin_metrics(self, num_steps: int, batch: Batch) -> None:
        """Counts the model's FLOPs, and lets go of the first batch later.

        The loss is traced once more for the count, and to find mistakes such as wrong
        labels. The devices run the first step meanwhile.
        """
        recorder = self._recorder
        if num_steps == 1 and recorder.throughput is not None:
            flops = self.programs.model_flops(batch, self.run.wrt)
            recorder.throughput = replace(recorder.throughput, model_flops=flops)
            # Two programs with collectives must not run at once on simulated devices.
            jax.block_until_ready(self.run.state)
            self.programs.warn_of_loss(batch, self.run.wrt)
        if num_steps > _STEPS_TO_FIRST_METRICS:
            self._first_batch = None

    def _trace_turns(self, batch: Batch) -> None:
        """Traces the steps of all players, to raise errors before any compilation."""
        for player, programs in self.programs.turns.items():
            try:
                programs.trace(self.run.state, batch)
            except Exception as error:
                error.add_note(f"This is the step of player {player!r}.")
                raise

    def _explaining_memory(self) -> contextlib.AbstractContextManager[None]:
        plan, count = self.programs.plan, self.programs.options.num_microbatches
        run = self.trainer, self._first_batch
        return explaining_memory(plan, count, self._temporary_bytes, run)

    def _signal(self) -> str | None:
        """Returns the signal that this process has received, or ``None``.

        Other processes may not know of the signal yet.
        """
        if self._termination.is_requested:
            return SIGTERM
        return INTERRUPT if self._termination.is_interrupted else None

    def _requested_stop(self) -> str | None:
        """Returns the reason why this process wants to stop, or ``None``."""
        return self._signal() or self._stop_request

    @property
    def _stop_reason(self) -> str | None:
        """The reason why the fit ends after this step. All processes agree on it."""
        return self._requested_stop() if self._is_alone else self._agreed_stop

    def _ends(self, step: int) -> bool:
        return step == self.num_steps or self._stop_reason is not None

    def _pauses(self, step: int) -> bool:
        """Returns True if a step is evaluated, or copied into memory."""
        return self.run.checkpoints.is_copy_due(step) or self._evaluates(step)

    def _evaluates(self, step: int) -> bool:
        is_due = self.eval_every and step % self.eval_every == 0
        return self.eval_data is not None and bool(is_due)

    def _pause(self, step: int, *, saves: bool) -> bool:
        """Evaluates and saves the newest step. Returns True if it is the fit's last.

        If a copy in memory is due, the step is copied too, unless the fit ends.

        If a stop is requested during the save, the fit runs one more step, and saves
        that step too.
        """
        # `flush` comes first, because it raises an error if a step was not finite. The
        # state after such a step must not be saved.
        self._recorder.flush()
        self._watchdog.disarm()
        # If processes stop before a batch, they call `_pause` twice for one step.
        if self._evaluated_step != step:
            self.run.metrics = self._recorder.last_row()
            ranks = saves and self.run.checkpoints.ranks_by_eval
            if ranks or self._evaluates(step) or self._ends(step):
                with self._wall.measure("evaluation"):
                    self._evaluate(step)
        # `_ends` is called after the evaluation, because its hooks may stop the fit.
        # Then this step is saved.
        ends = self._ends(step)
        if (saves or ends) and self.run.checkpoints.options:
            with self._wall.measure("saves"):
                self.run.save(step, may_skip=not ends)
        if self.run.checkpoints.is_copy_due(step) and not ends:
            with self._wall.measure("saves"):
                self.run.copy(step)
        if saves or ends or self._evaluates(step):
            self._logger.account(step, self._wall.seconds)
        # The pause does not count towards the next step's time.
        self._recorder.restart_clock()
        if not ends:
            self._watchdog.arm(step)
        return ends

    def _evaluate(self, step: int) -> None:
        # After a SIGTERM only seconds remain, and the checkpoint needs them.
        if self.eval_data is None or self._stop_reason in _SIGNALS:
            return
        try:
            found = self.programs.evaluate(
                self.run.state,
                self.eval_data,
                watchdog=self._watchdog,
                stop_reason=self._signal,
            )
            self._watchdog.disarm()
            if found:
                self._evaluated_step = step
                # Metrics are stored before they are logged, so that they are saved even
                # if logging fails. Arrays of a Sum go only to callbacks.
                numbers = {k: x for k, x in found.items() if isinstance(x, float)}
                self.run.metrics |= {f"eval_{name}": x for name, x in numbers.items()}
                self._recorder.record_eval(step, numbers)
                self.run.checkpoints.check_best(self.run.metrics, f"step {step}")
                for callback in self.callbacks:
                    callback.on_eval_end(self.trainer, step, found)
        except Exception as error:
            self._watchdog.disarm()
            self._save_before(error, step)
            raise

    def _save_before(self, error: Exception, step: int) -> None:
        """Saves the trained state before an evaluation's error ends the fit."""
        # With several processes nothing is saved, because the others may still wait in
        # the evaluation.
        if not self.run.checkpoints.options or not self._is_alone:
            return
        try:
            self.run.save(step)
            error.add_note(
                f"Step {step} is saved. To run only the evaluation, restore it and "
                "call trainer.evaluate(...)."
            )
        except (CheckpointError, NonFiniteLossError) as failure:
            error.add_note(f"Another error: {failure}")

    def _on_step_end(self, step: int, metrics: Values) -> None:
        if not self.run.checkpoints.ranks_by_eval:
            # The metric's name is checked as soon as the names are known. The first
            # save may come hours later.
            self.run.checkpoints.check_best(metrics, f"step {step}")
        with self._watchdog.paused():
            for callback in self.callbacks:
                callback.on_step_end(self.trainer, step, metrics)
