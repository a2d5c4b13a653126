"""Imports point one way, and the public names are exactly the package's exports."""

import ast
import functools
import importlib.metadata
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

import pytest

import nnx_parallel

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nnx_parallel"
MODELS = PACKAGE / "models"

# A module may only import modules that are above it in this list.
ORDER = [
    "errors",
    "files",
    "drawing",
    "durable",
    "precision",
    "metrics",
    "programs",
    "mesh",
    "audit",
    "loggers",
    "distributed",
    "schedules",
    "collectives",
    "sharding",
    "init",
    "layers",
    "weights",
    "models",
    "data",
    "visualize",
    "state",
    "optimizers",
    "pipeline",
    "strategies",
    "checkpoint",
    "training",
    "plan",
    "cli",
    "__main__",
]
OPEN_TO_MODELS = {"errors", "layers", "sharding", "metrics", "models", "weights"}

# Distributions whose import name differs from the distribution name.
IMPORT_NAMES = {"orbax-checkpoint": "orbax", "pyyaml": "yaml"}


def files_of(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def dotted_name(file: Path) -> str:
    """The name of a file's module; `nnx_parallel.layers` for `layers/__init__.py`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported_modules(node: ast.Import | ast.ImportFrom, file: Path) -> Iterator[str]:
    """Absolute dotted names that a statement imports, each with its last component."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parents = file.relative_to(ROOT).parent.parts
        above = parents[: len(parents) - (node.level - 1)]
        base = ".".join((*above, *([base] if base else [])))
    yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def imports(file: Path) -> list[str]:
    """Every import of a file, also those in functions and under `TYPE_CHECKING`."""
    return [
        name
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported_modules(node, file)
    ]


def unit(name: str) -> str:
    """The entry of `ORDER` that contains a name of the package.

    A name that is imported from the package (`from nnx_parallel import FSDP`) belongs
    to `__init__`. That module imports everything and is below all others.
    """
    _, _, rest = name.partition(".")
    first, _, more = rest.partition(".")
    is_module = (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").is_file()
    if not first or not is_module:
        return "__init__"
    inner = f"{first}.{more.partition('.')[0]}"
    return inner if inner in ORDER else first


def units_imported(file: Path) -> set[str]:
    return {unit(name) for name in imports(file) if is_ours(name)}


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE.name


def file_of(name: str) -> Path:
    """The file of a module, or the file that defines a name of a module."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir():
        return path / "__init__.py"
    file = path.with_suffix(".py")
    return file if file.is_file() else file_of(name.rpartition(".")[0])


def closure(module: str) -> set[str]:
    """All modules that a module imports, directly or through others."""
    found: set[str] = set()
    left = [module]
    while left:
        names = (name for name in imports(file_of(left.pop())) if is_ours(name))
        new = {dotted_name(file_of(name)) for name in names} - found
        found |= new
        left += new
    return found


def required_at_import(file: Path) -> set[str]:
    """Top-level packages that must be installed to import a file."""

    def statements(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            elif isinstance(node, ast.ClassDef | ast.With):
                yield from statements(node.body)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from statements(node.orelse)
            elif isinstance(node, ast.If):
                yield from statements(node.body + node.orelse)

    return {
        name.partition(".")[0]
        for node in statements(tree_of(file).body)
        for name in imported_modules(node, file)
    }


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required_dependencies() -> set[str]:
    names = (re.split(r"[^\w-]", line)[0] for line in PROJECT["dependencies"])
    return {IMPORT_NAMES.get(name, name) for name in names}


@pytest.mark.parametrize("file", files_of(PACKAGE), ids=dotted_name)
def test_modules_import_only_from_above(file: Path) -> None:
    if file == PACKAGE / "__init__.py":
        return
    here = unit(dotted_name(file))
    assert here in ORDER, f"{dotted_name(file)} is not in ORDER. Add `{here}`."
    above = ORDER[: ORDER.index(here) + 1]
    below = units_imported(file) - set(above)
    assert not below, (
        f"{dotted_name(file)} imports {sorted(below)} from below it in ORDER."
    )


def test_placement_does_not_import_upper_packages() -> None:
    below = {"distributed", "pipeline", "schedules", "visualize"}
    assert not {unit(m) for m in closure("nnx_parallel.sharding.layout")} & below


@pytest.mark.parametrize("file", files_of(MODELS), ids=dotted_name)
def test_models_import_only_few_packages(file: Path) -> None:
    closed = units_imported(file) - OPEN_TO_MODELS
    assert not closed, f"{dotted_name(file)} imports {sorted(closed)}."


@pytest.mark.parametrize("file", files_of(PACKAGE), ids=dotted_name)
def test_import_needs_only_required_dependencies(file: Path) -> None:
    """Libraries of an extra are imported only in the functions that use them."""
    known = required_dependencies() | sys.stdlib_module_names | {PACKAGE.name}
    missing = required_at_import(file) - known
    assert not missing, (
        f"{dotted_name(file)} cannot be imported without {sorted(missing)}."
    )


def test_tpu_compiler_is_the_one_that_jax_pins() -> None:
    """Another version of libtpu may compile other programs than a TPU machine runs."""
    extras = PROJECT["optional-dependencies"]
    assert "jax[tpu]" in extras["tpu-compiler"]
    assert not [line for lines in extras.values() for line in lines if "libtpu" in line]
    of_jax = importlib.metadata.requires("jax") or []
    pins = [x for x in of_jax if re.match(r"libtpu\b", x) and 'extra == "tpu"' in x]
    assert len(pins) == 1
    assert re.match(r"libtpu==\d+\.\d+\.\d+\.\*;", pins[0]), pins


def test_public_names_match_package_imports() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    names = [
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert nnx_parallel.__all__ == sorted(names)


def test_every_public_name_has_a_docstring() -> None:
    public = {name: getattr(nnx_parallel, name) for name in nnx_parallel.__all__}
    bare = {name for name, value in public.items() if not has_docstring(value)}
    assert bare <= documented_constants()


def has_docstring(value: object) -> bool:
    """True if the docstring is written by hand, not generated or inherited."""
    text = value.__doc__ or ""
    if inspect.isclass(value):
        return bool(text) and not text.startswith(f"{value.__name__}(")
    return bool(text) and text != type(value).__doc__


@functools.cache
def documented_constants() -> set[str]:
    """Names of the package's constants that have a docstring, which Sphinx shows."""
    return {
        target.id
        for file in files_of(PACKAGE)
        for node, after in pairwise(tree_of(file).body)
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr)
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@pytest.mark.parametrize("file", files_of(PACKAGE), ids=dotted_name)
def test_functions_have_at_most_60_lines(file: Path) -> None:
    functions = [node for node in ast.walk(tree_of(file)) if is_function(node)]
    lengths = {node.name: body_lines(node) for node in functions}
    assert {name: n for name, n in lengths.items() if n > 60} == {}


@pytest.mark.parametrize("file", files_of(PACKAGE), ids=dotted_name)
def test_names_are_imported_from_defining_module(file: Path) -> None:
    # Models are written to be copied, so they import public names.
    if file.name == "__init__.py" or MODELS in file.parents:
        return
    borrowed = {
        f"{source}.{name}"
        for source, name in names_imported(file)
        if is_ours(source)
        and f"{source}.{name}" not in GRAPH
        and name not in names_defined(source)
    }
    assert borrowed == set()


def test_schedules_do_not_import_jax() -> None:
    for file in files_of(PACKAGE / "schedules"):
        assert "jax" not in {name.partition(".")[0] for name in imports(file)}, file


# In each walk, a module imports the next one, with one exception: the step calls
# `Execution`, which a pipeline's schedule implements.
WALKS = {
    "from fit to the gather of FSDP": (
        "training.trainer",
        "training.loop",
        "training.step",
        "state",
        "sharding.constrain",
    ),
    "from fit to the hop of a pipeline": (
        "training.trainer",
        "training.loop",
        "training.step",
        "pipeline.run",
        "pipeline.executor",
    ),
    "from Dense to the hop of a ring": (
        "layers.dense",
        "collectives.matmul",
        "collectives.ring",
    ),
}
BY_EXECUTION = ("training.step", "pipeline.run")


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_documented_walks_are_short(walk: tuple[str, ...]) -> None:
    assert len(walk) <= 5
    for here, there in pairwise(walk):
        if (here, there) == BY_EXECUTION:
            here, there = there, "sharding.layout"  # defines Execution
        assert f"nnx_parallel.{there}" in GRAPH[f"nnx_parallel.{here}"], (here, there)


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of lines from a function's first statement on, without the docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return last_line(body[-1]) - body[0].lineno + 1 if body else 0


def last_line(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def names_imported(file: Path) -> Iterator[tuple[str, str]]:
    """Source and name of each `from source import name` in a file."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


@functools.cache
def names_defined(module: str) -> set[str]:
    """Names that a module's top-level statements bind, except for imports."""
    names = set()
    for node in tree_of(file_of(module)).body:
        if is_function(node) or isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.If | ast.Try):
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            names |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return names


MODULES = {dotted_name(file) for file in files_of(PACKAGE)}


def modules_imported(file: Path) -> set[str]:
    """Modules of the package that a file imports, without the package's `__init__`.

    `__init__` exports everything, so with it every module would reach all others.
    """
    ours = filter(is_ours, imports(file))
    named = {name if name in MODULES else name.rpartition(".")[0] for name in ours}
    return named - {PACKAGE.name, dotted_name(file)}


GRAPH = {dotted_name(file): modules_imported(file) for file in files_of(PACKAGE)}
