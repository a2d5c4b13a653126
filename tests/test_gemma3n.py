"""Gemma 3n compared with transformers, through the golden of a tiny random model.

`tests/goldens/make_gemma3n.py` made the golden.
"""

import json
import re
from functools import cache
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
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.layers import lora, merge_lora
from nnx_parallel.models import (
    Gemma3n,
    Gemma3nConfig,
    RopeScaling,
    generate,
    next_token_loss,
    pad_prompts,
)
from nnx_parallel.training.step import StepOptions, make_train_step
from nnx_parallel.weights import save_pretrained
from nnx_parallel.weights.family import read_fields
from tests.folders import GOLDENS, check_equal, content
from tests.parity.checks import assert_each_gradient_close
from tests.parity.runs import to_host
from tests.steps import QUICKLY, lower_step, plan_step

pytestmark = pytest.mark.long

FOLDER = GOLDENS / "gemma3n" / "text"


def golden() -> dict[str, Any]:
    with np.load(FOLDER / "logits.npz") as file:
        return dict(file)


def load(folder: Path = FOLDER, **changes: Any) -> Gemma3n:
    source = Gemma3n.from_pretrained(folder, dtype="float32", **changes)
    model = cast(Gemma3n, source(nnx.Rngs(0)))
    model.eval()
    return model


@nnx.jit
def run(model: Gemma3n, rows: jax.Array, segments: jax.Array | None = None) -> Any:
    return model(rows, segments)


go_on = nnx.jit(generate, static_argnames=("max_new_tokens", "temperature"))


def check_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest)


def test_logits_match_transformers() -> None:
    model, expected = load(), golden()
    check_close(run(model, expected["tokens"]), expected["logits"])
    check_close(run(model, expected["long"])[:, ::8], expected["long_logits"])


def test_coefficients_are_clipped_in_training() -> None:
    model, expected = load(), golden()
    model.train()
    check_close(run(model, expected["tokens"]), expected["clipped"])
    assert np.abs(expected["clipped"] - expected["logits"]).max() > 0.1


def test_greedy_continuations_match_transformers() -> None:
    expected = golden()
    prompt = jnp.asarray(expected["tokens"][:1])
    out = go_on(load(), prompt, max_new_tokens=64, temperature=0)
    assert out[0, 24:].tolist() == expected["greedy"].tolist()


def test_gradients_match_transformers(tmp_path: Path) -> None:
    """The gradients are written like parameters, under the names of transformers."""
    expected = golden()
    graphdef, params, rest = nnx.split(load(), nnx.Param, ...)

    @jax.grad
    def gradient(params: nnx.State) -> jax.Array:
        model: Any = nnx.merge(graphdef, params, rest, copy=True)
        return next_token_loss(model, expected["tokens"]).value

    save_pretrained(
        tmp_path / "gradients", nnx.merge(graphdef, jax.jit(gradient)(params), rest)
    )
    found = content(tmp_path / "gradients")
    assert found.keys() == {*expected["names"].tolist()}
    table = "model.embed_tokens_per_layer.weight"
    found[table] = found[table][1:]  # PyTorch gives padding no gradient
    for name, norm in zip(expected["names"], expected["norms"], strict=True):
        assert np.linalg.norm(found[name]) == pytest.approx(norm, rel=2e-5), name


SETTINGS: list[dict[str, Any]] = [
    {"window": 6},
    {"layer_kinds": ("local",) * 8},
    {"rope_theta": 1e4},
    {"local_rope_theta": 1e4},
    {"rope_scaling": None},
    {"logit_softcap": None},
    {"norm_epsilon": 1e-2},
    {"sparsity": (0.0,) * 8},
    {"sparsity": (0.7, 0.7, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0)},
]


@pytest.mark.deep
@pytest.mark.parametrize("change", SETTINGS, ids=str)
def test_each_setting_changes_logits(change: dict[str, Any]) -> None:
    """Without this test, an ignored setting could pass its golden."""
    expected = golden()
    logits = run(load(**change), expected["tokens"])
    assert np.abs(np.asarray(logits) - expected["logits"]).max() > 1e-3


STRATEGIES: dict[str, Strategy] = {
    "fsdp": FSDP(min_size=0),
    "tp": Composite(TensorParallel(2), FSDP(min_size=0)),
    "tp_sequence": Composite(TensorParallel(2, sequence=True), FSDP(min_size=0)),
    "pipeline": Composite(Pipeline(2), FSDP(min_size=0)),
    "context": Composite(ContextParallel(2), FSDP(min_size=0)),
    "data": DataParallel(),
}


def make_trainer(strategy: Strategy, model: Any = None, **options: Any) -> Trainer:
    one = strategy == DataParallel(1)
    return Trainer(
        model or Gemma3n.from_pretrained(FOLDER, dtype="float32"),
        optax.sgd(0.02, momentum=0.9),
        next_token_loss,
        strategy=strategy,
        devices=jax.devices()[:1] if one else jax.devices(),
        num_microbatches=2 if "Pipeline" in repr(strategy) else 1,
        loggers=(),
        **options,
    )


def train(strategy: Strategy) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the gradients of the first step, and the losses of six steps."""
    batch = np.random.default_rng(0).integers(0, 128, (8, 25), np.int32)
    trainer = make_trainer(strategy)
    trainer.fit([batch] * 6, 1)
    state: Any = trainer.state
    gradients = to_host(state.opt_state[0].trace)  # the momentum after one step
    return gradients, trainer.fit([batch] * 6, 6)["loss"]


@cache
def train_on_one_device() -> tuple[dict[str, np.ndarray], np.ndarray]:
    return train(DataParallel(1))


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=[pytest.mark.deep] * (s != "tp")) for s in STRATEGIES],
)
def test_gradients_and_losses_match_one_device(strategy: str) -> None:
    """Compares losses of large steps with momentum, and gradients of the first step."""
    expected, expected_losses = train_on_one_device()
    gradients, losses = train(STRATEGIES[strategy])
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert_each_gradient_close(gradients, expected)


def test_pipeline_divides_layers_that_hand_on_keys_and_values() -> None:
    """The largest stack computes the keys and values of the layer after it."""
    config = Gemma3nConfig.tiny(
        num_layers=3,
        mlp_dim=(64,) * 3,
        sparsity=(0.0,) * 3,
        layer_kinds=("global", "local", "local"),
        num_shared_layers=1,
    )
    assert [len(run) for run in config.runs] == [2, 1]
    batch, found = np.random.default_rng(0).integers(0, 240, (8, 25), np.int32), []
    for strategy in (DataParallel(1), Composite(Pipeline(2), FSDP(min_size=0))):
        trainer = make_trainer(strategy, model=lambda rngs: Gemma3n(config, rngs=rngs))
        trainer.fit([batch], 1)
        state: Any = trainer.state
        found.append(to_host(state.opt_state[0].trace))
    assert_each_gradient_close(found[1], found[0])


@pytest.mark.deep
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_logits_and_continuations_match_under_strategies(strategy: str) -> None:
    expected, trainer = golden(), make_trainer(STRATEGIES[strategy])
    rows = np.concatenate([expected["tokens"]] * 4)
    logits = np.asarray(trainer.predict([rows]))
    check_close(logits, np.concatenate([expected["logits"]] * 4))
    model, prompts = cast(Gemma3n, trainer.model), trainer.shard_batch(rows)
    found = go_on(model, prompts, max_new_tokens=64, temperature=0)
    greedy = expected["greedy"].tolist()
    assert np.asarray(found)[::2, 24:].tolist() == [greedy] * 4


def test_tensor_parallelism_leaves_no_matrix_whole() -> None:
    strategy = Composite(TensorParallel(2), FSDP(4, min_size=0))
    config = load().config
    described = strategy.describe(lambda rngs: Gemma3n(config, rngs=rngs))
    assert "does not split" not in described.summary()


def test_fsdp_gathers_the_embeddings_of_one_layer_at_a_time() -> None:
    config = Gemma3nConfig.tiny()
    plan = plan_step(lambda rngs: Gemma3n(config, rngs=rngs), FSDP(8, min_size=0))
    step = make_train_step(plan, next_token_loss, StepOptions())
    text = lower_step(step, plan, 8, 16).compile(QUICKLY).as_text() or ""
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text)
    assert "1,240,8" in gathered  # the table has 6 layers
    assert not any(shape.startswith("6,") for shape in gathered)


def test_padded_prompts_continue_like_single_prompts() -> None:
    model = Gemma3n(Gemma3nConfig.tiny(), rngs=nnx.Rngs(0))
    prompts = [[*range(20, 20 + n)] for n in (5, 17)]
    batch: Any = {k: jnp.asarray(x) for k, x in pad_prompts(prompts).items()}
    out = go_on(model, **batch, max_new_tokens=12, temperature=0)
    best = jnp.argmax(run(model, out[:, :-1]), axis=-1)
    for row, likeliest, prompt in zip(out, best, prompts, strict=True):
        new = slice(len(prompt), len(prompt) + 12)
        assert row[: new.start].tolist() == prompt
        assert row[new].tolist() == likeliest[new.start - 1 : new.stop - 1].tolist()


def test_documents_of_packed_rows_do_not_see_each_other() -> None:
    model = Gemma3n(Gemma3nConfig.tiny(), rngs=nnx.Rngs(0))
    rows = jnp.asarray(golden()["tokens"][:1])
    segments = jnp.array([[1] * 14 + [2] * 10])
    packed = run(model, rows, segments)
    for part in (slice(0, 14), slice(14, 24)):
        check_close(packed[:, part], run(model, rows[:, part]))


def test_written_folder_matches_transformers(tmp_path: Path) -> None:
    source = Gemma3n.from_pretrained(FOLDER, dtype="keep")
    save_pretrained(tmp_path / "written", source(nnx.Rngs(0)), source=FOLDER)
    check_equal(content(tmp_path / "written"), content(FOLDER))
    ours, theirs = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "written", FOLDER)
    )
    rotations = ours.pop("rope_parameters"), theirs["rope_parameters"]
    for kind, rotation in rotations[1].items():
        assert rotations[0][kind] == rotation
    older = {"rope_theta", "rope_scaling", "rope_local_base_freq", "torch_dtype"}
    for key in ours.keys() - older:
        assert (ours[key], type(ours[key])) == (theirs[key], type(theirs[key])), key


def test_language_model_is_read_from_a_model_of_text_and_images(tmp_path: Path) -> None:
    """Published files also have unused key and value projections of later layers."""
    folder = tmp_path / "whole"
    folder.mkdir()
    arrays = {
        name.replace("model.", "model.language_model."): x
        for name, x in load_file(FOLDER / "model.safetensors").items()
    }
    start = "model.language_model.layers.6.self_attn"
    arrays[f"{start}.k_proj.weight"] = arrays[f"{start}.v_proj.weight"] = jnp.ones(2)
    arrays[f"{start}.k_norm.weight"] = jnp.ones(8)
    arrays["model.vision_tower.conv.weight"] = jnp.ones(3)
    save_file(arrays, folder / "model.safetensors")
    text = json.loads((FOLDER / "config.json").read_text())
    text["activation_sparsity_pattern"] = [0.7, 0.7, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0]
    outer = {"model_type": "gemma3n", "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    with pytest.warns(UserWarning, match=r"Left out: vision_tower \(1 arrays\)"):
        model = load(folder)
    expected = golden()
    check_close(run(model, expected["tokens"]), expected["logits"])


@pytest.mark.parametrize("name", ["gemma3n-e2b", "gemma3n-e4b"])
def test_presets_have_published_sizes(name: str) -> None:
    sizes = json.loads((FOLDER.parent / "sizes.json").read_text())["sizes"]
    config = Gemma3nConfig.preset(name)
    model = nnx.eval_shape(lambda: Gemma3n(config, rngs=nnx.Rngs(0)))
    found = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert found == config.num_params == sizes[name]
    assert len(config.runs) == 3
    assert [*config.layer_kinds[:6]] == ["local"] * 4 + ["global", "local"]


def test_missing_settings_use_transformers_defaults() -> None:
    """The defaults are Gemma 3n E4B."""
    preset = Gemma3nConfig.preset("gemma3n-e4b")
    _, fields = read_fields({"model_type": "gemma3n_text"}, Gemma3n.families)
    found = Gemma3nConfig(**fields)
    assert found.fields | {"family": None} == preset.fields


def test_parameters_are_counted() -> None:
    for config in (Gemma3nConfig.tiny(), load().config):
        model = nnx.eval_shape(lambda c=config: Gemma3n(c, rngs=nnx.Rngs(0)))
        sizes = [x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
        assert config.num_params == sum(sizes)


@pytest.mark.parametrize("num_shared_layers", [0, 2])
def test_decoding_matches_model_without_cache(num_shared_layers: int) -> None:
    config = Gemma3nConfig.tiny(num_shared_layers=num_shared_layers)
    model = lora(Gemma3n(config, rngs=nnx.Rngs(0)), targets="query|value|up", rank=2)
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        key = jax.random.key(len(str(path)))
        param.set_value(jax.random.normal(key, param.shape))
    prompt = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 11)))
    out = go_on(model, prompt, max_new_tokens=9, temperature=0)
    for each in (model, merge_lora(model)):
        best = jnp.argmax(run(each, out[:, :-1]), axis=-1)
        assert (best[:, 10:] == out[:, 11:]).all()


REFUSED = [
    ({"altup_active_idx": 1}, "altup_active_idx=1, which Gemma3n does not support"),
    ({"altup_correct_scale": False}, "altup_correct_scale=False.*must be True"),
    ({"attention_bias": True}, "attention_bias=True.*must be False"),
    ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings=False.*must be True"),
    ({"layer_types": ["full_attention"]}, "has 1 layer_types for 8 layers"),
    ({"layer_types": ["chunked_attention"] * 8}, "layer_types .'chunked_attention'"),
    ({"intermediate_size": [48, 40]}, r"mlp_dim is \(48, 40\).*each of 8 layers"),
    ({"activation_sparsity_pattern": [1.0] * 8}, "sparsity is .*to less than 1"),
    ({"num_kv_shared_layers": 8}, "num_shared_layers is 8.*less than num_layers=8"),
    ({"num_kv_shared_layers": 7}, "num_shared_layers is 7.*each kind of layer occurs"),
    ({"hidden_size_per_layer_input": 0}, "layer_input_dim is 0.*at least 1"),
    ({"model_type": "gemma4_text"}, "'gemma4_text'. Gemma3n can read only 'gemma3n_te"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_unsupported_settings_are_refused(
    change: dict, message: str, tmp_path: Path
) -> None:
    settings = json.loads((FOLDER / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        Gemma3n.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads is 3; it must be a divisor of num_heads=4"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"embed_dim": 32.0}, "embed_dim is 32.0; it must be an int of at least 1"),
        (
            {"layer_kinds": ("near",) * 6},
            "layer_kinds is .*must be a tuple of kinds among",
        ),
        (
            {"rope_scaling": 2.0},
            r"rope_scaling is 2.0; it must be a RopeScaling\(...\)",
        ),
        (
            {"coefficient_clip": 0.0},
            "coefficient_clip is 0.0; it must be above 0, or N",
        ),
        ({"attention": "flash"}, "attention is 'flash'; it must be one of"),
    ],
)
def test_inconsistent_settings_raise(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gemma3nConfig.tiny(**change)


def test_rotation_of_global_layers_may_be_stretched() -> None:
    assert load().config.rope_scaling == RopeScaling(factor=8.0)
