"""Arrays are moved bit for bit: -0.0, infinities, NaNs of all kinds, and tiny numbers.

A sum with the zeros of other shards turns -0.0 into 0.0, and arithmetic changes the
payload of a NaN. No floating-point comparison shows either change.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
    make_mesh,
)
from nnx_parallel.checkpoint import Checkpoint, CheckpointManager, CheckpointReader
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.tree import gather, gather_at
from nnx_parallel.weights import reshard, save_pretrained, save_safetensors
from nnx_parallel.weights.files import open_tensors
from nnx_parallel.weights.names import rules_of

pytestmark = pytest.mark.bits

DTYPES = [np.float32, jnp.bfloat16]
# The second NaN of each dtype is a signalling NaN, and the last number is subnormal.
SPECIAL = {
    2: [0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x7FA1, 0xFFC3, 0x0001],
    4: [0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7FA00001, 0xFFC12345, 1],
}
STRATEGIES: dict[str, Strategy] = {
    "tensor": Composite(TensorParallel(2), FSDP(min_size=0)),
    "pipeline": Composite(Pipeline(2), FSDP(min_size=0)),
    "all": Composite(Pipeline(2), TensorParallel(2), FSDP(min_size=0)),
}


def awkward(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns random bits; every second element is one of the special numbers."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(len(shape))
    size = dtype.itemsize
    bits = rng.integers(2 ** (8 * size), size=shape, dtype=f"u{size}")
    flat = bits.reshape(-1)
    flat[::2] = np.resize(SPECIAL[size], flat[::2].shape)
    return bits.view(dtype)


def awkward_model(dtype: Any) -> tuple[GPT, dict[str, np.ndarray]]:
    """Returns a model, and its parameters by path."""
    config = GPTConfig.tiny_llama(num_layers=4, vocab_size=64)
    model, arrays = GPT(config, rngs=nnx.Rngs(0)), {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        x = awkward(param.get_value().shape, dtype)
        arrays[dotted(path)] = x
        param.set_value(jnp.asarray(x))
    return model, arrays


def placed_model(model: GPT, strategy: str) -> Any:
    """Returns the model of a Trainer, with its arrays on all devices."""
    placement: Any = {"strategy": STRATEGIES[strategy], "loggers": ()}
    trainer = Trainer(
        model, optax.sgd(0.1), next_token_loss, num_microbatches=2, **placement
    )
    return trainer.model


def assert_same_bits(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        assert np.asarray(found[path]).tobytes() == x.tobytes(), path


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spec", [P("pipe"), P("pipe", "fsdp"), P(("pipe", "fsdp")), P(None, "pipe")]
)
def test_gathered_elements_keep_their_bits(spec: P, dtype: Any) -> None:
    x = awkward((8, 8, 3), dtype)
    placed = jax.device_put(x, NamedSharding(make_mesh({"pipe": 2, "fsdp": 4}), spec))
    assert gather(placed).tobytes() == x.tobytes()
    for index in [(i,) for i in range(8)] + [(1, 6), (5, 0, 2)]:
        found = gather_at(placed, index)
        assert (found.dtype, found.shape) == (x.dtype, x[index].shape)
        assert found.tobytes() == x[index].tobytes(), index


def test_gathered_elements_of_other_dtypes() -> None:
    mesh = make_mesh({"pipe": 2}, jax.devices()[:2])
    for dtype in (np.int8, np.bool_, np.float16, jnp.float8_e4m3fn, np.complex64):
        x = np.arange(12).reshape(4, 3).astype(dtype)
        placed = jax.device_put(x, NamedSharding(mesh, P("pipe")))
        found = gather_at(placed, (2,))
        assert found.dtype == x.dtype
        assert found.tobytes() == x[2].tobytes(), dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_written_files_have_the_bits_of_the_model(
    strategy: str, dtype: Any, tmp_path: Path
) -> None:
    model, arrays = awkward_model(dtype)
    placed = placed_model(model, strategy)
    save_safetensors(tmp_path / "one.safetensors", placed)
    tensors = open_tensors(tmp_path / "one.safetensors")
    assert_same_bits({name: x.view() for name, x in tensors.items()}, arrays)
    save_pretrained(tmp_path / "folder", placed)
    found = open_tensors(tmp_path / "folder")
    shapes = {path: x.shape for path, x in arrays.items()}
    rules, checked = rules_of(model.names_in_files(), shapes), set()
    for path, x in arrays.items():
        for index, name in rules[path].names(x.shape).items():
            # Files have the elements of each layer in another order.
            theirs = found[name].view()
            ours = rules[path].to_ours(theirs, rules[path].sizes(x.shape))
            assert ours.tobytes() == x[index].tobytes(), name
            checked.add(name)
    assert checked == found.keys()


@pytest.mark.parametrize("dtype", DTYPES)
def test_reshard_and_checkpoints_keep_bits(dtype: Any, tmp_path: Path) -> None:
    model, arrays = awkward_model(dtype)
    served = reshard(placed_model(model, "all"), FSDP(min_size=0))
    params = nnx.to_flat_state(nnx.state(served, nnx.Param))
    placed = {dotted(path): x.get_value() for path, x in params}
    assert_same_bits(placed, arrays)
    with CheckpointManager(Checkpoint(tmp_path)) as manager:
        manager.save_groups(1, {"model": placed}, {})
    mesh = make_mesh({"data": 4, "tensor": 2})
    split = NamedSharding(mesh, P(None, "tensor"))
    wanted = {
        path: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=split if x.ndim > 1 else NamedSharding(mesh, P()),
        )
        for path, x in placed.items()
    }
    restored = CheckpointReader(tmp_path).restore({"model": wanted}, 1)[0]
    assert_same_bits(restored["model"], arrays)
