"""A fault ends every process within seconds, with a code and a line that says why.

Each fault is real: the tests start processes and send signals.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nnx_parallel.distributed import HUNG, PEER_LOST, PREEMPTED
from tests.processes.running import ENVIRONMENT, WORKER, arguments, launch
from tests.waiting import wait_until

pytestmark = pytest.mark.faults


@pytest.fixture(autouse=True)
def _hears_interrupts() -> Iterator[None]:
    """Restores SIGINT, which background processes of a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


LOST = "Process 1 is lost: "
SAME_CALLS = "All processes must make the same calls, in the same order: "
IN_TWO_CALLS = [
    "process 0 is in Trainer.save, at worker.py:",
    ", process 1 is in Trainer.evaluate, at worker.py:",
    SAME_CALLS,
]
SAME_SCRIPT = "All processes of a run must run the same script"


def break_process(kind: str, steps: int = 40, process: int = 1, **more: Any) -> dict:
    """Settings of a run in which one process breaks at step 2."""
    fault = {"kind": kind, "process": process, "step": 2}
    return {"model": "linear", "steps": steps, "fault": fault, **more}


@pytest.mark.parametrize(
    ("settings", "code", "lines"),
    [
        (
            break_process("raise"),
            1,
            [
                "[1] ValueError: this process has had enough",
                "[0] " + LOST + "ValueError: this process has had enough.",
                "Its output says more. All processes end. Start the same command",
                "[launch] Process 1 failed first, with code 1.",
            ],
        ),
        (
            break_process("raise", process=0),
            1,
            ["[1] Process 0 is lost: ValueError: this process has had enough."],
        ),
        (
            break_process("data"),
            1,
            ["[1] OSError: the disk with the data is gone", "[0] " + LOST + "OSError"],
        ),
        (
            break_process("kill"),
            128 + signal.SIGKILL,
            [
                "[0] " + LOST + "its connection closed without an exit message "
                "(killed, or out of memory). All processes end. Start the same command",
                "[launch] Process 1 failed first, by signal SIGKILL.",
            ],
        ),
        (
            break_process("kill", process=0),
            128 + signal.SIGKILL,
            ["[1] Process 0 is lost: its connection closed without an exit message"],
        ),
        (
            break_process("exit"),
            PEER_LOST,
            ["[0] " + LOST + "it ended too early: process 0 waits for it in"],
        ),
        (
            break_process("save_after", steps=2, process=0, evaluates=True),
            1,
            ["DisagreementError: The processes wait for each other: ", *IN_TWO_CALLS],
        ),
        (
            break_process("save_after", steps=2, process=0),
            1,
            [
                "process 0 is in Trainer.save, at worker.py:",
                "process 1 is in gather, at",
            ],
        ),
        (
            break_process("save", process=0, notice_seconds=2),
            1,
            [
                "[1] DisagreementError: Process 0 waits in Trainer.save, at worker.py:",
                "for this process, which is in Trainer.fit, at worker.py:",
                SAME_CALLS,
            ],
        ),
        (
            break_process("dry"),
            1,
            ["Data of processes [1] ended after 2 batches; others have more."],
        ),
        (
            break_process("hang", faults={"step_timeout": 2}),
            HUNG,
            [
                "No step has ended for 2 s (step_timeout) after step",
                'worker.py", line',  # the stack shows the line
            ],
        ),
        (
            break_process("seed"),
            1,
            ["  seed: process 0 has 0, process 1 has 1", SAME_SCRIPT],
        ),
        (
            break_process("optimizer"),
            1,
            ["disagree about the compiled step", "program: process 0 has", SAME_SCRIPT],
        ),
        (
            break_process("shape"),
            1,
            [
                "Processes 0 and 1 have batches 0 of different shapes:",
                "batch['tokens']: process 0 has int32[4, 9], process 1 has int32[4, 7]",
            ],
        ),
        (
            break_process("global", trainer={"global_batch_size": 8}),
            1,
            [
                "batch['tokens']: process 0 has int32[4, 9], process 1 has int32[8, 9]",
                "gives an equal share of the rows of each batch, never the global",
            ],
        ),
        (
            break_process("uneven", steps=2, evaluates=True),
            1,
            [
                "] nnx_parallel.errors.BatchShapeError: Processes 0 and 1 have",
                "batches 1 of different shapes:",
                "batch['tokens']: process 0 has int32[4, 9], process 1 has int32[3, 9]",
            ],
        ),
        (
            break_process("unusable", steps=2, evaluates=True),
            1,
            ["batch['tokens'] of batch 1 has no rows."],
        ),
        (
            {"model": "linear", "fault": {"kind": "alike", "process": 1}},
            0,
            ["Processes 0 and 1 gave the same rows as different parts of the first"],
        ),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else value["fault"]["kind"],
)
def test_fault_ends_all_processes(settings: dict, code: int, lines: list[str]) -> None:
    ended = launch(settings)
    assert ended.code == code, ended.text
    for line in lines:
        assert line in ended.text, ended.text
    kind = settings["fault"]["kind"]
    symmetric = kind in (
        "seed",
        "optimizer",
        "dry",
        "shape",
        "global",
        "uneven",
        "unusable",
        "save_after",
    )
    if symmetric:  # each raises the error, or first learns that the other raised it
        for process in (0, 1):
            pattern = rf"^\[{process}\] .*Error: "
            assert re.search(pattern, ended.text, re.MULTILINE), ended.text
    # Another thread reports the error.
    if code == 1 and not symmetric and kind != "save":
        assert ended.text.count("Traceback (most recent call last)") == 1
    # Start-up is included. Without this library, jax waits 98 to 301 s.
    assert ended.seconds < 30


def test_stuck_device_ends_all_by_default() -> None:
    """The run continues after step 8, where data and hooks are slow."""
    fault = {"kind": "stuck", "process": 0, "step": 12, "slow_step": 8}
    ended = launch({"model": "linear", "steps": 40, "step_seconds": 3, "fault": fault})
    assert ended.code in (HUNG, PEER_LOST), ended.text
    found = re.search(
        r"No step has ended for 3 s \(step_timeout='auto'\) after step (\d+) was ",
        ended.text,
    )
    assert found is not None, ended.text
    assert int(found[1]) >= 12, ended.text
    assert ended.seconds < 30


def test_failed_save_on_one_process_ends_all(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run"), "every": 20}
    ended = launch(break_process("disk", checkpoint=saved))
    assert ended.code == 1, ended.text
    failure = f"CheckpointSaveError: Saving step 20 in '{tmp_path}/run' failed: "
    assert f"[1] nnx_parallel.errors.{failure}" in ended.text
    assert f"[0] {LOST}{failure}" in ended.text
    # The output has the error and its cause, but no log or stack of Orbax's threads.
    assert ended.text.count("Traceback (most recent call last)") == 1, ended.text
    assert "/orbax/" not in ended.text
    assert ended.seconds < 30


def test_kill_during_save_ends_all_processes(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run"), "every": 4}
    settings = break_process("kill", checkpoint=saved)
    fault = {"step": None, "in_save": str(tmp_path / "run/8.orbax-checkpoint-tmp")}
    settings |= {"model": "wide", "fault": settings["fault"] | fault}
    ended = launch(settings)
    assert ended.code == 128 + signal.SIGKILL, ended.text
    assert "[0] " + LOST + "its connection closed without an exit message" in ended.text
    left = sorted(path.name for path in (tmp_path / "run").glob("[0-9]*"))
    # Process 0 may be saving too; its save then fails, and it deletes the files.
    assert left in (["4"], ["4", "8.orbax-checkpoint-tmp"])
    assert ended.seconds < 30


def test_process_without_checkpoint_raises(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run")}
    ended = launch(break_process("unsaved", checkpoint=saved))
    assert ended.code == 1, ended.text
    message = "The processes disagree about the checkpoints:"
    assert message in ended.text
    options = f"Checkpoint(directory='{tmp_path}/run'"
    assert f'checkpoint: process 0 has "{options}' in ended.text
    assert 'process 1 has "None"' in ended.text
    assert not (tmp_path / "run").exists()
    assert ended.seconds < 30


def test_run_does_not_wait_for_failed_save(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run"), "every": 5, "on_save_error": "warn"}
    fault = {"kind": "disk", "process": 1, "raise_at": 17}
    settings = {"model": "linear", "steps": 100, "checkpoint": saved, "fault": fault}
    ended = launch(settings)
    told = rf"^\[(\d)\] .*Saving step 5 in '{tmp_path}/run' failed: "
    assert re.findall(told, ended.text, re.M) == ["1"], ended.text
    for step in (10, 15):
        lines = re.findall(rf"^\[(\d)\] .*Step {step} is not saved: ", ended.text, re.M)
        assert sorted(lines) == ["0", "1"], ended.text
    assert "this process has had enough" in ended.text
    assert ended.seconds < 30


def test_temporarily_full_disk_only_warns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved = {"directory": str(run), "every": 5, "on_save_error": "warn"}
    fault = {"kind": "disk", "process": 0, "heal_at": 17}
    settings = {"model": "wide", "steps": 20, "checkpoint": saved, "fault": fault}
    ended = launch(settings, processes=1)
    assert ended.code == 0, ended.text
    for step in (5, 10, 15):
        assert f"Saving step {step} in '{run}' failed: " in ended.text
    assert ended.text.count("JSONLinesLogger failed: ") == 1
    assert len(ended.text.splitlines()) < 60, ended.text  # Orbax would print 4,100
    assert sorted(path.name for path in run.iterdir()) == ["20", "metrics.jsonl"]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == 20
    assert launch(settings | {"fault": {}, "steps": 21}, processes=1).code == 0


def test_permanently_full_disk_only_warns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved = {"directory": str(run), "every": 5, "on_save_error": "warn"}
    fault = {"kind": "disk", "process": 0}
    settings = {"model": "wide", "steps": 7, "checkpoint": saved, "fault": fault}
    ended = launch(settings, processes=1)
    assert ended.code == 0, ended.text
    for step in (5, 7):
        assert f"Saving step {step} in '{run}' failed: " in ended.text
    assert ended.text.count("JSONLinesLogger failed: ") == 1
    assert "Traceback" not in ended.text
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]


def test_differing_copies_on_processes_are_not_saved(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run"), "every": 1}
    settings = break_process("flip", steps=20, checkpoint=saved, strategies=["data"])
    ended = launch(settings)
    assert ended.code == 1, ended.text
    differs = r"`model: kernel`\[.*\]: .*\(process 0\), .*\(process 1\) do not agree"
    assert re.search(differs, ended.text), ended.text
    steps = [name for name in os.listdir(tmp_path / "run") if name.isdigit()]
    assert steps == ["1"]
    assert ended.seconds < 30


def test_end_of_fit_is_saved_after_failed_save(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run"), "every": 5, "on_save_error": "warn"}
    fault = {"kind": "disk", "process": 1, "heal_at": 7}
    settings = {"model": "linear", "steps": 8, "checkpoint": saved, "fault": fault}
    ended = launch(settings | {"give_up_seconds": 3})
    assert ended.code == 0, ended.text
    told = re.findall(r"^\[(\d)\] .*Saving step 5 in ", ended.text, re.M)
    assert sorted(told) == ["0", "1"], ended.text
    steps = [name for name in os.listdir(tmp_path / "run") if name.isdigit()]
    assert steps == ["8"]
    assert ended.seconds < 30


def test_sigterm_to_one_process_saves_and_ends_all(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run")}
    settings = break_process("term", steps=60, checkpoint=saved)
    ended = launch(settings)
    assert ended.code == PREEMPTED == 143, ended.text
    assert "failed first" not in ended.text
    found = re.search(
        r"Saved step (\d+) in '.*': resume with the same command\.", ended.text
    )
    assert found is not None, ended.text
    step = int(found.group(1))
    assert 2 <= step <= 8
    assert (tmp_path / "run" / str(step)).is_dir()
    again = launch(settings | {"fault": {}, "steps": step + 1})
    assert again.code == 0
    assert f"Resumed from step {step}" in again.text


def test_preempted_run_restarts_to_identical_parameters(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    whole = {"model": "linear", "steps": 12, "out": str(out)}
    assert launch(whole).code == 0
    expected = json.loads(out.read_text())["fsdp"]["digest"]
    out.unlink()
    saved = {"directory": str(tmp_path / "run"), "every": 100}
    fault = {"kind": "term", "process": 1, "step": 5}
    ended = launch(
        whole | {"checkpoint": saved, "fault": fault}, options=["--max-restarts", "1"]
    )
    assert ended.code == 0, ended.text
    assert "Starting all processes again (1 restarts left)." in ended.text
    assert "Resumed from step" in ended.text
    assert json.loads(out.read_text())["fsdp"]["digest"] == expected


def test_sigterm_in_last_step_is_handled(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run")}
    ended = launch(break_process("term", steps=2, checkpoint=saved))
    assert ended.code == PREEMPTED, ended.text
    assert "Saved step 2 in" in ended.text
    assert "resume with the same command" in ended.text


def test_damage_seen_by_one_process_stops_all(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run"), "on_damage": "previous"}
    settings = {"model": "wide", "steps": 2, "checkpoint": saved | {"every": 1}}
    assert launch(settings).code == 0
    files = [p for p in tmp_path.glob("run/2/*/ocdbt.process_1/d/*") if p.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    strict = saved | {"every": 1, "on_damage": "error"}
    refused = launch(settings | {"checkpoint": strict})
    assert refused.code == 1, refused.text
    assert "On process 1: Cannot read checkpoint 2 in" in refused.text
    assert refused.seconds < 60
    assert sorted(p.name for p in tmp_path.glob("run/[0-9d]*")) == ["1", "2"]

    ended = launch(settings)
    assert ended.code == 0, ended.text
    assert "On process 1: Cannot read checkpoint 2 in" in ended.text
    assert "On process 0" not in ended.text
    assert "Resumed from step 1" in ended.text
    assert ended.seconds < 60


def test_stop_on_one_process_stops_all(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    ended = launch(break_process("stop", out=str(out)))
    assert ended.code == 0, ended.text
    assert 2 <= json.loads(out.read_text())["fsdp"]["step"] <= 8


def test_restarts_give_identical_parameters(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    whole = {"model": "linear", "steps": 12, "out": str(out)}
    assert launch(whole).code == 0
    expected = json.loads(out.read_text())["fsdp"]["digest"]
    saved = {"directory": str(tmp_path / "run"), "every": 4}
    fault = {"kind": "kill", "process": 1, "step": 10}
    ended = launch(
        whole | {"checkpoint": saved, "fault": fault}, options=["--max-restarts", "2"]
    )
    assert ended.code == 0, ended.text
    assert "Starting all processes again (2 restarts left)." in ended.text
    assert "Resumed from step" in ended.text
    assert json.loads(out.read_text())["fsdp"]["digest"] == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_process(number: int, tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run")}
    settings = {"model": "linear", "steps": 100_000, "checkpoint": saved}
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "nnx_parallel"),
            *arguments(settings, options=["--max-restarts", "3"]),
        ],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step" in line and "loss" in line:
                break
        process.send_signal(number)
        rest = process.stdout.read()
        code = process.wait(timeout=60)
    assert code == 128 + number, rest
    assert "resume with the same command" in rest
    assert "is lost" not in rest
    assert "Starting all processes again" not in rest


def test_printing_processes_save_after_launcher_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = break_process("talk", checkpoint={"directory": str(run)}, steps=100_000)
    with subprocess.Popen(
        [sys.executable, "-m", "nnx_parallel", *arguments(settings)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "says" in line:
                break
        process.kill()
    assert wait_until(lambda: not (run / "lock.json").exists(), seconds=30)
    assert [name for name in os.listdir(run) if name.isdigit()]


def test_sigterm_to_single_process_saves(tmp_path: Path) -> None:
    saved = {"directory": str(tmp_path / "run")}
    settings = break_process("term", process=0, checkpoint=saved)
    worker = [sys.executable, str(WORKER), json.dumps(settings)]
    done = subprocess.run(
        worker, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == PREEMPTED, done.stderr
    assert "resume with the same command" in done.stdout


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("slow_reads", r"it reads a batch in 0\.\d+ s, the others"),
        ("slow_callback", r"it spends between two steps 0\.\d+ s, the others"),
        ("none", None),
    ],
)
def test_slow_process_is_named(tmp_path: Path, kind: str, text: str | None) -> None:
    fault = {"kind": kind, "process": 1, "seconds": 0.05, "step": 99}
    settings = break_process(kind, steps=66)
    saved = {"directory": str(tmp_path / "run"), "every": 1000}
    ended = launch(settings | {"fault": fault, "checkpoint": saved})
    assert ended.code == 0, ended.text
    found = [x for x in ended.text.splitlines() if "All processes wait for" in x]
    if text is None:
        assert found == []
    else:  # once, although the processes compare their times twice
        (line,) = found
        assert "process 1 (host " in line
        assert re.search(text, line)
