"""Training with checkpoints in an object store: a local server with Google's API."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from nnx_parallel.checkpoint import Checkpoint, CheckpointManager
from nnx_parallel.errors import CheckpointDirectoryError
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]


def test_missing_object_store_packages_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(CheckpointDirectoryError, match=r"pip install 'nnx-parallel\[g"):
        _ = CheckpointManager(Checkpoint("gs://bucket/run")).saved


@pytest.mark.parametrize("url", ["s3://bucket/run", "az://b/run", "http://host/run"])
def test_unsupported_object_store_raises(url: str) -> None:
    with pytest.raises(CheckpointDirectoryError, match="Orbax writes arrays to Google"):
        _ = CheckpointManager(Checkpoint(url)).saved


def test_glob_characters_in_url_raise() -> None:
    with pytest.raises(CheckpointDirectoryError, match="in an object store must not"):
        _ = CheckpointManager(Checkpoint("gs://bucket/lr=[0.1]")).saved


TRAIN = """
import sys
import jax, numpy as np, optax
from flax import nnx
from nnx_parallel import Callback, Checkpoint, Trainer

class Tell(Callback):
    def on_step_end(self, trainer, step, metrics):
        print(step, flush=True)

trainer = Trainer(
    model=lambda rngs: nnx.Linear(8, int(sys.argv[3]), rngs=rngs),
    optimizer=optax.adam(0.1),
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    checkpoint=Checkpoint(sys.argv[1], every=2, keep_last=2, on_damage=sys.argv[4]),
    callbacks=[Tell()],
    loggers=(),
)
batches = [{"x": np.full((8, 8), i, np.float32)} for i in range(5)] * 10_000
trainer.fit(batches, int(sys.argv[2]))
print("bits", np.asarray(trainer.model.kernel[...]).tobytes()[:64].hex())
"""


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """Starts a server; yields environment variables that point clients to it."""
    pytest.importorskip("gcp_storage_emulator")
    pytest.importorskip("gcsfs")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    program = (
        "from gcp_storage_emulator.server import create_server as s\n"
        f"s('127.0.0.1', {port}, in_memory=True, default_bucket='bucket').run()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def answers() -> bool:
        try:
            return urllib.request.urlopen(f"{url}/storage/v1/b").status == 200
        except OSError:
            return False

    assert wait_until(answers, seconds=60)
    yield os.environ | {
        "JAX_PLATFORMS": "cpu",
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GOOGLE_CLOUD_PROJECT": "test",
        "NO_GCE_CHECK": "true",  # neither credentials nor bucket kinds are looked up
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    process.kill()
    process.wait()


def start(server: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=server,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=None,  # pytest captures it; an unread pipe would fill up
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return out


@pytest.mark.faults
def test_killed_run_resumes_from_object_store(
    server: dict[str, str], tmp_path: Path
) -> None:
    url, width = "gs://bucket/runs/lr=0.1", 1 << 12
    more = 12, width, "error"
    whole = finish(start(server, "-c", TRAIN, tmp_path, *more)).splitlines()[-1]
    run = start(server, "-c", TRAIN, url, 50_000, width, "error")
    assert run.stdout is not None
    for line in run.stdout:
        if int(line) == 7:  # the save of step 6 has begun
            break
    time.sleep(0.1)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    done = finish(start(server, "-c", TRAIN, url, *more)).splitlines()
    assert done[-1] == whole
    assert int(done[0]) in {5, 7}  # it has resumed
    shown = finish(start(server, "-m", "nnx_parallel", "inspect", url, "--verify"))
    assert shown.count("complete: every array matches its checksum") == 2
    assert re.findall(r"^ +(\d+)  \d{4}-", shown, re.MULTILINE) == ["10", "12"]
    assert "left by a failed save" not in shown
    assert " 0 B " not in shown


DELETE = """
import sys
from etils import epath
epath.Path(sys.argv[1]).unlink()
"""


@pytest.mark.faults
def test_step_without_metadata_is_damaged(server: dict[str, str]) -> None:
    url = "gs://bucket/runs/damaged"
    finish(start(server, "-c", TRAIN, url, 4, 8, "error"))
    finish(start(server, "-c", DELETE, f"{url}/4/_CHECKPOINT_METADATA"))
    refused = subprocess.run(
        [sys.executable, "-c", TRAIN, url, "6", "8", "error"],
        env=server,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert refused.returncode == 1
    assert f"Checkpoint 4 in '{url}' has no metadata left." in refused.stderr
    assert "Other steps: [2]." in refused.stderr
    done = finish(start(server, "-c", TRAIN, url, 6, 8, "previous")).splitlines()
    assert done[0] == "3"  # it has resumed from step 2
