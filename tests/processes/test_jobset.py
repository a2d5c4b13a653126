"""A JobSet on this machine: a small controller follows the rules of the manifest.

The controller reads the YAML that ``launch --print jobset`` writes, runs the pods as
processes, and decides from their exit codes by the policies of Job and JobSet:
https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy and
https://jobset.sigs.k8s.io/docs/concepts/failure_policy/
"""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from nnx_parallel.cli.launch import MANIFESTS, Job
from nnx_parallel.distributed import PREEMPTED
from tests.processes.running import ENVIRONMENT

pytestmark = pytest.mark.faults

Pods = list[subprocess.Popen[str]]

WORKER = """
import sys, time
from pathlib import Path
import numpy as np, optax
from flax import nnx
from nnx_parallel import FSDP, Callback, Checkpoint, Trainer
from nnx_parallel.distributed import initialize

initialize()
directory = Path(sys.argv[1])


class Waits(Callback):
    def on_step_end(self, trainer, step, metrics):
        # In the first start, the fit waits here until a signal has been sent.
        reached, sent = directory / "reached", directory / "sent"
        if step == 3 and not sent.exists():
            reached.touch()
            while not sent.exists():
                time.sleep(0.05)


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


trainer = Trainer(
    lambda rngs: nnx.Linear(8, 8, rngs=rngs), optax.sgd(0.1), loss,
    strategy=FSDP(min_size=0), callbacks=[Waits()], loggers=(),
    checkpoint=Checkpoint(directory / "run", every=1000),
)
history = trainer.fit([{"x": np.ones((4, 8), np.float32)}] * 12, 12)
print("trained", *history["step"], flush=True)
"""


@dataclass
class Controller:
    """Runs the pods of a manifest, and restarts them by its rules.

    Attributes:
        manifest: The JobSet.
        during: Function that gets the pods of each start, and whether it is the first.
        codes: The exit codes of the pods, for each start.
        counted: Number of restarts that count.
        ignored: Number of restarts that do not count.
    """

    manifest: dict[str, Any]
    during: Callable[[Pods, bool], None] = lambda pods, is_first: None
    codes: list[list[int]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    counted: int = 0
    ignored: int = 0

    def run(self) -> bool:
        """Returns True if the JobSet completes, and False if it fails."""
        policy = self.manifest["spec"]["failurePolicy"]
        while (reason := self._run_job()) is not None:
            action = "RestartJobSet"
            for rule in policy["rules"]:
                if reason in rule["onJobFailureReasons"]:
                    action = rule["action"]
                    break
            if action == "RestartJobSetAndIgnoreMaxRestarts":
                self.ignored += 1
            elif action == "FailJobSet" or self.counted == policy["maxRestarts"]:
                return False
            else:
                self.counted += 1
        return True

    @property
    def _job(self) -> dict[str, Any]:
        (jobs,) = self.manifest["spec"]["replicatedJobs"]
        return jobs["template"]["spec"]

    def _run_job(self) -> str | None:
        """Runs all pods to their end; returns the reason of the Job's failure."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pods = [self._start(i, port) for i in range(self._job["completions"])]
        try:
            self.during(pods, not self.codes)
            codes = self._wait(pods)
        finally:
            for pod in pods:
                pod.kill()
        self.outputs += [pod.communicate()[0] for pod in pods]
        self.codes.append(codes)
        failed = [code for code in codes if code]
        if not failed:
            return None
        # The Job has no other retries.
        assert self._job["backoffLimit"] == 0
        is_matched = any(self._action(code) == "FailJob" for code in failed)
        return "PodFailurePolicy" if is_matched else "BackoffLimitExceeded"

    def _start(self, index: int, port: int) -> subprocess.Popen[str]:
        (container,) = self._job["template"]["spec"]["containers"]
        variables = {}
        for variable in container["env"]:
            value = variable.get("value")
            if value is None:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                assert "job-completion-index" in path
                value = str(index)
            # The name of the first pod is known only in a cluster.
            elif value.endswith(":8476"):
                value = f"127.0.0.1:{port}"
            variables[variable["name"]] = value
        python, *words = container["command"]
        assert python == "python"
        return subprocess.Popen(
            [sys.executable, *words],
            env=ENVIRONMENT | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _wait(self, pods: Pods) -> list[int]:
        grace = self._job["template"]["spec"]["terminationGracePeriodSeconds"]
        deadline = time.monotonic() + grace
        while any(pod.poll() is None for pod in pods) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pod in pods:
            pod.kill()
        # Kubernetes reports signal n as code 128 + n.
        codes = [pod.wait() for pod in pods]
        return [128 - code if code < 0 else code for code in codes]

    def _action(self, code: int) -> str:
        """Returns the action of the first rule that matches an exit code."""
        (container,) = self._job["template"]["spec"]["containers"]
        for rule in self._job["podFailurePolicy"]["rules"]:
            wanted = rule.get("onExitCodes")
            if wanted is None:  # conditions of pods that the cluster deletes
                continue
            assert wanted["containerName"] == container["name"]
            if (code in wanted["values"]) == (wanted["operator"] == "In"):
                return rule["action"]
        return "Count"


def manifest_of(command: Sequence[str], num_processes: int, restarts: int) -> Any:
    job = Job(
        command=tuple(command),
        num_processes=num_processes,
        devices_per_process=1,
        max_restarts=restarts,
        cpu=True,
    )
    return yaml.safe_load(MANIFESTS["jobset"](job))


def test_preempted_jobset_ends_complete(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)

    def preempt(pods: Pods, is_first: bool) -> None:
        if not is_first:
            return
        end = time.monotonic() + 100
        while not (tmp_path / "reached").exists():
            assert time.monotonic() < end, [pod.poll() for pod in pods]
            time.sleep(0.05)
        pods[1].send_signal(signal.SIGTERM)  # only this node is taken away
        (tmp_path / "sent").touch()

    # No restart is allowed, so only the rule for preemption can start the pods again.
    manifest = manifest_of([str(worker), str(tmp_path)], 2, restarts=0)
    controller = Controller(manifest, preempt)
    assert controller.run(), controller.outputs
    assert controller.codes == [[PREEMPTED, PREEMPTED], [0, 0]], controller.outputs
    assert (controller.ignored, controller.counted) == (1, 0)
    first, _, last, _ = controller.outputs
    assert "trained" not in first
    steps = [int(word) for word in last.partition("trained")[2].split()]
    assert steps == [*range(steps[0], 13)]
    assert steps[0] > 3  # it resumes, and does not begin again
    assert (tmp_path / "run" / "12").is_dir()


@pytest.mark.parametrize("restarts", [0, 2])
def test_failing_jobset_uses_up_its_restarts(restarts: int, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; sys.exit(3)")
    controller = Controller(manifest_of([str(worker)], 1, restarts))
    assert not controller.run()
    assert controller.codes == [[3]] * (restarts + 1)
    assert (controller.ignored, controller.counted) == (0, restarts)


def test_killed_pod_counts_as_a_failure(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    controller = Controller(manifest_of([str(worker)], 1, restarts=1))
    assert not controller.run()
    assert controller.codes == [[137], [137]]
