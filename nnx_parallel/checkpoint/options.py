"""Options of checkpoints, rules for the steps to keep, and checks of the directory.

An object store (``gs://...``) does not report free space, and a file cannot be written
there as a test. So Orbax makes most of the checks there.
"""

import dataclasses
import datetime
import glob
import importlib
import importlib.util
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import jax

from nnx_parallel.checkpoint.files import is_url
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.durable import make_directory
from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointNotFoundError,
    suggests_names,
)

Metrics = Mapping[str, float]


def check_readable(directory: str) -> None:
    """Raises ``CheckpointNotFoundError`` if the directory does not exist."""
    if is_url(directory):
        check_url(directory)
    elif not os.path.isdir(directory):
        raise CheckpointNotFoundError(f"No directory '{directory}' to read from.")


def check_directory(directory: str) -> None:
    """Creates the directory and writes a file there.

    Raises ``CheckpointDirectoryError`` if either fails.
    """
    if is_url(directory):
        check_url(directory)
        return
    # Only an actual write shows whether the directory can be written: root may write
    # where the mode forbids it, and a disk may be full or read-only.
    try:
        make_directory(directory)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise CheckpointDirectoryError(
            f"Cannot write checkpoints to '{directory}': {error}. Choose a directory "
            "that exists or can be made, and that this process may write."
        ) from error


def check_url(url: str) -> None:
    """Raises ``CheckpointDirectoryError`` if an object store cannot be written to."""
    # Orbax's specs for TensorStore know only this store (docs/library-notes.md).
    if not url.startswith("gs://"):
        raise CheckpointDirectoryError(
            f"Cannot write checkpoints to '{url}': Orbax writes arrays to Google Cloud "
            "Storage (gs://bucket/run) and to file systems. Mount another object store "
            "as a file system, and give the path."
        )
    # To find the files to delete, gcsfs treats the name as a pattern.
    if glob.has_magic(url):
        raise CheckpointDirectoryError(
            f"Cannot write checkpoints to '{url}': a name in an object store must not "
            "contain [, * or ?. Choose another."
        )
    try:
        importlib.import_module("google.cloud.storage")
        # If TensorFlow is installed, Orbax reads and lists with it instead of gcsfs.
        if importlib.util.find_spec("tensorflow") is None:
            importlib.import_module("gcsfs")
    except ImportError as error:
        raise CheckpointDirectoryError(
            f"Cannot write checkpoints to '{url}' without the packages for Google "
            f"Cloud Storage ({error}). Install them: pip install 'nnx-parallel[gcs]'."
        ) from None


def check_name(directory: str) -> None:
    """Raises ``CheckpointError`` if TensorStore would write to another directory.

    TensorStore treats a backslash as a slash. It treats a name that has the suffix of
    its lock files as a lock file.
    """
    is_utf8 = directory == directory.encode(errors="replace").decode()
    is_lock = any(part.endswith(".__lock") for part in directory.split(os.sep))
    if "\\" in directory or is_lock or not is_utf8:
        raise CheckpointError(
            f"Checkpoint({directory!r}): no directory in the path may have a name that "
            "contains a backslash, ends in '.__lock' or is not UTF-8. Choose another."
        )


def check_writable(directory: str, prepare: Callable[[], None]) -> None:
    """Raises ``CheckpointDirectoryError`` on all processes if process 0 may not write.

    Process 0 calls ``prepare``. If that raises ``OSError``, it is an error on all
    processes.
    """
    # Process 0 makes the directory of a step in the background. If that failed, the
    # writers of all processes would wait 5 minutes for the directory.
    problem = ""
    if jax.process_index() == 0:
        try:
            check_directory(directory)
            prepare()
        except OSError as error:  # CheckpointDirectoryError is a subclass
            problem = str(error)
    problem = allgather_object("directory of a save", problem)[0]
    if problem:
        raise CheckpointDirectoryError(problem)


def check_step(
    directory: str, step: int, latest: int | None, *, overwrite: bool
) -> None:
    """Raises ``CheckpointError`` unless ``step`` can be saved as the latest step.

    Without this check, Orbax silently skips an older step. If a directory is in the
    way, Orbax reports it only after it has written everything.
    """
    where = f"step {step} in '{directory}'"
    if step == latest:
        if not overwrite:
            raise CheckpointError(
                f"Step {step} is already saved in '{directory}'. Pass overwrite=True "
                "to replace it, or save a later step."
            )
    elif latest is not None and step < latest:
        raise CheckpointError(
            f"Cannot save {where} after step {latest}: steps must ascend. Save step "
            f"{latest + 1} or later, or use another directory."
        )
    elif not is_url(directory) and os.path.lexists(os.path.join(directory, str(step))):
        raise CheckpointError(
            f"Cannot save {where}: '{step}' is there and is not a checkpoint. Move it "
            "away, or use another directory."
        )


def check_space(directory: str, needed_bytes: int) -> None:
    """Raises an error if a checkpoint exceeds the disk's space; does not check URLs."""
    if is_url(directory):
        return
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise CheckpointDirectoryError(
            f"A checkpoint of this run takes {needed_bytes:,} bytes, but only {free:,} "
            f"are free in '{directory}'. Free {needed_bytes - free:,} more, or choose "
            "another directory."
        )


_GROWING = {"acc", "accuracy", "auc", "bleu", "f1", "iou", "recall", "reward", "score"}
"""Words in the names of metrics that are better if larger."""


def grows(metric: str) -> bool:
    """Returns True if a metric's name says that its largest value is the best."""
    return bool(set(re.split(r"[^a-z0-9]+", metric.lower())) & _GROWING)


def is_of_other_player(
    metric: str, metrics: Collection[str], players: Collection[str]
) -> bool:
    """Returns True if a metric belongs to a player that did no step in ``metrics``."""
    player, is_named, _ = metric.partition("/")
    return bool(is_named) and player in players and f"{player}/loss" not in metrics


_TIMES = ("every", "keep_every")
_OPTIONAL = ("keep_last", "keep_every", "memory_every")
_CHOICES = {
    "best_mode": ("min", "max"),
    "frozen": ("save", "checksum"),
    "on_damage": ("error", "previous"),
    "on_save_error": ("raise", "warn"),
}


@suggests_names
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Options of checkpoints: the directory, the intervals, and which steps to keep.

    A checkpoint is kept while any rule asks for it. The newest is always kept.

    Attributes:
        directory: Root of the run's checkpoints: a path, which is made absolute, or a
            URL. A lock ensures that only one run at a time writes to a path.
        every: Interval between saves: a number of steps, or a ``datetime.timedelta``.
            A time is tested when a batch is read. Batches are read ahead, so this save
            comes two or three steps late.
        keep_last: Number of the newest checkpoints that are kept; ``None`` keeps all.
        keep_every: Saved steps that are multiples of this number are never deleted. If
            it is a ``datetime.timedelta``, the first save in each such interval is
            never deleted; intervals are counted from 1970-01-01 UTC.
        keep_best: Name of the metric by which the best checkpoints are kept.
            Checkpoints without a finite value of it never count as best.
        best_mode: ``"min"`` (the default) if the smallest value is the best, ``"max"``
            if the largest is. It must be given if the metric's name suggests that
            larger is better, as for an accuracy.
        num_best: Number of the best checkpoints that are kept.
        memory_every: Number of steps between copies in the memory of machines, from
            which a run resumes after a failure; ``None`` makes none. If only one
            machine holds a part of the state, a second copy of the part goes to another
            machine. See `nnx_parallel.checkpoint.memory`.
        memory_directory: Local directory for these copies, usually of a file system in
            memory. It is made absolute. Environment variables in it (``$NAME``) may
            differ between processes.
        asynchronous: True if a save returns before its files are written.
        resume: True if a fit continues from the latest checkpoint.
        frozen: Treatment of parameters that are not trained (``wrt=``). ``"save"``
            writes them. ``"checksum"`` writes only their checksums, so that a
            checkpoint of adapters holds only the adapters and their optimizer state. It
            can be restored only if the Trainer's model has the same untrained
            parameters, bit for bit.
        on_damage: Effect of a corrupt latest checkpoint on a fit. ``"error"`` raises an
            error. ``"previous"`` quarantines the checkpoint and continues from the
            newest intact one.
        on_save_error: Effect of a failed save. ``"raise"`` ends the fit. ``"warn"``
            gives a warning, as for an ``OSError`` of a logger, and training goes on. If
            a save finds copies that differ between devices, it always ends the fit.

    Raises:
        CheckpointError: If a number is below 1, a choice is unknown, or the directory
            has a name that TensorStore cannot write to.

    Example:
        >>> options = Checkpoint("/tmp/run", every=500, keep_best="eval_loss")
        >>> options.keep_last
        3
    """

    directory: str | os.PathLike[str] = dataclasses.field(kw_only=False)
    every: int | datetime.timedelta = 1000
    keep_last: int | None = 3
    keep_every: int | datetime.timedelta | None = None
    keep_best: str | None = None
    best_mode: Literal["min", "max"] | None = None
    num_best: int = 1
    memory_every: int | None = None
    memory_directory: str | os.PathLike[str] = "/dev/shm"
    asynchronous: bool = True
    resume: bool = True
    frozen: Literal["save", "checksum"] = "save"
    on_damage: Literal["error", "previous"] = "error"
    on_save_error: Literal["raise", "warn"] = "raise"

    def __post_init__(self) -> None:
        for name in ("every", "num_best", *_OPTIONAL):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, datetime.timedelta) and name in _TIMES:
                if value <= datetime.timedelta():
                    raise CheckpointError(
                        f"Checkpoint({name}={value!r}) must be longer than 0."
                    )
                if isinstance(self.keep_every, int):
                    raise CheckpointError(
                        f"Checkpoint(keep_every={self.keep_every}) counts steps, and "
                        f"{name}={value!r} saves any step. Use a duration for "
                        "keep_every too, or a number of steps for every."
                    )
                continue
            is_bool = isinstance(value, bool)
            if is_bool or not isinstance(value, int) or value < 1:
                raise CheckpointError(
                    f"Checkpoint({name}={value!r}) must be a whole number of at "
                    f"least 1 ({', '.join(_OPTIONAL)} may be None; every and "
                    "keep_every may also be a datetime.timedelta)."
                )
        copies, saves = self.memory_every, self.every
        if copies is not None and isinstance(saves, int) and copies >= saves:
            raise CheckpointError(
                f"Checkpoint(memory_every={copies}) must be less than every={saves}: a "
                "copy in memory is used only if it is newer than the last checkpoint."
            )
        self._check_memory_directory()
        if not isinstance(self.keep_best, str | None):
            raise CheckpointError(
                f"Checkpoint(keep_best={self.keep_best!r}) must be the name of a "
                "metric, such as 'eval_loss', or None."
            )
        if self.best_mode is None and grows(self.keep_best or ""):
            raise CheckpointError(
                f"Checkpoint(keep_best={self.keep_best!r}) would keep the smallest "
                "values. Say which values are the best: best_mode='max', or 'min'."
            )
        object.__setattr__(self, "best_mode", self.best_mode or "min")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise CheckpointError(
                    f"Checkpoint({name}={getattr(self, name)!r}) must be "
                    f"{choices[0]!r} or {choices[1]!r}."
                )
        path = os.fspath(self.directory)
        if not is_url(path):  # Orbax refuses a relative path, at the first save
            path = os.path.abspath(os.path.expanduser(path))
            check_name(path)
        object.__setattr__(self, "directory", path)

    def _check_memory_directory(self) -> None:
        path = self.memory_directory
        if not isinstance(path, str | os.PathLike) or is_url(os.fspath(path)):
            raise CheckpointError(
                f"Checkpoint(memory_directory={path!r}) must be the path of a local "
                "directory in memory, such as '/dev/shm' or '/local/$SLURM_JOB_ID'."
            )
        path = os.path.expanduser(path)
        if not path.startswith("$"):  # a variable may hold an absolute path
            path = os.path.abspath(path)
        object.__setattr__(self, "memory_directory", path)


def given_options(options: Checkpoint | str | os.PathLike[str] | None) -> Checkpoint:
    """Returns the options; a directory becomes options, ``None`` raises an error."""
    if options is None:
        raise CheckpointNotFoundError(
            "This Trainer has no checkpoint directory. Pass checkpoint='runs/name'."
        )
    return options if isinstance(options, Checkpoint) else Checkpoint(options)


BEST_RULE = "best_by"
"""Key of the `best_rule` in a checkpoint's metadata."""


def best_rule(options: Checkpoint) -> list[str] | None:
    """Returns the metric and the mode that decide which step is best, for JSON."""
    best = options.keep_best
    return None if best is None else [best, options.best_mode or "min"]


def with_rule(options: Checkpoint, rule: object) -> Checkpoint:
    """Returns the options, with a checkpoint's `best_rule` if they have no rule."""
    match options.keep_best, rule:
        case None, [str(metric), "min" | "max" as mode]:
            return dataclasses.replace(options, keep_best=metric, best_mode=mode)
    return options


def best_steps(options: Checkpoint, metrics: Mapping[int, Metrics]) -> list[int]:
    """Returns the steps with a finite ``keep_best``: best first, ties latest first."""
    if options.keep_best is None:
        return []
    sign = 1 if options.best_mode == "min" else -1
    scores = {k: sign * x.get(options.keep_best, math.nan) for k, x in metrics.items()}
    # NaN is not ordered: with a NaN, the result of the sort would be arbitrary.
    finite = [step for step, score in scores.items() if math.isfinite(score)]
    return sorted(finite, key=lambda step: (scores[step], -step))


def superseded_steps(
    options: Checkpoint,
    metrics: Mapping[int, Metrics],
    times: Mapping[int, int] | None = None,
) -> list[int]:
    """Returns the saved steps that no rule keeps; ``metrics`` has all saved steps.

    ``times`` has the time of each save in nanoseconds since 1970, for ``keep_every``.
    The time of the newest save may be missing.

    Orbax has such rules too, but they are not used. Its ``BestN`` reads a separate
    metrics file and orders NaN arbitrarily. While there are at most ``n`` steps it
    keeps all of them, even steps without the metric. A failed deletion makes the save
    fail.
    """
    steps = sorted(metrics)
    kept = set(steps if options.keep_last is None else steps[-options.keep_last :])
    kept |= set(best_steps(options, metrics)[: options.num_best])
    every = options.keep_every
    if isinstance(every, datetime.timedelta):
        length, first = int(every.total_seconds() * 1e9), dict[int, int]()
        for step, time in sorted((times or {}).items()):
            first.setdefault(time // length, step)
        kept |= {*first.values(), *steps[-1:], *(set(steps) - (times or {}).keys())}
    elif every is not None:
        kept |= {step for step in steps if step % every == 0}
    return [step for step in steps if step not in kept]
