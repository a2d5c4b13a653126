"""Every tutorial runs by itself, uses public names, and folds its checks."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nnx_parallel

ROOT = Path(__file__).parents[1]
HEAD = re.compile(r"^# %%(.*)$", re.MULTILINE)
# This tutorial is about tests, so its checks are visible.
SHOWS_CHECKS = "10_write_a_strategy"
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
PUBLIC = {
    "nnx_parallel": set(nnx_parallel.__all__),
    **{
        f"nnx_parallel.{home}": set(
            vars(importlib.import_module(f"nnx_parallel.{home}"))
        )
        for home in nnx_parallel.errors.HOMES
    },
    "nnx_parallel.errors": set(vars(nnx_parallel.errors)),
}


def runs() -> list:
    """All tutorials; all but the first are slow."""
    first, *others = TUTORIALS
    slow = [pytest.param(path, marks=pytest.mark.slow, id=path.stem) for path in others]
    return [pytest.param(first, id=first.stem), *slow]


@pytest.mark.parametrize("path", runs())
def test_tutorial_runs(path: Path, tmp_path: Path) -> None:
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
def test_tutorial_imports_only_public_names(path: Path) -> None:
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
def test_tutorial_has_number_and_exercise(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0] == "# %% [markdown]"
    assert lines[1].startswith(f"# # {int(path.stem[:2])}. ")
    assert "# ## Exercise" in lines


def test_every_tutorial_has_assertions() -> None:
    for path in TUTORIALS:
        source = path.read_text()
        assert source.count("\nassert ") + source.count("assert_") >= 2, path.stem


def code_cells(path: Path) -> list[tuple[str, ast.Module]]:
    """Returns options and code of each cell, in order."""
    _, *parts = HEAD.split(path.read_text())
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [(head, ast.parse(text)) for head, text in pairs if "[markdown]" not in head]


def is_check(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return False
    text = ast.unparse(statement)
    return "np.testing." in text or any(
        isinstance(node, ast.Assert) for node in ast.walk(statement)
    )


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_checks_are_folded(path: Path) -> None:
    if path.stem != SHOWS_CHECKS:
        for head, code in code_cells(path):
            checks = [node for node in code.body if is_check(node)]
            assert "hide-cell" in head or not checks, ast.unparse(checks[0])


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_exercise_has_folded_answer(path: Path) -> None:
    heads = [head for head, _ in code_cells(path)]
    answers = [head for head in heads if "Show an answer" in head]
    assert answers == heads[-1:]
    assert 'tags=["hide-cell"]' in answers[0]
    assert path.read_text().rindex("## Exercise") < path.read_text().rindex("# %% tags")


def fits(tree: ast.AST) -> list[ast.AST]:
    """The calls of `fit` in a cell, except those in functions that the cell defines."""
    found, nodes = [], [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".fit"):
            found.append(node)
        kinds = ast.FunctionDef | ast.Lambda
        nodes += [n for n in ast.iter_child_nodes(node) if not isinstance(n, kinds)]
    return found


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_cells_train_under_one_strategy(path: Path) -> None:
    repeats = ast.For | ast.ListComp | ast.DictComp | ast.GeneratorExp
    for head, code in code_cells(path):
        if "hide-cell" not in head:
            assert len(fits(code)) <= 1, ast.unparse(code)
            loops = [node for node in ast.walk(code) if isinstance(node, repeats)]
            assert not any(fits(loop) for loop in loops), ast.unparse(code)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_cells_end_without_stray_value(path: Path) -> None:
    """A notebook would show the value of a cell's last expression."""
    for _, code in code_cells(path):
        match code.body[-1]:
            case ast.Expr(value=ast.Call(func=ast.Attribute() as method)):
                assert ast.unparse(method).startswith("np.testing."), ast.unparse(code)
            case ast.Expr(value=value):
                assert isinstance(value, ast.Call), ast.unparse(code)
