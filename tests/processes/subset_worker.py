"""Reads a folder onto the devices of some processes; the others have no devices."""

import sys

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nnx_parallel
from nnx_parallel.models import GPT
from nnx_parallel.sharding.model import abstract_model, arrays_of


def main() -> None:
    """Takes the folder and the processes with devices from the command line.

    A pair of braces in the folder's name stands for the number of the process.
    """
    nnx_parallel.initialize()
    folder, given = sys.argv[1:]
    processes = [*map(int, given.split(","))]
    source = GPT.from_pretrained(folder.format(jax.process_index()), dtype="keep")
    devices = [d for d in jax.devices() if d.process_index in processes]
    mesh = Mesh(np.array(devices), ("fsdp",))
    shapes = arrays_of(abstract_model(source, nnx.Rngs(0)))
    read = source.read_arrays(
        {
            path: jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                sharding=NamedSharding(mesh, P(*[None] * (x.ndim - 1), "fsdp")),
            )
            for path, x in shapes.items()
        }
    )
    expected = arrays_of(source(nnx.Rngs(0)))
    num_shards = 0
    for path, x in read.items():
        assert (x.shape, x.dtype) == (expected[path].shape, expected[path].dtype)
        for shard in x.addressable_shards:
            num_shards += 1
            whole = np.asarray(expected[path])
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()
    print("arrays", len(read), "shards", num_shards)  # noqa: T201


if __name__ == "__main__":
    main()
