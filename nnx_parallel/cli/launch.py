"""Launcher: starts the processes of a run on one machine, and ends them together.

It can also write a script or manifest with which a cluster's scheduler starts the
processes, and restarts all of them after a failure. In the training script,
``initialize()`` reads the environment that the launcher, script or manifest sets.
"""

import contextlib
import itertools
import json
import math
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from nnx_parallel.distributed.causes import CAUSE, Cause, read_cause
from nnx_parallel.distributed.initialize import (
    CLUSTER,
    COORDINATOR,
    NUM_PROCESSES,
    PROCESS_ID,
)
from nnx_parallel.distributed.messages import listen
from nnx_parallel.distributed.runtime import PEER_LOST, PREEMPTED, TAGGED
from nnx_parallel.errors import DeviceMemoryError, MeshShapeError, NonFiniteLossError
from nnx_parallel.loggers.logger import RESTART
from nnx_parallel.plan.hardware import Topology

# GPUs are distributed among processes, and each process sees only its GPUs.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# The other processes notice a lost process within 0.5 s, and end by themselves
# (docs/library-notes.md, "Lost processes").
_GRACE_SECONDS = 5.0
_SAVE_SECONDS = 600.0  # for preempted processes, which may still write a checkpoint
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A run that fails within this time has not made progress.
_START_SECONDS = 60.0
_PORT = 8476
# Kubernetes writes this annotation to each pod of an Indexed job.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

Process = subprocess.Popen[bytes]


_GKE_ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
"""Values of GKE's node label for each kind of TPU, as in
https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus"""

_CHIPS_PER_HOST = 4


def gke_hosts(topology: Topology) -> tuple[int, int]:
    """Returns the number of hosts of a slice on GKE, and the chips of each host.

    Raises:
        ValueError: If GKE has no such slice.
    """
    hardware, shape = topology.hardware, topology.shape
    chips, dims = math.prod(shape), hardware.num_links // 2
    of_host = min(chips, _CHIPS_PER_HOST)
    is_one = topology.num_slices == 1 and hardware.name in _GKE_ACCELERATORS
    if not is_one or len(shape) != dims or chips % of_host:
        raise ValueError(
            f"GKE has no slice {topology.name!r}. Write one slice with all of its "
            "dims, such as v5p:2x2x4 or v6e:4x4, of at most 4 chips or a multiple of "
            f"4. Kinds: {', '.join(_GKE_ACCELERATORS)}."
        )
    return chips // of_host, of_host


@dataclass(frozen=True, kw_only=True)
class Job:
    """The command of a run, and the number of processes that run it.

    Attributes:
        command: The script and its arguments.
        devices_per_process: Devices of each process; ``None`` leaves them to JAX.
        max_restarts: Number of times that all processes are started again after a
            failure.
        min_processes: Smallest number of processes of a restart. If one fails within a
            minute, the next one has one process fewer, without the devices of the
            process that failed first. After a run of more than a minute, all processes
            are tried again. ``None`` means that all processes are needed.
        spares: Number of groups of devices, or machines under Slurm, that stay idle
            until a group that is in use fails.
        cpu: True to simulate the devices on CPU.
        host: Address of the coordinator, in process 0.
        topology: The slice of TPUs on which GKE runs the processes.
    """

    command: tuple[str, ...]
    num_processes: int
    devices_per_process: int | None = None
    max_restarts: int = 0
    min_processes: int | None = None
    spares: int = 0
    cpu: bool = False
    host: str = "127.0.0.1"
    topology: Topology | None = None

    @property
    def cpu_variables(self) -> dict[str, str]:
        """Variables of a process that simulates its devices; empty otherwise."""
        if not self.cpu:
            return {}
        count = self.devices_per_process or 1
        return {
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "JAX_NUM_CPU_DEVICES": str(count),
            "PJRT_NPROC": str(4 * count),  # as in `simulate_devices`
        }


def launch(job: Job) -> int:
    """Runs the processes to their end, and restarts them after failures.

    They are restarted at most ``job.max_restarts`` times. A SIGTERM that another
    program sends to a process also leads to a restart. Lines of their output appear as
    ``[0] ...``. SIGINT, SIGTERM and SIGHUP to the launcher are forwarded to every
    process; after such a signal nothing is restarted. Child processes that outlive
    their parent, such as a data loader's, are killed once all processes have ended.

    A run that has failed three times at the same step for the same reason is not
    started again. Two failures are enough if memory is lacking or a loss is not finite.

    Returns:
        0 on success, otherwise the exit code of the first process that failed. After
        signal n the code is 128 + n. Some errors of this library have special codes.
        The code is 143, `PREEMPTED`, if a SIGTERM has stopped the run.

    Raises:
        MeshShapeError: If the visible devices are fewer than the processes need.
    """
    code, whole = 0, job
    failures: list[Failure] = []
    with _forwarded_signals() as (received, receivers):
        for restart in range(whole.max_restarts + 1):
            groups = groups_to_start(whole, failures)
            job = replace(whole, num_processes=len(groups))
            with (
                tempfile.TemporaryDirectory() as directory,
                _processes(job, restart, directory, groups) as processes,
            ):
                start = time.monotonic()
                receivers[:] = processes
                # These signals came before all processes had started.
                for number, process in itertools.product(received, processes):
                    process.send_signal(number)
                index, code = _wait(processes)
                files = [_file(directory, i) for i in range(job.num_processes)]
                pids = [process.pid for process in processes]
                cause = cause_of(files, pids, index, code)
                seconds = time.monotonic() - start
                failure = Failure(cause, seconds, len(groups), groups[index])
            if code == 0 or received:
                return code
            code = cause.code if code == 1 else code
            failures.append(failure)
            if is_stuck(failures):
                text = (
                    f"The run has failed {failure.most} times {failure.place} for the "
                    f"same reason: {cause.kind}. It is not started again."
                )
                _write(sys.stderr, "launch", text)
                return code
            if left := job.max_restarts - restart:
                later = groups_to_start(whole, failures)
                count, new = len(later), [x for x in later if x not in groups]
                who = "all processes"
                if count < whole.num_processes:
                    who = f"{count} process" + "es" * (count != 1)
                where = f", with devices of group {new[0]}" if new else ""
                text = f"Starting {who} again{where} ({left} restarts left)."
                _write(sys.stderr, "launch", text)
    return code


def groups_to_start(job: Job, failures: Sequence["Failure"]) -> list[int]:
    """Returns the groups of devices for the next start, one for each process.

    A spare replaces a group that has failed. If there are no spares left, the groups
    that failed longest ago are used. A group whose starts fail soon is left out,
    because one of its devices may be missing.
    """
    early = [*itertools.takewhile(lambda x: x.seconds < _START_SECONDS, failures[::-1])]
    # A failure of the first start does not count, because its cause may be anything.
    counted = early[:-1] if len(early) == len(failures) else early
    groups = [*range(job.num_processes + job.spares)]
    least = job.min_processes or job.num_processes
    for failure in counted[::-1]:
        if failure.suspects_group and failure.group in groups and len(groups) > least:
            groups.remove(failure.group)
    failed = {x.group: i for i, x in enumerate(failures) if x.suspects_group}
    groups.sort(key=lambda group: failed.get(group, -1))
    return sorted(groups[: job.num_processes])


class Failure(NamedTuple):
    """A failure of all processes.

    Attributes:
        cause: The reason of the process that failed first.
        seconds: Time from the start of the processes.
        num_processes: Their number.
        group: The group of devices of the process that failed first.
    """

    cause: Cause
    seconds: float
    num_processes: int = 1
    group: int = 0

    def is_like(self, other: "Failure") -> bool:
        """Returns True if two runs failed at the same step for the same reason."""
        if self.num_processes != other.num_processes:
            return False
        if self.cause.kind != other.cause.kind or self.cause.step != other.cause.step:
            return False
        if self.cause.step is not None:
            return True
        # The step is unknown, so a long run may have made progress. Signals are not
        # counted, because a machine may be preempted several times.
        return max(self.seconds, other.seconds) < _START_SECONDS and (
            self.cause.code <= 128
        )

    @property
    def suspects_group(self) -> bool:
        """False if a SIGTERM ended the run; then the group is not the cause."""
        return self.cause.code != PREEMPTED

    @property
    def place(self) -> str:
        """The time of the failure, in words."""
        step = self.cause.step
        return "soon after the start" if step is None else f"at step {step:,}"

    @property
    def most(self) -> int:
        """The number of equal failures that ends the restarts."""
        # A step computes the same numbers again, unless the hardware was faulty.
        certain = NonFiniteLossError.exit_code, DeviceMemoryError.exit_code
        return 2 if self.cause.pid and self.cause.code in certain else 3


def cause_of(
    files: Sequence[Path], pids: Sequence[int], index: int, code: int
) -> Cause:
    """Returns the cause that the first process to fail has noted, or its exit code.

    Args:
        files: The file of each process.
        pids: The operating system's number of each process.
        index: The process that failed first.
        code: Its exit code.
    """
    noted = [*map(read_cause, files, pids)]
    found = noted[index]
    # With one process, Python ends with code 1 after every error.
    if found is not None and code in (1, found.code):
        return found
    # A process that was killed notes nothing. The other processes note the step at
    # which it was lost.
    step = next((x.step for x in noted if x is not None), None)
    return Cause(kind=f"exit code {code}", step=step, code=code)


def is_stuck(failures: Sequence[Failure]) -> bool:
    """Returns True if the last failures are alike, so that a restart is useless."""
    last = failures[-1]
    same = failures[-last.most :]
    return len(same) == last.most and all(map(last.is_like, same))


def _wait(processes: list[Process]) -> tuple[int, int]:
    """Waits for all processes; returns index and exit code of the first to fail."""
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for i, process in enumerate(processes):
        _thread(_watch, i, process, ended)
    failures: list[tuple[int, int]] = []
    deadline: float | None = None
    num_running, is_preempted = len(processes), False
    while num_running:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            index, code = ended.get(timeout=wait)
        except queue.Empty:
            # Most processes end by themselves within seconds. The remaining ones ignore
            # signals or hang in C code.
            deadline = None
            for process in processes:
                _kill_group(process)
            continue
        num_running -= 1
        is_preempted |= code == PREEMPTED
        # Preempted processes have agreed to end. Each may still write its part of the
        # checkpoint.
        if code == PREEMPTED:
            deadline = deadline or time.monotonic() + _SAVE_SECONDS
        elif code:
            failures.append((index, code))
            end = time.monotonic() + _GRACE_SECONDS
            deadline = end if deadline is None else min(deadline, end)
    if not failures:
        return 0, PREEMPTED if is_preempted else 0
    # A process that ends because another process is lost may be reaped before the lost
    # process.
    own = [failure for failure in failures if failure[1] != PEER_LOST]
    index, code = (own or failures)[0]
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    text = f"Process {index} failed first, {how}. All processes have ended."
    _write(sys.stderr, "launch", text)
    # For signal n the code of `Popen` is -n, and the code of a shell is 128 + n.
    return index, 128 - code if code < 0 else code


def _file(directory: str, index: int) -> Path:
    """Returns the file in which a process notes its cause."""
    return Path(directory) / f"{index}.json"


@contextmanager
def _processes(
    job: Job, restart: int, directory: str, groups: Sequence[int]
) -> Iterator[list[Process]]:
    """Starts the processes; on exit ends all of them and their children."""
    with listen(job.host) as probe:  # the coordinator takes the port a moment later
        port = probe.getsockname()[1]
    host = job.host.strip("[]")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    started: list[Process] = []
    try:
        for index, group in enumerate(groups):
            process = subprocess.Popen(
                [sys.executable, *job.command],
                env=_environment(job, address, index, restart, group)
                | {CAUSE: str(_file(directory, index))},
                stdin=subprocess.DEVNULL,  # processes cannot share one input
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # In a separate group, a process gets a terminal's Ctrl-C only
                # once, from the launcher, and its children can be killed with it.
                start_new_session=True,
            )
            started.append(process)
        yield started
    finally:
        for process in started:
            _kill_group(process)
            process.wait()


def _environment(
    job: Job, address: str, index: int, restart: int, group: int
) -> dict[str, str]:
    environment = os.environ | {
        COORDINATOR: address,
        NUM_PROCESSES: str(job.num_processes),
        PROCESS_ID: str(index),
        RESTART: str(restart),
        TAGGED: str(os.getpid()),
        # The output is a pipe and not a terminal. Python would hold lines back, and
        # lose them if it is killed.
        "PYTHONUNBUFFERED": "1",
        **job.cpu_variables,
    }
    count = job.devices_per_process
    if job.cpu or count is None:
        return environment
    needed = max(job.num_processes + job.spares, group + 1) * count
    # Without the variable all devices are visible, numbered from 0.
    given = os.environ.get(_VISIBLE, ",".join(map(str, range(needed))))
    names = [name for name in given.split(",") if name]
    if len(names) < needed:
        spares = f" and {job.spares} spares" if job.spares else ""
        raise MeshShapeError(
            f"{_VISIBLE}={given} names {len(names)} devices, but {job.num_processes} "
            f"processes{spares} of {count} devices need {needed}. Launch fewer "
            "processes, or make more devices visible."
        )
    return environment | {_VISIBLE: ",".join(names[group * count :][:count])}


def _thread(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def _watch(
    index: int, process: Process, ended: queue.SimpleQueue[tuple[int, int]]
) -> None:
    """Copies a process's output line by line, and reports its end."""
    # The readers start before the wait, because a full pipe without readers would block
    # the process.
    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    readers = [_thread(_copy, index, *pair) for pair in pairs]
    code = process.wait()
    for reader in readers:
        reader.join(_GRACE_SECONDS)  # a child of the process may hold the pipe open
    ended.put((index, code))


# For each process, two threads write lines. Their lines must not mix.
_writing = threading.Lock()


def _copy(index: int, source: IO[bytes], target: IO[str]) -> None:
    # If nothing reads the launcher's output any more, the run sees a broken pipe, and
    # saves a checkpoint.
    with source, contextlib.suppress(BrokenPipeError):
        for line in source:
            _write(target, index, line.decode(errors="replace").rstrip("\n"))


def _write(target: IO[str], label: object, text: str) -> None:
    with _writing:
        target.write(f"[{label}] {text}\n")
        target.flush()


@contextmanager
def _forwarded_signals() -> Iterator[tuple[list[int], list[Process]]]:
    """Forwards the launcher's signals; yields the signals and their receivers."""
    received: list[int] = []
    receivers: list[Process] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for process in receivers:
            process.send_signal(number)  # does nothing if it has ended

    # Ignored signals stay ignored, as under nohup.
    heeded = [n for n in _SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield received, receivers
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _kill_group(process: Process) -> None:
    """Kills a process and its children, including children that have outlived it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def slurm(job: Job) -> str:
    """Returns a batch script for ``sbatch``, with one task for each process.

    With ``spares`` or ``min_processes``, each node runs one task. Each start leaves out
    nodes that do not answer, or on which the driver lists no GPUs.
    """
    count = job.devices_per_process or 1
    gpus = "" if job.cpu else f"#SBATCH --gpus-per-task={count}\n"
    # By default JAX gives task i of a node only device i of that node:
    # https://github.com/jax-ml/jax/issues/16788
    numbers = ",".join(str(i) for i in range(count))
    needed = job.cpu_variables or {"JAX_LOCAL_DEVICE_IDS": numbers}
    variables = "".join(f"export {name}={value}\n" for name, value in needed.items())
    tasks, functions, choice, where = f"--ntasks={job.num_processes}", "", "", ""
    if job.spares or job.min_processes is not None:
        # By default, Slurm ends the whole job when it loses a node.
        tasks = f"--nodes={job.num_processes + job.spares}\n#SBATCH --ntasks-per-node=1"
        tasks += "\n#SBATCH --no-kill"
        # Slurm accepts GPUs per task only with --ntasks, which would need all nodes.
        gpus = gpus.replace("per-task", "per-node")
        least = job.min_processes or job.num_processes
        functions = _SLURM_NODES.format(test="true" if job.cpu else "nvidia-smi -L")
        choice = _SLURM_CHOICE.format(
            most=job.num_processes, least=least, requeues=job.max_restarts
        )
        where = '--nodes="$count" --ntasks="$count" --nodelist="$list" '
    return f"""#!/bin/bash
#SBATCH --job-name={_name(job)}
#SBATCH {tasks}
{gpus}#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# Slurm sends SIGTERM 120 s before it ends the job; the run then saves a checkpoint.

set -u
{variables}{functions}restarts=0
while true; do
{choice}  # If one process fails, srun ends all of them.
  srun {where}--kill-on-bad-exit=1 {shlex.join(("python", *job.command))} && exit 0
  code=$?
  if [ "$code" -eq {PREEMPTED} ]; then
    # A SIGTERM stopped the run, which has saved a checkpoint. Slurm starts it again.
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
  fi
  if [ "$restarts" -ge {job.max_restarts} ]; then exit "$code"; fi
  restarts=$((restarts + 1))
  echo "Exit code $code: starting all processes again ($restarts)." >&2
done
"""


_SLURM_NODES = """\
# Prints the nodes of the job that answer.
answering() {{
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    timeout -k 5 30 srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \\
      {test} >/dev/null && echo "$node" &
  done
  wait
}}
"""
_SLURM_CHOICE = """\
  mapfile -t nodes < <(answering | sort -V)
  count=$((${{#nodes[@]}} < {most} ? ${{#nodes[@]}} : {most}))
  if [ "$count" -lt {least} ]; then
    echo "Only $count nodes answer, and {least} are needed." >&2
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
      scontrol requeue "$SLURM_JOB_ID"
    fi
    exit 1
  fi
  list=$(IFS=,; echo "${{nodes[*]:0:count}}")
"""


# If a pod is preempted, its Job fails with the reason PodFailurePolicy, and the restart
# does not count: https://jobset.sigs.k8s.io/docs/concepts/failure_policy/
_RESTART_RULES = """\
    rules:
    - name: "preempted"
      action: "RestartJobSetAndIgnoreMaxRestarts"
      onJobFailureReasons:
      - "PodFailurePolicy"
"""
_POD_RULES = f"""\
        podFailurePolicy:
          rules:
          - action: "FailJob"
            onExitCodes:
              containerName: "train"
              operator: "In"
              values:
              - {PREEMPTED}
          - action: "FailJob"
            onPodConditions:
            - type: "DisruptionTarget"
              status: "True"
"""


def jobset(job: Job) -> str:
    """Returns a Kubernetes JobSet, with one pod per process, restarted together.

    With a topology, each pod runs on one host of this slice on GKE.
    """
    # Strings are quoted, because some parsers read an unquoted 3e-4 as a number, and y
    # as true.
    name, indent = _name(job), "\n" + 14 * " "
    words = "".join(f"{indent}- {_quoted(w)}" for w in ("python", *job.command))
    variables = {
        # The name of the first pod: <JobSet>-<job>-<replica>-<index>.<subdomain>.
        COORDINATOR: f"{name}-workers-0-0.{name}:{_PORT}",
        NUM_PROCESSES: str(job.num_processes),
    }
    env, simulated = (
        "".join(f'{indent}- name: "{k}"{indent}  value: {_quoted(v)}' for k, v in pairs)
        for pairs in (variables.items(), job.cpu_variables.items())
    )
    # With backoffLimit 0 no pod restarts without the others, which would still wait in
    # a collective. The JobSet restarts all pods.
    where, limit = _node(job)
    return f"""\
# Replace IMAGE by the image with the code, then run kubectl apply -f on this file.
apiVersion: "jobset.x-k8s.io/v1alpha2"
kind: "JobSet"
metadata:
  name: "{name}"
spec:
  failurePolicy:
    maxRestarts: {job.max_restarts}
{_RESTART_RULES}  network:
    enableDNSHostnames: true
    subdomain: "{name}"
  replicatedJobs:
  - name: "workers"
    replicas: 1
    template:
      spec:
        parallelism: {job.num_processes}
        completions: {job.num_processes}
        completionMode: "Indexed"
        backoffLimit: 0
{_POD_RULES}        template:
          spec:
            restartPolicy: "Never"
            terminationGracePeriodSeconds: 120{where}
            containers:
            - name: "train"
              image: "IMAGE"
              command:{words}
              env:{env}
              - name: "{PROCESS_ID}"
                valueFrom:
                  fieldRef:
                    fieldPath: "{_INDEX}"{simulated}
              ports:
              - containerPort: {_PORT}
              resources:
                limits:{" {}" if job.cpu else f"{indent}    {limit}"}
"""


def _node(job: Job) -> tuple[str, str]:
    """Returns the node selector of a pod, which may be empty, and its devices."""
    if job.topology is None:
        return "", f"nvidia.com/gpu: {job.devices_per_process or 1}"
    kind, _, shape = job.topology.name.partition(":")
    labels = {"accelerator": _GKE_ACCELERATORS[kind], "topology": shape}
    pairs = (
        f'\n{14 * " "}cloud.google.com/gke-tpu-{k}: "{v}"' for k, v in labels.items()
    )
    selector = f"\n{12 * ' '}nodeSelector:{''.join(pairs)}"
    return selector, f"google.com/tpu: {gke_hosts(job.topology)[1]}"


def tpu(job: Job) -> str:
    """Returns a shell script that starts one process on each host of a TPU slice."""
    # No variable of a TPU VM says that it is part of a slice, so the script sets one.
    command = f"{CLUSTER}=tpu {shlex.join(('python', *job.command))}"
    return f"""#!/bin/bash
# Usage: TPU=name ZONE=zone bash FILE. The slice has {job.num_processes} hosts.
# The code and its environment must be installed on every host.
set -eu
: "${{TPU:?name of the TPU slice}}" "${{ZONE:?its zone}}"
restarts=0
until gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \\
    --command={shlex.quote(command)}; do
  code=$?
  if [ "$restarts" -ge {job.max_restarts} ]; then exit "$code"; fi
  restarts=$((restarts + 1))
  echo "Exit code $code: starting all processes again ($restarts)." >&2
done
"""


MANIFESTS = {"slurm": slurm, "jobset": jobset, "gke": jobset, "tpu": tpu}


def _name(job: Job) -> str:
    """Makes a name that Slurm and Kubernetes accept from the name of the script."""
    stem = re.sub("[^a-z0-9]", "-", Path(job.command[0]).stem.lower())
    name = stem.strip("-")[:40].rstrip("-") or "train"
    return name if name[0].isalpha() else f"run-{name}"


def _quoted(text: str) -> str:
    """Writes a text as a string of JSON, which is also a string of YAML."""
    # YAML does not join the two escapes by which JSON writes a character beyond U+FFFF.
    # So printable text is not escaped; other text must be.
    return json.dumps(text, ensure_ascii=not text.isprintable())
