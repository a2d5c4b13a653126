"""Products with communication give the same numbers as plain products.

The tests compare values, gradients and compiled programs, for every mode and ring.
"""

import re
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel import audit, errors, make_mesh
from nnx_parallel.audit import Report
from nnx_parallel.collectives import (
    Mode,
    all_gather_matmul,
    column_parallel_matmul,
    matmul_reduce_scatter,
    row_parallel_matmul,
)
from nnx_parallel.collectives.matmul import column_parallel_matmuls

MODES = get_args(Mode)
ROWS, IN, OUT = 2, 6, 5
ALL_MODES = pytest.mark.parametrize("mode", MODES)
DEEP = [pytest.param(size, marks=pytest.mark.deep) for size in (1, 2, 3, 8)]
SIZES = pytest.mark.parametrize("size", [*DEEP, 4])
LENGTHS = pytest.mark.parametrize("length", [1, 3])
"""Number of rows of a shard."""


def ring_mesh(size: int, data: int = 1) -> Mesh:
    sizes = {"data": data, "tensor": size}
    return make_mesh(sizes, jax.devices()[: data * size])


def arrays(x_shape: tuple, w_shape: tuple, y_shape: tuple) -> list[jax.Array]:
    """Returns x, w and a cotangent."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=s), jnp.float32)
        for s in (x_shape, w_shape, y_shape)
    ]


def assert_same(found: Callable, plain: Callable, given: list[jax.Array]) -> None:
    """Compares the values, and the gradients of x and w."""
    x, w, dy = given

    def both(function: Callable) -> list:
        y, vjp = jax.vjp(function, x, w)
        return [y, *vjp(dy)]

    results = jax.jit(lambda: both(found))()
    for got, wanted in zip(results, both(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@SIZES
@ALL_MODES
@LENGTHS
def test_all_gather_matmul_matches_matmul(size: int, mode: Mode, length: int):
    seq = size * length
    product = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "tensor", dim=1, mode=mode),
        mesh=ring_mesh(size),
        in_specs=(P(None, "tensor"), P(None, "tensor")),
        out_specs=P(None, None, "tensor"),
    )
    shapes = (ROWS, seq, IN), (IN, size * OUT), (ROWS, seq, size * OUT)
    assert_same(product, jnp.matmul, arrays(*shapes))


@SIZES
@ALL_MODES
@LENGTHS
def test_matmul_reduce_scatter_matches_matmul(size: int, mode: Mode, length: int):
    seq = size * length
    product = jax.shard_map(
        lambda x, w: matmul_reduce_scatter(x, w, "tensor", dim=1, mode=mode),
        mesh=ring_mesh(size),
        in_specs=(P(None, None, "tensor"), P("tensor")),
        out_specs=P(None, "tensor"),
    )
    shapes = (ROWS, seq, size * IN), (size * IN, OUT), (ROWS, seq, OUT)
    assert_same(product, jnp.matmul, arrays(*shapes))


@ALL_MODES
class TestWithDataAxis:
    """The batch is split over another axis, which stays automatic."""

    MESH = staticmethod(lambda: ring_mesh(4, data=2))

    def test_column_parallel_matmul_matches_matmul(self, mode: Mode):
        mesh = self.MESH()

        def product(x, w):
            x = jax.lax.with_sharding_constraint(
                x, jax.NamedSharding(mesh, P("data", "tensor"))
            )
            return column_parallel_matmul(
                x, w, "tensor", dim=1, w_dim=1, mode=mode, mesh=mesh
            )

        def plain(x, w):
            return jnp.tensordot(x, w, axes=1)

        shapes = (4, 8, IN), (IN, 4, 3), (4, 8, 4, 3)
        assert_same(product, plain, arrays(*shapes))

    def test_row_parallel_matmul_matches_matmul(self, mode: Mode):
        mesh = self.MESH()

        def product(x, w):
            return row_parallel_matmul(
                x, w, "tensor", dim=1, contracting=2, mode=mode, mesh=mesh
            )

        def plain(x, w):
            return jnp.tensordot(x, w, axes=2)

        assert_same(product, plain, arrays((4, 8, 4, 3), (4, 3, IN), (4, 8, IN)))

    def test_products_nest_in_another_manual_region(self, mode: Mode):
        mesh = self.MESH()

        def block(x, w):
            hidden = column_parallel_matmul(x, w, "tensor", dim=1, w_dim=1, mode=mode)
            return row_parallel_matmul(hidden, w.T, "tensor", dim=1, mode=mode)

        nested = jax.shard_map(
            block,
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
            axis_names={"data"},
            check_vma=False,
        )

        def plain(x, w):
            return x @ w @ w.T

        assert_same(nested, plain, arrays((4, 8, IN), (IN, 8), (4, 8, IN)))


@ALL_MODES
def test_any_dims_can_be_contracted_and_gathered(mode: Mode):
    mesh = ring_mesh(4)
    contracting = ((2, 0), (1, 2))

    def product(x, w):
        return column_parallel_matmul(
            x,
            w,
            "tensor",
            dim=-1,
            w_dim=0,
            contracting=contracting,
            mode=mode,
            mesh=mesh,
        )

    def plain(x, w):
        return jnp.tensordot(x, w, axes=contracting)

    assert_same(product, plain, arrays((3, 2, 6, 8), (4, 6, 3), (2, 8, 4)))

    def scattered(x, w):
        return row_parallel_matmul(
            x,
            w,
            "tensor",
            dim=1,
            contracting=contracting,
            split=1,
            mode=mode,
            mesh=mesh,
        )

    assert_same(scattered, plain, arrays((4, 8, 6, 2), (3, 6, 4), (8, 2, 3)))


@ALL_MODES
def test_products_of_one_input_share_ring(mode: Mode):
    """Values and gradients match separate products, but the input is sent only once."""
    mesh = ring_mesh(4)
    x, *ws = arrays((2, 8, IN), (IN, 4, 3), (8, IN))
    dys = arrays((2, 8, 4, 3), (2, 8, 8), ())[:2]
    # For each kernel: the dim that is split, and the dims that are contracted.
    kernels: list[tuple[int, Any]] = [(1, 1), (0, ((2,), (1,)))]

    def together(x, *ws):
        given = [(w, *where) for w, where in zip(ws, kernels, strict=False)]
        return column_parallel_matmuls(x, given, "tensor", dim=1, mode=mode, mesh=mesh)

    def plain(x, *ws):
        axes = (contracting for _, contracting in kernels[: len(ws)])
        return [jnp.tensordot(x, w, a) for w, a in zip(ws, axes, strict=True)]

    def both(function: Callable, *given: jax.Array) -> list:
        ys, vjp = jax.vjp(function, *given)
        return [*ys, *vjp(dys[: len(ys)])]

    results = jax.jit(lambda: both(together, x, *ws))()
    for got, wanted in zip(results, both(plain, x, *ws), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)

    def sent(*ws: jax.Array) -> float:
        lowered = jax.jit(lambda: both(together, x, *ws)).lower()
        return audit(lowered.compile()).bytes()

    assert sent(*ws) == sent(ws[0])


@ALL_MODES
def test_replicated_weights_sum_gradients(mode: Mode):
    product = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "tensor", dim=0, mode=mode)[None],
        mesh=ring_mesh(4),
        in_specs=(P("tensor"), P()),
        out_specs=P("tensor"),
    )

    def plain(x, w):
        return jnp.stack([x @ w] * 4)

    assert_same(product, plain, arrays((8, IN), (IN, OUT), (4, 8, OUT)))


@pytest.mark.parametrize(("sum_dtype", "sent"), [(None, "f32"), ("bfloat16", "bf16")])
def test_sum_dtype_defaults_to_float32(sum_dtype, sent: str):
    mesh = ring_mesh(8)
    x, w = (a.astype(jnp.bfloat16) for a in arrays((64, 256), (256, 8), ())[:2])

    @jax.jit
    def product(x, w):
        return row_parallel_matmul(
            x, w, "tensor", dim=0, mode="ring", sum_dtype=sum_dtype, mesh=mesh
        )

    lowered = product.lower(x, w)
    hops = re.findall(r"collective_permute.*-> tensor<\S+x(\w+)>", lowered.as_text())
    assert set(hops) == {sent}
    found, exact = product(x, w), np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert found.dtype == jnp.bfloat16
    error = np.abs(np.asarray(found, np.float64) - exact).max()
    rounding = np.abs(exact.astype(jnp.bfloat16).astype(np.float64) - exact).max()
    assert error < (1.01 if sum_dtype is None else 4) * rounding


class TestTransfers:
    """Tests the bytes and hops of both gradients."""

    SIZE, SEQ, WIDTH = 4, 16, 8

    def report(self, mode: Mode) -> Report:
        mesh = ring_mesh(self.SIZE)

        def loss(x, w):
            y = column_parallel_matmul(
                x, w, "tensor", dim=0, w_dim=1, mode=mode, mesh=mesh
            )
            return jnp.sum(y * y)

        function = jax.grad(loss, argnums=(0, 1))
        shardings = [
            jax.NamedSharding(mesh, P(*s)) for s in [("tensor",), (None, "tensor")]
        ]
        x = jax.ShapeDtypeStruct(
            (self.SEQ, self.WIDTH), jnp.float32, sharding=shardings[0]
        )
        w = jax.ShapeDtypeStruct((self.WIDTH, 32), jnp.float32, sharding=shardings[1])
        return audit(jax.jit(function).lower(x, w).compile())

    def test_ring_sends_shards_hop_by_hop(self):
        shard = self.SEQ // self.SIZE * self.WIDTH * 4
        report = self.report("ring")
        # The ring sends x, once for both passes if no operation is between them, and
        # the partial sums of its gradient.
        assert report.count("collective-permute") == 2 * (self.SIZE - 1)
        assert report.bytes("collective-permute") == 2 * (self.SIZE - 1) * shard

    def test_bulk_sends_one_collective(self):
        report = self.report("bulk")
        assert report.count("all-gather") == 1
        assert report.count("reduce-scatter") == 1
        assert report.count("collective-permute") == 0


class TestErrors:
    X, W = jnp.ones((2, 8, 6)), jnp.ones((6, 4))

    def test_outside_manual_region_raises(self):
        message = "The code is not manual over the mesh axis 'tensor'"
        with pytest.raises(errors.UnknownAxisError, match=re.escape(message)):
            all_gather_matmul(self.X, self.W, "tensor", dim=1)

    def test_missing_mesh_raises(self):
        message = "There is no mesh axis 'tensor' here. Axes: []. Pass mesh="
        with pytest.raises(errors.UnknownAxisError, match=re.escape(message)):
            row_parallel_matmul(self.X, self.W, "tensor", dim=1)

    def test_inside_manual_region_of_axis_raises(self):
        region = jax.shard_map(
            lambda x, w: row_parallel_matmul(x, w, "tensor", dim=1),
            mesh=ring_mesh(2),
            in_specs=(P(None, None, "tensor"), P("tensor")),
            out_specs=P(None, "tensor"),
        )
        message = "The code is already manual over 'tensor'. Call all_gather_matmul"
        with pytest.raises(errors.UnknownAxisError, match=re.escape(message)):
            region(self.X, self.W)

    def test_unknown_mode_raises(self):
        message = "Unknown mode 'rings'. Modes: ['bulk', 'ring']."
        with pytest.raises(ValueError, match=re.escape(message)):
            row_parallel_matmul(
                self.X,
                self.W,
                "tensor",
                dim=1,
                mode="rings",  # pyright: ignore[reportArgumentType]
                mesh=ring_mesh(2),
            )

    def test_gathering_contracted_dim_raises(self):
        message = (
            "dim=-1 is invalid for x with shape (2, 8, 6), whose dims [2] are "
            "contracted. Choose a dim that is not contracted: one of [0, 1]."
        )
        with pytest.raises(errors.CollectiveProductError, match=re.escape(message)):
            row_parallel_matmul(self.X, self.W, "tensor", dim=-1, mesh=ring_mesh(2))

    def test_different_sizes_raise(self):
        message = (
            "contracting=2 does not fit x of shape (2, 8, 6) and w of shape (6, 4). "
            "Give a number n, to contract the last n dims of x with the first n dims"
        )
        with pytest.raises(errors.CollectiveProductError, match=re.escape(message)):
            row_parallel_matmul(
                self.X, self.W, "tensor", dim=0, contracting=2, mesh=ring_mesh(2)
            )

    def test_indivisible_axis_raises(self):
        message = (
            "Cannot split dim 1 of x with shape (2, 8, 6) over the mesh axis 'tensor', "
            "because its size 3 does not divide 8. Pad the dim to 9."
        )
        with pytest.raises(errors.IndivisibleDimError, match=re.escape(message)):
            row_parallel_matmul(self.X, self.W, "tensor", dim=1, mesh=ring_mesh(3))

    def test_split_of_kept_dim_raises(self):
        message = "split=1, but 1 dims are contracted. Choose one of [0]."
        with pytest.raises(errors.CollectiveProductError, match=re.escape(message)):
            row_parallel_matmul(
                self.X, self.W, "tensor", dim=1, split=1, mesh=ring_mesh(2)
            )
