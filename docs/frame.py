"""A Sphinx extension: descriptions for search engines, and files to download.

It also cleans up the generated API pages.
"""

from __future__ import annotations

import dataclasses
import html
import re
import shutil
from pathlib import Path
from typing import Any, cast

import jupytext
from cards import RUNTIME, needs, tutorials
from docutils import nodes
from flax import nnx
from myst_nb.sphinx_ import NbMetadataCollector
from nbformat import NotebookNode
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import inspect

DOCS = Path(__file__).parent
EXTRA = DOCS / "_build" / "extra"

_DESCRIPTION = 160  # characters that search engines show


def copy_tutorials() -> None:
    """Copies tutorials to the directory that Sphinx reads, and for downloads."""
    sources, downloads = DOCS / "tutorials", EXTRA / "tutorials"
    for directory in (sources, downloads):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    for file in tutorials():
        head, title, rest = re.split(r"(?m)^(# # .*\n)", file.read_text(), maxsplit=1)
        before = needs(int(file.stem[:2])).replace("after", "read after tutorial")
        links = (
            f'# <p class="downloads"><a href="{file.stem}.ipynb" download>Notebook</a>'
            f'<a href="{file.name}" download>Script</a>'
            f"<span>{before}{RUNTIME % file.stem}</span></p>\n"
        )
        # Only code cells are keys of the cache, and this changes no code cell.
        text = f"{head}{title}#\n{links}{link_examples(rest, '../')}"
        (sources / file.name).write_text(text)
        shutil.copyfile(file, downloads / file.name)
        notebook = jupytext.read(file, fmt="py:percent")
        jupytext.write(notebook, downloads / f"{file.stem}.ipynb")


def copy_examples() -> None:
    """Copies the example scripts that pages link for download."""
    shutil.rmtree(EXTRA / "examples", ignore_errors=True)
    (EXTRA / "examples").mkdir(parents=True)
    for file in sorted((DOCS.parent / "examples").glob("*.py")):
        shutil.copyfile(file, EXTRA / "examples" / file.name)


def link_examples(text: str, root: str) -> str:
    """Turns names such as `examples/text.py` in Markdown into links for download.

    Args:
        text: Markdown.
        root: Path from the page to the root of the site, such as ``"../"``.
    """
    link = rf'<a href="{root}\1" download><code>\1</code></a>'
    return re.sub(r"`(examples/\w+\.py)`", link, text)


def link_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Links the example scripts in a page."""
    if not page.startswith("tutorials/"):  # their copies have the links
        source[0] = link_examples(source[0], "../" * page.count("/"))


def read_tutorial(text: str) -> NotebookNode:
    """Returns a tutorial as a notebook, with its language set to Python."""
    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "python3"}
    return notebook


def describe_page(
    app: Sphinx,
    page: str,
    template: str,
    context: dict[str, Any],
    document: nodes.document | None,
) -> None:
    """Makes the first paragraph of a page its description, unless it has another."""
    if document is None or "name=description" in context["metatags"].replace('"', ""):
        return
    for paragraph in document.findall(nodes.paragraph):
        words = " ".join(paragraph.astext().split())
        if len(words) > 40:  # skips titles of tables, and lines of links
            break
    else:
        return
    if len(words) > _DESCRIPTION:
        words = f"{words[:_DESCRIPTION].rpartition(' ')[0]} …"
    content = words.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    context["metatags"] += f'<meta name="description" content="{content}" />\n'


def sign_modules(
    app: Sphinx,
    kind: str,
    name: str,
    thing: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """The arguments of a class.

    The metaclass of an NNX module says ``*args, **kwargs``, and a dataclass
    ``<factory>`` for a default.
    """
    if kind == "class" and signature and dataclasses.is_dataclass(thing):
        # As Sphinx cannot parse "<factory>", it would not format the others either.
        made = {f.name: f.default_factory for f in dataclasses.fields(thing)}
        for name in inspect.signature(thing).parameters:
            if made.get(name, dataclasses.MISSING) is not dataclasses.MISSING:
                factory = getattr(made[name], "__name__", "...")
                signature = signature.replace("<factory>", f"{factory}()", 1)
        return signature, returns
    if kind != "class" or not issubclass(cast("type", thing), nnx.Module):
        return None
    arguments = inspect.signature(thing.__init__, bound_method=True)
    shown = inspect.stringify_signature(
        arguments, show_return_annotation=False, unqualified_typehints=True
    )
    return shown, None


def link_tutorials(
    app: Sphinx, page: str, template: str, context: dict[str, Any], document: object
) -> None:
    """Makes "edit" links point to the tutorials' sources, not to Sphinx's copies."""
    for group in context.get("header_buttons", ()) if "tutorials/" in page else ():
        for button in group.get("buttons", ()):
            url = button.get("url", "").replace("/docs/tutorials/", "/tutorials/")
            button["url"] = url


def summarize(app: Sphinx, page: str, source: list[str]) -> None:
    """Adds a table of the names of an API page before the first name."""
    if not page.startswith("api/"):
        return
    names = re.findall(r"(?m)^\.\. auto(?!module|summary)\w+:: ([\w.]+)$", source[0])
    module = re.search(r"(?m)^\.\. currentmodule:: ([\w.]+)$", source[0])
    if not names:
        return
    if module is None:
        raise ExtensionError(f"{page} has names, and no `.. currentmodule::` above.")
    table = ".. autosummary::\n   :nosignatures:\n\n" + "".join(
        f"   {name.removeprefix(module[1] + '.')}\n" for name in names
    )
    before, after = source[0].split(module[0], 1)
    source[0] = f"{before}{module[0]}\n\n{table}{after}"


def fill_runtimes(app: Sphinx, document: nodes.document, page: str) -> None:
    """Inserts the measured seconds of tutorials; does nothing if they were not run."""
    for raw in document.findall(nodes.raw):
        shown = raw.astext()
        for stem in re.findall(RUNTIME.replace("%s", r"(\w+)"), shown):
            ran = NbMetadataCollector.get_exec_data(app.env, f"tutorials/{stem}")
            seconds = ran and ran["runtime"]
            words = f" · ran in {seconds:.0f} s" if seconds else ""
            shown = shown.replace(RUNTIME % stem, f"<span>{words}</span>")
        raw.children = [nodes.Text(shown)]


def call_attributes_so(app: Sphinx, document: nodes.document, page: str) -> None:
    """Renames the section of attributes, which Sphinx calls "Variables"."""
    for name in document.findall(nodes.field_name):
        if name.astext() == "Variables":
            name.children = [nodes.Text("Attributes")]


def describe_pictures(app: Sphinx, document: nodes.document, page: str) -> None:
    """Describes a picture that a tutorial draws by the tutorial's title."""
    for image in document.findall(nodes.image):
        file = Path(app.srcdir) / image["uri"]
        if "alt" not in image and file.suffix == ".svg":
            words = re.search(r"<title>([^<]+)<", file.read_text())
            image["alt"] = " ".join(html.unescape(words[1]).split()) if words else ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects everything."""
    app.connect("source-read", summarize)
    app.connect("source-read", link_page)
    app.connect("doctree-resolved", fill_runtimes)
    app.connect("doctree-resolved", call_attributes_so)
    app.connect("doctree-resolved", describe_pictures)
    app.connect("autodoc-process-signature", sign_modules)
    app.connect("html-page-context", describe_page)
    app.connect("html-page-context", link_tutorials, priority=900)  # after the theme
    return {"parallel_read_safe": True}
