"""The loss from hidden states: optax's numbers, no logits, no repeated product."""

import math
import re
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nnx_parallel import FSDP, Composite, DataParallel, Strategy, TensorParallel, audit
from nnx_parallel.audit import Report
from nnx_parallel.layers import cross_entropy, linear_cross_entropy
from nnx_parallel.sharding import LogicalRules, using

pytestmark = pytest.mark.long

ROWS, SEQ, EMBED, VOCAB = 8, 12, 16, 24
STRATEGIES: dict[str, Strategy] = {
    "one": DataParallel(1),
    "fsdp": FSDP(8),
    "tensor": TensorParallel(4),
    "sequence": TensorParallel(4, sequence=True),
    "sequence_whole_vocab": TensorParallel(
        4, sequence=True, rules=(LogicalRules({"vocab": None}),)
    ),
    "ring": TensorParallel(2, overlap="ring"),
    "fsdp_sequence": Composite(FSDP(4), TensorParallel(2, sequence=True)),
    "uneven": FSDP(3),
}


def test_sum_beyond_float16_stays_finite() -> None:
    hidden = jnp.ones((8, 2**14, 2), jnp.float16)
    kernel, labels = jnp.zeros((2, 4), jnp.float16), jnp.zeros((8, 2**14), jnp.int32)

    def loss(kernel: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden, kernel, labels).value

    for strategy in (DataParallel(1), FSDP(8)):
        with using(make_layout(strategy)):
            grads = jax.jit(jax.grad(loss))(kernel)
        assert grads.dtype == jnp.float16
        expected = np.tile([-0.75, 0.25, 0.25, 0.25], (2, 1))
        np.testing.assert_array_equal(np.asarray(grads, np.float32), expected)


def make_layout(strategy: Strategy):
    sizes = strategy.axis_sizes.values()
    devices = jax.devices()[: math.prod(size or 1 for size in sizes)]
    return strategy.layout(strategy.make_mesh(devices))


def given() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns hidden states, kernel, labels and weights."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(ROWS, SEQ, EMBED)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(EMBED, VOCAB)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, VOCAB, (ROWS, SEQ)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 3, (ROWS, SEQ)), jnp.float32)
    return hidden, kernel, labels, weights


def by_optax(hidden, kernel, labels, weights) -> jax.Array:
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        hidden @ kernel, labels
    )
    return jnp.sum(losses * weights) / weights.sum()


def layouts() -> list:
    """Combinations of chunk size and vocabulary dim of the kernel; most are deep."""
    quick = {(None, 0), (5, 1)}
    return [
        pytest.param(*case, marks=[] if case in quick else [pytest.mark.deep])
        for case in product((None, 1, 5), (0, 1))
    ]


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize(("chunk_size", "vocab_dim"), layouts())
def test_values_and_gradients_match_optax(
    strategy: Strategy, chunk_size: int | None, vocab_dim: int
):
    hidden, kernel, labels, weights = given()
    layout = make_layout(strategy)

    def loss(hidden, kernel, weights):
        with using(layout):
            kernel = kernel if vocab_dim else kernel.T
            mean = linear_cross_entropy(
                hidden,
                kernel,
                labels,
                weights,
                vocab_dim=vocab_dim,
                chunk_size=chunk_size,
            )
        return mean.total / weights.sum()

    def expected(hidden, kernel, weights):
        return by_optax(hidden, kernel, labels, weights)

    args = (0, 1, 2)
    arrays = hidden, kernel, weights
    # The loss without gradients is a separate program.
    np.testing.assert_allclose(jax.jit(loss)(*arrays), expected(*arrays), rtol=1e-6)
    value, grads = jax.jit(jax.value_and_grad(loss, args))(*arrays)
    wanted_value, wanted = jax.value_and_grad(expected, args)(*arrays)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-6)
    # A label of weight 0 is left out, so the gradient of its weight is 0 too.
    wanted = (*wanted[:2], jnp.where(weights == 0, grads[2], wanted[2]))
    for found, leaf in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(found, leaf, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_loss_matches_cross_entropy_of_product(chunk_size: int | None, z_loss: float):
    hidden, kernel, labels, weights = given()

    def whole(hidden, kernel):
        return cross_entropy(hidden @ kernel, labels, weights, z_loss=z_loss).value

    def chunked(hidden, kernel):
        return linear_cross_entropy(
            hidden, kernel, labels, weights, z_loss=z_loss, chunk_size=chunk_size
        ).value

    found = jax.value_and_grad(chunked, (0, 1))(hidden, kernel)
    expected = jax.value_and_grad(whole, (0, 1))(hidden, kernel)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found,
        expected,
    )


def test_all_labels_count_without_weights():
    hidden, kernel, labels, _ = given()
    mean = linear_cross_entropy(hidden, kernel, labels, chunk_size=5)
    assert mean.weight == labels.size
    expected = by_optax(hidden, kernel, labels, jnp.ones(labels.shape))
    np.testing.assert_allclose(mean.value, expected, rtol=1e-6)


@pytest.mark.parametrize("label", [-1, VOCAB])
def test_weighted_label_outside_vocabulary_gives_nan(label: int):
    hidden, kernel, labels, weights = given()
    labels, weights = labels.at[0, 0].set(label), weights.at[0, 0].set(1)
    assert np.isnan(linear_cross_entropy(hidden, kernel, labels, weights).value)
    without = weights.at[0, 0].set(0)
    loss, grad = jax.value_and_grad(
        lambda x: linear_cross_entropy(x, kernel, labels, without, chunk_size=5).value
    )(hidden)
    assert np.isfinite(loss)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("chunk_size", [None, 7])
def test_bfloat16_is_computed_in_float32(chunk_size: int | None):
    hidden, kernel, labels, weights = given()
    hidden, kernel = hidden.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)

    def loss(hidden, kernel):
        return linear_cross_entropy(
            hidden, kernel, labels, weights, chunk_size=chunk_size
        ).value

    value, grads = jax.value_and_grad(loss, (0, 1))(hidden, kernel)
    wide = hidden.astype(jnp.float32), kernel.astype(jnp.float32)
    wanted, wanted_grads = jax.value_and_grad(
        lambda x, w: by_optax(x, w, labels, weights), (0, 1)
    )(*wide)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for found, leaf in zip(grads, wanted_grads, strict=True):
        assert found.dtype == jnp.bfloat16
        largest = np.abs(leaf).max()
        np.testing.assert_allclose(found.astype(jnp.float32), leaf, atol=0.01 * largest)


def compiled(strategy: Strategy, tokens: tuple[int, int], vocab: int, **options):
    """Compiles, from shapes, the gradients of this loss or of a loss from logits."""
    layout = make_layout(strategy)
    materialised = options.pop("materialised", False)
    embed = options.pop("embed", 64)

    def loss(hidden, kernel, labels):
        with using(layout):
            if materialised:
                return cross_entropy(hidden @ kernel, labels).value
            return linear_cross_entropy(hidden, kernel, labels, **options).value

    def shaped(shape, dtype, *names):
        spec = layout.activation_spec(shape, names)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(spec))

    arrays = (
        shaped((*tokens, embed), jnp.float32, "batch", "seq", "embed"),
        shaped((embed, vocab), jnp.float32, None, "vocab"),
        shaped(tokens, jnp.int32, "batch", None),
    )
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return audit(step.lower(*arrays).compile())


class TestMemoryAndFlops:
    """Tests with 32,768 tokens and a vocabulary of 50,304."""

    TOKENS, VOCAB, EMBED = (16, 2048), 50_304, 256

    def test_chunks_use_tenth_of_memory(self):
        chunked, whole = (
            compiled(
                DataParallel(1),
                self.TOKENS,
                self.VOCAB,
                embed=self.EMBED,
                materialised=materialised,
            )
            for materialised in (False, True)
        )
        assert chunked.temporary_bytes is not None
        assert whole.temporary_bytes is not None
        assert chunked.temporary_bytes <= whole.temporary_bytes / 10
        assert chunked.flops == pytest.approx(whole.flops, rel=1e-3)
        assert whole.flops == 6 * math.prod(self.TOKENS) * self.VOCAB * self.EMBED

    def test_no_device_holds_full_chunk_logits(self):
        """Logits are split over `vocab`, the tokens of a chunk over the batch axes."""
        options = {"chunk_size": 1024, "embed": self.EMBED}
        one = compiled(DataParallel(1), self.TOKENS, self.VOCAB, **options)
        four = compiled(TensorParallel(4), self.TOKENS, self.VOCAB, **options)
        assert one.temporary_bytes is not None
        assert four.temporary_bytes is not None
        logits, hidden = 1024 * self.VOCAB * 4, math.prod(self.TOKENS) * self.EMBED * 4
        assert four.temporary_bytes < one.temporary_bytes / 4 + 3 * hidden
        assert four.temporary_bytes < 2 * logits


@pytest.mark.parametrize(
    ("shape", "vocab_dim", "num_chunks"),
    [
        ((4096, 32_000), 1, 8),  # Llama 2 7B: 1,048 tokens are 128 MiB
        ((4096, 128_256), 1, 8),  # Llama 3 8B: a quarter of embed is 1,024 tokens
        ((151_936, 2560), 0, 13),  # Qwen3 4B: a quarter of embed is 640 tokens
        ((512, 50_304), 1, 13),  # a small model: 667 tokens are 128 MiB
    ],
)
def test_default_chunk_is_128_mib_or_a_quarter_of_the_kernels_gradient(
    shape: tuple[int, int], vocab_dim: int, num_chunks: int
):
    def loss(hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
        return linear_cross_entropy(hidden, kernel, labels, vocab_dim=vocab_dim).value

    shapes = (1, 8192, shape[1 - vocab_dim]), shape
    hidden, kernel = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes)
    labels = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    text = str(jax.make_jaxpr(loss)(hidden, kernel, labels))
    assert re.findall(r"length=(\d+)", text) == [str(num_chunks)]


class TestCommunication:
    TOKENS, VOCAB, EMBED = (8, 64), 96, 32

    def report(self, strategy: Strategy) -> Report:
        return compiled(
            strategy, self.TOKENS, self.VOCAB, embed=self.EMBED, chunk_size=8
        )

    @pytest.mark.parametrize("strategy", [DataParallel(8), FSDP(8)])
    def test_kernel_gradient_is_reduced_once(self, strategy: Strategy):
        report = self.report(strategy)
        assert {each.count for each in report.collectives} == {1}
        assert report.bytes("all-reduce") == self.VOCAB * self.EMBED * 4 + 4
        assert report.bytes() == report.bytes("all-reduce")

    def test_vocab_split_sends_three_numbers_per_token(self):
        report = self.report(TensorParallel(4))
        tokens = math.prod(self.TOKENS)
        assert report.bytes() == tokens * (3 + self.EMBED) * 4

    def test_seq_split_gathers_by_chunk(self):
        report = self.report(TensorParallel(4, sequence=True))
        hidden = math.prod(self.TOKENS) * self.EMBED * 4
        gathers = [c for c in report.collectives if c.kind == "all-gather"]
        assert max(each.bytes_each for each in gathers) == hidden / 64
        # Labels and weights are gathered too.
        assert hidden <= report.bytes("all-gather") <= 1.15 * hidden


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"kernel": jnp.ones((4, 16, 1))},
                "The kernel has shape (4, 16, 1) with vocab_dim=1; it must be (embed, "
                "vocab), or (vocab, embed) with vocab_dim=0.",
            ),
            (
                {"vocab_dim": 0},
                "Hidden states have shape (2, 8, 4); for a kernel of shape (4, 16) "
                "with vocab_dim=0 they must be (batch, seq, 16).",
            ),
            (
                {"labels": jnp.ones((2, 7), jnp.int32)},
                "Labels have shape (2, 7); for hidden states of shape (2, 8, 4) they "
                "must be (2, 8).",
            ),
            (
                {"weights": jnp.ones((2,))},
                "Weights have shape (2,); for hidden states of shape (2, 8, 4)",
            ),
            ({"chunk_size": 0}, "chunk_size is 0; it must be at least 1."),
        ],
    )
    def test_invalid_shapes_raise(self, change: dict, message: str):
        given: dict[str, Any] = {
            "hidden": jnp.ones((2, 8, 4)),
            "kernel": jnp.ones((4, 16)),
            "labels": jnp.ones((2, 8), jnp.int32),
        }
        with pytest.raises(ValueError, match=re.escape(message)):
            linear_cross_entropy(**(given | change))
