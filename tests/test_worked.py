"""The worked examples of the site: every model, and all of them fit."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DEVICE_BYTES = 80e9


@pytest.fixture(scope="module")
def worked() -> ModuleType:
    spec = importlib.util.spec_from_file_location("worked", ROOT / "docs" / "worked.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["worked"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_example_fits_with_room_for_activations(worked: ModuleType) -> None:
    names = [example.name for example in worked.EXAMPLES]
    assert len(set(names)) == 7
    for example in worked.EXAMPLES:
        told = example.describe()
        state = told.params_bytes + told.gradients_bytes + told.optimizer_bytes
        assert 0 < state < DEVICE_BYTES / 2, example.name
        devices = told.layout.mesh.size
        assert state * devices >= 16 * example.num_params()


@pytest.mark.slow
def test_the_table_has_a_line_for_each(worked: ModuleType) -> None:
    head, rule, *rows = worked.table()
    assert head.count("|") == rule.count("|")
    assert all(row.count("|") == head.count("|") for row in rows)
    assert len(rows) == len(worked.EXAMPLES)
