"""The doctor reports on the installation, and names problems that it finds."""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import pytest

from nnx_parallel.cli import main
from nnx_parallel.cli.doctor import (
    device_problems,
    disk_problems,
    flag_problems,
    package_problems,
    tpu_problems,
    version_problems,
)

# Looked up by name, because `nnx_parallel.cli.doctor` is the function in the package.
doctoring: Any = sys.modules["nnx_parallel.cli.doctor"]

CUDA = {"jax-cuda12-plugin": "0.12.0"}
ON_CPU = {"platform": "cpu", "log": ["first", "CUDA_ERROR_NO_DEVICE"]}


def only(found: Iterable[str]) -> str:
    (text,) = found
    return text


def test_healthy_machine_has_no_problems(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Starts JAX in a separate process, on the CPU of the test machine."""
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for name in ("_GPU", "_TPU"):  # hides the test machine's accelerators
        kind = getattr(doctoring, name)._replace(files=())
        monkeypatch.setattr(doctoring, name, kind)
    assert main(["doctor", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^jax +{re.escape(jax.__version__)}$", text, re.MULTILINE)
    assert re.search(r"^devices +1 x cpu$", text, re.MULTILINE)
    assert re.search(r"^JAX_PLATFORMS +cpu$", text, re.MULTILINE)
    assert text.endswith("\nNo problems found.\n")


def test_backend_start_error_is_quoted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    assert main(["doctor", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "platform" in text
    assert "none: JAX does not start" in text
    found = re.search(r"^WRONG: JAX does not start: (.*)$", text, re.MULTILINE)
    assert found
    assert "xla_no_such_flag" in found[1]
    assert found[1].endswith("JAX_PLATFORMS is 'cpu'.")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with an NVIDIA driver, represented by a file."""
    (tmp_path / "nvidiactl").touch()
    for name, pattern in {"_GPU": "nvidia*", "_TPU": "accel0"}.items():
        kind = getattr(doctoring, name)._replace(files=(f"{tmp_path}/{pattern}",))
        monkeypatch.setattr(doctoring, name, kind)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("packages", "env", "why"),
    [
        (CUDA, {"JAX_PLATFORMS": "cpu"}, "JAX_PLATFORMS=cpu hides it: unset it."),
        ({}, {}, 'No package for it is installed: pip install "jax[cuda13]"'),
        (CUDA, {}, "JAX says: first CUDA_ERROR_NO_DEVICE"),
        (CUDA, {"JAX_PLATFORMS": "cuda,cpu"}, "JAX says: "),
    ],
)
def test_unused_gpu_is_reported(packages: dict, env: dict, why: str) -> None:
    text = only(device_problems(ON_CPU, packages, env))
    start = "The driver of an NVIDIA GPU is installed, but JAX does not use it. "
    assert text.startswith(start + why)


@pytest.mark.usefixtures("gpu")
def test_used_gpu_is_fine() -> None:
    assert list(device_problems({"platform": "gpu"}, CUDA, {})) == []


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"XLA_FLAGS": "--xla_a=1 --xla_b --xla_a=2"},
            "XLA_FLAGS has --xla_a twice, as '1' and as '2'; the last one is used. "
            "Leave one out.",
        ),
        (
            {"LIBTPU_INIT_ARGS": "--x=true --x=false"},
            "LIBTPU_INIT_ARGS has --x twice, as 'true' and as 'false'",
        ),
        (
            {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                "JAX_NUM_CPU_DEVICES": "4",
            },
            "XLA_FLAGS has --xla_force_host_platform_device_count, which has no "
            "effect beside JAX_NUM_CPU_DEVICES=4. Leave one out.",
        ),
    ],
)
def test_conflicting_flags_are_reported(env: dict[str, str], message: str) -> None:
    assert only(flag_problems(env)).startswith(message)


def test_compatible_flags_are_fine() -> None:
    assert list(flag_problems({"XLA_FLAGS": "--xla_a=1 --xla_a=1 --xla_b='c d'"})) == []


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        (
            {"jaxlib": "0.12.1"} | CUDA,
            "jax-cuda12-plugin 0.12.0 is installed beside jaxlib 0.12.1. Both must ",
        ),
        (
            {"libtpu": "0.0.52", "libtpu-nightly": "0.1"},
            "libtpu and libtpu-nightly are both installed. Uninstall one.",
        ),
    ],
)
def test_incompatible_packages_are_reported(
    packages: dict[str, str], message: str
) -> None:
    assert only(package_problems(packages)).startswith(message)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.9.2", "Found jax 0.9.2. nnx_parallel runs on jax 0.10 or newer"),
        ("0.13.0", "Found jax 0.13.0, which is untested. nnx_parallel runs on jax"),
    ],
)
def test_unsupported_versions_are_reported(
    version: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"jax": version, "flax": "0.12.8"}
    monkeypatch.setattr(doctoring, "versions", lambda: found)
    assert only(version_problems()).startswith(message)


def test_busy_tpu_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "accel0").touch()
    tpu = doctoring._TPU._replace(files=(f"{tmp_path}/accel0",))
    monkeypatch.setattr(doctoring, "_TPU", tpu)
    maps = {"1/maps": "libc.so", "20/maps": "/x/libtpu.so", f"{os.getpid()}/maps": ""}
    for name, text in maps.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(doctoring, "_PROCESSES", tmp_path)
    assert only(tpu_problems()).startswith("libtpu is loaded by other processes: 20. ")


def test_unwritable_disk_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(disk_problems(str(tmp_path / "new" / "run"), {})) == []
    assert not (tmp_path / "new").exists()  # the check creates nothing
    (tmp_path / "file").touch()
    text = only(disk_problems(str(tmp_path / "file"), {}))
    assert text.startswith(f"Cannot write to '{tmp_path / 'file'}': ")
    env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "file")}
    assert only(disk_problems(str(tmp_path), env)) == text
    monkeypatch.setattr(doctoring, "_LITTLE_SPACE", 2**80)
    assert all(" are free in " in x for x in disk_problems(str(tmp_path), {}))
