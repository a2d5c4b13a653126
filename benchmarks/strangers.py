"""Public models under strategies, beside plain `nnx.jit`: numbers and restores.

The models and their losses are in `tests/strangers/public`. The Trainer gets them as
their authors wrote them. The optimizer is SGD with momentum, for three steps.
"""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import jax

from benchmarks.timing import Table, circumstances
from nnx_parallel.errors import ParallelWarning
from tests.strangers import runs
from tests.strangers.public.case import COMMITS, Public
from tests.strangers.public.cases import PUBLIC


def measure(rounds: int = len(PUBLIC)) -> Models:
    """Trains the models under every strategy.

    Args:
        rounds: The number of models, from the first.
    """
    table = Models(f"Public models as their authors wrote them: {rounds}")
    # Machine code need not be fast here: the programs run three times.
    jax.config.update("jax_disable_most_optimizations", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ParallelWarning)
        warnings.filterwarnings("ignore", "Arrays in no Variable")
        warnings.simplefilter("ignore", DeprecationWarning)  # of `sow`
        for name, case in [*PUBLIC.items()][:rounds]:
            table.add_model(name, _cells(case))
    return table


def _cells(case: Public) -> dict[str, Any]:
    commit = COMMITS[case.repository]
    cells = {"source": f"{case.repository}@{commit[:7]} {case.path}"}
    try:
        expected = runs.plain(case)
    except Exception as error:
        return cells | {"failures": f"plain NNX: {_first_line(error)}"}
    ran, failures = list[str](), list[str]()
    losses, arrays, is_restored = [0.0], [0.0], False
    for name in runs.STRATEGIES:
        with tempfile.TemporaryDirectory() as directory:
            where = directory if name == "FSDP" else None
            try:
                run, state = runs.trained(case, name, where)
                losses.append(runs.loss_difference(run, expected))
                arrays += runs.array_differences(run, expected).values()
                ran.append(name)
                if where:
                    is_restored = runs.same_bits(runs.restored(case, where), state)
            except Exception as error:
                failures.append(f"{name}: {_first_line(error)}")
    return cells | {
        "lines changed": "0, and a rule for names" if case.rules else "0",
        "ran under": ", ".join(ran) or "none",
        **({"loss": f"{max(losses):.0e}"} if ran else {}),
        **({"parameters": f"{max(arrays):.0e}"} if ran else {}),
        "restored": is_restored,
        **({"failures": "; ".join(failures)} if failures else {}),
    }


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


class Models(Table):
    """A row for each model; a figure is named by its column and its model."""

    def add_model(self, model: str, cells: dict[str, Any]) -> None:
        """Adds a row, and prints it immediately."""
        for column, cell in cells.items():
            self.add(f"{column}: {model}", cell)

    def show(self) -> None:
        """Prints a line for each model."""
        lines: dict[str, list[str]] = {}
        for name, cell in self.rows:
            column, _, model = name.partition(": ")
            if isinstance(cell, bool):
                cell = "yes" if cell else "no"
            shown = str(cell) if column == "source" else f"{column} {cell}"
            lines.setdefault(model, []).append(shown)
        print(self.title)
        for key, value in circumstances(self.hardware, self.packages).items():
            print(f"  {key}: {value}")
        for model, cells in lines.items():
            print(f"{model}: {'; '.join(cells)}")
