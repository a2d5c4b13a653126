"""Weights under the model's own names, on another mesh, and on the Hugging Face hub."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_parallel import FSDP, make_mesh
from nnx_parallel.errors import ReplicaError, WeightsError
from nnx_parallel.layers import lora
from nnx_parallel.weights import (
    Pretrained,
    push_to_hub,
    reshard,
    save_safetensors,
    transfer,
)
from tests.folders import content


class Small(nnx.Module):
    """A user's model with a list, a parameter without dims, statistics and streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(rngs.params.uniform(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[0](x) * self.scale


def adapted(rngs: nnx.Rngs) -> nnx.Module:
    return lora(Small(rngs), targets="layers", rank=2)


def arrays(model: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    return {".".join(map(str, path)): np.asarray(x.get_value()) for path, x in state}


@pytest.mark.parametrize("build", [Small, adapted])
def test_own_names_round_trip_through_one_file(build: Any, tmp_path: Path) -> None:
    file = tmp_path / "new" / "small.safetensors"
    model = FSDP(min_size=1).init(build, nnx.Rngs(1))
    save_safetensors(file, model)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    again = FSDP(min_size=1).init(Pretrained(build, file), nnx.Rngs(0))
    expected = arrays(model)
    assert arrays(again).keys() == expected.keys()
    for path, x in arrays(again).items():
        np.testing.assert_array_equal(x, expected[path])
    with pytest.raises(WeightsError, match=r"exists\. It is not overwritten"):
        save_safetensors(file, model)


def test_own_names_with_another_dtype_or_model(tmp_path: Path) -> None:
    file = tmp_path / "small.safetensors"
    save_safetensors(file, Small(nnx.Rngs(1)), dtype="bfloat16")
    kept: Any = Pretrained(Small, file, dtype="keep")(nnx.Rngs(0))
    assert kept.scale.get_value().dtype == jnp.bfloat16
    with pytest.raises(WeightsError, match=r"no entry for `layers.0.lora_a` and 3 mo"):
        Pretrained(adapted, file)(nnx.Rngs(0))


def test_reshard_moves_a_model_to_other_devices() -> None:
    model: Any = FSDP(min_size=1).init(Small, nnx.Rngs(1))
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
    served: Any = reshard(model, FSDP(min_size=1).layout(mesh))
    kernel = served.layers[0].kernel.get_value()
    assert [shard.device for shard in kernel.addressable_shards] == jax.devices()[:2]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 8)}
    expected = arrays(model)
    for path, x in arrays(served).items():
        np.testing.assert_array_equal(x, expected[path])
    # The copies share no buffers, so the first may be donated.
    for x in jax.tree.leaves(nnx.state(model)):
        x.delete()
    assert served(jnp.ones((2, 8))).shape == (2, 8)


def test_reshard_raises_if_a_value_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    move = transfer.placed_copies

    def flip(arrays: Any, shardings: Any) -> Any:
        copies = move(arrays, shardings)
        path = next(path for path in copies if path[-1] == "kernel")
        return copies | {path: copies[path].at[0, 0].add(1)}

    model = FSDP(min_size=1).init(Small, nnx.Rngs(1))
    monkeypatch.setattr(transfer, "placed_copies", flip)
    with pytest.raises(
        ReplicaError, match=r"changed 1 arrays .* `layers.0.kernel`: it"
    ):
        reshard(model, make_mesh({"data": 8}))


def test_push_to_hub_uploads_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Api:
        """Stands in for `huggingface_hub.HfApi`, with the arguments of version 1."""

        def create_repo(self, repo_id: str, *, private: Any, exist_ok: bool) -> None:
            calls.append((repo_id, private, exist_ok))
            if repo_id == "other/model":
                raise PermissionError("401")

        def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
            calls.append((repo_id, {*content(folder_path)}))

    model = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    names = [("kernel", "w", "out into -> into out")]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = "push_to_hub needs huggingface-hub: pip install 'nnx-parallel[hub]'."
    with pytest.raises(WeightsError, match=re.escape(message)):
        push_to_hub("org/model", model)
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Api))
    push_to_hub("org/model", model, private=True, names=names)
    assert calls == [("org/model", True, True), ("org/model", {"w"})]
    message = "cannot create the repository 'other/model': PermissionError('401')"
    with pytest.raises(WeightsError, match=re.escape(message)):
        push_to_hub("other/model", model, names=names)
