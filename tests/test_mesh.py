"""Meshes cover all devices; axes with the most communication are innermost."""

import os
import re
import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType, Mesh

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    TensorParallel,
    make_mesh,
    simulate_devices,
)
from nnx_parallel.errors import (
    DeviceCountError,
    MeshAxisTypeError,
    MeshShapeError,
    ParallelError,
    UnknownAxisError,
)
from nnx_parallel.mesh import MESH_AXES, check_mesh, complete_axis_sizes, slice_sizes
from tests.tpus import numbers_from


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": None}, {"data": 8}),
        ({"data": 8}, {"data": 8}),
        ({"tensor": 2, "fsdp": None}, {"tensor": 2, "fsdp": 4}),
        ({"data": 2, "fsdp": 2, "tensor": None}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": None, "fsdp": 8}, {"data": 1, "fsdp": 8}),
    ],
)
def test_missing_size_takes_remaining_devices(sizes: dict, expected: dict) -> None:
    assert complete_axis_sizes(sizes, 8) == expected


def test_axes_are_ordered_by_interconnect_speed() -> None:
    sizes = {axis: 2 if axis in ("pipe", "data", "tensor") else 1 for axis in MESH_AXES}
    assert make_mesh(dict(reversed(sizes.items()))).axis_names == MESH_AXES


def test_unknown_axes_are_outermost_in_given_order() -> None:
    mesh = make_mesh({"tensor": 2, "slices": 2, "cells": 2})
    assert mesh.axis_names == ("slices", "cells", "tensor")


def test_mesh_holds_every_device_once(devices: list) -> None:
    mesh = make_mesh({"data": 2, "tensor": None})
    assert set(mesh.devices.flat) == set(devices)
    assert mesh.devices.shape == (2, 4)
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_mesh_uses_only_given_devices(devices: list) -> None:
    mesh = FSDP().make_mesh(devices[2:6])
    assert dict(mesh.shape) == {"fsdp": 4}
    assert set(mesh.devices.flat) == set(devices[2:6])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"data": 3, "tensor": 2},
            "Mesh data=3 * tensor=2 covers 6 devices but 8 are available. Axis sizes "
            "must multiply to 8; leave one size out to infer it, or pass "
            "devices=jax.devices()[:6]. Valid sizes of one axis: [1, 2, 4, 8].",
        ),
        (
            {"tensor": 2},
            "pass devices=jax.devices()[:2], or give a part to another strategy: "
            "Composite(..., DataParallel()). Valid sizes",
        ),
        ({"data": 2}, "Composite(..., FSDP()). Valid sizes"),
        (
            {"data": 4, "tensor": 4},
            "Mesh data=4 * tensor=4 covers 16 devices but 8 are available. Axis sizes "
            "must multiply to 8; leave one size out to infer it. "
            "Valid sizes of one axis: [1, 2, 4, 8].",
        ),
        (
            {"data": None, "tensor": 3},
            "Mesh data=? * tensor=3 cannot cover 8 devices: the known sizes multiply "
            "to 3, which does not divide 8. Valid products of the known sizes: "
            "[1, 2, 4, 8].",
        ),
        (
            {"data": None, "fsdp": None},
            "The sizes of mesh axes ['data', 'fsdp'] are all left out. At most one can "
            "be inferred from 8 devices; give the others a size.",
        ),
        (
            {"data": 0},
            "Mesh axis 'data' has size 0. A size is an integer of at least 1; leave it "
            "out to take the devices that remain.",
        ),
        ({"data": -2, "fsdp": -4}, "Mesh axis 'data' has size -2."),
        ({"data": 2.0}, "Mesh axis 'data' has size 2.0. A size is an integer"),
        ({"data": "8"}, "Mesh axis 'data' has size '8'."),
    ],
)
def test_invalid_sizes_raise(sizes: dict, message: str) -> None:
    with pytest.raises(MeshShapeError, match=re.escape(message)):
        make_mesh(sizes)


def test_mesh_without_devices_raises() -> None:
    with pytest.raises(MeshShapeError, match="at least one device, but devices= is em"):
        make_mesh({"data": None}, devices=[])
    message = "A mesh got [-1] for its axis sizes. They must be a mapping"
    with pytest.raises(MeshShapeError, match=re.escape(message)):
        make_mesh([-1], ["fsdp"])  # pyright: ignore[reportArgumentType]


def test_composite_size_error_names_every_axis() -> None:
    strategy = Composite(TensorParallel(3), FSDP(2))
    with pytest.raises(MeshShapeError, match=re.escape("Mesh fsdp=2 * tensor=3 cover")):
        strategy.make_mesh()


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        (
            lambda: jax.make_mesh((8,), ("data",), axis_types=(AxisType.Manual,)),
            MeshAxisTypeError,
            "Mesh axes ['data'] are Manual. Axes are Auto or Explicit: pass the mesh "
            "from outside of jax.shard_map, or build one with nnx_parallel.make_mesh.",
        ),
        (
            lambda: make_mesh({"batch": 8}),
            UnknownAxisError,
            "The mesh has axes ['batch'] but the strategy uses ['data']. They must be "
            "the same names: build the mesh with strategy.make_mesh(), or compose "
            "strategies for every axis of the mesh.",
        ),
        (
            lambda: make_mesh({"data": 4, "tensor": 2}),
            UnknownAxisError,
            "The mesh has axes ['data', 'tensor'] but the strategy uses ['data'].",
        ),
        (
            lambda: make_mesh({"data": 8}),
            MeshShapeError,
            "The strategy asks for data=4 but the mesh has data=8. Make the two equal, "
            "or leave the strategy's size out to take the mesh's size.",
        ),
    ],
)
def test_mesh_of_another_strategy_raises(
    mesh: object, error: type[ParallelError], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        DataParallel(4).layout(mesh())  # pyright: ignore[reportCallIssue]


def test_explicit_axes_become_auto() -> None:
    explicit = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    layout = Composite(TensorParallel(2), FSDP()).layout(explicit)
    assert layout.mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert layout.mesh.shape == explicit.shape
    assert (layout.mesh.devices == explicit.devices).all()


def test_missing_size_takes_size_of_mesh(devices: list) -> None:
    mesh = Mesh(devices[:2], ("fsdp",))
    check_mesh(mesh, {"fsdp": None})
    assert FSDP().layout(mesh).mesh is mesh


def test_simulating_devices_after_start_raises() -> None:
    jax.devices()
    with pytest.raises(
        DeviceCountError,
        match=re.escape(
            "Cannot simulate 4 devices: JAX has already started and found 8 of "
            "platform 'cpu'."
        ),
    ):
        simulate_devices(4)
    assert jax.device_count() == 8


TWO_SLICES = """
from nnx_parallel import make_mesh
from nnx_parallel.plan.hardware import Topology
devices = Topology.parse("2*v5e:2x4").described()
mesh = make_mesh({"data": 4, "tensor": 4}, devices)
print([sorted({d.slice_index for d in row}) for row in mesh.devices])
"""


def test_tensor_parallel_groups_stay_within_slice() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_SLICES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[[0], [0], [1], [1]]"


def test_indivisible_slices_raise() -> None:
    message = "Mesh {'data': 3, 'tensor': 2} cannot be spread over 4 slices"
    with pytest.raises(MeshShapeError, match=re.escape(message)):
        slice_sizes({"data": 3, "tensor": 2}, 4)


TORUS = """
from nnx_parallel.mesh import make_mesh
mesh = make_mesh({"fsdp": 32, "tensor": 2}, devices_of("v5p:4x4x4"))
near = [abs(a - b) for x, y in mesh.devices for a, b in zip(x.coords, y.coords)]
print(mesh.devices.size, *mesh.devices.shape, sum(near))
"""


@pytest.mark.slow
def test_two_axes_share_torus_dim():
    """Pairs along `tensor` are neighbours, although no torus dim has size two."""
    assert numbers_from(TORUS) == [64, 32, 2, 32]
