"""Opens a directory with Orbax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.directory import METADATA_FILE, is_url
from nnx_parallel.checkpoint.fingerprint_file import FingerprintHandler
from nnx_parallel.checkpoint.gate import Gate
from nnx_parallel.checkpoint.options import Checkpoint, Rules

GIVE_UP_SECONDS = 1200
"""After which Orbax gives up a save that has not ended, or failed on one process."""


class OnlyCheckpoints:
    """Names a step by its number, and lists only directories that are checkpoints.

    Left to itself Orbax takes every directory with a number for a name as a step, and
    deletes it in its turn; and one step whose metadata has a field that it does not
    know keeps it from all others.

    Attributes:
        rejected: Steps whose metadata the last listing could not make out, and why.
    """

    def __init__(self) -> None:
        self._names = ocp.path.step.standard_name_format()
        self.rejected: dict[int, str] = {}

    def build_name(self, step: int) -> str:
        """The name of a step's directory."""
        return self._names.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yields the checkpoints.

        Raises:
            OSError: If their metadata cannot be read now.
        """
        self.rejected = {}
        for path in ocp.path.Path(base_path).iterdir():
            if not path.name.isdecimal() or path.name != str(int(path.name)):
                continue
            try:
                # Orbax takes a file that it cannot read just now for one that is gone.
                (path / METADATA_FILE).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                found = self._names.find_step(base_path, int(path.name))
            except (ValueError, TypeError, KeyError) as error:
                if (path / "commit_success.txt").exists():  # else never completed
                    self.rejected[int(path.name)] = str(error)
                continue
            if found.commit_timestamp_nsecs is not None:
                yield found

    def find_step(self, base_path: Any, step: int) -> Any:
        """What Orbax knows of one checkpoint."""
        return self._names.find_step(base_path, step)


def open_directory(
    options: Checkpoint,
    rules: Rules,
    names: OnlyCheckpoints,
    gate: Gate,
    *,
    cleanup: bool,
) -> ocp.training.Checkpointer:
    """Opens a directory; ``cleanup`` removes what a dead save has left.

    Args:
        options: Which directory.
        rules: When to save, and what to keep.
        names: How steps are named and found.
        gate: Behind which local directories are made.
        cleanup: Whether to remove what a dead save has left.

    Raises:
        OSError: If it cannot be read now.
    """
    context = ocp.Context()
    context.async_options.timeout_secs = GIVE_UP_SECONDS
    registry = ocp.handlers.local_registry()
    registry.add(FingerprintHandler)
    context.checkpointables_options.registry = registry
    # The header and the reader's shardings say all; no mesh goes to disk.
    context.array_options.saving.enable_write_sharding_file = False
    # To have each replica write a part of a small array takes a program for each shape,
    # for which the fit waits.
    context.array_options.saving.min_slice_bytes_for_replica_parallel = 2**20
    # Where a directory cannot be made in the background, writers wait for it, and the
    # interpreter for them: only where it is tried first.
    directory = str(options.directory)
    context.async_options.create_directories_asynchronously = not is_url(directory)
    return ocp.training.Checkpointer(
        directory if is_url(directory) else gate.path(directory),
        context=context,
        save_decision_policy=rules,
        preservation_policy=rules,
        step_name_format=names,
        cleanup_tmp_directories=cleanup,
    )
