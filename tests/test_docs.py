"""Code on the site's pages runs, and prints the output that is shown."""

import importlib.util
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import nnx_parallel
from tests.pages import blocks, run_page
from tests.site_scripts import cards, drawings, error_help

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
def test_python_blocks_run_and_match_shown_output(page: Path, tmp_path: Path) -> None:
    for found in (ROOT / "tests/standins").glob("[!_]*"):
        if importlib.util.find_spec(found.stem) is None:
            (tmp_path / found.name).symlink_to(found)
    for printed, shown in run_page(page, tmp_path):
        if shown is not None:  # the page breaks its lines between words
            assert shown.split() == printed.split()


OURS = "python -m nnx_parallel "
SCRIPT = "python train.py"
# These commands cannot run here: they install packages or need a cluster.
OTHERS = (
    *("pip install ", "sbatch ", "kubectl apply ", "TPU="),
    *("docker ", "export JAX_COMPILATION_CACHE_DIR=", "gcloud ", "sky ", "uv "),
)


def runs_here(block: str) -> bool:
    return OURS in block or block == f"$ {SCRIPT}\n"


def with_commands() -> list:
    pages = [
        page
        for page in PAGES
        if any(kind == "console" and runs_here(text) for kind, text in blocks(page))
    ]
    return [pytest.param(page, id=page.stem, marks=pytest.mark.slow) for page in pages]


def console_lines(block: str) -> list[str]:
    """The commands of a block, each with its continuation lines."""
    return [line for line in re.split(r"^\$ ", block, flags=re.MULTILINE) if line]


@pytest.mark.parametrize("page", with_commands())
def test_commands_run_and_match_shown_output(page: Path, tmp_path: Path) -> None:
    for kind, text in blocks(page):
        name = re.match(r"# (\w+\.py)\n", text)
        if kind == "python" and name:
            (tmp_path / name[1]).write_text(text)
    found = blocks(page)
    for (kind, text), (next_kind, below) in pairwise(found):
        if kind != "console" or not runs_here(text):
            continue
        done = run_commands(text, tmp_path)
        assert done.returncode == 0, done.stderr
        if next_kind in ("bash", "yaml"):
            assert done.stdout == below
        elif SCRIPT in text:
            lines = {without_numbers(line) for line in done.stdout.splitlines()}
            assert {without_numbers(line) for line in below.splitlines()} <= lines
        elif next_kind == "text":
            # Gloo prints greetings from all threads at once, so its lines may be torn.
            assert set(below.splitlines()) <= set(done.stdout.splitlines())


def without_numbers(line: str) -> str:
    """A line of a fit, without paths and numbers: speeds differ from run to run.

    Short numbers are padded, so that spaces differ too.
    """
    text = re.sub(r"\d[\w.,:%+-]*", "#", re.sub(r"'[^']*'", "'...'", line))
    return " ".join(text.split())


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


def test_every_untested_command_is_known() -> None:
    for page in PAGES:
        for kind, text in blocks(page):
            if kind == "console" and not runs_here(text):
                for line in console_lines(text):
                    assert line.startswith(OTHERS), (page.name, line)


def test_every_block_has_known_kind() -> None:
    known = {
        "python",
        "text",
        "{code-block} text",
        "console",
        "{toctree}",
        "{include} ../CONTRIBUTING.md",
    }
    known |= {"diff"}  # of other people's files
    known |= {"bash", "yaml"}  # printed by the command above the block
    known |= {"{include} ../CHANGELOG.md"}
    known |= {"{raw} html", "{error-list}", "{plan-numbers}"}
    known |= {"{worked-examples}", "{benchmark-results}", "{tutorial-cards}"}
    known |= {"{hardware-table}"}
    known |= {"{glossary}"}
    known |= {f"{{drawing}} {name}" for name in drawings.FIGURES}
    for page in PAGES:
        kinds = {kind for kind, _ in blocks(page)}
        assert kinds <= known, page.name


def test_every_public_name_is_in_reference() -> None:
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE))
    modules = {"errors", "layers", "weights"}  # these modules have separate pages
    assert set(nnx_parallel.__all__) - modules <= documented


def test_index_has_a_line_for_each_name() -> None:
    text = (DOCS / "api" / "index.md").read_text()
    names = re.findall(r"^   ([a-zA-Z][\w.]*)$", text, re.MULTILINE)
    assert len(names) == len(set(names))
    modules = {"errors", "layers", "weights"}
    short = {name for name in names if "." not in name}
    assert short == set(nnx_parallel.__all__) - modules
    for name in set(names) - short:
        # Sphinx refuses names that begin with the current module.
        module, _, last = f"nnx_parallel.{name}".rpartition(".")
        assert nnx_parallel.errors.home_of(last) == module
        assert hasattr(importlib.import_module(module), last)


def test_every_name_in_reference_exists() -> None:
    for page in (DOCS / "api").glob("*.md"):
        text = page.read_text()
        modules = re.findall(r"^\.\. currentmodule:: ([\w.]+)$", text, re.MULTILINE)
        names = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", text, re.MULTILINE)
        for name in names:
            home, _, last = name.rpartition(".")
            module = importlib.import_module(home or modules[0])
            assert hasattr(module, last), (page, name)


NOTES = DOCS / "library-notes.md"


def test_library_notes_name_existing_files() -> None:
    for name in re.findall(r"`([a-z_.]+\.[a-z_]+)`", NOTES.read_text()):
        path = ROOT.joinpath("nnx_parallel", *name.split("."))
        if (ROOT / "nnx_parallel" / name.partition(".")[0]).is_dir():
            assert path.with_suffix(".py").exists() or path.is_dir(), name


def test_comments_cite_headings_of_library_notes() -> None:
    headings = set(re.findall(r"^## (.*)$", NOTES.read_text(), re.MULTILINE))
    for file in (ROOT / "nnx_parallel").rglob("*.py"):
        text = re.sub(r"\n *(# )?", " ", file.read_text())
        for heading in re.findall(r'library-notes\.md, "?([\w :]+)', text):
            assert heading in headings, (file.name, heading)


def test_every_page_is_listed() -> None:
    """Pages for developers are listed on another page, outside of the sidebar."""
    homes = (DOCS / "index.md", DOCS / "developers.md")
    listed = "".join(text for home in homes for _, text in blocks(home)).split()
    pages = {page.stem for page in PAGES} - {home.stem for home in homes}
    assert pages <= set(listed)
    assert "(developers.md)" in homes[0].read_text()


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as the site generates them."""
    found = re.findall(r"^##+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def test_every_error_has_help() -> None:
    assert set(error_help.HELP) == set(error_help.error_names()) - {*error_help.BASES}
    for name, known in error_help.HELP.items():
        assert min(map(len, known)) > 10, name
        for page, anchor in re.findall(r"\((\w+\.md)(?:#([\w-]+))?\)", "".join(known)):
            assert not anchor or anchor in headings(DOCS / page), (name, anchor)


def test_every_tutorial_has_card_and_valid_order() -> None:
    numbers = {int(file.stem[:2]) for file in cards.tutorials()}
    assert numbers <= set(cards.CARDS)
    for number in numbers:
        assert set(cards.CARDS[number].after) <= numbers
    html = cards.cards()
    assert html.count("<title>Sketch: ") == len(numbers)


def test_migrating_page_has_a_heading_for_each_table() -> None:
    text = (DOCS / "migrating.md").read_text()
    tables = re.findall(r"^\|[-:| ]+\|$", text, re.MULTILINE)
    assert len(tables) == len(re.findall(r"^## ", text, re.MULTILINE)) >= 9


@pytest.mark.parametrize("name", drawings.FIGURES)
def test_pictures_are_readable_on_phone_and_have_alt(name: str) -> None:
    for panel in drawings.FIGURES[name]():
        width, _ = panel.size
        # A phone shows small panels in pairs, and wide panels one by one.
        shown = 170 if width < 200 else 358
        sizes = [
            12.0,
            *map(float, re.findall(r'font-size="([\d.]+)"', "".join(panel.marks))),
        ]
        assert min(sizes) * min(1.0, shown / width) >= 9
        assert len(panel.alt) > 30
        svg = ElementTree.fromstring(
            drawings.document(panel.marks, *panel.size, panel.alt)
        )
        assert svg.findtext("{http://www.w3.org/2000/svg}title") == panel.alt


def test_hero_pictures_show_shards_of_each_device() -> None:
    data, fsdp, tensor, pipeline = ("".join(panel.marks) for panel in drawings.hero())
    colours = [f'fill="{drawings.device(i)}"' for i in range(8)]
    assert data.count('class="whole"') == 4
    # Each row of the batch has one colour.
    assert [data.count(colour) for colour in colours] == [1] * 8
    assert [fsdp.count(colour) for colour in colours] == [1 + 4] * 8
    assert [tensor.count(colour) for colour in colours] == [1 + 4] * 8
    assert [pipeline.count(colour) for colour in colours] == [1 + 2] * 8


def test_zero_bars_match_state_bytes() -> None:
    (panel,) = drawings.zero()
    found = [int(number) for number in re.findall(r"(\d+) GB", panel.alt)]
    state = 16 * 8.03  # AdamW in float32 has 16 bytes per parameter
    shards = [1, 8 / 16 + 8 / 16 / 8, 4 / 16 + 12 / 16 / 8, 1 / 8]
    assert found == [round(state * share) for share in shards]


def test_picture_files_are_up_to_date() -> None:
    for name, draw in drawings.FILES.items():
        text = (drawings.STATIC / name).read_text()
        assert text == draw(), "run python docs/drawings.py to draw them again"
