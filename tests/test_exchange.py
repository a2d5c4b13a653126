"""Processes divide the rows of a file, and fill shards with rows of all processes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import FSDP, Composite, TensorParallel
from nnx_parallel.models import GPT
from nnx_parallel.sharding.model import arrays_of
from nnx_parallel.sharding.names import dotted
from nnx_parallel.weights import Pretrained, save_pretrained
from nnx_parallel.weights.exchange import SharedReader, divide
from nnx_parallel.weights.files import Tensor
from nnx_parallel.weights.names import Rule, numbered_rules
from nnx_parallel.weights.shards import Shards
from tests.folders import GOLDENS

TALL = Tensor(Path("x"), np.dtype(np.float32), (4096, 1024), 0)
SMALL = Tensor(Path("x"), np.dtype(np.float32), (4096,), 0)


@pytest.mark.parametrize(
    "family",
    ["gpt2", "phi3", "quantised/qwen3_moe", "quantised/gpt_oss"],
)
def test_shards_from_rows_equal_shards_from_memory_maps(family: str) -> None:
    source = GPT.from_pretrained(GOLDENS / family, dtype="keep")
    model = Composite(TensorParallel(2), FSDP(min_size=1)).init(source, 0)
    arrays = {dotted(path): x for path, x in arrays_of(model).items()}
    reader = SharedReader(source.tensors)
    for rule in numbered_rules(source.names, arrays):
        array = arrays[rule.ours]
        shards = Shards(
            rule,
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
        )
        reader.read([shards])
        found = np.asarray(shards.assemble())
        assert found.tobytes() == np.asarray(array).tobytes(), rule.ours
    reader.finish()


class Scales(nnx.Module):
    """A model whose parameters have no dims in files."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.scale = nnx.Param(rngs.params.uniform(()))
        self.of_layers = nnx.Param(rngs.params.uniform((3,)))


def test_arrays_without_dims_are_read(tmp_path: Path) -> None:
    names = [("scale", "scale", "->"), ("of_layers", "h.{}.scale", "->")]
    model: Any = Scales(nnx.Rngs(0))
    save_pretrained(tmp_path / "scales", model, names=names)
    source = Pretrained(Scales, tmp_path / "scales", names)
    assert source.tensors["h.0.scale"].shape == ()
    reader = SharedReader(source.tensors)
    sharding = NamedSharding(FSDP().layout().mesh, P())
    for name, rule in zip(("scale", "of_layers"), map(Rule.of, names), strict=True):
        x = getattr(model, name).get_value()
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        shards = Shards(rule, shape)
        reader.read([shards])
        np.testing.assert_array_equal(shards.assemble(), x)
    reader.finish()


def test_columns_are_read_as_rows() -> None:
    halves = {0: [((0, 4096), (0, 512))], 1: [((0, 4096), (512, 1024))]}
    assert divide(halves, TALL, 0) == [(0, 0, 2048), (1, 2048, 4096)]


def test_disjoint_rows_are_read_where_they_are_needed() -> None:
    rows = {1: [((0, 1024), (0, 1024))], 0: [((1024, 4096), (0, 1024))], 2: []}
    assert divide(rows, TALL, 0) == [(1, 0, 1024), (0, 1024, 4096)]


def test_replicas_share_the_reading() -> None:
    whole = [((0, 4096), (0, 1024))]
    needs = {3: whole, 5: whole}
    assert divide(needs, TALL, 0) == [(3, 0, 2048), (5, 2048, 4096)]


def test_processes_take_turns_in_reading_small_arrays() -> None:
    needs = {0: [((0, 4096),)], 1: [((0, 4096),)]}
    assert [divide(needs, SMALL, turn) for turn in (0, 1, 2)] == [
        [(0, 0, 4096)],
        [(1, 0, 4096)],
        [(0, 0, 4096)],
    ]


def test_unneeded_array_is_not_read() -> None:
    assert divide({0: [], 1: []}, TALL, 0) == []
