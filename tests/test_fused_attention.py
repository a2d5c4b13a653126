"""Fused attention on each device's shard gives the numbers of plain attention.

On a CPU, the kernel is plain attention or interpreted Splash. Tests with the TPU
compiler check that its programs contain the real kernels.
"""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import AttentionKernelError
from nnx_parallel.layers import Dense, Stack
from nnx_parallel.layers.attention import attention
from nnx_parallel.layers.attention.dot_product import per_shard, splits_queries
from nnx_parallel.layers.attention.kernels import (
    FUSED,
    AttentionCall,
    plain_attention,
    splash_attention,
)
from nnx_parallel.sharding import LogicalRules, constrain, using
from tests.parity.checks import assert_gradients_close
from tests.parity.runs import to_host
from tests.tpus import numbers_from


def call_of(query: Any, key: Any, value: Any, **options: Any) -> AttentionCall:
    return AttentionCall(query=query, key=key, value=value, **options)


def plain_causal(*arrays: jax.Array) -> jax.Array:
    return plain_attention(call_of(*arrays, causal=True))


NAMES = ("batch", "seq", "heads", "head_dim")
STRATEGIES: dict[str, Strategy] = {
    "dp": DataParallel(8),
    "fsdp": FSDP(8),
    "tp": TensorParallel(4),
    "tp_sequence": TensorParallel(4, sequence=True),
    "composite": Composite(DataParallel(2), FSDP(2), TensorParallel(2)),
}


def operands(
    heads: int, kv_heads: int, *, rows: int = 8, seq: int = 16, head_dim: int = 8
) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(rows, seq, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes]


def value_and_gradients(function: Any, arrays: list[jax.Array]) -> tuple:
    """Value and gradients of a scalar in which each output has a different weight."""

    @jax.jit
    def run(arrays: list[jax.Array]) -> tuple:
        def loss(arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            out = function(*arrays)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

        grads, out = jax.grad(loss, has_aux=True)(arrays)
        return out, grads

    return run(arrays)


def assert_close(found: tuple, expected: tuple) -> None:
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in leaves:
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


SPLITS = [(name, kv_heads) for name in STRATEGIES for kv_heads in (8, 2, 1)]
QUICK = {("fsdp", 8), ("tp", 2), ("tp_sequence", 8), ("composite", 1)}


@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [
        pytest.param(*split, marks=[] if split in QUICK else [pytest.mark.slow])
        for split in SPLITS
    ],
)
def test_kernel_per_shard_matches_whole_attention(name: str, kv_heads: int):
    """Some meshes have more parts than key heads."""
    strategy = STRATEGIES[name]
    sizes = strategy.axis_sizes.values()
    devices = jax.devices()[: int(np.prod([n or 1 for n in sizes]))]
    layout = strategy.layout(strategy.make_mesh(devices))

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        with using(layout):
            query = constrain(query, *NAMES)
            return per_shard(plain_attention, call_of(query, key, value, causal=True))

    arrays = operands(8, kv_heads)
    expected = value_and_gradients(plain_causal, arrays)
    found = value_and_gradients(run, arrays)
    assert_close(found, expected)
    spec = layout.activation_spec(found[0].shape, ("batch", None, "heads", None))
    assert found[0].sharding.is_equivalent_to(layout.sharding(spec), 4)


@pytest.mark.parametrize("shape", [(8, 1), (1, 8)])
def test_mask_is_split_along_its_dims(shape: tuple[int, int]):
    layout = STRATEGIES["composite"].layout()
    mask = np.random.default_rng(1).random((*shape, 16, 16)) < 0.7
    mask |= np.eye(16, dtype=bool)
    call = call_of(*operands(8, 4), mask=jnp.asarray(mask))

    @jax.jit
    def run() -> jax.Array:
        with using(layout):
            return per_shard(plain_attention, call)

    expected = plain_attention(call)
    np.testing.assert_allclose(run(), expected, rtol=2e-5, atol=2e-6)


class Block(nnx.Module):
    """Attention whose kernel runs per shard, or directly."""

    def __init__(self, is_split: bool, rngs: nnx.Rngs) -> None:
        embed, head = {"embed": 16}, {"head_dim": 4}
        self.query = Dense(embed, {"heads": 8} | head, rngs=rngs)
        self.key = Dense(embed, {"kv_heads": 4} | head, rngs=rngs)
        self.value = Dense(embed, {"kv_heads": 4} | head, rngs=rngs)
        self.out = Dense({"heads": 8} | head, embed, rngs=rngs)
        self.is_split = is_split

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.is_split:
            call = call_of(query, key, value, causal=True)
            return x + self.out(per_shard(plain_attention, call))
        return x + self.out(plain_causal(query, key, value))


def loss(blocks: Stack, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((blocks(batch["x"]) - batch["y"]) ** 2)


def one_step(strategy: Strategy, *, is_split: bool) -> tuple[float, Any]:
    """Loss and gradients of one step with four microbatches."""
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(16, 8, 16)).astype(np.float32) for name in "xy"}
    sizes = strategy.axis_sizes.values()
    trainer = Trainer(
        lambda rngs: Stack(lambda rngs: Block(is_split, rngs), 2, rngs=rngs),
        optax.trace(decay=0.0),  # the state is the gradient
        loss,
        strategy=strategy,
        num_microbatches=4,
        devices=jax.devices()[: math.prod(n or 1 for n in sizes)],
        loggers=(),
    )
    state, metrics = trainer.train_step(trainer.state, trainer.shard_batch(batch))
    assert isinstance(state.opt_state, optax.TraceState)
    return float(metrics["loss"]), to_host(state.opt_state.trace)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Pipeline(2), marks=pytest.mark.slow),
        pytest.param(Composite(Pipeline(2), TensorParallel(4)), marks=pytest.mark.slow),
        Composite(Pipeline(2), FSDP(2, min_size=0), TensorParallel(2)),
        pytest.param(FSDP(4, prefetch="first", min_size=0), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_training_step_matches_one_device(strategy: Strategy):
    """Includes a pipeline stage, which is already manual over one axis."""
    expected_loss, expected = one_step(DataParallel(1), is_split=False)
    found_loss, found = one_step(strategy, is_split=True)
    assert found_loss == pytest.approx(expected_loss, rel=1e-6)
    assert_gradients_close(found, expected)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv_heads", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_splash_matches_plain_attention(kv_heads: int, causal: bool):
    arrays = operands(4, kv_heads, rows=2, seq=128, head_dim=64)

    def run(kernel: Any, *arrays: jax.Array) -> jax.Array:
        return kernel(call_of(*arrays, causal=causal))

    splash = partial(splash_attention, interpret=True)
    found = value_and_gradients(partial(run, splash), arrays)
    expected = value_and_gradients(partial(run, plain_attention), arrays)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(b))


GPT_STEPS = """
for kernel in (None, "xla"):
    config = GPTConfig.tiny_llama(
        num_layers=4, seq_len=1024, embed_dim=256, head_dim=64, attention=kernel
    )
    plan = plan_gpt(config, eval(sys.argv[1]), "v5p:2x2x1")
    step = make_train_step(plan, next_token_loss, StepOptions(num_microbatches=2))
    lowered = lower_gpt(step, plan, 8, 1024)
    memory = lowered.compile().memory_analysis()
    print(lowered.as_text().count("tpu_custom_call"), memory.temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        Composite(FSDP(2), TensorParallel(2)),
        Composite(Pipeline(2), TensorParallel(2)),
        FSDP(4, prefetch="first"),
    ],
    ids=repr,
)
def test_tpu_runs_splash_by_default(strategy: Strategy):
    """The program with the kernel takes less memory than the one with scores."""
    kernels, memory, none, plain = numbers_from(GPT_STEPS, repr(strategy))
    # Three kernels: the forward pass, the gradient of queries, that of keys and values.
    assert kernels >= 3
    assert none == 0
    assert memory < plain


ATTENTION_ON_MESHES = """
x = jax.ShapeDtypeStruct((4, 256, 2, 128), "bfloat16")
for size in (4, 1):
    mesh = make_mesh({"data": size}, devices_of("v5p:2x2x1")[:size])
    run = sharded_jit(lambda x: attention(x, x, x), mesh, in_shardings=P("data"))
    print(run.lower(x).as_text().count("tpu_custom_call"))
"""


@pytest.mark.slow
def test_mesh_without_head_axis_uses_partitioner():
    """The partitioner cannot split Pallas kernels, so plain attention is used."""
    assert numbers_from(ATTENTION_ON_MESHES) == [0, 1]


# Errors


CASES = [
    (
        "splash",
        jnp.float32,
        128,
        8,
        "implementation='splash' cannot compute this attention: it runs on tpu and the "
        "devices are cpu. Pass implementation='xla', or None to use a kernel only "
        "where it fits.",
    ),
    (
        "splash",
        jnp.float32,
        100,
        8,
        "the devices are cpu; 100 queries; it takes multiples of 128; 100 keys; it",
    ),
    (
        "cudnn",
        jnp.float32,
        128,
        12,
        "it runs on gpu and the devices are cpu; dtype float32; it takes float16 or "
        "bfloat16; head_dim 12; it takes multiples of 8 up to 128.",
    ),
]


@pytest.mark.parametrize(("implementation", "dtype", "seq", "head_dim", "text"), CASES)
def test_unsupported_kernel_raises(implementation, dtype, seq, head_dim, text):
    x = jnp.zeros((1, seq, 2, head_dim), dtype)
    with pytest.raises(AttentionKernelError, match=re.escape(text)):
        attention(x, x, x, implementation=implementation)


def test_splash_with_mask_raises():
    x, mask = jnp.zeros((1, 128, 2, 8)), jnp.ones((1, 1, 128, 128), bool)
    text = "an array as mask; it takes causal=True or no mask"
    with pytest.raises(AttentionKernelError, match=re.escape(text)):
        attention(x, x, x, mask=mask, implementation="splash")


def test_cudnn_takes_masks_of_even_lengths():
    """With an odd length, only the gradient would fail, long after the selection."""
    x, odd = jnp.zeros((1, 8, 2, 64), jnp.bfloat16), jnp.zeros((1, 7, 2, 64))
    mask = jnp.ones((1, 1, 8, 7), bool)
    refusals = FUSED["cudnn"].refusals
    assert list(refusals(call_of(x, x, x, mask=mask[..., :1]))) == []
    assert list(refusals(call_of(x, odd, odd))) == []
    reason = "a mask over 8 queries and 7 keys; with a mask it takes even numbers"
    assert list(refusals(call_of(x, odd, odd, mask=mask))) == [reason]


@pytest.mark.parametrize(("axes", "is_split"), [("fsdp", True), (None, False)])
def test_split_queries_are_detected(axes, is_split):
    """With split queries, a kernel per shard would compute all rows on each device."""
    strategy = FSDP(4, rules=(LogicalRules({"batch": None, "seq": axes}),))
    layout = strategy.layout(strategy.make_mesh(jax.devices()[:4]))
    assert splits_queries(layout, jnp.zeros((2, 16, 4, 8))) == is_split


def test_unknown_implementation_raises():
    x = jnp.zeros((1, 8, 2, 8))
    text = (
        "Unknown attention implementation 'flash'. Valid values: ['xla', 'cudnn', "
        "'splash', 'tokamax'], or None to choose by platform."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        attention(x, x, x, implementation="flash")  # pyright: ignore[reportArgumentType]
