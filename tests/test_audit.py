"""The audit's counts match theory; all expected numbers are computed by hand."""

import re
import subprocess
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel import ExpertParallel
from nnx_parallel.audit import Report, audit
from nnx_parallel.errors import ProgramTextError
from nnx_parallel.layers import Experts, MoE
from nnx_parallel.sharding.constrain import using

WIDTH, ROWS, LAYERS = 16, 8, 16
DOT = 2 * ROWS * WIDTH * WIDTH


def audit_jit(function, *args, **options) -> Report:
    return audit(jax.jit(function, **options).lower(*args).compile())


def ones(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


def scanned_layers(kernels, x):
    return lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    return Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)


class TestFlops:
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_chain_of_matmuls_is_counted(self, dtype):
        def chain(a, b, c):
            return a @ b @ c

        shapes = (32, 64), (64, 128), (128, 16)
        report = audit_jit(chain, *(ones(*shape, dtype=dtype) for shape in shapes))
        assert report.flops == 2 * 32 * 64 * 128 + 2 * 32 * 128 * 16

    def test_batched_dot_is_counted(self):
        q = ones(2, 32, 4, 8)
        report = audit_jit(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), q, q)
        assert report.flops == 2 * (2 * 4) * 32 * 32 * 8

    def test_scan_counts_every_layer(self):
        kernels = ones(LAYERS, WIDTH, WIDTH)
        assert audit_jit(scanned_layers, kernels, ones(ROWS, WIDTH)).flops == 16 * DOT

    def test_nested_scans_multiply(self):
        def inner(x, _):
            return x @ x, None

        def outer(x, _):
            return lax.scan(inner, x, length=3)[0] + 1, None

        report = audit_jit(lambda x: lax.scan(outer, x, length=5)[0], ones(16, 16))
        assert report.flops == 3 * 5 * 2 * 16**3

    def test_gradient_of_scan_is_counted(self):
        def loss(kernels, x):
            return scanned_layers(kernels, x).sum()

        report = audit_jit(jax.grad(loss), ones(LAYERS, WIDTH, WIDTH), ones(8, WIDTH))
        assert report.flops == 3 * LAYERS * DOT

    def test_remat_repeats_forward_pass(self):
        def loss(kernels, x):
            def block(x, kernel):
                return jnp.tanh(jnp.tanh(x @ kernel) @ kernel), None

            return lax.scan(jax.checkpoint(block), x, kernels)[0].sum()

        report = audit_jit(jax.grad(loss), ones(LAYERS, WIDTH, WIDTH), ones(8, WIDTH))
        assert report.flops == 8 * LAYERS * DOT

    def test_flops_are_per_device(self, mesh):
        x = jax.device_put(ones(64, WIDTH), NamedSharding(mesh, P(("x", "y"))))
        kernel = jax.device_put(ones(WIDTH, WIDTH), NamedSharding(mesh, P()))
        assert audit_jit(jnp.matmul, x, kernel).flops == DOT


class TestConvolution:
    @staticmethod
    def convolve(images, kernel, padding="VALID", **options):
        return lax.conv_general_dilated(
            images,
            kernel,
            window_strides=options.pop("strides", (1, 1)),
            padding=padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            **options,
        )

    def test_forward_pass_is_counted(self):
        report = audit_jit(self.convolve, ones(4, 12, 12, 8), ones(3, 3, 8, 16))
        assert report.flops == 2 * (4 * 10 * 10 * 16) * (3 * 3 * 8)

    def test_grouped_convolution_is_counted(self):
        def depthwise(images, kernel):
            return self.convolve(images, kernel, feature_group_count=8)

        report = audit_jit(depthwise, ones(4, 12, 12, 8), ones(3, 3, 1, 8))
        assert report.flops == 2 * (4 * 10 * 10 * 8) * (3 * 3)

    def test_padding_costs_nothing(self):
        def same(images, kernel):
            return self.convolve(images, kernel, padding="SAME")

        report = audit_jit(same, ones(1, 4, 4, 8), ones(3, 3, 8, 8))
        # Along each dim, the four outputs use 2, 3, 3 and 2 of the three taps.
        assert report.flops == 2 * (8 * 8) * (2 + 3 + 3 + 2) ** 2

    @pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
    def test_gradients_cost_twice_forward_pass(self, strides):
        def loss(images, kernel):
            return (self.convolve(images, kernel, strides=strides) ** 2).sum()

        images, kernel = ones(2, 13, 13, 4), ones(3, 3, 4, 8)
        report = audit_jit(jax.grad(loss, argnums=(0, 1)), images, kernel)
        outputs = 2 * (11 // strides[0] + 11 % strides[0]) ** 2 * 8
        assert report.flops == 3 * 2 * outputs * (3 * 3 * 4)


class TestControlFlow:
    def test_conditional_counts_most_expensive_branch(self):
        def f(index, x):
            return lax.switch(
                index, [lambda x: x, lambda x: x @ x @ x, jnp.matrix_transpose], x
            )

        report = audit_jit(f, 0, ones(16, 16))
        assert report.flops == 2 * 2 * 16**3
        (conditional,) = report.conditionals
        assert conditional.branch_flops == (0, 2 * 2 * 16**3, 0)

    def test_conditional_in_loop_is_multiplied(self):
        def step(x, flag):
            return lax.cond(flag, lambda x: x @ x, lambda x: x + 1, x), None

        flags = jnp.arange(7) % 2 == 0
        report = audit_jit(lambda x, f: lax.scan(step, x, f)[0], ones(16, 16), flags)
        assert report.flops == 7 * 2 * 16**3
        assert report.conditionals[0].count == 7

    def test_conditional_counts_by_frequency(self):
        """Of 12 iterations, 3 take a branch with two products, 9 a branch with one."""

        def step(x, flag):
            with jax.named_scope("twice"):
                x = lax.cond(flag, lambda x: x @ x @ x, lambda x: x @ x, x)
            return lax.cond(flag, lambda x: x @ x, lambda x: x + 1, x), None

        flags = jnp.arange(12) % 4 == 0
        function = jax.jit(lambda x, f: lax.scan(step, x, f)[0])
        compiled = function.lower(ones(16, 16), flags).compile()
        product = 2 * 16**3
        assert audit(compiled).flops == 12 * (2 + 1) * product
        report = audit(compiled, taken={"twice": 3 / 12})
        assert report.flops == (3 * 2 + 9 * 1 + 12) * product
        assert [each.count for each in report.conditionals] == [12, 12]

    def test_scope_without_conditional_raises(self):
        message = (
            "taken= names the scopes ['forward'], but the conditionals are in []. Put "
            "jax.named_scope directly around the jax.lax.cond."
        )
        compiled = jax.jit(jnp.tanh).lower(ones(4)).compile()
        with pytest.raises(ValueError, match=re.escape(message)):
            audit(compiled, taken={"forward": 0.5})

    def test_unknown_loop_counts_once_and_is_listed(self):
        def f(n, x):
            return lax.fori_loop(0, n, lambda _, x: x @ x, x)

        report = audit_jit(f, 5, ones(16, 16))
        assert report.flops == 2 * 16**3
        assert len(report.unknown_loops) == 1
        assert "loop of unknown length, counted once" in str(report)

    def test_unknown_loop_length_can_be_given(self):
        def f(n, x):
            with jax.named_scope("many"):
                return lax.fori_loop(0, n, lambda _, x: x @ x, x)

        compiled = jax.jit(f).lower(5, ones(16, 16)).compile()
        for trips in (0, 3):
            report = audit(compiled, trips={"many": trips})
            assert report.flops == trips * 2 * 16**3
            assert report.unknown_loops == ()
        message = (
            "trips= names the scopes ['few'], but the loops of unknown length are in "
            "['many']. Put jax.named_scope directly around the jax.lax.while_loop."
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            audit(compiled, trips={"few": 1})

    def test_grouped_products_are_counted(self):
        """By default, overflow rounds of a mixture of experts are not counted."""
        moe = MoE(16, Experts(num_experts=8, top_k=2, mlp_dim=32), rngs=nnx.Rngs(0))
        moe.deterministic = True
        strategy = ExpertParallel(4, "gather")
        layout = strategy.layout(strategy.make_mesh(jax.devices()[:4]))

        def run(x):
            with using(layout):
                return moe(x)[0]

        compiled = jax.jit(run).lower(ones(4, 16, 16)).compile()
        report, twice = audit(compiled), audit(compiled, trips={"more_rounds": 1})
        assert "more_rounds/while" in report.unknown_loops[0]
        assert "loop of unknown length, not counted" in str(report)
        # Each device has 16 tokens, which choose 2 experts each, and room for 40 rows.
        # On CPUs, each of a device's two experts multiplies all 40 rows.
        assert report.grouped_flops == 3 * 2 * (2 * 40) * 16 * 32
        assert twice.grouped_flops == 2 * report.grouped_flops
        assert twice.grouped_products == 2 * report.grouped_products >= 6
        assert report.flops == report.grouped_flops + 2 * 16 * 16 * 8
        assert f"in {report.grouped_products} grouped products" in str(report)

    @pytest.mark.parametrize(
        ("start", "stop", "step"), [(0, 16, 1), (3, 16, 4), (16, 2, -3), (5, 5, 1)]
    )
    def test_trip_count_is_read_from_loop(self, start, stop, step):
        """The loop's bounds give the trip count; the text of a TPU program has none."""

        def f(x):
            def goes_on(carry):
                return carry[0] < stop if step > 0 else carry[0] > stop

            def body(carry):
                return carry[0] + step, carry[1] @ carry[1]

            return lax.while_loop(goes_on, body, (start, x))

        text = jax.jit(f).lower(ones(16, 16)).compile().as_text() or ""
        stated = r'"known_trip_count":\{"n":"\d+"\}'
        report = audit(re.sub(stated, '"unstated":{}', text))
        assert report.flops == len(range(start, stop, step)) * 2 * 16**3
        assert report.unknown_loops == ()


class TestCollectives:
    def test_data_parallel_gradient_is_reduced_once(self, mesh):
        def loss(params, x):
            for kernel in params:
                x = jnp.tanh(x @ kernel)
            return x.mean()

        params = jax.device_put([ones(16, 16)] * 3, NamedSharding(mesh, P()))
        x = jax.device_put(ones(64, 16), NamedSharding(mesh, P(("x", "y"))))
        report = audit_jit(jax.grad(loss), params, x)
        assert report.count() == report.count("all-reduce") == 1
        assert report.bytes("all-reduce") == 3 * 16 * 16 * 4
        assert report.collectives[0].group_size == 8

    def test_collectives_in_scan_are_multiplied(self, mesh):
        ring = [(i, (i + 1) % 4) for i in range(4)]

        def body(x, _):
            x = lax.psum(x, "x") * 0.1
            x = lax.all_gather(x, "y", tiled=True)
            x = lax.psum_scatter(x, "y", tiled=True)
            x = lax.ppermute(x, "x", ring)
            return lax.all_to_all(x, "x", 0, 0, tiled=True), None

        def f(x_shard):
            return lax.scan(body, x_shard, length=5)[0]

        spec = P(("x", "y"))
        sharded = jax.shard_map(
            f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        report = audit_jit(sharded, ones(256, 64))
        shard_bytes = 256 // 8 * 64 * 4
        expected = {
            "all-reduce": (shard_bytes, 4),
            "all-gather": (2 * shard_bytes, 2),
            "reduce-scatter": (2 * shard_bytes, 2),
            "collective-permute": (shard_bytes, 4),
            "all-to-all": (shard_bytes, 4),
        }
        found = {each.kind: each for each in report.collectives}
        assert found.keys() == expected.keys()
        for kind, (bytes_each, group_size) in expected.items():
            assert report.count(kind) == 5
            assert report.bytes(kind) == 5 * bytes_each
            assert found[kind].group_size == group_size
            assert found[kind].dtypes == ("f32",)
        assert set(found["all-gather"].groups or ()) == {(0, 1), (2, 3), (4, 5), (6, 7)}
        assert (0, 2, 4, 6) in (found["all-reduce"].groups or ())
        assert (1, 3, 5, 7) in (found["collective-permute"].groups or ())
        assert found["all-reduce"].source.endswith("psum")

    def test_groups_of_one_device_are_ignored(self):
        devices = np.array(jax.devices()[:1])
        mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
        total = jax.shard_map(
            lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
        )
        assert audit_jit(total, ones(8)).collectives == ()

    def test_unknown_kind_raises(self):
        with pytest.raises(
            ValueError,
            match=re.escape(
                "No collective is called 'allgather'. Kinds: all-gather, all-reduce,"
            ),
        ):
            audit_jit(jnp.sin, 1.0).count("allgather")


def test_memory_of_compiled_program_is_reported():
    report = audit_jit(lambda a, b: (a @ b, a + 1), ones(32, 64), ones(64, 16))
    assert report.argument_bytes == (32 * 64 + 64 * 16) * 4
    assert report.output_bytes is not None
    assert report.output_bytes >= (32 * 16 + 32 * 64) * 4
    assert report.temporary_bytes is not None


def test_opcodes_distinguish_programs():
    def step(x):
        return jnp.tanh(x @ x)

    def same_step(x):
        return jnp.tanh(x @ x)

    reports = [audit_jit(f, ones(16, 16)) for f in (step, same_step, jnp.sin)]
    assert reports[0].opcodes == reports[1].opcodes
    assert reports[0].opcodes["dot"] == 1
    assert reports[0].opcodes != reports[2].opcodes


def test_unoptimized_hlo_raises():
    with pytest.raises(
        ValueError, match="No `ENTRY` computation in a text that starts"
    ):
        audit(jax.jit(jnp.sin).lower(1.0).as_text())


# In the format of the compiler's dump, elements of tuples have no line.
DUMPED = """HloModule jit_f, is_scheduled=true, num_partitions=4

%async_computation (x: bf16[6,8], y: bf16[9,8], s: s32[4]) -> bf16[9,8] {
  %x = bf16[6,8]{1,0} parameter(0)
  %y = bf16[9,8]{1,0} parameter(1)
  %s = s32[4]{0} parameter(2)
  ROOT %r = bf16[9,8]{1,0} ragged-all-to-all(%x, %y, %s, %s, %s, %s), \
replica_groups={{0,1,2,3}}
}

ENTRY %main (p: bf16[6,8]) -> bf16[9,8] {
  %p = bf16[6,8]{1,0} parameter(0)
  %pair = (bf16[6,8]{1,0}, (bf16[9,8]{1,0}, s32[4]{0})) custom-call(%p), \
custom_call_target="AllocateBuffer"
  %all-reduce = bf16[9,8]{1,0} all-reduce(%pair#0), replica_groups={{0,1,2,3}}
  %start = ((bf16[6,8], bf16[9,8], s32[4]), bf16[9,8], u32[]) \
async-start(%p, %all-reduce, %s), calls=%async_computation
  ROOT %done = bf16[9,8]{1,0} async-done(%start)
}
"""


def test_compiler_dump_is_parsed():
    """Tuple elements have names; a ragged exchange counts its smaller operand."""
    report = audit(DUMPED)
    assert report.bytes("all-reduce") == report.bytes("ragged-all-to-all") == 6 * 8 * 2
    assert [each.asynchronous for each in report.collectives] == [False, True]


class Unprintable:
    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError("INTERNAL: should have 1 operands\nmore")


def test_unprintable_program_raises():
    message = (
        f"jaxlib {version('jaxlib')} cannot print this program: its compiler is newer "
        "(INTERNAL: should have 1 operands). Update jax; or compile with "
        "`compile(compiler_options={'xla_dump_to': DIRECTORY})` and pass `audit` the "
        "text of the file in that directory that ends in `after_optimizations.txt`."
    )
    with pytest.raises(ProgramTextError, match=re.escape(message)):
        audit(Unprintable())  # pyright: ignore[reportArgumentType]


TPU_SCRIPT = """
import os
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from nnx_parallel.audit import audit
from nnx_parallel.plan.hardware import Topology

devices = Topology.parse("v5e:4x4").described()
mesh = Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))

def forward(kernels, x):
    def block(x, kernel):
        kernel = jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, P()))
        h = jnp.tanh(x @ kernel)
        scores = jax.nn.softmax(jnp.einsum("bqe,bke->bqk", h, h))
        return x + jnp.einsum("bqk,bke->bqe", scores, h), None
    return jax.lax.scan(block, x, kernels)[0]

def shape(dims, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=sharding)

args = shape((6, 512, 512), P(None, "fsdp")), shape((64, 128, 512), P("fsdp"))
report = audit(jax.jit(forward).lower(*args).compile())
gather_bytes = report.bytes("all-gather")
print(report.flops, report.count("all-gather"), gather_bytes, report.unknown_loops)
"""


@pytest.mark.slow
def test_real_tpu_program_is_audited():
    pytest.importorskip("libtpu")
    run = subprocess.run(
        [sys.executable, "-c", TPU_SCRIPT], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    layer = 2 * (64 // 16) * 128 * (512 * 512 + 2 * 128 * 512)
    assert run.stdout.split() == [str(6.0 * layer), "6", str(6 * 512 * 512 * 2), "()"]
