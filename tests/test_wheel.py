"""`pip install` installs only the library, which is complete and quick to import."""

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_IMPORT_SHARE = 0.15


def run_python(
    *args: str | Path, cwd: Path, python: str | Path = sys.executable
) -> str:
    command = [python, *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", directory, cwd=ROOT)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and its dependencies.

    The dependencies of the running environment are added to the path as plain
    directories. The `.pth` files in them, for example of an editable install, have no
    effect.
    """
    directory = tmp_path_factory.mktemp("venv")
    venv.create(directory)
    python = directory / "bin" / "python"
    pip = ("-m", "pip", "--disable-pip-version-check", "--python", python)
    install = ("install", "--quiet", "--no-index", "--no-deps", wheel)
    run_python(*pip, *install, cwd=directory)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run_python("-c", code, python=python, cwd=directory).strip())
    outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(outer)))
    return python


def test_wheel_holds_only_the_library(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    (dist_info,) = tops - {"nnx_parallel"}
    assert dist_info.endswith(".dist-info")
    assert f"{dist_info}/licenses/LICENSE" in names
    modules = (ROOT / "nnx_parallel").rglob("*.py")
    assert {str(file.relative_to(ROOT)) for file in modules} <= set(names)
    assert "nnx_parallel/py.typed" in names


def test_wheel_imports_from_empty_directory(clean_python: Path, tmp_path: Path) -> None:
    code = """
import importlib.util, nnx_parallel
for name in nnx_parallel.__all__:
    getattr(nnx_parallel, name)
assert importlib.util.find_spec("models") is None
print(nnx_parallel.__file__)
"""
    file = run_python("-c", code, python=clean_python, cwd=tmp_path)
    assert clean_python.parents[1] in Path(file.strip()).parents


@pytest.mark.slow
def test_quickstart_runs_with_wheel(clean_python: Path, tmp_path: Path) -> None:
    """The blocks are copied from the site into an empty directory."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    codes = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(codes) > 5
    script = tmp_path / "quickstart.py"
    script.write_text("\n".join(codes))
    printed = run_python(script, python=clean_python, cwd=tmp_path)
    assert "per device: parameters" in printed


def test_import_makes_few_calls(clean_python: Path, tmp_path: Path) -> None:
    """The import makes at most 15 % as many calls as the imports of dependencies.

    Calls are counted because every run has the same number of them.
    ``python -m benchmarks imports`` measures the time.
    """
    code = """
import cProfile
def calls(statement):
    with cProfile.Profile() as profile:
        exec(statement)
    return sum(entry.callcount for entry in profile.getstats())
dependencies = calls("import flax.nnx, optax, orbax.checkpoint")
print(calls("import nnx_parallel") / dependencies)
"""
    share = float(run_python("-c", code, python=clean_python, cwd=tmp_path))
    assert share <= MAX_IMPORT_SHARE
