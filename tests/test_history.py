"""A fit's history has a short text, plots, and data frames without holes."""

import re
import sys
from typing import Any

import numpy as np
import pytest

from nnx_parallel.training.history import History

HISTORY: Any = History(
    step=np.arange(1, 1001),
    loss=np.linspace(3, 1, 1000),
    accuracy=np.full(1000, 0.5),
    skipped=np.zeros(1000),
    step_seconds=np.full(1000, np.nan),
    eval_step=np.array([500, 1000]),
    eval_loss=np.array([2.5, 1.5]),
    eval_f1=np.array([0.25, 0.75]),
)


def test_text_is_one_line() -> None:
    text = "History(steps 1 to 1000: loss 3.000 -> 1.000, eval_loss 2.500 -> 1.500)"
    assert repr(HISTORY) == str(HISTORY) == text
    assert repr(History()) == "History(no steps)"


def test_notebook_shows_plot_of_each_metric() -> None:
    html = HISTORY._repr_html_()
    assert re.findall(r"<title>(.*?)</title>", html) == [
        "loss 3.000 -&gt; 1.000, eval_loss 2.500 -&gt; 1.500",
        "accuracy 0.500 -&gt; 0.500",
        "eval_f1 0.250 -&gt; 0.750",
    ]
    assert html.count("<polyline") == 2
    assert html.count("<circle") == 4
    assert len(html) < 20_000  # a line has at most 300 points
    assert "nan" not in html
    bad: Any = History(step=np.array([1]), loss=np.array([np.nan]))
    assert bad._repr_html_()


class Pandas:
    """The part of pandas that a history uses."""

    @staticmethod
    def DataFrame(data: dict, columns: list) -> Any:  # noqa: N802
        class Frame:
            def set_index(self, name: str) -> Any:
                lengths = {len(values) for values in data.values()}
                return name, [*data], columns, lengths

        return Frame()


def test_data_frames_have_rows_of_steps_or_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", Pandas)
    index, names, _, lengths = HISTORY.to_dataframe()
    assert (index, lengths) == ("step", {1000})
    assert names == ["step", "loss", "accuracy", "skipped", "step_seconds"]
    index, names, _, lengths = HISTORY.to_dataframe(evaluations=True)
    assert (index, names, lengths) == (
        "eval_step",
        ["eval_step", "eval_loss", "eval_f1"],
        {2},
    )


def test_missing_pandas_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_dataframe needs pandas.*pip install"):
        HISTORY.to_dataframe()
