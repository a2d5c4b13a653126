"""Directories and files that other programs wrote, or that somebody moved."""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import tensorstore
from orbax.checkpoint import v1 as ocp

from nnx_parallel.checkpoint import (
    Checkpoint,
    CheckpointManager,
    CheckpointReader,
    files,
)
from nnx_parallel.checkpoint.orbax_compat import hide_lost_reads
from nnx_parallel.cli import main
from nnx_parallel.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointReadError,
)
from tests.checkpoints import (
    META,
    abstract,
    bits,
    make_groups,
    restore,
    rewrite,
    rewrite_header,
    save,
    sign,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    save(directory, 2, 4)
    return directory


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of the run, for a test to damage."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def resume(directory: Path, **options: Any) -> tuple[list[bytes], list[str]] | None:
    with CheckpointManager(Checkpoint(directory, **options)) as manager:
        wanted = abstract(make_groups())
        found = manager.saved.restore_newest(wanted, quarantines=True)
    return found and (bits(found[0][0]), found[1])


# Names of directories


@pytest.mark.parametrize(
    "name",
    ["lr=[0.1,0.2]", "a*b", "[!a]?", "x\ny {z} %5B ~ ü.", "1.orbax-checkpoint-tmp"],
)
def test_directory_may_have_any_name(name: str, tmp_path: Path) -> None:
    # If the name were a glob pattern, `a*b` would match this neighbour.
    save(tmp_path / "a-other-b", 1)
    save(tmp_path / name, 1, 2)
    assert restore(tmp_path / name) == bits(make_groups(2))
    assert restore(tmp_path / name, 1) == bits(make_groups(1))
    assert main(["inspect", str(tmp_path / name), "--verify"]) == 0


def test_directory_may_be_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    save(tmp_path / "link", 6)
    assert restore(tmp_path / "link") == restore(run) == bits(make_groups(6))


@pytest.mark.parametrize("name", ["a\\b", "x.__lock", "a\udcff"])
def test_names_misread_by_tensorstore_raise(name: str) -> None:
    message = (
        "no directory in the path may have a name that contains a backslash, ends in"
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint(f"runs/{name}/run")


# Steps that are not where they were saved


def exchange(run: Path) -> None:
    (run / "4").rename(run / "x")
    (run / "2").rename(run / "4")
    (run / "x").rename(run / "2")


def copy(run: Path) -> None:
    shutil.rmtree(run / "4")
    shutil.copytree(run / "2", run / "4")


def link(run: Path) -> None:
    shutil.rmtree(run / "4")
    (run / "4").symlink_to("2")


@pytest.mark.parametrize("change", [exchange, copy, link])
def test_renamed_step_raises(
    change: Callable, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run)
    message = "It was saved as step 2: its directory was renamed or copied."
    with pytest.raises(CheckpointReadError, match=re.escape(message)):
        restore(run, 4)
    assert main(["inspect", str(run), "--verify"]) == 1
    shown = re.findall(r"^ +4 .* DAMAGED: (.*)", capsys.readouterr().out, re.M)
    assert len(shown) == 1
    assert message in shown[0]


def test_linked_step_is_restored(run: Path, tmp_path: Path) -> None:
    (run / "2").rename(tmp_path / "2")
    (run / "2").symlink_to(tmp_path / "2")
    assert restore(run, 2) == bits(make_groups(2))
    save(run, 6, keep_last=1)
    # For a step outside of the directory, only the link is deleted.
    assert sorted(os.listdir(run)) == ["6"]
    assert (tmp_path / "2" / "model").is_dir()


def test_header_without_step_is_restored(run: Path) -> None:
    rewrite_header(run / "4", lambda header: header.pop("step"))
    assert restore(run, 4) == bits(make_groups(4))


# Steps of other programs and versions


def test_later_format_is_not_damage(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite_header(run / "4", lambda header: header.update(format=9, digest="other"))
    message = f"Checkpoint 4 in '{run}' has format 9; this version of nnx_parallel "
    with pytest.raises(CheckpointFormatError, match=re.escape(message)):
        resume(run, on_damage="previous")
    assert sorted(os.listdir(run)) == ["2", "4"]
    assert main(["inspect", str(run)]) == 1
    assert f"NOT READ: {message}" in capsys.readouterr().out


def test_foreign_checkpoint_raises_and_is_kept(run: Path) -> None:
    ocp.save(f"{run}/3", {"model": jnp.ones(2)})
    ocp.save(f"{run}/5", {"model": jnp.ones(2)})
    message = f"Checkpoint 5 in '{run}' was not written by this library: it has"
    with pytest.raises(CheckpointFormatError, match=re.escape(message)):
        resume(run, on_damage="previous")
    with CheckpointManager(Checkpoint(run, keep_last=1, keep_best="loss")) as manager:
        manager.save_groups(6, make_groups(6), META, metrics={"loss": 0.1})
    assert sorted(os.listdir(run)) == ["3", "5", "6"]


def test_other_directories_are_kept(run: Path) -> None:
    for name in ("²", "0020", "٣", "-1", "1e3"):
        shutil.copytree(run / "4", run / name)
    (run / "2024" / "model" / "deep").mkdir(parents=True)
    (run / "2024" / "model" / "deep" / "weights.bin").write_bytes(b"mine")
    (run / "2025" / "model").mkdir(parents=True)
    (run / "2026").mkdir()
    (run / "2027" / "fingerprints").mkdir(parents=True)
    (run / "2027" / "fingerprints" / "scan.png").write_bytes(b"mine")
    (run / "8" / "_CHECKPOINT_METADATA").mkdir(parents=True)
    (run / "8" / "_CHECKPOINT_METADATA" / "mine").touch()
    (run / "9").write_text("mine")
    (run / "10").symlink_to("nowhere")
    before = sorted(str(path) for path in run.rglob("*") if "/run/2/" not in f"{path}")
    assert resume(run, on_damage="previous") == (bits(make_groups(4)), [])
    save(run, 6, keep_last=2)
    after = {str(path) for path in run.rglob("*")}
    assert [path for path in before if path not in after] == [str(run / "2")]
    assert main(["inspect", str(run), "--verify"]) == 0


# Partly deleted steps


def empty(step: Path) -> None:
    for file in (path for path in step.rglob("*") if path.is_file()):
        file.unlink()


def halve(step: Path) -> None:
    (step / "_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(step / "model")


@pytest.mark.parametrize("change", [empty, halve])
def test_partial_step_raises(
    change: Callable, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run / "4")
    with pytest.raises(CheckpointDamagedError, match=r"Checkpoint 4 in '.*' has no m"):
        resume(run)
    assert main(["inspect", str(run)]) == 1
    assert "DAMAGED: it has no metadata left" in capsys.readouterr().out
    found = resume(run, on_damage="previous")
    assert found is not None
    assert found[0] == bits(make_groups(2))
    assert len(list(run.glob("damaged-4-*"))) == 1


def test_possibly_foreign_step_raises_and_is_kept(run: Path) -> None:
    (run / "4" / "_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(run / "4" / "fingerprints")
    message = "has no metadata left. Another program may have written it: it was"
    with pytest.raises(CheckpointFormatError, match=re.escape(message)):
        resume(run, on_damage="previous")
    assert sorted(os.listdir(run)) == ["2", "4"]


def test_kill_during_deletion_leaves_no_partial_step(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(path: Path) -> None:
        (path / "_CHECKPOINT_METADATA").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            files.delete_steps(str(run), [2])
    assert main(["inspect", str(run), "--verify"]) == 0
    assert re.search(r"'deleted-2-\w+': partly deleted", capsys.readouterr().out)
    assert resume(run) == (bits(make_groups(4)), [])
    assert os.listdir(run) == ["4"]


def test_undeletable_old_step_warns(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = shutil.rmtree

    def fail(path: Any, *args: Any, **options: Any) -> None:
        if re.search(r"(/|-)2(-\w+)?$", str(path)):
            raise OSError(errno.EBUSY, "Device or resource busy")
        delete(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", fail)
    with CheckpointManager(Checkpoint(run, keep_last=1)) as manager:
        manager.save_groups(6, make_groups(6), META)
        message = (
            rf"An older checkpoint in '{run}' could not be deleted: step 2 \(OSError: "
            r".*Device or resource busy\). The newer checkpoints are saved"
        )
        with pytest.warns(UserWarning, match=message):
            manager.wait()
        assert manager.saved.steps == [6]
        assert manager.latest_step == 6
    with pytest.warns(UserWarning, match="Cannot delete 'deleted-2-"):
        assert resume(run) == (bits(make_groups(6)), [])


# Files from untrusted sources


def replace(path: Path) -> Path:
    path.unlink()
    return path


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened, contextlib.chdir(path.parent):
        opened.bind(replace(path).name)


def move_away(path: Path) -> None:
    target = path.parents[2] / "elsewhere"
    shutil.move(path, target)
    path.symlink_to(target)


KINDS: dict[str, Callable[[Path], Any]] = {
    "not a regular file (pipe)": lambda path: os.mkfifo(replace(path)),
    "not a regular file (device)": lambda path: replace(path).symlink_to("/dev/zero"),
    "not a regular file (socket)": make_socket,
    "bytes": lambda path: os.truncate(path, 10 << 30),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "_CHECKPOINT_METADATA",
        "fingerprints/fingerprints.json",
        "model/_METADATA",
        "model/manifest.ocdbt",
    ],
)
def test_irregular_or_huge_files_raise(kind: str, name: str, run: Path) -> None:
    KINDS[kind](run / "4" / name)
    reader = CheckpointReader(run)
    problem = reader.corrupt_steps.get(4, "")
    if not problem:
        with pytest.raises(CheckpointReadError) as caught:
            reader.describe(4)
        problem = str(caught.value)
    assert kind.partition(" (")[0] in problem
    assert restore(run, 2) == bits(make_groups(2))  # one bad step does not block others


def test_linked_files_are_read_but_not_directories(run: Path) -> None:
    move_away(run / "4" / "model" / "manifest.ocdbt")
    assert restore(run, 4) == bits(make_groups(4))
    move_away(run / "4" / "model")
    with pytest.raises(CheckpointReadError, match="'model' is a link to a directory"):
        restore(run, 4)


def nest(file: Path) -> None:
    file.write_text("[" * 200_000)


def make_pipe(part: Path) -> None:
    part.mkdir()
    os.mkfifo(part / "metrics")


def loop(file: Path) -> None:
    replace(file).symlink_to(file.name)


METADATA = "_CHECKPOINT_METADATA"


def in_metadata(**fields: Any) -> Callable[[Path], None]:
    return lambda step: rewrite(step / METADATA, lambda found: found.update(fields))


def in_header(**fields: Any) -> Callable[[Path], None]:
    return lambda step: rewrite_header(step, lambda header: header.update(fields))


def in_checksums(change: Callable) -> Callable[[Path], None]:
    def apply(content: dict) -> None:
        change(content)
        sign(content)

    return lambda step: rewrite(step / "fingerprints" / "fingerprints.json", apply)


def chunked(size: int) -> Callable[[Path], None]:
    """Metadata with chunks too large for memory, in TensorStore's format."""

    def change(step: Path) -> None:
        base = {"driver": "file", "path": f"{step}/model/"}
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        found = json.loads(store["a.kernel/zarr.json"])
        for part in (found["chunk_grid"], found["codecs"][0]):
            part["configuration"]["chunk_shape"] = [size, 24]
        store["a.kernel/zarr.json"] = json.dumps(found).encode()

    return change


@pytest.mark.parametrize(
    "change",
    {
        "nested metadata": lambda step: nest(step / METADATA),
        "nested group": lambda step: nest(step / "model" / "_METADATA"),
        "nested checksums": lambda step: nest(step / "fingerprints/fingerprints.json"),
        "linked to itself": lambda step: loop(step / METADATA),
        "no object": lambda step: (step / METADATA).write_text("[]"),
        "no text": lambda step: (step / METADATA).write_bytes(b"\xff\xfe"),
        "text for a time": in_metadata(commit_timestamp_nsecs="now"),
        "a late time": in_metadata(init_timestamp_nsecs=10**40),
        "metrics of others": lambda step: make_pipe(step / "metrics"),
        "handlers": in_metadata(item_handlers=[1]),
        "list for a header": in_metadata(custom_metadata=[1]),
        "metrics": in_header(metrics={"loss": "low"}),
        "meta": in_header(meta=[1]),
        "sizes": in_header(sizes={"model": "2"}),
        "keys": in_header(keys=3),
        "key": in_header(keys={"model": {"a.bias": "no such"}, "progress": {}}),
        "arrays": in_header(arrays={"model": []}),
        "checksum": in_checksums(lambda x: x["values"]["model"].update(a="1")),
        "checksums": in_checksums(lambda x: x.update(values=[1])),
        "chunk": chunked(2**26),
        "huge chunk": chunked(2**50),
    }.items(),
    ids=lambda item: item[0],
)
def test_hostile_headers_raise_named_errors(
    change: tuple[str, Callable], run: Path
) -> None:
    change[1](run / "4")
    with CheckpointManager(Checkpoint(run, keep_best="loss")) as manager:
        saved = manager.saved
        assert saved.best_step in {2, 4}
        is_bad = bool(saved.corrupt_steps)
        if not is_bad:
            with contextlib.suppress(CheckpointReadError):
                found = saved.restore(abstract(make_groups()), 4)
                assert bits(found[0]) == bits(make_groups(4))
        assert bits(saved.restore(abstract(make_groups()), 2)[0]) == bits(
            make_groups(2)
        )
    # The output may vary, but the exit code is 0 or 1, and no exception is raised.
    assert main(["inspect", str(run), "--verify"]) in {0, 1}


def test_inspect_prints_no_escape_codes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(header: dict) -> None:
        header["meta"] = {"\x1b[2J": "\x1b]0;title\x07\nstep 9", "name": "größer"}

    rewrite_header(run / "4", change)
    assert main(["inspect", str(run)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "  \\x1b[2J: \\x1b]0;title\\x07\\nstep 9\n" in text
    assert "name: größer" in text


# A single clear message


READ = """
import sys, jax
from tests.checkpoints import restore
restore(sys.argv[1], 4)
"""


def truncate_arrays(step: Path) -> None:
    for file in step.glob("**/d/*"):
        file.write_bytes(file.read_bytes()[:20])


def test_damaged_step_raises_one_message(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truncate_arrays(run / "4")
    with pytest.raises(CheckpointReadError) as caught:
        restore(run, 4)
    text = "".join(traceback.format_exception(caught.value))
    assert "site-packages" not in text
    assert "tensorstore_spec" not in text
    assert not [x for x in caplog.records if x.levelno >= logging.WARNING]
    with caplog.at_level(logging.DEBUG, "nnx_parallel.checkpoint"):
        with pytest.raises(CheckpointReadError):
            restore(run, 4)
        assert "site-packages" in caplog.text  # the log has the full chain of errors


def test_late_errors_of_failed_read_are_hidden() -> None:
    def record(error: Exception) -> logging.LogRecord:
        info = type(error), error, None
        return logging.LogRecord("asyncio", 40, "", 0, "never retrieved", (), info)

    lost = ValueError('OUT_OF_RANGE: Error opening "zarr3" driver: Error reading "a"')
    assert not hide_lost_reads(record(lost))
    assert hide_lost_reads(record(ValueError("of the user's own task")))
    assert hide_lost_reads(record(TypeError('Error opening "zarr3" driver')))


@pytest.mark.deep
def test_damaged_step_prints_short_traceback(run: Path) -> None:
    truncate_arrays(run / "4")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(run)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1].startswith("nnx_parallel.errors.CheckpointReadError: Cannot read")
    assert len(lines) < 40, done.stderr
