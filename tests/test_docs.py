"""The site's pages: their code runs and prints what stands below it."""

import re
from pathlib import Path

import pytest

import nnx_parallel
from tests.pages import blocks, run_page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


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
