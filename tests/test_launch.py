"""The launcher: signals, orphaned child processes, devices."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nnx_parallel.cli.launch import Job, launch
from nnx_parallel.errors import MeshShapeError
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
