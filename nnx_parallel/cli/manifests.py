"""Scripts and manifests with which a cluster's scheduler starts the same run.

The scheduler starts the processes and, as it is told, all of them again after a
failure; the script's ``initialize()`` finds its place from the environment.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from nnx_parallel.cli.launch import Job
from nnx_parallel.distributed.start import COORDINATOR, NUM_PROCESSES, PROCESS_ID

_PORT = 8476


def slurm(job: Job) -> str:
    """A batch script for ``sbatch``: one task for each process."""
    gpus = (
        "" if job.cpu else f"#SBATCH --gpus-per-task={job.devices_per_process or 1}\n"
    )
    devices = (
        f"export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={job.devices_per_process or 1}\n"
        if job.cpu
        else ""
    )
    return f"""#!/bin/bash
#SBATCH --job-name={_name(job)}
#SBATCH --ntasks={job.num_processes}
{gpus}#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# SIGTERM, 120 s before the time is over or the node is taken, saves a checkpoint.

set -u
{devices}restarts=0
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
    limits = {} if job.cpu else {"nvidia.com/gpu": job.devices_per_process or 1}
    container = {
        "name": "train",
        "image": "IMAGE",
        "command": ["python", *job.command],
        "env": [
            {"name": COORDINATOR, "value": f"{name}-workers-0-0.{name}:{_PORT}"},
            {"name": NUM_PROCESSES, "value": str(job.num_processes)},
            {
                "name": PROCESS_ID,
                "valueFrom": {
                    "fieldRef": {
                        "fieldPath": "metadata.annotations"
                        "['batch.kubernetes.io/job-completion-index']"
                    }
                },
            },
            *_cpu_variables(job),
        ],
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": limits},
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,
        "containers": [container],
    }
    workers = {
        "parallelism": job.num_processes,
        "completions": job.num_processes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
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
        + _yaml(manifest)
    )


def tpu(job: Job) -> str:
    """A shell script that starts one process on each host of a TPU slice."""
    return f"""#!/bin/bash
# Usage: TPU=name ZONE=zone bash this. The slice has {job.num_processes} hosts.
# The code and its environment stand on every host already.
set -eu
: "${{TPU:?name of the TPU slice}}" "${{ZONE:?its zone}}"
restarts=0
until gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \\
    --command={shlex.quote(_command(job))}; do
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
    """A name that Slurm and Kubernetes take, from the script's."""
    stem = Path(job.command[0]).stem.lower()
    cleaned = "".join(c if c.isascii() and c.isalnum() else "-" for c in stem)
    return cleaned.strip("-")[:40].rstrip("-") or "train"


def _cpu_variables(job: Job) -> list[dict[str, str]]:
    if not job.cpu:
        return []
    count = str(job.devices_per_process or 1)
    return [
        {"name": "JAX_PLATFORMS", "value": "cpu"},
        {"name": "JAX_NUM_CPU_DEVICES", "value": count},
    ]


def _yaml(value: object, indent: int = 0) -> str:
    """Dicts and lists as YAML blocks; strings and numbers are written as JSON."""
    pad = "  " * indent
    if isinstance(value, dict) and value:
        return "".join(
            f"{pad}{key}:{_yaml_value(inner, indent + 1)}"
            for key, inner in value.items()
        )
    if isinstance(value, list) and value:
        return "".join(f"{pad}-{_yaml_value(inner, indent + 1)}" for inner in value)
    return f"{pad}{json.dumps(value)}\n"


def _yaml_value(value: object, indent: int) -> str:
    if isinstance(value, dict | list) and value:
        return "\n" + _yaml(value, indent)
    return f" {json.dumps(value)}\n"
