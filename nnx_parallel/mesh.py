"""Makes and checks meshes. The axes of a mesh are the axes of a strategy."""

import contextlib
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import flax
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from nnx_parallel.errors import (
    DeviceCountError,
    MeshAxisTypeError,
    MeshShapeError,
    UnknownAxisError,
    VersionError,
)

SUPPORTED = {"jax": ((0, 10), (0, 13)), "flax": ((0, 12, 8), (0, 13))}
"""The oldest supported and the first newer unsupported version, by library.

The numbers are the same as in ``pyproject.toml``.
"""


def check_versions(found: Mapping[str, str]) -> None:
    """Warns if a library is newer than the tested versions.

    ``found`` has the version of each library by its name.

    Raises:
        VersionError: If a version is too old.

    Example:
        >>> check_versions({"jax": "0.10.2", "flax": "0.12.8"})
    """
    for name, (lowest, limit) in SUPPORTED.items():
        numbers = tuple(int(part) for part in re.findall(r"\d+", found[name])[:3])
        oldest, newest = (".".join(map(str, version)) for version in (lowest, limit))
        rule = f"nnx_parallel runs on {name} {oldest} or newer, below {newest}"
        if numbers < lowest:
            raise VersionError(
                f"Found {name} {found[name]}. {rule}: "
                f"pip install '{name}>={oldest},<{newest}'"
            )
        if numbers >= limit:
            text = f"Found {name} {found[name]}, which is untested. {rule}."
            warnings.warn(text, stacklevel=3)


# The check runs before any import of a name that an unsupported version lacks.
check_versions({"jax": jax.__version__, "flax": flax.__version__})

# jax.Device is re-exported as a variable, which pyright refuses as a type.
if TYPE_CHECKING:
    from jaxlib._jax import Device
else:
    Device = jax.Device


# Flax, JAX and this library's placement read only these attributes of a device.
@dataclass(frozen=True)
class StandIn:
    """Stands in for an absent device, in meshes and shardings of shapes."""

    id: int
    platform: str
    device_kind: str
    slice_index: int
    process_index: int = 0
    client: object = None


# The first axis may use the slowest interconnect, and the last axis needs the fastest.
# So the axes are ordered by their communication in a step, the least first: a pipeline
# sends the activations between stages, data parallelism sends all gradients, FSDP sends
# parameters too, and the other strategies send activations in each layer.
MESH_AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""The mesh axes that this library's strategies use, outermost first."""


_NO_MESH = "not under a mesh context", "a non-empty mesh", "mesh cannot be empty"


def simulate_devices(count: int) -> None:
    """Simulates ``count`` CPU devices on one machine, to try strategies on them.

    Call this before anything else that uses JAX, which counts its devices only once.

    Raises:
        ValueError: If ``count`` is not an integer of at least 1.
        DeviceCountError: If JAX has already started with other devices.

    Example:
        >>> simulate_devices(8)
        >>> jax.device_count()
        8
    """
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"simulate_devices({count!r}). It takes a number of devices.")
    # The devices share a pool of threads, by default one thread per device. Collectives
    # wait in these threads, and independent programs have deadlocked when no thread was
    # left (docs/library-notes.md, "Simulated devices").
    os.environ.setdefault("PJRT_NPROC", str(4 * count))
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise DeviceCountError(
            f"Cannot simulate {count} devices: JAX has already started and found "
            f"{jax.device_count()} of platform {jax.default_backend()!r}. Call "
            "simulate_devices before anything that touches an array or a device."
        ) from error


def make_mesh(
    axis_sizes: Mapping[str, int | None], devices: Sequence[Device] | None = None
) -> Mesh:
    """Makes a mesh with Auto axes over all ``devices``.

    Args:
        axis_sizes: Size of each axis by name. At most one size may be ``None``: that
            axis takes the remaining devices.
        devices: Devices; the mesh uses all of them. By default ``jax.devices()``.

    Returns:
        The mesh. Its axes are in the order of ``MESH_AXES``; axes with other names come
        first, in the order given.

    Raises:
        MeshShapeError: If the sizes do not multiply to the number of devices.

    Example:
        >>> dict(make_mesh({"tensor": 2, "data": None}).shape)
        {'data': 4, 'tensor': 2}
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise MeshShapeError("A mesh needs at least one device, but devices= is empty.")
    sizes = complete_axis_sizes(axis_sizes, len(devices))
    order = {axis: i for i, axis in enumerate(MESH_AXES)}
    names = tuple(sorted(sizes, key=lambda axis: order.get(axis, -1)))
    shape = tuple(sizes[axis] for axis in names)
    # With Auto axes the partitioner chooses the sharding of intermediate values, so a
    # model does not mention the mesh. Explicit axes would be part of each array's type.
    auto = (AxisType.Auto,) * len(names)
    # Only TPUs have slices. The fast network joins all chips of a slice.
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) < 2:
        try:
            return jax.make_mesh(shape, names, axis_types=auto, devices=devices)
        except NotImplementedError:
            # This mesh needs two axes in one dim of a TPU's torus, such as tensor=2 in
            # a dim of 4 chips. JAX splits a dim of the torus only on request.
            arranged = mesh_utils.create_device_mesh(
                shape, devices, allow_split_physical_axes=True
            )
            return Mesh(arranged, names, axis_types=auto)
    outer = slice_sizes(dict(zip(names, shape, strict=True)), len(slices))
    inner = [size // across for size, across in zip(shape, outer, strict=True)]
    arranged = mesh_utils.create_hybrid_device_mesh(inner, outer, devices)
    return Mesh(arranged, names, axis_types=auto)


def slice_sizes(axis_sizes: Mapping[str, int], num_slices: int) -> list[int]:
    """Returns the number of slices along each axis of a mesh, outermost axis first.

    The outermost axes, which communicate least, span several TPU slices and so use the
    slow network.

    Raises:
        MeshShapeError: If no factors of the sizes multiply to the number of slices.

    Example:
        >>> slice_sizes({"data": 2, "fsdp": 8, "tensor": 4}, 4)
        [2, 2, 1]
    """
    left, parts = num_slices, []
    for size in axis_sizes.values():
        across = math.gcd(size, left)
        parts.append(across)
        left //= across
    if left > 1:
        raise MeshShapeError(
            f"Mesh {dict(axis_sizes)} cannot be spread over {num_slices} slices: no "
            f"factors of its sizes multiply to {num_slices}. Make the size of an outer "
            f"axis a multiple of {num_slices}."
        )
    return parts


def mesh_here(mesh: Mesh | AbstractMesh) -> Any:
    """Returns the mesh to use: inside a manual region, the mesh of this region."""
    context = jax.sharding.get_abstract_mesh()
    return context if context.manual_axes else mesh


def free_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """Returns the axes of a mesh that are not manual in the current context."""
    return set(mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)


def manual_region(
    function: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    in_specs: Any,
    out_specs: Any,
    axes: Collection[str] | None = None,
) -> Callable[..., Any]:
    """Wraps a function of shards in a `jax.shard_map` over some or all mesh axes.

    The wrapped function can be called inside a region that is manual over other axes,
    such as a pipeline's stage. The new region is then nested in that region.

    Args:
        function: The function of shards.
        mesh: The mesh of the whole program.
        in_specs: `jax.sharding.PartitionSpec` of each argument.
        out_specs: Specs of the results.
        axes: The axes that become manual. XLA partitions the region over the others.
            ``None`` means all axes that are not manual yet, even axes that no spec
            names. Then nothing is left to XLA's partitioner.
    """
    return jax.shard_map(
        function,
        mesh=mesh_here(mesh),
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=free_axes(mesh) if axes is None else set(axes),
        # JAX's check cannot prove that a gathered array, or an array assembled from the
        # hops of a ring, is the same on all devices.
        check_vma=False,
    )


def axes_across_processes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes along which devices belong to different processes.

    Example:
        >>> axes_across_processes(make_mesh({"data": None}))
        ()
    """
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    # An axis does not cross processes if the same processes own the first plane along
    # the axis and all other planes.
    return tuple(
        axis
        for dim, axis in enumerate(mesh.axis_names)
        if (owners != np.take(owners, [0], axis=dim)).any()
    )


def complete_axis_sizes(
    axis_sizes: Mapping[str, int | None], num_devices: int
) -> dict[str, int]:
    """Fills in the size that is ``None``, and checks the product of the sizes.

    Raises:
        MeshShapeError: If the sizes cannot multiply to ``num_devices``.

    Example:
        >>> complete_axis_sizes({"data": 2, "fsdp": None}, 8)
        {'data': 2, 'fsdp': 4}
    """
    if not isinstance(axis_sizes, Mapping):
        raise MeshShapeError(
            f"A mesh got {axis_sizes!r} for its axis sizes. They must be a mapping, "
            "in which None takes all remaining devices: make_mesh({'fsdp': None})."
        )
    for axis, size in axis_sizes.items():
        if size is None:
            continue
        is_whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not is_whole or size < 1:
            raise MeshShapeError(
                f"Mesh axis {axis!r} has size {size!r}. A size is an integer of at "
                "least 1; leave it out to take the devices that remain."
            )
    open_axes = [axis for axis, size in axis_sizes.items() if size is None]
    if len(open_axes) > 1:
        raise MeshShapeError(
            f"The sizes of mesh axes {open_axes} are all left out. At most one can be "
            f"inferred from {num_devices} devices; give the others a size."
        )
    product = math.prod(size or 1 for size in axis_sizes.values())
    remaining, rest = divmod(num_devices, product)
    if rest == 0 and (open_axes or remaining == 1):
        return {axis: size or remaining for axis, size in axis_sizes.items()}
    shape = " * ".join(f"{axis}={size or '?'}" for axis, size in axis_sizes.items())
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    simulated = ""
    if num_devices == 1:  # as on a laptop
        simulated = (
            f" To try it on one machine, call simulate_devices({product}) before "
            "anything that touches a device."
        )
    if open_axes:
        raise MeshShapeError(
            f"Mesh {shape} cannot cover {num_devices} devices: the known sizes "
            f"multiply to {product}, which does not divide {num_devices}. Valid "
            f"products of the known sizes: {divisors}.{simulated}"
        )
    fewer = f", or pass devices=jax.devices()[:{product}]"
    if rest == 0:
        other = "FSDP" if "data" in axis_sizes else "DataParallel"
        fewer += f", or give a part to another strategy: Composite(..., {other}())"
    raise MeshShapeError(
        f"Mesh {shape} covers {product} devices but {num_devices} are available. Axis "
        f"sizes must multiply to {num_devices}; leave one size out to infer it"
        f"{fewer if product < num_devices else ''}. Valid sizes of one axis: "
        f"{divisors}.{simulated}"
    )


def is_without_mesh(error: Exception) -> bool:
    """Returns True if JAX raised the error because the context has no mesh."""
    return any(words in str(error) for words in _NO_MESH)


@contextlib.contextmanager
def explaining_axes() -> Iterator[None]:
    """Turns JAX's error about the axes of a model's sharding into a named error.

    The message of jax 0.10 to 0.12 is recognised. Other errors pass unchanged.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "is not found in mesh" not in str(error):
            raise
        raise UnknownAxisError(
            f"{error} The model makes a NamedSharding from the mesh that it finds, but "
            "names axes of another mesh. Pass only the spec: "
            "with_sharding_constraint(x, P(...)) and out_sharding=P(...) translate "
            "names such as tp and dp."
        ) from error


@contextlib.contextmanager
def leaving_mesh(mesh: Mesh | None = None) -> Iterator[None]:
    """Clears the mesh of JAX's context, which a caller has set by ``jax.set_mesh``.

    The caller's mesh then has no effect, whatever its axes, their types or its devices
    are. If the context already has ``mesh``, nothing changes.
    """
    found = jax.sharding.get_abstract_mesh()
    if found.empty or (mesh is not None and found == mesh.abstract_mesh):
        yield
        return
    try:
        # This also clears the devices of the context.
        cleared = jax.set_mesh(None)
    except ValueError:  # inside a trace, in which devices have no effect
        cleared = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with cleared:
        yield


def auto_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh with Auto axes, and with the same devices and names.

    Raises:
        MeshAxisTypeError: If an axis is Manual, as in the body of a ``shard_map``.

    Example:
        >>> auto_mesh(jax.make_mesh((8,), ("fsdp",))).axis_types
        (Auto,)
    """
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if manual := [axis for axis, kind in kinds.items() if kind == AxisType.Manual]:
        raise MeshAxisTypeError(
            f"Mesh axes {manual} are Manual. Axes are Auto or Explicit: pass the mesh "
            "from outside of jax.shard_map, or build one with nnx_parallel.make_mesh."
        )
    types = (AxisType.Auto,) * len(kinds)
    return mesh if mesh.axis_types == types else mesh.update(axis_types=types)


def check_mesh(mesh: Mesh, axis_sizes: Mapping[str, int | None]) -> None:
    """Checks a user's mesh against the axes of a strategy.

    Raises:
        UnknownAxisError: If the strategy and the mesh have different axes.
        MeshShapeError: If a size that the strategy states differs from the mesh's.
    """
    if set(mesh.axis_names) != set(axis_sizes):
        raise UnknownAxisError(
            f"The mesh has axes {list(mesh.axis_names)} but the strategy uses "
            f"{list(axis_sizes)}. They must be the same names: build the mesh with "
            "strategy.make_mesh(), or compose strategies for every axis of the mesh."
        )
    for axis, size in axis_sizes.items():
        if size is not None and mesh.shape[axis] != size:
            raise MeshShapeError(
                f"The strategy asks for {axis}={size} but the mesh has "
                f"{axis}={mesh.shape[axis]}. Make the two equal, or leave the "
                "strategy's size out to take the mesh's size."
            )
