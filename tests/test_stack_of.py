"""A Stack of existing blocks, and loops over it in other people's style.

The models are written here, in the forms that public models have.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    TensorParallel,
)
from nnx_parallel.errors import PipelineError, StackError
from nnx_parallel.layers import Stack
from nnx_parallel.sharding.nnx_arrays import variables_of
from tests.pipelines import make_trainer, one_step

WIDTH, ROWS, SEQ = 8, 16, 4
UP = nnx.with_partitioning(
    nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False
)


class Block(nnx.Module):
    """Names, statistics, dropout, a mask, and an activation as an attribute."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=UP, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.activation = partial(nnx.gelu, approximate=False)
        self.scale = lambda x: 0.5 * x

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        hidden = self.norm(self.up(x))
        hidden = self.dropout(self.down(self.activation(hidden)))
        return x + self.scale(hidden if mask is None else hidden * mask)


def blocks_of(kind: Any, count: int) -> list[Any]:
    return [kind(nnx.Rngs(seed)) for seed in range(count)]


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (ROWS, WIDTH))


def arrays(model: Any) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(
            jax.random.key_data(v[...])
            if jnp.issubdtype(v[...].dtype, jax.dtypes.prng_key)
            else v[...]
        )
        for path, v in variables_of(model)
    }


def assert_same(found: Any, expected: Any, rtol: float, atol: float = 0) -> None:
    found, expected = arrays(found), arrays(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol, atol, err_msg=path)


def test_stack_of_blocks_matches_and_unstacks(x: jax.Array) -> None:
    blocks = blocks_of(Block, 3)
    stack = Stack.of(blocks)
    for found, block in zip(stack.unstack(), blocks, strict=True):
        assert_same(found, block, rtol=0)
        assert found.up.kernel.get_metadata()["out_sharding"] == ("embed", "mlp")
        assert found.down.kernel.get_metadata()["out_sharding"] is None
    mask = jnp.arange(WIDTH)[None] % 2
    for _ in range(2):  # the second call has new statistics and dropout counts
        expected = x
        for block in blocks:
            expected = block(expected, mask=mask)
        found = stack(x, mask=mask)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for found, block in zip(stack.unstack(), blocks, strict=True):
        assert_same(found, block, rtol=1e-5, atol=1e-6)


def test_abstract_blocks_gain_layers_name() -> None:
    stack: Any = nnx.eval_shape(lambda: Stack.of(blocks_of(Block, 3)))
    blocks = nnx.eval_shape(lambda: nnx.List(blocks_of(Block, 3)))
    other: Any = Stack.of(blocks)
    for kernel in (stack.layer.up.kernel, other.layer.up.kernel):
        assert kernel.get_metadata()["out_sharding"] == ("layers", "embed", "mlp")
        value = kernel.get_value()
        assert isinstance(value, jax.ShapeDtypeStruct)
        assert value.shape == (3, WIDTH, 2 * WIDTH)
    assert other.unstack()[0].up.kernel.get_value().shape == (WIDTH, 2 * WIDTH)


# Blocks that differ


class Windowed(nnx.Module):
    """A block with a static attribute and a function, which may differ."""

    def __init__(self, rngs: nnx.Rngs, window: int = 4, factor: float = 1.0) -> None:
        init = nnx.initializers.normal(factor)  # scaled by depth, as in GPT-2
        self.linear = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)
        self.window = window

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.tanh(self.linear(x)) * (jnp.arange(WIDTH) < self.window)[None]


class Wide(Windowed):
    """A block of another class."""


def with_lambda(factor: float) -> Windowed:
    block: Any = Windowed(nnx.Rngs(0))
    block.activation = lambda x: factor * x
    return block


def narrow() -> Windowed:
    block = Windowed(nnx.Rngs(0))
    block.linear = nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(0))
    return block


def named() -> Windowed:
    block = Windowed(nnx.Rngs(0))
    block.linear.kernel.set_metadata(out_sharding=("embed", "mlp"))
    return block


def headless() -> Windowed:
    block = Windowed(nnx.Rngs(0))
    block.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
    return block


def windows(*sizes: int) -> list[Any]:
    return [Windowed(nnx.Rngs(i), size, i + 1.0) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        (windows(4, 4, 8), "Blocks 0 and 2 of the stack differ: `window` is 4 in the"),
        (windows(4, 8, 4, 8), r"0 and 1 .*`window`.*with period 2: pass period=2\."),
        ([*windows(4), narrow()], "`linear.bias` is .*float32[8].* and .*float32[4]"),
        ([*windows(4), headless()], "`linear.bias`"),
        ([*windows(4), named()], "`linear.kernel` is .*None.*('embed', 'mlp')"),
        ([*windows(4), Wide(nnx.Rngs(0))], "the block is 'Windowed' .* 'Wide'"),
        ([with_lambda(1.0), with_lambda(2.0)], "`activation` is <function"),
        ([], "Cannot stack 0 blocks with period 1: there must be at least 1 block"),
        ([*windows(4), len], "Element 1 of the blocks is a builtin_function_or_method"),
        (Windowed(nnx.Rngs(0)), "Stack.of got one Windowed. It takes a list of blocks"),
    ],
)
def test_different_blocks_raise(blocks: Any, found: str) -> None:
    pattern = found.replace("[8]", r"\[8\]").replace("[4]", r"\[4\]")
    pattern = pattern.replace("('embed', 'mlp')", r"\('embed', 'mlp'\)")
    with pytest.raises(StackError, match=pattern):
        Stack.of(blocks)


def test_equivalent_functions_can_be_stacked() -> None:
    Stack.of([with_lambda(1.0), with_lambda(1.0)])
    Stack.of(windows(4, 4))  # initializers may differ, because they are no longer used


def test_shared_variable_between_blocks_raises() -> None:
    first, second = windows(4, 4)
    second.linear = first.linear
    message = "Blocks 0 and 1 of the stack share the Variable `linear.bias`."
    with pytest.raises(StackError, match=re.escape(message)):
        Stack.of([first, second])
    with pytest.raises(StackError, match="share the Variable"):
        Stack.of([first] * 3)


# Layers that alternate


def test_alternating_layers_stack_by_period(x: jax.Array) -> None:
    blocks = windows(2, 8, 2, 8, 2, 8)
    stack = Stack.of(blocks, period=2)
    assert stack.num_layers == 3

    def step(block: Any, x: Any, factor: Any) -> tuple[Any, Any]:
        x = block(x) * factor
        return x, x.sum()

    factors, expected, sums = jnp.arange(1.0, 7.0), x, []
    for block, factor in zip(blocks, factors, strict=True):
        expected, total = step(block, expected, factor)
        sums.append(total)
    found, outs = stack.scan(step, x, factors)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(outs, np.stack(sums), rtol=1e-5)
    for block, own in zip(stack.unstack(), blocks, strict=True):
        assert block.window == own.window
        assert_same(block, own, rtol=0)
    with pytest.raises(StackError, match=r"6 blocks with period 4.*multiple"):
        Stack.of(blocks, period=4)


def test_stack_builds_blocks_of_several_kinds(x: jax.Array) -> None:
    def narrow(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(
            nnx.Linear(WIDTH, 4, rngs=rngs), nnx.Linear(4, WIDTH, rngs=rngs)
        )

    def plain(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    stack = Stack([narrow, plain], 3, rngs=nnx.Rngs(0))
    blocks, expected = stack.unstack(), x
    kernels = [block.kernel[...] for block in blocks[1::2]]
    assert [type(block) for block in blocks] == 3 * [nnx.Sequential, nnx.Linear]
    assert not np.array_equal(kernels[0], kernels[1])
    for block in blocks:
        expected = block(expected)
    np.testing.assert_allclose(stack(x), expected, rtol=1e-5)
    layer: Any = Stack.of(blocks, period=2).layer
    assert layer[1].kernel.shape == (3, WIDTH, WIDTH)


# Loops in other people's style


class Decoder(nnx.Module):
    """A layer of Gemma; ``(x, positions, cache, mask)`` gives ``(cache, x)``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)  # the caller passes its random streams

    def __call__(
        self, x: jax.Array, positions: Any, cache: Any, *, rngs: Any = None
    ) -> Any:
        out = self.dropout(self.linear(x), rngs=rngs) * positions
        if cache is not None:
            cache = {"last": out + cache["last"]}
        return cache, x + out


def test_scan_step_may_reorder_outputs(x: jax.Array) -> None:
    blocks = blocks_of(Decoder, 3)
    stack, positions = Stack.of(blocks), jnp.linspace(0, 1, WIDTH)[None]
    caches = [{"last": jnp.full((ROWS, WIDTH), float(i))} for i in range(3)]

    def step(block: Any, x: Any, cache: Any, positions: Any, rngs: Any) -> Any:
        cache, x = block(x, positions, cache, rngs=rngs)
        return x, cache

    streams, own = nnx.Rngs(7), nnx.Rngs(7)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *caches)
    found, outs = stack.scan(step, x, stacked, positions, rngs=own)
    expected = x
    for i, block in enumerate(blocks):
        caches[i], expected = block(expected, positions, caches[i], rngs=streams)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    last = np.stack([cache["last"] for cache in caches])
    np.testing.assert_allclose(outs["last"], last, rtol=1e-5, atol=1e-6)
    # The streams were used the same number of times, in the same order.
    assert_same(own, streams, rtol=0)
    message = r"maps .*float32\[16, 8\].* to .*\(None, 'float32\[16, 8\]'\).*stack.scan"
    with pytest.raises(StackError, match=message):
        stack(x, positions, None, rngs=own)


class Memory(nnx.Module):
    """A layer's cache as in Qwen 3: a module that the layer writes to."""

    def __init__(self) -> None:
        self.sum = nnx.Cache(jnp.zeros((ROWS, WIDTH)))
        self.size = WIDTH


class Remembering(nnx.Module):
    """A layer of Qwen 3, which is called with ``(x, cache, segments)``."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, cache: Memory, segments: jax.Array) -> jax.Array:
        cache.sum[...] = cache.sum[...] + x * segments
        return x + self.linear(cache.sum[...])


class Qwen(nnx.Module):
    """A list and a loop; if stacked, the five changed lines of the how-to."""

    def __init__(self, rngs: nnx.Rngs, *, stacked: bool) -> None:
        self.layers = nnx.List(blocks_of(Remembering, 3))
        if stacked:
            self.layers = Stack.of(self.layers)

    def __call__(self, x: jax.Array, cache: list, segments: jax.Array) -> jax.Array:
        if isinstance(self.layers, Stack):

            def step(layer: Any, x: Any, *rest: Any) -> tuple[Any, Any]:
                return layer(x, *rest), rest[0]

            return self.layers.scan(step, x, cache, segments)[0]
        for i, layer in enumerate(self.layers):
            x = layer(x, cache[i], segments)
        return x


class ViT(nnx.Module):
    """The caller passes random streams; if stacked, with five changed lines."""

    def __init__(self, rngs: nnx.Rngs, *, stacked: bool, rate: float = 0.5) -> None:
        self.layers = nnx.List([Encoder(rate, rngs) for _ in range(2)])
        if stacked:
            self.layers = Stack.of(self.layers)

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs | None) -> jax.Array:
        if isinstance(self.layers, Stack):
            return self.layers(x, rngs=rngs)
        for layer in self.layers:
            x = layer(x, rngs=rngs)
        return x


class Encoder(nnx.Module):
    """A layer of bonsai's ViT."""

    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(
            2, WIDTH, dropout_rate=rate, decode=False, rngs=rngs
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, deterministic=False)

    def __call__(
        self, x: jax.Array, mask: Any = None, *, rngs: nnx.Rngs | None
    ) -> jax.Array:
        attended = self.attention(self.norm(x), mask, rngs=rngs)
        return self.dropout(attended, rngs=rngs) + x


TOKENS = np.random.default_rng(0).normal(size=(ROWS, SEQ, WIDTH)).astype(np.float32)


def qwen_loss(model: Any, batch: Any) -> jax.Array:
    cache = [Memory() for _ in range(3)]
    return (model(batch, cache, jnp.ones_like(batch)) ** 2).mean()


def vit_loss(model: Any, batch: Any, rngs: nnx.Rngs) -> jax.Array:
    return (model(batch, rngs=rngs) ** 2).mean()


def gradients_of(build: Any, loss: Any, batch: Any, strategy: Any) -> dict:
    """Gradients by the paths of the list's model, also of a stacked model."""
    trainer = make_trainer(build, loss, strategy, num_microbatches=1)
    grads, _, _ = one_step(trainer, batch)
    by_layer = {}
    for path, grad in grads.items():
        name, _, rest = path.partition(".layer.")
        layers = enumerate(grad) if rest else []
        by_layer |= {f"{name}.{i}.{rest}": each for i, each in layers}
        by_layer |= {} if rest else {path: grad}
    return by_layer


@pytest.mark.parametrize(
    ("model", "loss", "batch"),
    [
        (Qwen, qwen_loss, TOKENS[:, 0]),
        pytest.param(ViT, vit_loss, TOKENS, marks=pytest.mark.deep),
    ],
    ids=["qwen", "vit"],
)
def test_stacked_model_matches_plain_gradients(
    model: Any, loss: Any, batch: Any
) -> None:
    expected = gradients_of(partial(model, stacked=False), loss, batch, DataParallel(1))
    strategy = FSDP(2, min_size=0)
    found = gradients_of(partial(model, stacked=True), loss, batch, strategy)
    assert found.keys() == expected.keys()
    largest = max(np.abs(g).max() for g in expected.values())
    for path, grad in expected.items():
        np.testing.assert_allclose(found[path], grad, atol=1e-5 * largest)


# Names that an update has replaced


def test_update_keeps_layers_of_stack() -> None:
    stack: Any = Stack.of(blocks_of(Block, 4))
    states = [nnx.state(block) for block in blocks_of(Block, 4)]
    loaded = jax.tree.map(lambda *each: jnp.stack(each), *states)
    nnx.update(stack.layer, loaded)
    assert stack.layer.up.kernel.get_metadata()["out_sharding"] == ("embed", "mlp")
    strategy = Composite(TensorParallel(2), FSDP(4, min_size=0))
    for model in (stack, lambda _: stack):
        rows = {row.info.path: row for row in strategy.describe(model).rows}
        kernel = rows["layer.up.kernel"]
        assert kernel.info.names == ("layers", "embed", "mlp")
        assert tuple(kernel.placement.stored) == (None, "fsdp", "tensor")
        assert rows["layer.down.kernel"].placement.is_stacked
    placed: Any = strategy.merge(*strategy.split(stack))
    assert placed.layer.up.kernel.get_metadata()["out_sharding"][0] == "layers"
    one_step(make_trainer(lambda _: stack, squares, Pipeline(2)), TOKENS[:, 0])


# Under a pipeline


class Summing(nnx.Module):
    """A layer with two outputs, as in a mixture of experts: the output and a loss."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.linear(x)
        return x, (x**2).mean()


class EncoderDecoder(nnx.Module):
    """As in Whisper, the encoder and the decoder have different inputs."""

    def __init__(self, rngs: nnx.Rngs, *, apart: bool) -> None:
        encoder = Stack.of([Plain(rngs) for _ in range(2)])
        self.encoder = nnx.List(encoder.unstack()) if apart else encoder
        self.decoder = Stack.of([Plain(rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        seen = x[:, ::-1]
        encoder = self.encoder
        for block in [encoder] if isinstance(encoder, Stack) else encoder:
            seen = block(seen)
        return self.decoder(x, other=seen)


class Plain(nnx.Module):
    """A block that may attend to another sequence."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, *, other: Any = None) -> jax.Array:
        x = x + nnx.tanh(self.linear(x))
        return x if other is None else x * nnx.sigmoid(other)


def squares(model: Any, batch: Any) -> jax.Array:
    return (model(batch) ** 2).mean()


def test_two_stacks_under_pipeline_match_one_device() -> None:
    for apart in (False, True):
        build = partial(EncoderDecoder, apart=apart)
        expected, _, _ = one_step(make_trainer(build, squares), TOKENS[:, 0])
        found, _, _ = one_step(make_trainer(build, squares, Pipeline(2)), TOKENS[:, 0])
        for path, grad in expected.items():
            np.testing.assert_allclose(found[path], grad, rtol=1e-5, atol=1e-7)


class Mixture(nnx.Module):
    """A stack whose blocks return more than one output."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = Stack.of([Summing(rngs) for _ in range(4)])


def stacked_losses(model: Any, batch: Any) -> jax.Array:
    x, losses = model.blocks.scan(lambda block, x, _: block(x), batch)
    return (x**2).mean() + losses.mean()


def summed_losses(model: Any, batch: Any) -> jax.Array:
    def step(block: Any, carry: Any, _: Any) -> tuple[Any, None]:
        x, total = carry
        x, own = block(x)
        return (x, total + own / 4), None

    (x, total), _ = model.blocks.scan(step, (batch, jnp.float32(0)))
    return (x**2).mean() + total


def test_pipeline_refuses_blocks_with_extra_outputs() -> None:
    batch = TOKENS[:, 0]
    expected, _, _ = one_step(make_trainer(Mixture, stacked_losses), batch)
    with pytest.raises(PipelineError, match=r"return a value.*stack\(\(x, total\)\)"):
        one_step(make_trainer(Mixture, stacked_losses, Pipeline(2)), batch)
    trainer = make_trainer(Mixture, summed_losses, Pipeline(2))
    found, _, _ = one_step(trainer, batch)
    for path, grad in expected.items():
        np.testing.assert_allclose(found[path], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.deep
@pytest.mark.parametrize("loss", [stacked_losses, summed_losses])
def test_prefetch_supports_extra_block_outputs(loss: Any) -> None:
    strategy = FSDP(4, min_size=0, prefetch="first")
    expected, _, _ = one_step(make_trainer(Mixture, loss), TOKENS[:, 0])
    found, _, _ = one_step(make_trainer(Mixture, loss, strategy), TOKENS[:, 0])
    for path, grad in expected.items():
        np.testing.assert_allclose(found[path], grad, rtol=1e-5, atol=1e-7)


def test_captured_array_in_scan_step_raises() -> None:
    def closing(model: Any, batch: Any) -> jax.Array:
        scale = batch.mean(axis=0, keepdims=True)
        step = lambda block, x, _: (block(x)[0] * scale, None)  # noqa: E731
        return (model.blocks.scan(step, batch)[0] ** 2).mean()

    with pytest.raises(PipelineError, match="pass the array as an argument"):
        one_step(make_trainer(Mixture, closing, Pipeline(2)), TOKENS[:, 0])
