"""Several processes read and write weights."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from nnx_parallel.cli import main
from nnx_parallel.weights.files import open_tensors

GOLDENS = Path(__file__).parents[1] / "goldens"
WORKER = Path(__file__).with_name("weights_worker.py")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("family", "strategy", "processes"),
    [("llama", "fsdp", 2), ("gpt2", "tensor", 2), ("gemma3", "tensor", 4)],
)
def test_each_process_reads_its_shards_and_one_writes(
    family: str,
    strategy: str,
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    source, target = GOLDENS / family, tmp_path / "written"
    sizes = ["--processes", str(processes), "--devices-per-process", "2"]
    command = [
        "launch",
        "--cpu",
        *sizes,
        str(WORKER),
        str(source),
        str(target),
        strategy,
    ]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(command)
    assert code == 0, out.getvalue()
    found, expected = open_tensors(target), open_tensors(source)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].view().tobytes() == tensor.view().tobytes(), name
    counted = [json.loads(x) for x in re.findall(r"\{\"read.*\}", out.getvalue())]
    assert len(counted) == processes
    for each in counted:
        assert each["read"] <= 1.05 * each["shards"]
        whole = sum(tensor.view().nbytes for tensor in expected.values())
        assert each["read"] < whole
