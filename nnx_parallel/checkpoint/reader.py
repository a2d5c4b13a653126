"""Finds, describes, checks and reads the checkpoints of a directory.

Nothing is written here, so a directory can be read while a run writes to it: a step
appears complete or not at all. Only the run that writes there renames corrupt steps,
after it has restored an older one.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import jax

from nnx_parallel.checkpoint.checksum import read_checksums
from nnx_parallel.checkpoint.contents import (
    AbstractGroups,
    Base,
    Groups,
    StoredCheckpoint,
    check_base_shapes,
    check_checksums,
    check_header,
    check_match,
    check_states,
    from_groups,
    read_stored,
    same_base,
    split_base,
    to_groups,
)
from nnx_parallel.checkpoint.files import (
    Listing,
    LiteralPath,
    check_files,
    list_steps,
    quarantine,
    read_step_metadata,
)
from nnx_parallel.checkpoint.options import (
    BEST_RULE,
    Checkpoint,
    Metrics,
    best_steps,
    check_readable,
    given_options,
    with_rule,
)
from nnx_parallel.checkpoint.orbax_compat import describe_group, load, reading
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    CheckpointReadError,
    DisagreementError,
    warn_user,
)
from nnx_parallel.state import TrainState

AbstractArrays = Mapping[str, jax.ShapeDtypeStruct]
Restored = tuple[dict[str, dict[str, jax.Array]], dict[str, Any]]

_STATE = {"model", "optimizer", "progress"}  # groups that every training state has


def new_average_note(wanted: AbstractGroups, read: Groups) -> list[str]:
    """Returns a line if a run keeps an average and the state that it read has none."""
    if "ema" not in wanted or "ema" in read:
        return []
    return [
        "The checkpoint has no moving average, so the average starts from the "
        "parameters."
    ]


class CheckpointReader:
    """Finds, checks and restores the checkpoints of one directory.

    All processes make the same calls in the same order.

    Args:
        options: A `Checkpoint`, or only the directory.
        description: Description of the run that reads. `restore_state` compares a
            checkpoint's optimizer with it.

    Attributes:
        options: The given options, as a `Checkpoint` even if only a directory was
            given.
        directory: A path, or a URL such as ``gs://...``.

    Raises:
        CheckpointNotFoundError: If the directory does not exist, or ``options`` is
            ``None``.
    """

    def __init__(
        self,
        options: Checkpoint | str | os.PathLike | None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self.options = given_options(options)
        self.directory = str(self.options.directory)
        self._description = dict(description or {})
        self._metrics: dict[int, Metrics] = {}  # for steps that were read or saved
        self._times: dict[int, int] = {}
        self._rules: dict[int, object] = {}  # the `best_rule` of each step
        check_readable(self.directory)
        self._listing: Listing | None = self._list()

    def _list(self) -> Listing:
        with reading(f"the steps in '{self.directory}'"):
            return list_steps(self.directory)

    @property
    def listing(self) -> Listing:
        """The steps that were in the directory when it was opened or reloaded."""
        if self._listing is None:
            self._listing = self._list()
        return self._listing

    @property
    def steps(self) -> list[int]:
        """The complete steps, in ascending order."""
        return sorted(self.listing.steps)

    @property
    def corrupt_steps(self) -> dict[int, str]:
        """Incomplete steps, each with its problem."""
        return self.listing.corrupt

    def reload(self) -> None:
        """Forgets the listing; the next use sees changes by other programs."""
        self._listing = None

    def note_save(self, step: int, metrics: Metrics, deleted: Collection[int]) -> None:
        """Adds a saved step to the listing, and removes the steps that it replaced."""
        self._metrics[step] = metrics
        self.listing.steps.add(step)
        self.listing.steps.difference_update(deleted)

    def metrics(self) -> dict[int, Metrics]:
        """The metrics of each saved step; empty for steps that cannot be read."""
        steps = self.steps
        for step in steps:
            if step not in self._metrics:
                # A corrupt step never counts as best, and it does not end the fit.
                errors = (CheckpointReadError, CheckpointFormatError)
                with contextlib.suppress(*errors), self._reading(step):
                    header = self._read_header(step)
                    self._metrics[step] = header["metrics"]
                    self._rules[step] = header["meta"].get(BEST_RULE)
        return {step: self._metrics.get(step, {}) for step in steps}

    def times(self) -> dict[int, int]:
        """The time of each save, in nanoseconds since 1970; the same on all processes.

        Steps that cannot be read are missing.
        """
        for step in self.steps:
            if step not in self._times:
                with contextlib.suppress(CheckpointReadError), self._reading(step):
                    path = LiteralPath(self.directory) / str(step)
                    found = read_step_metadata(path)["commit_timestamp_nsecs"]
                    self._times[step] = int(found or 0)
        return {step: self._times[step] for step in self.steps if step in self._times}

    @property
    def best_step(self) -> int | None:
        """The best step by ``keep_best``; ``None`` if no step has the metric.

        Without ``keep_best``, the rule of the run that saved the newest step decides.
        """
        metrics = self.metrics()
        newest = max(self._rules.keys() & metrics.keys(), default=None)
        rule = None if newest is None else self._rules[newest]
        return next(iter(best_steps(with_rule(self.options, rule), metrics)), None)

    def find(self, step: int | Literal["best"] | None) -> int:
        """Returns the number of a saved step.

        ``"best"`` asks for the best step by ``keep_best``, and ``None`` for the latest.
        Raises ``CheckpointNotFoundError`` if there is no such step.
        """
        steps = self.steps
        found = self.best_step if step == "best" else step
        if step is None:
            found = max(steps, default=None)
        if found in steps:
            return found
        where = f"in '{self.directory}'"
        problem = (
            f"No checkpoint for step {step} {where}. Saved steps: {steps}. Pass "
            "step=None for the latest, or resume=False to start from step 0."
        )
        if step is None:
            problem = f"No checkpoint {where}. Save one first."
            if os.path.exists(f"{self.directory}/_CHECKPOINT_METADATA"):
                problem = (
                    f"No checkpoint of a Trainer {where}, but a plain one of Orbax. "
                    "Read it with trainer.load_weights(path)."
                )
        elif step == "best":
            problem = (
                f"No best checkpoint {where}: none was saved with the metric of "
                f"Checkpoint(keep_best=...). Saved steps: {steps}."
            )
            names = sorted({name for x in self.metrics().values() for name in x})
            if self.options.keep_best is None and names:
                problem = (
                    f"No best checkpoint {where}: the run that saved there had no "
                    "keep_best. Name the metric: restore('best', directory=Checkpoint("
                    f"{self.directory!r}, keep_best=...)). Saved metrics: {names}."
                )
        raise CheckpointNotFoundError(problem)

    def describe(self, step: int | None = None) -> StoredCheckpoint:
        """Returns the contents of a step, by default the latest; reads no arrays.

        Raises:
            CheckpointNotFoundError: If the step does not exist.
            CheckpointReadError: If the step's files are corrupt.
            CheckpointFormatError: If another program or a later version wrote the step.
            CheckpointUnavailableError: If the step cannot be read now.
        """
        step = self.find(step)
        path = f"{self.directory}/{step}"
        with self._reading(step):
            header = self._read_header(step)
            check_files(path)  # Orbax and TensorStore open any file of the right name
            groups = {
                name: describe_group(path, name)
                for name, size in header["sizes"].items()
                if size
            }
            # The checksums have the digest of their header, so the checksums of another
            # save are refused.
            checksums = read_checksums(path, header["digest"])
            return read_stored(step, header, groups, checksums)

    def _read_header(self, step: int) -> dict[str, Any]:
        metadata = read_step_metadata(LiteralPath(self.directory) / str(step))
        where = f"Checkpoint {step} in '{self.directory}'"
        return check_header(metadata["custom_metadata"], step, where)

    def restore(
        self,
        wanted: AbstractGroups,
        step: int | Literal["best"] | None = None,
        base: Base | None = None,
    ) -> Restored:
        """Returns the arrays of some groups, placed as requested, and the metadata.

        Each device reads only its shards, so no device holds more of an array than its
        part. Values equal the saved values, bit for bit.

        Args:
            wanted: Shape, dtype and sharding of each array, for all groups or some
                (``{"params": ...}`` reads only the weights).
            step: The same as for `find`.
            base: Function that returns the arrays that were saved only as checksums.

        Raises:
            CheckpointError: If an array has no sharding.
            CheckpointMismatchError: If paths, shapes or dtypes differ from the saved
                ones. This is raised before any array is read.
            CheckpointDamagedError: If an array differs from the saved one.
            CheckpointNotFoundError, CheckpointReadError, CheckpointUnavailableError:
                The same as for `describe`. If one process finds corrupt files, the
                error is raised on all.
        """
        step = self.find(step)
        where = f"Checkpoint {step} in '{self.directory}'"
        problem, stored, read = "", None, dict[str, Any]()
        lent: AbstractArrays = {}
        try:
            # All differences are found before any array is read.
            stored = self.describe(step)
            wanted, groups, lent = self._match(stored, wanted, where)
            with self._reading(step):
                read = load(f"{self.directory}/{step}", groups)
        except CheckpointReadError as error:
            if jax.process_count() == 1:
                raise  # a single process raises the error with its cause
            problem = str(error)
        # Nothing above waits for other processes, so all of them reach this exchange.
        problems = allgather_object("read checkpoint", problem)
        bad = [f"On process {i}: {text}" for i, text in enumerate(problems) if text]
        if bad or stored is None:
            raise CheckpointReadError("\n".join(bad))
        # This comes after the exchange, because it gathers the checksums of the shards
        # of all processes.
        return self._complete(stored, wanted, read, lent, base, where)

    def restore_copy(
        self,
        stored: StoredCheckpoint,
        load: Callable[[dict[str, Any]], dict[str, Any]],
        wanted: AbstractGroups,
        base: Base | None = None,
    ) -> Restored:
        """Returns the arrays of a copy in memory, with the checks of `restore`.

        Args:
            stored: The contents of the copy.
            load: Reads some of its arrays, on all processes.
            wanted: The same as for `restore`.
            base: The same as for `restore`.
        """
        where = f"The copy of step {stored.step} in memory"
        wanted, groups, lent = self._match(stored, wanted, where)
        return self._complete(stored, wanted, load(groups), lent, base, where)

    def _match(
        self, stored: StoredCheckpoint, wanted: AbstractGroups, where: str
    ) -> tuple[AbstractGroups, dict[str, dict[str, Any]], AbstractArrays]:
        """Checks the requested groups before any array is read.

        Returns the groups to restore, the arrays to read, and the arrays of the base.
        """
        if wanted.keys() >= _STATE:
            wanted = self._adapt(stored, wanted, where)
        present, lent = split_base(wanted, stored.base)
        check_match(stored, present, where)
        if "model" in wanted:
            check_base_shapes(stored, wanted["model"], where)
        return wanted, {name: x for name, x in present.items() if x}, lent

    def _complete(
        self,
        stored: StoredCheckpoint,
        wanted: AbstractGroups,
        read: dict[str, Any],
        lent: AbstractArrays,
        base: Base | None,
        where: str,
    ) -> Restored:
        """Compares checksums, and adds the base and the empty groups."""
        with reading(where):
            check_checksums(stored, read, where)
        if lent:
            own = same_base(stored, lent.keys(), base, where)
            read["model"] = read.get("model", {}) | own
        # Empty groups are not in the files, but they belong to the requested groups.
        return {name: read.get(name, {}) for name in wanted}, stored.meta

    def _reading(self, step: int) -> contextlib.AbstractContextManager[None]:
        return reading(f"checkpoint {step} in '{self.directory}'", self.steps)

    def restore_newest(
        self,
        wanted: AbstractGroups,
        base: Base | None = None,
        *,
        quarantines: bool = False,
    ) -> tuple[Restored, list[str]] | None:
        """Restores the latest step, or the latest that is intact (see ``on_damage``).

        With ``quarantines``, corrupt steps that are later than the restored step are
        renamed.

        Returns:
            The result of `restore`, and a line for each corrupt step. ``None`` if the
            directory holds no step.

        Raises:
            CheckpointError: If the directory holds a step but ``resume=False``: a fresh
                run would write into the directory of another run.
            CheckpointFormatError: If another program or a later version wrote a step
                that would be read. Such a step is not corrupt, so it is not skipped.
            CheckpointDamagedError: If the latest step is corrupt and ``on_damage`` is
                ``"error"``, or if no step is intact.
            CheckpointMismatchError: If the arrays of the run differ from the saved
                arrays. This is not corruption, and no array is read.
            DisagreementError: If the processes see different steps.
        """
        self._check_same_steps()
        corrupt, problems = self.corrupt_steps, dict[int, str]()
        if not self.steps and not corrupt:
            return None
        if not self.options.resume:
            raise CheckpointError(
                f"'{self.directory}' holds checkpoints of steps {self.steps}, but "
                "resume=False asks for a fresh run. Choose another directory, remove "
                "this one, or leave resume=True."
            )
        for step in sorted([*corrupt, *self.steps], reverse=True):
            if step in corrupt:
                problems[step] = self._describe_remains(step)
            else:
                found = self._try_restore(wanted, step, base)
                if not isinstance(found, CheckpointReadError):
                    # No step is renamed until an intact step is known.
                    notes = self._pass_over(problems, step, quarantines=quarantines)
                    return found, [*notes, *new_average_note(wanted, found[0])]
                problems[step] = str(found)
            if self.options.on_damage == "error":
                break
        others = sorted(set(self.steps) - problems.keys())
        way_out = (
            f"Other steps: {others}. Checkpoint(..., on_damage='previous') quarantines "
            "the damaged one and resumes from the newest of them that is intact."
            if others
            else "No step in the directory is intact. Choose another directory to "
            "start afresh."
        )
        raise CheckpointDamagedError("\n".join([*problems.values(), way_out]))

    def _pass_over(
        self, problems: Mapping[int, str], step: int, *, quarantines: bool
    ) -> list[str]:
        """Returns a line for each corrupt step after ``step``; may quarantine them."""
        notes = []
        for bad, problem in problems.items():
            note = f"Step {step} is read instead of step {bad}."
            if quarantines:
                self.reload()
                note = (
                    f"Step {bad} is in quarantine as '{quarantine(self.directory, bad)}"
                    f"'; the run goes on from step {step}."
                )
            notes.append(f"{problem}\n{note}")
        return notes

    def _describe_remains(self, step: int) -> str:
        """Returns an incomplete step's problem; raises an error if it is foreign."""
        problem = f"Checkpoint {step} in '{self.directory}' {self.corrupt_steps[step]}."
        if step in self.listing.foreign:
            raise CheckpointFormatError(
                f"{problem} Another program may have written it: it was not changed. "
                "Move it to another directory, or delete it."
            )
        return problem

    def _try_restore(
        self, wanted: AbstractGroups, step: int, base: Base | None
    ) -> Restored | CheckpointReadError:
        """Restores a step, or returns the error of the last try if it is corrupt."""
        # The outcome is the same on all processes without another exchange. `restore`
        # raises on all processes if one cannot read a file, and it compares the
        # checksums of all. Before a step is renamed, it is read twice, because a
        # network disk may return a torn file once.
        num_tries = 1 if self.options.on_damage == "error" else 2
        while True:
            num_tries -= 1
            try:
                return self.restore(wanted, step, base)
            except CheckpointReadError as error:
                if num_tries == 0:
                    return error

    def _check_same_steps(self) -> None:
        # If the processes saw different steps, they would wait for one another, or read
        # parts of two steps and report corruption.
        mine = [self.steps, sorted(self.corrupt_steps)]
        seen = allgather_object("steps in the directory", mine)
        spelt = [
            f"{intact}" + f" (and {corrupt}, which are corrupt)" * bool(corrupt)
            for intact, corrupt in seen
        ]
        for process, theirs in enumerate(spelt):
            if theirs != spelt[0]:
                raise DisagreementError(
                    f"Processes 0 and {process} see different checkpoints in "
                    f"'{self.directory}': steps {spelt[0]} and {theirs}. Choose a "
                    "directory that all machines share. If they already share this "
                    "one, its listing was out of date: start again."
                )

    def restore_state(
        self,
        abstract: TrainState,
        step: int | Literal["best"] | None = None,
        base: Base | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state of a step in the layout of ``abstract``, and the metadata.

        ``step``, ``base`` and the errors are the same as for `restore`.
        """
        groups, meta = self.restore(to_groups(abstract), step, base)
        return from_groups(abstract, groups), meta

    def restore_weights(
        self, state: TrainState, step: int | Literal["best"] | None = None
    ) -> TrainState:
        """Returns the state with a checkpoint's parameters and variables.

        Nothing else is read. A moving average starts from the restored parameters.
        """
        own = to_groups(state)["model"]
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            {"model": own},
        )
        groups, _ = self.restore(wanted, step, lambda: own)
        return from_groups(state, groups)

    def _adapt(
        self, stored: StoredCheckpoint, wanted: AbstractGroups, where: str
    ) -> AbstractGroups:
        """Returns the groups of a state to read, after a check of the optimizer.

        If the checkpoint has no moving average but the run does, the average will start
        from the parameters.
        """
        check_states(stored, self._description, where)
        if "ema" in stored.groups and "ema" not in wanted:
            warn_user(
                f"{where} has a moving average of the parameters, and this Trainer "
                "keeps no average: the saved average is not read, and is lost once "
                "the steps that have it are deleted. To continue it, pass ema_decay "
                "to the Trainer. To preserve it, save in another directory.",
            )
        is_new = "ema" in wanted and "ema" not in stored.groups
        return {name: x for name, x in wanted.items() if not is_new or name != "ema"}
