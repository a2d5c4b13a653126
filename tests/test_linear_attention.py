"""The gated delta rule, linear attention, and Qwen3-Next beyond `test_families.py`."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.test_util import check_grads
from safetensors.flax import load_file, save_file

from nnx_parallel import (
    FSDP,
    Composite,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import IndivisibleDimError, StackError
from nnx_parallel.layers import Experts
from nnx_parallel.layers.delta_rule import gated_delta_rule, invert_unit_lower
from nnx_parallel.layers.stack.stack import ByBlock
from nnx_parallel.models import (
    GPT,
    DeltaNet,
    GPTConfig,
    config_from_hf,
    config_to_hf,
    generate,
    next_token_loss,
    pad_prompts,
)
from nnx_parallel.weights import save_pretrained
from tests.folders import GOLDENS, check_equal, content
from tests.parity.checks import assert_each_gradient_close
from tests.parity.runs import to_host

pytestmark = pytest.mark.long

FOLDER = GOLDENS / "qwen3_next"
DELTA = DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_len=3)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "seq_len": 256,
    "num_layers": 4,
    "embed_dim": 32,
    "num_heads": 4,
    "norm": "rms",
    "positions": "rope",
    "activation": "swiglu",
    "use_bias": False,
    "tied": False,
    "delta_net": DELTA,
    "linear_layers": (True, False),
}


def make_config(**changes: Any) -> GPTConfig:
    return GPTConfig(**SIZES | changes)


def golden() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "logits.npz") as file:
        return dict(file)


def load() -> GPT:
    return cast(GPT, GPT.from_pretrained(FOLDER, dtype="float32")(nnx.Rngs(0)))


@nnx.jit
def run(model: GPT, rows: Any, segments: jax.Array | None = None) -> jax.Array:
    return model(rows, segments)


go_on: Any = nnx.jit(generate, static_argnames=("max_new_tokens", "temperature"))


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 64, shape, np.int32)


def check_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compares arrays, relative to the largest expected number."""
    expected = np.asarray(expected)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest)


# The rule


def step_by_step(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    log_decay: np.ndarray,
    rate: np.ndarray,
    is_first: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of the docstring, token by token and head by head."""
    out, state = np.zeros(value.shape), state.astype(np.float64).copy()
    for b, h, g in np.ndindex(*state.shape[:3]):
        memory = state[b, h, g]  # (key_dim, value_dim)
        for t in range(value.shape[1]):
            if is_first[b, t]:
                memory = np.zeros_like(memory)
            memory = np.exp(log_decay[b, t, h, g]) * memory
            missing = value[b, t, h, g] - key[b, t, h] @ memory
            memory = memory + rate[b, t, h, g] * np.outer(key[b, t, h], missing)
            out[b, t, h, g] = query[b, t, h] @ memory
        state[b, h, g] = memory
    return out, state


def draw(length: int, seed: int = 0) -> list[np.ndarray]:
    """Two rows, of which the second has three documents and slow decays."""
    rng = np.random.default_rng(seed)
    heads, group, key_dim, value_dim = 2, 3, 5, 4
    query, key = rng.normal(size=(2, 2, length, heads, key_dim))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.normal(size=(2, length, heads, group, value_dim))
    log_decay = -rng.exponential(size=(2, length, heads, group))
    log_decay[1] *= 0.02
    rate = rng.uniform(size=(2, length, heads, group))
    is_first = np.zeros((2, length), bool)
    is_first[1, [length // 3, 2 * length // 3]] = True
    state = rng.normal(size=(2, heads, group, key_dim, value_dim))
    return [query, key, value, log_decay, rate, is_first, state]


rule: Any = gated_delta_rule


def as_float32(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [x if x.dtype == bool else x.astype(np.float32) for x in arrays]


@pytest.mark.parametrize("length", [1, 2, 7, 64, 65, 200])
def test_rule_matches_recurrence(length: int) -> None:
    arrays = as_float32(draw(length))
    expected = step_by_step(*arrays)
    found = jax.jit(rule)(*arrays)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        check_close(ours, theirs, 2e-6)


def test_rule_continues_from_a_memory() -> None:
    *arrays, state = as_float32(draw(150))
    whole, last = rule(*arrays, state)
    first, middle = rule(*(x[:, :70] for x in arrays), state)
    second, end = rule(*(x[:, 70:] for x in arrays), middle)
    check_close(jnp.concatenate([first, second], axis=1), whole)
    check_close(end, last)


def test_fast_decays_do_not_change_slow_decays_after_them() -> None:
    """A difference of sums from the chunk's start would be wrong by 5e-3 here."""
    *arrays, is_first, state = as_float32(draw(64))
    arrays[3][:] = -0.01
    arrays[3][:, 4:12] = -1000.0
    is_first[:, 20] = True
    arrays += [is_first, state]
    check_close(rule(*arrays)[0], step_by_step(*arrays)[0], 2e-6)


def test_products_have_the_precision_of_float32() -> None:
    """Otherwise GPUs and TPUs would round the factors of products."""
    traced = str(
        jax.make_jaxpr(jax.grad(lambda *x: rule(*x)[0].sum()))(*as_float32(draw(7)))
    )
    assert traced.count("dot_general[") == traced.count("Precision.HIGHEST, Prec") > 10


def test_equal_keys_do_not_lose_precision() -> None:
    """A sum of powers of the triangular matrix would reach 1e18 here."""
    query, key, value, log_decay, rate, is_first, state = as_float32(draw(64))
    key[:] = key[:, :1]
    arrays = query, key, value, 0 * log_decay, 0 * rate + 1, is_first, state
    check_close(rule(*arrays)[0], step_by_step(*arrays)[0], 2e-6)


def test_gradients_of_rule_match_gradients_of_recurrence() -> None:
    def recurrence(query, key, value, log_decay, rate, state, is_first):
        def step(state, slices):
            q, k, v, a, r, first = slices
            state = jnp.where(first[:, None, None, None, None], 0, state)
            state = jnp.exp(a)[..., None, None] * state
            missing = v - jnp.einsum("bhk,bhgkv->bhgv", k, state)
            state = state + jnp.einsum("bhk,bhg,bhgv->bhgkv", k, r, missing)
            return state, jnp.einsum("bhk,bhgkv->bhgv", q, state)

        slices = (query, key, value, log_decay, rate, is_first)
        slices = [jnp.moveaxis(x, 1, 0) for x in slices]
        state, out = jax.lax.scan(step, state, slices)
        return jnp.moveaxis(out, 0, 1), state

    def loss(rule, *arrays):
        out, state = rule(*arrays)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

    def ours(query, key, value, log_decay, rate, state, is_first):
        return gated_delta_rule(query, key, value, log_decay, rate, is_first, state)

    with jax.enable_x64(True):
        *rest, is_first, state = map(jnp.asarray, draw(100))
        arrays = [*rest, state, is_first]
        grads = [
            jax.jit(jax.grad(partial(loss, rule), argnums=tuple(range(6))))(*arrays)
            for rule in (ours, recurrence)
        ]
        for found, expected in zip(*grads, strict=True):
            assert found.dtype == jnp.float64
            check_close(found, expected, 1e-10)


def test_inverse_and_its_gradient() -> None:
    with jax.enable_x64(True):
        lower = jnp.tril(jax.random.normal(jax.random.key(0), (3, 8, 8)), -1)
        expected = np.linalg.inv(np.eye(8) + np.asarray(lower))
        np.testing.assert_allclose(invert_unit_lower(lower), expected, atol=1e-11)
        upper = jnp.triu(jnp.full((3, 8, 8), 7.0))
        np.testing.assert_array_equal(
            invert_unit_lower(lower + upper), invert_unit_lower(lower)
        )
        check_grads(invert_unit_lower, (lower,), order=1, modes=["rev"], rtol=1e-6)


# The model


def test_long_rows_match_transformers() -> None:
    """400 tokens: more than six chunks, and the last one is not full."""
    logits = run(load(), golden()["long_tokens"])
    check_close(logits[:, ::16], golden()["long_logits"])


def test_logits_match_transformers_closely() -> None:
    check_close(run(load(), golden()["tokens"]), golden()["logits"])


def test_bfloat16_stays_close_to_float32() -> None:
    """The memory of the cache stays in float32."""
    model = cast(GPT, GPT.from_pretrained(FOLDER, dtype="bfloat16")(nnx.Rngs(0)))
    rows = golden()["tokens"][:, :16]
    decode: Any = nnx.jit(GPT.decode)
    logits, cache = decode(model, rows, 0, model.make_cache(2, 16))
    assert logits.dtype == cache[0].values[0][0][0].dtype == jnp.bfloat16
    assert cache[0].values[0][1].dtype == jnp.float32
    difference = np.asarray(logits, np.float32) - golden()["logits"][:, 15]
    assert np.abs(difference).mean() < 0.1 * np.abs(golden()["logits"]).mean()


@pytest.mark.parametrize("lengths", [(9, 3), (1, 2), (70, 20)])
def test_padding_of_prompts_changes_nothing(lengths: tuple[int, ...]) -> None:
    model, rows = load(), tokens(2, 70)
    prompts = [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]
    padded = go_on(model, **pad_prompts(prompts), max_new_tokens=5, temperature=0)
    for row, prompt in zip(padded, prompts, strict=True):
        alone = jnp.asarray([prompt])
        expected = go_on(model, alone, max_new_tokens=5, temperature=0)[0]
        assert row[: len(prompt) + 5].tolist() == expected.tolist()
        best = jnp.argmax(run(model, expected[None, :-1]), axis=-1)[0]
        assert best[-5:].tolist() == expected[-5:].tolist()


def test_decoding_in_parts_matches_model_without_cache() -> None:
    model, rows = load(), jnp.asarray(tokens(2, 75))
    expected, cache = run(model, rows), model.make_cache(2, 75)
    decode = nnx.jit(GPT.decode)
    for first, last in ((0, 70), (70, 74), (74, 75)):
        logits, cache = decode(model, rows[:, first:last], first, cache)
        check_close(logits, expected[:, last - 1])


def test_cache_of_linear_attention_does_not_grow() -> None:
    model: Any = GPT(make_config(), rngs=nnx.Rngs(0))
    (small,), (large,) = model.make_cache(2, 10), model.make_cache(2, 99)
    assert jax.tree.map(jnp.shape, small.values[0]) == (
        ((2, 2, 2, 2, 8), (2, 2, 2, 2, 8), (2, 2, 2, 2, 12)),
        (2, 2, 2, 2, 8, 6),
    )
    assert jax.tree.map(jnp.shape, small.values[0]) == jax.tree.map(
        jnp.shape, large.values[0]
    )
    assert large.values[1][0].shape == (2, 2, 99, 4, 8)


def test_documents_of_packed_rows_do_not_see_each_other() -> None:
    model, rows = load(), jnp.asarray(tokens(1, 100))
    ends = (0, 1, 3, 40, 90)
    segments = np.zeros((1, 100), np.int32)  # the last 10 tokens are padding
    for i, (first, last) in enumerate(pairwise(ends)):
        segments[:, first:last] = i + 1
    packed = run(model, rows, jnp.asarray(segments))
    for first, last in pairwise(ends):
        alone = run(model, rows[:, first:last])
        check_close(packed[:, first:last], alone)


def test_loss_of_a_document_does_not_depend_on_its_place() -> None:
    model, rows = load(), tokens(1, 41)
    alone = next_token_loss(model, jnp.asarray(rows))
    batch = {
        "tokens": jnp.asarray(np.concatenate([tokens(1, 30), rows], axis=1)),
        "segments": jnp.asarray([[0] * 30 + [1] * 41]),
    }
    packed = next_token_loss(model, batch)
    np.testing.assert_allclose(packed.value, alone.value, rtol=1e-5)


def test_parameters_and_flops_are_counted() -> None:
    experts = Experts(num_experts=4, top_k=2, mlp_dim=16, shared_dim=8)
    for changes in (
        {},
        {"linear_layers": None},
        {"output_gate": True, "qk_norm": True, "zero_centered_norm": True},
        {"experts": experts, "expert_layers": (False, False, True, True)},
        {"sinks": True, "linear_layers": (False, False, True, True)},
    ):
        config = make_config(**changes)
        model = nnx.eval_shape(lambda c=config: GPT(c, rngs=nnx.Rngs(0)))
        sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
        assert config.num_params == sum(sizes), changes
    # 2 layers of 4 heads have keys and values of width 8.
    config = make_config()
    per_token = config.flops_per_token(10) - config.flops_per_token(0)
    assert per_token == 3 * 2 * 10 * 2 * 4 * (8 + 8)
    # 2 layers of 4 memories with 8 x 6 numbers, which are read twice and written once.
    memories = 3 * 3 * 2 * 2 * 4 * 8 * 6
    assert config.flops_per_token(0) == 6 * config.num_product_params + memories


def test_number_of_values_for_blocks_is_checked() -> None:
    stack = GPT(make_config(), rngs=nnx.Rngs(0)).blocks
    message = rf"The ByBlock has 1 values, but a group .* has {stack.period} blocks"
    with pytest.raises(StackError, match=message):
        stack(jnp.ones((1, 2, 32)), scanned=ByBlock((jnp.ones(1),)))


# Strategies


STRATEGIES: dict[str, Strategy] = {
    "fsdp": FSDP(min_size=0),
    "tp": Composite(TensorParallel(2), FSDP(min_size=0)),
    "tp_sequence": Composite(TensorParallel(2, sequence=True), FSDP(min_size=0)),
    "tp_ring": Composite(TensorParallel(2, overlap="ring"), FSDP(min_size=0)),
    "pipeline": Composite(Pipeline(2), FSDP(min_size=0)),
    "pipeline_tp": Composite(Pipeline(2), TensorParallel(2), FSDP(min_size=0)),
    "experts": Composite(ExpertParallel(2), FSDP(min_size=0)),
}


def make_trainer(
    model: Any, strategy: Strategy, tx: Any = None, **options: Any
) -> Trainer:
    one = strategy == DataParallel(1)
    return Trainer(
        model,
        tx or optax.sgd(0.01),
        next_token_loss,
        strategy=strategy,
        devices=jax.devices()[:1] if one else jax.devices(),
        num_microbatches=2 if "Pipeline" in repr(strategy) else 1,
        loggers=(),
        **options,
    )


MIXED = make_config(
    num_kv_heads=2,
    mlp_dim=48,
    zero_centered_norm=True,
    qk_norm=True,
    output_gate=True,
    rotary_dim=4,
    experts=Experts(
        num_experts=4, top_k=2, mlp_dim=16, shared_dim=24, shared_gate=True
    ),
    expert_layers=(True, False),
)
"""Two groups of a block with linear attention and experts, and a block with neither."""


def make_mixed(rngs: nnx.Rngs) -> GPT:
    """A model whose memories decay slowly, so that no gradient is nearly 0."""
    model: Any = GPT(MIXED, rngs=rngs)
    speed = model.blocks.layer[0].attention.log_speed
    speed.set_value(0.1 * speed.get_value() - 3)
    return model


QUICK = ("tp", True)


@pytest.mark.parametrize(
    ("strategy", "is_packed"),
    [
        pytest.param(s, p, marks=[] if (s, p) == QUICK else [pytest.mark.deep])
        for s in STRATEGIES
        for p in (False, True)
    ],
)
def test_gradients_and_losses_match_one_device(strategy: str, is_packed: bool) -> None:
    """Compares losses of large steps with momentum, and gradients of the first step."""
    batch: Any = tokens(8, 71)
    if is_packed:
        segments = np.repeat([1, 2, 3, 0], [30, 1, 35, 5])
        batch = {"tokens": batch, "segments": np.tile(segments, (8, 1))}
    losses, grads = [], []
    for each in (DataParallel(1), STRATEGIES[strategy]):
        tx = optax.sgd(0.1, momentum=0.9)
        trainer = make_trainer(make_mixed, each, tx)
        trainer.fit([batch] * 4, 1)
        state: Any = trainer.state
        grads.append(to_host(state.opt_state[0].trace))  # the first gradient
        losses.append(trainer.fit([batch] * 4, 4)["loss"])
    assert_each_gradient_close(grads[1], grads[0], limit=1e-5)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_tensor_parallelism_splits_heads_of_linear_attention() -> None:
    config = make_config()
    trainer = make_trainer(
        lambda rngs: GPT(config, rngs=rngs), Composite(TensorParallel(2), FSDP(4))
    )
    specs = {
        ".".join(map(str, path)): leaf.get_value().sharding.spec
        for path, leaf in nnx.to_flat_state(nnx.state(trainer.model, nnx.Param))
    }
    start = "blocks.layer.0.attention."
    found = {n.removeprefix(start) for n in specs if n.startswith(start)}
    split = {n for n in found if "tensor" in specs[start + n]}
    assert found - split == {"norm.scale"}
    assert len(split) == 12


def test_context_parallelism_is_refused() -> None:
    trainer = make_trainer(
        GPT.from_pretrained(FOLDER), Composite(ContextParallel(2), FSDP())
    )
    message = r"axis 'context' of size 2 splits the sequence, but .*linear attention"
    with pytest.raises(IndivisibleDimError, match=message):
        trainer.fit([tokens(8, 17)], 1)


# Files


def hf_config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text())


def test_export_equals_source(tmp_path: Path) -> None:
    trainer = make_trainer(GPT.from_pretrained(FOLDER), STRATEGIES["tp"])
    save_pretrained(tmp_path / "out", trainer.model, source=FOLDER, dtype="bfloat16")
    check_equal(content(tmp_path / "out"), content(FOLDER))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((FOLDER / file).read_bytes())
    arrays = load_file(FOLDER / "model.safetensors")
    further = {"mtp.fc.weight": jnp.ones((32, 64)), "mtp.norm.weight": jnp.ones(32)}
    save_file(arrays | further, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"Left out: mtp \(2 arrays\)\."):
        source = GPT.from_pretrained(tmp_path)
    model = cast(GPT, source(nnx.Rngs(0)))
    check_close(run(model, golden()["tokens"]).astype(float), golden()["logits"], 0.1)


def test_defaults_are_read_as_in_transformers() -> None:
    """Published files list neither the layers nor the rotation."""
    given = hf_config()
    for name in ("layer_types", "rope_parameters", "mlp_only_layers"):
        del given[name]
    given = given | {"num_hidden_layers": 8, "full_attention_interval": 4}
    config = config_from_hf(given)
    assert config.linear_layers == (True, True, True, False)
    assert (config.rotary_dim, config.expert_layers) == (4, None)
    sparse = config_from_hf(given | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert sparse.with_experts == (False, False, *(False, True) * 3)
    written = config_to_hf(sparse)
    assert written["mlp_only_layers"] == [0, 1, 2, 4, 6]
    assert written["layer_types"] == config_to_hf(config)["layer_types"]


@pytest.mark.parametrize(
    "change",
    [
        {"mlp_only_layers": [0, 1, 2, 3, 4, 5]},
        {"layer_types": ["full_attention"] * 6},
        {"layer_types": ["linear_attention"] * 6},
    ],
    ids=str,
)
def test_layers_of_one_kind_round_trip(change: dict[str, Any]) -> None:
    config = config_from_hf(hf_config() | change)
    assert change.items() <= config_to_hf(config).items()
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert config.num_params == sum(sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True.*must be False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*must be 'silu'"),
        ({"layer_types": ["linear_attention"]}, "has 1 layer_types for 6 layers"),
        (
            {"layer_types": ["sliding_attention"] * 6},
            "'sliding_attention'.*Supported layer_types: linear_attention, full_att",
        ),
        ({"linear_num_value_heads": 3}, "num_value_heads is 3; it must be a multiple"),
        ({"linear_key_head_dim": 0}, "DeltaNet.key_dim is 0; it must be an int of at"),
        ({"linear_conv_kernel_dim": None}, "DeltaNet.conv_len is None; it must be"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0. It must be a whole"),
        ({"full_attention_interval": 0}, "full_attention_interval=0. It must be"),
        ({"num_experts": 0}, "num_experts=0. It must be a whole number"),
        ({"mlp_only_layers": 3}, "has a setting with a wrong type"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type 'dynamic'"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(hf_config() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 4}, "window is 4, which needs delta_net=None"),
        ({"chunk": 4}, "chunk is 4, which needs delta_net=None"),
        ({"use_bias": True}, "use_bias is True, which needs delta_net=None"),
        ({"qkv_bias": True}, "qkv_bias is True, which needs delta_net=None"),
        ({"rotated_layers": (True, False)}, "rotated_layers is .*needs delta_net=None"),
        ({"delta_net": 8}, r"delta_net is 8; it must be a DeltaNet\(...\), or None"),
        ({"delta_net": None}, "linear_layers is .*which needs delta_net"),
        ({"linear_layers": (True,)}, "linear_layers is .*with True and False, of a le"),
        ({"linear_layers": (True, True, False)}, "that divides num_layers=4"),
    ],
    ids=str,
)
def test_inconsistent_settings_raise(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**change)


def test_memory_without_gated_attention_has_no_family() -> None:
    config = replace(config_from_hf(hf_config()), output_gate=False)
    with pytest.raises(ValueError, match=r"No model there matches this config\."):
        config_to_hf(config)
