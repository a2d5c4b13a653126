"""Loggers: their files, their lines on a terminal, and both after a crash."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import pty
import re
import resource
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from nnx_parallel.errors import LogFileError
from nnx_parallel.loggers import (
    ConsoleLogger,
    JSONLinesLogger,
    LoggerGroup,
    TensorBoardLogger,
    WandbLogger,
)

ROOT = Path(__file__).parents[1]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read(path)]


def log_steps(path: Path, first_step: int, last_step: int) -> None:
    logger = JSONLinesLogger(path)
    logger.start(first_step=first_step, num_steps=10)
    for step in range(first_step + 1, last_step + 1):
        logger.log(step, {"loss": 1 / step})
    logger.finish()


def test_each_log_writes_json_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    logger = JSONLinesLogger(path)
    logger.start(first_step=0, num_steps=2)
    metrics: dict[str, Any] = {"loss": np.float32(0.5), "num_tokens": 7}
    logger.log(1, metrics)
    (line,) = read(path)
    assert line.pop("time") > 1.7e9
    assert line == {"step": 1, "loss": 0.5, "num_tokens": 7}
    logger.message("half way")
    assert read(path)[1]["message"] == "half way"
    logger.finish()
    logger.finish()


def test_nonfinite_values_become_json_strings(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JSONLinesLogger(path)
    logger.start(first_step=0, num_steps=1)
    values = {"a": float("nan"), "b": float("inf"), "c": -np.float32("inf")}
    logger.log(1, values)
    logger.finish()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert [line[name] for name in "abc"] == ["NaN", "Infinity", "-Infinity"]
    np.testing.assert_equal([float(line[name]) for name in "abc"], [*values.values()])


def test_resume_drops_lines_after_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 0, 7)
    path.chmod(0o640)
    log_steps(path, 4, 9)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert path.stat().st_mode & 0o777 == 0o640
    log_steps(path, 9, 10)
    assert steps(path)[-2:] == [9, 10]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_resume_drops_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 0, 3)
    with path.open("a") as file:
        file.write('{"step": 4, "time": 17')
    log_steps(path, 3, 5)
    assert steps(path) == [1, 2, 3, 4, 5]


def test_new_run_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for last_step in (3, 2, 1):
        log_steps(path, 0, last_step)
    assert steps(path) == [1]
    assert steps(tmp_path / "metrics.1.jsonl") == [1, 2, 3]
    assert steps(tmp_path / "metrics.2.jsonl") == [1, 2]


@pytest.mark.parametrize("line", ["loss,step\n", '{"loss": 1}\n', "[1]\n"])
def test_foreign_log_file_raises(tmp_path: Path, line: str) -> None:
    path = tmp_path / "results.csv"
    path.write_text(line)
    message = f"Line 1 of '{path}' is {line.encode()!r}. JSONLinesLogger appends only"
    with pytest.raises(LogFileError, match=re.escape(message)):
        log_steps(path, 2, 3)
    assert path.read_text() == line


def test_log_before_start_raises(tmp_path: Path) -> None:
    message = "The logger is not open. Call `start` before `log`."
    with pytest.raises(RuntimeError, match=re.escape(message)):
        JSONLinesLogger(tmp_path / "metrics.jsonl").log(1, {})


def test_killed_process_keeps_logged_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = f"""
import os, signal
from nnx_parallel.loggers import JSONLinesLogger
logger = JSONLinesLogger({str(path)!r})
logger.start(first_step=0, num_steps=100)
for step in range(1, 31):
    logger.log(step, {{"loss": 1.0}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert steps(path) == list(range(1, 31))


def test_group_warns_of_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    group = LoggerGroup([JSONLinesLogger(path)], warns=True)
    group.start(first_step=0, num_steps=9)
    group.log(1, {"loss": 1.0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        with pytest.warns(UserWarning, match=r"JSONLinesLogger failed: .* Training go"):
            group.log(2, {"loss": 1.0})
        group.log(3, {"loss": 1.0})  # the failure warns once
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    group.log(4, {"loss": 1.0})
    group.finish()
    assert steps(path) == [1, 4]


def test_group_finishes_all_loggers_after_failure(tmp_path: Path) -> None:
    class Fails(JSONLinesLogger):
        def finish(self) -> None:
            super().finish()
            if self.path.exists():
                raise OSError("disk full")

    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    group = LoggerGroup([Fails(first), JSONLinesLogger(second)])
    group.start(first_step=0, num_steps=1)
    group.log(1, {"loss": 1.0})
    group.message("done")
    with pytest.raises(OSError, match="disk full"):
        group.finish()
    assert steps(first) == steps(second) == [1, 1]
    with pytest.raises(RuntimeError, match="not open"):
        group.log(2, {})


def test_only_first_process_logs(tmp_path: Path) -> None:
    script = """
import sys
import jax
from nnx_parallel.loggers import JSONLinesLogger, LoggerGroup
index, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(f"localhost:{port}", 2, index)
group = LoggerGroup([JSONLinesLogger(f"{directory}/{index}.jsonl")])
group.start(first_step=0, num_steps=1)
group.log(1, {"loss": 1.0})
group.finish()
"""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(index), port, str(tmp_path)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors.decode()
    assert os.listdir(tmp_path) == ["0.jsonl"]


def plain_lines(every: int, logs: list[tuple[int, Mapping[str, float]]]) -> list[str]:
    file = io.StringIO()
    logger = ConsoleLogger(every=every, console=Console(file=file, width=40))
    logger.start(first_step=logs[0][0] - 1, num_steps=120)
    for step, metrics in logs:
        logger.log(step, metrics)
    logger.message("saved [bold]step[/bold] 7")
    logger.finish()
    return file.getvalue().splitlines()


def test_plain_lines_show_first_every_and_last_step() -> None:
    lines = plain_lines(50, [(step, {"loss": 1.0}) for step in range(1, 121)])
    assert [line.split("·")[0].strip() for line in lines] == [
        "step   1/120",
        "step  50/120",
        "step 100/120",
        "step 120/120",
        "saved [bold]step[/bold] 7",
    ]
    assert lines[3].endswith("0:00 left")


def test_plain_line_is_due_after_seconds() -> None:
    file = io.StringIO()
    logger = ConsoleLogger(every=50, seconds=0, console=Console(file=file, width=60))
    logger.start(first_step=0, num_steps=120)
    for step in range(1, 4):
        logger.log(step, {"loss": 1.0})
    assert len(file.getvalue().splitlines()) == 3


FULL = {
    "loss": 2.4131,
    "accuracy": 0.75,
    "z_loss": 0.0001,
    "grad_norm": 1.0,
    "learning_rate": 3e-4,
    "tokens_per_second": 48_213.0,
    "examples_per_second": 48.2,
    "step_seconds": 0.3104,
    "device_memory_bytes": 12.5 * 2**30,
    "device_memory_fraction": 0.312,
    "tflops_per_device": 12.0,
    "mfu": 0.412,
    "data_wait_seconds": 0.1,
    "compile_seconds": 9.0,
    "loss_scale": 1024.0,
    "skipped": 0.0,
    "lost_updates": 0.0,
}


def test_long_plain_line_is_not_wrapped() -> None:
    logs: list[Any] = [(7, FULL), (7, {"eval_loss": 12345.0, "eval_f1": 0.5})]
    lines = plain_lines(1, logs)
    assert lines[:2] == [
        "step   7/120 · loss  2.413 · accuracy 0.750 · z_loss 1.00e-04 · "
        "grad norm 1.000 · lr 3.00e-04 · 48.2k tok/s ·  310 ms/step · "
        "memory 12.5 GiB (31%) · 41% MFU",
        "step   7/120 · eval_loss 1.23e+04 · eval_f1 0.500",
    ]


LOSS, OWN, SPEED, TOOK = "loss  2.413", "accuracy 0.750", "48.2k tok/s", "took 0:00"


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (70, [LOSS, TOOK]),
        (90, [LOSS, OWN, SPEED, TOOK]),
        (120, [LOSS, OWN, "z_loss 1.00e-04", SPEED, TOOK]),
        (
            200,
            [
                *(
                    LOSS,
                    OWN,
                    "z_loss 1.00e-04",
                    "grad norm 1.000",
                    "lr 3.00e-04",
                    SPEED,
                ),
                *(" 310 ms/step", "memory 12.5 GiB (31%)", "41% MFU", TOOK),
            ],
        ),
    ],
)
def test_narrow_terminal_keeps_main_metrics(columns: int, shown: list[str]) -> None:
    file, options = io.StringIO(), {"force_terminal": True, "color_system": None}
    console = Console(file=file, width=columns, _environ={"TERM": "xterm"}, **options)
    logger = ConsoleLogger(console=console)
    logger.start(first_step=0, num_steps=120)
    logger.log(1, FULL)
    logger.finish()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    *_, last = filter(None, re.split(r"[\r\n]", text))
    assert last.strip().split("% ", 1)[1].split(" · ") == shown


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"loss": float("nan")}, "loss    nan"),
        ({"loss": 0.00012}, "loss 1.20e-04"),
        ({"loss": 0.0}, "loss  0.000"),
        ({"tokens_per_second": 1_254_000.0}, "1.25M tok/s"),
        ({"tokens_per_second": 999.0}, "  999 tok/s"),
        (
            {"tokens_per_second": 999.0, "tokens_per_second_per_device": 499.5},
            "  999 tok/s total ·   500 tok/s per device",
        ),
        ({"mfu": 0.412, "hfu": 0.55}, "41% MFU · 55% HFU"),
        ({"examples_per_second": 31.25}, " 31.2 rows/s"),
        ({"step_seconds": 12.34}, " 12.3 s/step"),
        ({"step_seconds": 0.0042}, "4.20 ms/step"),
    ],
)
def test_numbers_are_formatted(metrics: dict[str, float], text: str) -> None:
    assert plain_lines(1, [(7, metrics)])[0] == f"step   7/120 · {text}"


def test_nonpositive_every_raises() -> None:
    with pytest.raises(ValueError, match=re.escape("every=0. It must be 1 or more.")):
        ConsoleLogger(every=0)


LIVE_SCRIPT = """
import time
from nnx_parallel.loggers import ConsoleLogger
logger = ConsoleLogger()
logger.start(first_step=0, num_steps=20)
for step in range(1, 16):
    time.sleep(0.03)
    metrics = {"loss": 3 - step / 10, "tokens_per_second": 48e3, "step_seconds": 0.03}
    logger.log(step, metrics)
    if step == 10:
        logger.log(step, {"eval_loss": 2.5})
        print("from the user")
logger.message("the end")
logger.finish()
"""


def run_in_terminal(script: str, columns: int) -> str:
    """Returns everything that a script writes to a terminal of the given width."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns)}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
    ) as child:
        os.close(follower)
        output = b"".join(read_terminal(leader))
        assert child.wait(timeout=60) == 0, output.decode()
    os.close(leader)
    return output.decode()


def read_terminal(leader: int) -> Iterator[bytes]:
    while select.select([leader], [], [], 60)[0]:
        try:
            data = os.read(leader, 65536)
        except OSError:  # Linux raises this when the last writer has closed
            return
        if not data:
            return
        yield data


@pytest.mark.parametrize("columns", [120, 70, 30])
def test_terminal_redraws_one_line(columns: int) -> None:
    output = run_in_terminal(LIVE_SCRIPT, columns)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    rows = [row.split("\r")[-1] for row in text.replace("\r\n", "\n").split("\n")]
    *_, evaluation, user, message, last, rest = rows
    assert evaluation.startswith("step 10/20 · eval_loss 2.500")
    assert user == "from the user"
    assert message == "the end"
    assert last.startswith("step 15/20")
    assert re.search(r" 75% loss  1\.500", last)
    assert rest == ""
    assert all(len(frame) <= columns for frame in re.split(r"[\r\n]", text))
    assert len(rows) == 5, "a frame did not replace the one before it"
    assert (" · took 0:0" in last) == (columns > 30)
    assert "━" in output or columns == 30
    assert "\x1b[?25l" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), (
        "the cursor is still hidden"
    )


def tensorboard_scalars(directory: Path) -> list[tuple[str, int, float]]:
    """Reads the records of event files: length, checksum, event, checksum."""
    event_type = importlib.import_module("tensorboardX.proto.event_pb2").Event
    found = []
    for file in sorted(directory.iterdir()):
        data, offset = file.read_bytes(), 0
        while offset < len(data):
            (length,) = struct.unpack_from("<Q", data, offset)
            event = event_type.FromString(data[offset + 12 : offset + 12 + length])
            offset += length + 16
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return found


def test_tensorboard_logs_each_layer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    lines = JSONLinesLogger(tmp_path / "metrics.jsonl")
    group = LoggerGroup([TensorBoardLogger(tmp_path / "board"), lines])
    group.start(first_step=0, num_steps=1)
    group.log(1, {"expert_load": 2.0})
    group.log_layers(1, {"expert_loads/blocks.layer.mlp/0": 2.0})
    group.log_layers(1, {})
    group.finish()
    assert tensorboard_scalars(tmp_path / "board") == [
        ("expert_load", 1, 2.0),
        ("expert_loads/blocks.layer.mlp/0", 1, 2.0),
    ]
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line.keys() == {"step", "time", "expert_load"}


def test_tensorboard_files_hold_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    logger = TensorBoardLogger(tmp_path)
    logger.start(first_step=4, num_steps=10)
    logger.log(5, {"loss": 0.5, "mfu": 0.25})
    logger.log(6, {"loss": float("inf")})
    logger.message("hello")
    logger.finish()
    logger.finish()
    scalars = tensorboard_scalars(tmp_path)
    assert scalars[:3] == [
        ("loss", 5, 0.5),
        ("mfu", 5, 0.25),
        ("loss", 6, float("inf")),
    ]
    assert scalars[3][:2] == ("message/text_summary", 6)


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="has wandb")
def test_missing_extra_raises_import_error() -> None:
    message = (
        "WandbLogger needs wandb, which cannot be imported (No module named 'wandb'). "
        'Install it with `pip install "nnx-parallel[wandb]"`.'
    )
    with pytest.raises(ImportError, match=re.escape(message)):
        WandbLogger(project="test")


class Wandb:
    """The part of wandb that the logger calls; it keeps what it gets."""

    def __init__(self) -> None:
        self.config, self.rows, self.lines = self, [], []
        self.values: dict[str, Any] = {}

    def init(self, **options: Any) -> Wandb:
        self.values |= options.get("config", {})
        return self

    def update(self, values: Any, *, allow_val_change: bool) -> None:
        assert allow_val_change
        self.values |= values

    def define_metric(self, *args: Any, **options: Any) -> None:
        pass

    def log(self, row: Any) -> None:
        self.rows.append(row)

    def termlog(self, text: str) -> None:
        self.lines.append(text)

    def finish(self) -> None:
        pass


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    monkeypatch.setitem(sys.modules, "wandb", service := Wandb())
    return service


def test_wandb_gets_config_and_keeps_users_values(wandb: Wandb) -> None:
    logger = WandbLogger(project="test", config={"seed": "mine", "size": 3})
    logger.start(first_step=0, num_steps=2)
    logger.configure({"seed": 0, "mesh": {"fsdp": 8}})
    logger.configure({"batch": "{x: f32[8,4]}"})
    assert wandb.values == {
        "seed": "mine",
        "size": 3,
        "mesh": {"fsdp": 8},
        "batch": "{x: f32[8,4]}",
    }


def test_messages_are_printed_once(
    wandb: Wandb, capsys: pytest.CaptureFixture[str]
) -> None:
    LoggerGroup([WandbLogger(project="test"), ConsoleLogger()]).message("Saved.")
    assert (capsys.readouterr().out, wandb.lines) == ("Saved.\n", [])
    # Weights & Biases does not see a file.
    file = io.StringIO()
    console = ConsoleLogger(console=Console(file=file, width=80))
    LoggerGroup([WandbLogger(project="test"), console]).message("Saved.")
    assert (file.getvalue(), wandb.lines) == ("Saved.\n", ["Saved."])
    wandb.lines.clear()
    LoggerGroup([WandbLogger(project="test")]).message("Saved.")
    assert wandb.lines == ["Saved."]


def test_config_is_a_json_line(tmp_path: Path) -> None:
    group = LoggerGroup([JSONLinesLogger(tmp_path / "metrics.jsonl"), Plain()])
    group.start(first_step=3, num_steps=10)
    group.configure({"seed": 7, "mesh": {"data": 8}})
    group.finish()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line["step"] == 3
    assert line["config"] == {"seed": 7, "mesh": {"data": 8}}


class Plain:
    """A logger without `configure`."""

    def start(self, *, first_step: int, num_steps: int) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def finish(self) -> None:
        pass


def test_rates_of_parts_are_shown() -> None:
    rates = {"loss": 1.0, "learning_rate/muon": 0.02, "learning_rate/adam": 3e-4}
    line = plain_lines(1, [(7, rates)])[0]
    assert line == "step   7/120 · loss  1.000 · lr muon 0.020 · lr adam 3.00e-04"


class Handle:
    """A display of a notebook."""

    def __init__(self, text: str) -> None:
        self.texts = [text]

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.texts.append(data["text/plain"])


class Notebook:
    """The parts of IPython that a notebook's display needs."""

    def __init__(self, *, has_kernel: bool) -> None:
        self.handles: list[Handle] = []
        if has_kernel:
            self.kernel = self

    def get_ipython(self) -> Notebook:
        return self

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        self.handles.append(Handle(data["text/plain"]))
        return self.handles[-1]


def run_in_notebook(
    monkeypatch: pytest.MonkeyPatch, *, has_kernel: bool, steps: int = 120
) -> list[Handle]:
    notebook = Notebook(has_kernel=has_kernel)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    logger = ConsoleLogger()
    logger.start(first_step=0, num_steps=120)
    logger.message("model  GPT")
    for step in range(1, steps + 1):
        logger.log(step, {"loss": 1.0})
    if steps:
        logger.log(steps, {"eval_loss": 2.0})
    logger.message("Saved.")
    logger.finish()
    return notebook.handles


def test_notebook_redraws_one_display(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (display,) = run_in_notebook(monkeypatch, has_kernel=True)
    first, *_, last = (text.splitlines() for text in display.texts)
    assert first[0] == "model  GPT"
    assert first[1].startswith("step   0/120 ")
    assert "compiling 0:00" in first[1]
    message, evaluation, saved, line = last
    assert message == "model  GPT"
    assert evaluation == "step 120/120 · eval_loss 2.000"
    assert saved == "Saved."
    assert line.startswith("step 120/120 ━")
    assert line.endswith("100% loss  1.000 · took 0:00")
    assert len(display.texts) < 10  # not at each step
    assert capsys.readouterr().out == ""


def test_notebook_removes_line_of_fit_without_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (display,) = run_in_notebook(monkeypatch, has_kernel=True, steps=0)
    assert display.texts[-1] == "model  GPT\nSaved."


def test_ipython_in_terminal_is_not_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in_notebook(monkeypatch, has_kernel=False) == []
    assert "step  50/120" in capsys.readouterr().out
