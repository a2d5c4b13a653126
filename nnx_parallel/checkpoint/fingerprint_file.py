"""The file of the fingerprints, which is written behind the training, as arrays are.

Orbax writes its own metadata when a save begins, and the devices have not hashed
anything then. So the fingerprints are a part of the checkpoint by themselves, which is
complete once they are there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.fingerprint import Fingerprints

PART = "fingerprints"
"""What the part is called, beside the groups of arrays."""

_FILE = "fingerprints.json"


@dataclass(frozen=True)
class LateFingerprints:
    """Fingerprints that the devices may still be at.

    Attributes:
        header_digest: Of the header with which they belong.
        values: Waits for the devices, and with several processes for the others.
    """

    header_digest: str
    values: Callable[[], Fingerprints]


class FingerprintHandler(ocp.handlers.CheckpointableHandler[LateFingerprints, None]):
    """Has Orbax write `LateFingerprints` in the background of a save."""

    async def save(
        self, directory: ocp.path.PathAwaitingCreation, checkpointable: LateFingerprints
    ) -> Awaitable[None]:
        """Does nothing that a fit would wait for."""
        return self._write(directory, checkpointable)

    async def _write(
        self, directory: ocp.path.PathAwaitingCreation, late: LateFingerprints
    ) -> None:
        values = await asyncio.to_thread(late.values)
        path = await directory.await_creation()
        if jax.process_index() == 0:
            content = {"header": late.header_digest, "values": values}
            text = json.dumps(content | {"digest": digest(content)})
            await asyncio.to_thread((path / _FILE).write_text, text)

    async def load(
        self, directory: ocp.path.Path, abstract_checkpointable: None = None
    ) -> Awaitable[LateFingerprints]:
        """Is not for reading: `read_fingerprints`."""
        del abstract_checkpointable
        raise NotImplementedError(f"'{directory}' is read by `read_fingerprints`.")

    async def metadata(self, directory: ocp.path.Path) -> None:
        """Says nothing: Orbax takes any error here for no metadata."""
        del directory

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether this is for it."""
        return isinstance(checkpointable, LateFingerprints)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Nothing is read by Orbax."""
        del abstract_checkpointable
        return None


def read_fingerprints(step_directory: str, header_digest: str) -> Fingerprints:
    """The fingerprints that were saved with a header.

    Args:
        step_directory: The directory of one checkpoint.
        header_digest: Of its header.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not what was saved.
    """
    text = (ocp.path.Path(step_directory) / PART / _FILE).read_text()
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("digest") != digest(content):
        raise ValueError("Its fingerprints are not what was saved.")
    if content["header"] != header_digest:
        raise ValueError("Its fingerprints were saved with another header.")
    return content["values"]


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, whatever its own ``"digest"`` says."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
