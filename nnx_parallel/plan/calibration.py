"""Measures the shares of the data sheet's figures that a device attains.

`calibrate` runs products, memory traffic and, on several devices, gathers. `plan` uses
the stored shares for every topology of the same hardware, in place of assumptions.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import PlanError
from nnx_parallel.files import read_object
from nnx_parallel.plan.compiled import CACHE
from nnx_parallel.plan.hardware import HARDWARE, Hardware, Topology, hardware_of
from nnx_parallel.plan.roofline import Assumptions, Range

# (tokens, width, hidden width) of two products of an MLP. The larger ones attain more.
_PRODUCTS = ((4096, 1024, 4096), (8192, 4096, 14336), (8192, 8192, 28672))
_PRODUCTS_CPU = ((256, 128, 512), (512, 512, 2048))
_BYTES, _BYTES_CPU = 2**30, 2**26
_SECONDS = 0.2  # of a measurement; the dispatch would count in a shorter one
_ROUNDS = 5


def calibrate(
    devices: Sequence[Any] | None = None, *, cache: str | os.PathLike | None = None
) -> Assumptions:
    """Measures which shares of its data sheet's speeds a device attains.

    The result is stored, and this takes a minute. The device must be idle. Products of
    an MLP are measured in three sizes, in bfloat16 (float32 on CPUs). The memory is
    measured with an elementwise operation and a norm. If fast links join several
    devices, the links are measured with gathers of two sizes. The worst and the best
    measurement of each kind are the ends of the range. The network is not measured.

    Args:
        devices: Devices of one kind, all in this process; by default all such devices.
        cache: The directory that `plan` reads; by default `CACHE`.

    Returns:
        The measured shares. They are stored under the name of the hardware, with its
        figures.

    Raises:
        PlanError: If `HARDWARE` does not have the devices.

    Example:
        >>> calibrate(cache=tmp).source  # doctest: +SKIP
        'measured on 8 x h100, 2026-11-27'
    """
    devices = [*(devices or jax.local_devices())]
    hardware = HARDWARE["cpu"] if devices[0].platform == "cpu" else None
    hardware = hardware or hardware_of(devices[0])
    if hardware is None:
        raise PlanError(
            f"plan has no figures of {devices[0].device_kind!r}, so it cannot compare "
            f"measurements with them. Known devices: {[*HARDWARE]}. Pass "
            "plan(topology=Topology(...), assumptions=Assumptions(...))."
        )
    is_cpu = hardware.platform == "cpu"
    dtype = jnp.float32 if is_cpu else jnp.bfloat16
    sizes, num_bytes = (_PRODUCTS_CPU, _BYTES_CPU) if is_cpu else (_PRODUCTS, _BYTES)
    with jax.default_device(devices[0]):
        peak = hardware.peak(jnp.dtype(dtype).name)
        products = [_product_rate(*size, dtype) / peak for size in sizes]
        rates = [_memory_rate(f, num_bytes) for f in (_scale, _normalise)]
        memory = [rate / hardware.memory_bandwidth for rate in rates]
    links = _link_shares(devices, hardware, num_bytes // 4)
    date = datetime.datetime.now(datetime.UTC).date()
    found = Assumptions(
        products=_ends(products),
        memory=_ends(memory),
        links=_ends(links) if links else Assumptions().links,
        source=f"measured on {len(devices)} x {hardware.name}, {date}",
    )
    _store(found, hardware, cache)
    return found


def stored(
    hardware: Hardware, cache: str | os.PathLike | None = None
) -> Assumptions | None:
    """Returns the stored shares of a kind of device, or ``None``.

    Shares of other figures, such as a user's or an older version's, are not used.
    """
    # A damaged file is the same as a missing one.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = read_object(_file(hardware, cache))
        if found["figures"] != _figures(hardware):
            return None
        ends = {name: _ends(found[name]) for name in ("products", "memory", "links")}
        return Assumptions(**ends, source=str(found["source"]))
    return None


def _store(
    found: Assumptions, hardware: Hardware, cache: str | os.PathLike | None
) -> None:
    file = _file(hardware, cache)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The file gets its name once it is complete, because another process may read it.
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
        json.dump({**vars(found), "figures": _figures(hardware)}, new)
    Path(new.name).replace(file)


def _figures(hardware: Hardware) -> dict[str, Any]:
    """Returns the figures of which shares are measured."""
    names = "flops", "memory_bandwidth", "link_bandwidth", "num_links"
    figures = {name: getattr(hardware, name) for name in names}
    return figures | {"flops": dict(hardware.flops)}


def _file(hardware: Hardware, cache: str | os.PathLike | None) -> Path:
    return Path(cache or CACHE).expanduser() / f"calibration-{hardware.name}.json"


def _ends(values: Sequence[float]) -> Range:
    """Returns the worst and the best value; raises a ValueError for invalid ones."""
    worst, best = float(min(values)), float(max(values))
    if not 0 < worst <= best < math.inf:
        raise ValueError(f"shares {values} are not positive numbers")
    return worst, best


def _seconds(function: Callable[..., Any], *args: Any) -> float:
    """Returns the least seconds of a call, after a call that compiles."""
    jax.block_until_ready(function(*args))
    found = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        found.append(time.perf_counter() - start)
    return min(found)


def _seconds_of_trip(body: Callable[[Any], Any], x: Any) -> float:
    """Returns the seconds of one trip of a loop on the device."""

    @jax.jit
    def run(x: Any, trips: Any) -> Any:
        return jax.lax.fori_loop(0, trips, lambda _, x: body(x), x)

    trips = max(1, round(_SECONDS / _seconds(run, x, 1)))
    once, twice = (_seconds(run, x, count * trips) for count in (1, 2))
    # The start of a program takes the same time for one trip and for many. On a busy
    # machine the difference may be far too small.
    return max(twice - once, twice / 4) / trips


def _product_rate(tokens: int, width: int, hidden: int, dtype: Any) -> float:
    """Returns the FLOP/s of two products, up to a hidden width and back."""
    x = jax.random.normal(jax.random.key(0), (tokens, width), dtype)
    up, down = _inverse_matrices(width, hidden, dtype)
    seconds = _seconds_of_trip(lambda x: (x @ up) @ down, x)
    return 2 * 2 * tokens * width * hidden / seconds


def _inverse_matrices(width: int, hidden: int, dtype: Any) -> tuple[Any, Any]:
    """Returns matrices ``(width, hidden)`` and ``(hidden, width)``.

    Their product is the identity, so that values in a long loop of products neither
    overflow nor vanish. The first has rows of a discrete cosine transform.
    """
    row, column = jnp.arange(width)[:, None], jnp.arange(hidden)[None]
    # The angles are multiples of pi / (4 * hidden). In float32 large ones would be
    # inexact, so whole turns are left out.
    turns = (2 * row + 1) * (2 * column + 1) % (8 * hidden)
    up = math.sqrt(2 / hidden) * jnp.cos(turns * (math.pi / (4 * hidden)))
    up = up.astype(dtype)
    return up, up.T.copy()


def _scale(x: jax.Array) -> jax.Array:
    return x * 0.999 + 0.001


def _normalise(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def _memory_rate(function: Callable, num_bytes: int) -> float:
    """Returns the bytes/s that an operation reads and writes."""
    x = jnp.ones((num_bytes // 4 // 4096, 4096), jnp.float32)
    return 2 * x.nbytes / _seconds_of_trip(function, x)


def _link_shares(
    devices: Sequence[Any], hardware: Hardware, num_bytes: int
) -> list[float]:
    """Returns shares of the links' bandwidth in gathers.

    The result is empty for one device, and for devices of which some are not joined by
    fast links.
    """
    count = len(devices)
    topology = Topology(hardware=hardware, num_devices=count)
    if count == 1 or count > topology.machine_size:
        return []
    mesh = Mesh(np.array(devices), ("all",))
    _, most = topology.bandwidth(count, 1)
    shares = []
    for size in (num_bytes // 16, num_bytes):
        rows = max(size // 4 // 1024 // count, 1) * count
        x = jnp.ones((rows, 1024), jnp.float32, device=NamedSharding(mesh, P("all")))
        sent = x.nbytes * (count - 1) / count
        shares.append(sent / _seconds_of_trip(_gather_over(mesh), x) / most)
    return shares


def _gather_over(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that gathers an array, and keeps the neighbours' shards."""

    def gather(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x, "all", tiled=True)
        # Without the barrier a compiler could send only the shards that are kept.
        whole = jax.lax.optimization_barrier(whole)
        next_one = (jax.lax.axis_index("all") + 1) % mesh.size
        rows = x.shape[0]
        return jax.lax.dynamic_slice_in_dim(whole, next_one * rows, rows)

    split = P("all")
    return jax.shard_map(
        gather, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
