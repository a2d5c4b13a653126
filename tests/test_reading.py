"""Each batch is used once and in order, no matter how a run continues in its data."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import grain.python as pygrain
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import Callback, Checkpoint, Trainer
from nnx_parallel.data import DataState, PrefetchIterator
from nnx_parallel.data.batches import mark_of
from nnx_parallel.data.position import Epochs
from nnx_parallel.data.rows import LastBatch, SmallerBatches
from nnx_parallel.errors import DataError, ParallelWarning

ROWS: Any = np.arange(48, dtype=np.float32)


def split(rows: np.ndarray, size: int = 8) -> list[np.ndarray]:
    return [rows[i : i + size, None] for i in range(0, len(rows), size)]


class Loader:
    """Shuffles with a seeded generator, like PyTorch's DataLoader."""

    def __init__(self, seed: int | None = 0, size: int = 8, num_rows: int = 48) -> None:
        self.rng, self.size = np.random.default_rng(seed), size
        self.num_rows, self.num_read = num_rows, 0

    def __len__(self) -> int:
        return -(-self.num_rows // self.size)

    def __iter__(self) -> Iterator[np.ndarray]:
        for batch in split(self.rng.permutation(ROWS[: self.num_rows]), self.size):
            self.num_read += 1
            yield batch


class Numbered(Loader):
    """Shuffles by the number of the pass, like DistributedSampler."""

    def set_epoch(self, epoch: int) -> None:
        self.rng = np.random.default_rng(epoch)


class Stream:
    """Has one position for all of its iterators."""

    def __init__(self) -> None:
        self.batches = iter(split(ROWS))

    def __iter__(self) -> Iterator[np.ndarray]:
        yield from self.batches


class WithState:
    """An iterable that has the state; its iterators have none."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        while self.next < 6:
            self.next += 1
            yield split(ROWS)[self.next - 1]
        self.next = 0

    def get_state(self) -> dict:
        return {"next": self.next}

    def set_state(self, state: dict) -> None:
        self.next = state["next"]


class Stateful(Loader):
    """Like torchdata's StatefulDataLoader: state is loaded before the iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.order, self.next, self.is_loaded = np.zeros(0), 0, False

    def __iter__(self) -> Iterator[np.ndarray]:
        if not self.is_loaded:
            self.order, self.next = self.rng.permutation(ROWS), 0
        self.is_loaded = False
        while self.next < 6:
            self.next += 1
            yield split(self.order)[self.next - 1]

    def state_dict(self) -> dict:
        rng = json.dumps(self.rng.bit_generator.state)
        return {"order": self.order, "next": self.next, "rng": rng}

    def load_state_dict(self, state: dict) -> None:
        self.order, self.next = np.array(state["order"], np.float32), state["next"]
        self.rng.bit_generator.state = json.loads(state["rng"])
        self.is_loaded = True


def grain_rows() -> Any:
    return grain.MapDataset.source([row[None] for row in ROWS]).seed(0).shuffle()


def grain_loader() -> Any:
    shards = pygrain.NoSharding()
    sampler = pygrain.IndexSampler(48, shards, shuffle=True, num_epochs=2, seed=0)
    batch = [pygrain.Batch(8)]
    source: Any = [row[None] for row in ROWS]
    return pygrain.DataLoader(data_source=source, sampler=sampler, operations=batch)


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: split(ROWS),
    "loader": Loader,
    "numbered": Numbered,
    "generator": lambda: (batch for batch in split(ROWS)),
    "with_state": WithState,
    "stateful": Stateful,
    "grain_map": lambda: grain_rows().batch(8),
    "grain_iter": lambda: grain_rows().to_iter_dataset().batch(8),
    "grain_loader": grain_loader,
}


def read(
    position: DataState,
    data: Any,
    steps: tuple[int, int],
    num_epochs: int | None = None,
    limit: int = 0,
    last_batch: LastBatch = "drop",
) -> list[list[int]]:
    """Rows of each batch that a fit uses between two steps, out of ``limit`` steps."""
    first, stop = steps
    epochs = Epochs(data, num_epochs) if num_epochs else None
    cursor = position.open(data, first, epochs=epochs, last_batch=last_batch)
    smaller = SmallerBatches(last_batch, position.num_rows, position.num_dropped)
    limit = max(limit, stop) - first
    found = []
    with PrefetchIterator(
        cursor, np.array, limit=limit, smaller=smaller, first_step=first
    ) as placed:
        for step, item in enumerate(itertools.islice(placed, stop - first), first + 1):
            position.advance(step, item)
            found.append(item.batch[:, 0].astype(int).tolist())
    return found


def joined(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def restarted(position: DataState) -> DataState:
    return DataState.from_json(json.loads(json.dumps(position.to_json())))


@pytest.mark.filterwarnings("ignore:Data is a one-shot iterator")
@pytest.mark.parametrize("how", ["restart", "made again", "same object"])
@pytest.mark.parametrize("ahead", [3, 6], ids=["whole", "stopped"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_arrive_once_in_order(kind: str, ahead: int, how: str) -> None:
    """Includes batches that were read ahead when the first fit stopped."""
    make = KINDS[kind]
    whole = read(DataState(), make(), (0, 6))
    assert sorted(joined(whole)) == list(range(48))
    position, data = DataState(), make()
    found = read(position, data, (0, 3), limit=ahead)
    position = restarted(position) if how == "restart" else position
    data = data if how == "same object" else make()
    assert found + read(position, data, (3, 6)) == whole


@pytest.mark.parametrize("how", ["restart", "made again", "same object"])
@pytest.mark.parametrize("stop", [4, 6, 9])
@pytest.mark.parametrize("make", [Loader, Numbered, Stateful, KINDS["grain_map"]])
def test_passes_continue_after_stop(make: Any, stop: int, how: str) -> None:
    whole = read(DataState(), make(), (0, 18), 3)
    position, data = DataState(), make()
    found = read(position, data, (0, stop), 2 if stop == 6 else 3)
    position = restarted(position) if how == "restart" else position
    data = data if how == "same object" else make()
    assert found + read(position, data, (stop, 18), 3) == whole
    assert position.first_step == 0


def test_stream_loses_no_batch() -> None:
    stream, position = Stream(), DataState()
    found = read(position, stream, (0, 2), limit=6)
    found += read(position, stream, (2, 4), limit=6)
    assert found + read(position, stream, (4, 6)) == read(DataState(), Stream(), (0, 6))
    # After a restart, the source itself has advanced, and begins with the next batch.
    position, stream = DataState(), Stream()
    read(position, stream, (0, 2), limit=6)
    position.marks = (*position.marks[:2], mark_of(split(ROWS)[2]))
    position = restarted(position)
    rest = Stream()
    rest.batches = iter(split(ROWS)[2:])
    assert read(position, rest, (2, 4)) == read(DataState(), split(ROWS)[2:], (0, 2))


@pytest.mark.filterwarnings("ignore:Data is a one-shot iterator")
@pytest.mark.parametrize("found", ["batch that it used last", "next batch"])
@pytest.mark.parametrize("make", [list, iter])
def test_refused_data_stays_refused(make: Any, found: str) -> None:
    """Includes an iterator, which cannot be read from its start again."""
    position, batches = DataState(), split(ROWS)
    read(position, batches, (0, 2))
    position.marks = (*position.marks[:2], mark_of(batches[2]))
    order = [0, 3, 2, 1] if "last" in found else [0, 1, 3, 2]
    position, data = restarted(position), make([batches[i] for i in order])
    for _ in range(2):
        with pytest.raises(DataError, match=f"the {found} differs"):
            read(position, data, (2, 4))


ORDER = "Each batch is used once, in order."


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (
            Loader(0),
            Loader(1),
            "its first batch differs from the one that the run has read",
        ),
        (
            split(ROWS),
            split(ROWS[[*range(8), *range(16, 48), *range(8, 16)]]),
            "the batch that it used last differs",
        ),
        (
            split(ROWS),
            split(ROWS[[*range(16), *range(24, 48), *range(16, 24)]]),
            "the next batch differs",
        ),
        (
            KINDS["grain_map"](),
            grain.MapDataset.source([r[None] for r in ROWS]).seed(1).shuffle().batch(8),
            "its first batch differs from the one that the run has read",
        ),
    ],
    ids=["first", "last", "next", "grain"],
)
def test_another_order_after_restart_raises(
    before: Any, after: Any, found: str
) -> None:
    position = DataState()
    read(position, before, (0, 2))
    if "next" in found:
        position.marks = (*position.marks[:2], mark_of(split(ROWS)[2]))
    kind = type(after).__name__
    message = (
        f"At step 2 the run cannot continue with this data ({kind}): {found}. {ORDER}"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        read(restarted(position), after, (2, 6))


def test_pass_over_starts_other_data() -> None:
    position = DataState()
    read(position, Loader(0), (0, 2))
    position.num_steps = 6
    position = restarted(position)
    position.pass_over([], num_steps=2, step=2)
    assert read(position, Loader(1), (2, 4)) == read(DataState(), Loader(1), (0, 2))


def test_other_data_starts_at_its_beginning() -> None:
    position, other = DataState(), split(ROWS[::-1])
    read(position, split(ROWS), (0, 3))
    assert read(position, other, (3, 5)) == read(DataState(), other, (0, 2))
    assert position.first_step == 3
    assert position.note.startswith("Other data from step 4 on: its first batch diff")
    # Data of another length counts as other data.
    assert read(position, other[:2], (5, 7)) == read(DataState(), other, (0, 2))
    # Numbered passes begin with pass 0.
    read(position, Numbered(), (7, 15), 2)
    found = read(position, Numbered(num_rows=40), (15, 17), 1)
    assert found == read(DataState(), Numbered(num_rows=40), (0, 2), 1)


def test_another_order_of_same_dataset_warns() -> None:
    first, second, position = Loader(0), Loader(1), DataState()
    for loader in (first, second):
        loader.dataset = ROWS  # pyright: ignore[reportAttributeAccessIssue]
    read(position, first, (0, 2))
    with pytest.warns(
        ParallelWarning, match="begins at its start: it reads the earlier"
    ):
        read(position, second, (2, 4))


def test_rewound_loader_raises() -> None:
    position, data = DataState(), Loader()
    whole = read(position, data, (0, 4), limit=6)
    with pytest.raises(DataError, match="seed it and create it again"):
        read(position, data, (2, 4))
    assert read(position, Loader(), (2, 4)) == whole[2:]


def test_late_state_raises() -> None:
    class Late(WithState):
        def __iter__(self) -> Iterator[np.ndarray]:
            while self.next < 6:
                yield split(ROWS)[self.next]
                self.next += 1

    position = DataState()
    read(position, Late(), (0, 2))
    with pytest.raises(DataError, match="the last batch comes again, so `get_state`"):
        read(restarted(position), Late(), (2, 4))


def test_state_of_other_data_raises() -> None:
    position = DataState()
    read(position, WithState(), (0, 2))
    data = grain.MapDataset.source([row[None] for row in ROWS]).batch(8)
    message = (
        f"{type(data).__name__} cannot return to the position that was saved: KeyError:"
        " 'next_index'. The position is {'next': 2};"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        read(restarted(position), data, (2, 4))


@pytest.mark.parametrize(("before", "after"), [(16, 8), (8, 16), (8, 24)])
@pytest.mark.parametrize("how", ["restart", "made again"])
@pytest.mark.parametrize("kind", ["list", "loader", "generator", "grain_iter"])
@pytest.mark.filterwarnings("ignore:Data is a one-shot iterator")
def test_another_batch_size_continues_at_next_row(
    kind: str, how: str, before: int, after: int
) -> None:
    make: Callable[[int], Any] = {
        "list": lambda size: split(ROWS, size),
        "loader": lambda size: Loader(size=size),
        "generator": lambda size: (batch for batch in split(ROWS, size)),
        "grain_iter": lambda size: grain_rows().to_iter_dataset().batch(size),
    }[kind]
    order = joined(read(DataState(), make(8), (0, 6)))
    used = 24 if before == 8 else 16
    position = DataState()
    found = read(position, make(before), (0, used // before))
    position = restarted(position) if how == "restart" else position
    # If batches do not begin at a multiple of their size, the pass ends with a smaller
    # one.
    step, count = used // before, (48 - used) // after
    found += read(position, make(after), (step, step + count))
    rows = joined(found)
    assert rows == order[: used + count * after]
    # A position in the middle of a batch can be saved and restored.
    if count > 1:
        position = DataState()
        read(position, make(before), (0, step))
        position = restarted(position)
        read(position, make(after), (step, step + 1))
        again = read(restarted(position), make(after), (step + 1, step + count))
        assert joined(again) == order[used + after : used + count * after]


@pytest.mark.parametrize("make", [Loader, Numbered])
def test_passes_continue_with_another_batch_size(make: Any) -> None:
    order = joined(read(DataState(), make(), (0, 18), 3))
    position = DataState()
    read(position, make(), (0, 9), 3)
    position = restarted(position)
    # 72 rows were used, 24 of them in the second pass. They are 4.5 batches of 16.
    found = read(position, make(size=16), (9, 13), 3)
    assert found[0] == order[72:88]
    assert joined(found[1:]) == order[96:144]  # a smaller batch was dropped
    assert position.first_step + 3 * 3 == 13


def test_positions_between_batches_raise() -> None:
    position = DataState()
    read(position, split(ROWS, 16), (0, 1))
    saved = position.to_json()
    old = {name: saved[name] for name in ("first_step", "num_steps", "num_dropped")}
    old |= {"num_rows": 16, "states": [{"next": 1}]}
    message = "1 batches of 16 rows were used, and a batch of WithState has 8."
    with pytest.raises(DataError, match=re.escape(message)):
        read(DataState.from_json(old), WithState(), (1, 2))
    message = "16 rows were used, and 3 processes with data do not divide them"
    with pytest.raises(DataError, match=re.escape(message)):
        DataState.from_json(saved).open(split(ROWS, 16), 1, shares=3)
    # Positions of earlier versions count batches. They are valid if the size is
    # unchanged.
    old |= {"num_rows": 8, "states": [None]}
    assert read(DataState.from_json(old), split(ROWS), (1, 2)) == [[*range(8, 16)]]


def test_augmented_data_keeps_its_order() -> None:
    """Images differ between passes, but labels and a mask of ones do not."""

    def batches(seed: int) -> list[dict]:
        rng = np.random.default_rng(seed)
        mask = np.ones((8, 2))
        return [{"x": rng.normal(size=(8, 2)), "y": y, "m": mask} for y in split(ROWS)]

    marks = [[mark_of(batch) for batch in batches(seed)] for seed in (0, 1)]
    state = DataState(step=2, pass_rows=16, num_rows=8)
    state.marks = (marks[0][0], marks[0][1], marks[0][2])
    assert list(state.open(batches(1), 2).skip()) != []
    state = restarted(state)
    with pytest.raises(DataError, match="the batch that it used last differs"):
        list(state.open([batches(1)[i] for i in (0, 2, 1)], 2).skip())


def augmented(seed: int, size: int, width: int = 2, **more: Any) -> list[dict]:
    """Batches whose images depend on the seed, and whose labels do not."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(48, 4, width)).astype(np.float32)
    return [
        {"x": x, "y": y} | more
        for x, y in zip(np.split(images, 48 // size), split(ROWS, size), strict=True)
    ]


@pytest.mark.parametrize("how", ["restart", "made again"])
@pytest.mark.parametrize("width", [2, 2048], ids=["small", "large"])
@pytest.mark.parametrize("seed", [0, 1], ids=["same images", "other images"])
def test_batch_size_of_several_arrays_may_change(
    seed: int, width: int, how: str
) -> None:
    """Large arrays are sampled; after a restart, images are augmented differently."""
    first, last = (mark_of(batch) for batch in augmented(0, 16, width)[:2])
    position = DataState(step=2, pass_rows=32, num_rows=16, marks=(first, last, None))
    if how == "made again" and seed == 0:
        position.pass_over(augmented(0, 16, width), 2, 2)
    else:
        position = restarted(position)
    cursor = position.open(augmented(seed, 8, width), 2)
    assert [read.batch["y"][0, 0] for read in cursor.skip()] == [0, 8, 16, 24]
    assert cursor.take().batch["y"][:, 0].tolist() == [*range(32, 40)]


def test_partly_equal_data_warns() -> None:
    """The new data has the same labels and other images."""
    data = augmented(0, 8)
    first, last = mark_of(data[0]), mark_of(data[1])
    position = DataState(step=2, pass_rows=16, num_rows=8, marks=(first, last, None))
    position.pass_over(data, 2, 2)
    with pytest.warns(ParallelWarning, match="some arrays of its first batch"):
        cursor = position.open(augmented(1, 8), 2)
    assert cursor.take().batch["y"][0, 0] == 0


@pytest.mark.filterwarnings("ignore:Data is a one-shot iterator")
def test_interrupted_skip_continues() -> None:
    class Failing(Iterator):
        def __init__(self) -> None:
            self.batches, self.fails = iter(split(ROWS)), [False, False, True]

        def __next__(self) -> np.ndarray:
            if self.fails and self.fails.pop(0):
                raise OSError("The network is away.")
            return next(self.batches)

    position, data, whole = (
        DataState(),
        Failing(),
        read(DataState(), split(ROWS), (0, 6)),
    )
    found = read(position, split(ROWS), (0, 4))
    position = restarted(position)
    with pytest.raises(OSError, match="The network is away"):
        read(position, data, (4, 6))
    assert found + read(position, data, (4, 6)) == whole


def test_marks_are_sampled_evenly() -> None:
    large = np.zeros((64, 4096), np.int32)
    mark = mark_of(large)
    for row in (0, 31, 63):
        other = large.copy()
        other[row] = 1
        assert mark_of(other) != mark
    images = np.random.default_rng(0).normal(size=(8, 3, 64, 64))
    turned = np.ascontiguousarray(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert mark_of(turned) == mark_of(images)
    assert mark_of(jnp.zeros((4, 2))) == mark_of(np.zeros((4, 2), np.float32))
    assert mark_of({"n": np.asarray(1)}) is None


class See(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        self.seen.append(int(metrics["first"]))


def loss(model: Any, batch: Any) -> Any:
    return ((model(batch) - 1) ** 2).mean() * 1e-6, {"first": batch.max()}


def make_trainer(see: See, directory: Path | None = None, **options: Any) -> Trainer:
    checkpoint = directory and Checkpoint(directory, every=1)
    options = {"loggers": (), "callbacks": [see], "checkpoint": checkpoint} | options
    options = {"loss": loss} | options
    model = SimpleNamespace(make=lambda rngs: nnx.Linear(1, 1, rngs=rngs)).make
    return Trainer(model, optax.sgd(0.1), **options)


def test_fit_continues_in_recreated_data(tmp_path: Path) -> None:
    """The Trainer counts steps and epochs over the full run."""
    whole, parts, other = See(), See(), See()
    make_trainer(whole).fit(Loader(), num_epochs=3)
    trainer = make_trainer(parts, tmp_path)
    trainer.fit(Loader(), num_epochs=1)
    trainer.fit(Loader(), num_epochs=2)
    make_trainer(parts, tmp_path).fit(Loader(), num_epochs=3)
    assert parts.seen == whole.seen
    assert len(parts.seen) == 18
    with pytest.raises(DataError, match=re.escape(ORDER)):
        make_trainer(other, tmp_path).fit(Loader(1), num_steps=20)
    resumed = make_trainer(other, tmp_path)
    resumed.fit([], num_steps=18)
    resumed.fit(Loader(1), num_steps=20)
    assert resumed.step == 20


def test_fit_continues_with_another_batch_size(tmp_path: Path) -> None:
    see, said = See(), []
    make_trainer(see, tmp_path).fit(split(ROWS, 16), num_steps=1)
    logger = SimpleNamespace(message=said.append)
    for name in ("start", "log", "finish"):
        setattr(logger, name, lambda *args, **kwargs: None)
    trainer = make_trainer(see, tmp_path, loggers=[logger])
    trainer.fit(split(ROWS), num_epochs=2)
    assert see.seen == [15, 23, 31, 39, 47, 7, 15, 23, 31, 39, 47]
    assert "Batches have 8 rows now and had 16: the data goes on at row 16." in said


INTERRUPTED = ("loader", "generator", "with_state", "stateful", "grain_iter")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("kind", [*INTERRUPTED, "grain_iterator"])
def test_fit_after_interrupt_uses_every_batch(kind: str, error: Any) -> None:
    """An interrupt or an error while the first step compiles uses no batch."""
    make = KINDS.get(kind, lambda: iter(KINDS["grain_iter"]()))
    see, errors, data = See(), [error("in the loss")], make()

    def fails_once(model: Any, batch: Any) -> Any:
        if errors:
            raise errors.pop()
        return loss(model, batch)

    trainer = make_trainer(see, loss=fails_once)
    with pytest.raises(error):
        trainer.fit(data, num_steps=4)
    trainer.fit(data, num_steps=4)
    assert see.seen == [max(rows) for rows in read(DataState(), make(), (0, 4))]


def test_interrupted_resume_continues(tmp_path: Path) -> None:
    """Ctrl-C arrives while the resumed run waits for its first batch."""

    class Slow(Loader):
        interrupts = 1

        def __iter__(self) -> Iterator[np.ndarray]:
            if self.interrupts:
                self.interrupts = 0
                raise KeyboardInterrupt
            yield from super().__iter__()

    whole, see = See(), See()
    make_trainer(whole).fit(Loader(), num_steps=6)
    make_trainer(see, tmp_path).fit(Loader(), num_steps=3)
    trainer, data = make_trainer(see, tmp_path), Slow()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(data, num_steps=6)
    trainer.fit(data, num_steps=6)
    assert see.seen == whole.seen
