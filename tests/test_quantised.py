"""Folders with arrays of FP8 and of MXFP4: values bit for bit, and refusals.

`tests/goldens/make_quantised.py` made the goldens, whose values transformers computed.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.flax import save_file

from nnx_parallel.errors import WeightsError
from nnx_parallel.models import GPT, config_from_hf
from nnx_parallel.weights import Pretrained, save_pretrained
from tests.folders import GOLDENS, content, make_trainer

pytestmark = pytest.mark.long

FOLDER = GOLDENS / "quantised" / "qwen3_moe"


@pytest.mark.parametrize(
    ("name", "dtype", "strategy"),
    [
        ("qwen3_moe", None, "tp"),
        ("qwen3_moe", "keep", "fsdp"),
        ("gpt_oss", "keep", "tp"),
        pytest.param("qwen3_moe", "keep", "tp", marks=pytest.mark.deep),
        pytest.param("qwen3_moe", "bfloat16", "pipeline", marks=pytest.mark.deep),
        pytest.param("gpt_oss", None, "fsdp", marks=pytest.mark.deep),
    ],
)
def test_values_match_transformers(
    name: str, dtype: Any, strategy: str, tmp_path: Path
) -> None:
    folder = GOLDENS / "quantised" / name
    trainer = make_trainer(GPT.from_pretrained(folder, dtype=dtype), strategy)
    save_pretrained(tmp_path / "written", trainer.model, source=folder)
    found = content(tmp_path / "written")
    values = json.loads((folder / "values.json").read_text())
    column = 0 if dtype is None else 1
    expected = {name: both[column] for name, both in values.items()}
    assert {name: zlib.crc32(x.tobytes()) for name, x in found.items()} == expected
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert "quantization_config" not in written


def linear(folder: Path, block_size: Any, **arrays: jnp.ndarray) -> Pretrained:
    """A layer with a quantised kernel of 5 rows and 7 columns in the file."""
    elements = (jnp.arange(35.0).reshape(5, 7) - 17).astype(jnp.float8_e4m3fn)
    given = {"w.weight": elements, "w.bias": jnp.ones(5)} | {
        f"w.{name}": x for name, x in arrays.items()
    }
    save_file(given, folder / "model.safetensors")
    names = [("kernel", "w.weight", "o i -> i o"), ("bias", "w.bias", "o -> o")]
    build = lambda rngs: nnx.Linear(7, 5, rngs=rngs)  # noqa: E731
    return Pretrained(build, folder, names, block_size=block_size)


@pytest.mark.parametrize(
    ("block_size", "rows", "columns"),
    [
        ((4, 3), [0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1, 2]),  # the last blocks are smaller
        ((128, 128), [0] * 5, [0] * 7),
        ((), [0] * 5, [0] * 7),
    ],
)
def test_last_blocks_may_be_smaller(
    block_size: tuple, rows: list, columns: list, tmp_path: Path
) -> None:
    scales = 1.1 + jnp.arange((rows[-1] + 1) * (columns[-1] + 1), dtype=jnp.float32)
    shape = (rows[-1] + 1, columns[-1] + 1) if block_size else ()
    more = {} if block_size else {"activation_scale": jnp.ones(())}
    scales = scales.reshape(shape)
    load = linear(tmp_path, block_size, weight_scale_inv=scales, **more)
    elements = np.asarray(jnp.arange(35.0).reshape(5, 7) - 17, jnp.float8_e4m3fn)
    each = np.asarray(scales).reshape(rows[-1] + 1, -1)[np.ix_(rows, columns)]
    expected = elements.astype(np.float32) * each
    model: Any = load(nnx.Rngs(0))
    np.testing.assert_array_equal(model.kernel[...], expected.T)


@pytest.mark.parametrize(
    ("block_size", "scales", "message"),
    [
        ((4, 4), {}, "'w.weight' .* elements of FP8.*no array 'w.weight_scale_inv'"),
        (None, {"weight_scale_inv": jnp.ones((2, 2))}, "no quantization_config with"),
        ((4, 4), {"weight_scale_inv": jnp.ones((2, 1))}, r"must have shape \(2, 2\)"),
        ((), {"weight_scale_inv": jnp.ones((2, 2))}, r"must have shape \(\)"),
        (
            (4, 4),
            {"weight_scale_inv": jnp.ones((2, 2), jnp.uint8)},
            "have dtype uint8 .* one of the dtypes float32, bfloat16, float16",
        ),
    ],
)
def test_missing_or_wrong_scales_raise(
    block_size: Any, scales: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightsError, match=message):
        linear(tmp_path, block_size, **scales)


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        (jnp.zeros((2, 3, 1, 16), jnp.uint8), jnp.zeros((2, 3, 2), jnp.uint8)),
        (jnp.zeros((2, 3, 1, 8), jnp.uint8), jnp.zeros((2, 3, 1), jnp.uint8)),
        (jnp.zeros((3, 1, 16), jnp.uint8), jnp.zeros((3, 1), jnp.uint8)),
        (jnp.zeros((2, 3, 1, 16), jnp.uint8), jnp.zeros((2, 3, 1))),
    ],
)
def test_wrong_arrays_of_mxfp4_raise(blocks: Any, scales: Any, tmp_path: Path) -> None:
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    build = lambda rngs: nnx.Linear(7, 5, rngs=rngs)  # noqa: E731
    with pytest.raises(WeightsError, match="must be uint8"):
        Pretrained(build, tmp_path, [])


@pytest.mark.parametrize("dtype", [None, "keep", "bfloat16"])
def test_integers_without_scales_raise(dtype: Any, tmp_path: Path) -> None:
    save_file({"w": jnp.ones((5, 7), jnp.int8)}, tmp_path / "model.safetensors")
    build = lambda rngs: nnx.Linear(7, 5, use_bias=False, rngs=rngs)  # noqa: E731
    source = Pretrained(build, tmp_path, [("kernel", "w", "o i -> i o")], dtype=dtype)
    message = "'w' has dtype int8 in the files, but `kernel` has dtype float32"
    with pytest.raises(WeightsError, match=message):
        source(nnx.Rngs(0))


def test_elements_that_are_not_finite_raise(tmp_path: Path) -> None:
    scales = jnp.full((2, 2), jnp.nan)
    with pytest.raises(WeightsError, match=r"'w.weight' .* not finite"):
        linear(tmp_path, (4, 4), weight_scale_inv=scales)(nnx.Rngs(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "with quant_method='gptq'"),
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'"),
        ({"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
        ({"fmt": "e5m2"}, "with fmt='e5m2'"),
        ({"expert_dtype": "fp4"}, "with expert_dtype='fp4'"),
        ({"weight_block_size": [128]}, r"with weight_block_size=\[128\]"),
        ({"weight_block_size": [0, 128]}, r"with weight_block_size=\[0, 128\]"),
    ],
)
@pytest.mark.parametrize("is_inner", [False, True])
def test_other_methods_raise(change: dict, message: str, is_inner: bool) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    config["quantization_config"] |= change
    if is_inner:
        config = {"model_type": "qwen3_moe_vl", "text_config": config}
    with pytest.raises(ValueError, match=message):
        config_from_hf(config)


def test_blocks_may_cover_all_elements() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = None
    assert config_from_hf(config).num_layers == 2
