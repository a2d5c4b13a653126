"""Under XLA's partitioner, every differentiable operation has one device's results.

Each operation runs forward and backward on rows, sequence and channels that a mesh
splits, with and without an idle axis. ``python -m tests.test_primitives`` prints which
operations plain ``jax.jit`` computes wrongly. It runs each in a separate process,
because some abort the process.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    constrain,
    make_mesh,
    sharded_jit,
)
from nnx_parallel.layers import Stack
from tests.parity.checks import assert_gradients_close
from tests.parity.runs import first_gradients, recording
from tests.pipelines import make_trainer

pytestmark = pytest.mark.long

ROWS, SEQ, CHANNELS = 16, 8, 8

X = np.random.default_rng(0).normal(size=(ROWS, SEQ, CHANNELS)).astype(np.float32)
INDICES = np.random.default_rng(1).integers(0, SEQ, (ROWS, 5))


def convolution(
    out: int = CHANNELS,
    width: int = 3,
    padding: Any = ((1, 1),),
    strides: tuple[int] = (1,),
    **options: Any,
) -> tuple[Callable, tuple[int, ...]]:
    groups = options.get("feature_group_count", 1)

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            strides,
            padding,
            dimension_numbers=("NHC", "HIO", "NHC"),
            **options,
        )

    return run, (width, CHANNELS // groups, out)


def convolution_2d(groups: int) -> tuple[Callable, tuple[int, ...]]:
    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x.reshape(ROWS, SEQ, 2, CHANNELS // 2),
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    return run, (3, 3, CHANNELS // 2 // groups, CHANNELS)


def scattered(name: str) -> Callable:
    """``x.at[indices].name(w)`` along the sequence, with other indices in each row."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = jnp.arange(ROWS)[:, None]
        target = x.at[rows, np.arange(5)[None] + INDICES[:, :1] % 4]
        return getattr(target, name)(w, unique_indices=True)

    return run


def positive_definite(x: jax.Array) -> jax.Array:
    return jnp.einsum("bsc,btc->bst", x, x) + 20 * jnp.eye(SEQ)[None]


def pooled(x: jax.Array, init: float, combine: Callable, stride: int = 2) -> jax.Array:
    return lax.reduce_window(x, init, combine, (1, 3, 1), (1, stride, 1), "SAME")


def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    def step(carry: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry * 0.5 + slot) + w[0]
        return carry, carry

    return lax.scan(step, jnp.zeros((ROWS, CHANNELS)), x.swapaxes(0, 1))[1]


def spectral(x: jax.Array, w: jax.Array) -> jax.Array:
    # (rows, frequencies, channels)
    spectrum = jnp.fft.rfft(x, axis=1) * (w + 1j)
    return jnp.fft.irfft(spectrum * jnp.abs(spectrum), n=SEQ, axis=1)


C = (1, 1, CHANNELS)
OPERATIONS: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "conv": convolution(),
    "conv width 1": convolution(width=1, padding="VALID"),
    "conv strided": convolution(strides=(2,)),
    "conv transposed": convolution(lhs_dilation=(2,)),
    "conv dilated": convolution(padding=((2, 2),), rhs_dilation=(2,)),
    "conv 2-D": convolution_2d(1),
    "conv depthwise": convolution(feature_group_count=8),
    "conv depthwise wide": convolution(16, feature_group_count=8),
    "conv depthwise width 1": convolution(
        width=1, padding="VALID", feature_group_count=8
    ),
    "conv depthwise strided": convolution(strides=(2,), feature_group_count=8),
    "conv depthwise transposed": convolution(lhs_dilation=(2,), feature_group_count=8),
    "conv depthwise dilated": convolution(rhs_dilation=(2,), feature_group_count=8),
    "conv depthwise 2-D": convolution_2d(4),
    "conv grouped": convolution(feature_group_count=2),
    "conv grouped causal": convolution(padding=((2, 0),), feature_group_count=4),
    "conv batch groups": convolution(batch_group_count=2),
    "conv per row": (
        lambda x, w: jax.vmap(
            lambda row: jnp.convolve(row[:, 0], row[:3, 1] * w[0, 0, 0], "same")
        )(x),
        C,
    ),
    "einsum": (lambda x, w: jnp.einsum("bsc,cd->bsd", x, w), (CHANNELS, 4)),
    "einsum batched": (lambda x, w: jnp.einsum("bsc,btc->bst", x * w, x), C),
    "einsum of rows": (lambda x, w: jnp.einsum("bsc,dsc->bd", x * w, x), C),
    "sum": (lambda x, w: (x * w).sum((0, 1)), C),
    "prod": (lambda x, w: (1 + 0.1 * x * w).prod(1), C),
    "max": (lambda x, w: (x * w).max(1), C),
    "logsumexp": (lambda x, w: jax.nn.logsumexp(x * w, axis=(1, 2)), C),
    "sort": (lambda x, w: jnp.sort(x * w, axis=1) * jnp.arange(8.0)[None, :, None], C),
    "top_k": (lambda x, w: lax.top_k(x * w, 3)[0] * jnp.arange(3.0)[None, None], C),
    "cumsum": (lambda x, w: jnp.cumsum(x * w, axis=1), C),
    "cumprod": (lambda x, w: jnp.cumprod(1 + 0.1 * x * w, axis=1), C),
    "cummax": (lambda x, w: lax.cummax(x * w, axis=1), C),
    "cumlogsumexp": (lambda x, w: lax.cumlogsumexp(x * w, axis=1), C),
    "reversed cumsum": (lambda x, w: lax.cumsum(x * w, axis=1, reverse=True), C),
    "max pool": (lambda x, w: pooled(x * w, -jnp.inf, lax.max), C),
    "sum pool": (lambda x, w: pooled(x * w, 0.0, lax.add), C),
    "gather": (lambda x, w: jnp.take_along_axis(x * w, INDICES[..., None], 1), C),
    "lookup": (lambda x, w: w[INDICES] * x[:, :1, :3], (SEQ, 3)),
    "scatter": (scattered("set"), (ROWS, 5, CHANNELS)),
    "scatter add": (scattered("add"), (ROWS, 5, CHANNELS)),
    "scatter multiply": (scattered("multiply"), (ROWS, 5, CHANNELS)),
    "scatter min": (scattered("min"), (ROWS, 5, CHANNELS)),
    "scatter max": (scattered("max"), (ROWS, 5, CHANNELS)),
    "segment sum": (
        lambda x, w: jax.ops.segment_sum(x * w, INDICES[:, 0], SEQ),
        C,
    ),
    "dynamic slice": (
        lambda x, w: lax.dynamic_slice(x * w, (INDICES[0, 0], 1, 0), (8, 5, 8)),
        C,
    ),
    "dynamic update": (
        lambda x, w: lax.dynamic_update_slice(x, w, (INDICES[0, 0], 1, 0)),
        (4, 3, CHANNELS),
    ),
    "pad": (lambda x, w: lax.pad(x * w, 0.5, ((0, 0, 0), (2, -1, 1), (0, 0, 0))), C),
    "concatenate": (lambda x, w: jnp.concatenate([x * w, x[:, ::2]], axis=1), C),
    "concatenate rows": (lambda x, w: jnp.concatenate([x * w, x[:5]], axis=0), C),
    "roll": (lambda x, w: jnp.roll(x * w, 3, axis=1) * x, C),
    "flip": (lambda x, w: jnp.flip(x * w, (0, 1)) * x, C),
    "shifted": (lambda x, w: x[:, 1:] * w - x[:, :-1], C),
    "transpose": (lambda x, w: (x * w).transpose(2, 1, 0).reshape(8, -1), C),
    "repeat": (lambda x, w: jnp.repeat(x * w, 3, axis=1), C),
    "select": (lambda x, w: jnp.where(x > 0, x * w, jnp.sin(x)), C),
    "fft": (lambda x, w: jnp.fft.fft(x * w, axis=1).real, C),
    "spectral": (spectral, C),
    "complex": (lambda x, w: jnp.abs(jnp.exp(1j * x * w) + x) ** 2, C),
    "triangular solve": (
        lambda x, w: lax.linalg.triangular_solve(
            positive_definite(x), x * w, left_side=True, lower=True
        ),
        C,
    ),
    "cholesky": (lambda x, w: jnp.linalg.cholesky(positive_definite(x * w)), C),
    "solve": (lambda x, w: jnp.linalg.solve(positive_definite(x), x * w), C),
    "associative scan": (
        lambda x, w: lax.associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (0.5 * x, x * w), axis=1
        )[1],
        C,
    ),
    "scan": (scanned, C),
    "fori loop": (
        lambda x, w: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y * w) + x, x),
        C,
    ),
    "cond": (
        lambda x, w: lax.cond(x[0, 0, 0] > 0, lambda: x * w, lambda: jnp.cos(x) * w),
        C,
    ),
}

MESHES = {"8": {"a": 8}, "4 x 2": {"a": 4, "b": 2}, "2 x 4": {"a": 2, "b": 4}}
PLACES = {
    "rows": P("a"),
    "sequence": P(None, "a"),
    "channels": P(None, None, "a"),
    "rows, sequence": P("a", "b"),
    "rows, channels": P("a", None, "b"),
}
LAYOUTS = [
    (mesh, place)
    for mesh, sizes in MESHES.items()
    for place, spec in PLACES.items()
    if "b" in sizes or "b" not in spec
]
CONVOLUTIONS = tuple(name for name in OPERATIONS if name.startswith("conv"))
OTHERS = tuple(name for name in OPERATIONS if name not in CONVOLUTIONS)
CHOSEN = [
    (CONVOLUTIONS, "8", "rows"),
    (CONVOLUTIONS, "4 x 2", "rows"),
    (CONVOLUTIONS, "2 x 4", "sequence"),
    (CONVOLUTIONS, "2 x 4", "channels"),
    (CONVOLUTIONS, "2 x 4", "rows, channels"),
    (OTHERS, "4 x 2", "rows"),
    (OTHERS, "2 x 4", "sequence"),
    (OTHERS, "2 x 4", "rows, channels"),
]


def forward_and_gradients(name: str, x: jax.Array) -> Any:
    function, shape = OPERATIONS[name]
    w = np.random.default_rng(2).normal(size=shape).astype(np.float32)

    def objective(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = function(x, w)
        # Neighbouring entries have different offsets, so that swapped entries change
        # the sum.
        return jnp.sum(jnp.sin(y + jnp.arange(y.size).reshape(y.shape) % 7)), y

    grads, y = jax.grad(objective, (0, 1), has_aux=True)(x, w)
    return {"output": y, "gradient of x": grads[0], "gradient of w": grads[1]}


def compute(names: tuple[str, ...], x: jax.Array) -> dict[str, Any]:
    return {name: forward_and_gradients(name, x) for name in names}


@cache
def expected(names: tuple[str, ...]) -> dict[str, Any]:
    return jax.device_get(jax.jit(compute, static_argnums=0)(names, X))


def errors(found: dict[str, Any], limit: float = 1e-5) -> dict[str, float]:
    """The relative error of each array, if it is above the limit."""
    wrong = {}
    for name, parts in expected(tuple(found)).items():
        for part, right in parts.items():
            given = np.asarray(found[name][part])
            error = np.abs(given - right).max() / np.abs(right).max()
            if not error <= limit:
                wrong[f"{part} of {name}"] = float(error)
    return wrong


@pytest.mark.parametrize(("names", "mesh", "place"), CHOSEN)
def test_operations_match_one_device(
    names: tuple[str, ...], mesh: str, place: str
) -> None:
    run = sharded_jit(
        compute,
        make_mesh(MESHES[mesh]),
        in_shardings={"x": PLACES[place]},
        static_argnums=0,
    )
    assert errors(run(names, X)) == {}


class Waves(nnx.Module):
    """Convolutions along the sequence, and a product in frequency space."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.convs = nnx.List(
            [
                nnx.Conv(CHANNELS, CHANNELS, 3, feature_group_count=groups, rngs=rngs)
                for groups in (CHANNELS, 2, 1)
            ]
        )
        self.scale = nnx.Param(rngs.params.normal((1, 1, CHANNELS)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = constrain(x, "batch", "seq", "embed")
        for conv in self.convs:
            x = x + jnp.sin(conv(x))
        # The factor is small, so that rounding does not grow from layer to layer.
        return x + 0.01 * spectral(jnp.sin(x), self.scale[...])


class WaveNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.blocks = Waves(rngs), Stack(Waves, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(self.first(x))


def wave_loss(model: nnx.Module, batch: Any) -> jax.Array:
    y = model(batch)
    return jnp.mean(jnp.sin(y + jnp.arange(SEQ)[None, :, None]))


def gradients_under(strategy: Strategy, **options: Any) -> Any:
    trainer = make_trainer(
        WaveNet,
        wave_loss,
        strategy,
        optimizer=recording(optax.sgd(0.1)),
        num_microbatches=options.pop("num_microbatches", 1),
        **options,
    )
    return first_gradients(trainer, X)


@cache
def one_device_gradients() -> Any:
    return gradients_under(DataParallel(1))


STRATEGIES = {
    "fsdp": (FSDP(8, min_size=0), {}),
    "fsdp with remat": (FSDP(8, min_size=0), {"remat": "dots"}),
    "dp and tp": (Composite(DataParallel(4), TensorParallel(2)), {}),
    "dp and tp, microbatches": (
        Composite(DataParallel(2), TensorParallel(4)),
        {"num_microbatches": 2},
    ),
    "tp and fsdp": (
        Composite(TensorParallel(2), FSDP(4, min_size=0)),
        {"remat": "full"},
    ),
    "cp and fsdp": (Composite(ContextParallel(2), FSDP(4, min_size=0)), {}),
    "pipeline and fsdp": (
        Composite(Pipeline(2), FSDP(4, min_size=0)),
        {"num_microbatches": 2},
    ),
    "pipeline, dp and tp": (
        Composite(Pipeline(2), DataParallel(2), TensorParallel(2)),
        {"num_microbatches": 2, "remat": "dots"},
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.filterwarnings("ignore:TensorParallel:nnx_parallel.errors.ParallelWarning")
def test_gradients_of_convolutions_match_one_device(name: str) -> None:
    """Includes grouped convolutions and complex values, in and outside of a Stack."""
    strategy, options = STRATEGIES[name]
    found = gradients_under(strategy, **options)
    assert_gradients_close(found, one_device_gradients())


def test_second_derivative_of_convolution_matches_one_device() -> None:
    mesh, (conv, shape) = make_mesh({"a": 4, "b": 2}), OPERATIONS["conv depthwise"]
    kernel = np.random.default_rng(2).normal(size=shape).astype(np.float32)

    def penalty(kernel: jax.Array, x: jax.Array) -> jax.Array:
        grad = jax.grad(lambda kernel, x: jnp.sin(conv(x, kernel)).sum())
        return (grad(kernel, x) ** 2).sum()

    places = {"in_shardings": (P(), P("a")), "out_shardings": P()}
    inside = sharded_jit(jax.grad(penalty), mesh, **places)
    right = jax.grad(penalty)(kernel, X)
    # Relative to the largest, as in the parity tests.
    limit = 1e-5 * np.abs(right).max()
    np.testing.assert_allclose(inside(kernel, X), right, rtol=0, atol=limit)


def test_derivative_of_compiled_convolution_matches_one_device() -> None:
    """The convolution is in a compiled function, which is not rewritten."""
    mesh, (conv, shape) = make_mesh({"a": 4, "b": 2}), OPERATIONS["conv depthwise"]
    kernel = np.random.default_rng(2).normal(size=shape).astype(np.float32)

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(conv(x, kernel)).sum()

    inner = sharded_jit(loss, mesh, in_shardings=(P(), P("a")), out_shardings=P())
    found = jax.grad(inner)(jnp.asarray(kernel), jnp.asarray(X))
    np.testing.assert_allclose(found, jax.grad(loss)(kernel, X), rtol=1e-5)


def main() -> None:
    """Prints what plain JAX computes wrongly, with one process per operation."""

    def write(row: str) -> None:
        sys.stdout.write(f"| {row} |\n")
        sys.stdout.flush()

    for name in sys.argv[1:] or OPERATIONS:
        for mesh, place in LAYOUTS:
            pid = os.fork()
            if not pid:
                sizes = MESHES[mesh]
                types = (AxisType.Auto,) * len(sizes)
                devices = jax.make_mesh(tuple(sizes.values()), tuple(sizes), types)
                x = jax.device_put(X, NamedSharding(devices, PLACES[place]))
                run = jax.jit(compute, static_argnums=0)
                for what, error in errors(run((name,), x)).items():
                    write(f"{what} | {mesh} | {place} | {error:.1e}")
                os._exit(0)
            if os.waitpid(pid, 0)[1]:
                write(f"{name} | {mesh} | {place} | ends the process")


if __name__ == "__main__":
    main()
