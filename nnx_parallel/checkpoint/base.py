"""Parameters that are not trained: a checkpoint names them only by their checksums.

Adapters are small, but their base is large. With ``Checkpoint(frozen="checksum")`` the
base's arrays are not written: the header has their shapes, and the file of checksums
has one number for each, in a separate group. A run that restores brings its base along,
which must be the same, bit for bit.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import jax

from nnx_parallel.checkpoint.checksum import checksums
from nnx_parallel.checkpoint.contents import StoredCheckpoint, spell
from nnx_parallel.errors import CheckpointMismatchError

BASE = "base"  # the group of checksums without arrays

Base = Callable[[], Mapping[str, jax.Array]]
"""Returns the arrays of a run's model by path; they are built when it is called."""

T = TypeVar("T")


def split_base(
    groups: Mapping[str, Mapping[str, T]], paths: Collection[str]
) -> tuple[dict[str, dict[str, T]], dict[str, T]]:
    """The groups without the model's arrays at ``paths``, and these arrays."""
    model = groups.get("model", {})
    base = {path: x for path, x in model.items() if path in paths}
    rest = {name: dict(group) for name, group in groups.items()}
    if base:
        rest["model"] = {path: x for path, x in model.items() if path not in base}
    return rest, base


def check_base_shapes(
    stored: StoredCheckpoint, wanted: Mapping[str, Any], where: str
) -> None:
    """Raises ``CheckpointMismatchError`` if shapes or dtypes belong to another base."""

    def differences() -> Iterator[str]:
        for path, saved in stored.base.items():
            found = spell(wanted[path]) if path in wanted else "nothing"
            if found != saved:
                yield f"`{path}` was {saved} and is {found} here"

    if lines := list(differences()):
        raise CheckpointMismatchError(
            f"{where} was trained on another base:\n  " + "\n  ".join(lines)
        )


def same_base(
    stored: StoredCheckpoint, paths: Collection[str], base: Base | None, where: str
) -> dict[str, jax.Array]:
    """The base of the run, if it is the base that the checkpoint names.

    Raises:
        CheckpointMismatchError: If an array differs, or if the run has no base.
    """
    if base is None:
        raise CheckpointMismatchError(
            f"{where} names {len(paths)} arrays by checksum and does not hold their "
            "values: restore it into a Trainer whose model has the same base."
        )
    given = base()
    own = {path: given[path] for path in paths}
    found, saved = checksums({BASE: own})[BASE], stored.checksums[BASE]
    if differing := [path for path in own if found[path] != saved[path]]:
        first = differing[0]
        raise CheckpointMismatchError(
            f"{where} was trained on another base: {len(differing)} of {len(own)} "
            "arrays that it names by checksum differ from this model's arrays. The "
            f"first, `{first}`, has checksum {found[first]:08x}; it was "
            f"{saved[first]:08x}. Build the model from the weights that the run began "
            "with."
        )
    return own
