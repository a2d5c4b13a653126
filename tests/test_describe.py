"""Texts of a description, a report, a schedule and a Trainer, and their widths."""

import io
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from nnx_parallel import (
    FSDP,
    Checkpoint,
    Composite,
    Interleaved,
    OneFOneB,
    TensorParallel,
    Trainer,
    ZeroBubble,
    audit,
    make_mesh,
    visualize,
)
from nnx_parallel.models import GPT, GPTConfig
from nnx_parallel.visualize.describe import Description

COLUMNS = [
    "path", "shape", "dtype", "stored", "used", "gradient", "optimizer",
    "bytes/device", "why",
]  # fmt: skip


@pytest.fixture(scope="module")
def described() -> Description:
    strategy = Composite(FSDP(4), TensorParallel(2))
    return strategy.describe(lambda rngs: GPT(GPTConfig.tiny(), rngs=rngs))


def html_of(thing: Any) -> str:
    """The HTML of an object in a notebook."""
    return thing._repr_html_()


def header_of(text: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith("┃ path"))
    return [name.strip() for name in line.strip("┃").split("┃")]


@pytest.mark.parametrize(
    ("width", "hidden"),
    [
        (200, []),
        (120, ["dtype", "gradient", "optimizer", "used"]),
        (80, ["dtype", "gradient", "optimizer", "used", "shape", "why"]),
    ],
)
def test_description_fits_terminal_and_lists_hidden_columns(
    described: Description,
    width: int,
    hidden: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(described)
    assert header_of(text) == [name for name in COLUMNS if name not in hidden]
    assert max(map(len, text.splitlines())) <= width
    assert (f"not shown in {width} columns: " in text) == bool(hidden)
    for name in hidden:
        assert re.search(rf"not shown in {width} columns: .*\b{name}\b", text)
    # Paths are not broken, and the bytes are in the same line.
    lines = text.splitlines()
    for row in described.rows:
        (line,) = (line for line in lines if f"│ {row.info.path} " in line)
        assert f" {row.bytes_per_device:,} " in line


def test_rich_uses_console_width(described: Description) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(described)
    assert "why" not in header_of(console.export_text())


def test_long_path_is_folded(
    described: Description, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    text = str(described)
    assert header_of(text) == ["path", "stored", "bytes/device"]
    assert max(map(len, text.splitlines())) <= 50


def test_default_width_is_120(
    described: Description, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)  # no terminal, even with `pytest -s`
    assert "not shown in 120 columns: " in str(described)
    assert str(visualize(described)) == str(described)


def test_notebook_shows_every_column(described: Description) -> None:
    html = html_of(described)
    assert re.findall("<th>(.*?)</th>", html) == COLUMNS
    assert html.count("<tr>") == 1 + len(described.rows)
    assert "name &#x27;mlp&#x27; -&gt; tensor" in html
    assert "per device: parameters" in html


def test_description_has_short_repr(described: Description) -> None:
    found = f"<{len(described.rows)} arrays on mesh fsdp=4 * tensor=2, "
    assert repr(described).startswith(found)
    assert len(repr(described)) < 100


def test_report_has_short_repr_and_html_table() -> None:
    mesh = make_mesh({"x": 8})
    rows = NamedSharding(mesh, P("x"))
    x = jax.device_put(jnp.ones((8, 16)), rows)
    whole = jax.jit(lambda x: x @ x.T, out_shardings=NamedSharding(mesh, P()))
    report = audit(whole.lower(x).compile())
    assert report.count() > 0
    pattern = r"<[\d.]+ ?k? FLOPs, \d+ collectives of \d+ ?k?B on each device>"
    assert re.fullmatch(pattern, repr(report)), repr(report)
    html = html_of(report)
    header = str(report).split("\n\n")[1].splitlines()[0].split()
    assert re.findall("<th>(.*?)</th>", html) == header
    assert "FLOPs per device: " in html


def test_schedule_has_short_repr_and_html_grid() -> None:
    table = OneFOneB().table(2, 3)
    assert repr(table) == "<1F1B: 2 stages, 3 microbatches, 5 ticks>"
    cells = re.findall("<td[^>]*>(.*?)</td>", html_of(table))
    first = cells[: 1 + table.num_ticks]
    assert first[0] == "stage 0"
    assert " ".join(first[1:]).split() == ["F0", "F1", "F2", "B0", "B1", "B2"]
    assert cells[1 + table.num_ticks] == "stage 1"
    split = ZeroBubble().table(2, 4)
    assert " W3" in html_of(split) or ">W3" in html_of(split)
    chunks = Interleaved(chunks=2).table(2, 4)
    assert "2 chunks" in repr(chunks)
    assert "F3.1" in html_of(chunks)


def test_trainer_repr_compiles_nothing(tmp_path: Any) -> None:
    trainer = Trainer(
        lambda rngs: nnx.Linear(64, 64, rngs=rngs),
        optax.adam(0.1),
        lambda model, batch: (model(batch) ** 2).mean(),
        strategy=FSDP(),
        checkpoint=Checkpoint(tmp_path / "<run>", every=5),
        loggers=(),
    )
    with jax.transfer_guard("disallow"), jax.no_tracing():
        before, html = repr(trainer), html_of(trainer)
    assert (
        before == "Trainer(FSDP(), model Linear, 4,160 parameters, mesh fsdp=8, step -)"
    )
    assert "&lt;run&gt;&#x27;, every 5 steps" in html
    trainer.fit([np.ones((8, 64), np.float32)] * 2, 2)
    assert repr(trainer).endswith("mesh fsdp=8, step 2)")
    sizes = trainer.describe()
    shown = re.search(">per device</td><td[^>]*>(.*?)</td>", html_of(trainer))
    assert shown
    assert f"per device: {shown[1]}" == sizes.summary().splitlines()[0]
