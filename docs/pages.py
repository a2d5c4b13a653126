"""A Sphinx extension: directives that generate pages from files outside of the site."""

from pathlib import Path

import attention_table
import cards
import drawings
import error_help
import planned
import results
import vector
import worked
from docutils import nodes
from docutils.nodes import Node
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import nnx_parallel

ROOT = Path(__file__).parents[1]


class ErrorList(SphinxDirective):
    """Every named error and warning: docstring, cause, fix and an example."""

    def run(self) -> list[Node]:
        """Documents the classes of `nnx_parallel.errors` in their order there."""
        _depend_on(self, Path(str(error_help.__file__)))
        node = nodes.container()
        lines: list[str] = []
        for name in error_help.error_names():
            lines += [
                "```{eval-rst}",
                f".. autoclass:: nnx_parallel.errors.{name}",
                "   :show-inheritance:",
                "```",
                *error_help.entry(name),
                "",
            ]
        self.state.nested_parse(StringList(lines, "errors"), 0, node)
        return node.children


class Figure(SphinxDirective):
    """A picture of `drawings`, by its name."""

    required_arguments = 1

    def run(self) -> list[Node]:
        """Draws it."""
        for module in (drawings, planned, vector):
            _depend_on(self, Path(str(module.__file__)))
        html = drawings.figure(self.arguments[0])
        return [nodes.raw("", html, format="html")]


class PlanNumbers(SphinxDirective):
    """A table of common models on common machines, by the formulas of `plan`."""

    def run(self) -> list[Node]:
        """Plans each run."""
        plan = (ROOT / "nnx_parallel" / "plan").glob("*.py")
        _depend_on(self, Path(str(planned.__file__)), *plan)
        node = nodes.container()
        self.state.nested_parse(StringList(planned.numbers(), "planned"), 0, node)
        return node.children


class HardwareTable(SphinxDirective):
    """A table of the accelerators that `plan` knows."""

    def run(self) -> list[Node]:
        """Formats the figures of `nnx_parallel.plan.HARDWARE`."""
        file = ROOT / "nnx_parallel" / "plan" / "hardware.py"
        _depend_on(self, Path(str(planned.__file__)), file)
        node = nodes.container()
        self.state.nested_parse(StringList(planned.hardware(), "hardware"), 0, node)
        return node.children


class TutorialCards(SphinxDirective):
    """A card for each tutorial."""

    def run(self) -> list[Node]:
        """Draws them."""
        _depend_on(self, Path(str(cards.__file__)), *cards.tutorials())
        return [nodes.raw("", cards.cards(), format="html")]


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


class AttentionTable(SphinxDirective):
    """A table of attention's implementations and the arguments that each accepts."""

    def run(self) -> list[Node]:
        """Asks each implementation."""
        layers = (ROOT / "nnx_parallel" / "layers").glob("*.py")
        _depend_on(self, Path(str(attention_table.__file__)), *layers)
        node = nodes.container()
        self.state.nested_parse(
            StringList(attention_table.table(), "attention"), 0, node
        )
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
    app.add_directive("drawing", Figure)
    app.add_directive("plan-numbers", PlanNumbers)
    app.add_directive("hardware-table", HardwareTable)
    app.add_directive("tutorial-cards", TutorialCards)
    app.add_directive("worked-examples", WorkedExamples)
    app.add_directive("attention-table", AttentionTable)
    app.add_directive("benchmark-results", BenchmarkResults)
    return {"version": nnx_parallel.__version__, "parallel_read_safe": True}
