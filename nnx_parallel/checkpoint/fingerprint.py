"""Fingerprints of arrays: one number each, the same on every mesh.

A fingerprint is a sum modulo 2**32 over all elements, of a hash of the element's bits
and its index in the global array. Each device hashes its own shard, and the host adds:
exact integers, so that neither layout nor order matters, and no device waits for
another. One changed element always changes it; what changes more escapes once in 2**32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.distributed import exchange

Fingerprints = dict[str, dict[str, int]]


def start_fingerprints(groups: Mapping[str, Mapping[str, Any]]) -> Any:
    """Sets the devices to work on `finish_fingerprints`, and does not wait for them.

    The arrays may be donated as soon as this returns.

    Args:
        groups: Arrays by group and path.
    """
    return {
        name: {path: (_parts(x), _counted(x)) for path, x in group.items()}
        for name, group in groups.items()
    }


def finish_fingerprints(started: Any) -> Fingerprints:
    """Waits for what `start_fingerprints` has begun and adds it up.

    With several processes all of them call it, in the same order.

    Returns:
        An integer of 32 bits for each array, by group and path.
    """
    mine = {
        name: {path: _sum(*found) for path, found in group.items()}
        for name, group in started.items()
    }
    shares = exchange("fingerprints", mine)
    return {
        name: {
            path: sum(share[name][path] for share in shares) % 2**32 for path in group
        }
        for name, group in mine.items()
    }


def fingerprints(groups: Mapping[str, Mapping[str, Any]]) -> Fingerprints:
    """The fingerprint of each array, by group and path.

    Example:
        >>> x = jnp.arange(6.0)
        >>> a = fingerprints({"g": {"x": x}})
        >>> a == fingerprints({"g": {"x": jnp.arange(6.0)}})
        True
        >>> a == fingerprints({"g": {"x": x.at[2].set(2.0000002)}})
        False
    """
    return finish_fingerprints(start_fingerprints(groups))


def device_hashes(x: jax.Array) -> jax.Array:
    """The hash of each device's shard, with dims like the mesh; not waited for.

    Shards that hold the same part of the array have the same hash.

    Args:
        x: An array with a `NamedSharding`.

    Returns:
        uint32, of the mesh's shape, one element on each device.
    """
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding)
    return _hash_shards(sharding.mesh, sharding.spec)(_data(x))


def _parts(x: jax.Array) -> jax.Array:
    if isinstance(x.sharding, NamedSharding):
        return device_hashes(x)
    return _hash_whole(_data(x))


def _counted(x: jax.Array) -> set[int] | None:
    """Devices of this process whose shard counts: each part of an array once."""
    if not isinstance(x.sharding, NamedSharding):
        return None
    return {s.device.id for s in x.addressable_shards if s.replica_id == 0}


def _sum(parts: jax.Array, counted: set[int] | None) -> int:
    if counted is None:
        return int(parts)
    return sum(
        int(np.asarray(shard.data).ravel()[0])
        for shard in parts.addressable_shards
        if shard.device.id in counted
    )


@lru_cache(maxsize=4096)
def _hash_shards(mesh: Mesh, spec: P) -> Any:
    """A compiled function from a global array to the hash of each shard."""
    names = mesh.axis_names
    sizes = dict(mesh.shape)

    def hash_shard(shard: jax.Array) -> jax.Array:
        starts = []
        for dim, size in enumerate(shard.shape):
            axes = spec[dim] if dim < len(spec) else None
            axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
            place = jnp.uint32(0)
            for axis in axes:
                place = place * jnp.uint32(sizes[axis])
                place += jax.lax.axis_index(axis).astype(jnp.uint32)
            count = int(np.prod([sizes[axis] for axis in axes]))
            starts.append((place * jnp.uint32(size), size * count))
        return _hash(shard, starts).reshape((1,) * len(names))

    return jax.jit(
        jax.shard_map(
            hash_shard, mesh=mesh, in_specs=spec, out_specs=P(*names), check_vma=False
        )
    )


@jax.jit
def _hash_whole(x: jax.Array) -> jax.Array:
    return _hash(x, [(jnp.uint32(0), size) for size in x.shape])


def _hash(x: jax.Array, dims: list[tuple[jax.Array, int]]) -> jax.Array:
    """Sum of the hashes of a shard whose dims start there, of so many in all."""
    words = _words(x)
    extra = words.shape[x.ndim :]
    dims = [*dims, *((jnp.uint32(0), size) for size in extra)]
    index = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(words.ndim)):
        start, size = dims[dim]
        place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) + start
        index += place * jnp.uint32(stride % 2**32)
        stride *= size
    return jnp.sum(_mix(words ^ _mix(index + jnp.uint32(0x9E3779B9))), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit of the input moves half the output."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits as uint32, with one more dim for types that are wider."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize == 1 and jnp.iinfo(jnp.uint8).bits != _bits(x.dtype):
        return x.astype(jnp.float32).view(jnp.uint32)  # narrower than a byte
    if x.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _bits(dtype: Any) -> int:
    kind = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return kind(dtype).bits


def _data(x: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x
