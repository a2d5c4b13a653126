"""Mixtures of experts on one device, compared with a loop over single tokens."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from nnx_parallel import (
    FSDP,
    Callback,
    Composite,
    ExpertParallel,
    OneFOneB,
    Pipeline,
    Trainer,
    errors,
)
from nnx_parallel.data import Pad
from nnx_parallel.data.rows import LastBatch
from nnx_parallel.layers import Experts, MoE, named
from nnx_parallel.layers.experts.dispatch import (
    Order,
    collect,
    dispatch,
    sort_by_expert,
)
from nnx_parallel.loggers import ConsoleLogger, Logger
from nnx_parallel.metrics import Mean
from nnx_parallel.models import GPT, GPTConfig, generate, next_token_loss
from nnx_parallel.optimizers import decay_mask, muon_dimension_numbers
from tests.parity.checks import assert_gradients_close
from tests.parity.runs import to_host

pytestmark = pytest.mark.long

ROWS, SEQ, EMBED = 3, 8, 16

MIXTRAL = Experts(num_experts=8, top_k=2, mlp_dim=24)
MIXTURES = {
    "mixtral": MIXTRAL,
    "qwen": replace(MIXTRAL, top_k=4, balance_loss=0.5, balance_over="batch"),
    "not_normalised": replace(MIXTRAL, normalise=False, z_loss=0.1),
    "one": replace(MIXTRAL, top_k=1, normalise=False),
    "deepseek": replace(
        MIXTRAL,
        top_k=3,
        shared_dim=8,
        scores="sigmoid",
        scale=2.5,
        num_groups=4,
        top_groups=2,
        bias_rate=0.01,
        balance_loss=0.5,
    ),
    "llama4": replace(
        MIXTRAL, normalise=False, scores="sigmoid", shared_dim=8, scales_inputs=True
    ),
    "biased": replace(MIXTRAL, top_k=3, use_bias=True, shared_dim=8, shared_gate=True),
    "capacity": replace(MIXTRAL, capacity_factor=1.0),
    "tight": replace(MIXTRAL, top_k=1, normalise=False, capacity_factor=0.5),
}
# The router adds these to the logits of later experts. With 0, it is nearly uniform.
SKEWS = {"uniform": 0.0, "skewed": 1.0, "one": 100.0}
CONFIG = GPTConfig.tiny_experts(num_layers=2, vocab_size=64, seq_len=16, embed_dim=32)


@cache
def inputs(skew: float) -> tuple[jax.Array, jax.Array]:
    x, target = jax.random.normal(jax.random.key(1), (2, ROWS, SEQ, EMBED))
    return x.at[..., 0].set(1.0), target


def make(mixture: Experts, skew: float = 0.0, **more: Any) -> Any:
    moe = MoE(EMBED, mixture, rngs=nnx.Rngs(0), **more)
    preferred = skew * jnp.arange(mixture.num_experts)
    moe.router[...] = moe.router[...].at[0].set(preferred)
    if moe.bias is not None:
        moe.bias[...] = jnp.linspace(-0.2, 0.2, mixture.num_experts)
    if mixture.use_bias:
        for bias in (moe.router_bias, moe.up_bias, moe.gate_bias, moe.down_bias):
            bias[...] = 0.3 * jnp.sin(jnp.arange(bias.size)).reshape(bias.shape)
    return moe


def one_mlp(moe: MoE, expert: jax.Array, x: jax.Array) -> jax.Array:
    def apply(x: jax.Array, kernel: Any, bias: Any) -> jax.Array:
        y = x @ kernel[...][expert]
        return y if bias is None else y + bias[...][expert]

    hidden = apply(x, moe.up, moe.up_bias)
    if moe.gate is None:
        hidden = jax.nn.gelu(hidden)
    else:
        hidden = hidden * jax.nn.silu(apply(x, moe.gate, moe.gate_bias))
    return apply(hidden, moe.down, moe.down_bias)


def slow(moe: MoE, x: jax.Array, choices: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Sends each token through its experts in a loop, as in the papers.

    ``choices`` are the experts of each token, from `chosen_slowly`.
    """
    mixture = moe.experts
    num, k = mixture.num_experts, mixture.top_k
    counts = np.stack([np.bincount(row.ravel(), minlength=num) for row in choices])
    of_batch = mixture.balance_over == "batch"
    shares = (counts * 0 + counts.sum(0)) / ROWS if of_batch else counts
    kept = kept_slowly(choices, mixture.capacity(SEQ), num)

    def token(inputs: tuple) -> tuple[jax.Array, jax.Array]:
        x, share, chosen, is_kept = inputs
        logits = x @ moe.router[...]
        if moe.router_bias is not None:
            logits += moe.router_bias[...]
        is_softmax = mixture.scores == "softmax"
        scores = jax.nn.softmax(logits) if is_softmax else jax.nn.sigmoid(logits)
        total = sum(scores[chosen[j]] for j in range(k)) if mixture.normalise else 1.0
        y = jnp.zeros(EMBED)
        if moe.shared is not None:
            every = moe.shared(x[None, None])[0, 0]
            if moe.shared_gate is not None:
                every *= jax.nn.sigmoid(jnp.sum(x * moe.shared_gate[...]))
            y += every
        for j in range(k):
            weight = is_kept[j] * mixture.scale * scores[chosen[j]] / total
            if mixture.scales_inputs:
                y += one_mlp(moe, chosen[j], weight * x)
            else:
                y += weight * one_mlp(moe, chosen[j], x)
        balance = num / k * jnp.sum(share / SEQ * scores / scores.sum())
        z = jax.nn.logsumexp(logits) ** 2
        return y, mixture.balance_loss * balance + mixture.z_loss * z

    each = (x, np.repeat(shares[:, None], SEQ, axis=1), choices, kept)
    flat = jax.tree.map(lambda a: jnp.reshape(a, (-1, *a.shape[2:])), each)
    y, losses = jax.lax.map(token, flat)
    return y.reshape(x.shape), losses.reshape(x.shape[:2])


def kept_slowly(choices: np.ndarray, capacity: int | None, num: int) -> np.ndarray:
    """Marks the first choices of each expert, up to its capacity."""
    kept = np.ones(choices.shape)
    for row in range(len(choices)):
        taken = np.zeros(num, int)
        for place in np.ndindex(*choices.shape[1:]):
            expert = choices[row][place]
            taken[expert] += 1
            kept[row][place] = capacity is None or taken[expert] <= capacity
    return kept


def chosen_slowly(moe: MoE, x: np.ndarray) -> np.ndarray:
    """The experts of each token, ``(batch, seq, top_k)``, by NumPy."""
    mixture = moe.experts
    logits = np.asarray(x, np.float64) @ np.asarray(moe.router[...], np.float64)
    if moe.router_bias is not None:
        logits += np.asarray(moe.router_bias[...])
    if mixture.scores == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    if moe.bias is not None:
        scores = scores + np.asarray(moe.bias[...])
    size = mixture.num_experts // mixture.num_groups
    found = np.zeros((*x.shape[:2], mixture.top_k), int)
    for place in np.ndindex(*x.shape[:2]):
        own = scores[place]
        groups = [
            np.sort(own[i : i + size])[-2:].sum() for i in range(0, len(own), size)
        ]
        best = np.argsort(groups)[::-1][: mixture.top_groups]
        allowed = [e for e in range(len(own)) if e // size in best]
        found[place] = sorted(allowed, key=lambda e: -own[e])[: mixture.top_k]
    return found


def value(
    graphdef: nnx.GraphDef, run: Any, params: Any, rest: Any, x: Any, target: Any
) -> jax.Array:
    moe = nnx.merge(graphdef, params, rest, copy=True)
    y, losses = run(moe, x)
    return jnp.mean((y - target) ** 2) + jnp.mean(losses)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("name", MIXTURES)
def test_layer_matches_reference(name, skew):
    """Compares the loss and every gradient; the tolerance is 1e-5."""
    moe = make(MIXTURES[name], SKEWS[skew])
    x, target = inputs(0)
    choices = chosen_slowly(moe, np.asarray(x))
    if skew == "one":
        assert len(np.unique(choices)) == moe.experts.top_k
    graphdef, params, rest = nnx.split(moe, nnx.Param, ...)
    runs = (MoE.__call__, partial(slow, choices=choices))
    found, expected = (
        jax.jit(jax.value_and_grad(partial(value, graphdef, run), (0, 2)))(
            params, rest, x, target
        )
        for run in runs
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        of_ours, of_theirs = (
            to_host({"x": t} if isinstance(t, jax.Array) else nnx.to_pure_dict(t))
            for t in (ours, theirs)
        )
        assert_gradients_close(of_ours, of_theirs)


@pytest.mark.parametrize("name", MIXTURES)
def test_padding_does_not_affect_outputs_or_losses(name):
    """Outputs, losses and statistics are the same as those of rows without padding."""
    moe, padded = (make(MIXTURES[name], 1.0) for _ in range(2))
    x, junk = inputs(0)
    segments = jnp.zeros((ROWS, 3 * SEQ), jnp.int32).at[:, SEQ : 2 * SEQ].set(7)
    run = nnx.jit(MoE.__call__)
    y, losses = run(moe, x)
    wide = jnp.concatenate([junk, x, 9 * junk], axis=1)
    found, of_tokens = run(padded, wide, segments=segments)
    np.testing.assert_allclose(found[:, SEQ : 2 * SEQ], y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        of_tokens, jnp.pad(losses, ((0, 0), (SEQ, SEQ))), rtol=1e-5, atol=1e-7
    )
    if moe.shared is None:
        assert not found[:, :SEQ].any()
    assert_same_load(padded, moe)


def test_padding_rows_have_no_loss():
    moe = make(MIXTURES["qwen"])
    x, _ = inputs(0)
    y, losses = moe(x, segments=jnp.zeros((ROWS, SEQ), jnp.int32))
    assert not y.any()
    assert not losses.any()
    assert counts_of(moe) == [0] * 8


def assert_same_load(found: MoE, expected: MoE) -> None:
    for name in ("counts", "dropped", "entropy"):
        values = (getattr(moe, name)[...] for moe in (found, expected))
        np.testing.assert_allclose(*values, rtol=1e-5)


def test_gelu_experts_have_no_gate():
    moe = make(MIXTRAL, activation="gelu")
    x, _ = inputs(0)
    expected, _ = slow(moe, x, chosen_slowly(moe, np.asarray(x)))
    np.testing.assert_allclose(moe(x)[0], expected, atol=1e-5)


def test_dispatch_and_collect_use_only_gathers():
    def loss(x: jax.Array, order: Order) -> jax.Array:
        return jnp.sum(collect(dispatch(x, order) ** 2, order))

    order = sort_by_expert(jnp.array([[2, 0], [1, 2], [3, 3]]), 3, 6)
    assert order.sizes.tolist() == [1, 1, 2]
    assert order.token.tolist() == [0, 1, 0, 1, 2, 2]
    x = jnp.arange(6.0).reshape(3, 2)
    # Choice 3 is not an expert, so token 2 has no gradient.
    np.testing.assert_array_equal(jax.grad(loss)(x, order), [[0, 4], [8, 12], [0, 0]])
    text = str(jax.make_jaxpr(jax.grad(loss))(x, order))
    assert "gather" in text
    assert "scatter" not in text


def sizes_in(jaxpr: Any) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        yield from (v.aval.size for v in eqn.outvars)
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from sizes_in(inner)


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "capacity"])
def test_largest_array_has_row_per_choice(name):
    """In both passes, the largest arrays have one row for each choice of a token."""
    mixture = replace(MIXTURES[name], mlp_dim=32)
    moe = MoE(32, mixture, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(moe, nnx.Param, ...)
    x = jnp.ones((4, 128, 32))
    run = jax.value_and_grad(partial(value, graphdef, MoE.__call__), (0, 2))
    jaxpr = jax.make_jaxpr(run)(params, rest, x, x)
    largest = max(sizes_in(jaxpr.jaxpr))
    assert largest == 4 * 128 * mixture.top_k * 32
    assert largest < 4 * 128 * mixture.num_experts * 32


# Balance


def counts_of(moe: MoE) -> list[int]:
    return moe.counts[...].tolist()


def test_bias_moves_by_counts():
    moe = make(replace(MIXTRAL, bias_rate=0.25, capacity_factor=1.0))
    moe.bias[...] = jnp.zeros(8)
    # 17 tokens are 2 per expert and 1 more.
    moe.counts[...] = jnp.array([3, 2, 1, 2, 0, 4, 2, 3])
    metrics = moe.finish_step()
    np.testing.assert_array_equal(
        moe.bias[...], [-0.25, 0.25, 0.25, 0.25, 0.25, -0.25, 0.25, -0.25]
    )
    assert metrics["expert_load"] == pytest.approx(4 * 8 / 17)
    np.testing.assert_array_equal(metrics["expert_loads"], metrics["expert_load"][None])
    assert counts_of(moe) == [0] * 8
    before = moe.bias[...]
    # The product with 8 fits in 31 bits, but the product with 64 does not.
    moe.counts[...] = jnp.full(8, 2**27)
    moe.finish_step()
    np.testing.assert_array_equal(moe.bias[...], before)
    # This product with 8 fits too.
    moe.counts[...] = jnp.zeros(8, jnp.int32).at[0].set(2**29)
    assert moe.finish_step()["expert_load"] == 8


def test_training_counts_tokens_per_expert():
    moe = make(MIXTURES["tight"], 100.0)
    x, _ = inputs(0)
    for _ in range(2):
        moe(x)
    assert counts_of(moe) == [0] * 7 + [2 * ROWS * SEQ]
    assert moe.dropped[...] == 2 * ROWS * (SEQ - 1)  # the capacity is 1
    metrics = moe.finish_step()
    assert metrics["expert_load"] == 8
    assert metrics["dropped_share"].value == pytest.approx(7 / 8)
    assert metrics["router_entropy"].value == pytest.approx(0, abs=1e-6)
    moe.eval()
    moe(x)
    assert counts_of(moe) == [0] * 8


def test_bias_balances_expert_loads():
    """At first a few experts have most of the load; the bias equalises it."""
    moe = make(replace(MIXTRAL, bias_rate=0.02), 0.5)
    x, _ = inputs(0)
    loads = []
    for _ in range(60):
        moe(x)
        loads.append(float(moe.finish_step()["expert_load"]))
    assert loads[0] > 2.5
    assert min(loads[-5:]) < 1.5


class Layers(Logger):
    """Collects the metrics, like loggers that show each layer."""

    logs_layers = True

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def start(self, *, first_step: int, num_steps: int) -> None:
        pass

    def log(self, step: int, metrics: Any) -> None:
        self.rows.append(dict(metrics))

    def message(self, text: str) -> None:
        pass

    def finish(self) -> None:
        pass


class Stops(Callback):
    """Ends the fit when the load is at least 1, which is true after the first step."""

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        assert not any("/" in name for name in metrics)
        if metrics["expert_load"] >= 1:
            trainer.stop("unbalanced")


def test_layer_loads_go_only_to_layer_loggers():
    """The stages of the pipeline have different layers."""
    experts = replace(MIXTURES["capacity"], bias_rate=0.01)
    config = replace(CONFIG, experts=experts)
    file, layers = io.StringIO(), Layers()
    trainer = Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.sgd(0.1),
        next_token_loss,
        strategy=Composite(ExpertParallel(2), Pipeline(2, OneFOneB())),
        devices=jax.devices()[:4],
        num_microbatches=2,
        callbacks=(Stops(),),
        loggers=(ConsoleLogger(every=1, console=Console(file=file)), layers),
    )
    history = trainer.fit([np.arange(68).reshape(4, 17) % 7] * 9, 9)
    line, of_layers = layers.rows[:2]
    assert of_layers.keys() == {
        f"{name}/blocks.layer.mlp/{index}"
        for name in ("expert_loads", "router_entropies", "dropped_shares")
        for index in range(2)
    }

    def values(name: str) -> list[float]:
        return [of_layers[f"{name}/blocks.layer.mlp/{index}"] for index in range(2)]

    assert 1 < line["expert_load"] == max(values("expert_loads"))
    assert len({*values("expert_loads")}) == 2
    mean = sum(values("router_entropies")) / 2
    assert line["router_entropy"] == pytest.approx(mean)
    assert line["dropped_share"] == pytest.approx(sum(values("dropped_shares")) / 2)
    assert history["expert_load"][0] == line["expert_load"]
    assert len(history["loss"]) < 9
    shown = next(x for x in file.getvalue().splitlines() if " · loss" in x)
    assert shown.count("expert_load") == 1
    assert f"expert_load {line['expert_load']:.3f}" in shown


def padded_trainer() -> Trainer:
    config = replace(CONFIG, experts=replace(MIXTRAL, balance_loss=0.5))
    return Trainer(
        lambda rngs: GPT(config, rngs=rngs),
        optax.sgd(1.0),
        next_token_loss,
        strategy=Composite(ExpertParallel(2), FSDP(2, min_size=0)),
        devices=jax.devices()[:4],
        loggers=(),
    )


def packed_batch(num_rows: int) -> dict[str, np.ndarray]:
    """Two documents per row."""
    tokens = np.random.default_rng(0).integers(0, 64, (num_rows, 17), np.int32)
    segments = np.where(np.arange(17) < 9, 1, 2).astype(np.int32)
    return {"tokens": tokens, "segments": np.tile(segments, (num_rows, 1))}


def test_padding_by_weights_of_mixture_raises():
    batch = packed_batch(4)
    batch["weights"] = np.ones((4, 17), np.float32)
    trainer, message = padded_trainer(), " The router of an MoE counts these rows too: "
    message += (
        "use last_batch=Pad('segments') and pass batch['segments'] to the model, "
    )
    message += "which ignores rows whose segment is 0."
    with pytest.raises(errors.LossError, match=re.escape(message)) as raised:
        trainer.fit([batch], num_steps=1, last_batch=Pad("weights"))
    assert "`blocks.layer.mlp.counts`" in str(raised.value)
    assert trainer.step == 0


def test_padding_by_segments_of_mixture_matches_smaller_batch():
    """The SGD rate is 1, so the change of the parameters is the gradient."""
    batch = packed_batch(4)
    padded = Pad("segments").fill(batch, 8)
    # Padding rows are copies, which would change every value if they counted.
    np.testing.assert_array_equal(padded["tokens"][4:], batch["tokens"][[3] * 4])
    losses, gradients = [], []
    fits: list[tuple[dict, LastBatch]] = [(batch, "error"), (padded, Pad("segments"))]
    for rows, last in fits:
        trainer = padded_trainer()
        before = to_host(trainer.state.params)
        history = trainer.fit([rows], num_steps=1, last_batch=last)
        after = to_host(trainer.state.params)
        losses.append(history["loss"][0])
        gradients.append({name: before[name] - after[name] for name in before})
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert_gradients_close(gradients[1], gradients[0])


class Listed(nnx.Module):
    """Blocks in a list, each with a router."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        mixture = MIXTURES["capacity"]
        self.blocks = nnx.List([MoE(EMBED, mixture, rngs=rngs) for _ in range(3)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = 3 * block(x)[0]  # larger inputs make routers more certain
        return x


def test_listed_blocks_aggregate_layer_metrics():
    """The largest load is the maximum over layers; other metrics are means."""
    layers = Layers()
    trainer = Trainer(
        Listed,
        optax.sgd(0.1),
        lambda model, x: jnp.mean(model(x) ** 2),
        devices=jax.devices()[:1],
        loggers=(layers,),
    )
    trainer.fit([np.asarray(inputs(0)[0])], 1)
    line, of_layers = layers.rows

    def values(name: str) -> list[float]:
        return [of_layers[f"{name}/blocks.{index}/0"] for index in range(3)]

    assert len({*values("router_entropies")}) == len({*values("dropped_shares")}) == 3
    assert line["expert_load"] == max(values("expert_loads"))
    for name, each in (
        ("router_entropy", "router_entropies"),
        ("dropped_share", "dropped_shares"),
    ):
        assert line[name] == pytest.approx(sum(values(each)) / 3)


# Models


def test_presets_have_published_active_sizes():
    # In billions of parameters, rounded as in the papers.
    active = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39, "qwen3-30b-a3b": 3.3}
    active |= {"llama4-scout": 17, "llama4-maverick": 17, "deepseek-v2": 21}
    active |= {"deepseek-v3": 37, "kimi-k2": 32}
    active |= {"qwen3-235b-a22b": 22, "qwen1.5-moe-a2.7b": 2.7, "olmoe-1b-7b": 1.3}
    for name, expected in active.items():
        found = GPTConfig.preset(name).num_active_params / 1e9
        assert found == pytest.approx(expected, rel=0.03), name
    # The model card does not count the embedding.
    for name, expected in {"gpt-oss-20b": 3.61, "gpt-oss-120b": 5.13}.items():
        config = GPTConfig.preset(name)
        found = config.num_active_params - config.vocab_size * config.embed_dim
        assert found / 1e9 == pytest.approx(expected, rel=0.003), name


def test_kernel_initializers_follow_fan_in():
    wide = replace(MIXTRAL, mlp_dim=16, shared_dim=1024)
    moe = MoE(64, wide, rngs=nnx.Rngs(0))
    assert moe.shared is not None
    for kernel, inputs in ((moe.down, 16), (moe.shared.down.kernel, 1024)):
        assert jnp.std(kernel[...]) == pytest.approx(inputs**-0.5, rel=0.1)


def test_capacity_is_not_raised_by_rounding():
    share = replace(MIXTRAL, top_k=2, num_experts=8, capacity_factor=1.1)
    assert share.capacity(200) == 55  # 1.1 * 50 is more than 55 in floating point
    assert share.capacity(202) == 56


def test_sizes_may_be_numpy_integers():
    width: Any = np.int64(16)
    moe = MoE(width, replace(MIXTRAL, top_k=np.int32(2)), rngs=nnx.Rngs(0))
    assert moe.up.shape[1] == 16


def test_uncounted_layer_has_no_weight_in_mean():
    counted, idle = (MoE(16, MIXTRAL, rngs=nnx.Rngs(0)) for _ in range(2))
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    counted(x)
    idle(x, counts_tokens=False)
    own, none = (moe.finish_step()["router_entropy"] for moe in (counted, idle))
    assert isinstance(own, Mean)
    assert isinstance(none, Mean)
    assert float(own.merge(none).value) == float(own.value) > 0


def test_num_params_matches_model():
    for shared, activation, bias in ((0, "swiglu", False), (16, "gelu", True)):
        experts = replace(MIXTRAL, shared_dim=shared)
        config = replace(CONFIG, experts=experts, activation=activation, use_bias=bias)
        model = nnx.eval_shape(lambda config=config: GPT(config, rngs=nnx.Rngs(0)))
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        assert sum(x.size for x in leaves) == config.num_params


def test_generation_matches_forward_pass():
    """Decodes with a cache. Generated tokens do not count for the bias."""
    model = GPT(CONFIG, rngs=nnx.Rngs(0))
    tokens = jnp.arange(8)[None] % 7
    out = generate(model, tokens, max_new_tokens=4, temperature=0.0)
    logits = model(out)[0]
    assert jnp.argmax(logits[7:11], axis=-1).tolist() == out[0, 8:].tolist()


def test_router_losses_weigh_predicted_tokens():
    experts = replace(MIXTRAL, z_loss=0.1)
    models = [
        GPT(replace(CONFIG, experts=each), rngs=nnx.Rngs(0))
        for each in (experts, MIXTRAL)
    ]
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 64)
    _, losses = models[0].hidden_and_losses(tokens[:, :-1])
    weights = jnp.ones((2, 9)).at[0, 4:].set(0)
    batch = {"tokens": tokens, "weights": weights}
    more, less = (next_token_loss(model, batch).value for model in models)
    assert losses is not None
    expected = jnp.sum(losses * weights[:, 1:]) / jnp.sum(weights[:, 1:])
    np.testing.assert_allclose(more - less, expected, rtol=1e-4)


def test_optimizers_see_one_matrix_per_expert():
    model = nnx.eval_shape(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))
    mlp = muon_dimension_numbers(model)["blocks"]["layer"]["mlp"]
    # (layers, experts, in, out)
    for name in ("up", "gate", "down"):
        assert mlp[name] == optax.contrib.MuonDimensionNumbers((2,), (3,))
    assert decay_mask(model)["blocks"]["layer"]["mlp"]["up"]
    alone = nnx.eval_shape(lambda: MoE(16, MIXTRAL, rngs=nnx.Rngs(0)))
    for name in ("up", "gate", "down"):
        found = muon_dimension_numbers(alone)[name]
        assert found == optax.contrib.MuonDimensionNumbers((1,), (2,))
    assert all(jax.tree.leaves(decay_mask(alone)))


def test_expert_vectors_do_not_decay():
    init = named(nnx.initializers.ones_init(), "expert", "mlp")
    scales = nnx.Param(init(jax.random.key(0), (8, 24)))
    model = nnx.Dict({"moe": MoE(16, MIXTRAL, rngs=nnx.Rngs(0)), "each": scales})
    mask = decay_mask(model)
    assert mask["each"] is False
    assert mask["moe"]["router"]


def test_muon_orthogonalises_each_expert_separately():
    """Each expert's matrix is updated like a separate parameter."""
    moe = MoE(16, replace(MIXTRAL, num_experts=2), rngs=nnx.Rngs(0))
    params: Any = nnx.to_pure_dict(nnx.state(moe, nnx.Param))
    draw = partial(jax.random.normal, jax.random.key(1))
    grads = jax.tree.map(lambda x: draw(x.shape), params)
    dims = muon_dimension_numbers(moe)

    def updates(grads: Any, params: Any, dims: Any = None) -> Any:
        tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=dims)
        return tx.update(grads, tx.init(params), params)[0]

    found = updates(grads, params, dims)
    for index in range(2):
        each = updates(*({"up": x["up"][index]} for x in (grads, params)))
        np.testing.assert_allclose(found["up"][index], each["up"], atol=1e-5)


# Errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "Experts.top_k is 9; it must be 1 to num_experts=8."),
        (
            {"num_groups": 3},
            "Experts.num_groups is 3; it must be a divisor of num_experts=8.",
        ),
        (
            {"num_groups": 8, "top_groups": 1},
            "Experts.top_groups is 1: 1 of 8 groups have only 1 experts, but a token "
            "goes to top_k=2. top_groups must be at least 2.",
        ),
        ({"scores": "tanh"}, "Experts.scores is 'tanh'; it must be one of"),
        (
            {"num_groups": 4, "top_groups": 0},
            "Experts.top_groups is 0; it must be 1 to num_groups=4.",
        ),
        ({"capacity_factor": 0.0}, "is 0.0; it must be above 0, or None."),
        ({"capacity_factor": -1.25}, "is -1.25; it must be above 0, or None."),
        ({"capacity_factor": float("inf")}, "is inf; it must be above 0, or None."),
        ({"top_k": 0}, "Experts.top_k is 0; it must be 1 to num_experts=8."),
        (
            {"top_k": 1},
            "Experts.normalise is True with top_k=1: the weight of a token's only "
            "expert would always be 1, and the router would get no gradient from it. "
            "Set normalise=False, or top_k to 2 or more.",
        ),
        ({"scores": ("softmax",)}, "Experts.scores is a tuple; it must be one of"),
        ({"top_k": 2.0}, "Experts.top_k is 2.0; it must be an int."),
        ({"mlp_dim": None}, "Experts.mlp_dim is None; it must be an int."),
        ({"num_experts": "8"}, "Experts.num_experts is '8'; it must be an int."),
        ({"num_experts": True}, "Experts.num_experts is True; it must be an int."),
        ({"mlp_dim": -24}, "Experts.mlp_dim is -24; it must be at least 1."),
        ({"shared_dim": -1}, "Experts.shared_dim is -1; it must be at least 0."),
        ({"shared_gate": True}, "shared_gate is True; it must be False without shared"),
        ({"scores": jax.nn.softmax}, "Experts.scores is a function; it must be one of"),
        ({"normalise": "no"}, "Experts.normalise is 'no'; it must be True or False."),
        ({"scale": "1"}, "Experts.scale is '1'; it must be a finite number."),
        ({"scale": 0.0}, "Experts.scale is 0.0; it must be above 0."),
        ({"bias_rate": None}, "Experts.bias_rate is None; it must be a finite number."),
        ({"bias_rate": True}, "Experts.bias_rate is True; it must be a finite number."),
        (
            {"balance_loss": [0.1]},
            "Experts.balance_loss is a list; it must be a finite number.",
        ),
        ({"balance_loss": -1}, "Experts.balance_loss is -1; it must be at least 0."),
        (
            {"z_loss": float("nan")},
            "Experts.z_loss is nan; it must be a finite number.",
        ),
        ({"capacity_factor": "1.25"}, "is '1.25'; it must be above 0, or None."),
    ],
)
def test_invalid_experts_config_raises(changes, message):
    with pytest.raises(errors.ExpertsError, match=re.escape(message)):
        replace(MIXTRAL, **changes)


NO_MIXTURE = "must be an Experts, such as Experts(num_experts=8, top_k=2, mlp_dim=64)."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": 8}, f"MoE.experts is 8; it {NO_MIXTURE}"),
        ({"experts": None}, f"MoE.experts is None; it {NO_MIXTURE}"),
        ({"experts": {"top_k": 2}}, f"MoE.experts is a dict; it {NO_MIXTURE}"),
        ({"experts": Experts}, f"MoE.experts is the class Experts; it {NO_MIXTURE}"),
        (
            {"embed_dim": MIXTRAL, "experts": 32},
            "MoE.embed_dim is an Experts; it must be an int of at least 1.",
        ),
        ({"embed_dim": -4}, "MoE.embed_dim is -4; it must be an int of at least 1."),
        ({"embed_dim": 16.0}, "MoE.embed_dim is 16.0; it must be an int of at least 1"),
        ({"rngs": 0}, "MoE.rngs is 0; it must be an nnx.Rngs, such as nnx.Rngs(0)."),
        (
            {"activation": "relu"},
            "MoE.activation is 'relu'; it must be one of ('gelu', 'swiglu', 'geglu', "
            "'clamped_swiglu').",
        ),
        (
            {"kernel_init": 0.02},
            "MoE.kernel_init is 0.02; it must be an initializer, such as "
            "nnx.initializers.normal(0.02), or None.",
        ),
    ],
)
def test_invalid_layer_arguments_raise(arguments, message):
    given = {"embed_dim": 16, "experts": MIXTRAL, "rngs": nnx.Rngs(0), **arguments}
    with pytest.raises(errors.ExpertsError, match=re.escape(message)):
        MoE(**given)


@pytest.mark.parametrize("shape", [(8, 16), (2, 8, 12)])
def test_input_of_wrong_shape_raises(shape):
    message = f"MoE(16) got x of shape {shape}; it must be (batch, seq, 16)"
    with pytest.raises(errors.ExpertsError, match=re.escape(message)):
        make(MIXTRAL)(jnp.ones(shape))


@pytest.mark.parametrize(
    ("segments", "found"),
    [
        (jnp.ones((2, 7), jnp.int32), "int32 (2, 7)"),
        (jnp.ones((2, 8)), "float32 (2, 8)"),
        ([[1] * 8] * 2, "a list"),
    ],
)
def test_invalid_segments_raise(segments, found):
    message = f"MoE got segments {found}; they must be int (2, 8), the id of each token"
    with pytest.raises(errors.ExpertsError, match=re.escape(message)):
        make(MIXTRAL)(jnp.ones((2, 8, 16)), segments=segments)


def test_input_of_wrong_type_raises():
    message = "MoE(16) got a list; it must be (batch, seq, 16)"
    with pytest.raises(errors.ExpertsError, match=re.escape(message)):
        make(MIXTRAL)([[[0.0] * 16]])


def test_experts_of_wrong_type_raise():
    message = "GPTConfig.experts is 8; it must be an Experts(...), or None."
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CONFIG, experts=8)


def test_dense_layers_of_wrong_type_raise():
    message = "GPTConfig.dense_layers is '1'; it must be an int."
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CONFIG, dense_layers="1")


def test_mlp_dim_with_experts_raises():
    message = (
        "GPTConfig.mlp_dim is 64, which needs experts=None or dense_layers or "
        "expert_layers: the width of experts is Experts.mlp_dim."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CONFIG, mlp_dim=64)
