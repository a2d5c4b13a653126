"""Moves a model's weights to another mesh in the same job, such as for inference."""

from __future__ import annotations

from typing import Any, TypeVar

from flax import nnx

from nnx_parallel.errors import ReplicaError
from nnx_parallel.sharding.checksum import checksums
from nnx_parallel.sharding.model import (
    ModelDef,
    abstract_model,
    arrays_of,
    place_model,
    placed_copies,
    stored_shardings,
)
from nnx_parallel.sharding.model_specs import building_on
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.tree import MeshLike, layout_of

Model = TypeVar("Model", bound=nnx.Module)


def reshard(model: Model, mesh: MeshLike) -> Model:
    """Returns a copy of a model on another mesh, with the same values bit for bit.

    The arrays move from device to device, one at a time, without files. Both copies are
    hashed on their devices, and the checksums are compared. The given model does not
    change, and a Trainer may go on and donate its arrays.

    Args:
        model: The model, such as ``trainer.eval_model``. In a run of several processes,
            all processes must call this function.
        mesh: A strategy, a strategy's ``layout(mesh)`` for certain devices, or a mesh,
            on which every array is replicated. In a run of several processes, both
            meshes must have the same devices.

    Raises:
        ReplicaError: If a checksum differs between the two copies, or if replicas of an
            array differ.
        ModelError: If the model cannot be placed; see `Strategy.init`.

    Example:
        >>> from nnx_parallel import DataParallel, FSDP
        >>> trained = FSDP(min_size=1).init(lambda rngs: nnx.Linear(8, 8, rngs=rngs), 0)
        >>> served = reshard(trained, DataParallel())
        >>> trained.kernel.sharding.spec, served.kernel.sharding.spec
        (P('fsdp',), P())
    """
    layout = layout_of(mesh)
    arrays = arrays_of(model)
    with building_on(layout):
        abstract = abstract_model(model, nnx.Rngs(0))
        placements = place_model(abstract, layout)
        copies = placed_copies(arrays, stored_shardings(placements, layout))
        copied: Any = ModelDef.of(abstract).merge(copies)
    before, after = (
        checksums({"model": {dotted(path): x for path, x in each.items()}})["model"]
        for each in (arrays, copies)
    )
    if differing := [path for path in before if before[path] != after[path]]:
        path = differing[0]
        raise ReplicaError(
            f"reshard changed {len(differing)} arrays on the way to the new mesh, such "
            f"as `{path}`: its checksum was {before[path]:08x} and is "
            f"{after[path]:08x}. The memory or the network of a device is faulty."
        )
    return copied
