"""Rings of devices, along which shards travel and sums grow.

Each hop is a separate operation. It does not depend on the product that is computed
meanwhile, so a compiler with asynchronous collectives runs both at once
(`all_gather_matmul`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import IndivisibleDimError, UnknownAxisError
from nnx_parallel.mesh import manual_region, mesh_here

Mode = Literal["bulk", "ring"]
"""Transfer of the shards of a ring of n devices.

- ``bulk``: one ``all_gather`` or ``psum_scatter``; the product waits for it.
- ``ring``: n - 1 hops to the next device, each during a product of one shard.
"""

Exchange = Literal["ring", "all_to_all", "gather"]
"""Communication of attention whose sequence a mesh axis splits.

- ``ring``: keys and values travel from device to device; each piece is sent on before
  the matmuls with it.
- ``all_to_all``: each device gets the whole sequence for its share of the heads.
- ``gather``: each device gets all keys and values, and keeps its queries.
"""


class SequenceAxis(NamedTuple):
    """The mesh axis that splits long sequences, and how attention exchanges them."""

    axis: str
    exchange: Exchange


TokenExchange = Literal["gather", "ragged"]
"""Communication of the tokens of a mixture whose experts a mesh axis splits.

- ``gather``: each device gets the tokens of all devices; outputs are summed and
  scattered back.
- ``ragged``: each row travels to the device of its expert and back.
"""


class ExpertAxis(NamedTuple):
    """The mesh axis that splits experts, and the exchange over it, if it was chosen."""

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
        # A mesh without devices describes accelerators that this machine lacks.
        if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu":
            return "gather", "CPUs have no ragged all-to-all"
        if top_k < size - 1:
            return "ragged", f"top_k={top_k} is less than {size} - 1 other devices"
        return "gather", f"top_k={top_k} is not less than {size} - 1 other devices"


Pointwise = Callable[[Any], Any]
"""A function that treats each position along a ring's dim separately and keeps the dim.

Its argument and its result are an array or a list of arrays.
"""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The devices along one manual mesh axis, and how shards travel among them.

    Raises:
        ValueError: If the mode is unknown.
    """

    axis: str
    dim: int  # the dim that the axis splits
    mode: Mode

    def __post_init__(self) -> None:
        if self.mode not in (modes := list(get_args(Mode))):
            raise ValueError(f"Unknown mode {self.mode!r}. Modes: {modes}.")

    @property
    def size(self) -> int:
        """Number of devices."""
        return jax.lax.axis_size(self.axis)

    def hops(self, shard: jax.Array) -> list[jax.Array]:
        """The shards that pass by, hop after hop: this device's shard first."""
        passed = [shard]
        # A shard is sent on before it is used: its transfer does not need a product.
        for _ in range(self.size - 1):
            passed.append(self._send(passed[-1]))
        return passed

    def join(self, passed: Sequence[jax.Array]) -> jax.Array:
        """The gathered array from the shards of `hops`."""
        gathered = self._buffer(passed[0])
        for hop, x in enumerate(passed):
            # The owner's position along the ring gives the place of its shard.
            gathered = self._write(gathered, x, self._start(-hop, x))
        return gathered

    def gather_through(
        self, function: Pointwise, shard: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Returns ``function`` of the gathered array, and the gathered array."""
        if self._is_bulk:
            gathered = self._all_gather(shard)
            return function(gathered), gathered
        outputs: Any = None
        gathered = self._buffer(shard)
        for hop, x in enumerate(self.hops(shard)):
            start = self._start(-hop, x)
            y = function(x)
            if outputs is None:
                outputs = jax.tree.map(self._buffer, y)
            outputs = jax.tree.map(partial(self._write, start=start), outputs, y)
            gathered = self._write(gathered, x, start)
        return outputs, gathered

    def scatter_sum_and_gather(
        self, function: Pointwise, x: Any, shard: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `scatter_sum`, and the array gathered from ``shard`` meanwhile."""
        if self._is_bulk:
            return self.scatter_sum(function, x), self._all_gather(shard)
        passed = self.hops(shard)
        return self.scatter_sum(function, x, passed), self.join(passed)

    def scatter_sum(
        self, function: Pointwise, x: Any, passed: Sequence[jax.Array] = ()
    ) -> jax.Array:
        """This device's shard of the sum of ``function(x)`` over all devices.

        The result of ``function`` is one array. The shards in ``passed`` travel
        meanwhile: they are the `hops` of another array whose shards have the same
        length.
        """
        if self._is_bulk:
            return jax.lax.psum_scatter(
                function(x), self.axis, scatter_dimension=self.dim, tiled=True
            )
        length = jax.tree.leaves(x)[0].shape[self.dim] // self.size
        total = None
        for hop in range(self.size):
            arriving = None if total is None else self._send(total)
            if passed:
                # XLA's scheduler for TPUs starts a hop as late as it can, so that 5 to
                # 10 % of all bytes travel after the last product. So each product waits
                # for the hop before it, and hides the next hop. Then no bytes are
                # exposed, for 1.7 % more temporaries (v5p, 4 chips). The hops do not
                # wait for products: otherwise XLA would not merge the rings of products
                # that share an input.
                here, passed = passed[0], passed[1:]
                x, _ = jax.lax.optimization_barrier((x, here))
            # The sum for a device starts at the next device along the ring, and reaches
            # its owner with the last hop.
            start = (jax.lax.axis_index(self.axis) - hop - 1) % self.size * length
            cut = partial(self._slice, start=start, length=length)
            total = function(jax.tree.map(cut, x))
            if arriving is not None:
                # XLA for TPUs would fuse the addition with its product, which then
                # waits for the hop: 18 % of a ring's bytes are exposed instead of 5 %.
                total, arriving = jax.lax.optimization_barrier((total, arriving))
                total = total + arriving
        assert total is not None
        return total

    @property
    def _is_bulk(self) -> bool:
        return self.mode == "bulk" or self.size == 1

    def _all_gather(self, shard: jax.Array) -> jax.Array:
        return jax.lax.all_gather(shard, self.axis, axis=self.dim, tiled=True)

    def _start(self, distance: int, shard: jax.Array) -> jax.Array:
        """Start of a shard in the gathered array, given the distance of its owner."""
        owner = (jax.lax.axis_index(self.axis) + distance) % self.size
        return owner * shard.shape[self.dim]

    def _send(self, x: jax.Array) -> jax.Array:
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(x, self.axis, pairs)

    def _buffer(self, like: jax.Array) -> jax.Array:
        """An uninitialized array that has room for the shards of all devices."""
        shape = list(like.shape)
        shape[self.dim] *= self.size
        # Every part is overwritten. Filling it with zeros first would take 13 % of the
        # estimated cycles of a step (Llama-2 7B, TensorParallel(4), FSDP(16), 64 v5p
        # chips).
        return jax.lax.empty(tuple(shape), like.dtype)

    def _slice(self, x: jax.Array, start: int | jax.Array, length: int) -> jax.Array:
        if length == x.shape[self.dim]:
            return x
        return jax.lax.dynamic_slice_in_dim(x, start, length, axis=self.dim)

    def _write(self, buffer: jax.Array, x: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(buffer, x, start, axis=self.dim)


def on_shards(
    function: Callable,
    axis: str,
    mesh: Mesh | None,
    in_dims: Sequence[int],
    out_dim: int | Sequence[int] | None,
    *splits: tuple[str, jax.Array, int],
) -> Callable:
    """Turns a function of shards into a function of global arrays.

    Args:
        function: Takes one shard of each array.
        axis: The mesh axis that splits the arrays.
        mesh: The mesh; a region that is manual over other axes has a mesh that is used
            instead.
        in_dims: The split dim of each argument.
        out_dim: The split dim of the output, or of each of several outputs; ``None`` if
            the output is not split.
        *splits: Name, array and dim for each check that the axis divides a dim.

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
    found = context if mesh is None else mesh_here(mesh)
    if axis not in found.shape:
        raise UnknownAxisError(
            f"No mesh axis {axis!r} here. Axes: {list(found.axis_names)}. Pass mesh= "
            "with the axis, or call under jax.set_mesh(mesh)."
        )
    check_divides(axis, found.shape[axis], *splits)

    def split_at(dim: int | None) -> P:
        return P() if dim is None else P(*[None] * dim, axis)

    out_specs = (
        split_at(out_dim)
        if out_dim is None or isinstance(out_dim, int)
        else [*map(split_at, out_dim)]
    )
    # Manual over only one axis: the partitioner still splits the others.
    in_specs = tuple(map(split_at, in_dims))
    region = manual_region(function, found, in_specs, out_specs, axes={axis})
    # Outside a trace JAX cannot run a region that leaves axes automatic
    # (docs/library-notes.md, "Tracing and compiling").
    return jax.jit(region, inline=True)


def check_divides(axis: str, size: int, *splits: tuple[str, jax.Array, int]) -> None:
    """Raises an error unless an axis divides the dim of each (name, array, dim)."""
    for name, array, dim in splits:
        length = array.shape[dim]
        if length % size:
            raise IndivisibleDimError(
                f"Cannot split dim {dim} of {name} with shape {array.shape} over the "
                f"mesh axis {axis!r} of size {size}: it does not divide {length}. Pad "
                f"the dim to {-(-length // size) * size}."
            )
