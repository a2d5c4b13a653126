"""Opens a directory with Orbax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.fingerprint_file import FingerprintHandler
from nnx_parallel.checkpoint.options import Checkpoint, Rules


class _OnlyCheckpoints:
    """Names a step by its number, and lists only directories that are checkpoints.

    Left to itself Orbax takes every directory with a number for a name as a step, and
    deletes it in its turn; and one step whose metadata has a field that it does not
    know keeps it from all others.
    """

    def __init__(self) -> None:
        self._names = ocp.path.step.standard_name_format()

    def build_name(self, step: int) -> str:
        return self._names.build_name(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        for path in ocp.path.Path(base_path).iterdir():
            if not path.name.isdecimal() or path.name != str(int(path.name)):
                continue
            try:
                found = self._names.find_step(base_path, int(path.name))
            except (ValueError, TypeError, KeyError):
                continue
            if found.commit_timestamp_nsecs is not None:
                yield found

    def find_step(self, base_path: Any, step: int) -> Any:
        return self._names.find_step(base_path, step)


def open_directory(
    options: Checkpoint, rules: Rules, *, cleanup: bool
) -> ocp.training.Checkpointer:
    """Opens a directory; ``cleanup`` removes what a dead save has left."""
    context = ocp.Context()
    registry = ocp.handlers.local_registry()
    registry.add(FingerprintHandler)
    context.checkpointables_options.registry = registry
    # The header and the reader's shardings say all; no mesh goes to disk.
    context.array_options.saving.enable_write_sharding_file = False
    # To have each replica write a part of a small array takes a program for each shape,
    # for which the fit waits.
    context.array_options.saving.min_slice_bytes_for_replica_parallel = 2**20
    return ocp.training.Checkpointer(
        str(options.directory),
        context=context,
        save_decision_policy=rules,
        preservation_policy=rules,
        step_name_format=_OnlyCheckpoints(),
        cleanup_tmp_directories=cleanup,
    )
