"""Hostile small files are refused by kind and size before they take memory."""

import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flax import nnx

from nnx_parallel import Checkpoint
from nnx_parallel.checkpoint import CheckpointManager
from nnx_parallel.errors import CheckpointDirectoryError, LogFileError, WeightsError
from nnx_parallel.files import MAX_DEPTH, open_private, parse_object, read_object
from nnx_parallel.loggers import JSONLinesLogger
from nnx_parallel.models import GPT
from nnx_parallel.weights.files import INDEX, open_tensors, read_config
from tests.test_weights import GOLDENS

KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "is a named pipe, not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device, not a regular"),
    "directory": (Path.mkdir, "is a directory, not a regular file"),
    "dangling": (lambda path: path.symlink_to("gone"), "a link to 'gone', which does"),
    "loop": (lambda path: path.symlink_to(path.name), "is a link to itself"),
}
CONTENTS: dict[str, tuple[bytes, str]] = {
    "deep": (b"[" * 200_000, "is nested too deeply: JSON is read up to 100 levels"),
    "nested": (b'{"a":' * 300 + b"1" + b"}" * 300, "is nested too deeply"),
    "many": (b"[" + b"[]," * 8_000_000 + b"1]", "has about 16,000,001 JSON values"),
    "bytes": (b"{\xff}", "is not JSON in UTF-8"),
    "half a pair": (b'{"a": "\\ud800"}', "is not JSON in UTF-8"),
    "list": (b"[1]", "holds list, not a JSON object"),
    "empty": (b"", "is not JSON in UTF-8"),
}

READERS: dict[str, tuple[str, Callable[[Path], Any], type[Exception]]] = {
    "index": (INDEX, lambda path: open_tensors(path.parent), WeightsError),
    "weights": ("model.safetensors", lambda p: open_tensors(p.parent), WeightsError),
    "shard": ("a.safetensors", lambda path: open_tensors(path.parent), WeightsError),
    "config": ("config.json", lambda path: read_config(path.parent), WeightsError),
    "metrics": (
        "metrics.jsonl",
        lambda path: JSONLinesLogger(path).start(first_step=0, num_steps=1),
        LogFileError,
    ),
    "lock": (
        "lock.json",
        lambda path: CheckpointManager(Checkpoint(path.parent)).saved,
        CheckpointDirectoryError,
    ),
}


@pytest.mark.parametrize(("make", "message"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("name", "read", "error"), READERS.values(), ids=READERS)
def test_irregular_files_raise(
    tmp_path: Path, name: str, read: Callable, error: type, make: Callable, message: str
) -> None:
    make(tmp_path / name)
    before = os.lstat(tmp_path / name)
    with pytest.raises(error, match=re.escape(message)) as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert os.lstat(tmp_path / name) == before


@pytest.mark.parametrize(("content", "message"), CONTENTS.values(), ids=CONTENTS)
def test_hostile_json_takes_little_memory(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=re.escape(message)):
            read_config(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(content) + 2**20


def test_limits_admit_real_files(tmp_path: Path) -> None:
    inner = MAX_DEPTH - 1
    content = b'{"a":' + b"[" * inner + b"]" * inner + b"}"
    assert parse_object(content, "x")
    path = tmp_path / "large.json"
    path.write_bytes(b'{"a": "\\ud83d\\ude00"}' + b" " * 2**20)
    assert read_object(path) == {"a": "\N{GRINNING FACE}"}
    with pytest.raises(ValueError, match=re.escape("at most 1,000 are read")):
        read_object(path, 1000)


def test_links_to_regular_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text('{"step": 1}\n')
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).symlink_to("blob")
    assert read_config(tmp_path) == {"step": 1}
    logger = JSONLinesLogger(tmp_path / "metrics.jsonl")
    logger.start(first_step=1, num_steps=2)
    logger.log(2, {"loss": 1.0})
    logger.finish()
    assert (tmp_path / "blob").read_text().count("\n") == 2


COUNTS = [
    ("llama", "num_hidden_layers", 10**9, "from 1 to 10,000"),
    ("llama", "num_hidden_layers", 9_999, "Config and files disagree"),
    ("llama", "num_hidden_layers", -1, "from 1 to 10,000"),
    ("llama", "num_hidden_layers", "2", "from 1 to 10,000"),
    ("llama", "num_attention_heads", 10**9, "from 1 to 65,536"),
    ("llama", "vocab_size", 10**15, "from 1 to 2,147,483,647"),
    ("llama", "vocab_size", 2**31 - 1, "Config and files disagree"),
    ("llama", "rope_parameters", [1], "has a setting with a wrong type"),
    ("mixtral", "num_local_experts", 65_536, "Config and files disagree"),
]


@pytest.mark.parametrize(("family", "name", "value", "message"), COUNTS)
def test_absurd_counts_raise(
    tmp_path: Path, family: str, name: str, value: Any, message: str
) -> None:
    folder = tmp_path / family
    shutil.copytree(GOLDENS / family, folder)
    config = json.loads((folder / "config.json").read_text())
    changed = json.dumps(config | {name: value, "layer_types": None})
    (folder / "config.json").write_text(changed)
    with pytest.raises((ValueError, WeightsError), match=re.escape(message)):
        GPT.from_pretrained(folder)(nnx.Rngs(0))


@pytest.mark.parametrize("beside", ["model.fp16.safetensors", "adapter.safetensors"])
def test_other_files_in_folder_are_not_read(tmp_path: Path, beside: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDENS / "llama", folder)
    expected = open_tensors(folder).keys()
    shutil.copy(folder / "model.safetensors", folder / beside)
    assert open_tensors(folder).keys() == expected


OPEN = {
    "file": lambda path: path.chmod(0o666),
    "directory": lambda path: path.parent.chmod(0o770),
    "link": lambda path: path.rename(path.with_name("y")) and path.symlink_to("y"),
}


@pytest.mark.parametrize("change", OPEN.values(), ids=OPEN)
def test_code_writable_by_others_raises(tmp_path: Path, change: Callable) -> None:
    path = tmp_path / "private" / "x"
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    os.close(open_private(path.parent, "x"))
    change(path)
    with pytest.raises((ValueError, OSError), match=r"chmod go-w|symbolic links"):
        open_private(path.parent, "x")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change a file's owner")
def test_code_of_another_user_raises(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch(mode=0o600)
    os.chown(path, 65534, 65534)
    message = (
        f"'{path}' belongs to user 65534, but must belong to 0, the user of this "
        "process, or to root."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        open_private(tmp_path, "x")
