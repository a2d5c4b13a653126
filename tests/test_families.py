"""Model families compared with transformers, through goldens of tiny random models.

`tests/goldens/make_goldens.py` made the goldens. These tests decode the files by hand,
so they depend on neither torch nor this library's weight reader.
"""

import itertools
import json
import math
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from einops import rearrange
from flax import nnx

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.layers import Experts, linear_cross_entropy
from nnx_parallel.models import (
    GPT,
    GPTConfig,
    LongRopeScaling,
    RopeScaling,
    config_from_hf,
    config_to_hf,
    generate,
    next_token_loss,
)
from nnx_parallel.models.gpt_config import PRESETS
from nnx_parallel.models.rotary import Growth
from nnx_parallel.weights.family import family_of
from nnx_parallel.weights.names import WEIGHTS

pytestmark = pytest.mark.long

GOLDENS = Path(__file__).parent / "goldens"
FAMILIES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}


def hf_config(family: str) -> dict[str, Any]:
    return json.loads((GOLDENS / family / "config.json").read_text())


@cache
def tensors(family: str) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file: the header's length, a JSON header, data."""
    content = (GOLDENS / family / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, last = (start + offset for offset in entry["data_offsets"])
            data = np.frombuffer(content[first:last], DTYPES[entry["dtype"]])
            found[name] = data.reshape(entry["shape"]).astype(np.float32)
    return found


@cache
def golden(family: str) -> dict[str, Any]:
    with np.load(GOLDENS / family / "logits.npz") as file:
        return dict(file)


def arrays_of(family: str, config: GPTConfig) -> dict[tuple, np.ndarray]:
    """The arrays of a golden in this library's shapes, by path."""
    given, found = tensors(family), {}
    sizes = config.sizes | {"seq": config.seq_len}
    for ours, theirs, pattern in entries_of(config):
        part, count, cut, *span, pattern = re.findall(
            r"(?:part (\d) of (\d): )?(?:(\w+) (\d+):(\d+) of (\d+): )?(.+)", pattern
        )[0]
        first, last, whole = (int(x or 0) for x in span)
        pattern, _, further = pattern.partition(",")
        all_sizes = sizes | {"n": int(count or 1), "latent": latent_dim(config, theirs)}
        if (delta := config.delta_net) and "linear_attn" in theirs:
            all_sizes |= {"value_heads": delta.num_value_heads, **vars(delta)}
            all_sizes |= {"heads": delta.num_key_heads, "width": delta.conv_len}
            all_sizes["size"] = delta.group * delta.value_dim
        all_sizes |= {n: int(x) for n, x in re.findall(r"(\w+)=(\d+)", further)}
        all_sizes |= {cut: whole} if cut else {}
        if theirs.endswith("o_proj.weight") and config.latents:
            all_sizes["head_dim"] = config.latents.value_dim
        if ".mlp." in ours and ours.endswith(".kernel"):  # not an array of experts
            all_sizes["mlp"] = config.fields["mlp_dim"]
        if ".shared." in ours and config.experts:
            all_sizes["mlp"] = config.experts.shared_dim
        left, right = pattern.split(" -> ")
        dims = " ".join(re.findall(r"[a-z]\w*", left))
        if cut:  # the joins of our dims come after the cut
            pattern = f"{left} -> {dims}"
        used = {n: all_sizes[n] for n in re.findall(r"[a-z]\w*", pattern)}
        is_dense = ours.startswith("dense_blocks")
        num_layers = config.dense_layers if is_dense else config.num_layers
        # {1::2} stands for the layers 1, 3, 5 and so on, as in a slice of Python.
        slices = re.findall(r"\{(.*?)\}", theirs)
        numbers = [
            range(count)[slice(*(int(x) if x else None for x in text.split(":")))]
            if text
            else range(count)
            for text, count in zip(
                slices, (num_layers, config.sizes["expert"]), strict=False
            )
        ]
        counts, plain = tuple(map(len, numbers)), re.sub(r"\{.*?\}", "{}", theirs)
        names = [plain.format(*index) for index in itertools.product(*numbers)]
        arrays = [rearrange(given[name], pattern, **used) for name in names]
        if part:
            arrays = [array[int(part)] for array in arrays]
        if cut:
            at = (slice(None),) * dims.split().index(cut) + (slice(first, last),)
            arrays = [rearrange(array[at], f"{dims} -> {right}") for array in arrays]
        shape = (*counts, *arrays[0].shape)
        path = tuple(int(x) if x.isdigit() else x for x in ours.split("."))
        found[path] = np.stack(arrays).reshape(shape)
    return found


def entries_of(config: GPTConfig) -> Any:
    return family_of(config, GPT.families).names(config.fields)


def latent_dim(config: GPTConfig, theirs: str) -> int:
    if config.latents is None:
        return 0
    widths = {"q_": config.latents.query_dim, "kv": config.latents.key_dim}
    return next((w or 0 for name, w in widths.items() if f"attn.{name}" in theirs), 0)


def load(family: str, **changes: Any) -> GPT:
    config = config_from_hf(hf_config(family))
    arrays = arrays_of(family, config)
    model = GPT(replace(config, **changes), rngs=nnx.Rngs(0))
    params = dict(nnx.to_flat_state(nnx.state(model, WEIGHTS)))
    assert set(params) == set(arrays)
    for path, param in params.items():
        assert param.shape == arrays[path].shape, path
        param.set_value(jnp.asarray(arrays[path]))
    return model


@nnx.jit
def run(model: GPT, tokens: jax.Array) -> jax.Array:
    return model(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family: str) -> None:
    logits = run(load(family), golden(family)["tokens"])
    np.testing.assert_allclose(logits, golden(family)["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallelism_leaves_no_matrix_whole(family: str) -> None:
    config = config_from_hf(hf_config(family))
    strategy = Composite(TensorParallel(2), FSDP(4, min_size=0))
    described = strategy.describe(lambda rngs: GPT(config, rngs=rngs))
    assert "does not split" not in described.summary()


SIMPLE = ("gemma", "gpt_neox", "granite", "ministral3", "olmo2", "phi3")
"""Families that decode with a cache in the same way as others."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[pytest.mark.deep] if f in SIMPLE else [])
        for f in FAMILIES
    ],
)
def test_greedy_continuations_match_transformers(family: str) -> None:
    prompt = golden(family)["tokens"][:1]
    go_on = nnx.jit(generate, static_argnames=("max_new_tokens", "temperature"))
    out = go_on(load(family), jnp.asarray(prompt), max_new_tokens=64, temperature=0)
    assert out[0, prompt.shape[1] :].tolist() == golden(family)["greedy"].tolist()


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"norm_epsilon": 1e-3}),
    ("llama", {"rope_scaling": None}),
    ("llama", {"rope_scaling": RopeScaling(factor=8.0)}),
    ("mistral", {"window": 8}),
    ("qwen2", {"rope_theta": 10_000.0}),
    ("gpt_oss", {"activation": "swiglu"}),
    ("gpt_oss", {"rope_scaling": None}),
    ("gpt_oss", {"layer_kinds": ("global", "local")}),
    ("qwen2_moe", {"window": None, "layer_kinds": None}),
    ("gemma2", {"softcap": None}),
    ("gemma2", {"logit_softcap": None}),
    ("gemma2", {"attention_scale": None}),
    ("gemma2", {"scale_embedding": False}),
    ("gemma2", {"layer_kinds": ("global", "local")}),
    ("gemma3", {"local_rope_theta": None}),
    ("gemma3", {"rope_scaling": None}),
    ("gemma3", {"activation": "swiglu"}),
    ("olmo3", {"local_rope_theta": None}),
    ("smollm3", {"rotated_layers": (False, True)}),
    ("llama4", {"chunk": None, "layer_kinds": None}),
    ("llama4", {"late_qk_norm": False}),
    ("llama4", {"query_growth": None}),
    ("deepseek_v3", {"attention_scale": None}),
    ("glm4_moe", {"rotary_dim": 8}),
    ("qwen3_next", {"rotary_dim": 4}),
]
OUTPUTS: dict[str, Any] = {
    "num_experts": 4,
    "top_k": 2,
    "mlp_dim": 16,
    "shared_dim": 16,
    "scores": "sigmoid",
    "normalise": False,
}
"""Experts with weights that scale outputs instead of inputs."""
DEEP_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"scale_embedding": False}),
    ("gpt_neox", {"exact_gelu": False}),
    ("gpt_neox", {"rotary_dim": 8}),
    ("olmo3", {"rope_scaling": None}),
    ("smollm3", {"rotated_layers": None}),
    ("granite", {"multipliers": None}),
    ("granite", {"attention_scale": None}),
    ("ministral3", {"rope_scaling": None}),
    ("phi3", {"rope_scaling": None}),
    ("phi3", {"window": None}),
    ("llama4", {"chunk": 16}),
    ("llama4", {"experts": Experts(**OUTPUTS)}),
    ("deepseek_v2", {"rope_theta": 10_000.0}),
    ("deepseek_v3", {"rope_scaling": None}),
    ("kimi_k2", {"attention_scale": None}),
]


def test_config_that_fits_llama_and_phi_is_written_as_llama() -> None:
    config = GPTConfig.tiny_llama()
    assert config_to_hf(config)["model_type"] == "llama"
    assert config_to_hf(GPTConfig.preset("phi4-14b"))["model_type"] == "phi3"


@pytest.mark.parametrize(
    ("family", "change"),
    [*SETTINGS, *(pytest.param(*x, marks=pytest.mark.deep) for x in DEEP_SETTINGS)],
)
def test_each_setting_changes_logits(family: str, change: dict[str, Any]) -> None:
    """Without this test, an ignored setting could pass its golden."""
    logits = run(load(family, **change), golden(family)["tokens"])
    assert np.abs(np.asarray(logits) - golden(family)["logits"]).max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_config_round_trips(family: str) -> None:
    config = config_from_hf(hf_config(family))
    written = config_to_hf(config)
    if family == "kimi_k2":  # transformers has no class for this name
        assert written["model_type"] == "deepseek_v3"
        written["model_type"] = "kimi_k2"
    kept = {"model_type", "architectures", "vocab_size", "tie_word_embeddings"}
    assert {k: written[k] for k in kept} == {k: hf_config(family)[k] for k in kept}
    # transformers checks types: it does not accept an int as a float.
    for key, value in written.items():
        theirs = hf_config(family).get(key)
        assert theirs is None or type(value) is type(theirs), key
    again = config_from_hf(written)
    assert config_to_hf(again) == config_to_hf(config)
    assert again.kinds == config.kinds
    assert again.sizes == config.sizes


PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    # With 871,932,416 parameters for images, the folders have 108.6 and 401.6 billion.
    "llama4-scout": 107_769_861_120,
    "llama4-maverick": 400_711_848_960,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "ministral-8b": 8_019_808_256,
    "mistral-small3-24b": 23_572_403_200,
    "ministral3-8b": 8_489_553_920,
    "phi3-mini-4k": 3_821_079_552,
    "phi3-medium-4k": 13_960_238_080,
    "phi4-14b": 14_659_507_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "smollm3-3b": 3_075_098_624,
    "granite3.3-2b": 2_533_539_840,
    "granite3.3-8b": 8_170_864_640,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.5": 352_797_814_784,
    # Without the layers that predict further tokens, which the folders also have.
    "qwen3-next-80b-a3b": 79_674_391_296,
}


def test_presets_have_published_sizes() -> None:
    """Sizes of the language models only; tables have as many rows as in the files."""
    found = {name: GPTConfig.preset(name).num_params for name in PRESETS}
    assert found == PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_transformers_config(name: str) -> None:
    config = GPTConfig.preset(name)
    again = config_from_hf(config_to_hf(config))
    assert again.num_params == config.num_params
    assert again.kinds == config.kinds


def deepseek_like(**changes: Any) -> GPTConfig:
    """Three layers, of which the first is dense."""
    config = GPTConfig.tiny_experts(
        vocab_size=64, num_layers=3, dense_layers=1, embed_dim=32, mlp_dim=48
    )
    return replace(config, **changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation": "gelu", "use_bias": True, "norm": "layer"}, {"mlp_dim": None}],
    ids=str,
)
def test_parameters_of_dense_layers_are_counted(changes: dict[str, Any]) -> None:
    config = deepseek_like(**changes)
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    sizes = [p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert config.num_params == sum(sizes)
    # A token uses 2 of 8 experts in each of 2 layers.
    kernels = 2 if changes.get("activation") == "gelu" else 3
    idle = 2 * 6 * kernels * 32 * 64
    assert config.num_active_params == config.num_params - idle
    plain = replace(config, dense_layers=0, mlp_dim=None)
    assert config.flops_per_token(8) < plain.flops_per_token(8)


def test_deepseek_v3_has_three_dense_layers() -> None:
    config = GPTConfig.preset("deepseek-v3")
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    shapes = {
        ".".join(map(str, path)): param.shape
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    assert shapes["dense_blocks.layer.mlp.up.kernel"] == (3, 7168, 18_432)
    assert shapes["blocks.layer.mlp.up"] == (58, 256, 7168, 2048)
    assert shapes["blocks.layer.mlp.shared.up.kernel"] == (58, 7168, 2048)
    assert config.num_params == sum(math.prod(shape) for shape in shapes.values())


def test_decoding_uses_dense_layers() -> None:
    """Dense layers and layers with experts have windows."""
    config = deepseek_like(window=2, layer_kinds=("local", "global"))
    model = GPT(config, rngs=nnx.Rngs(0))
    assert model.dense_blocks is not None
    for stack, kinds in ((model.dense_blocks, [1]), (model.blocks, [0, 1])):
        block: Any = stack.layer
        assert block.attention.is_local[...].tolist() == kinds
    tokens = jnp.arange(8)[None] % 7
    out = generate(model, tokens, max_new_tokens=4, temperature=0.0)
    assert jnp.argmax(model(out)[0, 7:11], axis=-1).tolist() == out[0, 8:].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense_layers": 3}, "dense_layers is 3.*less than num_layers=3"),
        ({"dense_layers": -1}, "dense_layers is -1"),
        ({"dense_layers": 0}, "mlp_dim is 48, which needs experts=None or dense"),
        ({"experts": None}, "dense_layers is 1, which needs experts"),
    ],
    ids=str,
)
def test_invalid_dense_layers_raise(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepseek_like(**changes)


def test_exporting_dense_layers_raises() -> None:
    with pytest.raises(ValueError, match=r"experts is Experts.*Glm4MoeForCausalLM"):
        config_to_hf(deepseek_like(experts=Experts(num_experts=8, top_k=2, mlp_dim=64)))


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted(family: str) -> None:
    config = config_from_hf(hf_config(family))
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    sizes = [p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert config.num_params == sum(sizes)


def test_missing_settings_use_transformers_defaults() -> None:
    """Checks the hub's text_config of Gemma 3 4B, and Mistral's window."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    found = config_from_hf({"model_type": "gemma3", "text_config": text})
    expected = GPTConfig.preset("gemma3-4b")
    assert config_to_hf(found) == config_to_hf(expected)
    mistral = hf_config("mistral")
    del mistral["sliding_window"], mistral["num_key_value_heads"]
    found = config_from_hf(mistral | {"num_attention_heads": 16})
    assert (found.window, found.num_kv_heads) == (4095, 8)
    del mistral["hidden_size"]
    with pytest.raises(ValueError, match=r"has no 'hidden_size', but its model_type"):
        config_from_hf(mistral)


LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 20_000.0}
ROTATIONS: list[tuple[dict[str, Any], float, RopeScaling | None]] = [
    ({"rope_parameters": {"rope_type": "default"}}, 5e5, None),
    ({"rope_parameters": {}}, 5e5, None),
    ({"rope_parameters": PLAIN}, 2e4, None),
    ({"rope_parameters": PLAIN, "rope_scaling": {}}, 2e4, None),
    (
        {"rope_parameters": PLAIN, "rope_scaling": {"type": "linear", "factor": 2.0}},
        5e5,
        RopeScaling(factor=2.0),
    ),
    (
        {"rope_parameters": LLAMA_31},
        5e5,
        RopeScaling(factor=8.0, original_len=256),
    ),
    (
        {
            "rope_scaling": {**LLAMA_31, "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 32,
        },
        5e5,
        RopeScaling(factor=8.0, original_len=32),
    ),
]


@pytest.mark.parametrize(("change", "theta", "scaling"), ROTATIONS)
def test_rotation_is_read_as_in_transformers(
    change: dict, theta: float, scaling: RopeScaling | None
) -> None:
    given = hf_config("llama")
    del given["rope_parameters"]
    found = config_from_hf({**given, "rope_theta": 500_000.0, **change})
    assert (found.rope_theta, found.rope_scaling) == (theta, scaling)


def test_rotations_of_local_and_global_layers_are_read_as_in_transformers() -> None:
    given = hf_config("gemma3")
    del given["rope_parameters"]
    given |= {"rope_theta": 5e4, "rope_local_base_freq": 7e3}
    linear = {"rope_type": "linear", "factor": 4.0}
    for change in (
        {"rope_scaling": linear},
        {"rope_parameters": {"full_attention": linear}},
        {"rope_parameters": {"sliding_attention": {}}, "rope_scaling": linear},
    ):
        found = config_from_hf({**given, **change})
        assert (found.rope_theta, found.local_rope_theta) == (5e4, 7e3)
        assert found.rope_scaling == RopeScaling(factor=4.0)
    # transformers ignores a rotation that is not below the name of a kind of layer.
    found = config_from_hf({**given, "rope_parameters": {**linear, "rope_theta": 3e4}})
    assert (found.rope_theta, found.rope_scaling) == (5e4, None)
    with pytest.raises(ValueError, match="stretches the rotation of sliding_attention"):
        config_from_hf({**given, "rope_parameters": {"sliding_attention": linear}})


BAD = [
    (
        {"model_type": "deepseek_v32"},
        "has model_type 'deepseek_v32'. GPT can read only one of",
    ),
    (
        {"hidden_act": "relu"},
        "has hidden_act='relu', which GPT does not support",
    ),
    ({"attention_bias": True}, "attention_bias=True.*it must be False, or absent"),
    (
        {"rope_parameters": {"rope_type": "dynamic"}},
        "rope_type 'dynamic'.*default, linear, llama3, yarn, longrope",
    ),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5 in its rotation.*must be 1.0, or absent",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        r"rotation for each kind of layer \(full_attention\).*'llama' has only one",
    ),
    ({"rope_parameters": {"rope_theta": None}}, "has a setting with a wrong type"),
    (
        {"rope_scaling": {**LLAMA_31, "original_max_position_embeddings": None}},
        "has a setting with a wrong type",
    ),
    ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "1 layer_types for"),
    (
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping=50.0, which GPT does not support",
    ),
    ({"mlp_only_layers": [0]}, "mlp_only_layers.*must be \\[\\], or absent"),
    ({"quantization_config": {"bits": 4}}, "quantization_config.*must be None"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_unsupported_config_raises(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(hf_config("llama") | change)


BAD_OF_FAMILY = [
    ("gpt_neox", {"attention_bias": False}, "attention_bias=False.*must be True"),
    ("gpt_neox", {"hidden_act": "relu"}, "hidden_act='relu', which GPT does not"),
    ("granite", {"attention_bias": True}, "attention_bias=True.*must be False"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False.*must be True"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5.*must be 1.702, or absent"),
    ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit=6.0.*must be 7.0, or absent"),
    ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=False.*must be True, or absent"),
    ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2.*must be 1"),
    ("llama4", {"attention_bias": True}, "attention_bias=True.*must be False"),
    ("llama4", {"hidden_act": "gelu"}, "hidden_act='gelu'.*must be 'silu'"),
    ("llama4", {"no_rope_layers": [1, 0]}, "has 2 no_rope_layers for 4 layers"),
    (
        "llama4",
        {"attention_chunk_size": None},
        "'chunked_attention', but no attention_",
    ),
    ("llama4", {"attention_chunk_size": 8.0}, "attention_chunk_size=8.0. It must be"),
    (
        "llama4",
        {"layer_types": ["sliding_attention"] * 4},
        "layer_types .'sliding_attention'.*Supported layer_types: chunked_attention",
    ),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0.*must be None, or absent"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=T"),
    (
        "ministral3",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "needs a rotation with the rope_type 'yarn' and llama_4_scaling_beta",
    ),
]


@pytest.mark.parametrize(("family", "change", "message"), BAD_OF_FAMILY)
def test_unsupported_config_of_family_raises(
    family: str, change: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(hf_config(family) | change)


def test_gpt_oss_without_rotation_has_yarn() -> None:
    given = hf_config("gpt_oss")
    del given["rope_parameters"], given["layer_types"]
    found, preset = config_from_hf(given), GPTConfig.preset("gpt-oss-20b")
    assert found.rope_scaling == preset.rope_scaling
    assert (found.rope_theta, found.kinds) == (150_000.0, ("local", "global"))


def test_layers_of_one_kind_share_their_rotation() -> None:
    """In OLMo 3, only layers without a window have a stretched rotation."""
    given = hf_config("olmo3")
    for kind, is_stretched in (("full_attention", True), ("sliding_attention", False)):
        found = config_from_hf({**given, "layer_types": [kind] * 4})
        assert (found.rope_scaling is not None) == is_stretched
        assert (found.local_rope_theta, found.layer_kinds) == (None, None)


GROWTH = Growth(rate=0.1, length=8)
LONG_ROPE = LongRopeScaling(short=(1.0, 1.0), long=(2.0, 2.0), original_len=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_kinds": ("local",)}, "layer_kinds is .*needs window"),
        (
            {"layer_kinds": (), "window": 4},
            "layer_kinds is \\(\\); it must be None, or a tup",
        ),
        (
            {"rope_scaling": RopeScaling(factor=2)},
            "rope_scaling .*positions='rope'",
        ),
        ({"local_rope_theta": 1e4}, "local_rope_theta is .*needs layer_kinds"),
        ({"zero_centered_norm": True}, "zero_centered_norm .*needs norm='rms'"),
        ({"post_norms": True, "block": "parallel"}, "needs block='sequential'"),
        ({"logit_softcap": 0.0}, "logit_softcap is 0.0; it must be above 0, or None"),
        ({"chunk": 4, "window": 4}, "chunk is 4, which needs window=None"),
        ({"chunk": 0}, "chunk is 0; it must be at least 1"),
        ({"late_qk_norm": True}, "late_qk_norm is True.*positions='rope'"),
        ({"query_growth": GROWTH}, "query_growth is .*needs rotated_layers"),
        ({"expert_layers": (True, False)}, "expert_layers is .*needs experts"),
        (
            {"expert_layers": (True,)},
            "expert_layers is .*with True and False, of a length",
        ),
        ({"expert_layers": (True, True, False)}, "length that divides num_layers=4"),
        ({"pre_norms": False}, "pre_norms is False, which needs post_norms=True"),
        ({"wide_qk_norm": True}, "wide_qk_norm is True, which needs qk_norm"),
        ({"separate_norms": True}, "separate_norms is True.*needs block='parallel'"),
        ({"rotary_dim": 8}, "rotary_dim is 8, which needs positions='rope'"),
        ({"rotated_layers": (True, False)}, "rotated_layers is .*positions='rope'"),
        ({"rotated_layers": ()}, r"rotated_layers is \(\); it must be None, or a tup"),
        ({"positions": "rope", "rotary_dim": 5}, "rotary_dim is 5; it must be even"),
        ({"positions": "rope", "rotary_dim": 18}, "at most head_dim=16"),
        ({"activation": "swiglu", "exact_gelu": True}, "exact_gelu .*ation='gelu'"),
        (
            {"positions": "rope", "rope_scaling": LONG_ROPE},
            "rope_scaling has 2 divisors of frequencies, but there are 8 frequencies",
        ),
    ],
)
def test_inconsistent_settings_raise(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig.tiny(**change)


def test_exporting_unknown_architecture_raises() -> None:
    config = GPTConfig.tiny_llama(block="parallel")
    with pytest.raises(ValueError, match=r"GPTConfig.block is 'parallel'. The most si"):
        config_to_hf(config)


def test_model_is_exported_as_family_of_its_files() -> None:
    """A Mistral without a window has the same fields as a Llama."""
    mistral = config_from_hf(hf_config("mistral") | {"sliding_window": None})
    found = config_to_hf(mistral)
    assert found["model_type"] == "mistral"
    assert found["sliding_window"] is None  # the default is a window
    changed = replace(mistral, qkv_bias=True)
    assert config_to_hf(changed)["model_type"] == "qwen2"
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    ministral = hf_config("mistral") | {"model_type": "ministral", **kinds}
    assert kinds.items() <= config_to_hf(config_from_hf(ministral)).items()


def test_exporting_gemma3_with_a_soft_cap_of_attention_raises() -> None:
    """transformers would ignore the soft cap."""
    config = replace(config_from_hf(hf_config("gemma3")), softcap=50.0)
    with pytest.raises(ValueError, match=r"softcap is 50\.0"):
        config_to_hf(config)


def test_unknown_preset_lists_presets() -> None:
    with pytest.raises(ValueError, match=r"Unknown preset 'llama4'. Presets: gpt2, "):
        GPTConfig.preset("llama4")
    with pytest.raises(ValueError, match=r"high_frequency is 0.5; it must be at le"):
        RopeScaling(factor=2.0, high_frequency=0.5)
    with pytest.raises(ValueError, match=r"Growth.length is 0; it must be at least 1"):
        Growth(rate=0.1, length=0)


STRATEGIES = {
    "fsdp": lambda: FSDP(),
    "tp": lambda: Composite(TensorParallel(2, sequence=True), FSDP()),
    "pipeline": lambda: Composite(Pipeline(2), FSDP()),
}


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param(
            f, s, marks=[] if (f, s) == ("qwen3", "pipeline") else [pytest.mark.deep]
        )
        for f in FAMILIES
        for s in STRATEGIES
    ],
)
def test_logits_and_continuations_match_under_strategies(
    family: str, strategy: str
) -> None:
    trainer = Trainer(
        GPT.from_pretrained(GOLDENS / family),
        optax.sgd(0.1),
        next_token_loss,
        strategy=STRATEGIES[strategy](),
        loggers=(),
    )
    tokens = np.concatenate([golden(family)["tokens"]] * 4)
    logits = trainer.predict([tokens])
    expected = np.concatenate([golden(family)["logits"]] * 4)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    # Rows 0, 2, 4 and 6 are the golden's prompt, on different devices.
    go_on = nnx.jit(generate, static_argnames=("max_new_tokens", "temperature"))
    prompts = trainer.shard_batch(tokens)
    model = cast(GPT, trainer.model)
    found = np.asarray(go_on(model, prompts, max_new_tokens=64, temperature=0))
    greedy = golden(family)["greedy"].tolist()
    assert found[::2, tokens.shape[1] :].tolist() == [greedy] * 4


def losses(family: str, strategy: Strategy | None) -> np.ndarray:
    tokens = np.asarray(golden(family)["tokens"])
    batch = np.concatenate([tokens] * 4)[:, :17]
    devices = jax.devices() if strategy else jax.devices()[:1]
    trainer = Trainer(
        load(family),
        optax.sgd(0.1),
        next_token_loss,
        strategy=strategy or DataParallel(1),
        devices=devices,
        loggers=(),
        num_microbatches=2 if "Pipeline" in repr(strategy) else 1,
    )
    return trainer.fit([batch] * 3, 3)["loss"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[] if f == "gemma3" else [pytest.mark.deep])
        for f in FAMILIES
    ],
)
def test_training_matches_one_device(family: str, strategy: str) -> None:
    """Includes families with alternating layers, logit caps and all kinds of norms."""
    alone = losses(family, None)
    np.testing.assert_allclose(losses(family, STRATEGIES[strategy]()), alone, rtol=1e-5)
    assert alone[2] < alone[0]


def test_capped_logits_match_plain_jax() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (2, 12, 8))
    kernel = 2 * jax.random.normal(keys[1], (8, 32))
    labels = jax.random.randint(keys[2], (2, 12), 0, 32)

    def plain(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
        logits = 3 * jnp.tanh(hidden @ kernel / 3)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def ours(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
        loss = linear_cross_entropy(hidden, kernel, labels, softcap=3.0, chunk_size=5)
        return loss.value

    expected = jax.value_and_grad(plain, (0, 1))(hidden, kernel)
    found = jax.value_and_grad(ours, (0, 1))(hidden, kernel)
    check = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(check, found, expected)
    with pytest.raises(ValueError, match=r"softcap is 0; it must be above 0, or None"):
        linear_cross_entropy(hidden, kernel, labels, softcap=0)
