"""A Sphinx extension: directives that generate pages from files outside of the site."""

from pathlib import Path

import results
import worked
from docutils import nodes
from docutils.nodes import Node
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import nnx_parallel
from nnx_parallel import errors

ROOT = Path(__file__).parents[1]


class ErrorList(SphinxDirective):
    """Every named error and warning with its docstring, the bases first."""

    def run(self) -> list[Node]:
        """Documents the classes of `nnx_parallel.errors` in their order there."""
        lines, bases = [], (errors.ParallelError, errors.ParallelWarning)
        for name, value in vars(errors).items():
            if isinstance(value, type) and issubclass(value, bases):
                lines += [
                    f".. autoclass:: nnx_parallel.errors.{name}",
                    "   :show-inheritance:",
                    "",
                ]
        node = nodes.container()
        self.state.nested_parse(
            StringList(["```{eval-rst}", *lines, "```"], "errors"), 0, node
        )
        return node.children


class WorkedExamples(SphinxDirective):
    """The table of worked examples, and the reason for each choice."""

    def run(self) -> list[Node]:
        """Describes every example."""
        models = (ROOT / "models").glob("*.py")
        package = (ROOT / "nnx_parallel").rglob("*.py")
        _depend_on(self, Path(str(worked.__file__)), *models, *package)
        reasons = [
            line
            for example in worked.EXAMPLES
            for line in (example.name, f": {example.why}", "")
        ]
        lines = [*worked.table(), "", *reasons]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, "worked"), 0, node)
        return node.children


class BenchmarkResults(SphinxDirective):
    """A section for each file of results: a plot, a table, and the circumstances."""

    def run(self) -> list[Node]:
        """Reads ``benchmarks/results`` and draws the plots."""
        _depend_on(self, Path(str(results.__file__)), *results.RESULTS.glob("*.json"))
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(StringList(results.page(), "results"), 0, node)
        return node.children


def _depend_on(directive: SphinxDirective, *files: Path) -> None:
    """Rebuilds the page when one of the files changes."""
    for file in files:
        directive.env.note_dependency(str(file))


def setup(app: Sphinx) -> dict[str, bool | str]:
    """Registers the directives."""
    app.add_directive("error-list", ErrorList)
    app.add_directive("worked-examples", WorkedExamples)
    app.add_directive("benchmark-results", BenchmarkResults)
    return {"version": nnx_parallel.__version__, "parallel_read_safe": True}
