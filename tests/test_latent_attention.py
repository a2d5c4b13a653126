"""Latent attention, and folders of DeepSeek and GLM-4.5 beyond `test_families.py`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
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
from nnx_parallel.errors import WeightsError
from nnx_parallel.layers import Experts, lora, merge_lora
from nnx_parallel.models import (
    GPT,
    GPTConfig,
    Latents,
    YarnScaling,
    config_from_hf,
    generate,
    next_token_loss,
)
from nnx_parallel.weights import save_pretrained
from nnx_parallel.weights.names import Rule
from tests.folders import GOLDENS, content
from tests.parity.checks import assert_each_gradient_close
from tests.parity.runs import to_host

pytestmark = pytest.mark.long

LATENTS = Latents(key_dim=16, query_dim=24, plain_dim=6, rotary_dim=8, value_dim=12)
EXPERTS = Experts(
    num_experts=8,
    top_k=2,
    mlp_dim=16,
    shared_dim=16,
    scores="sigmoid",
    choice_bias=True,
)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "seq_len": 32,
    "num_layers": 3,
    "embed_dim": 32,
    "num_heads": 4,
    "norm": "rms",
    "positions": "rope",
    "activation": "swiglu",
    "use_bias": False,
    "tied": False,
    "latents": LATENTS,
}


def make_config(**changes: Any) -> GPTConfig:
    return GPTConfig(**SIZES | changes)


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


@nnx.jit
def run(model: GPT, rows: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    return model(rows, segments)


go_on = nnx.jit(generate, static_argnames=("max_new_tokens", "temperature"))


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 64, shape, np.int32)


STRATEGIES: dict[str, Strategy] = {
    "fsdp": FSDP(min_size=0),
    "tp": Composite(TensorParallel(2), FSDP(min_size=0)),
    "tp_sequence": Composite(TensorParallel(2, sequence=True), FSDP(min_size=0)),
    "pipeline": Composite(Pipeline(2), FSDP(min_size=0)),
    "experts": Composite(ExpertParallel(2), FSDP(min_size=0)),
    "context": Composite(ContextParallel(2), FSDP(min_size=0)),
}


FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_k2")
OF_EACH = [(family, strategy) for family in FAMILIES for strategy in STRATEGIES]


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param(*x, marks=[] if x == ("deepseek_v3", "tp") else [pytest.mark.deep])
        for x in OF_EACH
    ],
)
def test_gradients_and_losses_match_one_device(family: str, strategy: str) -> None:
    """Compares losses of large steps with momentum, and gradients of the first step."""
    batch, losses, gradients = tokens(8, 25), [], []
    for each in (DataParallel(1), STRATEGIES[strategy]):
        source = GPT.from_pretrained(GOLDENS / family, dtype="float32")
        trainer = make_trainer(source, each, optax.sgd(0.1, momentum=0.9))
        trainer.fit([batch] * 4, 1)
        state: Any = trainer.state.opt_state
        gradients.append(to_host(state[0].trace))  # the first trace is the gradient
        losses.append(trainer.fit([batch] * 4, 4)["loss"])
    assert_each_gradient_close(gradients[1], gradients[0])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize(("family", "strategy"), OF_EACH)
def test_logits_after_three_steps_match_one_device(family: str, strategy: str) -> None:
    batch, found = tokens(8, 25), []
    for each in (DataParallel(1), STRATEGIES[strategy]):
        trainer = make_trainer(GPT.from_pretrained(GOLDENS / family), each)
        trainer.fit([batch] * 3, 3)
        found.append(np.asarray(trainer.predict([batch[:, :-1]])))
    largest = np.abs(found[0]).max()
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5 * largest)


def test_tensor_parallelism_splits_heads_and_keeps_latents_whole() -> None:
    config = make_config()
    trainer = make_trainer(
        lambda rngs: GPT(config, rngs=rngs), Composite(TensorParallel(2), FSDP(4))
    )
    specs = {
        ".".join(map(str, path)): leaf.get_value().sharding.spec
        for path, leaf in nnx.to_flat_state(nnx.state(trainer.model, nnx.Param))
    }
    start = "blocks.layer.attention"
    for name in ("query", "query_rotary", "key", "value"):
        assert "tensor" in specs[f"{start}.{name}.kernel"], name
    for name in ("latent", "query_latent", "key_rotary"):
        assert "tensor" not in specs[f"{start}.{name}.kernel"], name


def test_cache_has_only_latents_and_rotated_keys() -> None:
    model = GPT(make_config(), rngs=nnx.Rngs(0))
    caches: Any = model.make_cache(2, 10)
    ((latents, keys),) = caches
    assert latents.shape == (3, 2, 10, 1, 16)
    assert keys.shape == (3, 2, 10, 1, 8)


@pytest.mark.parametrize("query_dim", [24, None])
def test_decoding_matches_model_without_cache(query_dim: int | None) -> None:
    """Adapters of keys and values take part in the attention over latents."""
    latents = replace(LATENTS, query_dim=query_dim)
    model = GPT(make_config(latents=latents), rngs=nnx.Rngs(0))
    model = lora(model, targets="attention", rank=2)
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        key = jax.random.key(len(str(path)))
        param.set_value(jax.random.normal(key, param.shape))
    merged, prompt = merge_lora(model), jnp.asarray(tokens(2, 7))
    out = go_on(model, prompt, max_new_tokens=5, temperature=0)
    assert (out == go_on(merged, prompt, max_new_tokens=5, temperature=0)).all()
    for each in (model, merged):
        best = jnp.argmax(run(each, out[:, :-1]), axis=-1)
        assert (best[:, 6:] == out[:, 7:]).all()
    with jax.enable_x64(True):  # so large adapters would amplify rounding
        graphdef, state = nnx.split(model)
        wide = nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(float), state))
        cache = wide.make_cache(2, 7)
        logits, _ = nnx.jit(GPT.decode)(wide, prompt, 0, cache)
        expected = run(wide, prompt)[:, -1]
        largest = float(jnp.abs(expected).max())
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10 * largest)


def test_documents_of_packed_rows_do_not_see_each_other() -> None:
    model = GPT(make_config(), rngs=nnx.Rngs(0))
    rows = jnp.asarray(tokens(1, 9))
    segments = jnp.array([[1, 1, 1, 1, 1, 2, 2, 2, 2]])
    packed = run(model, rows, segments)
    for part in (slice(0, 5), slice(5, 9)):
        alone = run(model, rows[:, part])
        np.testing.assert_allclose(packed[:, part], alone, rtol=0, atol=1e-6)


def test_parameters_and_flops_are_counted() -> None:
    for changes in ({}, {"experts": EXPERTS}, {"experts": EXPERTS, "dense_layers": 1}):
        config = make_config(**changes)
        model = nnx.eval_shape(lambda c=config: GPT(c, rngs=nnx.Rngs(0)))
        sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
        assert config.num_params == sum(sizes)
    # 3 layers of 4 heads, with keys of width 14 and values of width 12.
    config = make_config()
    products = config.flops_per_token(10) - config.flops_per_token(0)
    assert products == 3 * 2 * 10 * 3 * 4 * (14 + 12)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_choice_bias_changes_only_by_its_rate(rate: float, tmp_path: Path) -> None:
    folder = GOLDENS / "deepseek_v3"
    experts = config_from_hf(json.loads((folder / "config.json").read_text())).experts
    assert experts is not None
    changed = replace(experts, bias_rate=rate)
    trainer = make_trainer(
        GPT.from_pretrained(folder, experts=changed), FSDP(min_size=0)
    )
    trainer.fit([tokens(8, 17)], 1)  # a second step of 0.5 would undo the first
    save_pretrained(tmp_path / "written", trainer.model, source=folder)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    save_pretrained(tmp_path / "small", trainer.model, source=folder, dtype="bfloat16")
    before, after, small = (
        content(x)[name] for x in (folder, tmp_path / "written", tmp_path / "small")
    )
    np.testing.assert_array_equal(small, after)  # rounding would change the choice
    assert after.shape == (8,)
    assert np.array_equal(before.astype(np.float32), after) == (rate == 0.0)


def copy_with_further_layer(folder: Path, num_predicted: int) -> Path:
    """A folder with a layer that predicts further tokens, as DeepSeek-V3 has."""
    shutil.copytree(GOLDENS / "deepseek_v3", folder)
    file = folder / "model.safetensors"
    arrays = load_file(file)
    further = {
        name.replace("layers.2", "layers.3"): x
        for name, x in arrays.items()
        if "layers.2" in name
    }
    further["model.layers.3.eh_proj.weight"] = jnp.ones((32, 64))
    save_file(arrays | further, file)
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = num_predicted
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = copy_with_further_layer(tmp_path / "one", 1)
    with pytest.warns(UserWarning, match=r"Left out: layers\.3 \(\d+ arrays\)\."):
        source = GPT.from_pretrained(folder)
    with np.load(GOLDENS / "deepseek_v3" / "logits.npz") as file:
        golden = dict(file)
    logits = run(cast(GPT, source(nnx.Rngs(0))), golden["tokens"])
    largest = np.abs(golden["logits"]).max()
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-5 * largest)
    folder = copy_with_further_layer(tmp_path / "none", 0)
    with pytest.raises(WeightsError, match=r"files have 'model\.layers\.3\.eh_proj"):
        GPT.from_pretrained(folder).build_shapes(nnx.Rngs(0))


def test_numbers_of_later_layers_start_above_zero() -> None:
    rule = Rule.of(("a", "layers.{2:}.w.{}", "i o -> i o"))
    assert rule.num_stacked == 2
    assert [*rule.names((2, 1, 5, 5)).values()] == ["layers.2.w.0", "layers.3.w.0"]


REFUSED = [
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True.*must be False"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2.*must be 1"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias=True.*must be False"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2.*heads=4"),
    ("deepseek_v3", {"first_k_dense_replace": 3}, "first_k_dense_replace=3.*than num"),
    ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts=0.*from 1 to"),
    ("deepseek_v3", {"kv_lora_rank": None}, "Latents.key_dim is None; it must be"),
    ("kimi_k2", {"qk_nope_head_dim": 7}, "plain_dim is 7; it must be an even int"),
    ("glm4_moe", {"first_k_dense_replace": 9}, "first_k_dense_replace=9"),
    ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_unsupported_settings_are_refused(
    family: str, change: dict, message: str
) -> None:
    given = json.loads((GOLDENS / family / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        config_from_hf(given | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 4}, "window is 4, which needs latents=None"),
        ({"qk_norm": True}, "qk_norm is True, which needs latents=None"),
        ({"num_kv_heads": 2}, "num_kv_heads is 2, which needs latents=None"),
        ({"use_bias": True}, "use_bias is True, which needs latents=None"),
        ({"positions": "learned"}, "latents is .*which needs positions='rope'"),
        ({"latents": 16}, r"latents is 16; it must be a Latents\(...\), or None"),
        (
            {"rope_scaling": YarnScaling(factor=2.0, original_len=8, growth=0.1)},
            "needs rope_scaling without growth of queries",
        ),
    ],
)
def test_inconsistent_settings_raise(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**change)
