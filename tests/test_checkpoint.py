import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.futures import future

from nnx_parallel.checkpoint import (
    Checkpoint,
    CheckpointManager,
    CheckpointReader,
)
from nnx_parallel.checkpoint.checksum import PendingChecksums, read_checksums
from nnx_parallel.checkpoint.files import PART
from nnx_parallel.checkpoint.options import superseded_steps
from nnx_parallel.checkpoint.orbax_compat import open_directory
from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
    CheckpointSaveError,
    ProcessError,
)
from nnx_parallel.sharding import checksum
from tests.waiting import wait_until


def shard_over(num_devices: int):
    """Shards dim 0 over ``num_devices`` if they divide it; otherwise replicates."""
    mesh = jax.make_mesh(
        (num_devices,),
        ("data",),
        devices=jax.devices()[:num_devices],
        axis_types=(AxisType.Auto,),
    )

    def sharding(array) -> NamedSharding:
        is_divisible = array.ndim > 0 and array.shape[0] % num_devices == 0
        return NamedSharding(mesh, P("data") if is_divisible else P())

    return sharding


def place(groups, num_devices: int = 8):
    sharding = shard_over(num_devices)
    return jax.tree.map(lambda x: jax.device_put(x, sharding(x)), groups)


def abstract(groups, num_devices: int = 8):
    sharding = shard_over(num_devices)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), groups
    )


def bits(array) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def assert_same(got, wanted) -> None:
    assert jax.tree.map(lambda x: (x.shape, x.dtype, bits(x)), got) == jax.tree.map(
        lambda x: (x.shape, x.dtype, bits(x)), wanted
    )


def weights(value: float = 0.0, num_rows: int = 8):
    kernel = jnp.arange(num_rows * 4, dtype=jnp.float32).reshape(num_rows, 4)
    return place({"params": {"blocks.mlp.up.kernel": kernel + value}})


def everything():
    key = jax.random.key(3)
    return place(
        {
            "params": {
                "blocks.0.kernel": jax.random.normal(key, (16, 24)),
                "blocks.0.bias": jax.random.normal(key, (5,)).astype(jnp.bfloat16),
                "odd [name]/'x'": jnp.float32(jnp.nan),
            },
            "variables": {
                "rngs.key": key,
                "rngs.keys": jax.random.split(key, (8, 2)),
                "rngs.rbg": jax.random.key(1, impl="rbg"),
                "mask": jnp.array([True, False]),
            },
            "optimizer": {"count": jnp.int32(7), "mu": -jnp.zeros((8, 2))},
            "ema": {},
        }
    )


@pytest.fixture
def options(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "run")


def path_of(options: Checkpoint, *parts: str) -> Path:
    return Path(options.directory).joinpath(*parts)


@pytest.mark.parametrize("num_devices", [8, 4, 1])
def test_restore_keeps_bits_on_any_device_count(options, num_devices):
    groups = everything()
    meta = {"data": {"position": [3, 4]}, "version": "1", "x": 0.1}
    with CheckpointManager(options) as manager:
        manager.save_groups(10, groups, meta)
        wanted = abstract(groups, num_devices)
        restored, restored_meta = manager.saved.restore(wanted)
    assert_same(restored, groups)
    assert restored_meta == meta
    assert jax.tree.all(
        jax.tree.map(
            lambda x, like: x.sharding.is_equivalent_to(like.sharding, x.ndim),
            restored,
            wanted,
        )
    )


def test_describe_is_independent_of_mesh(options):
    groups = everything()
    with CheckpointManager(options) as manager:
        manager.save_groups(1, groups, {"seed": 0}, metrics={"eval_loss": 2.0})
        manager.save_groups(2, place(groups, num_devices=2), {})
        first, second = manager.saved.describe(1), manager.saved.describe()
    assert (first.step, first.meta, first.metrics) == (1, {"seed": 0}, {"eval_loss": 2})
    assert (second.step, second.metrics) == (2, {})
    assert first.groups == second.groups
    assert first.groups == jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), groups
    )


def test_pending_checksums_release_arrays():
    groups = weights()
    expected = checksum.checksums(groups)
    array = weakref.ref(*jax.tree.leaves(groups))
    finish = checksum.start_checksums(groups, "test")
    del groups
    gc.collect()
    assert array() is None
    assert finish() == expected


def start_save(options: Checkpoint, values):
    """Starts an Orbax save like `CheckpointManager`, with the given checksums."""
    orbax = open_directory(str(options.directory))
    parts = {**weights(), PART: PendingChecksums("digest", values)}
    response = orbax.save_checkpointables_async(1, parts, force=True)
    assert response is not None
    return orbax, response


def test_save_does_not_wait_for_checksums(options):
    may_finish = threading.Event()

    def values():
        assert may_finish.wait(60)
        return {"params": {"w": 5}}

    orbax, response = start_save(options, values)
    assert not path_of(options, "1").exists()  # the fit continues here
    may_finish.set()
    response.result()
    assert read_checksums(str(path_of(options, "1")), "digest") == values()
    orbax.close()


def test_failed_checksums_leave_no_checkpoint(options):
    def fail():
        raise RuntimeError("a device is gone")

    before = set(threading.enumerate())

    def writers() -> list[threading.Thread]:
        """Orbax's threads, except those that wait for more work."""
        return [
            thread
            for thread in set(threading.enumerate()) - before
            if not (thread.daemon or thread.name.startswith("metadata_store"))
        ]

    orbax, response = start_save(options, fail)
    with pytest.raises(Exception, match="a device is gone"):
        response.result()
    with contextlib.suppress(Exception):
        orbax.close()  # raises the error again
    assert wait_until(lambda: not writers(), seconds=60)
    assert not path_of(options, "1").exists()


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="only Linux counts bytes"
)
def test_describe_and_mismatch_read_no_arrays(options):
    noise = jax.random.normal(jax.random.key(0), (8, 1 << 18))
    groups = place({"params": {"w": noise}})
    with CheckpointManager(options) as manager:
        manager.save_groups(1, groups, {})
        manager.wait()
        before = bytes_read()
        manager.saved.describe()
        wrong = {"params": {"v": noise, "w": noise}}
        with pytest.raises(CheckpointMismatchError):
            manager.saved.restore(abstract(wrong))
        assert bytes_read() - before < noise.nbytes / 50
        manager.saved.restore(abstract(groups))
        assert bytes_read() - before > noise.nbytes / 2


def test_restore_selects_groups(options):
    groups = everything()
    with CheckpointManager(options) as manager:
        manager.save_groups(1, groups, {})
        wanted = abstract({name: groups[name] for name in ("params", "ema")}, 4)
        restored, _ = manager.saved.restore(wanted, step=1)
        assert manager.saved.restore({"ema": {}}) == ({"ema": {}}, {})
    assert_same(restored, {"params": groups["params"], "ema": {}})


@pytest.mark.parametrize("num_devices", [8, 1])
def test_arrays_may_be_donated_after_save_returns(options, num_devices):
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda x: -x - 1, tree), donate_argnums=0
    )
    state = {f"w{i}": jnp.arange(1 << 18, dtype=jnp.float32) + i for i in range(4)}
    state = place({"params": state}, num_devices)
    wanted = jax.tree.map(np.array, state)
    with CheckpointManager(options) as manager:
        manager.save_groups(1, state, {})
        target = abstract(state, num_devices)
        for _ in range(3):
            state = overwrite(state)
        jax.block_until_ready(state)
        restored, _ = manager.saved.restore(target)
    assert_same(restored, wanted)


def test_async_save_returns_before_writing(options):
    groups = {"params": {"w": jax.random.normal(jax.random.key(0), (8, 1 << 20))}}
    groups = jax.block_until_ready(place(groups))
    with CheckpointManager(options) as manager:
        manager.save_groups(1, groups, {})
        assert not path_of(options, "1").exists()
        manager.wait()
        assert path_of(options, "1").exists()


def test_synchronous_save_returns_after_writing(tmp_path):
    options = Checkpoint(tmp_path, asynchronous=False)
    with CheckpointManager(options) as manager:
        manager.save_groups(1, weights(), {})
        assert path_of(options, "1").exists()


def test_rapid_saves_are_all_kept(tmp_path):
    with CheckpointManager(Checkpoint(tmp_path, keep_last=None)) as manager:
        for step in range(1, 6):
            manager.save_groups(step, weights(step), {"step": step})
        for step in manager.saved.steps:
            restored, meta = manager.saved.restore(abstract(weights()), step)
            assert_same(restored, weights(step))
            assert meta == {"step": step}
        assert manager.saved.steps == [1, 2, 3, 4, 5]


LOSSES = {1: 5.0, 2: 1.0, 3: None, 4: 3.0, 5: float("nan"), 6: 1.0, 7: 9.0, 8: 4.0}


@pytest.mark.parametrize(
    ("rules", "kept", "best"),
    [
        ({"keep_last": None}, [1, 2, 3, 4, 5, 6, 7, 8], None),
        ({"keep_last": 1}, [8], None),
        ({"keep_last": 3}, [6, 7, 8], None),
        ({"keep_last": 1, "keep_every": 3}, [3, 6, 8], None),
        ({"keep_last": 2, "keep_best": "loss"}, [6, 7, 8], 6),
        ({"keep_last": 1, "keep_best": "loss", "num_best": 2}, [2, 6, 8], 6),
        ({"keep_last": 1, "keep_best": "loss", "best_mode": "max"}, [7, 8], 7),
        ({"keep_last": 1, "keep_best": "absent"}, [8], None),
    ],
)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_retention_keeps_selected_steps(tmp_path, rules, kept, best, is_restarted):
    options = Checkpoint(tmp_path, **rules)
    manager = CheckpointManager(options)
    for step, loss in LOSSES.items():
        metrics = None if loss is None else {"loss": loss, "accuracy": 0.5}
        manager.save_groups(step, weights(step), {}, metrics=metrics)
        if is_restarted:
            manager.close()
            manager = CheckpointManager(options)
    assert manager.saved.steps == kept
    assert manager.saved.best_step == best
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(int(name) for name in names if name.isdigit()) == kept
    manager.close()


def test_first_save_of_each_interval_is_kept():
    options = Checkpoint("run", keep_last=2, keep_every=timedelta(hours=1))
    minutes = {1: 5, 2: 50, 3: 61, 4: 119, 5: 121, 6: 122, 7: 130}
    times = {step: minute * 60 * 10**9 for step, minute in minutes.items()}
    metrics = {step: {} for step in [*times, 8]}
    # The times of steps 8 and 3 are unknown: 8 is being saved, and 3 cannot be read.
    del times[3]
    assert superseded_steps(options, metrics, times) == [2, 6]


def test_saves_are_kept_by_time(tmp_path):
    rules = {"keep_last": 1, "keep_every": timedelta(microseconds=1)}
    with CheckpointManager(Checkpoint(tmp_path, **rules)) as manager:
        for step in (1, 2, 3):
            manager.save_groups(step, weights(step), {})
        assert manager.saved.steps == [1, 2, 3]
    rules = {"keep_last": 1, "keep_every": timedelta(days=36500)}
    with CheckpointManager(Checkpoint(tmp_path, **rules)) as manager:
        manager.save_groups(4, weights(4), {})
        assert manager.saved.steps == [1, 4]


def test_repeated_or_descending_step_raises(options):
    with CheckpointManager(options) as manager:
        manager.save_groups(20, weights(1), {})
        where = f"'{options.directory}'"
        message = (
            f"Step 20 is already saved in {where}. Pass overwrite=True to replace it, "
            "or save a later step."
        )
        with pytest.raises(CheckpointError, match=re.escape(message)):
            manager.save_groups(20, weights(2), {})
        message = (
            f"Cannot save step 10 in {where} after step 20: steps must ascend. Save "
            "step 21 or later, or use another directory."
        )
        with pytest.raises(CheckpointError, match=re.escape(message)):
            manager.save_groups(10, weights(2), {}, overwrite=True)
        manager.save_groups(20, weights(3), {}, overwrite=True)
        restored, _ = manager.saved.restore(abstract(weights()))
    assert_same(restored, weights(3))


def test_replaced_step_that_cannot_be_deleted_is_not_listed(options, monkeypatch):
    def fail(path):
        raise OSError(f"cannot delete {path}")

    with CheckpointManager(options) as manager:
        manager.save_groups(20, weights(1), {})
        manager.wait()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", fail)
            with pytest.raises(CheckpointSaveError, match="Cannot delete step 20"):
                manager.save_groups(20, weights(2), {}, overwrite=True)
        assert manager.saved.steps == []  # the step was renamed before its deletion
        manager.save_groups(20, weights(3), {})
        assert manager.saved.steps == [20]


def test_steps_that_were_moved_are_saved_again(tmp_path):
    options = Checkpoint(tmp_path, keep_last=None, on_damage="previous")
    with CheckpointManager(options) as manager:
        for step in (1, 2, 3):
            manager.save_groups(step, weights(step), {})
        manager.set_aside(1)
        manager.save_groups(2, weights(20), {})
        manager.save_groups(3, weights(30), {})
        manager.wait()
        shutil.rmtree(tmp_path / "3" / "params")
        manager.saved.restore_newest(abstract(weights()), quarantines=True)
        manager.save_groups(3, weights(300), {})
        for step, value in ((1, 1), (2, 20), (3, 300)):
            restored, _ = manager.saved.restore(abstract(weights()), step)
            assert_same(restored, weights(value))


def test_notice_of_preemption_ends_with_close(options, monkeypatch):
    monkeypatch.setattr(
        multihost_utils, "reached_preemption_sync_point", lambda step: step == 2
    )
    with CheckpointManager(options) as manager:
        found = [(manager.is_due(step), manager.is_preempted) for step in (1, 2, 3)]
        assert found == [(False, False), (True, True), (False, True)]
    assert not manager.is_preempted


def test_save_is_due_every_n_steps(tmp_path):
    with CheckpointManager(Checkpoint(tmp_path, every=3)) as manager:
        assert [step for step in range(1, 10) if manager.is_due(step)] == [
            3,
            6,
            9,
        ]
        manager.save_groups(6, weights(), {})
        assert [step for step in range(1, 10) if manager.is_due(step)] == [9]


def block(options: Checkpoint, step: int) -> None:
    """Makes the running save fail when it renames its directory to ``step``."""
    path_of(options, str(step)).mkdir()
    path_of(options, str(step), "in the way").touch()


LARGE = 1 << 19


def test_background_failure_names_its_step(tmp_path):
    options = Checkpoint(tmp_path / "run", keep_last=1)
    groups = jax.block_until_ready(weights(num_rows=LARGE))
    with CheckpointManager(options) as manager:
        manager.save_groups(10, weights(1), {})
        manager.wait()
        manager.save_groups(20, groups, {})
        block(options, 20)
        message = f"Saving step 20 in '{options.directory}' failed: "
        with pytest.raises(CheckpointSaveError, match=re.escape(message)):
            manager.save_groups(30, groups, {})
        assert not list(tmp_path.glob("run/20.*")), (
            "files of the failed save still take disk space"
        )
        assert manager.saved.steps == [10]
        assert_same(manager.saved.restore(abstract(weights()))[0], weights(1))
        late, other = (tmp_path / f"run/{n}.orbax-checkpoint-tmp" for n in (20, 90))
        late.mkdir()  # as by threads of the failed save that still write
        manager.save_groups(30, weights(3), {})
        assert manager.saved.steps == [30]
        assert not late.exists()
        other.mkdir()
        manager.save_groups(40, weights(4), {})
        assert manager.saved.steps == [40]
        assert other.exists(), "a successful save searched for remains of failed saves"


def test_close_raises_failure_of_last_save(options):
    groups = jax.block_until_ready(weights(num_rows=LARGE))
    manager = CheckpointManager(options)
    manager.save_groups(20, groups, {})
    block(options, 20)
    with pytest.raises(CheckpointSaveError, match="Saving step 20 in"):
        manager.close()
    manager.close()


def test_close_deletes_files_that_a_failed_save_writes_late(options):
    manager = CheckpointManager(options)
    manager.save_groups(20, jax.block_until_ready(weights(num_rows=LARGE)), {})
    block(options, 20)
    with pytest.raises(CheckpointSaveError, match="Saving step 20 in"):
        manager.wait()
    late = path_of(options, "20.orbax-checkpoint-tmp", "optimizer")
    is_written = threading.Event()

    def write() -> None:
        time.sleep(0.3)
        late.mkdir(parents=True)
        is_written.set()

    # As in Orbax: a thread for each group of arrays starts threads for asyncio.
    def begin() -> None:
        time.sleep(0.3)
        threading.Thread(target=write, name="asyncio_0").start()

    writer = vars(future)["_SignalingThread"]
    writer(target=begin, send_signals=[], receive_signals=[]).start()
    manager.close()
    assert is_written.wait(10)
    assert not late.parent.exists()


def test_save_failure_does_not_hide_run_error(options):
    groups = jax.block_until_ready(weights(num_rows=LARGE))

    def run() -> None:
        with CheckpointManager(options) as manager:
            manager.save_groups(20, groups, {})
            block(options, 20)
            raise ArithmeticError("loss is nan")

    with pytest.raises(ArithmeticError, match="loss is nan") as caught:
        run()
    assert "Another error: Saving step 20 in" in caught.value.__notes__[0]


def test_mismatches_raise_before_reading(options):
    saved = place(
        {
            "params": {"mlp.up.kernel": jnp.ones((8, 4)), "head.bias": jnp.ones(8)},
            "variables": {"key": jax.random.key(0), "same": jnp.ones(8)},
        }
    )
    wanted = place(
        {
            "params": {"mlp.up.kernal": jnp.ones((8, 4)), "head.bias": jnp.ones(16)},
            "variables": {
                "key": jax.random.key(0, impl="rbg"),
                "same": jnp.ones(8, jnp.bfloat16),
            },
            "ema": {"head.bias": jnp.ones(8)},
        }
    )
    message = f"""\
Checkpoint 1 in '{options.directory}' differs from the requested arrays:
  ema: the checkpoint has no such group
  params: `head.bias` is float32[8] in the checkpoint and float32[16] here
  params: `mlp.up.kernal` float32[8,4] is not in the checkpoint (nearest there: \
`mlp.up.kernel`)
  params: `mlp.up.kernel` float32[8,4] is only in the checkpoint (nearest here: \
`mlp.up.kernal`)
  variables: `key` is key<fry>[] in the checkpoint and key<rbg>[] here
  variables: `same` is float32[8] in the checkpoint and bfloat16[8] here
Build the same model and optimizer. Saved groups: \
['params', 'variables']."""
    with CheckpointManager(options) as manager:
        manager.save_groups(1, saved, {})
        with pytest.raises(CheckpointMismatchError, match=re.escape(message)):
            manager.saved.restore(abstract(wanted))


def test_long_mismatches_are_shortened(options):
    def state(prefix: str) -> dict:
        return {"optimizer": {f"{prefix}mu.{i}": jnp.ones(8) for i in range(9)}}

    saved = state("0.")
    wanted = state("inner.0.")
    wanted["optimizer"]["scales.0.mu.0"] = jnp.ones(1)
    message = """\
  optimizer: ... and 7 more arrays are not in the checkpoint
  optimizer: `0.mu.0` float32[8] is only in the checkpoint (nearest here: \
`inner.0.mu.0`)
  optimizer: `0.mu.1` float32[8] is only in the checkpoint (nearest here: \
`inner.0.mu.1`)
  optimizer: `0.mu.2` float32[8] is only in the checkpoint (nearest here: \
`inner.0.mu.2`)
  optimizer: ... and 6 more arrays are only in the checkpoint
Only this Trainer keeps the optimizer's moments in 8 bits (eight_bit_state)."""
    with CheckpointManager(options) as manager:
        manager.save_groups(1, place(saved), {})
        with pytest.raises(CheckpointMismatchError, match=re.escape(message)):
            manager.saved.restore(abstract(place(wanted)))


def test_restore_without_sharding_raises(options):
    bare = {"params": {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}}
    message = "Cannot restore `w` of group 'params': it has no sharding."
    with CheckpointManager(options) as manager:
        manager.save_groups(1, place({"params": {"w": jnp.ones((8, 4))}}), {})
        with pytest.raises(CheckpointError, match=re.escape(message)):
            manager.saved.restore(bare)


def test_missing_steps_raise(options):
    where = f"'{options.directory}'"
    with CheckpointManager(options) as manager:
        message = f"No checkpoint in {where}. Save one first."
        with pytest.raises(CheckpointNotFoundError, match=re.escape(message)):
            manager.saved.describe()
        assert (manager.latest_step, manager.saved.best_step) == (None, None)
        manager.save_groups(500, weights(), {})
        message = (
            f"No checkpoint for step 2000 in {where}. Saved steps: [500]. Pass "
            "step=None for the latest, or resume=False to start from step 0."
        )
        for step in (2000, np.array(2000), jnp.int32(2000)):
            with pytest.raises(CheckpointNotFoundError, match=re.escape(message)):
                manager.saved.restore({}, step)  # pyright: ignore[reportArgumentType]


def test_only_unwritable_directory_is_failed_save(tmp_path, monkeypatch):
    """With on_save_error="warn", a failed save warns and a lost process raises."""

    def lose(directory, check_lock):
        raise ProcessError("Process 1 is lost.")

    directory = tmp_path / "run"
    options = Checkpoint(directory, keep_best="loss", on_save_error="warn")
    with CheckpointManager(options) as manager:
        manager.save_groups(1, weights(), {}, metrics={"loss": 1.0})
    with CheckpointManager(options) as manager:
        saved = manager.saved
        monkeypatch.setattr(
            saved, "metrics", lambda: pytest.fail("the metrics were read")
        )
        directory.rename(tmp_path / "away")
        directory.write_text("no directory")
        with pytest.raises(CheckpointSaveError, match="CheckpointDirectoryError: "):
            manager.save_groups(2, weights(), {})
        assert saved.steps == [1]
        monkeypatch.setattr("nnx_parallel.checkpoint.manager.check_writable", lose)
        with pytest.raises(ProcessError, match="Process 1 is lost"):
            manager.save_groups(2, weights(), {})


@pytest.mark.parametrize("victim", ["params", "params/d"])
def test_damaged_files_raise_read_error(options, victim):
    with CheckpointManager(options) as manager:
        manager.save_groups(1, weights(), {})
        manager.wait()
        shutil.rmtree(path_of(options, "1", victim))
        message = f"Cannot read checkpoint 1 in '{options.directory}': "
        with pytest.raises(CheckpointReadError, match=re.escape(message)):
            manager.saved.restore(abstract(weights()))


def test_unsavable_values_raise(options):
    donated = jnp.ones(2)
    donated.delete()
    array = jnp.ones(2)
    refused = [
        ({"params": {"w": np.ones(2)}}, {}, "Cannot save `w` of group 'params': found"),
        ({"params": {"w": jnp.ones((0, 2))}}, {}, "its shape (0, 2) has no elements."),
        (
            {"params": {"w": jnp.ones(2, jnp.uint4)}},
            {},
            "checkpoint files cannot hold dtype uint4.",
        ),
        (
            {"params": {"w": jnp.ones(2, jnp.uint2)}},
            {},
            "checkpoint files cannot hold dtype uint2.",
        ),
        ({"params": {"w": donated}}, {}, "it was donated. Save the step's output"),
        ({"params": {}}, {}, "Nothing to save: no group holds an array."),
        ({"metrics": {"w": array}}, {}, "Cannot save a group named 'metrics'"),
        ({"fingerprints": {"w": array}}, {}, "Cannot save a group named 'fingerprin"),
        ({"a/b": {"w": array}}, {}, "Cannot save a group named 'a/b'"),
        ({"params": {"w": array}}, {"x": array}, "Cannot save the metadata: Object of"),
    ]
    with CheckpointManager(options) as manager:
        for groups, meta, message in refused:
            with pytest.raises(CheckpointError, match=re.escape(message)):
                manager.save_groups(1, groups, meta)
        assert manager.saved.steps == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"every": 0}, "Checkpoint(every=0) must be a whole number of at least 1"),
        ({"every": timedelta()}, "must be longer than 0."),
        ({"keep_every": timedelta(-1)}, "must be longer than 0."),
        (
            {"every": timedelta(minutes=10), "keep_every": 1000},
            "Checkpoint(keep_every=1000) counts steps, and every=datetime.timedelta(",
        ),
        ({"keep_last": 0}, "Checkpoint(keep_last=0) must be a whole number"),
        ({"num_best": None}, "Checkpoint(num_best=None) must be a whole number"),
        ({"best_mode": "low"}, "Checkpoint(best_mode='low') must be 'min' or 'max'."),
        (
            {"keep_best": "eval_accuracy"},
            "Checkpoint(keep_best='eval_accuracy') would keep the smallest values. Say "
            "which values are the best: best_mode='max', or 'min'.",
        ),
    ],
)
def test_invalid_options_raise(wrong, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint("run", **wrong)


def test_best_mode_defaults_to_min():
    assert Checkpoint("run", keep_best="eval_loss").best_mode == "min"
    assert Checkpoint("run", keep_best="eval_f1", best_mode="min").best_mode == "min"


def test_directories_become_absolute():
    assert Checkpoint("run").directory == os.path.abspath("run")
    assert Checkpoint("gs://bucket/run").directory == "gs://bucket/run"


def test_unwritable_directory_raises(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        message = f"Cannot write checkpoints to '{directory}': "
        with pytest.raises(CheckpointDirectoryError, match=re.escape(message)):
            _ = CheckpointManager(Checkpoint(directory)).saved


def test_foreign_files_are_not_touched(tmp_path):
    for name in ("100", "7", "notes", "3.txt.d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text(name)
    with CheckpointManager(Checkpoint(tmp_path, keep_last=1)) as manager:
        for step in (1, 2, 8):
            manager.save_groups(step, weights(), {})
        assert manager.saved.steps == [8]
        message = "'100' is there and is not a checkpoint. Move it away"
        with pytest.raises(CheckpointError, match=re.escape(message)):
            manager.save_groups(100, weights(), {})
    assert {file.read_text() for file in tmp_path.glob("*/mine")} == {
        "100",
        "7",
        "notes",
        "3.txt.d",
    }


def test_reader_changes_nothing(options, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="No directory"):
        CheckpointReader(options)
    with CheckpointManager(options) as manager:
        manager.save_groups(1, weights(1), {"seed": 3})
    unfinished = path_of(options, "2.orbax-checkpoint-tmp")
    unfinished.mkdir()
    restored, meta = CheckpointReader(options).restore(abstract(weights()))
    assert_same(restored, weights(1))
    assert meta == {"seed": 3}
    assert unfinished.exists()
    assert not (tmp_path / "elsewhere").exists()


SAVE_FOR_EVER = """
import sys, jax, jax.numpy as jnp, numpy as np
from nnx_parallel.checkpoint import Checkpoint, CheckpointManager
jax.config.update("jax_platforms", "cpu")
noise = jnp.asarray(np.random.default_rng(0).standard_normal(1 << 22, np.float32))
with CheckpointManager(Checkpoint(sys.argv[1], keep_last=2)) as manager:
    for step in range(1, 1000):
        w = noise.at[0].set(step)
        manager.save_groups(step, {"params": {"w": w}}, {"step": step})
        if step > 1:
            print(step, flush=True)
"""


def test_kill_during_save_keeps_last_checkpoint(options):
    child = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(options.directory)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
    )
    assert child.stdout is not None
    child.stdout.readline()
    while not list(path_of(options).glob("*tmp*")):
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert list(path_of(options).glob("*tmp*")), (
        "the process was killed between two saves"
    )

    with CheckpointManager(options) as manager:
        latest = manager.latest_step
        assert latest is not None
        target = {"params": {"w": jnp.zeros(1 << 22)}}
        restored, meta = manager.saved.restore(abstract(target))
        assert meta == {"step": latest}
        noise = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
        noise[0] = latest
        assert_same(restored, {"params": {"w": jnp.asarray(noise)}})
        manager.save_groups(latest + 1, weights(), {})
    assert not list(path_of(options).glob("*tmp*"))
