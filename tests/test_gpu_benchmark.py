"""The GPU benchmark, as far as it runs without a GPU."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import gpu
from benchmarks.gpu_child import is_out_of_memory
from benchmarks.gpu_task import PACKED, Task
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding.nnx_arrays import flatten_pure

CONFIG = GPTConfig.tiny(num_layers=2, seq_len=16)


def test_models_have_named_sizes() -> None:
    sizes = {name: config.num_params for name, (config, _) in gpu.MODELS.items()}
    assert sizes == {"124M": 124_475_904, "1.3B": 1_313_722_368}
    for config, max_rows in gpu.MODELS.values():
        assert config.seq_len == 1024
        assert config.vocab_size % 128 == 0
        assert max_rows.bit_count() == 1


def test_task_round_trips_through_json() -> None:
    task = Task.of(CONFIG, 4, is_tiny=True)
    again = Task(**json.loads(task.to_json()))
    assert again == task
    assert again.model == CONFIG
    assert again.tokens().shape == again.documents().shape == (4, 17)
    assert set(np.unique(again.documents())) <= set(range(1, 9))
    assert replace(task, rows=2) == task.with_rows(2)


def test_out_of_memory_is_recognized() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jnp.zeros(1 << 50, jnp.int8).block_until_ready()
    assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(ValueError("another"))


@pytest.mark.slow
def test_missing_gpu_exits_with_message() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("This machine has a GPU.")
    with pytest.raises(SystemExit, match="needs a GPU that jax and torch both"):
        gpu.measure()


@pytest.mark.slow
def test_tiny_benchmark_runs_on_cpu(tmp_path: Path) -> None:
    table = gpu.measure(rounds=1, tiny=True)
    figures = dict(table.rows)
    assert figures["tiny: rows of 64 tokens"] == 2
    ways = ["ours", PACKED]
    ratio = figures["tiny: seconds of a step, packed documents / whole rows"]
    assert ratio.rounds == 1
    if importlib.util.find_spec("torch") is not None:
        ways.append("torch flash")
        assert figures["tiny: seconds of a step, ours / torch flash"].rounds == 1
    config, _ = gpu.TINY["tiny"]
    for way in ways:
        speed = figures[f"tiny, {way}: tokens/s"]
        flops = 1e12 * figures[f"tiny, {way}: TFLOP/s"]
        assert flops == pytest.approx(speed * config.flops_per_token(64))
        slowest, fastest = figures[f"tiny, {way}: tokens/s, from and to"]
        assert slowest <= speed <= fastest
        first, last = figures[f"tiny, {way}: first and last loss"]
        assert first == pytest.approx(np.log(256), abs=0.1)
        assert last < first
    table.write(tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text())["figures"].keys() == {
        *figures
    }


@pytest.mark.slow
def test_loss_and_gradients_match_torch() -> None:
    torch: Any = pytest.importorskip("torch")
    from benchmarks import gpu_torch

    model = GPT(CONFIG, rngs=nnx.Rngs(0))
    tokens = Task.of(CONFIG, 4, is_tiny=True).tokens()
    peer = gpu_torch.GPT(CONFIG, torch.float32)
    peer.load_state_dict({k: torch.tensor(v) for k, v in to_torch(model).items()})
    loss = peer(torch.from_numpy(tokens).long())
    loss.backward()

    def ours(model: GPT) -> jax.Array:
        return next_token_loss(model, jnp.asarray(tokens)).value

    value, grads = nnx.value_and_grad(ours)(model)
    assert loss.item() == pytest.approx(float(value), rel=1e-5)
    nnx.update(model, grads)
    expected = to_torch(model)
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for name, parameter in peer.named_parameters():
        error = np.abs(parameter.grad.numpy() - expected[name]).max()
        assert error <= 1e-5 * largest, name


def to_torch(model: GPT) -> dict[str, np.ndarray]:
    """The parameters under PyTorch's names, with kernels (in, out) as (out, in)."""
    embed = CONFIG.embed_dim
    params = flatten_pure(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    params = {path: np.asarray(x) for path, x in params.items()}
    given = {
        "embed.weight": params["embed.embedding"],
        "positions.weight": params["positions.embedding"],
        "norm.weight": params["norm.scale"],
        "norm.bias": params["norm.bias"],
    }
    for index in range(CONFIG.num_layers):
        layer = {
            path.removeprefix("blocks.layer."): x[index]
            for path, x in params.items()
            if path.startswith("blocks.layer.")
        }
        mine = {
            "qkv.weight": np.concatenate(
                [
                    layer[f"attention.{name}.kernel"].reshape(embed, -1).T
                    for name in ("query", "key", "value")
                ]
            ),
            "qkv.bias": np.concatenate(
                [
                    layer[f"attention.{name}.bias"].ravel()
                    for name in ("query", "key", "value")
                ]
            ),
            "out.weight": layer["attention.out.kernel"].reshape(-1, embed).T,
            "out.bias": layer["attention.out.bias"],
        }
        for name in ("up", "down"):
            mine[f"{name}.weight"] = layer[f"mlp.{name}.kernel"].T
            mine[f"{name}.bias"] = layer[f"mlp.{name}.bias"]
        for name in ("attention_norm", "mlp_norm"):
            mine[f"{name}.weight"] = layer[f"{name}.scale"]
            mine[f"{name}.bias"] = layer[f"{name}.bias"]
        given |= {f"blocks.{index}.{name}": x for name, x in mine.items()}
    return given
