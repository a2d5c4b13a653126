"""Other people's weights: read onto a mesh, written from it, and refused."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer
from safetensors.flax import save_file

from nnx_parallel import FSDP
from nnx_parallel.errors import WeightsError
from nnx_parallel.layers import Stack, lora
from nnx_parallel.models import GPT
from nnx_parallel.weights import (
    Pretrained,
    save_pretrained,
)
from nnx_parallel.weights.files import open_tensors
from nnx_parallel.weights.names import (
    find_numbers,
    groups_of,
    join_parts,
    name_at,
    rules_of,
)
from tests.folders import GOLDENS, STRATEGIES, check_equal, content, make_trainer

pytestmark = pytest.mark.long

FAMILIES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
IN_DEPTH = [
    pytest.param(
        family,
        strategy,
        marks=[] if family in ("gpt2", "gemma3") else [pytest.mark.deep],
    )
    for family in FAMILIES
    for strategy in STRATEGIES
]


@pytest.mark.parametrize(("family", "strategy"), IN_DEPTH)
def test_folder_round_trips_under_any_strategy(
    family: str, strategy: str, tmp_path: Path
) -> None:
    folder, written = GOLDENS / family, tmp_path / "written"
    trainer = make_trainer(GPT.from_pretrained(folder, dtype="keep"), strategy)
    golden = np.load(folder / "logits.npz")
    save_pretrained(written, trainer.model, source=folder)
    check_equal(content(written), content(folder))
    # The written files, read again in float32, give transformers' logits.
    again = make_trainer(GPT.from_pretrained(written), strategy)
    whole = [np.asarray(x) for x in jax.tree.leaves(nnx.state(again.model, nnx.Param))]
    alone = make_trainer(GPT.from_pretrained(folder), "one device").model
    expected = jax.tree.leaves(nnx.state(alone, nnx.Param))
    for ours, theirs in zip(whole, expected, strict=True):
        assert np.array_equal(ours, theirs)
    logits = nnx.jit(lambda model, tokens: model(tokens))(alone, golden["tokens"])
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4, rtol=0)
    config = json.loads((written / "config.json").read_text())
    theirs = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == theirs["eos_token_id"]
    assert config["dtype"] == theirs["dtype"]
    assert (written / "generation_config.json").is_file()


def test_each_device_holds_only_its_shards() -> None:
    trainer = make_trainer(GPT.from_pretrained(GOLDENS / "llama"))
    up = cast(Any, trainer.model).blocks.layer.mlp.up.kernel.get_value()
    assert {s.data.size for s in up.addressable_shards} == {up.size // 8}


def test_training_continues_from_weights(tmp_path: Path) -> None:
    tokens = np.load(GOLDENS / "qwen3" / "logits.npz")["tokens"]
    batch = np.concatenate([tokens] * 4)[:, :17]
    losses = {}
    for strategy in ("one device", "tp"):
        trainer = make_trainer(GPT.from_pretrained(GOLDENS / "qwen3"), strategy)
        losses[strategy] = trainer.fit([batch] * 3, 3)["loss"]
        save_pretrained(tmp_path / strategy, trainer.model, dtype="bfloat16")
    np.testing.assert_allclose(losses["tp"], losses["one device"], rtol=1e-5)
    found = content(tmp_path / "tp")
    assert {array.dtype.name for array in found.values()} == {"bfloat16"}
    assert "model.layers.1.self_attn.q_norm.weight" in found


def test_traced_from_pretrained_raises() -> None:
    folder = GOLDENS / "llama"
    golden = np.load(folder / "logits.npz")
    model: Any = lora(GPT.from_pretrained(folder), targets="query")(nnx.Rngs(0))
    logits = nnx.jit(lambda model, tokens: model(tokens))(model, golden["tokens"])
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4, rtol=0)
    pretrained = GPT.from_pretrained(folder)
    with pytest.raises(
        WeightsError, match=r"cannot be read while a function is traced"
    ):
        make_trainer(lambda rngs: pretrained(rngs))


class Scaled(nnx.Module):
    """A user's model with two layers in a list, and a Variable."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(
            [nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)]
        )
        self.count = nnx.Variable(jnp.array(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x * self.count[...]


SCALED = [
    (f"layers.{i}.{ours}", f"fc{i}.{theirs}", pattern)
    for i in range(2)
    for ours, theirs, pattern in (
        ("kernel", "weight", "out into -> into out"),
        ("bias", "bias", "out -> out"),
    )
]


NUMBERED = [
    ("layers.{}.kernel", "fc{}.weight", "out into -> into out"),
    ("layers.{}.bias", "fc{}.bias", "out -> out"),
]


def scaled(rngs: nnx.Rngs) -> nnx.Module:
    return Scaled(rngs=rngs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights that the user's model wrote to several files."""
    target = tmp_path / "mine"
    model = Scaled(rngs=nnx.Rngs(1))
    save_pretrained(target, model, names=SCALED, max_file_bytes=600)
    return target


@pytest.mark.parametrize("names", [SCALED, NUMBERED], ids=["each", "numbered"])
def test_user_model_loads_with_custom_names(folder: Path, names: Any) -> None:
    assert len(list(folder.glob("model-*-of-00002.safetensors"))) == 2
    assert not (folder / "config.json").exists()
    expected = Scaled(rngs=nnx.Rngs(1))
    pretrained = Pretrained(scaled, folder, names)
    params, arrays = FSDP(min_size=1), nnx.state(expected)
    model = params.init(pretrained, nnx.Rngs(0))
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        ours = dict(nnx.to_flat_state(arrays))[path]
        assert np.array_equal(leaf.get_value(), ours.get_value()), path
    kept: Any = Pretrained(scaled, folder, names, dtype="bfloat16")(nnx.Rngs(0))
    assert kept.layers[0].kernel.get_value().dtype == jnp.bfloat16
    again = folder.parent / "again"
    save_pretrained(again, expected, names=names, max_file_bytes=600)
    check_equal(content(again), content(folder))
    longer = [*names, ("blocks.{}.kernel", "b{}.weight", "out into -> into out")]
    with pytest.raises(
        WeightsError, match=r"has `blocks\.\{\}\.kernel`, which the mod"
    ):
        Pretrained(scaled, folder, longer)(nnx.Rngs(0))


class Fused(nnx.Module):
    """A user's model whose files hold queries, keys and values in one array."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(
            nnx.Dict(
                query=nnx.LinearGeneral(8, (4, 2), rngs=rngs),
                key=nnx.LinearGeneral(8, (1, 2), rngs=rngs),
                value=nnx.Linear(8, 2, rngs=rngs),
            )
            for _ in range(2)
        )


FUSED = [
    (f"layers.{{}}.{name}.{last}", f"h.{{}}.qkv.{theirs}", f"{rows}: {pattern}")
    for name, rows, outs in (
        ("query", "heads 0:4 of 6", "heads size"),
        ("key", "heads 4:5 of 6", "heads size"),
        ("value", "heads 5:6 of 6", "(heads size), heads=1 size=2"),
    )
    for last, theirs, pattern in (
        ("kernel", "weight", f"(heads size) embed -> embed {outs}"),
        ("bias", "bias", f"(heads size) -> {outs}"),
    )
]


def test_unequal_parts_of_an_array_load_and_save(tmp_path: Path) -> None:
    expected = Fused(nnx.Rngs(1))
    save_pretrained(tmp_path / "fused", expected, names=FUSED)
    layer: Any = expected.layers[1]
    parts = [layer.query, layer.key, layer.value]
    rows = [x.kernel.get_value().reshape(8, -1).T for x in parts]
    weight = content(tmp_path / "fused")["h.1.qkv.weight"]
    np.testing.assert_array_equal(weight, np.concatenate(rows))
    model = FSDP(min_size=1).init(
        Pretrained(Fused, tmp_path / "fused", FUSED), nnx.Rngs(0)
    )
    pairs = zip(
        *(jax.tree.leaves(nnx.state(m)) for m in (model, expected)), strict=True
    )
    assert all(np.array_equal(found, x) for found, x in pairs)


def alternating(rngs: nnx.Rngs) -> nnx.Module:
    """Returns four layers of two widths, which alternate."""
    widths = (8, 16, 8, 16)
    blocks = [nnx.Dict(up=nnx.Linear(4, width, rngs=rngs)) for width in widths]
    return nnx.Dict(blocks=Stack.of(blocks, period=2))


ALTERNATING = [
    (f"blocks.layer.{i}.up.{last}", f"h.{{{i}::2}}.up.{theirs}", pattern)
    for i in range(2)
    for last, theirs, pattern in (
        ("kernel", "weight", "out into -> into out"),
        ("bias", "bias", "out -> out"),
    )
]


def test_alternating_layers_load_and_save(tmp_path: Path) -> None:
    expected: Any = alternating(nnx.Rngs(1))
    save_pretrained(tmp_path / "weights", expected, names=ALTERNATING)
    written = content(tmp_path / "weights")
    assert [written[f"h.{i}.up.weight"].shape[0] for i in range(4)] == [8, 16, 8, 16]
    kernels = expected["blocks"].layer[1]["up"].kernel.get_value()
    np.testing.assert_array_equal(written["h.3.up.weight"], kernels[1].T)
    source = Pretrained(alternating, tmp_path / "weights", ALTERNATING)
    model = FSDP(min_size=1).init(source, nnx.Rngs(0))
    pairs = zip(
        *(jax.tree.leaves(nnx.state(m)) for m in (model, expected)), strict=True
    )
    assert all(np.array_equal(found, x) for found, x in pairs)
    assert find_numbers("h.{1::2}.e.{}.w", "h.3.e.4.w")
    assert not find_numbers("h.{1::2}.e.{}.w", "h.2.e.4.w")
    assert not find_numbers("h.{3:}.w", "h.2.w")
    assert name_at("h.{3:}.e.{}.w", (2, 1)) == "h.5.e.1.w"


def test_slices_of_a_dim_in_the_middle() -> None:
    """InternLM2 groups each key's queries with the key and its value."""
    left, sizes = "(kv each size) embed", "kv=2 size=3"
    entries = [
        (name, "wqkv", f"each {at} of 4: {left} -> embed (kv each size), {sizes} {n}")
        for name, at, n in (
            ("key", "2:3", "each=1"),
            ("query", "0:2", "each=2"),
            ("value", "3:4", "each=1"),
        )
    ]
    shapes = {"query": (5, 12), "key": (5, 6), "value": (5, 6)}
    rules = rules_of(entries, shapes)
    theirs = np.arange(24 * 5).reshape(24, 5)
    (group,) = groups_of(rules.values())
    assert [rule.ours for rule in group] == ["query", "key", "value"]
    dims = [rule.sizes(shapes[rule.ours]) for rule in group]
    pairs = list(zip(group, dims, strict=True))
    ours = [rule.to_ours(theirs, own) for rule, own in pairs]
    assert {rule.shape_of_theirs(own) for rule, own in pairs} == {theirs.shape}
    np.testing.assert_array_equal(ours[1].T, theirs[[6, 7, 8, 18, 19, 20]])
    np.testing.assert_array_equal(join_parts(group, ours, dims), theirs)


def test_direct_call_computes_no_initial_weights(folder: Path) -> None:
    def traced(rngs: nnx.Rngs) -> nnx.Module:
        model = Scaled(rngs=rngs)
        assert isinstance(model.layers[0].kernel.get_value(), Tracer)
        return model

    rngs, drawn = nnx.Rngs(0), nnx.Rngs(0)
    model: Any = Pretrained(traced, folder, SCALED)(rngs)
    Scaled(rngs=drawn)
    assert model.count.get_value() == 3
    assert model.layers[0].kernel.get_value().shape == (8, 16)
    # What the caller draws next does not depend on how the model was built.
    assert rngs.params() == drawn.params()


def rewrite(path: Path, change: Callable[[dict], Any]) -> None:
    """Changes the header of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0000")


def announce(path: Path) -> None:
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])


def pickle_it(path: Path) -> None:
    path.write_bytes(b"\x80\x04\x95" + bytes(100))


def nest_deeply(path: Path) -> None:
    text = b"[" * 100_000
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def poison(path: Path) -> None:
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start : start + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(bytes(data))


def with_entry(**fields: Any) -> Callable[[Path], None]:
    """Changes the header's entry for the first array."""

    def change(header: dict) -> None:
        header["fc0.weight"] |= fields

    return lambda path: rewrite(path, change)


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (cut, "it is truncated"),
    (lengthen, "it is longer than its arrays"),
    (announce, r"not a safetensors file: .* header of 1,099,511,627,776 bytes"),
    (pickle_it, "It is a pickle"),
    (nest_deeply, "is nested too deeply: JSON is read up to 100 levels"),
    (poison, "has values that are not finite"),
    (with_entry(data_offsets=[4, 516]), "has unused bytes before"),
    (with_entry(dtype="F8_E5M2"), "has dtype F8_E5M2. Supported dtypes: F64"),
    (
        with_entry(shape=[3]),
        r"has 512 bytes, but its shape \(3,\) and dtype F32 need 12 bytes",
    ),
    (with_entry(shape=[-1]), r"has invalid numbers: shape \[-1\]"),
    (with_entry(shape="x"), "lacks the dtype, shape or offsets"),
    (lambda path: rewrite(path, lambda header: [1]), "holds list, not a JSON object"),
    (
        lambda path: rewrite(path, lambda h: h | {"b": h["fc0.bias"]}),
        "overlaps with another array",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_files_raise(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    target = tmp_path / "mine"
    save_pretrained(target, Scaled(rngs=nnx.Rngs(1)), names=SCALED)
    damage(target / "model.safetensors")
    with pytest.raises(WeightsError, match=message):
        FSDP(min_size=1).init(Pretrained(scaled, target, SCALED), nnx.Rngs(0))


def test_files_that_the_index_does_not_name_are_not_read(folder: Path) -> None:
    """Checks Mistral's second copy, variants in another dtype, and adapters."""
    expected = open_tensors(folder)
    first = folder / "model-00001-of-00002.safetensors"
    beside = ("consolidated", "model.fp16-00001-of-00002", "adapter_model")
    for name in beside:
        shutil.copy(first, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.fp16.json").write_text("{}")
    assert open_tensors(folder) == expected


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            {"fc0.bias": "../model.safetensors"},
            "must be a .safetensors file in the same",
        ),
        ({"fc0.bias": "/etc/passwd"}, "must be a .safetensors file in the same"),
        ({"fc0.bias": "model-00009-of-00002.safetensors"}, "does not exist"),
        ({"fc9.bias": "model-00001-of-00002.safetensors"}, "It is not"),
        (None, "does not list .*, which is in a file"),
        ("x", "has no weight_map"),
    ],
)
def test_invalid_index_raises(places: Any, message: str, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    if places is None:
        del found["weight_map"]["fc0.bias"]
    else:
        is_map = isinstance(places, dict)
        found["weight_map"] = found["weight_map"] | places if is_map else places
    index.write_text(json.dumps(found))
    with pytest.raises(WeightsError, match=message):
        open_tensors(folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (SCALED[:3], r"table of names has no entry for `layers.1.bias` of the model"),
        ([*SCALED, SCALED[0]], r"'fc0.weight' has the parts \[0, 0\], for"),
        (
            [("layers.0.bias", "b", "part 1 of 2: n a -> n a"), *SCALED],
            r"'b' has the parts \[1\], for `layers.0.bias`",
        ),
        (
            [("layers.0.bias", "b", "rows 0:16 of 24: rows -> rows"), *SCALED],
            r"'b' is cut along rows into 0:16 of 24, for `layers.0.bias`\. The slices",
        ),
        (
            [
                ("layers.0.bias", "b", "rows 0:16 of 24: rows -> rows"),
                ("layers.1.bias", "b", "rows 14:24 of 24: rows -> rows"),
                *SCALED[::2],
            ],
            r"'b' is cut along rows into 0:16 of 24, 14:24 of 24, for",
        ),
        (
            [
                ("layers.0.bias", "b", "rows 0:14 of 24: rows -> rows"),
                ("layers.1.bias", "b", "rows 14:24 of 24: rows -> rows"),
                *SCALED[::2],
            ],
            r"takes the entries 0:14 of rows, but the array, of shape \(16,\), has",
        ),
        ([*SCALED, ("layers.2.bias", "b", "a -> a")], "has `layers.2.bias`, which the"),
        ([("layers.0.kernel", "w"), *SCALED[1:]], "must be three strings"),
        ([("layers.0.kernel", "w", "a b"), *SCALED[1:]], "must be an einops pattern"),
        (
            [("layers.0.kernel", "w", "a -> a"), *SCALED[1:]],
            r"pattern makes dims \(a\)",
        ),
        ([("layers.0.kernel", "w", "a b -> a c"), *SCALED[1:]], "must have the same"),
        (
            [("layers.0.kernel", "fc0.wieght", "b a -> a b"), *SCALED[1:]],
            "The files have no array 'fc0.wieght', .* Did you mean 'fc0.weight'?",
        ),
        (
            [("layers.0.kernel", "fc0.weight", "a b -> a b"), *SCALED[1:]],
            r"has shape \(16, 8\) in the files; .* it must be \(8, 16\)",
        ),
    ],
)
def test_invalid_name_table_raises(names: Any, message: str, folder: Path) -> None:
    with pytest.raises(WeightsError, match=message):
        Pretrained(scaled, folder, names)(nnx.Rngs(0))


def test_unused_array_raises_unless_ignored(folder: Path) -> None:
    def small(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(8, 16, rngs=rngs)

    names = [(ours.removeprefix("layers.0."), b, c) for ours, b, c in SCALED[:2]]
    with pytest.raises(WeightsError, match=r"have 'fc1.bias' and 1 more, which the"):
        Pretrained(small, folder, names)(nnx.Rngs(0))
    assert Pretrained(small, folder, names, ignored="^fc1")(nnx.Rngs(0))


def test_missing_or_unsupported_folder_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test hides the library, which other packages may have installed.
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsError, match=r"has no file config\.json"):
        GPT.from_pretrained(tmp_path)
    with pytest.raises(WeightsError, match=r"pip install 'nnx-parallel\[hub\]'"):
        GPT.from_pretrained("org/model")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(
        WeightsError, match=r"It has: pytorch_model.bin. Pickled weights"
    ):
        open_tensors(tmp_path)


Rename = Callable[[str], str | None]
VISION = {
    "vision_tower.vision_model.embeddings.patch.weight": np.ones((2, 3), np.float32),
    "multi_modal_projector.weight": np.ones(3, np.float32),
}


def renamed(
    path: Path,
    family: str,
    rename: Rename,
    more: dict[str, np.ndarray] | None = None,
    **wrap: Any,
) -> Path:
    """Writes a golden with other names; a name that becomes None is left out."""
    arrays = {rename(n): jnp.asarray(x) for n, x in content(GOLDENS / family).items()}
    arrays = {n: x for n, x in arrays.items() if n is not None}
    arrays |= {n: jnp.asarray(x) for n, x in (more or {}).items()}
    path.mkdir()
    save_file(cast(Any, arrays), path / "model.safetensors")
    config = json.loads((GOLDENS / family / "config.json").read_text())
    if wrap:
        config = {"text_config": config, **wrap}
    (path / "config.json").write_text(json.dumps(config))
    return path


def prefixed(before: str, after: str) -> Rename:
    return lambda name: after + name.removeprefix(before)


@pytest.mark.parametrize(
    ("family", "rename"),
    [
        ("gpt2", prefixed("transformer.", "")),  # as published, in all sizes
        ("smollm", prefixed("model.", "")),
        ("llama", lambda name: name.removeprefix("model.")),
        ("llama", lambda name: f"language_model.{name}"),
        ("qwen3_moe", lambda name: re.sub(r"^model\.", "model.language_model.", name)),
    ],
)
def test_names_with_other_prefixes_load(
    family: str, rename: Rename, tmp_path: Path
) -> None:
    found = GPT.from_pretrained(renamed(tmp_path / "m", family, rename))
    expected = GPT.from_pretrained(GOLDENS / family)
    nnx.eval_shape(lambda: found.build_shapes(nnx.Rngs(0)))
    used = content(GOLDENS / family)
    assert used.keys() <= expected.tensors.keys()
    for name in used.keys() - ({"lm_head.weight"} - found.tensors.keys()):
        ours, theirs = found.tensors[name].view(), expected.tensors[name].view()
        assert ours.tobytes() == theirs.tobytes(), name


@pytest.mark.parametrize(
    "start", ["language_model.model.", "model.language_model.", "language_model."]
)
def test_only_the_language_model_of_a_larger_model_loads(
    start: str, tmp_path: Path
) -> None:
    """Checks Gemma 3 4B as published, from transformers 5, and from its base class."""
    outer = "model." if start.startswith("model.") else ""
    more = {outer + name: x for name, x in VISION.items()}
    rename = prefixed("model.", start)
    folder = renamed(tmp_path / "m", "gemma3", rename, more, model_type="gemma3")
    with pytest.warns(UserWarning, match="Left out: multi_modal_projector, vision_t"):
        found = GPT.from_pretrained(folder)
    nnx.eval_shape(lambda: found.build_shapes(nnx.Rngs(0)))
    expected = GPT.from_pretrained(GOLDENS / "gemma3").tensors
    assert found.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found.tensors[name].view().tobytes() == tensor.view().tobytes(), name


def test_names_that_cannot_be_read_raise(tmp_path: Path) -> None:
    def base(name: str) -> str | None:
        return name.removeprefix("model.") if name.startswith("model.") else None

    folder = renamed(tmp_path / "base", "llama", base)
    with pytest.raises(WeightsError, match=r"no array 'lm_head.weight'.*LlamaForCausa"):
        GPT.from_pretrained(folder)
    twice = {"embed_tokens.weight": np.ones((2, 2), np.float32)}
    folder = renamed(tmp_path / "twice", "smollm", lambda name: name, twice)
    with pytest.raises(WeightsError, match=r"'embed_tokens.weight', 'model.embed_tok"):
        GPT.from_pretrained(folder)
    # Only a config with a text_config may have other parts.
    folder = renamed(tmp_path / "more", "smollm", lambda name: name, VISION)
    with pytest.raises(
        WeightsError, match=r"have 'multi_modal_projector.weight' and 1"
    ):
        GPT.from_pretrained(folder).build_shapes(nnx.Rngs(0))
    wrap = {"model_type": "gemma3", "tie_word_embeddings": False}
    folder = renamed(tmp_path / "tied", "smollm", lambda name: name, **wrap)
    with pytest.raises(ValueError, match="tie_word_embeddings=False, but its text_con"):
        GPT.from_pretrained(folder)


def test_mismatched_config_and_files_raise(tmp_path: Path) -> None:
    target = tmp_path / "llama"
    shutil.copytree(GOLDENS / "llama", target)
    config = json.loads((target / "config.json").read_text())
    changed = config | {"intermediate_size": 64}
    (target / "config.json").write_text(json.dumps(changed))
    with pytest.raises(WeightsError, match="Config and files disagree"):
        make_trainer(GPT.from_pretrained(target))


def test_export_never_overwrites_or_leaves_partial_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, model = tmp_path / "mine", Scaled(rngs=nnx.Rngs(1))
    save_pretrained(target, model, names=SCALED)
    before = content(target)
    with pytest.raises(WeightsError, match=r"exists and is not empty\. It is not"):
        save_pretrained(target, model, names=SCALED)
    check_equal(content(target), before)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nnx_parallel.weights.export._write_texts", fail)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(tmp_path / "new", model, names=SCALED)
    assert not (tmp_path / "new").exists()
    with pytest.raises(WeightsError, match="has no table of names: pass"):
        save_pretrained(tmp_path / "new", model)


def test_tied_model_ignores_head_in_files(tmp_path: Path) -> None:
    target = tmp_path / "smollm"
    shutil.copytree(GOLDENS / "smollm", target)
    table = open_tensors(target)["model.embed_tokens.weight"]
    extra = tmp_path / "smollm" / "extra.safetensors"
    header: dict[str, Any] = {
        "lm_head.weight": {"dtype": "BF16", "shape": list(table.shape)}
    }
    data = np.zeros(table.shape, ml_dtypes.bfloat16).tobytes()
    header["lm_head.weight"]["data_offsets"] = [0, len(data)]
    text = json.dumps(header).encode()
    extra.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert GPT.from_pretrained(target)(nnx.Rngs(0))
