"""The versions of jax and flax that this library runs on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

import flax
import jax

from nnx_parallel.errors import VersionError

SUPPORTED = {"jax": ((0, 10), (0, 13)), "flax": ((0, 12, 8), (0, 13))}
"""From this version on, and below that one; as in ``pyproject.toml``."""


def check_installed() -> None:
    """Checks the versions that are installed, as `check_versions` does."""
    check_versions({"jax": jax.__version__, "flax": flax.__version__})


def check_versions(found: Mapping[str, str]) -> None:
    """Refuses versions that are too old, and warns of those that are too new.

    Args:
        found: Versions by the library's name.

    Raises:
        VersionError: If one is too old.

    Warns:
        UserWarning: If one is newer than all that were tested.

    Example:
        >>> check_versions({"jax": "0.10.2", "flax": "0.12.8"})
    """
    for name, (lowest, limit) in SUPPORTED.items():
        numbers = tuple(int(part) for part in re.findall(r"\d+", found[name])[:3])
        rule = f"nnx_parallel runs on {name} {_spell(lowest)} or newer, below " + (
            f"{_spell(limit)}"
        )
        if numbers < lowest:
            raise VersionError(
                f"Found {name} {found[name]}. {rule}: "
                f"pip install '{name}>={_spell(lowest)},<{_spell(limit)}'"
            )
        if numbers >= limit:
            warnings.warn(
                f"Found {name} {found[name]}, untested. {rule}.", stacklevel=3
            )


def _spell(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
