"""Scripts and manifests with which a cluster's scheduler starts the same run.

The scheduler starts the processes and, as it is told, all of them again after a
failure; the script's ``initialize()`` finds its place from the environment.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from nnx_parallel.cli.launch import Job
from nnx_parallel.distributed.initialize import (
    CLUSTER,
    COORDINATOR,
    NUM_PROCESSES,
    PROCESS_ID,
)

_PORT = 8476


def slurm(job: Job) -> str:
    """A batch script for ``sbatch``: one task for each process."""
    count = job.devices_per_process or 1
    gpus = "" if job.cpu else f"#SBATCH --gpus-per-task={count}\n"
    # jax would take one device of a task, the one with the task's number on its node:
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
    name = _name(job)
    workers = {
        "parallelism": job.num_processes,
        "completions": job.num_processes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": _pod(job)},
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": job.max_restarts},
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [
                {"name": "workers", "replicas": 1, "template": {"spec": workers}}
            ],
        },
    }
    return (
        "# kubectl apply -f this; put the image with the code in the place of IMAGE.\n"
        + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=math.inf)
    )


def _pod(job: Job) -> dict[str, Any]:
    """What runs one process."""
    name, variables = _name(job), job.cpu_variables.items()
    limits = {} if job.cpu else {"nvidia.com/gpu": job.devices_per_process or 1}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = {
        "name": "train",
        "image": "IMAGE",
        "command": ["python", *job.command],
        "env": [
            {"name": COORDINATOR, "value": f"{name}-workers-0-0.{name}:{_PORT}"},
            {"name": NUM_PROCESSES, "value": str(job.num_processes)},
            {"name": PROCESS_ID, "valueFrom": {"fieldRef": {"fieldPath": index}}},
            *({"name": variable, "value": value} for variable, value in variables),
        ],
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": limits},
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
    }


def tpu(job: Job) -> str:
    """A shell script that starts one process on each host of a TPU slice."""
    command = f"{CLUSTER}=tpu {_command(job)}"
    return f"""#!/bin/bash
# Usage: TPU=name ZONE=zone bash this. The slice has {job.num_processes} hosts.
# The code and its environment stand on every host already.
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


class _Dumper(yaml.SafeDumper):
    """Quotes texts: bare, some parsers take 3e-4 for a number and y for true."""

    def represent_mapping(
        self, tag: str, mapping: Any, flow_style: bool | None = None
    ) -> yaml.MappingNode:
        """A mapping whose keys, which are ours, stay plain."""
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            key.style = None
        return node


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"'
    ),
)
