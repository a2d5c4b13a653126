"""Rings of devices, around which shards and partial sums travel.

Each hop is a separate operation, and does not depend on the product that is computed
during the hop. So a compiler with asynchronous collectives can run the hop and the
product at the same time (`all_gather_matmul`).
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
"""How shards travel among the n devices of a ring.

- ``bulk``: one ``all_gather`` or ``psum_scatter``, which does not overlap the product.
- ``ring``: n - 1 hops to the next device, each while one shard is multiplied.
"""

Exchange = Literal["ring", "all_to_all", "gather"]
"""Communication in attention if a mesh axis splits the sequence.

- ``ring``: keys and values travel from device to device. A device sends each shard on
  before it computes with the shard.
- ``all_to_all``: each device gets the complete sequence for its share of the heads.
- ``gather``: each device gets all keys and values, but only its shard of the queries.
"""


class SequenceAxis(NamedTuple):
    """The mesh axis that splits long sequences, and the exchange in attention."""

    axis: str
    exchange: Exchange


TokenExchange = Literal["gather", "ragged"]
"""Communication of tokens if a mesh axis splits the experts of a mixture.

- ``gather``: each device gets the tokens of all devices. The outputs are summed over
  the devices and scattered back.
- ``ragged``: each token travels to the devices of its experts, and its outputs travel
  back.
"""


class ExpertAxis(NamedTuple):
    """The mesh axis that splits experts, and the exchange; ``None``: `choose` decides.

    Attributes:
        axis: The mesh axis.
        exchange: The exchange of tokens, or ``None``.
    """

    axis: str
    exchange: TokenExchange | None

    def choose(self, mesh: Mesh, top_k: int) -> tuple[TokenExchange, str]:
        """Chooses the exchange of a mixture that sends tokens to ``top_k`` experts.

        A device sends a token to all other devices under ``gather``, and to at most
        ``top_k`` devices under ``ragged``. Each output comes back once.

        Returns:
            The exchange, and the reason for the choice.
        """
        size = mesh.shape[self.axis]
        if self.exchange is not None:
            return self.exchange, "as the strategy says"
        # An abstract mesh, without devices, describes accelerators that this machine
        # does not have.
        if isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu":
            return "gather", "CPUs have no ragged all-to-all"
        if top_k < size - 1:
            return "ragged", f"top_k={top_k} is less than {size} - 1 other devices"
        return "gather", f"top_k={top_k} is not less than {size} - 1 other devices"


Pointwise = Callable[[Any], Any]
"""A function that treats each position along a ring's dim separately and keeps the dim.

The argument and the result are each an array or a list of arrays.
"""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The devices along one manual mesh axis; moves shards among these devices.

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
        """Returns the number of devices."""
        return jax.lax.axis_size(self.axis)

    def hops(self, shard: jax.Array) -> list[jax.Array]:
        """Returns this device's shard, then the other shards as they arrive."""
        passed = [shard]
        # A shard is sent on before it is used, so that no transfer waits for a product.
        for _ in range(self.size - 1):
            passed.append(self._send(passed[-1]))
        return passed

    def join(self, passed: Sequence[jax.Array]) -> jax.Array:
        """Returns the gathered array, given the shards from `hops`."""
        gathered = self._buffer(passed[0])
        for hop, x in enumerate(passed):
            # The position of a shard follows from the index of its owner in the ring.
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
        """Returns the `scatter_sum`, and gathers ``shard`` at the same time."""
        if self._is_bulk:
            return self.scatter_sum(function, x), self._all_gather(shard)
        passed = self.hops(shard)
        return self.scatter_sum(function, x, passed), self.join(passed)

    def scatter_sum(
        self, function: Pointwise, x: Any, passed: Sequence[jax.Array] = ()
    ) -> jax.Array:
        """Returns this device's shard of the sum of ``function(x)`` over all devices.

        Args:
            function: Its result must be one array.
            x: The argument of ``function``.
            passed: The shards from `hops` of another array, which travel at the same
                time. They have the same length along ``dim``.
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
                # XLA's scheduler for TPUs starts a hop as late as it can. Then 5 to
                # 10 % of all bytes would travel after the last product. With this
                # barrier, each product waits for the previous hop and hides the next
                # hop. Then no bytes are exposed, and temporaries grow by 1.7 % (v5p, 4
                # chips). There is no barrier that makes hops wait for products, because
                # XLA would then not merge the rings of products that share an input.
                here, passed = passed[0], passed[1:]
                x, _ = jax.lax.optimization_barrier((x, here))
            # The sum for a device starts at the next device along the ring, and its
            # last hop ends at the device.
            start = (jax.lax.axis_index(self.axis) - hop - 1) % self.size * length
            cut = partial(self._slice, start=start, length=length)
            total = function(jax.tree.map(cut, x))
            if arriving is not None:
                # Without a barrier, XLA for TPUs fuses the addition with the product,
                # and the product waits for the hop. Then 18 % of a ring's bytes are
                # exposed, instead of 5 %.
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
        """Returns the index in the gathered array at which a shard starts.

        ``distance`` is the number of hops from this device to the owner of the shard.
        """
        owner = (jax.lax.axis_index(self.axis) + distance) % self.size
        return owner * shard.shape[self.dim]

    def _send(self, x: jax.Array) -> jax.Array:
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(x, self.axis, pairs)

    def _buffer(self, like: jax.Array) -> jax.Array:
        """Allocates an uninitialized array with room for the shards of all devices."""
        shape = list(like.shape)
        shape[self.dim] *= self.size
        # Every part of the array is overwritten later. Filling it with zeros first
        # would take 13 % of the estimated cycles of a step (Llama-2 7B,
        # TensorParallel(4), FSDP(16), 64 v5p chips).
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
        function: A function of one shard of each array.
        axis: The mesh axis that splits the arrays.
        mesh: The mesh. Inside a region that is manual over other axes, the mesh of that
            region is used instead. ``None`` means the mesh of the context.
        in_dims: The split dim of each argument.
        out_dim: The split dim of the output, or a list with the split dim of each
            output; ``None`` if the output is not split.
        *splits: Tuples ``(name, array, dim)``. The axis must divide each of these dims;
            errors quote the name.

    Raises:
        UnknownAxisError: If there is no mesh, if the mesh lacks the axis, or if the
            code is already manual over the axis.
        IndivisibleDimError: If the axis does not divide one of the ``splits``.
    """
    context = jax.sharding.get_abstract_mesh()
    if axis in context.manual_axes:
        raise UnknownAxisError(
            f"The code is already manual over {axis!r}. Call all_gather_matmul, "
            "matmul_reduce_scatter or jax.lax.all_gather on the shards."
        )
    found = context if mesh is None else mesh_here(mesh)
    if axis not in found.shape:
        raise UnknownAxisError(
            f"There is no mesh axis {axis!r} here. Axes: {list(found.axis_names)}. "
            "Pass mesh=, a mesh that has the axis, or call under jax.set_mesh(mesh)."
        )
    check_divides(axis, found.shape[axis], *splits)

    def split_at(dim: int | None) -> P:
        return P() if dim is None else P(*[None] * dim, axis)

    out_specs = (
        split_at(out_dim)
        if out_dim is None or isinstance(out_dim, int)
        else [*map(split_at, out_dim)]
    )
    # The region is manual over one axis. XLA's partitioner handles the other axes.
    in_specs = tuple(map(split_at, in_dims))
    region = manual_region(function, found, in_specs, out_specs, axes={axis})
    # The `jit` is needed because JAX cannot run a region with automatic axes outside of
    # a trace (docs/library-notes.md, "Tracing and compiling").
    return jax.jit(region, inline=True)


def check_divides(axis: str, size: int, *splits: tuple[str, jax.Array, int]) -> None:
    """Raises an error unless an axis divides the dim of each (name, array, dim)."""
    for name, array, dim in splits:
        length = array.shape[dim]
        if length % size:
            raise IndivisibleDimError(
                f"Cannot split dim {dim} of {name} with shape {array.shape} over the "
                f"mesh axis {axis!r}, because its size {size} does not divide "
                f"{length}. Pad the dim to {-(-length // size) * size}."
            )
