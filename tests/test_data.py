"""Prefetching: batches keep their order, runs resume in the data, bad data raises."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel import FSDP
from nnx_parallel.data import (
    PrefetchIterator,
    check_batch,
    check_divisible,
    decode_state,
    encode_state,
    is_one_shot,
    place_batch,
)
from nnx_parallel.errors import BatchShapeError, DataError, DataExhaustedError
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
PREFETCHES = [0, 1, 2, 5]


def make_batches(num_batches: int, num_rows: int = 4) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((num_rows, 2), i, np.float32)} for i in range(num_batches)]


class Files:
    """Batches without a length."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        yield from make_batches(self._count)


def values(placed: PrefetchIterator[Any]) -> list[float]:
    with placed:
        return [float(item.batch["x"][0, 0]) for item in placed]


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "nnx_parallel.prefetch"]


class Counted:
    """A generator of batches that counts how many were taken from it."""

    def __init__(self, num_batches: int) -> None:
        self.pulled = 0
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for batch in make_batches(self._num_batches):
            self.pulled += 1
            yield batch


class Seeded:
    """A resumable iterator whose state has bytes, NumPy numbers and large integers."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._count = np.int64(0)

    def __iter__(self) -> Seeded:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        self._count += 1
        return {"x": self._rng.normal(size=(4, 2)).astype(np.float32)}

    def get_state(self) -> dict[str, Any]:
        rng = self._rng.bit_generator.state
        return {"count": self._count, "rng": json.dumps(rng).encode()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._count = np.int64(state["count"])
        self._rng.bit_generator.state = json.loads(state["rng"])


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert wait_until(lambda: not prefetch_threads()), (
        "a prefetching thread outlived its test"
    )


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_batches_arrive_once_in_order_and_placed(prefetch: int) -> None:
    placed = PrefetchIterator(make_batches(7), jax.device_put, prefetch=prefetch)
    with placed:
        items = list(placed)
    assert [float(item.batch["x"][0, 0]) for item in items] == list(range(7))
    assert all(isinstance(item.batch["x"], jax.Array) for item in items)
    assert {item.num_rows for item in items} == {4}
    assert all(item.wait_seconds >= 0 and item.state is None for item in items)
    assert list(placed) == []


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_two_feeds_share_generator_without_loss(prefetch: int) -> None:
    generator = iter(Counted(10))
    first = values(
        PrefetchIterator(generator, jax.device_put, limit=4, prefetch=prefetch)
    )
    second = values(
        PrefetchIterator(generator, jax.device_put, limit=5, prefetch=prefetch)
    )
    assert first + second == list(range(9))


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_feed_reads_ahead_by_prefetch(prefetch: int) -> None:
    data = Counted(50)
    with PrefetchIterator(data, jax.device_put, limit=20, prefetch=prefetch) as placed:
        for taken in range(1, 4):
            next(placed)
            assert wait_until(lambda ahead=taken + prefetch: data.pulled == ahead)
    time.sleep(0.05)
    assert data.pulled == 3 + prefetch


def test_copy_overlaps_with_step() -> None:
    def slow_place(batch: Any) -> Any:
        time.sleep(0.05)
        return batch

    waits = []
    with PrefetchIterator(make_batches(6), slow_place, prefetch=2) as placed:
        for item in placed:
            waits.append(item.wait_seconds)
            time.sleep(0.15)
    assert sum(waits[1:]) < 0.05, waits
    with PrefetchIterator(make_batches(3), slow_place, prefetch=0) as placed:
        assert all(item.wait_seconds >= 0.05 for item in placed)


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_data_error_keeps_position_and_traceback(prefetch: int) -> None:
    def broken_source() -> Iterator[Any]:
        yield from make_batches(3)
        raise FileNotFoundError("shard-3 is gone")

    seen = []
    with PrefetchIterator(broken_source(), jax.device_put, prefetch=prefetch) as placed:
        with pytest.raises(FileNotFoundError, match="shard-3 is gone") as caught:
            seen.extend(item.num_rows for item in placed)
        assert list(placed) == []
    assert len(seen) == 0 or seen == [4, 4, 4]
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "broken_source" in frames


def test_thread_ends_when_consumer_raises() -> None:
    def consume() -> None:
        with PrefetchIterator(
            itertools.cycle(make_batches(2)), jax.device_put
        ) as placed:
            for _ in placed:
                raise KeyError("in the consumer")

    with pytest.raises(KeyError, match="in the consumer"):
        consume()
    assert not prefetch_threads()


def test_thread_ends_when_feed_is_collected() -> None:
    placed = PrefetchIterator(itertools.cycle(make_batches(2)), jax.device_put)
    next(placed)
    assert prefetch_threads()
    del placed
    gc.collect()
    assert not prefetch_threads()


def test_process_exits_with_open_feed() -> None:
    script = """
import itertools
import jax, numpy as np
from nnx_parallel.data import PrefetchIterator
placed = PrefetchIterator(itertools.cycle([np.zeros(4)]), jax.device_put)
next(placed)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()


@pytest.mark.deep
def test_closing_feed_of_blocked_data_warns() -> None:
    release = threading.Event()

    def blocking() -> Iterator[Any]:
        yield from make_batches(1)
        release.wait()

    placed = PrefetchIterator(blocking(), jax.device_put)
    next(placed)
    with pytest.warns(UserWarning, match=re.escape("did not return from `next`")):
        placed.close()
    release.set()


def test_close_ends_fast_forward_and_repeats() -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return iter(itertools.cycle(make_batches(2)))

    placed = PrefetchIterator(Endless(), jax.device_put, skip=10**12)
    placed.close()
    placed.close()
    assert not prefetch_threads()
    with pytest.raises(StopIteration):
        next(placed)


def test_taken_batches_are_not_kept_alive() -> None:
    shape = (7, 11, 13)
    data = (np.zeros(shape, np.float32) for _ in range(10))
    gc.collect()
    with PrefetchIterator(data, jax.device_put, limit=10, prefetch=2) as placed:
        for done in range(1, 11):
            next(placed)
            ahead = min(2, 10 - done)
            assert wait_until(
                lambda ahead=ahead: (
                    sum(a.shape == shape for a in jax.live_arrays()) == ahead
                )
            )


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_resume_restores_position_of_taken_batch(prefetch: int) -> None:
    with PrefetchIterator(
        Seeded(), jax.device_put, limit=9, prefetch=prefetch
    ) as placed:
        items = list(placed)
    for done in (1, 4, 8):
        state = json.loads(json.dumps(items[done - 1].state))
        assert state["count"] == done
        placed = PrefetchIterator(
            Seeded(1), jax.device_put, limit=9 - done, skip=done, state=state
        )
        with placed:
            for item, expected in zip(placed, items[done:], strict=True):
                np.testing.assert_array_equal(item.batch["x"], expected.batch["x"])
                assert item.state == expected.state


def test_resume_fast_forwards_plain_iterable() -> None:
    placed = PrefetchIterator(make_batches(9), jax.device_put, limit=3, skip=5)
    assert values(placed) == [5, 6, 7]


def test_resume_of_iterator_warns_and_skips() -> None:
    message = re.escape("its next 2 batches are skipped")
    with pytest.warns(UserWarning, match=message) as found:
        placed = PrefetchIterator(
            iter(make_batches(5)), jax.device_put, limit=2, skip=2
        )
    assert found[0].filename == __file__
    assert values(placed) == [2, 3]


def test_state_for_stateless_data_warns_and_skips() -> None:
    with pytest.warns(UserWarning, match=re.escape("the data is now a list without")):
        placed = PrefetchIterator(
            make_batches(5), jax.device_put, limit=2, skip=2, state={"n": 2}
        )
    assert values(placed) == [2, 3]


def test_is_one_shot_detects_iterators() -> None:
    assert is_one_shot(iter([]))
    assert is_one_shot(itertools.cycle([1]))
    assert is_one_shot(i for i in range(3))
    assert not is_one_shot([])
    assert not is_one_shot(Counted(1))
    assert not is_one_shot(Seeded())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_exhausted_data_error_explains_repeating(prefetch: int) -> None:
    placed = PrefetchIterator(
        Files(5), jax.device_put, limit=6, skip=2, prefetch=prefetch
    )
    message = (
        "Data ended before step 6 of 8: Files gave 5 batches here, 2 of them skipped "
        "to resume. Every step needs a batch. To repeat the data, pass an object whose "
        "`__iter__` never ends (`while True: yield from ...`), "
        "`itertools.cycle(batches)`, or a Grain dataset with `.repeat()`."
    )
    with placed, pytest.raises(DataExhaustedError, match=re.escape(message)):
        list(placed)


def test_data_exhausted_while_skipping_raises() -> None:
    placed = PrefetchIterator(Files(2), jax.device_put, limit=6, skip=3)
    message = "before step 4 of 9: Files gave 2 batches here, 2 of them skipped"
    with placed, pytest.raises(DataExhaustedError, match=re.escape(message)):
        list(placed)


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (2, "before step 6 of 8: list gave 5 batches here, 2 of them skipped"),
        (7, "before step 8 of 13: list gave 5 batches here, 5 of them skipped"),
    ],
)
def test_short_list_raises_at_once(skip: int, message: str) -> None:
    with pytest.raises(DataExhaustedError, match=re.escape(message)):
        PrefetchIterator(make_batches(5), jax.device_put, limit=6, skip=skip)


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_data_may_reuse_its_buffer(prefetch: int) -> None:
    def one_buffer() -> Iterator[np.ndarray]:
        memory = np.zeros(8 * 1024 + 16, np.float32)
        # Aligned to 64 bytes, so that jax does not copy.
        start = -memory.ctypes.data % 64 // 4
        buffer = memory[start : start + 8 * 1024].reshape(8, 1024)
        for i in range(6):
            buffer[:] = i
            yield buffer
        buffer[:] = -1

    layout = FSDP().layout(FSDP().make_mesh())
    place = functools.partial(place_batch, layout=layout)
    with PrefetchIterator(one_buffer(), place, prefetch=prefetch) as placed:
        found = [np.unique(item.batch).tolist() for item in list(placed)]
    assert found == [[i] for i in range(6)]


def test_exhausted_iterator_is_named_as_cause() -> None:
    placed = PrefetchIterator(iter([]), jax.device_put, limit=1, first_step=10)
    message = "before step 11 of 11: list_iterator gave 0 batches here, 0 of them"
    with placed, pytest.raises(DataExhaustedError, match=re.escape(message)) as caught:
        list(placed)
    assert "It is an iterator, which may have been read before." in str(caught.value)


DATA_ERRORS = {
    "mapping": ({"x": np.zeros(4)}, "Data is one dict. It must be an iterable of"),
    "array": (np.zeros((4, 2)), "Data is one ndarray. It must be an iterable of"),
    "number": (3, "Data of type int cannot be iterated over. It must be an iterable"),
}


@pytest.mark.parametrize("name", DATA_ERRORS)
def test_invalid_data_raises(name: str) -> None:
    data, message = DATA_ERRORS[name]
    with pytest.raises(DataError, match=re.escape(message)):
        PrefetchIterator(data, jax.device_put)


def test_negative_prefetch_raises() -> None:
    message = "prefetch=-1. It must be 0 or more."
    with pytest.raises(ValueError, match=re.escape(message)):
        PrefetchIterator([], jax.device_put, prefetch=-1)


BATCH_ERRORS = {
    "text": ({"text": np.array(["hello"])}, DataError, "batch['text'] of batch 3 has "
             "dtype <U5. Leaves must hold booleans or numbers"),
    "object": ([np.array([None])], DataError, "batch[0] of batch 3 has dtype object"),
    "date": (np.zeros(2, "M8[s]"), DataError, "batch of batch 3 has dtype datetime64"),
    "python": ({"x": [1, 2]}, DataError, "batch['x'][0] of batch 3 has type int. "
               "Leaves must be NumPy or JAX arrays"),
    "scalar": ({"x": np.float32(1)}, DataError, "batch['x'] of batch 3 has "
               "type float32. Leaves must be"),
    "0-d": ({"x": np.array(1.0)}, DataError, "Batch 3 of type dict holds no arrays "
            "with rows."),
    "empty": ({}, DataError, "Batch 3 of type dict holds no arrays."),
    "no rows": ({"x": np.zeros((0, 2))}, BatchShapeError, "batch['x'] of batch 3 has "
                "no rows"),
    "rows": ({"x": np.zeros((4, 2)), "y": np.zeros(3)}, BatchShapeError, "Arrays of "
             "batch 3 disagree about the number of rows (batch['x']: 4, "
             "batch['y']: 3). Dim 0 of every array is the rows of the global batch; "
             "give an array that all rows share as nnx_parallel.data.Shared(array), "
             "such as the edges of a graph."),
    "int64": ({"id": np.array([0, 2**31])}, DataError, "batch['id'] of batch 3 has "
              "dtype int64 and holds 2147483648. JAX stores it as int32, from "
              "-2147483648 to 2147483647, and would wrap it"),
    "below": ([np.array([-(2**31) - 1])], DataError, "and holds -2147483649."),
    "order": ([np.zeros(2, ">i4")], DataError, "batch[0] of batch 3 has dtype >i4, "
                                               "whose byte order is not this "
                                               "machine's. JAX does not take such "
                                               "arrays: convert it with "
                                               "x.astype('int32')."),
    "uint64": ([np.array([2**32], np.uint64)], DataError, "and holds 4294967296. JAX "
               "stores it as uint32, from 0 to 4294967295"),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCH_ERRORS)
def test_unusable_batch_raises(name: str) -> None:
    batch, kind, message = BATCH_ERRORS[name]
    with pytest.raises(kind, match=re.escape(message)):
        check_batch(batch, index=3)


def test_batch_of_all_usable_dtypes_passes() -> None:
    batch = {
        "int64": np.array([2**31 - 1, -(2**31)] * 2),
        "uint32": np.full(4, 2**32 - 1, np.uint32),
        "float64": np.zeros((4, 1)),
        "bool": (np.ones(4, bool), None),
        "bfloat16": np.zeros(4, jnp.bfloat16),
        "complex": np.zeros(4, np.complex64),
        "jax": jnp.zeros((4, 2)),
        "keys": jax.random.split(jax.random.key(0), 4),
    }
    assert check_batch(batch) == 4
    placed = PrefetchIterator([batch, batch], jax.device_put)
    with placed:
        found = [item.batch for item in placed]
    np.testing.assert_array_equal(found[1]["int64"], batch["int64"])


CHANGES = {
    "rows": ({"x": np.zeros((3, 2), np.float32)}, "batch['x'] of batch 11 has shape "
             "(3, 2) and dtype float32, but the first batch had (4, 2) and "),
    "dtype": ({"x": np.zeros((4, 2), int)}, "has shape (4, 2) and dtype int32, but"),
    "structure": ({"y": np.zeros((4, 2))}, "Batch 11 holds [\"batch['y']\"] but the "
                  "first batch held [\"batch['x']\"]."),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changed_batch_structure_raises(name: str) -> None:
    other, message = CHANGES[name]
    data = [*make_batches(1), other]
    with PrefetchIterator(data, jax.device_put, first_step=10) as placed:
        next(placed)
        with pytest.raises(BatchShapeError, match=re.escape(message)):
            next(placed)
    with PrefetchIterator(data, jax.device_put, uniform=False) as placed:
        assert [item.num_rows for item in placed] == [
            4,
            len(next(iter(other.values()))),
        ]


def test_float64_batch_matches_float32_batch() -> None:
    data = [{"x": np.zeros((4, 2))}, *make_batches(1)]
    assert values(PrefetchIterator(data, jax.device_put)) == [0, 0]


def test_indivisible_rows_raise() -> None:
    axis_sizes = {"data": 2, "fsdp": 2}
    check_divisible(32, 4, axis_sizes)
    check_divisible(5, 1, {})
    message = (
        "Batch of 30 rows cannot be split: 4 microbatches * data=2 * fsdp=2 need a "
        "multiple of 16 rows. Nearest: 16, 32."
    )
    with pytest.raises(BatchShapeError, match=re.escape(message)):
        check_divisible(30, 4, axis_sizes)
    message = "cannot be split: 1 microbatch * data=8 need a multiple of 8 rows. " \
        "Nearest: 8."  # fmt: skip
    with pytest.raises(BatchShapeError, match=re.escape(message)):
        check_divisible(3, 1, {"data": 8})


@pytest.mark.parametrize(
    "state",
    [
        {"next_index": 3, "nested": {"list": [1, 2.5, None, True, "text"]}},
        b"\x00\xff raw",
        {"bytes": "a dict that looks like an encoded one"},
        {"dict": {"bytes": b"and one around it"}},
        {"bytes": {"dict": {}}},
        {"rng": np.random.default_rng(0).bit_generator.state},
        {},
    ],
)
def test_states_survive_json(state: Any) -> None:
    encoded = encode_state(state)
    assert decode_state(json.loads(json.dumps(encoded))) == state


def test_encode_state_converts_numpy_values() -> None:
    state = {"n": np.int64(3), "f": np.float32(0.5), "a": np.arange(2), "t": (1,)}
    encoded = encode_state(state)
    assert encoded == {"n": 3, "f": 0.5, "a": [0, 1], "t": [1]}
    assert type(encoded["n"]) is int


@pytest.mark.parametrize("state", [{"x": object()}, {1: 2}, {"x": {1, 2}}])
def test_unserializable_state_raises(state: Any) -> None:
    message = "A position must be made of numbers, strings, bytes, None, lists, and"
    with pytest.raises(DataError, match=re.escape(message)):
        encode_state(state)


def grain_dataset(kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        grain = pytest.importorskip("grain.python", reason="Grain is not installed")
    source = np.arange(20, dtype=np.int32)
    if kind == "DataLoader":
        sampler = grain.IndexSampler(
            20, shuffle=True, seed=7, shard_options=grain.NoSharding()
        )
        operations = [grain.Batch(8)]
        return grain.DataLoader(
            data_source=source, sampler=sampler, operations=operations, worker_count=0
        )
    dataset = grain.MapDataset.source(source).seed(7).shuffle().repeat().batch(8)
    return dataset if kind == "MapDataset" else dataset.to_iter_dataset()


@pytest.mark.parametrize("kind", ["MapDataset", "IterDataset", "DataLoader"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_grain_resumes_within_epoch(kind: str, prefetch: int) -> None:
    with PrefetchIterator(
        grain_dataset(kind), jax.device_put, limit=11, prefetch=prefetch
    ) as placed:
        items = list(placed)
    # After 32 rows, the position is in the second epoch of 20 rows.
    state = json.loads(json.dumps(items[3].state))
    with PrefetchIterator(
        grain_dataset(kind), jax.device_put, limit=7, skip=4, state=state
    ) as placed:
        resumed = list(placed)
    for item, expected in zip(resumed, items[4:], strict=True):
        np.testing.assert_array_equal(item.batch, expected.batch)
        assert item.state == expected.state
    epoch = np.concatenate([np.asarray(item.batch) for item in items])[:20]
    assert sorted(epoch) == list(range(20))
