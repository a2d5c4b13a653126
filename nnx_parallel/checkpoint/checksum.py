"""The file of a checkpoint that holds the checksums of its arrays.

Orbax itself does not check values: in a trial, one bit of a checkpoint's files was
flipped, 36 times. Orbax 0.12.8 restored wrong weights 33 times, without an error.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint.files import (
    CHECKSUMS,
    PART,
    LiteralPath,
    matches,
    read_json,
)
from nnx_parallel.sharding.checksum import Checksums

_CONTENT = {"header": str, "values": {"*": {"*": int}}}


@dataclass(frozen=True)
class PendingChecksums:
    """Checksums in progress, and the SHA-256 of the header that they belong to."""

    header_digest: str
    values: Callable[[], Checksums]  # waits for the devices and the other processes


class ChecksumHandler(ocp.handlers.CheckpointableHandler[PendingChecksums, None]):
    """Makes Orbax write `PendingChecksums` in the background of a save.

    Orbax writes ``custom_metadata`` when a save begins, before the devices have hashed
    anything. So the checksums are a separate part of the checkpoint. A checkpoint
    without this part is incomplete.
    """

    # Orbax writes a handler's full name into the checkpoint. When Orbax reads, it looks
    # for that name in its registry and warns if it is missing. So the name stays the
    # name of the first release.
    __module__ = "nnx_parallel.checkpoint.fingerprint_file"
    __qualname__ = "FingerprintHandler"

    async def save(
        self, directory: ocp.path.PathAwaitingCreation, checkpointable: PendingChecksums
    ) -> Awaitable[None]:
        """Starts the write and returns immediately."""

        async def write() -> None:
            values = await asyncio.to_thread(checkpointable.values)
            path = await directory.await_creation()
            if jax.process_index() == 0:
                content = {"header": checkpointable.header_digest, "values": values}
                text = json.dumps(content | {"digest": digest(content)})
                await asyncio.to_thread((path / CHECKSUMS).write_text, text)

        return write()

    async def load(
        self, directory: ocp.path.Path, abstract_checkpointable: None = None
    ) -> Awaitable[PendingChecksums]:
        """Always raises; `read_checksums` reads the checksums instead."""
        raise NotImplementedError(f"'{directory}' is read by `read_checksums`.")

    async def metadata(self, directory: ocp.path.Path) -> None:
        """Does nothing; an error here would tell Orbax that metadata is missing."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns True for objects that `save` can write."""
        return isinstance(checkpointable, PendingChecksums)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Returns ``None``, which counts as False: Orbax does not read checksums."""


def read_checksums(step_directory: str, header_digest: str) -> Checksums:
    """Reads the checksums that were saved with a header, without Orbax.

    Raises ``OSError`` if they cannot be read, and ``ValueError`` if they belong to
    another header.
    """
    content = read_json(LiteralPath(step_directory) / PART / CHECKSUMS)
    if not matches(content, _CONTENT) or content.get("digest") != digest(content):
        raise ValueError("Its file of checksums is damaged.")
    if content["header"] != header_digest:
        raise ValueError("Its checksums were saved with another header.")
    return content["values"]


def digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a JSON object without its entry ``"digest"``."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
