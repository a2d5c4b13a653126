"""The site's pages: their code runs and prints the output shown."""

import importlib
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import nnx_parallel
from tests.pages import blocks, run_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# The site's scripts import each other, as they do when it is built.
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(DOCS)
    import cards
    import drawings
    import error_help
    import vector


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
    for printed, shown in run_page(page, tmp_path):
        if shown is not None:  # its lines are broken for the page, in words
            assert shown.split() == printed.split()


OURS = "python -m nnx_parallel "
# Cannot be run here: they install, take the whole Makefile, or need a cluster.
OTHERS = ("pip install ", "sbatch ", "kubectl apply ", "TPU=")


def with_commands() -> list:
    pages = [page for page in PAGES if f"$ {OURS}" in page.read_text()]
    return [pytest.param(page, id=page.stem, marks=pytest.mark.slow) for page in pages]


def console_lines(block: str) -> list[str]:
    """The commands of a block, each with the lines that go on after a backslash."""
    return [line for line in re.split(r"^\$ ", block, flags=re.MULTILINE) if line]


@pytest.mark.parametrize("page", with_commands())
def test_commands_run_and_print_what_stands_below_them(
    page: Path, tmp_path: Path
) -> None:
    for kind, text in blocks(page):
        name = re.match(r"# (\w+\.py)\n", text)
        if kind == "python" and name:
            (tmp_path / name[1]).write_text(text)
    found = blocks(page)
    for (kind, text), (next_kind, below) in pairwise(found):
        if kind != "console" or OURS not in text:
            continue
        done = run_commands(text, tmp_path)
        assert done.returncode == 0, done.stderr
        if next_kind in ("bash", "yaml"):
            assert done.stdout == below
        elif next_kind == "text":
            # Gloo greets from all threads at once, and tears its own lines.
            assert set(below.splitlines()) <= set(done.stdout.splitlines())


def run_commands(block: str, directory: Path) -> subprocess.CompletedProcess[str]:
    python = Path(sys.executable).parent
    return subprocess.run(
        ["bash", "-e", "-c", "".join(console_lines(block))],
        cwd=directory,
        env={
            **os.environ,
            "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_command_is_one_that_runs_or_needs_more_than_this_machine() -> None:
    for page in PAGES:
        for kind, text in blocks(page):
            if kind == "console" and OURS not in text:
                for line in console_lines(text):
                    assert line.startswith(OTHERS), (page.name, line)


def test_every_block_is_of_a_known_kind() -> None:
    known = {"python", "text", "console", "{toctree}", "{include} ../CONTRIBUTING.md"}
    known |= {"diff"}  # of a file of others
    known |= {"bash", "yaml"}  # what a command above them has printed
    known |= {"{include} ../CHANGELOG.md", "{include} ../README.md"}
    known |= {"{raw} html", "{error-list}"}
    known |= {"{worked-examples}", "{benchmark-results}", "{tutorial-cards}"}
    known |= {"{migration-tables}", "{glossary}"}
    known |= {f"{{drawing}} {name}" for name in drawings.FIGURES}
    for page in PAGES:
        assert {kind for kind, _ in blocks(page)} <= known, page.name


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE))
    modules = {"errors", "layers"}  # pages of their own
    assert set(nnx_parallel.__all__) - modules <= documented


def test_every_name_in_the_reference_exists() -> None:
    for page in (DOCS / "api").glob("*.md"):
        text = page.read_text()
        modules = re.findall(r"^\.\. currentmodule:: ([\w.]+)$", text, re.MULTILINE)
        names = re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE)
        for name in names:
            assert hasattr(importlib.import_module(modules[0]), name), (page, name)


NOTES = DOCS / "library-notes.md"


def test_the_library_notes_name_files_that_exist() -> None:
    for name in re.findall(r"`([a-z_.]+\.[a-z_]+)`", NOTES.read_text()):
        package, _, module = name.partition(".")
        if (ROOT / "nnx_parallel" / package).is_dir():
            assert (ROOT / "nnx_parallel" / package / f"{module}.py").exists(), name


def test_comments_point_to_headings_of_the_library_notes() -> None:
    headings = set(re.findall(r"^## (.*)$", NOTES.read_text(), re.MULTILINE))
    for file in (ROOT / "nnx_parallel").rglob("*.py"):
        text = re.sub(r"\n *(# )?", " ", file.read_text())
        for heading in re.findall(r'library-notes\.md, "?([\w :]+)', text):
            assert heading in headings, (file.name, heading)


def test_every_page_is_reached_from_home() -> None:
    listed = "".join(text for _, text in blocks(DOCS / "index.md")).split()
    pages = {page.stem for page in PAGES} - {"index"}
    assert pages <= set(listed)
