"""Sequence parallelism, overlapped or not: one device's numbers, less memory.

The GPT is unchanged. Its products find in the layout how to gather and scatter.
"""

import contextlib
import math
import re
from dataclasses import replace
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import ParallelWarning
from nnx_parallel.layers import Dense, Embed, Stack
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding import LogicalRules, constrain, using
from nnx_parallel.sharding.constrain import noticing_idle_claims
from nnx_parallel.strategies import Pipeline
from tests.parity.models import CASES, DEEP_CASES
from tests.parity.runs import Run, measure, reference
from tests.steps import CompiledStep, compile_gpt

SEQUENCE = TensorParallel(4, sequence=True)
RING = TensorParallel(4, overlap="ring")
HALVES = TensorParallel(4, overlap="halves")
FSDP_RING = Composite(FSDP(2, min_size=0), RING)

STRATEGIES: dict[str, Strategy] = {
    "sequence": SEQUENCE,
    "ring": RING,
    "fsdp_sequence": Composite(FSDP(4, min_size=0), TensorParallel(2, sequence=True)),
    "fsdp_ring": FSDP_RING,
    "dp_fsdp_ring": Composite(
        DataParallel(2), FSDP(2, min_size=0), TensorParallel(2, overlap="ring")
    ),
    "dp_ring": Composite(DataParallel(2), TensorParallel(4, overlap="ring")),
    "pipeline_sequence": Composite(Pipeline(2), TensorParallel(4, sequence=True)),
    "pipeline_ring": Composite(Pipeline(2), TensorParallel(4, overlap="ring")),
    "pipeline_fsdp_ring": Composite(
        Pipeline(2), FSDP(2, min_size=0), TensorParallel(2, overlap="ring")
    ),
}
# These need a model without dropout: dropout masks cover all rows, so rows are not
# halved.
HALVED: dict[str, Strategy] = {
    "halves": HALVES,
    "fsdp_halves": Composite(FSDP(2, min_size=0, prefetch="first"), HALVES),
}


CHOSEN = {
    ("sequence", "gpt"),
    ("ring", "llama"),
    ("dp_fsdp_ring", "gpt"),
    ("fsdp_halves", "untied"),
    ("pipeline_fsdp_ring", "llama"),
}


def parametrized() -> list:
    """All combinations; the chosen ones are deep, and the others slow."""
    cases = []
    every = [*product(STRATEGIES, ["gpt", "llama"]), *product(HALVED, ["untied"])]
    for case in every:
        mark = pytest.mark.deep if case in CHOSEN else pytest.mark.slow
        cases.append(pytest.param(*case, marks=[mark]))
    return cases


@pytest.mark.parametrize(("name", "model"), parametrized())
def test_training_matches_one_device(name: str, model: str):
    """Compares 20 losses of AdamW and SGD, and the first gradient of each leaf."""
    strategy = (STRATEGIES | HALVED)[name]
    microbatches = 4 if strategy.claims().execution else 1
    is_deep = model in DEEP_CASES
    expected = reference(model, microbatches, optimized=False, deep=is_deep)
    sizes = strategy.axis_sizes.values()
    devices = jax.devices()[: int(np.prod([size or 1 for size in sizes]))]
    run = measure((CASES | DEEP_CASES)[model], strategy, devices, microbatches)
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(run.sgd_losses, expected.sgd_losses, rtol=1e-5)
    assert max(gradient_errors(run, expected).values()) < 1e-5


@pytest.mark.parametrize(
    ("kv_heads", "strategy"),
    [
        (2, SEQUENCE),
        pytest.param(1, SEQUENCE, marks=pytest.mark.deep),
        pytest.param(1, TensorParallel(4), marks=pytest.mark.deep),
        pytest.param(2, FSDP_RING, marks=pytest.mark.deep),
        pytest.param(1, STRATEGIES["pipeline_ring"], marks=pytest.mark.deep),
        pytest.param(2, STRATEGIES["pipeline_sequence"], marks=pytest.mark.deep),
    ],
)
def test_fewer_key_heads_than_devices_match_one_device(
    kv_heads: int, strategy: Strategy
) -> None:
    config = GPTConfig.tiny_llama(num_layers=2, num_kv_heads=kv_heads)
    batches = [np.arange(8 * 17).reshape(8, 17) % 250] * 2
    losses = []
    for each in (DataParallel(1), strategy):
        count = math.prod(size or 1 for size in each.axis_sizes.values())
        trainer = Trainer(
            lambda rngs: GPT(config, rngs=rngs),
            optax.sgd(0.1),
            next_token_loss,
            strategy=each,
            num_microbatches=2 if each.claims().execution else 1,
            devices=jax.devices()[:count],
            loggers=(),
        )
        losses.append(trainer.fit(batches, 2)["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def gradient_errors(found: Run, expected: Run) -> dict[str, float]:
    """Error of each leaf, relative to the largest gradient of all leaves."""
    largest = max(np.abs(leaf).max() for leaf in expected.gradients.values())
    return {
        path: np.abs(found.gradients[path] - leaf).max() / largest
        for path, leaf in expected.gradients.items()
    }


LAYERS, ROWS, SEQ, WIDTH = 3, 8, 64, 128
CONFIG = GPTConfig.tiny(
    num_layers=LAYERS, seq_len=SEQ, embed_dim=WIDTH, num_heads=4, vocab_size=64
)
ACTIVATION = ROWS * SEQ * WIDTH * 4


@cache
def compiled(config: GPTConfig, strategy: Strategy) -> CompiledStep:
    return compile_gpt(config, strategy, ROWS)


def growth(config: GPTConfig, strategy: Strategy) -> float:
    """Temporary bytes that each layer adds, in units of a full activation."""
    few, many = (
        compiled(replace(config, num_layers=n), strategy).memory.temp_size_in_bytes
        for n in (2, 6)
    )
    return (many - few) / 4 / ACTIVATION


@pytest.mark.deep
class TestMemory:
    """Memory that a layer keeps for the backward pass.

    A layer takes W + S / size bytes: W is replicated, and the axis splits S. Sizes 2
    and 4 tell W and S apart. Sequence parallelism must split W too, which consists of
    residuals, and of inputs and statistics of norms.
    """

    @pytest.mark.parametrize(
        ("remat", "strategy"),
        [
            pytest.param("none", SEQUENCE, id="none-sequence"),
            pytest.param("full", RING, id="full-ring"),
            *(
                pytest.param(remat, strategy, marks=pytest.mark.slow)
                for remat, strategy in [
                    ("none", RING),
                    ("dots", SEQUENCE),
                    ("dots", RING),
                    ("full", SEQUENCE),
                ]
            ),
        ],
    )
    def test_activations_outside_products_are_split(self, remat, strategy):
        config = replace(CONFIG, remat=remat)
        two, four = (growth(config, TensorParallel(n)) for n in (2, 4))
        outside, inside = 2 * four - two, two - four
        assert outside > 0.95
        assert outside / (growth(config, strategy) - inside) >= 2.5

    def test_dots_keeps_outputs_of_overlapped_products(self):
        """Products are not computed twice, and their input is not gathered again."""
        none, dots = (
            compiled(replace(CONFIG, remat=remat), RING) for remat in ("none", "dots")
        )
        hops = [step.report.count("collective-permute") for step in (none, dots)]
        assert hops[0] == hops[1]
        # Scores and weighted values are 2 products of heads * seq * seq * head_dim.
        attention = 2 * 2 * ROWS * SEQ * SEQ * WIDTH // 4 * LAYERS
        assert dots.report.flops - none.report.flops == attention


@pytest.mark.deep
class TestCommunication:
    def collectives(self, strategy: Strategy, count: int) -> dict[str, list[int]]:
        """Bytes of the large collectives that run ``count`` times, by kind."""
        found: dict[str, list[int]] = {}
        for each in compiled(CONFIG, strategy).report.collectives:
            if each.count == count and each.bytes_each >= ACTIVATION // 4:
                found.setdefault(each.kind, []).append(each.bytes_each)
        return found

    def test_layer_gathers_and_scatters_instead_of_reducing(self):
        """XLA for CPU writes a reduce-scatter as an all-reduce and a slice."""
        plain = self.collectives(TensorParallel(4), LAYERS)
        assert sorted(plain["all-reduce"]) == [ACTIVATION] * 3 + [3 * ACTIVATION]
        split = self.collectives(SEQUENCE, LAYERS)
        # The forward pass gathers the inputs of query, key, value and up. The backward
        # pass gathers them again, because they are not kept, and gathers the gradients
        # of the outputs of out and down. XLA for TPU gathers the input of query, key
        # and value only once.
        assert split["all-gather"] == [ACTIVATION] * 2 * 5
        sums = sorted(split["all-reduce"])
        assert [n // ACTIVATION for n in sums] == [1, 1, 1, 3]

    def test_overlapped_products_send_only_shards(self):
        found = self.collectives(RING, LAYERS)
        assert not found.keys() - {"collective-permute"}
        step = compiled(CONFIG, RING)
        hops = [
            each
            for each in step.report.collectives
            if each.kind == "collective-permute" and each.count == LAYERS
        ]
        assert {each.bytes_each for each in hops} == {ACTIVATION // 4}
        # The forward pass sends the input of query, key and value, which the compiler
        # shares, the input of up, and the sums of out and down. The backward pass sends
        # the gradients of out and down twice, the two inputs again, and the sums of
        # their gradients.
        assert len(hops) == 3 * (4 + 2 + 2 + 2)

    def test_halves_of_rows_are_sent_separately(self):
        """Halves send the same number of bytes in twice as many collectives."""
        whole, halves = (self.collectives(s, LAYERS) for s in (SEQUENCE, HALVES))
        assert halves["all-gather"] == [ACTIVATION // 2] * 2 * len(whole["all-gather"])

    @pytest.mark.parametrize("name", ["sequence", "ring", "fsdp_ring", "fsdp_halves"])
    def test_nothing_is_computed_twice(self, name: str):
        step = compiled(CONFIG, (STRATEGIES | HALVED)[name])
        theory = CONFIG.flops_per_token(SEQ) * ROWS * SEQ
        assert step.report.flops * step.num_devices == pytest.approx(theory, rel=0.03)

    def test_kernels_are_gathered_once_per_ring(self):
        """FSDP gathers the same bytes as without a ring."""
        plain = Composite(FSDP(2, min_size=0), TensorParallel(4))
        found = [
            sum(
                each.bytes
                for each in compiled(CONFIG, strategy).report.collectives
                if each.kind == "all-gather" and each.group_size == 2
            )
            for strategy in (plain, FSDP_RING)
        ]
        assert 0 < found[1] <= found[0]

    def test_pipeline_looks_up_rows_in_split_table(self):
        """Stages split the tokens, and ``tensor`` the vocabulary of the table."""
        tensor = TensorParallel(2, sequence=True)
        strategy = Composite(Pipeline(2), FSDP(2, min_size=0), tensor)
        config = replace(CONFIG, num_layers=2, tied=False, positions="rope")
        report = compile_gpt(config, strategy, ROWS, num_microbatches=4).report
        lookups = [x for x in report.collectives if "_take" in x.source]
        assert {each.kind for each in lookups} == {"all-reduce"}


class TestPlaces:
    """`seq` takes the axis if no other dim of the activation claims it."""

    @pytest.mark.parametrize(
        ("shape", "names", "spec"),
        [
            ((8, 64, 32), ("batch", "seq", "embed"), P("fsdp", "tensor")),
            (
                (8, 64, 4, 8),
                ("batch", "seq", "heads", "head_dim"),
                P("fsdp", None, "tensor"),
            ),
            ((8, 64, 128), ("batch", "seq", "mlp"), P("fsdp", None, "tensor")),
            ((8, 64, 128), ("batch", "seq", "vocab"), P("fsdp", None, "tensor")),
            ((8, 63, 32), ("batch", "seq", "embed"), P("fsdp")),
            ((8, 64, 3), ("batch", "seq", "heads"), P("fsdp", "tensor")),
        ],
    )
    def test_activation_specs_are_split(self, shape, names, spec):
        layout = FSDP_RING.layout()
        assert layout.activation_spec(shape, names) == spec

    def test_parameters_are_placed_as_without_sequence(self):
        def build(rngs: nnx.Rngs) -> nnx.Module:
            return Embed(64, 32, vocab_name="seq", rngs=rngs)

        state = nnx.state(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        mesh = SEQUENCE.make_mesh(jax.devices()[:4])
        specs = nnx.to_pure_dict(SEQUENCE.specs(state, mesh=mesh))
        assert specs["embedding"] == P()

    def test_user_rules_override_sequence_split(self):
        rules = (LogicalRules({"seq": None}),)
        strategy = TensorParallel(4, sequence=True, rules=rules)
        layout = strategy.layout(strategy.make_mesh(jax.devices()[:4]))
        names = ("batch", "seq", "embed")
        assert layout.activation_spec((8, 64, 32), names) == P()

    @pytest.mark.parametrize("strategy", [SEQUENCE, RING], ids=["sequence", "ring"])
    @pytest.mark.parametrize("seq", [16, 15, 1])
    def test_indivisible_length_stays_whole(self, strategy, seq):
        layout = strategy.layout(strategy.make_mesh(jax.devices()[:4]))
        up = Dense({"embed": 8}, {"mlp": 16}, rngs=nnx.Rngs(0), use_bias=True)
        down = Dense({"mlp": 16}, {"embed": 8}, rngs=nnx.Rngs(1), use_bias=True)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, seq, 8)), jnp.float32)

        def apply(x: jax.Array) -> jax.Array:
            with using(layout):
                return constrain(down(up(x)), "batch", "seq", "embed")

        np.testing.assert_allclose(jax.jit(apply)(x), down(up(x)), rtol=2e-5, atol=1e-6)
        sent = str(jax.make_jaxpr(apply)(x)).count("ppermute")
        assert (sent > 0) == (strategy is RING and seq == 16)


def test_unknown_overlap_raises():
    message = (
        "TensorParallel.overlap is 'rings'; it must be one of ['ring', "
        "'halves'], or None"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorParallel(4, overlap="rings")  # pyright: ignore[reportArgumentType]


class Plain(nnx.Module):
    """An MLP with named parameters; its activation is named only if given."""

    def __init__(self, rngs: nnx.Rngs, activation: tuple | None = None) -> None:
        def named(*names: str):
            init = nnx.initializers.lecun_normal()
            return nnx.with_partitioning(init, names, eager_sharding=False)

        self.up = nnx.Linear(8, 16, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(16, 8, kernel_init=named("mlp", "embed"), rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.down(nnx.gelu(self.up(x)))
        return constrain(y, *self.activation) if self.activation else y


def trace_step(strategy: Strategy, length: int = 16, names: tuple | None = None):
    def loss(model, batch):
        return (model(batch) ** 2).mean()

    trainer = Trainer(
        lambda rngs: Plain(rngs, names),
        optax.sgd(0.1),
        loss,
        strategy=strategy,
        devices=jax.devices()[:4],
        loggers=(),
    )
    batch = np.ones((2, length, 8), np.float32)
    trainer.train_step.trace(trainer.state, trainer.shard_batch(batch))  # pyright: ignore[reportFunctionMemberAccess]


NAMES = ("batch", "seq", "embed")
UNSPLIT = (
    "should split activations along 'seq', but splits none: no activation has a dim of "
    "this name with a length that 4 divides. Call constrain(x, 'batch', 'seq', "
    "'embed') after the embedding and each block, or use Dense and Embed of "
    "nnx_parallel.layers. Pad lengths that 4 does not divide."
)


@pytest.mark.parametrize(
    ("strategy", "length", "names", "message"),
    [
        *(
            (strategy, length, names, f"{strategy!r} {UNSPLIT}")
            for strategy in (SEQUENCE, RING)
            for length, names in (
                (16, None),
                (16, ("batch", None, "embed")),
                (15, NAMES),
            )
        ),
        (
            RING,
            16,
            NAMES,
            f"{RING!r} overlaps the matmuls of Dense with their transfers, but the "
            "model has no Dense, so nothing overlaps. Use Dense of "
            "nnx_parallel.layers for the model's matmuls, or pass sequence=True.",
        ),
    ],
)
def test_split_without_effect_warns(strategy, length, names, message):
    with pytest.warns(ParallelWarning, match=re.escape(message)) as found:
        trace_step(strategy, length, names)
    assert len(found) == 1


class Scaled(nnx.Module):
    """A block with one further argument."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array, factor: jax.Array) -> jax.Array:
        if factor.shape and factor.shape[0] != len(x):
            factor = factor.mean()
        factor = factor.reshape(*factor.shape, *(1,) * (x.ndim - factor.ndim))
        return constrain(x + factor / 8 * self.dense(x), "batch", "seq", "embed")


HALVED_ALONE = (
    "runs a Stack on two halves of a device's rows, but finds no Stack that it can "
    "split, so nothing overlaps. Such a Stack runs outside of a Pipeline, has an even "
    "number of rows on each device"
)


@pytest.mark.parametrize(
    ("rows", "factor", "is_split"),
    [
        (8, (8, 4), True),  # integers per token are split with their rows
        (8, (), True),
        (6, (6, 4), False),  # a device has three rows
        (8, (8,), False),  # by row, or another vector of 8
        (8, (8, 1), False),
        (4, (4, 4), False),  # by token, or a mask between all rows
        (8, (3, 8, 4), False),  # the rows are another dim
        (8, (32,), False),
        (8, (5, 3), True),  # a table without rows
    ],
)
def test_independent_rows_are_halved(rows, factor, is_split):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 4, 8)), jnp.float32)
    given = jnp.asarray(rng.integers(1, 5, factor))
    stack = Stack(Scaled, 3, rngs=nnx.Rngs(0))
    strategy = Composite(DataParallel(2), HALVES)
    layout = strategy.layout(strategy.make_mesh(jax.devices()))

    def apply(x: jax.Array) -> jax.Array:
        with using(layout), noticing_idle_claims(layout):
            return stack(x, given)

    is_silent = contextlib.nullcontext()
    message = re.escape(f"{HALVES!r} {HALVED_ALONE}")
    warns = pytest.warns(ParallelWarning, match=message)
    with is_silent if is_split else warns:
        found = jax.jit(apply)(x)
    np.testing.assert_allclose(found, stack(x, given), rtol=1e-5, atol=1e-6)


class Counting(nnx.Module):
    """A block with an integer variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        del rngs
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls.set_value(self.calls[...] + 1)
        return x / self.calls[...]


class Dropping(nnx.Module):
    """A block with its random key as an argument."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        del rngs
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return x * self.scale[...] * jax.random.bernoulli(key, 0.5, x.shape)


@pytest.mark.parametrize(
    ("block", "args", "ndim"),
    [
        (Counting, (), 3),
        (Dropping, (jax.random.key(0),), 3),
        (Dropping, (jax.random.PRNGKey(0),), 3),
        (Dropping, (jax.random.key(0),), 2),  # a single row, as in jax.vmap
    ],
)
def test_stateful_layers_keep_rows_whole(block, args, ndim):
    shape = (8, 4, 8)[-ndim:]
    x = jnp.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    layout = HALVES.layout(HALVES.make_mesh(jax.devices()[:4]))
    whole, halved = (Stack(block, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    expected = whole(x, *args)
    with using(layout):
        np.testing.assert_array_equal(halved(x, *args), expected)
    states = (jax.tree.leaves(nnx.state(stack)) for stack in (halved, whole))
    for found, wanted in zip(*states, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_split_with_effect_does_not_warn():
    trace_step(SEQUENCE, names=NAMES)
