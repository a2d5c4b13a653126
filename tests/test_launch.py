"""The launcher: signals, orphaned child processes, devices."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nnx_parallel.cli.launch import (
    Failure,
    Job,
    cause_of,
    groups_to_start,
    is_stuck,
    launch,
)
from nnx_parallel.distributed import PREEMPTED
from nnx_parallel.distributed.causes import (
    CAUSE,
    Cause,
    exit_code_of,
    note_cause,
    note_step,
    read_cause,
)
from nnx_parallel.errors import DeviceMemoryError, MeshShapeError, NonFiniteLossError
from tests.processes.running import ENVIRONMENT
from tests.waiting import wait_until

LEAVING = """
import subprocess, sys
child = subprocess.Popen(
    ["sleep", "300"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
)
print("left", child.pid, flush=True)
sys.exit(3)
"""
WAITING = """
import os, time, nnx_parallel
nnx_parallel.initialize()
print("waits", os.getpid(), flush=True)
time.sleep(300)
"""
DEVICES = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"


# If the tests run under nohup, they ignore SIGHUP, and child processes would inherit
# that.
HEEDING = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def start(code: str, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(code)
    launch = ["-m", "nnx_parallel", "launch", *options, str(script)]
    command = [sys.executable, "-c", HEEDING, sys.executable, *launch]
    return subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lives(pid: int) -> bool:
    """True if a process exists and is not a zombie."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    return wait_until(lambda: not lives(pid), seconds=30)


def number(process: subprocess.Popen[str], word: str) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(rf"{word} (\d+)", line):
            return int(found.group(1))
    raise AssertionError(f"{word} was not printed")


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.mark.faults
def test_children_of_ended_process_are_killed(tmp_path: Path) -> None:
    with start(LEAVING, tmp_path, "--processes", "1") as process:
        child = number(process, "left")
        assert process.wait(timeout=60) == 3
    assert ends(child)


@pytest.mark.faults
def test_hangup_is_forwarded_to_processes(tmp_path: Path) -> None:
    with start(WAITING, tmp_path, "--processes", "1") as process:
        worker = number(process, "waits")
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert ends(worker)


@pytest.mark.faults
def test_processes_end_after_launcher_is_killed(tmp_path: Path) -> None:
    with start(WAITING, tmp_path, "--processes", "1") as process:
        worker = number(process, "waits")
        process.kill()
    assert ends(worker)


def test_spare_is_used_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{DEVICES}; 1 / ('3' not in os.environ['CUDA_VISIBLE_DEVICES'])")
    job = Job(
        command=(str(script),),
        num_processes=2,
        devices_per_process=2,
        max_restarts=1,
        spares=1,
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7,8,9")
    assert launch(job) == 0
    out, errors = capfd.readouterr()
    assert sorted(out.splitlines()[-2:]) == ["[0] sees 6,7", "[1] sees 8,9"]
    text = "Starting all processes again, with devices of group 2 (1 restarts left)."
    assert f"[launch] {text}" in errors.splitlines()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6")
    with pytest.raises(
        MeshShapeError, match=r"2 processes and 1 spares of 2 .* need 6"
    ):
        launch(job)


def test_processes_share_visible_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(DEVICES)
    job = Job(command=(str(script),), num_processes=2, devices_per_process=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")
    assert launch(job) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[0] sees 2,3",
        "[1] sees 6,7",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6")
    message = (
        "CUDA_VISIBLE_DEVICES=2,3,6 names 3 devices, but 2 processes of 2 devices "
        "need 4. Launch fewer processes, or make more devices visible."
    )
    with pytest.raises(MeshShapeError, match=re.escape(message)):
        launch(job)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3,6"


FAILING = """
import os, sys
import numpy as np
import optax
from flax import nnx
from nnx_parallel import Checkpoint, Trainer
from nnx_parallel.errors import NonFiniteLossError

kind, run = sys.argv[1:]

def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()

def data():
    step = 0
    while True:
        step += 1
        x = np.ones((8, 4), np.float32)
        if step == 3 and kind == "data":
            raise RuntimeError("no more disk")
        if step == 3 and kind == "once" and os.environ["NNX_PARALLEL_RESTART"] == "0":
            raise RuntimeError("only once")
        yield {"x": x * (np.nan if step == 3 and kind == "nan" else 1)}

if kind == "import":
    import missing_module
model = lambda rngs: nnx.Linear(4, 1, rngs=rngs)
trainer = Trainer(model, optax.sgd(0.1), loss, checkpoint=Checkpoint(run, every=1))
if kind == "caught":
    nan = {"x": np.full((8, 4), np.nan, np.float32)}
    try:
        Trainer(model, optax.sgd(0.1), loss).fit([nan], num_steps=1)
    except NonFiniteLossError:
        pass
trainer.fit(data(), num_steps=4)
if kind == "caught":
    open("missing")
"""


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "code", "starts", "place", "reason"),
    [
        ("nan", 78, 2, "at step 3", "NonFiniteLossError"),
        ("data", 1, 3, "at step 2", "RuntimeError"),
        ("import", 1, 3, "soon after the start", "exit code 1"),
        # The caught error is not the cause of the later one.
        ("caught", 1, 3, "at step 4", "FileNotFoundError"),
        ("once", 0, 2, "", ""),
    ],
)
def test_repeated_failure_ends_restarts(
    tmp_path: Path, kind: str, code: int, starts: int, place: str, reason: str
) -> None:
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(FAILING)
    options = ["--processes", "1", "--cpu", "--max-restarts", "9"]
    command = ["-m", "nnx_parallel", "launch", *options, str(script), kind, str(run)]
    done = subprocess.run(
        [sys.executable, *command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("Starting all processes again") == starts - 1
    if code:
        text = (
            f"[launch] The run has failed {starts} times {place} for the same reason: "
            f"{reason}. It is not started again."
        )
        assert done.stderr.splitlines()[-1] == text


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], [0, 1, 2, 3]),
        ([(1000, 1)], [0, 1, 2, 3]),  # all processes try again
        ([(1000, 1), (5, 1)], [0, 2, 3]),  # its devices are missing
        ([(1000, 1), (5, 0), (5, 3)], [1, 2]),
        ([(1000, 1), (5, 0), (5, 3), (5, 2)], [1, 2]),
        ([(1000, 1), (5, 1), (1000, 2)], [0, 1, 2, 3]),  # perhaps they are back
        ([(5, 1)], [0, 1, 2, 3]),  # perhaps a mistake in the script
        ([(5, 1), (5, 1)], [0, 2, 3]),
    ],
)
def test_restart_leaves_out_devices_that_fail_soon(
    ends: list[tuple[float, int]], expected: list[int]
) -> None:
    failures = failures_of(ends)
    job = Job(command=("train.py",), num_processes=4, min_processes=2)
    assert groups_to_start(job, failures) == expected
    whole = replace(job, min_processes=None)
    assert groups_to_start(whole, failures) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], [0, 1, 2]),
        ([(1000, 1)], [0, 2, 3]),  # group 3 is the first spare
        ([(1000, 1), (1000, 3)], [0, 2, 4]),
        ([(1000, 1), (1000, 3), (1000, 0)], [1, 2, 4]),  # 1 failed first
        ([(1000, 1), (5, 3), (5, 4)], [0, 1, 2]),
        ([(1000, 1), (5, 3), (5, 4), (5, 1)], [0, 1, 2]),  # 3 and 4 are left out
        ([(5, 1)], [0, 2, 3]),
    ],
)
def test_spare_replaces_group_that_failed(
    ends: list[tuple[float, int]], expected: list[int]
) -> None:
    failures = failures_of(ends)
    job = Job(command=("train.py",), num_processes=3, spares=2)
    assert groups_to_start(job, failures) == expected
    preempted = failed(f"exit code {PREEMPTED}", None, PREEMPTED, 5)
    assert groups_to_start(job, [*failures, preempted]) == expected


def failures_of(ends: list[tuple[float, int]]) -> list[Failure]:
    """Failures of groups of devices, after some seconds."""
    return [
        failed("exit code 1", None, 1, seconds)._replace(group=group)
        for seconds, group in ends
    ]


def failed(kind: str, step: int | None, code: int, seconds: float = 1e3) -> Failure:
    pid = 1 if kind.endswith("Error") else 0
    return Failure(Cause(kind=kind, step=step, code=code, pid=pid), seconds)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        # A machine may be taken away often, and a custom loop has no known step.
        ([failed("exit code 137", None, 137, 5)] * 5, False),
        ([failed("exit code 1", None, 1)] * 5, False),
        ([failed("exit code 1", None, 1, 5)] * 3, True),
        ([failed("exit code 137", 7, 137)] * 3, True),
        ([failed("exit code 137", step, 137) for step in (8, 7, 8)], False),
        ([failed("NonFiniteLossError", 3, 78)] * 2, True),
        ([failed("exit code 78", 3, 78)] * 2, False),  # the script chose this code
        ([failed("KeyError", 3, 1), failed("ValueError", 3, 1)] * 2, False),
    ],
)
def test_only_equal_failures_end_restarts(
    failures: list[Failure], expected: bool
) -> None:
    assert is_stuck(failures) == expected


def test_launcher_reads_causes_of_its_processes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, own = [tmp_path / f"{i}.json" for i in range(3)], os.getpid()
    monkeypatch.setenv(CAUSE, str(files[1]))
    note_step(5)
    note_cause("lost process", "process 0 is lost\nmore", 75)
    found = read_cause(files[1], own)
    assert found == Cause(
        kind="lost process", text="process 0 is lost", step=5, code=75, pid=own
    )
    assert read_cause(files[1], own + 1) is None  # a child has the same variable
    files[2].write_text("{")
    pids = [own] * 3
    expected = Cause(kind="exit code 137", step=5, code=137)
    assert cause_of(files, pids, 0, 137) == expected
    assert cause_of(files, pids, 1, 75) == found
    # The process was killed after it had noted another error.
    assert cause_of(files, pids, 1, 137) == expected


def test_foreign_errors_have_exit_code_1() -> None:
    class ExitError(RuntimeError):
        exit_code = 0

    assert exit_code_of(ExitError()) == 1
    assert exit_code_of(NonFiniteLossError("")) == 78
    assert exit_code_of(DeviceMemoryError("")) == 77
