"""Machines die, and the run goes on from copies in the memory of the others.

Each process has a directory of its own, so it counts as a machine of its own.
"""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes.running import Ended, launch

pytestmark = pytest.mark.faults

STEPS, KILL = 14, 11


class Machines:
    """Runs of the worker on machines that share only a directory of checkpoints."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: dict[str, Any] = {}

    def run(self, fault: dict[str, Any] | None = None, **options: Any) -> Ended:
        where = {key: options.pop(key, x) for key, x in DEFAULTS.items()}
        out = self.root / "out.json"
        settings = {"model": "wide", "steps": STEPS, "num_rows": 12, "out": str(out)}
        settings |= {"checkpoint": self.checkpoint, "fault": fault or {}} | options
        ended = launch(settings, **where)
        if out.exists():
            self.found = json.loads(out.read_text())["fsdp"]
            out.unlink()
        return ended

    @property
    def checkpoint(self) -> dict[str, Any]:
        return {
            "directory": str(self.root / "run"),
            "every": 100,
            "memory_every": 2,
            "memory_directory": f"{self.root}/memory/$NNX_PARALLEL_PROCESS_ID",
        }

    def lose(self, machine: int) -> None:
        shutil.rmtree(self.root / "memory" / str(machine))


DEFAULTS: dict[str, Any] = {"processes": 3, "options": ()}
KILLED = {"kind": "kill", "process": 1, "step": KILL}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An undisturbed run without copies."""
    machines = Machines(tmp_path_factory.mktemp("whole"))
    assert machines.run(checkpoint=None).code == 0
    return machines.found


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path)


def test_run_goes_on_without_memory_of_a_machine(
    machines: Machines, whole: dict[str, Any]
) -> None:
    ended = machines.run(KILLED)
    assert ended.code == 128 + signal.SIGKILL, ended.text
    assert "with second copies on a neighbour, 3 machines" in ended.text
    machines.lose(1)
    ended = machines.run({"kind": "in_read", "process": 2, "call": 1})
    assert ended.code == 128 + signal.SIGKILL, ended.text  # killed while it reads
    ended = machines.run()
    assert ended.code == 0, ended.text
    assert f"Resumed from step {KILL - 1} in memory; " in ended.text
    assert machines.found["digest"] == whole["digest"]
    assert not [*(machines.root / "memory").rglob("*.*")]


def test_machines_lost_one_after_the_other_lose_no_steps(
    machines: Machines, whole: dict[str, Any]
) -> None:
    assert machines.run(KILLED).code == 128 + signal.SIGKILL
    machines.lose(1)
    # The next copy would be made after step 12, but this start makes one at once.
    ended = machines.run(KILLED | {"process": 2})
    assert f"Resumed from step {KILL - 1} in memory; " in ended.text
    assert ended.code == 128 + signal.SIGKILL, ended.text
    machines.lose(2)
    ended = machines.run()
    assert ended.code == 0, ended.text
    assert f"Resumed from step {KILL - 1} in memory; " in ended.text
    assert machines.found["digest"] == whole["digest"]


def test_loss_of_process_that_answers_is_reported(
    machines: Machines,
) -> None:
    assert machines.run(KILLED).code == 128 + signal.SIGKILL
    machines.lose(1)  # so process 1 asks process 0 for the list of parts
    ended = machines.run({"kind": "in_answer", "process": 0, "call": 1})
    assert ended.code == 128 + signal.SIGKILL, ended.text
    assert "Process 0 is lost: its connection closed" in ended.text
    assert "ProcessError" not in ended.text


def test_run_without_two_neighbours_begins_from_storage(
    machines: Machines, whole: dict[str, Any]
) -> None:
    assert machines.run(KILLED).code == 128 + signal.SIGKILL
    machines.lose(1)
    machines.lose(2)
    ended = machines.run()
    assert ended.code == 0, ended.text
    assert "The copy of step 10 in memory is not used: " in ended.text
    assert "Nothing is saved on storage, so the run begins afresh." in ended.text
    assert machines.found["digest"] == whole["digest"]


def test_death_in_a_copy_leaves_the_copy_before_it(
    machines: Machines, whole: dict[str, Any]
) -> None:
    # A process publishes two files for each copy: its own, and one of its neighbour.
    fault = {"kind": "in_copy", "process": 0, "call": 7}
    ended = machines.run(fault, options=("--max-restarts", "1"))
    assert ended.code == 0, ended.text
    assert "Resumed from step 6 in memory; " in ended.text
    assert machines.found["digest"] == whole["digest"]


def test_other_number_of_machines_reads_the_copies(
    machines: Machines, whole: dict[str, Any]
) -> None:
    assert machines.run(KILLED).code == 128 + signal.SIGKILL
    machines.lose(2)
    ended = machines.run(KILLED | {"step": KILL + 2}, processes=2)
    assert ended.code == 128 + signal.SIGKILL
    assert f"Resumed from step {KILL - 1} in memory; " in ended.text
    ended = machines.run(processes=3)
    assert ended.code == 0, ended.text
    assert f"Resumed from step {KILL + 1} in memory; " in ended.text
    last = whole["losses"][KILL + 1 :]
    np.testing.assert_allclose(machines.found["losses"], last, rtol=1e-5)
