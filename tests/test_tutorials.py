"""Every tutorial runs by itself and uses what is public."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nnx_parallel
import nnx_parallel.models

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
PUBLIC = {
    "nnx_parallel": set(nnx_parallel.__all__),
    "nnx_parallel.errors": set(vars(nnx_parallel.errors)),
    "nnx_parallel.layers": set(vars(nnx_parallel.layers)),
    "nnx_parallel.models": set(vars(nnx_parallel.models)),
}


def runs() -> list:
    """All of them; only the first is quick."""
    first, *others = TUTORIALS
    slow = [pytest.param(path, marks=pytest.mark.slow, id=path.stem) for path in others]
    return [pytest.param(first, id=first.stem), *slow]


@pytest.mark.parametrize("path", runs())
def test_runs_by_itself(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_imports_only_what_is_public(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.partition(".")[0] in ("nnx_parallel", "models"):
                assert node.module in PUBLIC, node.module
                names = {alias.name for alias in node.names}
                assert names <= PUBLIC[node.module]
        elif isinstance(node, ast.Import):
            tops = {alias.name.partition(".")[0] for alias in node.names}
            assert not tops & {"benchmarks", "tests", "demo"}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_has_its_number_and_an_exercise(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] == "# %% [markdown]"
    assert lines[1].startswith(f"# # {int(path.stem[:2])}. ")
    assert "# ## Exercise" in lines


def test_assertions_back_what_is_said() -> None:
    for path in TUTORIALS:
        source = path.read_text()
        assert source.count("\nassert ") + source.count("assert_") >= 2, path.stem
