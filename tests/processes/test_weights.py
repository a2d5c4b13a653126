"""Several processes read and write weights."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnx_parallel.cli import main
from nnx_parallel.weights.files import open_tensors

GOLDENS = Path(__file__).parents[1] / "goldens"
WORKER = Path(__file__).with_name("weights_worker.py")
SUBSET_WORKER = Path(__file__).with_name("subset_worker.py")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def run(
    source: str | Path, target: Path, strategy: str, processes: int
) -> tuple[int, str]:
    """Returns the exit code and the output of the worker."""
    return launch(processes, WORKER, source, target, strategy)


def launch(processes: int, *given: Any) -> tuple[int, str]:
    """Returns the exit code and the output of a script with arguments."""
    sizes = ["--processes", str(processes), "--devices-per-process", "2"]
    arguments = [*map(str, given)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["launch", "--cpu", *sizes, *arguments])
    return code, out.getvalue()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("family", "strategy", "processes"),
    [("llama", "fsdp", 2), ("gpt2", "tensor", 2), ("gemma3", "tensor", 4)],
)
def test_processes_read_each_byte_once_and_one_writes(
    family: str, strategy: str, processes: int, tmp_path: Path
) -> None:
    source, target = GOLDENS / family, tmp_path / "written"
    code, out = run(source, target, strategy, processes)
    assert code == 0, out
    found, expected = open_tensors(target), open_tensors(source)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].view().tobytes() == tensor.view().tobytes(), name
    counted = [json.loads(x)["read"] for x in re.findall(r"\{\"read.*\}", out)]
    assert len(counted) == processes
    whole = sum(tensor.num_bytes for tensor in expected.values())
    assert sum(counted) == whole
    assert max(counted) < 0.75 * whole


def with_nans(file: Path) -> bytes:
    """Returns the content of a file, with a NaN at the end of each array."""
    changed = bytearray(file.read_bytes())
    for tensor in open_tensors(file).values():
        end = tensor.start + tensor.num_bytes
        changed[end - 4 : end] = np.float32(np.nan).tobytes()
    return bytes(changed)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("values", "WeightsError: '.*' in '.*' has values that are not finite"),
        ("other values", "DisagreementError: The processes disagree about the files"),
        ("header", "DisagreementError: The processes disagree about the files of "),
    ],
)
def test_damage_in_one_copy_is_an_error_of_all(
    damage: str, message: str, tmp_path: Path
) -> None:
    for process in range(2):
        shutil.copytree(GOLDENS / "llama", tmp_path / str(process))
    file = tmp_path / "1" / "model.safetensors"
    data = file.read_bytes()
    if damage == "values":
        data = with_nans(file)
    elif damage == "other values":  # as in a copy of another training
        first = next(iter(open_tensors(file).values())).start
        data = data[:first] + bytes([data[first] ^ 1]) + data[first + 1 :]
    else:  # two arrays of the same shape change their places
        data = data.replace(b"gate_proj", b"a_third__").replace(
            b"up_proj", b"gate_proj"
        )
        data = data.replace(b"a_third__", b"up_proj")
    file.write_bytes(data)
    code, out = run(f"{tmp_path}/{{}}", tmp_path / "out", "fsdp", 2)
    assert code == 1, out
    for process in range(2):
        assert re.search(rf"^\[{process}\] .*{message}", out, re.MULTILINE), out


@pytest.mark.deep
@pytest.mark.parametrize("processes", ["1,2", "1"])
def test_processes_without_devices_wait_for_the_others(processes: str) -> None:
    code, out = launch(3, SUBSET_WORKER, GOLDENS / "llama", processes)
    assert code == 0, out
    for process in range(3):
        num_shards = 24 if str(process) in processes else 0  # of 12 arrays, 2 devices
        assert f"[{process}] arrays 12 shards {num_shards}" in out


@pytest.mark.deep
def test_processes_without_devices_raise_errors_of_others(tmp_path: Path) -> None:
    for process in range(3):
        shutil.copytree(GOLDENS / "llama", tmp_path / str(process))
    file = tmp_path / "1" / "model.safetensors"
    file.write_bytes(with_nans(file))
    code, out = launch(3, SUBSET_WORKER, f"{tmp_path}/{{}}", "1,2")
    assert code == 1, out
    for process in range(3):
        message = "WeightsError: '.*' in '.*' has values that are not finite"
        assert re.search(rf"^\[{process}\] .*{message}", out, re.MULTILINE), out
