"""Rings of devices: shards that pass by, and sums that are added to on their way.

Written out hop by hop: a transfer needs nothing of the product computed meanwhile, so
that a compiler with asynchronous collectives runs both at once (`all_gather_matmul`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import IndivisibleDimError, UnknownAxisError

Overlap = Literal["ring", "bidirectional"]
"""The modes in which the transfers run during products."""

Mode = Literal["bulk", Overlap]
"""How the shards of a ring of n devices travel.

- ``bulk``: one ``all_gather`` or ``psum_scatter``; the product waits for it.
- ``ring``: n - 1 hops to the next device, each during a product of one shard.
- ``bidirectional``: the first half of each shard goes to the next device and the second
  to the one before, at once: the same bytes over twice as many links, in products of
  half a shard.
"""

Prefetch = Literal["first", Mode]
"""How a stack gathers the parameters of its next layer.

- ``first``: only those that the layer's first product needs, each in one
  ``all_gather``; the others are gathered in the layer itself, during its products.
- A `Mode`: all of them.
"""

Exchange = Literal["ring", "all_to_all", "gather"]
"""Communication of attention whose sequence a mesh axis splits.

- ``ring``: keys and values travel from device to device; each piece is sent on before
  the matmuls with it.
- ``all_to_all``: each device gets the whole sequence of its share of the heads.
- ``gather``: each device gets all keys and values, and keeps its queries.
"""


class SequenceAxis(NamedTuple):
    """The mesh axis that splits long sequences, and how attention exchanges them."""

    axis: str
    exchange: Exchange


TokenExchange = Literal["gather", "ragged"]
"""``gather``: tokens of all devices to all, outputs added and scattered back.
``ragged``: each row to the device of its expert, and back."""


class ExpertAxis(NamedTuple):
    """The mesh axis that splits experts, and the exchange over it, if it is said."""

    axis: str
    exchange: TokenExchange | None

    def choose(self, mesh: Mesh, top_k: int) -> tuple[TokenExchange, str]:
        """The exchange of a mixture whose tokens go to ``top_k`` experts, and why.

        A device sends a token to all others under ``gather``, to ``top_k`` experts at
        most under ``ragged``; each comes back once.
        """
        size = mesh.shape[self.axis]
        if self.exchange is not None:
            return self.exchange, "as the strategy says"
        # A mesh without devices is of accelerators that are not at hand.
        if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu":
            return "gather", "CPUs have no ragged all-to-all"
        if top_k < size - 1:
            return "ragged", f"top_k={top_k} is less than {size} - 1 other devices"
        return "gather", f"top_k={top_k} is not less than {size} - 1 other devices"


Pointwise = Callable[[Any], Any]
"""Treats every position of a ring's dim by itself, and keeps the dim.

Of an array or of a list of arrays, to the same.
"""


class Piece(NamedTuple):
    """A part of every shard that travels by itself."""

    start: int
    length: int
    direction: int  # 1 to the next device, -1 to the one before


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The devices along one manual mesh axis, and how shards travel among them.

    Raises:
        ValueError: If there is no such mode.
    """

    axis: str
    dim: int  # that the axis splits
    mode: Mode

    def __post_init__(self) -> None:
        if self.mode not in (modes := list(get_args(Mode))):
            raise ValueError(f"Unknown mode {self.mode!r}. Modes: {modes}.")

    @property
    def size(self) -> int:
        """Number of devices."""
        return jax.lax.axis_size(self.axis)

    def hops(self, shard: jax.Array) -> list[jax.Array]:
        """Pieces that pass by, hop after hop: this device's shard first."""
        return [x for _, _, x in self._passing(shard)]

    def join(self, passed: Sequence[jax.Array]) -> jax.Array:
        """The whole array from the pieces of `hops`."""
        ways = len(passed) // self.size
        length = sum(x.shape[self.dim] for x in passed[:ways])
        pieces = self._pieces(length)
        # Of n shards this device's own came first: the others are written where their
        # owners are along the ring.
        whole = self._buffer(passed[0], length)
        for index, x in enumerate(passed):
            hop, way = divmod(index, ways)
            whole = self._write(whole, x, self._start(pieces[way], hop, length))
        return whole

    def gather_through(
        self, function: Pointwise, shard: jax.Array
    ) -> tuple[Any, jax.Array]:
        """``function`` of the whole array, and the array, from this device's part."""
        if self._is_bulk:
            whole = self._all_gather(shard)
            return function(whole), whole
        length = shard.shape[self.dim]
        outputs: Any = None
        whole = self._buffer(shard, length)
        for hop, piece, x in self._passing(shard):
            start = self._start(piece, hop, length)
            y = function(x)
            if outputs is None:
                outputs = jax.tree.map(partial(self._buffer, length=length), y)
            outputs = jax.tree.map(partial(self._write, start=start), outputs, y)
            whole = self._write(whole, x, start)
        assert outputs is not None
        return outputs, whole

    def scatter_sum_and_gather(
        self, function: Pointwise, x: Any, shard: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`scatter_sum`, and the whole array of a shard that travels meanwhile."""
        if self._is_bulk:
            return self.scatter_sum(function, x), self._all_gather(shard)
        passed = self.hops(shard)
        return self.scatter_sum(function, x, passed), self.join(passed)

    def scatter_sum(
        self, function: Pointwise, x: Any, passed: Sequence[jax.Array] = ()
    ) -> jax.Array:
        """This device's shard of the sum over devices of ``function(x)``, one array.

        Meanwhile ``passed`` travels, what `hops` gave of another array with as long a
        shard.
        """
        if self._is_bulk:
            return jax.lax.psum_scatter(
                function(x), self.axis, scatter_dimension=self.dim, tiled=True
            )
        length = jax.tree.leaves(x)[0].shape[self.dim] // self.size
        pieces = self._pieces(length)
        sums: list[jax.Array] = []
        for hop in range(self.size):
            arriving = [self._send(s, p) for s, p in zip(sums, pieces, strict=False)]
            sums = []
            if passed:
                # XLA's scheduler for TPUs starts a hop as late as it may: behind the
                # last product, 5 to 10 % of all bytes. So these products wait for the
                # hop before them, and hide the next; that leaves none exposed, for
                # 1.7 % more temporaries (v5p, 4 chips). The hops themselves wait for no
                # product, else rings of products with one input would not be merged.
                here, passed = passed[: len(pieces)], passed[len(pieces) :]
                x, _ = jax.lax.optimization_barrier((x, here))
            for piece in pieces:
                # The sum for a device is begun by the next one along the ring, and
                # comes to its owner with the last hop.
                start = self._start(piece, hop + 1, length)
                cut = partial(self._slice, start=start, length=piece.length)
                sums.append(function(jax.tree.map(cut, x)))
            if arriving:
                # XLA for TPUs would fuse the addition with its product, which then
                # waits for the hop: 18 % of a ring's bytes exposed instead of 5 %.
                sums, arriving = jax.lax.optimization_barrier((sums, arriving))
                sums = [a + b for a, b in zip(sums, arriving, strict=True)]
        return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=self.dim)

    @property
    def _is_bulk(self) -> bool:
        return self.mode == "bulk" or self.size == 1

    def _all_gather(self, shard: jax.Array) -> jax.Array:
        return jax.lax.all_gather(shard, self.axis, axis=self.dim, tiled=True)

    def _pieces(self, length: int) -> list[Piece]:
        # Halves of an odd length differ; a shard of length 1 travels one way only.
        half = (length + 1) // 2 if self.mode == "bidirectional" else length
        pieces = [Piece(0, half, direction=1)]
        if half < length:
            pieces.append(Piece(half, length - half, direction=-1))
        return pieces

    def _passing(self, shard: jax.Array) -> Iterator[tuple[int, Piece, jax.Array]]:
        """The pieces that pass by, each with its hop."""
        pieces = self._pieces(shard.shape[self.dim])
        moving = [self._slice(shard, p.start, p.length) for p in pieces]
        for hop in range(self.size):
            # Sent on before they are used, so that the transfer needs no product.
            is_last = hop == self.size - 1
            pairs = list(zip(pieces, moving, strict=True))
            moving = [] if is_last else [self._send(x, p) for p, x in pairs]
            yield from ((hop, piece, x) for piece, x in pairs)

    def _start(self, piece: Piece, hop: int, length: int) -> jax.Array:
        """Where a piece that has come ``hop`` devices far begins in the whole array."""
        distance = -piece.direction * hop
        owner = (jax.lax.axis_index(self.axis) + distance) % self.size
        return owner * length + piece.start

    def _send(self, x: jax.Array, piece: Piece) -> jax.Array:
        pairs = [(i, (i + piece.direction) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(x, self.axis, pairs)

    def _buffer(self, like: jax.Array, length: int) -> jax.Array:
        """A buffer for shards of this length from all devices."""
        shape = list(like.shape)
        shape[self.dim] = self.size * length
        # Every part is written. Zeros would be written first: 13 % of the estimated
        # cycles of a step (Llama-2 7B, TensorParallel(4), FSDP(16), 64 v5p chips).
        return jax.lax.empty(tuple(shape), like.dtype)

    def _slice(self, x: jax.Array, start: int | jax.Array, length: int) -> jax.Array:
        if length == x.shape[self.dim]:
            return x
        return jax.lax.dynamic_slice_in_dim(x, start, length, axis=self.dim)

    def _write(self, buffer: jax.Array, x: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, x, start, axis=self.dim)


def gather_hops(
    x: jax.Array, axis: str, *, dim: int, mode: Mode = "ring", mesh: Mesh | None = None
) -> list[jax.Array]:
    """The hops of an all-gather, which a compiler can run during other work.

    x is global, split along ``dim`` over the axis, of size n, or brought there. A
    device sends ``(n - 1) / n`` of its bytes. Errors are those of `on_shards`.

    Returns:
        What each device has seen after each hop, for `join_hops`: global arrays split
        over the axis along ``dim``, together n times x.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_parallel import make_mesh
        >>> mesh = make_mesh({"data": 2, "fsdp": 4})
        >>> hops = gather_hops(jnp.ones((6, 8)), "fsdp", dim=1, mesh=mesh)
        >>> len(hops), join_hops(hops, "fsdp", dim=1, mesh=mesh).shape
        (4, (6, 8))
    """
    ring = Ring(axis=axis, dim=dim, mode=mode)
    return on_shards(ring.hops, axis, mesh, (dim,), dim, ("x", x, dim))(x)


def join_hops(
    hops: list[jax.Array],
    axis: str,
    *,
    dim: int,
    mode: Mode = "ring",
    mesh: Mesh | None = None,
) -> jax.Array:
    """The gathered array from the hops of `gather_hops`, given the same arguments.

    Nothing is sent: each device has seen all of it.
    """
    ring = Ring(axis=axis, dim=dim, mode=mode)
    return on_shards(ring.join, axis, mesh, (dim,), None)(hops)


def on_shards(
    function: Callable,
    axis: str,
    mesh: Mesh | None,
    in_dims: Sequence[int],
    out_dim: int | Sequence[int] | None,
    *splits: tuple[str, jax.Array, int],
) -> Callable:
    """A function of shards as one of global arrays, each split along one dim.

    So is its output, along ``out_dim``, or each of several; ``None``: it is not split.
    It runs on ``mesh``; in a region that is manual over other axes, on that region's.

    Raises:
        UnknownAxisError: If there is no mesh, or none with the axis, or the code is
            manual over it already.
        IndivisibleDimError: If the axis does not divide one of the ``splits``.
    """
    context = jax.sharding.get_abstract_mesh()
    if axis in context.manual_axes:
        raise UnknownAxisError(
            f"The code is manual over {axis!r} already. Call all_gather_matmul, "
            "matmul_reduce_scatter or jax.lax.all_gather on the shards."
        )
    # A nested region must be opened over the mesh of the one around it.
    found = context if context.manual_axes or mesh is None else mesh
    if axis not in found.shape:
        raise UnknownAxisError(
            f"No mesh axis {axis!r} here. Axes: {list(found.axis_names)}. Pass mesh= "
            "with the axis, or call under jax.set_mesh(mesh)."
        )
    check_divides(axis, found.shape[axis], *splits)

    def split_at(dim: int | None) -> P:
        return P() if dim is None else P(*[None] * dim, axis)

    region = jax.shard_map(
        function,
        mesh=found,
        in_specs=tuple(map(split_at, in_dims)),
        out_specs=split_at(out_dim)
        if out_dim is None or isinstance(out_dim, int)
        else [*map(split_at, out_dim)],
        # Manual over one axis: the partitioner goes on splitting the others.
        axis_names={axis},
        # JAX cannot know that what was joined from hops is equal on all devices.
        check_vma=False,
    )
    # Outside a trace JAX runs no region that leaves axes automatic
    # (docs/library-notes.md, "Tracing and compiling").
    return jax.jit(region, inline=True)


def check_divides(axis: str, size: int, *splits: tuple[str, jax.Array, int]) -> None:
    """Refuses dims of arrays, each with the array's name, that an axis cannot split."""
    for name, array, dim in splits:
        length = array.shape[dim]
        if length % size:
            raise IndivisibleDimError(
                f"Cannot split dim {dim} of {name} with shape {array.shape} over the "
                f"mesh axis {axis!r} of size {size}: it does not divide {length}. Pad "
                f"the dim to {-(-length // size) * size}."
            )
