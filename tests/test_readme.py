"""Every snippet of the README runs and prints the output that is shown."""

import re
from pathlib import Path

import pytest

from tests.pages import FENCE, blocks, run_page

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PACKAGE = ROOT / "nnx_parallel"


def test_blocks_have_known_kinds() -> None:
    assert {kind for kind, _ in blocks(README)} == {"python", "console", "text"}


def test_console_blocks_use_make_targets() -> None:
    rules = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*##", rules, re.MULTILINE))
    commands = [text for kind, text in blocks(README) if kind == "console"]
    for line in "".join(commands).splitlines():
        command = re.fullmatch(r"\$ make ([a-z-]+)( +#.*)?", line)
        assert command, line
        assert command[1] in targets, line


def test_named_files_exist() -> None:
    prose = FENCE.sub("", README.read_text())
    paths = re.findall(r"\]\((?!https:)([\w/.-]+)", prose)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_map_lists_every_package() -> None:
    """Each folder and module has one line, and the files that the lines name exist."""
    page = (ROOT / "docs" / "design.md").read_text()
    drawn = re.split(r"<!-- (?:end of )?map -->", page)[1]
    rooms = set(re.findall(r"^ {6}(\w+)/ ", drawn, re.MULTILINE))
    assert rooms == {init.parent.name for init in PACKAGE.glob("*/__init__.py")}
    loose = re.findall(r"^ {6}((?:\w+, )*\w+)  ", drawn, re.MULTILINE)
    modules = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert set(", ".join(loose).split(", ")) == modules
    for line in drawn.splitlines():
        room = re.match(r" {6}(\w+/) ", line)  # the folder of files on this line
        for name in re.findall(r"[\w/]+\.py", line):
            assert (PACKAGE / (room[1] if room else "") / name).exists(), name
    for room in ("layers", "plan"):  # these folders are listed by file
        listed = re.split(r"\n {6}(?=\w)", drawn.partition(f"      {room}/ ")[2])[0]
        files = {file.stem for file in (PACKAGE / room).rglob("*.py")} - {"__init__"}
        assert files <= set(re.findall(r"\w+", listed)), room


@pytest.mark.deep
def test_python_blocks_run_and_match_shown_output(tmp_path: Path) -> None:
    found = run_page(README, tmp_path)
    assert any(shown is not None for _, shown in found)
    for printed, shown in found:
        if shown is not None:
            assert trimmed(printed) == trimmed(shown)


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]
