"""Rings of devices: shards that pass by, and sums that are added to on their way.

Both are written out hop by hop. A hop's transfer needs nothing of the product that
stands beside it, so that a compiler with asynchronous collectives runs the two at once
[1]. ``bulk`` does the same in one collective, which nothing overlaps.

References:
    [1] Wang et al., "Overlap Communication with Dependent Computation via Decomposition
    in Large Deep Learning Models", ASPLOS 2023, sections 3 and 5,
    https://doi.org/10.1145/3567955.3567959
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Overlap = Literal["ring", "bidirectional"]
"""The modes in which the transfers run beside products."""

Mode = Literal["bulk", Overlap]
"""How the shards of a ring of n devices travel.

- ``bulk``: one ``all_gather`` or ``psum_scatter``; the product waits for it.
- ``ring``: n - 1 hops to the next device, each beside a product of one shard.
- ``bidirectional``: the first half of each shard goes to the next device and the second
  to the one before, at once: the same bytes over twice as many links, in products of
  half a shard.
"""


def check_mode(mode: str) -> None:
    """Checks the name of a mode.

    Raises:
        ValueError: If there is no mode of that name.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"Unknown mode {mode!r}. Modes: {list(get_args(Mode))}.")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of every shard that travels by itself.

    Attributes:
        start: Where it begins in the shard.
        length: How long it is.
        direction: 1 to the next device, -1 to the one before.
    """

    start: int
    length: int
    direction: int


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The devices along one manual mesh axis, and how shards travel among them.

    Attributes:
        axis: The mesh axis.
        dim: The dim that the axis splits.
        mode: How shards travel.
    """

    axis: str
    dim: int
    mode: Mode

    @property
    def size(self) -> int:
        """Number of devices."""
        return jax.lax.axis_size(self.axis)

    def gather(self, shard: jax.Array) -> jax.Array:
        """The whole array: shards of all devices along ``dim``."""
        if self._is_bulk:
            return jax.lax.all_gather(shard, self.axis, axis=self.dim, tiled=True)
        return self.join(self.hops(shard))

    def hops(self, shard: jax.Array) -> list[jax.Array]:
        """What passes by, hop after hop: this device's shard first."""
        pieces = self._pieces(shard.shape[self.dim])
        moving = [self._slice(shard, p.start, p.length) for p in pieces]
        passed = list(moving)
        for _ in range(self.size - 1):
            moving = [self._send(x, p) for x, p in zip(moving, pieces, strict=True)]
            passed += moving
        return passed

    def join(self, passed: list[jax.Array]) -> jax.Array:
        """The whole array from what `hops` gave."""
        ways = len(passed) // self.size
        length = sum(x.shape[self.dim] for x in passed[:ways])
        pieces = self._pieces(length)
        shape = list(passed[0].shape)
        shape[self.dim] = length
        whole = self._buffer(jax.ShapeDtypeStruct(shape, passed[0].dtype))
        for hop in range(self.size):
            for way, piece in enumerate(pieces):
                start = self._device(-piece.direction * hop) * length + piece.start
                whole = self._write(whole, passed[hop * ways + way], start)
        return whole

    def gather_through(
        self, shard: jax.Array, function: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """``function`` of the whole array, and the array.

        Args:
            shard: This device's part.
            function: Treats every position of ``dim`` by itself, and keeps the dim.
        """
        if self._is_bulk:
            whole = self.gather(shard)
            return function(whole), whole
        length = shard.shape[self.dim]
        outputs: jax.Array | None = None
        whole = self._buffer(shard)
        pieces = self._pieces(length)
        moving = [self._slice(shard, p.start, p.length) for p in pieces]
        for hop in range(self.size):
            is_last = hop == self.size - 1
            pairs = list(zip(pieces, moving, strict=True))
            arriving = [] if is_last else [self._send(x, p) for p, x in pairs]
            for piece, x in pairs:
                start = self._device(-piece.direction * hop) * length + piece.start
                found = function(x)
                outputs = self._buffer(found, length) if outputs is None else outputs
                outputs = self._write(outputs, found, start)
                whole = self._write(whole, x, start)
            moving = arriving
        assert outputs is not None
        return outputs, whole

    def scatter_sum(
        self, function: Callable[[jax.Array], jax.Array], x: jax.Array
    ) -> jax.Array:
        """This device's shard of the sum over devices of ``function(x)``.

        Args:
            function: Treats every position of ``dim`` by itself, and keeps the dim.
            x: This device's input, whole along ``dim``.
        """
        if self._is_bulk:
            return jax.lax.psum_scatter(
                function(x), self.axis, scatter_dimension=self.dim, tiled=True
            )
        return self._pass_sums(function, x, [])

    def scatter_sum_and_gather(
        self,
        function: Callable[[jax.Array], jax.Array],
        x: jax.Array,
        shard: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """`scatter_sum` of ``function`` and x, and beside its products `gather`.

        Args:
            function: As for `scatter_sum`.
            x: As for `scatter_sum`.
            shard: This device's part of what is gathered, as long as its sum.
        """
        if self._is_bulk:
            return self.scatter_sum(function, x), self.gather(shard)
        passed = self.hops(shard)
        return self._pass_sums(function, x, passed), self.join(passed)

    def _pass_sums(
        self,
        function: Callable[[jax.Array], jax.Array],
        x: jax.Array,
        passed: list[jax.Array],
    ) -> jax.Array:
        length = x.shape[self.dim] // self.size
        pieces = self._pieces(length)
        sums: list[jax.Array] = []
        for hop in range(self.size):
            arriving = [self._send(s, p) for s, p in zip(sums, pieces, strict=False)]
            sums = []
            if passed:
                # Until its last moment a scheduler lets wait what it is free to: a hop
                # is to be there before these products, so that they hide the next.
                # The hops themselves depend on no product, and are merged where several
                # products have one input.
                here, passed = passed[: len(pieces)], passed[len(pieces) :]
                x, _ = jax.lax.optimization_barrier((x, here))
            for piece in pieces:
                # After its last hop, the sum for a device has come to that device.
                owner = self._device(-piece.direction * (hop + 1))
                start = owner * length + piece.start
                sums.append(function(self._slice(x, start, piece.length)))
            if arriving:
                # Fused with its product, the addition would have it wait for the hop.
                sums, arriving = jax.lax.optimization_barrier((sums, arriving))
                sums = [a + b for a, b in zip(sums, arriving, strict=True)]
        return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=self.dim)

    @property
    def _is_bulk(self) -> bool:
        return self.mode == "bulk" or self.size == 1

    def _pieces(self, length: int) -> list[Piece]:
        half = (length + 1) // 2 if self.mode == "bidirectional" else length
        pieces = [Piece(start=0, length=half, direction=1)]
        if half < length:
            pieces.append(Piece(start=half, length=length - half, direction=-1))
        return pieces

    def _device(self, distance: int) -> jax.Array:
        """The index of the device this far along the ring."""
        return (jax.lax.axis_index(self.axis) + distance) % self.size

    def _send(self, x: jax.Array, piece: Piece) -> jax.Array:
        pairs = [(i, (i + piece.direction) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(x, self.axis, pairs)

    def _buffer(
        self, like: jax.Array | jax.ShapeDtypeStruct, length: int | None = None
    ) -> jax.Array:
        shape = list(like.shape)
        shape[self.dim] = self.size * (length or shape[self.dim])
        return jnp.zeros(shape, like.dtype)

    def _slice(self, x: jax.Array, start: int | jax.Array, length: int) -> jax.Array:
        if length == x.shape[self.dim]:
            return x
        return jax.lax.dynamic_slice_in_dim(x, start, length, axis=self.dim)

    def _write(self, buffer: jax.Array, x: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, x, start, axis=self.dim)
