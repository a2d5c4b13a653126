"""Imports the site's scripts, which import each other as in a build of the site."""

import importlib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(DOCS)
    cards = importlib.import_module("cards")
    drawings = importlib.import_module("drawings")
    error_help = importlib.import_module("error_help")
