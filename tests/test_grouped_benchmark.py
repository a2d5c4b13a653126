"""The GPU benchmark of experts, as far as it runs without a GPU."""

import importlib.util
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import grouped
from benchmarks.gpu_task import GROUPED, Task
from nnx_parallel.layers import Experts
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding.nnx_arrays import flatten_pure

CONFIG = GPTConfig.tiny_experts(
    num_layers=2, seq_len=16, experts=Experts(num_experts=8, top_k=2, mlp_dim=24)
)


def test_model_has_named_size() -> None:
    ((name, (config, max_rows)),) = grouped.MODELS.items()
    assert name == "1B of 3.3B"
    assert config.num_active_params == 979_416_576
    assert config.num_params / 1e9 == pytest.approx(3.3, abs=0.06)
    assert max_rows.bit_count() == 1


def test_task_with_experts_round_trips_through_json() -> None:
    task = Task.of(CONFIG, 4, is_tiny=True)
    assert Task(**json.loads(task.to_json())).model == CONFIG


@pytest.mark.slow
def test_tiny_benchmark_runs_on_cpu() -> None:
    table = grouped.measure(rounds=1, tiny=True)
    figures = dict(table.rows)
    config, _ = grouped.TINY["tiny"]
    assert figures["tiny: active parameters"] == config.num_active_params
    ways = ["ours"]
    if importlib.util.find_spec("torch") is not None:
        ways.append(GROUPED)
        assert figures[f"tiny: seconds of a step, ours / {GROUPED}"].rounds == 1
        assert figures[GROUPED].startswith(("grouped products", "a loop of matmuls"))
    else:
        assert figures["PyTorch"] == "is not installed: this library alone"
    for way in ways:
        speed = figures[f"tiny, {way}: tokens/s"]
        flops = 1e12 * figures[f"tiny, {way}: TFLOP/s"]
        assert flops == pytest.approx(speed * config.flops_per_token(64))
        first, last = figures[f"tiny, {way}: first and last loss"]
        assert first == pytest.approx(np.log(256), abs=0.1)
        assert last < first


@pytest.mark.slow
@pytest.mark.parametrize("skew", [0.0, 10.0])
def test_loss_and_gradients_match_torch(skew: float) -> None:
    torch: Any = pytest.importorskip("torch")
    from benchmarks import grouped_torch

    model: Any = GPT(CONFIG, rngs=nnx.Rngs(0))
    router = model.blocks.layer.mlp.router
    router[...] = router[...].at[..., -1].add(skew)
    tokens = Task.of(CONFIG, 4, is_tiny=True).tokens()
    peer = grouped_torch.GPT(CONFIG, torch.float32)
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
    """The parameters under PyTorch's names; its linear layers have shape (out, in)."""
    embed = CONFIG.embed_dim
    params = flatten_pure(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    params = {path: np.asarray(x) for path, x in params.items()}
    given = {
        "embed.weight": params["embed.embedding"],
        "norm.weight": params["norm.scale"],
        "head.weight": params["head.kernel"].T,
    }
    for index in range(CONFIG.num_layers):
        layer = {
            path.removeprefix("blocks.layer."): x[index]
            for path, x in params.items()
            if path.startswith("blocks.layer.")
        }
        qkv = [
            layer[f"attention.{name}.kernel"].reshape(embed, -1).T
            for name in ("query", "key", "value")
        ]
        mine = {
            "qkv.weight": np.concatenate(qkv),
            "out.weight": layer["attention.out.kernel"].reshape(-1, embed).T,
            "attention_norm.weight": layer["attention_norm.scale"],
            "mlp_norm.weight": layer["mlp_norm.scale"],
        }
        for name in ("router", "up", "gate", "down"):
            mine[f"mlp.{name}"] = layer[f"mlp.{name}"]
        given |= {f"blocks.{index}.{name}": x for name, x in mine.items()}
    return given
