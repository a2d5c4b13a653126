"""The site's pages: their code runs and prints what stands below it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nnx_parallel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RUN = """
import contextlib, io, json, sys, textwrap
namespace = {"__name__": "page"}
printed = []
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(code, "page", "exec"), namespace)
        except Exception as error:
            if type(error).__module__ not in ("nnx_parallel.errors", "builtins"):
                raise
            print(f"{type(error).__name__}: {error}")
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text())


def run_blocks(codes: list[str], directory: Path, path: Path | None = ROOT) -> list:
    """What each block prints, and the error with which it ends."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        input=json.dumps(codes),
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def with_code() -> list:
    pages = [
        page for page in PAGES if any(kind == "python" for kind, _ in blocks(page))
    ]
    return [
        pytest.param(
            page,
            id=page.stem,
            marks=[] if page.stem == "choose" else [pytest.mark.slow],
        )
        for page in pages
    ]


@pytest.mark.parametrize("page", with_code())
def test_python_blocks_run_and_print_what_stands_below_them(
    page: Path, tmp_path: Path
) -> None:
    codes = [text for kind, text in blocks(page) if kind == "python"]
    printed = run_blocks(codes, tmp_path)
    shown: dict[int, str] = {}
    number = -1
    for kind, text in blocks(page):
        number += kind == "python"
        if kind == "text":
            shown[number] = text
    # Lines are broken for the page, in words.
    for index, text in enumerate(printed):
        if index in shown:
            assert shown[index].split() == text.split()
        else:
            assert not re.match(r"\w+Error: ", text), text


def test_every_block_is_of_a_known_kind() -> None:
    known = {"python", "text", "console", "{toctree}", "{include} ../CONTRIBUTING.md"}
    known |= {"{include} ../CHANGELOG.md", "{raw} html", "{error-list}"}
    known |= {"{worked-examples}", "{benchmark-results}"}
    for page in PAGES:
        assert {kind for kind, _ in blocks(page)} <= known, page.name


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE))
    modules = {"errors", "layers"}  # pages of their own
    assert set(nnx_parallel.__all__) - modules <= documented


def test_every_page_is_reached_from_home() -> None:
    listed = "".join(text for _, text in blocks(DOCS / "index.md")).split()
    pages = {page.stem for page in PAGES} - {"index"}
    assert pages <= set(listed)
