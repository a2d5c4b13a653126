"""Makes `quantised/`: tiny models with quantised arrays, and their values.

Each folder has ``model.safetensors`` and ``config.json``. transformers computes arrays
from the folder, and ``values.json`` has two checksums (CRC-32) for each of them: in
float32 and in bfloat16. Its keys are the names of the arrays in a folder that is not
quantised.

The tests do not run this script. To make the folders again: ``pip install torch
transformers accelerate``, then ``python make_quantised.py``.
"""

import json
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
BLOCK = (4, 8)
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": BLOCK,
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
}


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns elements and scales. The largest element of a block is 448."""
    rows, columns = (n // b for n, b in zip(weight.shape, BLOCK, strict=True))
    blocks = weight.float().reshape(rows, BLOCK[0], columns, BLOCK[1])
    scales = (blocks.abs().amax((1, 3), keepdim=True) / 448).bfloat16().float()
    elements = (blocks / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return elements.reshape(weight.shape), scales[:, 0, :, 0]


def make_fp8(name: str) -> None:
    """Writes one folder from the golden of this name."""
    folder = HERE / "quantised" / name
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for key, weight in load_file(HERE / name / "model.safetensors").items():
        arrays[key] = weight
        if key.endswith("_proj.weight"):
            arrays[key], scales = quantise(weight)
            # Both dtypes occur: DeepSeek-V3 has float32, and Qwen3-FP8 has bfloat16.
            is_wide = "layers.0" in key
            arrays[key + "_scale_inv"] = scales if is_wide else scales.bfloat16()
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((HERE / name / "config.json").read_text())
    content = config | {"quantization_config": FP8}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    write_values(folder, transformers.FineGrainedFP8Config(dequantize=True))


def make_mxfp4() -> None:
    """Writes a folder of the family gpt-oss with random elements and scales."""
    folder = HERE / "quantised" / "gpt_oss"
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    arrays = {}
    for key, weight in model.state_dict().items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            arrays[key] = torch.randn_like(weight).bfloat16()
            continue
        experts, width, outs = weight.shape
        blocks = (experts, outs, width // 32, 16)
        arrays[key + "_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8)
        scales = torch.randint(100, 140, blocks[:-1], dtype=torch.uint8)
        arrays[key + "_scales"] = scales
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content["architectures"] = ["GptOssForCausalLM"]
    content["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    write_values(folder, transformers.Mxfp4Config(dequantize=True))


def write_values(folder: Path, quantization: Any) -> None:
    """Writes the checksums of transformers' values."""
    wide, narrow = (
        checksums(folder, dtype, quantization) for dtype in ("float32", "bfloat16")
    )
    values = [f'"{key}": [{wide[key]}, {narrow[key]}]' for key in wide]
    (folder / "values.json").write_text("{\n" + ",\n".join(values) + "\n}\n")


def checksums(folder: Path, dtype: str, quantization: Any) -> dict[str, int]:
    """Returns the checksum of each array, by its name in an unquantised folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=quantization
    )
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict(), strict=True)
    with TemporaryDirectory() as temporary:
        plain.save_pretrained(temporary)
        arrays = load_file(Path(temporary) / "model.safetensors")
    return {
        name: zlib.crc32(x.contiguous().view(torch.uint8).numpy())
        for name, x in sorted(arrays.items())
    }


def main() -> None:
    """Makes all folders."""
    make_fp8("qwen3_moe")
    make_mxfp4()


if __name__ == "__main__":
    main()
