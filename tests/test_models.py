"""The models match their papers, on one device and on a mesh."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from nnx_parallel.audit import audit
from nnx_parallel.metrics import Mean
from nnx_parallel.models import (
    GPT,
    GPTConfig,
    MLPClassifier,
    MLPClassifierConfig,
    classification_loss,
    generate,
    next_token_loss,
)
from nnx_parallel.models.gpt import Attention, Block
from nnx_parallel.sharding import FSDPRules, Layout, using
from nnx_parallel.sharding.nnx_arrays import array_info, variables_of
from nnx_parallel.strategies import Claims, ZeroAxis

pytestmark = pytest.mark.long

SMALL = {"vocab_size": 64, "seq_len": 16, "num_layers": 2, "embed_dim": 32}
GPT2 = GPTConfig.tiny(**SMALL)
LLAMA = GPTConfig.tiny_llama(**SMALL, mlp_dim=48)
CLASSIFIER = MLPClassifierConfig(num_features=6, num_classes=3, embed_dim=8, mlp_dim=16)
both_shapes = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])


def build(config: GPTConfig) -> GPT:
    return GPT(config, rngs=nnx.Rngs(0))


def random_tokens(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, SMALL["vocab_size"])


def change_params(model: GPT, change: Callable[[jax.Array], jax.Array]) -> GPT:
    """The model with changed floating-point arrays; other arrays stay as they are."""
    return jax.tree.map(
        lambda x: change(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, model
    )


apply = jax.jit(lambda model, inputs: model(inputs))
apply_and_keep = jax.jit(lambda model, inputs: (model(inputs), model))
token_loss = jax.jit(next_token_loss)
label_loss = jax.jit(classification_loss)
greedily = jax.jit(
    functools.partial(generate, temperature=0), static_argnames="max_new_tokens"
)


# Shapes, names and sizes


@both_shapes
def test_logits_have_one_row_per_token(config: GPTConfig) -> None:
    logits = apply(build(config), random_tokens(3, 8))
    assert logits.shape == (3, 8, 64)
    assert logits.dtype == jnp.float32


@both_shapes
def test_activations_follow_parameters_cast_to_bfloat16(config: GPTConfig) -> None:
    model, tokens = build(replace(config, dropout=0.2)), random_tokens(3, 9)
    cast = change_params(model, lambda x: x.astype(jnp.bfloat16))
    assert jax.eval_shape(apply, cast, tokens).dtype == jnp.bfloat16
    loss = token_loss(cast, tokens)
    assert loss.total.dtype == jnp.float32
    np.testing.assert_allclose(loss.value, jnp.log(64.0), rtol=0.02)
    assert greedily(cast, tokens, max_new_tokens=2).shape == (3, 11)


@both_shapes
def test_later_token_does_not_change_earlier_logits(config: GPTConfig) -> None:
    model, tokens = build(config), random_tokens(3, 8)
    changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % 64)
    before, after = apply(model, tokens), apply(model, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert jnp.abs(before[:, 5:] - after[:, 5:]).max(axis=(0, 2)).min() > 1e-6


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (GPTConfig.gpt2_124m(), 124_439_808),
        (GPTConfig.gpt_1_3b(), 1_315_819_520),
        (GPTConfig.llama3_8b(), 8_030_261_248),
        (GPTConfig.llama3_70b(), 70_553_706_496),
        (GPTConfig.tiny(), None),
        (GPTConfig.tiny_llama(), None),
        (GPTConfig.tiny(use_bias=False, head_dim=24, tied=False), None),
        (GPTConfig.tiny_llama(use_bias=True, norm="layer"), None),
        (GPTConfig.tiny(block="parallel"), None),
        (GPTConfig.tiny_llama(block="parallel"), None),
    ],
)
def test_num_params_matches_model_and_publication(
    config: GPTConfig, num_params: int | None
) -> None:
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    own = sum(v.get_value().size for _, v in variables_of(model))
    assert config.num_params == own
    assert num_params in (None, own)


@both_shapes
def test_flops_per_token_match_compiled_gradient(config: GPTConfig) -> None:
    def loss(model: GPT, tokens: jax.Array) -> jax.Array:
        return next_token_loss(model, tokens).value

    step = jax.jit(jax.grad(loss)).lower(build(config), random_tokens(4, 17))
    assert audit(step.compile()).flops == 4 * 16 * config.flops_per_token(16)


@both_shapes
def test_every_gpt_parameter_dim_is_named(config: GPTConfig) -> None:
    for path, variable in variables_of(build(config)):
        info = array_info(path, variable)
        assert info.names is not None, info.path
        assert None not in info.names, info.path
        sizes = config.sizes | {"layers": config.num_layers, "seq": config.seq_len}
        assert info.shape == tuple(sizes[str(name)] for name in info.names)


def test_classifier_leaves_features_and_classes_unnamed() -> None:
    model = MLPClassifier(CLASSIFIER, rngs=nnx.Rngs(0))
    infos = [array_info(path, variable) for path, variable in variables_of(model)]
    unnamed = {
        info.path: info.shape[dim]
        for info in infos
        for dim, name in enumerate(info.names or (None,))
        if name is None
    }
    assert unnamed == {"inputs.kernel": 6, "head.kernel": 3, "head.bias": 3}


def test_residual_outputs_start_smaller_with_depth() -> None:
    layer: Any = build(GPT2).blocks.layer
    for name, kernel, std in (
        ("out", layer.attention.out.kernel, 0.01),
        ("down", layer.mlp.down.kernel, 0.01),
        ("up", layer.mlp.up.kernel, 0.02),
        ("query", layer.attention.query.kernel, 0.02),
    ):
        np.testing.assert_allclose(kernel[...].std(), std, rtol=0.05, err_msg=name)


def test_parallel_block_adds_attention_and_mlp() -> None:
    block = Block(replace(GPT2, block="parallel"), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 8, GPT2.embed_dim))
    assert block.attention_norm is not None
    normed = block.attention_norm(x)
    attended, _ = block.attention(normed, 0, None)
    found: Any = block(x)
    through: Any = block.mlp(normed)
    np.testing.assert_allclose(found, x + attended + through, rtol=1e-6)


# Attention


def reference_attention(layer: Attention, x: np.ndarray, theta: float) -> np.ndarray:
    """Attention of one row in float64: RoPE by complex numbers, one head at a time."""
    query, key, value, out = (
        np.asarray(dense.kernel[...], np.float64)
        for dense in (layer.query, layer.key, layer.value, layer.out)
    )
    seq_len, num_heads, half = x.shape[0], query.shape[1], query.shape[2] // 2
    turn = np.exp(1j * np.outer(np.arange(seq_len), theta ** -(np.arange(half) / half)))
    result = np.zeros_like(x)
    for head in range(num_heads):
        kv_head = head * key.shape[1] // num_heads
        q, k = x @ query[:, head], x @ key[:, kv_head]
        q = (q[:, :half] + 1j * q[:, half:]) * turn
        k = (k[:, :half] + 1j * k[:, half:]) * turn
        scores = (q @ k.conj().T).real / np.sqrt(2 * half)
        scores[np.triu_indices(seq_len, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        result += weights @ (x @ value[:, kv_head]) @ out[head]
    return result


def build_attention(config: GPTConfig) -> Attention:
    """The first layer's attention, with scores of order 1: softmax is not uniform."""
    stacked: Any = build(config).blocks.layer
    return jax.tree.map(lambda x: 30 * x[0], stacked.attention)


attend = jax.jit(lambda layer, x, start=0: layer(x, start, None)[0])


def test_rope_attention_matches_reference() -> None:
    layer = build_attention(replace(LLAMA, rope_theta=100.0))
    x = jax.random.normal(jax.random.key(2), (1, 12, 32))
    expected = reference_attention(layer, np.asarray(x[0], np.float64), 100.0)
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(attend(layer, x)[0], expected, atol=tolerance)


def test_rope_depends_only_on_distances() -> None:
    layer = build_attention(LLAMA)
    x = jax.random.normal(jax.random.key(2), (1, 12, 32))
    here, there = attend(layer, x, 0), attend(layer, x, 5)
    np.testing.assert_allclose(there, here, atol=1e-5 * float(jnp.abs(here).max()))


def test_grouped_heads_match_repeated_heads() -> None:
    grouped = build_attention(LLAMA)
    full = build_attention(replace(LLAMA, num_kv_heads=4))
    full.query, full.out = grouped.query, grouped.out
    full.key.kernel[...] = jnp.repeat(grouped.key.kernel[...], 2, axis=1)
    full.value.kernel[...] = jnp.repeat(grouped.value.kernel[...], 2, axis=1)
    x = jax.random.normal(jax.random.key(2), (1, 12, 32))
    out, expected = attend(grouped, x), attend(full, x)
    np.testing.assert_allclose(out, expected, atol=1e-5 * float(jnp.abs(out).max()))


# Loss


def optax_losses(model: GPT, tokens: jax.Array) -> jax.Array:
    logits = apply(model, tokens[:, :-1])
    return jnp.asarray(
        optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    )


@both_shapes
def test_next_token_loss_matches_optax(config: GPTConfig) -> None:
    model, tokens = build(config), random_tokens(3, 9)
    loss = token_loss(model, tokens)
    expected = optax_losses(model, tokens).mean()
    np.testing.assert_allclose(loss.value, expected, rtol=1e-6)
    assert loss.weight == 24


def test_tokens_of_weight_zero_are_ignored() -> None:
    model, tokens = build(GPT2), random_tokens(3, 9)
    weights = jnp.ones((3, 9)).at[0, 5:].set(0)
    loss = token_loss(model, {"tokens": tokens, "weights": weights})
    losses = optax_losses(model, tokens)
    counted = losses[0, :4].sum() + losses[1:].sum()
    np.testing.assert_allclose(loss.value, counted / (4 + 16), rtol=1e-6)
    assert loss.weight == 4 + 16


def test_z_loss_adds_squared_normaliser() -> None:
    model, tokens = build(GPT2), random_tokens(3, 9)
    normaliser = jax.nn.logsumexp(apply(model, tokens[:, :-1]), axis=-1)
    expected = token_loss(model, tokens).value + 0.1 * (normaliser**2).mean()
    with_z_loss = token_loss(build(replace(GPT2, z_loss=0.1)), tokens)
    np.testing.assert_allclose(with_z_loss.value, expected, rtol=1e-6)


def test_token_outside_vocabulary_gives_nonfinite_loss() -> None:
    tokens = random_tokens(3, 9).at[1, 3].set(64)
    assert not jnp.isfinite(token_loss(build(GPT2), tokens).value)


def test_classification_loss_matches_optax() -> None:
    model = MLPClassifier(CLASSIFIER, rngs=nnx.Rngs(0))
    inputs = jax.random.normal(jax.random.key(0), (12, 6))
    labels = jnp.arange(12) % 3
    loss, metrics = label_loss(model, {"inputs": inputs, "labels": labels})
    logits = apply(model, inputs)
    assert logits.shape == (12, 3)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    np.testing.assert_allclose(loss.value, expected, rtol=1e-6)
    accuracy = (logits.argmax(axis=1) == labels).mean()
    assert metrics["accuracy"].value == pytest.approx(float(accuracy))


# Training, without the framework


def train(
    model: nnx.Module, loss: Callable[..., Mean], *, num_steps: int
) -> tuple[nnx.Module, list[float]]:
    graphdef, params = nnx.split(model)
    tx = optax.adamw(1e-2)

    @jax.jit
    def step(params: nnx.State, opt_state: optax.OptState) -> tuple:
        value, grads = jax.value_and_grad(
            lambda params: loss(nnx.merge(graphdef, params)).value
        )(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = tx.init(params), []
    for _ in range(num_steps):
        params, opt_state, value = step(params, opt_state)
        losses.append(float(value))
    return nnx.merge(graphdef, params), losses


@both_shapes
def test_gpt_memorizes_four_sequences(config: GPTConfig) -> None:
    tokens = random_tokens(4, 17)
    model, losses = train(
        build(config), lambda model: next_token_loss(model, tokens), num_steps=50
    )
    assert losses[0] == pytest.approx(np.log(64), rel=0.02)
    assert losses[-1] < 0.05
    made = greedily(model, tokens[:, :4], max_new_tokens=12)
    np.testing.assert_array_equal(made, tokens[:, :16])


def test_classifier_memorizes_random_labels() -> None:
    batch = {
        "inputs": jax.random.normal(jax.random.key(0), (12, 6)),
        "labels": jnp.arange(12) % 3,
    }
    model, losses = train(
        MLPClassifier(CLASSIFIER, rngs=nnx.Rngs(0)),
        lambda model: classification_loss(model, batch)[0],
        num_steps=60,
    )
    assert losses[-1] < 0.05
    _, metrics = label_loss(model, batch)
    assert metrics["accuracy"].value == 1


# Dropout


@both_shapes
def test_dropout_differs_by_step_only_in_training(config: GPTConfig) -> None:
    model, tokens = build(replace(config, dropout=0.2)), random_tokens(3, 8)
    first, later = apply_and_keep(model, tokens)
    second, _ = apply_and_keep(later, tokens)
    assert jnp.abs(first - second).max() > 1e-3
    model.eval()
    evaluated, later = apply_and_keep(model, tokens)
    np.testing.assert_array_equal(apply_and_keep(later, tokens)[0], evaluated)
    np.testing.assert_allclose(evaluated, apply(build(config), tokens), atol=1e-6)


def test_dropout_masks_differ_by_layer_and_branch() -> None:
    _, model = apply_and_keep(build(replace(GPT2, dropout=0.2)), random_tokens(3, 8))
    layer: Any = model.blocks.layer
    keys = jax.random.key_data(layer.dropout.rngs.key[...])
    assert (keys[0] != keys[1]).any()
    np.testing.assert_array_equal(layer.dropout.rngs.count[...], [2, 2])


def test_classifier_evaluates_without_dropout() -> None:
    model = MLPClassifier(replace(CLASSIFIER, dropout=0.5), rngs=nnx.Rngs(0))
    inputs = jax.random.normal(jax.random.key(0), (12, 6))
    first, later = apply_and_keep(model, inputs)
    assert jnp.abs(first - apply_and_keep(later, inputs)[0]).max() > 1e-3
    model.eval()
    later.eval()
    np.testing.assert_array_equal(apply(model, inputs), apply(later, inputs))


def test_model_without_dropout_holds_only_parameters() -> None:
    assert all(isinstance(v, nnx.Param) for _, v in variables_of(build(GPT2)))


# Generation


def generate_without_cache(model: GPT, prompt: jax.Array, num_new: int) -> jax.Array:
    """Runs the model on all tokens for each new one; later tokens are 0."""
    tokens = jnp.pad(prompt, ((0, 0), (0, num_new)))
    for position in range(prompt.shape[1], tokens.shape[1]):
        following = apply(model, tokens)[:, position - 1].argmax(axis=-1)
        tokens = tokens.at[:, position].set(following)
    return tokens


def with_decided_logits(config: GPTConfig) -> GPT:
    """A GPT with larger parameters, so that greedy choices are clear."""
    return change_params(build(config), lambda x: 4 * x)


@both_shapes
def test_greedy_generation_matches_full_forward_passes(config: GPTConfig) -> None:
    model, prompt = with_decided_logits(config), random_tokens(3, 5)
    expected = generate_without_cache(model, prompt, 6)
    assert len(np.unique(expected[:, 5:])) > 3
    np.testing.assert_array_equal(greedily(model, prompt, max_new_tokens=6), expected)


def test_eager_generation_uses_no_dropout() -> None:
    model = with_decided_logits(replace(GPT2, dropout=0.2))
    before = nnx.state(model)
    prompt = random_tokens(2, 5)
    made = generate(model, prompt, max_new_tokens=4, temperature=0)
    expected = greedily(with_decided_logits(GPT2), prompt, max_new_tokens=4)
    np.testing.assert_array_equal(made, expected)
    assert made.dtype == prompt.dtype
    assert not model.dropout.deterministic
    for old, new in zip(
        jax.tree.leaves(before), jax.tree.leaves(nnx.state(model)), strict=True
    ):
        assert old is new


def test_sampling_follows_key_and_probabilities() -> None:
    model = with_decided_logits(GPT2)
    prompt = jnp.broadcast_to(random_tokens(1, 3), (4000, 3))
    sample = jax.jit(
        functools.partial(generate, max_new_tokens=1), static_argnames="top_k"
    )
    tokens = sample(model, prompt, key=jax.random.key(0))[:, -1]
    expected = jax.nn.softmax(apply(model, prompt[:1])[0, -1])
    found = jnp.bincount(tokens, length=64) / 4000
    np.testing.assert_allclose(found, expected, atol=0.03)
    again = sample(model, prompt, key=jax.random.key(0))[:, -1]
    np.testing.assert_array_equal(again, tokens)
    assert (sample(model, prompt, key=jax.random.key(1))[:, -1] != tokens).any()
    top = sample(model, prompt, key=jax.random.key(0), top_k=3)[:, -1]
    assert set(np.unique(top)) == set(np.argsort(expected)[-3:].tolist())


def test_rope_generates_beyond_seq_len() -> None:
    made = jax.eval_shape(
        functools.partial(generate, max_new_tokens=10, temperature=0),
        build(LLAMA),
        random_tokens(1, 10),
    )
    assert made.shape == (1, 20)


def place(model: GPT, layout: Layout) -> GPT:
    for path, variable in variables_of(model):
        placement = layout.place(array_info(path, variable))
        sharding = layout.sharding(placement.stored)
        variable.set_value(jax.device_put(variable.get_value(), sharding))
        variable.set_metadata(placement=placement)
    return model


@pytest.mark.parametrize(
    ("config", "shards_params"),
    [(GPT2, False), (LLAMA, True)],
    ids=["gpt2-tensor", "llama-tensor-fsdp"],
)
def test_generation_on_mesh_matches_one_device(
    config: GPTConfig, shards_params: bool
) -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    layout = Layout(
        mesh=mesh,
        claims=Claims(
            batch=("fsdp",),
            logical=dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor"),
            zero=(ZeroAxis(rules=FSDPRules(min_size=0)),) if shards_params else (),
        ),
    )
    prompt = random_tokens(4, 5)
    expected = greedily(with_decided_logits(config), prompt, max_new_tokens=6)
    with using(layout):
        model = place(with_decided_logits(config), layout)
        made = jax.jit(functools.partial(generate, max_new_tokens=6, temperature=0))(
            model, jax.device_put(prompt, layout.sharding(layout.batch_spec(4)))
        )
    np.testing.assert_array_equal(made, expected)


# Errors


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 0}, "GPTConfig.vocab_size is 0; it must be at least 1."),
        ({"num_kv_heads": 0}, "GPTConfig.num_kv_heads is 0; it must be at least 1."),
        ({"mlp_dim": -4}, "GPTConfig.mlp_dim is -4; it must be at least 1."),
        (
            {"norm": "batch"},
            "GPTConfig.norm is 'batch'; it must be one of ('layer', 'rms').",
        ),
        (
            {"positions": "alibi"},
            "GPTConfig.positions is 'alibi'; it must be one of ('learned', 'rope').",
        ),
        (
            {"activation": "relu"},
            "GPTConfig.activation is 'relu'; it must be one of ('gelu', 'swiglu', "
            "'geglu', 'clamped_swiglu').",
        ),
        (
            {"block": "serial"},
            "GPTConfig.block is 'serial'; it must be one of ('sequential', "
            "'parallel').",
        ),
        ({"rope_theta": 0.0}, "GPTConfig.rope_theta is 0.0; it must be above 0."),
        (
            {"dropout": 1.0},
            "GPTConfig.dropout is 1.0; it must be a probability in [0, 1).",
        ),
        ({"z_loss": -1.0}, "GPTConfig.z_loss is -1.0; it must be at least 0."),
        ({"remat": "all"}, "Unknown remat policy 'all'."),
        (
            {"num_heads": 5},
            "GPTConfig.num_heads is 5, which does not divide embed_dim=64. Set "
            "embed_dim to a multiple of 5, or set head_dim.",
        ),
        (
            {"num_kv_heads": 3},
            "GPTConfig.num_kv_heads is 3, which does not divide num_heads=4. Each key "
            "head must be shared by the same number of query heads. Set num_kv_heads "
            "to one of [1, 2, 4].",
        ),
        (
            {"positions": "rope", "head_dim": 7},
            "GPTConfig.head_dim is 7, but positions='rope' rotates features in pairs: "
            "head_dim must be even.",
        ),
    ],
)
def test_invalid_gpt_config_raises(overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GPTConfig.tiny(**overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mlp_dim": 0}, "MLPClassifierConfig.mlp_dim is 0; it must be at least 1."),
        (
            {"dropout": -0.5},
            "MLPClassifierConfig.dropout is -0.5; it must be a probability in [0, 1).",
        ),
    ],
)
def test_invalid_classifier_config_raises(overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(CLASSIFIER, **overrides)


def test_sequence_beyond_learned_positions_raises() -> None:
    message = (
        "A sequence has 17 tokens, but there are only GPTConfig.seq_len=16 learned "
        "positions. Shorten the sequence, raise seq_len, or use positions='rope'."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        build(GPT2)(random_tokens(1, 17))
    with pytest.raises(ValueError, match=re.escape(message)):
        greedily(build(GPT2), random_tokens(1, 7), max_new_tokens=10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"max_new_tokens": 0, "temperature": 0},
            "max_new_tokens is 0; it must be at least 1.",
        ),
        (
            {"max_new_tokens": 1, "temperature": -1.0},
            "temperature is -1.0; it must be at least 0 (greedy).",
        ),
        (
            {"max_new_tokens": 1},
            "Sampling at temperature 1.0 needs a key. Pass key=jax.random.key(0), or "
            "temperature=0 to choose the likeliest token.",
        ),
        (
            {"max_new_tokens": 1, "temperature": 0, "top_k": 65},
            "top_k is 65; it must be from 1 to 64, the number of tokens in the "
            "vocabulary, or None for all tokens.",
        ),
    ],
)
def test_invalid_generation_arguments_raise(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(build(GPT2), random_tokens(1, 3), **arguments)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            jnp.zeros((4,), jnp.int32),
            "Tokens have shape (4,); they must be (batch, seq + 1), the input and one "
            "more label, with seq at least 1.",
        ),
        (
            {"tokens": jnp.zeros((2, 5), jnp.int32), "weights": jnp.ones((2, 4))},
            "Weights have shape (2, 4), but tokens have shape (2, 5); the shapes must "
            "be equal.",
        ),
    ],
)
def test_invalid_loss_batch_raises(batch: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        next_token_loss(build(GPT2), batch)  # pyright: ignore[reportArgumentType]
