"""The built site: search finds pages, and links have targets."""

import json
import os
import re
from pathlib import Path
from urllib.parse import quote_plus

import pytest

import nnx_parallel
from nnx_parallel import errors
from tests.browser import HTML, PAGES, evaluate, serve

pytestmark = pytest.mark.slow
server = serve


@pytest.mark.parametrize("page", ["home", "choose", "tutorials", "tutorial"])
def test_pictures_have_alt_texts(page: str, server: str, tmp_path: Path) -> None:
    script = """
    const page = (await load("/PAGE", 1280)).contentDocument;
    const images = [...page.querySelectorAll("article img, article svg[role=img]")];
    return images.map((image) => image.getAttribute("alt")
      || image.querySelector("title")?.textContent || "");
    """
    found = evaluate(server, tmp_path, script.replace("PAGE", PAGES[page]))
    assert found
    assert all(found)
    assert not any(words.endswith((".svg", ".png")) for words in found)


def test_pages_have_description_and_version(server: str, tmp_path: Path) -> None:
    script = """
    const found = [];
    for (const url of CASES) {
      const page = (await load("/" + url, 1280)).contentDocument;
      found.push([page.querySelector("meta[name=description]")?.content || "",
        page.querySelector(".logo__title").textContent]);
    }
    return found;
    """
    urls = [*PAGES.values(), "tutorials/01_meshes.html"]
    found = evaluate(server, tmp_path, script.replace("CASES", json.dumps(urls)))
    for url, (description, brand) in zip(urls, found, strict=True):
        assert 40 < len(description) <= 162, url
        assert brand.strip() == f"nnx_parallel {nnx_parallel.__version__}"
    assert len({description for description, _ in found}) == len(urls)


def test_reference_has_types_and_table_of_names() -> None:
    for page, name, argument in (
        ("models", "GPT", "models.GPT(config:GPTConfig,"),
        ("trainer", "Trainer", "num_microbatches:int=1"),
        ("strategies", "FSDP", "min_size:int"),
    ):
        html = (HTML / "api" / f"{page}.html").read_text()
        table, _, rest = html.partition("</table>")
        assert 'class="autosummary' in table
        assert re.search(rf'href="#nnx_parallel\.\S*{name}"', table)
        assert argument in "".join(re.sub(r"<[^>]+>", "", rest).split())


def test_tutorials_can_be_downloaded() -> None:
    sources = sorted((HTML.parents[2] / "tutorials").glob("[0-9]*.py"))
    for source in sources:
        copy = HTML / "tutorials" / source.name
        assert copy.read_text() == source.read_text()
        notebook = json.loads(copy.with_suffix(".ipynb").read_text())
        assert notebook["nbformat"] == 4
        page = copy.with_suffix(".html").read_text()
        for file in (copy, copy.with_suffix(".ipynb")):
            assert f'href="{file.name}"' in page


def test_examples_can_be_downloaded() -> None:
    copy = HTML / "examples" / "text.py"
    source = HTML.parents[2] / "examples" / "text.py"
    assert copy.read_text() == source.read_text()
    for page, link in (
        ("tutorials/18_text", "../examples/text.py"),
        ("recipes", "examples/text.py"),
    ):
        assert f'href="{link}" download' in (HTML / f"{page}.html").read_text()


def test_repository_is_linked_if_configured() -> None:
    """The link depends on a setting of docs/conf.py."""
    page = (HTML / "faq.html").read_text()
    known = bool(os.environ.get("NNX_PARALLEL_REPOSITORY"))
    assert ("btn-source-edit-button" in page) == known


def test_links_are_not_empty_or_broken() -> None:
    """Links that need an unset address are left out."""
    for file in HTML.rglob("*.html"):
        links = re.findall(
            r"""(?:href|src|action)=["']([^"']*)["']""", file.read_text()
        )
        for link in links:
            assert link, file
            assert not re.search(r"\bNone\b|^/?/(?!/)|github\.com//", link), (
                file,
                link,
            )


def test_search_finds_fsdp(server: str, tmp_path: Path) -> None:
    script = """
    const page = (await load("/search.html?q=FSDP", 1280)).contentDocument;
    await wait(() => page.querySelectorAll("ul.search li a").length > 3);
    const links = [...page.querySelectorAll("ul.search li a")];
    return links.map((a) => a.getAttribute("href"));
    """
    found = evaluate(server, tmp_path, script)
    assert any("api/strategies.html" in link for link in found), found
    assert any("tutorials/03_fsdp.html" in link for link in found), found


def test_error_links_match_entries() -> None:
    page = (HTML / "errors.html").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.ParallelError):
            assert f'id="{errors.__name__}.{name}"' in page


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("epoch", "faq.html"),
        ("DataLoader", "faq.html"),
        ("out of memory", "recipes.html"),
        ("learning rate", "recipes.html"),
        ("pretrained", "recipes.html"),
        ("fine-tune", "recipes.html"),
        ("early stopping", "recipes.html"),
        ("wandb", "recipes.html"),
        ("MeshShapeError", "errors.html"),
        ("all-gather", "glossary.html"),
    ],
)
def test_search_finds_common_words(
    words: str, page: str, server: str, tmp_path: Path
) -> None:
    script = """
    const page = (await load("/search.html?q=WORDS", 1280)).contentDocument;
    await wait(() => page.querySelectorAll("ul.search li a").length > 0);
    await new Promise((r) => setTimeout(r, 1500));
    const links = [...page.querySelectorAll("ul.search li a")];
    return links.map((a) => a.getAttribute("href"));
    """
    found = evaluate(server, tmp_path, script.replace("WORDS", quote_plus(words)))
    assert any(page in link for link in found), found
