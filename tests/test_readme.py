"""Every snippet of the README runs and prints what stands there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

RUN = """
import contextlib, io, json, sys
namespace = {"__name__": "readme"}
printed = []
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "README.md", "exec"), namespace)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def test_blocks_are_of_known_kinds() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "console", "text"}


def test_console_blocks_name_targets_of_the_makefile() -> None:
    rules = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*##", rules, re.MULTILINE))
    blocks = [text for kind, text in BLOCKS if kind == "console"]
    for line in "".join(blocks).splitlines():
        command = re.fullmatch(r"\$ make ([a-z-]+)( +#.*)?", line)
        assert command, line
        assert command[1] in targets, line


def test_files_that_it_names_are_there() -> None:
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    paths = re.findall(r"`([\w/]+\.(?:py|md)|[\w]+/)`", prose)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each Python block prints, run in order in one namespace."""
    codes = [text for kind, text in BLOCKS if kind == "python"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        input=json.dumps(codes),
        cwd=tmp_path_factory.mktemp("readme"),
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_python_blocks_run_and_print_what_stands_below_them(
    printed: list[str],
) -> None:
    python_blocks = -1
    shown = {}
    for kind, text in BLOCKS:
        python_blocks += kind == "python"
        if kind == "text":
            shown[python_blocks] = text
    assert shown
    for number, text in shown.items():
        assert trimmed(printed[number]) == trimmed(text)


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]
