"""Lists installed versions and JAX's devices, and finds mistakes in both."""

import contextlib
import glob
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nnx_parallel.distributed.agreement import versions
from nnx_parallel.drawing import aligned
from nnx_parallel.errors import ParallelError
from nnx_parallel.mesh import check_versions
from nnx_parallel.precision import format_bytes
from nnx_parallel.training.verified import read_verified

# The probe runs in a separate process, because a backend may abort, or wait for a
# device that another process holds.
_PROBE = """
import json, jax
devices = jax.local_devices()
stats = devices[0].memory_stats() or {}
print("\\n" + json.dumps({
    "platform": jax.default_backend(),
    "devices": f"{len(devices)} x {devices[0].device_kind}",
    "bytes_limit": stats.get("bytes_limit"),
}))
"""
_PROBE_SECONDS = 120


class _Accelerator(NamedTuple):
    """An accelerator: patterns of its driver's files, and the packages for JAX."""

    name: str
    files: tuple[str, ...]
    platforms: tuple[str, ...]
    packages: str  # pattern of the names of packages
    install: str


_GPU = _Accelerator(
    "an NVIDIA GPU",
    ("/proc/driver/nvidia/version", "/dev/nvidiactl"),
    ("gpu", "cuda"),
    r"jax-cuda\d+-plugin",
    'pip install "jax[cuda13]", or "jax[cuda12]" for drivers before 580',
)
_TPU = _Accelerator(
    "a TPU",
    ("/dev/accel0", "/dev/vfio/0"),
    ("tpu",),
    r"libtpu(-nightly)?",
    'pip install "jax[tpu]"',
)
_LITTLE_SPACE = 2**30
_PROCESSES = Path("/proc")
_SHOWN = "JAX_|XLA_|LIBTPU_|TPU_|CUDA_VISIBLE|NCCL_|NNX_PARALLEL_"


def doctor(directory: str) -> int:
    """Prints versions, devices and variables, and a line for each problem.

    Returns:
        0 if there is no problem, otherwise 1.
    """
    probe, packages = _probe(), _installed()
    backends = [*_has(packages, _GPU), *_has(packages, _TPU)]
    facts = versions() | {name: packages[name] for name in backends}
    facts["platform"] = probe.get("platform", "none: JAX does not start")
    facts["devices"] = probe.get("devices", "-")
    if limit := probe.get("bytes_limit"):
        facts["memory"] = f"{format_bytes(limit)} of each device are available to JAX"
    facts |= {k: os.environ[k] for k in sorted(os.environ) if re.match(_SHOWN, k)}
    sys.stdout.write(f"{aligned([*facts.items()])}\n\n")
    problems = [
        *version_problems(),
        *package_problems(packages),
        *device_problems(probe, packages, os.environ),
        *flag_problems(os.environ),
        *tpu_problems(),
        *disk_problems(directory, os.environ),
    ]
    lines = [f"WRONG: {problem}\n" for problem in problems] or ["No problems found.\n"]
    sys.stdout.writelines([f"{verified_in(directory)}\n", *lines])
    return 1 if problems else 0


def _installed() -> dict[str, str]:
    """Returns the version of every installed package, by its name in lower case."""
    found = importlib.metadata.distributions()
    return {d.name.lower().replace("_", "-"): d.version for d in found if d.name}


def _has(packages: Mapping[str, str], kind: _Accelerator) -> list[str]:
    return sorted(name for name in packages if re.fullmatch(kind.packages, name))


def _probe() -> dict[str, Any]:
    """Returns the devices that JAX finds, or the end of its error output."""
    # The probe takes no device memory, which another run may need.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", _PROBE]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    try:
        done = subprocess.run(command, env=env, timeout=_PROBE_SECONDS, **options)
    except subprocess.TimeoutExpired:
        return {"error": f"JAX has not found its devices within {_PROBE_SECONDS} s."}
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == 0:
        return {**json.loads(done.stdout.splitlines()[-1]), "log": lines}
    # XLA names unknown flags in a separate line before it prints a stack.
    named = [line for line in lines if "nknown flag" in line]
    text = (named or lines or [f"it ended with code {done.returncode}"])[-1]
    return {"error": f"JAX does not start: {text}"}


def version_problems() -> Iterator[str]:
    """Yields versions of jax and flax that are too old, or newer than tested ones."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_versions(versions())
        except ParallelError as error:
            yield str(error)
    yield from (str(warning.message) for warning in caught)


def package_problems(packages: Mapping[str, str]) -> Iterator[str]:
    """Yields plugins with a version other than jaxlib's, and packages in conflict."""
    jaxlib = packages.get("jaxlib", "")
    for name in _has(packages, _GPU):
        if packages[name] != jaxlib:
            yield (
                f"{name} {packages[name]} is installed beside jaxlib {jaxlib}. Both "
                "must have the same version: install them together, as an extra of jax."
            )
    for kind in (_GPU, _TPU):
        if len(names := _has(packages, kind)) > 1:
            yield f"{' and '.join(names)} are both installed. Uninstall one."


def device_problems(
    probe: Mapping[str, Any], packages: Mapping[str, str], env: Mapping[str, str]
) -> Iterator[str]:
    """Yields devices that JAX cannot start, or does not use despite their driver."""
    platforms = env.get("JAX_PLATFORMS", "")
    if "error" in probe:
        yield probe["error"] + f" JAX_PLATFORMS is {platforms!r}." * bool(platforms)
        return
    for kind in (_GPU, _TPU):
        is_here = any(map(glob.glob, kind.files))
        if not is_here or probe["platform"] in kind.platforms:
            continue
        if platforms and not {*platforms.split(",")} & {*kind.platforms}:
            why = f"JAX_PLATFORMS={platforms} hides it: unset it."
        elif not _has(packages, kind):
            why = f"No package for it is installed: {kind.install}."
        else:
            why = " ".join(["JAX says:", *probe["log"][-2:]])
        yield f"The driver of {kind.name} is installed, but JAX does not use it. {why}"


def flag_problems(env: Mapping[str, str]) -> Iterator[str]:
    """Yields compiler flags that contradict each other or other settings."""
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        values: dict[str, str] = {}
        for word in shlex.split(env.get(variable, "")):
            name, _, value = word.partition("=")
            if values.setdefault(name, value) != value:
                yield (
                    f"{variable} has {name} twice, as {values[name]!r} and as "
                    f"{value!r}; the last one is used. Leave one out."
                )
            values[name] = value
    count = "--xla_force_host_platform_device_count"
    number = env.get("JAX_NUM_CPU_DEVICES")
    if number and f"{count}=" in env.get("XLA_FLAGS", ""):
        yield (
            f"XLA_FLAGS has {count}, which has no effect beside "
            f"JAX_NUM_CPU_DEVICES={number}. Leave one out."
        )


def tpu_problems() -> Iterator[str]:
    """Yields other processes that have loaded libtpu: only one can use a TPU."""
    users = []
    is_here = any(map(glob.glob, _TPU.files))
    for path in _PROCESSES.glob("[0-9]*/maps") if is_here else ():
        with contextlib.suppress(OSError):  # another user's process, or an ended one
            if "libtpu.so" in path.read_text() and int(path.parent.name) != os.getpid():
                users.append(path.parent.name)
    if users:
        yield (
            f"libtpu is loaded by other processes: {', '.join(users)}. Only one "
            "process at a time can use a TPU: end them, or wait."
        )


def verified_in(directory: str) -> str:
    """Describes the last verification in a run's directory, and gives the command."""
    command = "python -m nnx_parallel verify train.py compares a step with one device"
    record = read_verified(directory)
    if record is None:
        return f"No run was verified in '{directory}': {command}."
    facts, now = record["facts"], versions()
    changed = [name for name in ("jax", "jaxlib") if facts.get(name) != now[name]]
    since = f" Versions have changed since then ({', '.join(changed)}): {command}."
    when = f"Verified on {record['date']} at step {record['step']}: {record['result']}."
    return when + since * bool(changed)


def disk_problems(directory: str, env: Mapping[str, str]) -> Iterator[str]:
    """Yields directories that cannot be written, or are nearly full."""
    cache = env.get("JAX_COMPILATION_CACHE_DIR")
    for where in dict.fromkeys(filter(None, (directory, tempfile.gettempdir(), cache))):
        path = Path(where).absolute()
        while not path.exists():  # a missing directory is made when it is needed
            path = path.parent
        try:
            # The check writes a file, because the mode is not enough: root may always
            # write.
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            yield f"Cannot write to '{where}': {error.strerror}."
            continue
        if (free := shutil.disk_usage(path).free) < _LITTLE_SPACE:
            yield f"Only {format_bytes(free)} are free in '{where}'."
