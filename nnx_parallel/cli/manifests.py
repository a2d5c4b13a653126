"""Scripts and manifests with which a cluster's scheduler starts the same run.

The scheduler starts the processes and, as it is configured, all of them again after a
failure; the script's ``initialize()`` finds its place from the environment.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from nnx_parallel.cli.launch import Job
from nnx_parallel.distributed.initialize import (
    CLUSTER,
    COORDINATOR,
    NUM_PROCESSES,
    PROCESS_ID,
)

_PORT = 8476
# Kubernetes writes it to each pod of an Indexed job.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def slurm(job: Job) -> str:
    """A batch script for ``sbatch``: one task for each process."""
    count = job.devices_per_process or 1
    gpus = "" if job.cpu else f"#SBATCH --gpus-per-task={count}\n"
    # JAX takes one device of each task, the one with the task's number on its node:
    # https://github.com/jax-ml/jax/issues/16788
    numbers = ",".join(str(i) for i in range(count))
    needed = job.cpu_variables or {"JAX_LOCAL_DEVICE_IDS": numbers}
    variables = "".join(f"export {name}={value}\n" for name, value in needed.items())
    return f"""#!/bin/bash
#SBATCH --job-name={_name(job)}
#SBATCH --ntasks={job.num_processes}
{gpus}#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# SIGTERM, 120 s before the time is over or the node is taken, saves a checkpoint.

set -u
{variables}restarts=0
while true; do
  # One process fails: all are ended.
  srun --kill-on-bad-exit=1 {_command(job)} && exit 0
  code=$?
  if [ "$restarts" -ge {job.max_restarts} ]; then exit "$code"; fi
  restarts=$((restarts + 1))
  echo "Exit code $code: starting all processes again ($restarts)." >&2
done
"""


def jobset(job: Job) -> str:
    """A Kubernetes JobSet: one pod for each process, restarted together."""
    # Strings are quoted: some parsers take a bare 3e-4 for a number, and y for true.
    name, indent = _name(job), "\n" + 14 * " "
    words = (f"{indent}- {_quoted(word)}" for word in ("python", *job.command))
    variables = {
        # The first pod: <JobSet>-<job>-<replica>-<index>.<subdomain>.
        COORDINATOR: f"{name}-workers-0-0.{name}:{_PORT}",
        NUM_PROCESSES: str(job.num_processes),
    }
    env = [_variable(indent, *item) for item in variables.items()]
    simulated = [_variable(indent, *item) for item in job.cpu_variables.items()]
    # backoffLimit 0: a pod that restarts alone finds its peers in a collective. The
    # JobSet restarts all of them.
    limits = f"{indent}    nvidia.com/gpu: {job.devices_per_process or 1}"
    return f"""\
# kubectl apply -f this; put the image with the code in the place of IMAGE.
apiVersion: "jobset.x-k8s.io/v1alpha2"
kind: "JobSet"
metadata:
  name: "{name}"
spec:
  failurePolicy:
    maxRestarts: {job.max_restarts}
  network:
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
        template:
          spec:
            restartPolicy: "Never"
            terminationGracePeriodSeconds: 120
            containers:
            - name: "train"
              image: "IMAGE"
              command:{"".join(words)}
              env:{"".join(env)}
              - name: "{PROCESS_ID}"
                valueFrom:
                  fieldRef:
                    fieldPath: "{_INDEX}"{"".join(simulated)}
              ports:
              - containerPort: {_PORT}
              resources:
                limits:{" {}" if job.cpu else limits}
"""


def _variable(indent: str, name: str, value: str) -> str:
    return f'{indent}- name: "{name}"{indent}  value: {_quoted(value)}'


def tpu(job: Job) -> str:
    """A shell script that starts one process on each host of a TPU slice."""
    # No variable of a TPU VM says that it is part of a slice, so the script sets one.
    command = f"{CLUSTER}=tpu {_command(job)}"
    return f"""#!/bin/bash
# Usage: TPU=name ZONE=zone bash this. The slice has {job.num_processes} hosts.
# The code and its environment are installed on every host already.
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


MANIFESTS: dict[str, Callable[[Job], str]] = {
    "slurm": slurm,
    "jobset": jobset,
    "tpu": tpu,
}


def _command(job: Job) -> str:
    return shlex.join(("python", *job.command))


def _name(job: Job) -> str:
    """A name that Slurm and Kubernetes take, from the script's: letters first."""
    stem = Path(job.command[0]).stem.lower()
    cleaned = "".join(c if c.isascii() and c.isalnum() else "-" for c in stem)
    name = cleaned.strip("-")[:40].rstrip("-") or "train"
    return name if name[0].isalpha() else f"run-{name}"


def _quoted(text: str) -> str:
    """A string of JSON, which is one of YAML."""
    # But for characters beyond U+FFFF: YAML joins no pairs of surrogates. Others that
    # are not printable must be escaped.
    return json.dumps(text, ensure_ascii=not text.isprintable())
