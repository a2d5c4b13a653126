"""The checkpoints on disk: opened, listed, described, read. Nothing here saves."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax

from nnx_parallel.checkpoint.base import (
    Base,
    check_base_shapes,
    same_base,
    split_base,
)
from nnx_parallel.checkpoint.checksum import read_checksums
from nnx_parallel.checkpoint.contents import (
    AbstractGroups,
    StoredCheckpoint,
    check_checksums,
    check_header,
    check_match,
    read_stored,
)
from nnx_parallel.checkpoint.files import (
    LiteralPath,
    check_files,
    delete_remains,
    quarantine,
    read_step_metadata,
    set_aside,
)
from nnx_parallel.checkpoint.lock import lock_directory
from nnx_parallel.checkpoint.options import (
    BEST_RULE,
    Checkpoint,
    Metrics,
    best_steps,
    check_directory,
    superseded_steps,
    with_rule,
)
from nnx_parallel.checkpoint.orbax_compat import (
    describe_group,
    load,
    open_directory,
    reading,
)
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

Restored = tuple[dict[str, dict[str, jax.Array]], dict[str, Any]]
Adapt = Callable[[StoredCheckpoint, AbstractGroups], AbstractGroups]


class SavedSteps:
    """The checkpoints of one directory, open until `close`.

    All processes make the same calls in the same order.

    Args:
        options: The directory, intervals of saves, and rules for the steps to keep.
        read_only: Never make, write or clean up anything; for the directory of a run
            that may be alive. One run at a time may write, which a lock ensures; any
            number may read.

    Attributes:
        options: The given options.
        directory: A path, or a URL such as ``gs://...``.
        orbax: Orbax's checkpointer of the directory; the manager saves with it.
        preemption: Notes a preemption that jax announces.
        known_metrics: Metrics by step, as far as they have been read or saved.

    Raises:
        CheckpointDirectoryError, CheckpointNotFoundError: If the directory cannot be
            written, or another run is writing there; or, with ``read_only``, does not
            exist.
    """

    def __init__(self, options: Checkpoint, *, read_only: bool = False) -> None:
        self.options = options
        self.directory = str(options.directory)
        self.known_metrics: dict[int, Metrics] = {}
        self._read_only = read_only
        self._rules: dict[int, object] = {}  # the `best_rule` of each step
        self._is_stale = False  # the listing may differ from the directory
        self._deleted: set[int] = set()  # deleted since the listing
        # The directory is tried first: if Orbax cannot make a step's directory, its
        # writers wait for 5 minutes (docs/library-notes.md, "Orbax: directories").
        check_directory(self.directory, read_only=read_only)
        # The lock is taken before Orbax opens the directory, which deletes another
        # run's save in progress.
        self._lock = None if read_only else lock_directory(self.directory)
        with reading(f"the steps in '{self.directory}'"):
            self.orbax, self._names, self.preemption = open_directory(
                options, cleanup=not read_only
            )
        if not read_only and jax.process_index() == 0:
            for problem in delete_remains(self.directory):
                warn_user(
                    f"Cannot delete {problem} in '{self.directory}', the remains of a "
                    "step that was being deleted when its run was killed."
                )

    @property
    def steps(self) -> list[int]:
        """The saved steps, ascending."""
        if self._is_stale:
            with reading(f"the steps in '{self.directory}'"):
                self.orbax.reload()
            self._is_stale, self._deleted = False, set()
        return sorted({x.step for x in self.orbax.checkpoints} - self._deleted)

    def reload(self) -> None:
        """Makes the next use list the steps again: another program may change them."""
        self._is_stale = True

    @property
    def corrupt_steps(self) -> dict[int, str]:
        """Steps with too few files to be listed, each with its problem."""
        steps = self.steps
        return {k: why for k, why in self._names.corrupt.items() if k not in steps}

    def superseded(self, step: int, metrics: Metrics) -> list[int]:
        """Saved steps to delete once ``step`` is saved, with its metrics."""
        ranks = self.options.keep_best is not None
        found = self.metrics() if ranks else {step: {} for step in self.steps}
        # Another program's step is neither a step of this run nor its best step.
        ours = {k: v for k, v in found.items() if k not in self._names.foreign}
        return superseded_steps(self.options, {**ours, step: metrics})

    def forget(self, steps: Iterable[int]) -> None:
        """Removes steps that are deleted from the listing."""
        self._deleted.update(steps)

    def metrics(self) -> dict[int, Metrics]:
        """The metrics of each saved step; empty if the step cannot be read."""
        steps = self.steps
        for step in steps:
            if step not in self.known_metrics:
                # A corrupt step is never among the best; a fit that saves goes on.
                errors = (CheckpointReadError, CheckpointFormatError)
                with contextlib.suppress(*errors), self._reading(step):
                    header = self._read_header(step)
                    self.known_metrics[step] = header["metrics"]
                    self._rules[step] = header["meta"].get(BEST_RULE)
        return {step: self.known_metrics.get(step, {}) for step in steps}

    @property
    def best_step(self) -> int | None:
        """The step that is best by ``keep_best``, or ``None``.

        Without that option the best is found by the option of the run that saved the
        newest step.
        """
        metrics = self.metrics()
        newest = max(self._rules.keys() & metrics.keys(), default=None)
        rule = None if newest is None else self._rules[newest]
        return next(iter(best_steps(with_rule(self.options, rule), metrics)), None)

    def find(self, step: int | Literal["best"] | None) -> int:
        """Returns a saved step, or raises ``CheckpointNotFoundError``.

        ``"best"`` is the best by ``keep_best``, ``None`` the latest.
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
        elif step == "best":
            problem = (
                f"No best checkpoint {where}: none was saved with the metric of "
                f"Checkpoint(keep_best=...). Saved steps: {steps}."
            )
            names = sorted({name for x in self.metrics().values() for name in x})
            if self.options.keep_best is None and names:
                problem = (
                    f"No best checkpoint {where}: its run had no keep_best. Name the "
                    "metric: restore('best', directory=Checkpoint("
                    f"{self.directory!r}, keep_best=...)). Saved metrics: {names}."
                )
        raise CheckpointNotFoundError(problem)

    def set_aside(self, step: int) -> tuple[list[int], str]:
        """Moves the steps after one into a directory; returns them and its path."""
        steps = {*self.steps, *self.corrupt_steps} - self._names.foreign
        later = sorted(x for x in steps if x > step)
        if not later:
            return [], ""
        aside = set_aside(self.directory, step, later)
        for moved in later:
            self.known_metrics.pop(moved, None)
            self._rules.pop(moved, None)
        self.reload()
        return later, aside

    def describe(self, step: int | None = None) -> StoredCheckpoint:
        """Returns the contents of a step, or of the latest; reads no arrays.

        Raises:
            CheckpointNotFoundError: If the step does not exist.
            CheckpointReadError: If its files are corrupt.
            CheckpointFormatError: If another program or a later version wrote them.
            CheckpointUnavailableError: If they cannot be read now.
        """
        step = self.find(step)
        path = f"{self.directory}/{step}"
        with self._reading(step):
            header = self._read_header(step)
            check_files(path)  # Orbax and TensorStore open whatever has the right name
            groups = {
                name: describe_group(path, name)
                for name, size in header["sizes"].items()
                if size
            }
            # The header's digest is compared, so that another save's checksums are
            # refused.
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
        adapt: Adapt = lambda stored, wanted: wanted,
    ) -> Restored:
        """Returns the arrays of some groups, placed as asked, and the metadata.

        Each device reads only its shards, so that an array is never whole on a device
        that holds a part. Values equal the saved values, bit for bit.

        Args:
            wanted: Shape, dtype and sharding of each array, for all groups or some
                (``{"params": ...}`` reads only the weights).
            step: The same as for `find`.
            base: Has the arrays that the checkpoint names only by checksum.
            adapt: Changes ``wanted`` to suit the checkpoint, or refuses it.

        Raises:
            CheckpointError: If an array has no sharding.
            CheckpointMismatchError: If paths, shapes or dtypes differ from the saved
                ones, before any array is read.
            CheckpointDamagedError: If an array is not the one that was saved.
            CheckpointNotFoundError, CheckpointReadError, CheckpointUnavailableError:
                The same as for `describe`. Corruption that one process finds is an
                error on all.
        """
        step = self.find(step)
        where = f"Checkpoint {step} in '{self.directory}'"
        problem, stored, read = "", None, dict[str, Any]()
        lent: dict[str, Any] = {}
        try:
            # All differences are found before an array is read.
            stored = self.describe(step)
            wanted = adapt(stored, wanted)
            present, lent = split_base(wanted, stored.base)
            check_match(stored, present, self.directory)
            if "model" in wanted:
                check_base_shapes(stored, wanted["model"], where)
            groups = {name: dict(group) for name, group in present.items() if group}
            with self._reading(step):
                read = load(f"{self.directory}/{step}", groups)
        except CheckpointReadError as error:
            if jax.process_count() == 1:
                raise  # with its cause
            problem = str(error)
        # Nothing above waits for other processes, so that all come to this exchange.
        problems = allgather_object("read checkpoint", problem)
        bad = [f"On process {i}: {text}" for i, text in enumerate(problems) if text]
        if bad or stored is None:
            raise CheckpointReadError("\n".join(bad))
        with reading(where):
            # This follows the exchange, because it gathers the sums of all processes'
            # shards.
            check_checksums(stored, read, where)
        if lent:
            own = same_base(stored, lent.keys(), base, where)
            read["model"] = read.get("model", {}) | own
        # Empty groups were not read, but they belong to the requested groups.
        return {name: read.get(name, {}) for name in wanted}, stored.meta

    def _reading(self, step: int) -> contextlib.AbstractContextManager[None]:
        return reading(f"checkpoint {step} in '{self.directory}'", self.steps)

    def restore_newest(
        self,
        wanted: AbstractGroups,
        base: Base | None = None,
        adapt: Adapt = lambda stored, wanted: wanted,
    ) -> tuple[Restored, list[str]] | None:
        """Restores the latest step; or the latest intact one, if the options say so.

        Returns:
            The result of `restore`, and a line for each corrupt step, now in
            quarantine; ``None`` if the directory holds no step.

        Raises:
            CheckpointError: If it holds a step, but ``resume=False``: a fresh run would
                write into the directory of another run.
            CheckpointFormatError: If another program or a later version wrote a step
                that is not passed over as corrupt.
            CheckpointDamagedError: If the latest step is corrupt and ``on_damage`` is
                ``"error"``, or no step is intact.
            CheckpointMismatchError: If an array differs, before any array is read: that
                is not corruption.
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
        # A step is read twice before it is moved: a network disk may return a torn file
        # once.
        num_tries = 1 if self.options.on_damage == "error" else 2
        for step in sorted([*corrupt, *self.steps], reverse=True):
            if step in corrupt:
                where = f"Checkpoint {step} in '{self.directory}'"
                problems[step] = f"{where} {corrupt[step]}."
                if step in self._names.foreign:
                    raise CheckpointFormatError(
                        f"{problems[step]} Another program may have written it: it was "
                        "not changed. Move it to another directory, or delete it."
                    )
            for _ in range(0 if step in corrupt else num_tries):
                # The outcome is the same on all processes without another exchange:
                # `restore` raises on all processes if one cannot read a file, and
                # compares checksums of all.
                try:
                    found = self.restore(wanted, step, base, adapt)
                except CheckpointReadError as error:
                    problems[step] = str(error)
                    continue
                problems.pop(step, None)
                # Steps are moved only now: nothing is moved until a step is known to be
                # intact.
                if self._read_only:
                    return found, [
                        f"{problem}\nStep {step} is read instead of step {bad}."
                        for bad, problem in problems.items()
                    ]
                notes = [
                    f"{problem}\nStep {bad} is in quarantine as "
                    f"'{quarantine(self.directory, bad)}'; the run goes on from step "
                    f"{step}."
                    for bad, problem in problems.items()
                ]
                if notes:
                    self.orbax.reload()
                return found, notes
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

    def _check_same_steps(self) -> None:
        # Otherwise they would wait for one another, or take parts of two steps for
        # corruption.
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
                    f"'{self.directory}': steps {spelt[0]} and {theirs}. Give a "
                    "directory that all machines share; if it is one, its listing was "
                    "late: start again."
                )

    def check_lock(self) -> None:
        """Raises ``CheckpointDirectoryError`` if another run has taken the lock."""
        if self._lock is not None:
            self._lock.check()

    def close(self) -> None:
        """Closes the directory, after any save in progress."""
        try:
            self.orbax.close()
        finally:
            self.release()

    def release(self) -> None:
        """Lets other runs write to the directory."""
        self._lock = None  # released with the last reference in this process
