"""Checksums of arrays, which are the same on every mesh.

A checksum is a sum modulo 2**32 over all elements of an array. The term of an element
is a hash of its bits and of its index in the global array. Each device hashes its
shard, so that only the sums move to the host. The host adds the sums. They are exact
integers, so neither the layout nor the order of the sum matters. A change of one
element always changes the checksum. Any other change goes unnoticed with a probability
of 1 in 2**32.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.distributed.agreement import reserve_allgather
from nnx_parallel.errors import ReplicaError
from nnx_parallel.sharding.specs import dim_axes

Checksums = dict[str, dict[str, int]]

_EXCHANGE_SECONDS = 900.0
"""Seconds to wait for the other processes.

Orbax gives up a save after 1200 s. This limit is shorter, so its error comes first.
"""


def checksums(groups: Mapping[str, Mapping[str, Any]]) -> Checksums:
    """Returns the checksum of each array: an integer of 32 bits, by group and path.

    In a run of several processes, all of them call this function, with the same paths.

    Raises:
        ReplicaError: On all processes, if copies of the same array differ.

    Example:
        >>> x = jnp.arange(6.0)
        >>> a = checksums({"g": {"x": x}})
        >>> a == checksums({"g": {"x": jnp.arange(6.0)}})
        True
        >>> a == checksums({"g": {"x": x.at[2].set(2.0000002)}})
        False
    """
    return start_checksums(groups, "checksums")()


def start_checksums(
    groups: Mapping[str, Mapping[str, Any]], name: str
) -> Callable[[], Checksums]:
    """Starts to compute checksums on devices; the arrays may be donated immediately.

    Returns a function that waits for the checksums and compares the copies as
    `checksums` does. Any thread may call it. ``name`` names the exchange between
    processes.
    """
    arrays, structure = jax.tree.flatten({k: dict(x) for k, x in groups.items()})
    names = [f"{k}: {path}" for k in sorted(groups) for path in sorted(groups[k])]
    places = [Place(n, x.sharding, x.shape) for n, x in zip(names, arrays, strict=True)]
    counted = [_counted_devices(x) for x in arrays]
    hashes = start_hashes(arrays)
    # Every process reserves the exchanges here, on its main thread, so that their order
    # is the same everywhere. Another thread sends the values once the devices are done.
    exchange_sums = reserve_allgather(name, _EXCHANGE_SECONDS)
    exchange_copies = reserve_allgather(f"{name} of copies", _EXCHANGE_SECONDS)

    def wait() -> Checksums:
        found = hashes()
        # The first sum counts each part of the array once, the second counts every
        # copy. Neither wraps around. If the copies are equal, the second sum is exactly
        # the first sum times the number of copies.
        mine = [
            (sum(own[device] for device in devices), sum(own.values()))
            for devices, own in zip(counted, found, strict=True)
        ]
        gathered = zip(*exchange_sums(mine), strict=True)
        sums = [[sum(x) for x in zip(*own, strict=True)] for own in gathered]
        differing = [
            (place, own)
            for place, own, (once, total) in zip(places, found, sums, strict=True)
            if (count := place.num_copies) is not None and total != once * count
        ]
        if differing:
            raise_if_copies_differ(differing, exchange_copies)
        return jax.tree.unflatten(structure, [once % 2**32 for once, _ in sums])

    return wait


class Place(NamedTuple):
    """The name, sharding and shape of an array, without a reference to the array."""

    name: str
    sharding: jax.sharding.Sharding
    shape: tuple[int, ...]

    @property
    def num_copies(self) -> int | None:
        """Number of devices that hold the same part; ``None`` without a mesh."""
        if not isinstance(self.sharding, NamedSharding):
            return None
        axes = chain(*dim_axes(self.sharding.spec, len(self.shape)))
        sizes = self.sharding.mesh.shape
        return self.sharding.mesh.size // math.prod(sizes[axis] for axis in axes)


def raise_if_copies_differ(
    found: Iterable[tuple[Place, Mapping[int, int]]],
    exchange: Callable[[Any], list],
    when: str = "",
) -> None:
    """Compares the hashes of all parts of arrays; the hashes are keyed by device id.

    All processes call it. ``exchange`` gathers the hashes of all processes.

    Raises:
        ReplicaError: On all processes, if parts that should be equal are not.
    """
    mine = [
        (
            f"`{place.name}`{[(s.start, s.stop) for s in index or ()]}",
            f"{device} (process {device.process_index})",
            hashes[device.id],
        )
        for place, hashes in found
        for device, index in place.sharding.addressable_devices_indices_map(
            place.shape
        ).items()
    ]
    copies: dict[str, dict[str, int]] = defaultdict(dict)
    for part, device, value in chain(*exchange(mine)):
        copies[part][device] = value
    # All processes make the same lines, so all of them raise.
    lines = [
        f"{part}: {_odd_ones(hashes)}"
        for part, hashes in copies.items()
        if len(set(hashes.values())) > 1
    ]
    if lines:
        raise ReplicaError(
            f"Copies of {len(lines)} arrays differ{when}:\n  "
            + "\n  ".join(lines[:20])
            + "\nThe memory or the arithmetic of these devices is faulty, or the "
            "processes have diverged. Resume from the last checkpoint, without these "
            "devices; `python -m nnx_parallel inspect DIR --verify` checks that it is "
            "intact."
        )


def _odd_ones(hashes: Mapping[str, int]) -> str:
    """Returns text that names the devices whose hash differs from the majority."""
    common, count = Counter(hashes.values()).most_common(1)[0]
    if 2 * count <= len(hashes):
        return f"{', '.join(hashes)} do not agree"
    odd = [device for device, value in hashes.items() if value != common]
    return f"{', '.join(odd)} differ from {count} others"


def start_hashes(arrays: Sequence[jax.Array]) -> Callable[[], list[dict[int, int]]]:
    """Starts to hash each shard of arrays, on any meshes or on single devices.

    Returns a function that waits for the hashes; any thread may call it. It gives, for
    each array, a dict from device id to hash for the shards of this process. A hash has
    32 bits. All shards that hold the same part of an array have the same hash.
    """
    # `wait` refers only to these two lists: it keeps no array alive.
    found: list[dict[int, int]] = [{} for _ in arrays]
    started: list[tuple[list[int], jax.Array]] = []
    by_mesh: dict[Any, list[int]] = {}
    for index, x in enumerate(arrays):
        by_mesh.setdefault(getattr(x.sharding, "mesh", None), []).append(index)
    for mesh, indices in by_mesh.items():
        if mesh is None:
            started += [([i], _hash_whole(data_of(arrays[i]))) for i in indices]
            continue
        hashes = [
            _hash_shards(mesh, arrays[i].sharding.spec)(data_of(arrays[i]))  # pyright: ignore[reportAttributeAccessIssue]
            for i in indices
        ]
        # The host adds the hashes. On devices, each array would need a program with an
        # all-reduce, and many such programs in flight can deadlock simulated devices.
        started.append((indices, _stack(mesh)(hashes)))

    def wait() -> list[dict[int, int]]:
        for indices, hashes in started:
            for shard in hashes.addressable_shards:
                values = np.asarray(shard.data).ravel().tolist()
                for index, value in zip(indices, values, strict=True):
                    found[index][shard.device.id] = value
        return found

    return wait


def _counted_devices(x: jax.Array) -> set[int]:
    """Returns ids of this process's devices with counted shards.

    If several devices hold the same part of an array, only one of them is counted.
    """
    if not isinstance(x.sharding, NamedSharding):
        return {x.addressable_shards[0].device.id}  # this device holds the entire array
    return {s.device.id for s in x.addressable_shards if s.replica_id == 0}


@lru_cache(maxsize=4096)
def _hash_shards(mesh: Mesh, spec: P) -> Any:
    """Returns a compiled function from a global array to the hash of each shard."""
    out = P(*mesh.axis_names)  # one element on each device, in the shape of the mesh

    # Replicas compute equal hashes from equal data; `check_vma` cannot prove that.
    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
    def hash_shard(shard: jax.Array) -> jax.Array:
        return _hash_shard(mesh, spec, shard).reshape((1,) * len(mesh.shape))

    # Arrays that are offloaded to host memory are moved to the device one at a time.
    return jax.jit(lambda x: hash_shard(jax.device_put(x, jax.memory.Space.Device)))


def _hash_shard(mesh: Mesh, spec: P, shard: jax.Array) -> jax.Array:
    """Hashes the shard of a device, inside a manual region."""
    dims = []
    for axes, size in zip(dim_axes(spec, shard.ndim), shard.shape, strict=True):
        start = jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(size)
        dims.append((start, size * math.prod(mesh.shape[axis] for axis in axes)))
    return _hash(shard, dims)


_SMALL_BYTES = 2**16
"""Shards of fewer bytes are copied into one array, to be hashed together."""


def hash_each(mesh: Mesh, arrays: Sequence[jax.Array], specs: Sequence[P]) -> jax.Array:
    """Hashes each shard of arrays inside a compiled program, without collectives.

    Returns:
        uint32 of shape ``(*mesh.shape, len(arrays))``; each device holds the hashes of
        its shards.
    """
    specs, out = tuple(specs), P(*mesh.axis_names)

    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    def hash_all(*shards: jax.Array) -> jax.Array:
        # Small shards of one kind are hashed together: in a program of 2,000
        # reductions, starting them takes longer than running them.
        alike: dict[Any, list[int]] = defaultdict(list)
        for i, (x, spec) in enumerate(zip(shards, specs, strict=True)):
            kind = (x.shape, x.dtype, spec) if x.nbytes < _SMALL_BYTES else i
            alike[kind].append(i)
        hashes = [
            jax.vmap(partial(_hash_shard, mesh, specs[group[0]]))(
                jnp.stack([shards[i] for i in group])
            )
            for group in alike.values()
        ]
        order = np.argsort([*chain(*alike.values())])
        joined = jnp.concatenate(hashes)[order]
        return joined.reshape((1,) * len(mesh.shape) + (-1,))

    return hash_all(*map(data_of, arrays))


@lru_cache(maxsize=64)
def _stack(mesh: Mesh) -> Any:
    """Returns a compiled function that stacks hashes of many arrays on each device."""
    sharding = NamedSharding(mesh, P(*mesh.axis_names))
    return jax.jit(partial(jnp.stack, axis=-1), out_shardings=sharding)


@jax.jit
def _hash_whole(x: jax.Array) -> jax.Array:
    return _hash(x, [(jnp.uint32(0), size) for size in x.shape])


def _hash(x: jax.Array, dims: list[tuple[jax.Array, int]]) -> jax.Array:
    """Returns the sum of the hashes of a shard's elements.

    ``dims`` has the shard's start in the global array and the global size of each dim.
    """
    words = _words(x)
    # For types wider than 32 bits, the array of words has one more dim.
    dims += [(jnp.uint32(0), size) for size in words.shape[x.ndim :]]
    index, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim, (start, size) in reversed([*enumerate(dims)]):
        position = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) + start
        index += position * jnp.uint32(stride % 2**32)
        stride *= size
    return jnp.sum(_mix(words ^ _mix(index + jnp.uint32(0x9E3779B9))), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Applies a bijection of 32 bits: each input bit flips about half the output bits.

    References:
        Chris Wellons, "Prospecting for Hash Functions", 2018 (``lowbias32``):
        https://nullprogram.com/blog/2018/07/31/
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits as uint32; types wider than 32 bits get one more dim."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    if info(x.dtype).bits < 8:  # no bitcast to bytes exists; float32 is exact
        return x.astype(jnp.float32).view(jnp.uint32)
    if x.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)  # (..., words) if wider
    unsigned = {1: jnp.uint8, 2: jnp.uint16}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def data_of(x: jax.Array) -> jax.Array:
    """Returns the array, or the numbers of random keys."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x
