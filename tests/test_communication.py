"""The communication of a compiled step; all expected numbers are computed by hand.

Counts of collectives include the trips of loops. Bytes are the size of the data per
device. XLA for CPU sums gradients by all-reduce, where XLA for accelerators uses
reduce-scatter.
"""

from collections import Counter
from dataclasses import replace

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks.stock import StockTransformer, stock_loss
from nnx_parallel import FSDP, Composite, DataParallel, Strategy, TensorParallel
from nnx_parallel.audit import Report
from nnx_parallel.models import GPTConfig
from nnx_parallel.sharding import PathRules
from tests.steps import CompiledStep, compile_gpt, compile_step

pytestmark = pytest.mark.long

LAYERS, ROWS, SEQ, WIDTH = 3, 32, 16, 32
TIED = GPTConfig.tiny(
    num_layers=LAYERS, seq_len=SEQ, embed_dim=WIDTH, num_heads=8, vocab_size=64
)
UNTIED = replace(TIED, tied=False)
CONFIGS = pytest.mark.parametrize(
    "config",
    [
        pytest.param(TIED, id="tied", marks=pytest.mark.deep),
        pytest.param(UNTIED, id="untied"),
    ],
)

DP8 = DataParallel(8)
FSDP8 = FSDP(8, min_size=0)
HSDP = Composite(DataParallel(2), FSDP(4, min_size=0))
ZERO1 = FSDP(8, shard="optimizer", min_size=0)
ZERO2 = FSDP(8, shard="gradients", min_size=0)
TP4 = TensorParallel(4)
FSDP_TP = Composite(FSDP(4, min_size=0), TensorParallel(2))
STRATEGIES = {
    "dp": DP8,
    "fsdp": FSDP8,
    "hsdp": HSDP,
    "zero1": ZERO1,
    "zero2": ZERO2,
    "tp": TP4,
    "fsdp_tp": FSDP_TP,
}
ALL_STRATEGIES = pytest.mark.parametrize(
    "strategy", STRATEGIES.values(), ids=STRATEGIES.keys()
)

SCALAR = 4  # bytes of the loss, and of an array's share of the gradient norm


def compiled(
    config: GPTConfig, strategy: Strategy, microbatches: int = 1
) -> CompiledStep:
    return compile_gpt(config, strategy, ROWS, microbatches)


def param_bytes(step: CompiledStep) -> int:
    return sum(x.size * 4 for x in jax.tree.leaves(step.plan.abstract.params))


def num_arrays(step: CompiledStep) -> int:
    return len(jax.tree.leaves(step.plan.abstract.params))


def gradient_bytes(step: CompiledStep, config: GPTConfig) -> int:
    """Bytes of the gradients of all uses of parameters; a tied table has two uses.

    The gradient of each use is summed over devices separately, before the two are
    added.
    """
    table = config.vocab_size * config.embed_dim * 4
    return param_bytes(step) + (table if config.tied else 0)


def product_bytes(config: GPTConfig) -> int:
    """Bytes of the kernels and the head, which products of the backward pass reuse."""
    return config.num_product_params * 4


def head_bytes(config: GPTConfig) -> int:
    """Bytes of the head, which is gathered once: logits and gradients share a pass."""
    return config.vocab_size * config.embed_dim * 4


def kinds(report: Report) -> set[str]:
    return {each.kind for each in report.collectives}


@CONFIGS
def test_data_parallel_reduces_gradients_once(config: GPTConfig):
    step = compiled(config, DP8)
    assert kinds(step.report) == {"all-reduce"}
    assert step.report.bytes() == gradient_bytes(step, config) + SCALAR
    # The gradients of one layer are sent together, while those of the layer before are
    # computed. The head's gradients are sent before all layers' gradients; jax 0.10's
    # XLA sends them with the last layer's.
    assert step.report.count() in (LAYERS + 1, LAYERS + 2)


@CONFIGS
def test_fsdp_gathers_per_pass_and_reduces_once(config: GPTConfig):
    step = compiled(config, FSDP8)
    layer_arrays = len(jax.tree.leaves(step.plan.abstract.params["blocks"]))
    edge_arrays = num_arrays(step) - layer_arrays
    # The forward pass gathers each array once. The backward pass gathers only the
    # layers' kernels again: it needs no bias, the normalised inputs are kept, and the
    # head's gradients are computed together with its logits.
    layer_kernels = 6
    assert step.report.count("all-gather") == (
        LAYERS * (layer_arrays + layer_kernels) + edge_arrays
    )
    gathered = param_bytes(step) + product_bytes(config) - head_bytes(config)
    assert step.report.bytes("all-gather") == gathered
    norms_and_loss = (num_arrays(step) + 1) * SCALAR
    assert step.report.bytes("all-reduce") == (
        gradient_bytes(step, config) + norms_and_loss
    )
    assert kinds(step.report) == {"all-gather", "all-reduce"}
    assert {each.group_size for each in step.report.collectives} == {8}


@CONFIGS
def test_hybrid_gathers_within_replica_and_reduces_between(config: GPTConfig):
    step = compiled(config, HSDP)
    gathers = [c for c in step.report.collectives if c.kind == "all-gather"]
    assert {each.group_size for each in gathers} == {4}
    gathered = param_bytes(step) + product_bytes(config) - head_bytes(config)
    assert step.report.bytes("all-gather") == gathered
    by_group = Counter()
    for each in step.report.collectives:
        if each.kind == "all-reduce":
            by_group[each.group_size] += each.bytes
    # Gradients of products are summed within a replica; a quarter is then summed over
    # replicas.
    assert by_group[2] == product_bytes(config) / 4
    norms_and_loss = (num_arrays(step) + 1) * SCALAR
    whole = gradient_bytes(step, config) + norms_and_loss
    assert by_group[4] + by_group[8] == whole
    assert kinds(step.report) == {"all-gather", "all-reduce"}


@CONFIGS
@pytest.mark.parametrize("strategy", [ZERO1, ZERO2], ids=["zero1", "zero2"])
def test_zero_1_and_2_gather_only_parameters(config: GPTConfig, strategy: Strategy):
    step = compiled(config, strategy)
    assert step.report.count("all-gather") == num_arrays(step)
    assert step.report.bytes("all-gather") == param_bytes(step)
    norms = num_arrays(step) * SCALAR if strategy == ZERO2 else 0
    assert step.report.bytes("all-reduce") == (
        gradient_bytes(step, config) + norms + SCALAR
    )
    assert kinds(step.report) == {"all-gather", "all-reduce"}


@CONFIGS
def test_tensor_parallel_reduces_twice_per_block(config: GPTConfig):
    step = compiled(config, TP4)
    activation, per_token = ROWS * SEQ * WIDTH * 4, ROWS * SEQ * 4
    looped = [each for each in step.report.collectives if each.count == LAYERS]
    backward = [each for each in looped if "transpose" in each.source]
    forward = [each for each in looped if each not in backward]
    assert [each.bytes_each for each in forward] == [activation] * 2
    # Gradients of the inputs of query, key and value are in one all-reduce with three
    # operands. An accelerator's compiler adds them before the all-reduce.
    assert sorted(e.bytes_each for e in backward) == [activation, 3 * activation]

    edges = [each for each in step.report.collectives if each.count == 1]
    sharded = sum(
        bool(any(x.sharding.spec)) for x in jax.tree.leaves(step.plan.abstract.params)
    )
    # The five collectives reduce the embedded tokens; each token's maximum, sum, and
    # label's logit; the gradient of the head's input; and the split arrays' shares of
    # the gradient norm.
    assert len(edges) == 5
    assert sum(each.bytes for each in edges) == (
        2 * activation + 3 * per_token + sharded * SCALAR
    )
    assert len(looped) + len(edges) == len(step.report.collectives)
    assert kinds(step.report) == {"all-reduce"}


@CONFIGS
@ALL_STRATEGIES
def test_no_strategy_repeats_computation(config: GPTConfig, strategy: Strategy):
    step = compiled(config, strategy)
    tokens = ROWS * SEQ
    theory = config.flops_per_token(SEQ) * tokens
    assert step.report.flops * step.num_devices == pytest.approx(theory, rel=0.03)
    assert step.report.unknown_loops == ()
    assert step.report.conditionals == ()


@CONFIGS
@ALL_STRATEGIES
def test_no_all_to_all_or_permute_is_sent(config: GPTConfig, strategy: Strategy):
    """No collective splits an array along another dim, or moves it elsewhere."""
    report = compiled(config, strategy).report
    assert kinds(report) <= {"all-gather", "all-reduce", "reduce-scatter"}


EMBED_BY_COLUMNS = FSDP(8, rules=(PathRules((r"embedding", P(None, "fsdp"))),))


def test_column_split_table_sends_no_all_to_all():
    report = compiled(TIED, EMBED_BY_COLUMNS).report
    assert kinds(report) <= {"all-gather", "all-reduce"}


class NamedMLP(nnx.Module):
    """Flax's embedding table and layers, with named dims."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def named(*names: str):
            init = nnx.initializers.normal(0.02)
            return nnx.with_partitioning(init, names, eager_sharding=False)

        table, up = named("vocab", "embed"), named("embed", "mlp")
        down, head = named("mlp", "embed"), named("embed", "vocab")
        self.embed = nnx.Embed(512, 256, embedding_init=table, rngs=rngs)
        self.up = nnx.Linear(256, 1024, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(1024, 256, kernel_init=down, rngs=rngs)
        self.head = nnx.Linear(256, 512, kernel_init=head, rngs=rngs)

    def __call__(self, tokens: jax.Array, _: object) -> jax.Array:
        x = self.embed(tokens)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


def test_named_stock_table_sends_no_all_to_all():
    strategy = Composite(FSDP(4), TensorParallel(2))
    step = compile_step(NamedMLP, stock_loss, strategy, num_rows=ROWS, seq_len=SEQ)
    assert step.report.count("all-to-all") == 0


def test_unnamed_stock_model_is_gathered_at_use():
    def build(rngs: nnx.Rngs) -> nnx.Module:
        return StockTransformer(64, WIDTH, 2, 4, rngs=rngs)

    step = compile_step(
        build, stock_loss, FSDP(8, min_size=0), num_rows=ROWS, seq_len=SEQ
    )
    assert kinds(step.report) == {"all-gather", "all-reduce"}
    params = jax.tree_util.tree_leaves_with_path(step.plan.abstract.params)
    kernels = [x for path, x in params if path[-1].key == "kernel"]
    assert step.report.bytes("all-gather") == (
        param_bytes(step) + sum(x.size * 4 for x in kernels)
    )


class TestMicrobatches:
    """Each microbatch has the collectives of one full pass."""

    def test_data_parallel_reduces_per_microbatch(self):
        step = compiled(TIED, DP8, microbatches=4)
        assert step.report.bytes() == 4 * (gradient_bytes(step, TIED) + SCALAR)
        assert kinds(step.report) == {"all-reduce"}

    def test_fsdp_gathers_layers_per_microbatch(self):
        step = compiled(TIED, FSDP8, microbatches=4)
        params = step.plan.abstract.params
        layers = sum(x.size * 4 for x in jax.tree.leaves(params["blocks"]))
        head = TIED.vocab_size * WIDTH * 4
        gathers = [c for c in step.report.collectives if c.kind == "all-gather"]
        of_layers = [each for each in gathers if each.count == 4 * LAYERS]
        kernels = product_bytes(TIED) - head
        assert sum(each.bytes for each in of_layers) == 4 * (layers + kernels)
        # Other arrays are the same for every microbatch, so the compiler may gather
        # them once, before the loop. It does so at least for the arrays of the forward
        # pass.
        rest = param_bytes(step) - layers
        of_rest = step.report.bytes("all-gather") - 4 * (layers + kernels)
        assert rest <= of_rest <= rest + 4 * head
        sums = gradient_bytes(step, TIED) + SCALAR
        norms = num_arrays(step) * SCALAR
        assert step.report.bytes("all-reduce") == 4 * sums + norms
        assert kinds(step.report) == {"all-gather", "all-reduce"}
