"""Small checkpoints for tests, and functions that damage their files."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnx_parallel.checkpoint import Checkpoint, CheckpointManager, CheckpointReader

META = {"position": {"first_step": 0, "state": {"next_index": 5}}, "seed": 3}


def make_groups(seed: int = 0) -> dict[str, dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)
    return {
        "model": {
            "a.kernel": jnp.asarray(rng.normal(size=(16, 24)), jnp.float32),
            "a.bias": jnp.asarray(rng.normal(size=24), jnp.bfloat16),
        },
        "progress": {"step": jnp.int32(7), "key": jax.random.key(3)},
    }


def save(directory: Path, *steps: int, **options: Any) -> None:
    """Saves `make_groups(step)` under each step."""
    with CheckpointManager(Checkpoint(directory, **options)) as manager:
        for step in steps:
            loss = {"loss": 0.5}
            manager.save_groups(step, make_groups(step), META, metrics=loss)


def abstract(groups: dict) -> dict:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), groups
    )


def bits(groups: dict) -> list[bytes]:
    def one(x: jax.Array) -> bytes:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return [one(x) for x in jax.tree.leaves(groups)]


def restore(directory: Path, step: int | None = None) -> list[bytes]:
    """Returns the bits of a step's arrays, read from disk."""
    reader = CheckpointReader(directory)
    return bits(reader.restore(abstract(make_groups()), step)[0])


def damage(step: Path, name: str, how: Any) -> None:
    path = step / name
    if how == "delete":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "half":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = bytearray()
    else:
        position, mask = how
        content[position] ^= mask
    path.write_bytes(content)


def rewrite(file: Path, change: Callable[[dict], Any]) -> None:
    """Lets ``change`` edit a JSON file's content, or return new content."""
    content = json.loads(file.read_text())
    content = change(content) or content
    file.write_text(json.dumps(content))


def sign(content: dict) -> str:
    """Writes the correct digest into a header or checksums, and returns the content."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True).encode()
    content["digest"] = hashlib.sha256(text).hexdigest()
    return content["digest"]


def rewrite_header(step: Path, change: Callable[[dict], Any]) -> None:
    """Changes the header, and updates the checksums and digests to match."""
    digests = []

    def change_header(metadata: dict) -> None:
        change(metadata["custom_metadata"])
        digests.append(sign(metadata["custom_metadata"]))

    def change_checksums(content: dict) -> None:
        content["header"] = digests[0]
        sign(content)

    rewrite(step / "_CHECKPOINT_METADATA", change_header)
    rewrite(step / "fingerprints" / "fingerprints.json", change_checksums)
