"""Adapters in PEFT's files: they are read and written, and invalid ones raise."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flax import nnx

from nnx_parallel.errors import WeightsError
from nnx_parallel.layers import lora, merge_lora
from nnx_parallel.models import GPT, ViT
from nnx_parallel.weights import load_adapters, save_adapters, save_pretrained
from tests.folders import GOLDENS, check_equal, content, make_trainer

pytestmark = pytest.mark.long

ADAPTERS = GOLDENS / "adapters"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama", "tp"),
        ("gemma3", "fsdp"),
        ("patterns", "one device"),
        ("gpt2", "one device"),
        pytest.param("llama", "pipeline", marks=pytest.mark.deep),
        pytest.param("gemma3", "one device", marks=pytest.mark.deep),
        pytest.param("patterns", "pipeline", marks=pytest.mark.deep),
    ],
)
def test_peft_adapters_round_trip_bit_for_bit(
    name: str, strategy: str, tmp_path: Path
) -> None:
    """`tests/goldens/make_adapters.py` made the adapters with PEFT."""
    theirs, ours = ADAPTERS / name, tmp_path / "adapters"
    given = json.loads((theirs / "adapter_config.json").read_text())
    source = GOLDENS / given["base_model_name_or_path"]
    base = GPT.from_pretrained(source)
    trainer = make_trainer(load_adapters(base, theirs), strategy, wrt=nnx.LoRAParam)
    tokens = np.load(source / "logits.npz")["tokens"]
    expected = np.load(theirs / "logits.npz")["logits"]
    logits = trainer.predict([np.concatenate([tokens] * 4)])[: len(tokens)]
    most = 7e-6 * np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, atol=most, rtol=0)
    save_adapters(ours, trainer.model, base=source.name)
    check_equal(content(ours), content(theirs))
    found = json.loads((ours / "adapter_config.json").read_text())
    for array in content(theirs):
        module = array.removeprefix("base_model.model.").rpartition(".lora_")[0]
        rank, scale = _strength(given, module)
        assert _strength(found, module) == (rank, pytest.approx(scale))
    ends = tuple(f".{end}" for end in found["target_modules"])
    for array in content(source):
        module = array.removesuffix(".weight")
        adapted = f"base_model.model.{module}.lora_A.weight" in content(theirs)
        assert module.endswith(ends) == adapted
    same = ("task_type", "base_model_name_or_path", "bias", "peft_type")
    assert {k: found[k] for k in same} == {k: given[k] for k in same}
    # The adapters load into the full model, and the base's weights are unchanged.
    model: Any = load_adapters(base, ours)(nnx.Rngs(0))
    table = next(x for n, x in content(source).items() if re.search(r"embed|wte", n))
    np.testing.assert_array_equal(model.embed.embedding[...], table)


def _strength(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Returns a module's rank and scale by the rule of PEFT 0.21."""
    of_setting = [config["r"], config["lora_alpha"]]
    for i, patterns in enumerate((config["rank_pattern"], config["alpha_pattern"])):
        for key in reversed(patterns):
            if re.match(rf"(.*\.)?({key})$", module):
                of_setting[i] = patterns[key]
    rank, alpha = of_setting
    return rank, alpha / rank ** (0.5 if config.get("use_rslora") else 1)


def test_image_adapters_have_no_text_task(tmp_path: Path) -> None:
    base = ViT.from_pretrained(GOLDENS / "vision" / "vit")
    model = lora(base, targets=r"query", rank=2)(nnx.Rngs(0))
    save_adapters(tmp_path / "vit", model, base="vit")
    config = json.loads((tmp_path / "vit" / "adapter_config.json").read_text())
    assert config["task_type"] is None
    assert config["target_modules"] == ["query"]
    # All layers of the attention's output and of the MLP end with "dense".
    model = lora(base, targets="out|up", rank=2)(nnx.Rngs(0))
    save_adapters(tmp_path / "dense", model, base="vit")
    config = json.loads((tmp_path / "dense" / "adapter_config.json").read_text())
    ends = ["attention.output.dense", "intermediate.dense"]
    assert config["target_modules"] == ends
    load_adapters(base, tmp_path / "vit")(nnx.Rngs(0))


def test_mismatched_adapters_raise(tmp_path: Path) -> None:
    base, folder = GPT.from_pretrained(GOLDENS / "llama"), tmp_path / "adapters"
    shutil.copytree(ADAPTERS / "llama", folder)
    given = json.loads((folder / "adapter_config.json").read_text())

    def load(model: Any = base, **changes: Any) -> Any:
        (folder / "adapter_config.json").write_text(json.dumps(given | changes))
        return load_adapters(model, folder)

    for changes, message in (
        ({"use_dora": True}, r"has use_dora=True, which this library does not support"),
        ({"peft_type": "IA3"}, r"peft_type='IA3'.*it must be 'LORA', or absent"),
        ({"rank_pattern": {"0.*q_proj": 2}}, r"`blocks.*query` several ranks and scal"),
        ({"alpha_pattern": {"q_proj": "2"}}, r"has an invalid value .*alpha_pattern"),
        ({"rank_pattern": {"(": 2}}, r"has an invalid value for one of the settings"),
        ({"r": None}, r"has an invalid value for one of the settings"),
        ({"unknown": {"a": 1}}, r"has unknown={'a': 1}, which this library does not"),
        *(
            ({"init_lora_weights": start}, f"has init_lora_weights='{start}', which")
            for start in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "new")
        ),
        *(
            ({name: value}, f"has {name}=.*, which this library does not support")
            for name, value in {
                "lora_bias": True,
                "bias": "lora_only",
                "modules_to_save": ["lm_head"],
                "target_parameters": ["experts.up"],
                "trainable_token_indices": [1],
                "layer_replication": [[0, 1]],
                "megatron_config": {"tp": 1},
                "use_qalora": True,
            }.items()
        ),
    ):
        with pytest.raises(WeightsError, match=message):
            load(**changes)
    for start in (False, "gaussian", "Gaussian", "eva", "orthogonal"):
        load(init_lora_weights=start, lora_dropout=0.1, qalora_group_size=8)
    with pytest.raises(WeightsError, match=r"has shape \(3, 32\) in the files; for"):
        load(r=4)(nnx.Rngs(0))
    with pytest.raises(WeightsError, match=r"pass names=, its table of names"):
        load(lambda rngs: base(rngs))
    with pytest.raises(WeightsError, match=r"has no adapter for a layer of the model"):
        load(GPT.from_pretrained(GOLDENS / "gpt2"))
    # One layer has adapters in the files, but is not adapted in the model.
    names = [entry for entry in base.names if "down" not in entry[0]]
    with pytest.raises(WeightsError, match=r"down_proj.lora_A.weight' and 3 more, wh"):
        load_adapters(base, folder, names=names)(nnx.Rngs(0))
    with pytest.raises(WeightsError, match=r"has no file adapter_config\.json"):
        load_adapters(base, tmp_path)


def test_adapters_keep_weights_from_folder() -> None:
    adapted = lora(GPT.from_pretrained(GOLDENS / "llama"), targets="query|value")
    trainer = make_trainer(adapted, wrt=nnx.LoRAParam)
    before = content(GOLDENS / "llama")["model.embed_tokens.weight"]
    batch = np.load(GOLDENS / "llama" / "logits.npz")["tokens"]
    trainer.fit([np.concatenate([batch] * 4)] * 2, 2)
    table = cast(Any, trainer.model).embed.embedding.get_value()
    np.testing.assert_array_equal(np.asarray(table), before)


def test_adapters_are_written_in_peft_format(tmp_path: Path) -> None:
    """`merge_lora` adds the same product of factors to a kernel as PEFT."""
    base, folder = GOLDENS / "llama", tmp_path / "adapters"
    adapted = lora(
        GPT.from_pretrained(base), targets=r"query|out|down", rank=4, alpha=8
    )
    trainer = make_trainer(adapted, "tp", wrt=nnx.LoRAParam)
    batch = np.load(base / "logits.npz")["tokens"]
    trainer.fit([np.concatenate([batch] * 4)] * 2, 2)
    save_adapters(folder, trainer.model, base=str(base))
    save_pretrained(tmp_path / "merged", merge_lora(trainer.model))
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert config["lora_alpha"] == 8
    assert config["target_modules"] == ["down_proj", "o_proj", "q_proj"]
    found, before = content(folder), content(base)
    merged = content(tmp_path / "merged")
    assert len(found) == 2 * 2 * 3
    for name, array in before.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        expected = array
        if f"{layer}.lora_A.weight" in found:
            a, b = (found[f"{layer}.lora_{x}.weight"] for x in "AB")
            assert a.shape == (4, array.shape[1])
            assert np.abs(b).max() > 0
            expected = array + 2 * (b @ a)
        np.testing.assert_allclose(merged[name], expected, atol=1e-6)
    with pytest.raises(
        WeightsError, match=r"Pass merge_lora\(model\), or write only the"
    ):
        save_pretrained(tmp_path / "new", trainer.model)
    with pytest.raises(WeightsError, match=r"has no adapters\. layers\.lora adds"):
        save_adapters(tmp_path / "new", merge_lora(trainer.model), base="b")
    fused = lora(GPT.from_pretrained(GOLDENS / "gpt2"), targets="query")
    with pytest.raises(WeightsError, match=r"PEFT can adapt only the complete kernel"):
        save_adapters(tmp_path / "new", make_trainer(fused).model, base="b")
    assert not (tmp_path / "new").exists()


def test_adapters_of_alternating_layers_with_other_order_of_features(
    tmp_path: Path,
) -> None:
    """Llama 4 has another order of the features of queries in files."""
    base, folder = GOLDENS / "llama4", tmp_path / "adapters"
    model = lora(GPT.from_pretrained(base), targets="query|mlp.up", rank=2)(nnx.Rngs(0))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "lora_b":
            size = leaf.get_value().size
            leaf.set_value(np.arange(size).reshape(leaf.get_value().shape) / size)
    save_adapters(folder, model, base="llama4")
    found = content(folder)
    assert len(found) == 2 * (4 + 2)
    save_pretrained(tmp_path / "merged", merge_lora(model))
    merged, before = content(tmp_path / "merged"), content(base)
    for layer in ("3.self_attn.q_proj", "2.feed_forward.up_proj"):
        a, b = (
            found[f"base_model.model.model.layers.{layer}.lora_{x}.weight"]
            for x in "AB"
        )
        name = f"model.layers.{layer}.weight"
        expected = before[name].astype(np.float32) + b @ a
        np.testing.assert_allclose(merged[name], expected, atol=1e-6)
    again: Any = load_adapters(GPT.from_pretrained(base), folder)(nnx.Rngs(1))
    for block in (0, 1):
        ours, theirs = (
            cast("Any", m).blocks.layer[block].attention.query.lora_b[...]
            for m in (model, again)
        )
        np.testing.assert_array_equal(ours, theirs)


def test_adapters_of_several_ranks_and_scales(tmp_path: Path) -> None:
    base = GPT.from_pretrained(GOLDENS / "llama")
    model = lora(base, targets="up|gate", rank=2, alpha=3)(nnx.Rngs(0))
    model = lora(model, targets="down", rank=4)
    save_adapters(tmp_path / "adapters", model, base="llama")
    text = (tmp_path / "adapters" / "adapter_config.json").read_text()
    config = json.loads(text)
    assert (config["r"], config["lora_alpha"]) == (2, 3)
    assert config["rank_pattern"] == config["alpha_pattern"] == {"down_proj": 4}
    again: Any = load_adapters(base, tmp_path / "adapters")(nnx.Rngs(1))
    mlp = again.blocks.layer.mlp
    assert (mlp.up.lora_scale, mlp.down.lora_scale) == (1.5, 1)
    assert mlp.down.lora_a.shape[-1] == 4
