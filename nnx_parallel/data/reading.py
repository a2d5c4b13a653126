"""The place of a run in its data: where a fit continues, and whether the data is right.

Data is recognised by its content, not by the identity of its object. A run counts the
rows that it has used and keeps checksums of three batches: the first batch, the last
batch that was used, and the batch after that. The next fit compares them, in the same
process or after a restart.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax

from nnx_parallel.data.batches import Mark, is_same_array, is_same_content, mark_of
from nnx_parallel.data.position import (
    Epochs,
    Resumable,
    StateDict,
    decode_state,
    encode_state,
    is_one_shot,
    num_batches_of,
    resumable_of,
    returned_batches,
    warn_of_skipping,
)
from nnx_parallel.data.rows import (
    END,
    LastBatch,
    Pad,
    join_batches,
    rows_at_ends,
    rows_of,
    take_rows,
)
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.errors import DataError, ParallelWarning, warn_user


class Read(NamedTuple):
    """A batch as the data gave it, or `END`.

    Attributes:
        batch: The batch.
        epoch: Number of the pass that the batch belongs to.
        state: Position of the data after the batch, as a JSON value.
    """

    batch: Any
    epoch: int = 0
    state: Any = None


@dataclass(frozen=True, kw_only=True)
class Position:
    """The place of a batch in the data.

    Attributes:
        num_rows: Rows of the batch in this process.
        state: Position of the data after this batch, as a JSON value; ``None`` if the
            data is not resumable.
        num_dropped: Number of smaller batches that were left out so far.
        epoch: Number of the pass over the data.
        pass_rows: Number of rows of this pass that were read, including this batch.
        first: Mark of the first batch of the data, or of this pass if passes are
            numbered.
        mark: Mark of this batch.
    """

    num_rows: int = 0
    state: Any = None
    num_dropped: int = 0
    epoch: int = 0
    pass_rows: int = 0
    first: Mark | None = None
    mark: Mark | None = None


@dataclass(frozen=True)
class Expected:
    """Marks that a continued fit compares with the batches that it reads.

    Attributes:
        first: Mark of the first batch.
        last: Mark of the batch that was used last.
        next: Mark of the batch after ``last``, if it was read.
        is_restored: True if the data was moved to a saved position in this pass.
    """

    first: Mark | None = None
    last: Mark | None = None
    next: Mark | None = None
    is_restored: bool = False


@dataclass(eq=False)
class Cursor:
    """Data that is being read, pass after pass; the next fit may continue with it.

    One thread takes batches. The thread that uses the batches moves the place.

    Attributes:
        data: The data of one pass.
        epochs: The passes; with ``None`` the data is read once.
        place: The place of the newest batch that was used.
        step: Step of the run at this place.
        skips_to: Place to skip to first: the number of a pass, and rows in that pass.
        skips: Number of batches to skip after that.
        expected: Marks to compare; with ``None`` nothing is compared.
        is_started: True once a fit has begun to read the data.
        is_broken: True if reading raised an error, or if a skip was not completed.
        refusal: Why the run cannot continue with this data, once that is known.
        returned: Batches that were read but not used; they are read again first.
        ahead: A pair for each batch that is read but not yet used: its mark and a list.
            If batches have to be returned when the fit ends, the list has this batch
            and the smaller batches before it. Otherwise the list is empty.
    """

    data: Any
    epochs: Epochs | None = None
    place: Position = field(default_factory=Position)
    step: int = 0
    skips_to: tuple[int, int] | None = None
    skips: int = 0
    expected: Expected | None = None
    is_started: bool = False
    is_broken: bool = False
    refusal: str | None = None
    _iterator: Any = None
    _rest: Any = None  # rows that are left of a batch that was cut
    _size: int = 0
    _cut_epoch: int = 0

    def __post_init__(self) -> None:
        self._reading = self.place.epoch
        self.returned: deque[Read] = deque()
        if is_one_shot(self.data):
            self.returned = returned_batches(self.data)
        self._pending: deque[Read] = deque()
        self.ahead: deque[tuple[Mark | None, list[Read]]] = deque()
        self.open()

    @property
    def is_numbered(self) -> bool:
        """True if a pass can be read without the passes before it."""
        return self.epochs is not None and self.epochs.is_numbered

    @property
    def is_kept(self) -> bool:
        """True if the next fit continues with the same iterator.

        A list is read again from its start, and so is data after an error. If another
        iterator can be moved to the position, the next fit does not need this iterator.
        """
        if self.data is self._iterator:  # an iterator cannot start again
            return True
        is_read_again = isinstance(self.data, list | tuple) or self.is_broken
        return not is_read_again and self.resumable is not self._iterator

    def go_on(self, step: int, epochs: Epochs | None) -> None:
        """Prepares the next fit, which begins at ``step``."""
        self.skips += step - self.step
        self.step, self.epochs = step, epochs

    def advance(self, step: int, place: Position) -> None:
        """Moves the place to the end of the batch that ``step`` has used."""
        self.step, self.place = step, place
        if self.ahead:
            self.ahead.popleft()

    def give_back(self) -> None:
        """Returns the batches that were read ahead, for the next reader."""
        for _, reads in reversed(self.ahead):
            given = [read for read in reads if read.batch is not END]
            self.returned.extendleft(reversed(given))
        self.ahead.clear()

    def skip_batches(self, count: int) -> None:
        """Skips batches of the data without comparing any."""
        self.expected, self.place = None, Position(first=self.place.first)
        epoch = 0
        if self.epochs is not None and self.is_numbered:
            epoch, count = divmod(count, self.epochs.num_batches)
        if epoch != self._reading:
            self.returned.clear()
            self.open(epoch)
        self.skips = count

    @property
    def resumable(self) -> Resumable | None:
        """The methods that get and set the position, or ``None``."""
        if self.epochs is None or self.epochs.repeats:
            return resumable_of(self._iterator) or resumable_of(self.data)
        return resumable_of(self.data)

    def open(self, epoch: int | None = None) -> None:
        """Begins a pass; by default the current pass."""
        self._reading = self._reading if epoch is None else epoch
        if self.epochs and self.epochs.repeats:
            self._iterator = iter(self.data.repeat(self.epochs.count))
        else:
            if self.epochs:
                self.epochs.begin(self._reading)
            self._iterator = iter(self.data)

    def restore(self, saved: Any) -> None:
        """Moves to a saved position.

        Raises:
            DataError: If the data has another kind of position.
        """
        methods, state = self.resumable, decode_state(saved)
        self.returned.clear()
        try:
            if methods is None:
                return
            methods.set_state(state)
            owner = methods.data if isinstance(methods, StateDict) else methods
            if owner is self._iterator:
                return
            # A state has to be loaded before the iteration begins
            # (docs/library-notes.md, "torchdata").
            self.open()
            if owner is methods and encode_state(methods.get_state()) != saved:
                methods.set_state(state)
        except Exception as error:  # any class (docs/library-notes.md, "Grain")
            raise DataError(
                f"{type(self.data).__name__} cannot return to the position that was "
                f"saved: {type(error).__name__}: {error}. The position is "
                f"{str(state)[:200]}; it came from `get_state` of other data, or of "
                "another version of this data. Resume with the same kind of data. To "
                "begin other data at its start, first call fit with the earlier data "
                "and num_steps= the step of the checkpoint; that call reads nothing."
            ) from error

    def take(self) -> Read:
        """Returns the next batch, or `END`, with its pass and position."""
        if self.returned:
            return self.returned.popleft()
        read = self._pending.popleft() if self._pending else self._read()
        if self._rest is None:
            return read
        # Once a batch was cut, each batch begins with the rows left from the last one.
        rest, missing = self._rest, self._size - rows_of(self._rest)
        if read.batch is END or read.epoch != self._cut_epoch:
            self._pending.append(read)
            self._rest = None
            return Read(rest, self._cut_epoch)
        found = rows_of(read.batch)
        batch = join_batches(rest, take_rows(read.batch, 0, missing))
        self._rest = take_rows(read.batch, missing, found) if found > missing else None
        return Read(batch, read.epoch)

    def _read(self) -> Read:
        try:
            while True:
                batch = next(self._iterator, END)
                if batch is not END:
                    return Read(batch, self._reading, self._state())
                epochs = self.epochs
                if epochs is None or epochs.repeats:
                    break
                if self._reading + 1 >= epochs.count:
                    break
                self.open(self._reading + 1)
        except BaseException:
            self.is_broken = True
            raise
        return Read(END, self._reading)

    def _state(self) -> Any:
        methods = self.resumable
        return None if methods is None else encode_state(methods.get_state())

    def peek(self) -> tuple[Mark | None, int]:
        """Returns the next batch's mark and number of rows, but does not take it."""
        read = self.take()
        if read.batch is END:
            self._pending.appendleft(read)
            return None, 0
        self.returned.appendleft(read)
        return mark_of(read.batch), rows_of(read.batch)

    def skip(self) -> Iterator[Read]:
        """Reads the batches before the place, and checks that the last one is right."""
        if self.refusal is not None:
            raise DataError(self.refusal)
        if self.skips_to is None and not self.skips:
            return
        self.is_broken = True  # until the skip is complete
        epoch, rows = self.skips_to or (0, 0)
        while (self.place.epoch, self.place.pass_rows) < (epoch, rows):
            read = self._pass_by()
            if self.place.epoch > epoch:
                self._agree(self._problem(f"pass {epoch} has fewer rows"))
            over = self.place.pass_rows - rows if self.place.epoch == epoch else -1
            if over >= 0:
                last = mark_of(self._cut(read, over) if over else read.batch)
                self.place = replace(self.place, pass_rows=rows)
                self._agree(self._compare_last(last))
            yield read
        self.skips_to = None
        while self.skips:
            self.skips, self.expected = self.skips - 1, None
            yield self._pass_by()
        self.is_broken = False

    def _pass_by(self) -> Read:
        """Reads the next batch, and moves the place to the end of that batch."""
        read, place = self.take(), self.place
        rows = place.pass_rows if read.epoch == place.epoch else 0
        self.place = replace(
            place,
            epoch=read.epoch,
            pass_rows=rows + rows_of(read.batch),
            first=self.first_of(read, place.epoch, place.first),
        )
        return read

    def place_after(self, read: Read, place: Position) -> Position:
        """Returns the place at the end of ``read``, which was read at ``place``."""
        rows = place.pass_rows if read.epoch == place.epoch else 0
        return Position(
            state=read.state,
            epoch=read.epoch,
            pass_rows=rows + rows_of(read.batch),
            first=self.first_of(read, place.epoch, place.first),
            mark=mark_of(read.batch),
        )

    def count_skipped(self) -> int:
        """Returns the number of batches of a list that are skipped."""
        if self.skips_to is None:
            return self.skips
        count = rows = 0
        for batch in self.data:
            if rows >= self.skips_to[1]:
                break
            rows, count = rows + rows_of(batch), count + 1
        return count + self.skips

    def first_of(self, read: Read, epoch: int, first: Mark | None) -> Mark | None:
        """Returns the first batch's mark, if ``read`` comes after pass ``epoch``.

        If passes are numbered, each pass has a first batch; otherwise ``first`` stays
        the same once it is known.
        """
        is_first = first is None or (read.epoch != epoch and self.is_numbered)
        return mark_of(read.batch) if is_first else first

    def _cut(self, read: Read, over: int) -> Any:
        """Keeps the last ``over`` rows of a batch for later; returns the other rows."""
        self._size, self._cut_epoch = rows_of(read.batch), read.epoch
        self._rest = take_rows(read.batch, self._size - over, self._size)
        return take_rows(read.batch, 0, self._size - over)

    def compare_next(self, mark: Mark | None) -> None:
        """Compares the first batch that is read; raises an error on all processes."""
        expected, self.expected = self.expected, None
        if expected is None:
            return
        first, last, following = expected.first, expected.last, expected.next
        problem = None
        if mark and following and last:
            if not is_same_content(mark, following, last, row=1):
                problem = self._problem("the next batch differs")
        elif expected.is_restored and mark and mark == last != first and first:
            problem = self._problem(
                "the last batch comes again, so `get_state` returns the position of "
                "the batch itself instead of the next one"
            )
        self._agree(problem)

    def _compare_last(self, mark: Mark | None) -> str | None:
        expected = self.expected or Expected()
        last, first = expected.last, expected.first
        if mark and last and first and not is_same_content(mark, last, first, row=2):
            return self._problem("the batch that it used last differs")
        return None

    def _agree(self, problem: str | None) -> None:
        """Raises `DataError` on all processes if any process has a problem."""
        for found in allgather_object("place in the data", problem):
            if found is not None:
                # The next fit must not continue in data that was partly read.
                self.refusal, self.is_broken = found, True
                raise DataError(found)

    def _problem(self, found: str) -> str:
        return order_problem(self.data, self.step, found)


def order_problem(data: object, step: int, found: str) -> str:
    """Returns the text of a `DataError` about data that a run cannot continue with."""
    return (
        f"At step {step} the run cannot continue with this data "
        f"({type(data).__name__}): {found}. Each batch is used once, in order. If the "
        "order has changed (an unseeded shuffle or augmentation, or a loader that was "
        "read before), seed it and create it again. To begin other data at its start, "
        f"first call fit(earlier_data, num_steps={step}) in a new process; that call "
        "reads nothing."
    )


_COUNTS = ("first_step", "num_steps", "num_dropped", "num_rows")
_PLACE = ("step", "epoch", "pass_rows", "shares")
"""Fields of a `DataState` in a checkpoint that are the same on all processes."""


@dataclass
class DataState:
    """The position of a run in its data.

    Rows are counted from the step at which the run began to read its present data.

    A later fit may get a new data object. This object counts as the same data if its
    first batch is the same, and its length too if it has one. Then the fit continues
    where the run was. If a fit in the same process gets other data, that data is read
    from its start. After a restart, or with the same object, the data must be the same;
    anything else is an error.

    Attributes:
        first_step: Step at which the present data began.
        state: `Position.state` of the newest batch that a step has used.
        num_steps: Last step of the fit that reads the present data; 0 if unknown.
        num_dropped: Number of smaller batches of the present data that no step used.
        num_rows: Rows of a batch in this process; 0 if unknown.
        step: Step that used the newest batch.
        epoch: Number of the pass that this batch belongs to.
        pass_rows: Rows of that pass that this process has read; -1 if unknown.
        shares: Number of parts into which the processes split a batch.
        marks: Marks of the first, the last and the next batch of this process.
        note: A message about the data, shown at the beginning of a fit.
    """

    first_step: int = 0
    state: Any = None
    num_steps: int = 0
    num_dropped: int = 0
    num_rows: int = 0
    step: int = 0
    epoch: int = 0
    pass_rows: int = 0
    shares: int = 1
    marks: tuple[Mark | None, Mark | None, Mark | None] = (None, None, None)
    note: str = field(default="", init=False)
    _passed: int = field(default=0, init=False)  # last step before the present data
    _data: Any = field(default=None, init=False)
    _is_read: bool = field(default=False, init=False)
    _cursor: Cursor | None = field(default=None, init=False)

    def pass_over(self, data: Any, num_steps: int, step: int) -> None:
        """Records that an earlier process completed a fit of ``data`` to ``num_steps``.

        The position belongs to this data, unless a later fit to more steps moved it.
        """
        is_last = self.first_step < num_steps >= min(self.num_steps, step)
        if self._data is None and is_last:
            self._data = data
        self._passed = num_steps

    def passed_steps(self, num_steps: int) -> int:
        """Returns the last step of a fit of ``num_steps``, if a restart skips this fit.

        Returns 0 if a restart does not skip it.
        """
        earlier = self._passed + num_steps
        return earlier if self._data is None and earlier <= self.first_step else 0

    def advance(self, step: int, position: Position) -> None:
        """Moves the place to the end of the batch that ``step`` has used."""
        self.state, self.num_dropped = position.state, position.num_dropped
        self.num_rows, self.step = position.num_rows, step
        self.epoch, self.pass_rows = position.epoch, position.pass_rows
        self.marks = position.first, position.mark, None
        if self._cursor is not None:
            self._cursor.advance(step, position)

    def open(
        self,
        data: Any,
        step: int,
        *,
        epochs: Epochs | None = None,
        last_batch: LastBatch | None = None,
        shares: int = 1,
    ) -> Cursor:
        """Opens data for a fit that begins at ``step``, at the place of the run.

        All processes call this.

        Raises:
            DataError: If this data differs from the batches that the run has used, or
                if the place cannot be found.
        """
        same_object = self._data is data
        is_other = self._data is not None and not same_object
        kept = None if is_other else self._kept(step)
        goes_on = same_object and self._is_read and is_one_shot(data)
        before, self._data, self._is_read = self._data, data, True
        if not all(allgather_object("data that is open", kept is not None)):
            kept = None
        if kept is not None:
            kept.go_on(step, epochs)
            return kept
        self.note = ""
        if is_other and self._is_at_start:
            self._restart(step)
        first = self.epoch if epochs is not None and epochs.is_numbered else 0
        cursor = Cursor(data, epochs, Position(epoch=first), step)
        self._cursor = cursor
        if goes_on:  # the generator is already at the batch after the earlier fit
            cursor.place = self._place
        elif not (self._is_at_start and step == self.step):
            known = before if is_other else None
            self._find(cursor, step, known, last_batch, shares)
        self.shares = shares
        return cursor

    @property
    def _is_at_start(self) -> bool:
        return self.step == self.first_step and not self.pass_rows

    @property
    def _place(self) -> Position:
        return Position(
            num_rows=self.num_rows,
            num_dropped=self.num_dropped,
            epoch=self.epoch,
            pass_rows=max(self.pass_rows, 0),
            first=self.marks[0],
            mark=self.marks[1],
        )

    def _restart(self, step: int) -> None:
        self.first_step = self.step = step
        self.state, self.num_dropped, self.num_rows = None, 0, 0
        self.epoch = self.pass_rows = 0
        self.marks = (None, None, None)

    def _kept(self, step: int) -> Cursor | None:
        """Returns the open data, if the run can continue with it."""
        cursor = self._cursor
        if cursor is None or cursor.data is not self._data or cursor.step > step:
            return None
        return cursor if cursor.is_kept or not cursor.is_started else None

    def _find(
        self,
        cursor: Cursor,
        step: int,
        before: Any,
        last_batch: LastBatch | None,
        shares: int,
    ) -> None:
        """Moves to the place of the run, if the data's first batch is the right one."""
        found, num_rows = cursor.peek()
        first, last, following = self.marks
        is_same, is_next, resembles = before is None, False, False
        why = "its first batch differs from the first batch of the earlier data"
        if found is not None and first is not None:
            resembles = is_same_content(found, first, last or first, row=1)
            is_same = resembles if before is None else _begins_alike(found, first)
            resembles &= not is_same and first != last and found[0] == first[0]
            lengths = num_batches_of(cursor.data), num_batches_of(before)
            if before is not None and is_same and found[0] == first[0]:
                is_same = lengths[0] == lengths[1]
                why = "it has {} batches, and the earlier data had {}".format(*lengths)
            is_next = found == following
        verdicts = allgather_object("first batch of the data", [is_same, is_next])
        is_same, is_next = map(all, zip(*verdicts, strict=True))
        if is_same:
            if before is None and is_one_shot(cursor.data):
                num_batches = step - self.first_step + self.num_dropped
                warn_of_skipping(cursor.data, num_batches)
            self._move(cursor, step, found, num_rows, last_batch, shares)
        elif before is not None:
            self._begin(cursor, step, before, why, resembles=resembles)
        elif is_next:  # a stream that is already at the next batch
            cursor.place = self._place
        else:
            what = "its first batch differs from the one that the run has read"
            raise DataError(order_problem(cursor.data, step, what))

    def _begin(
        self, cursor: Cursor, step: int, before: Any, why: str, *, resembles: bool
    ) -> None:
        self._restart(step)
        self.note = f"Other data from step {step + 1} on: {why}."
        if cursor.place.epoch:
            cursor.returned.clear()
            cursor.open(0)
            cursor.place = Position()
        dataset = getattr(cursor.data, "dataset", None)
        has_dataset = dataset is not None and dataset is getattr(before, "dataset", 0)
        if has_dataset or resembles:
            found = (
                "some arrays of its first batch equal the earlier fit's, and others "
                "differ"
            )
            if has_dataset and not resembles:
                found = "it reads the earlier fit's dataset, in another order"
            warn_user(
                f"From step {step + 1} on {type(cursor.data).__name__} begins at its "
                f"start: {found}. To go on where the earlier fit ended, pass the same "
                "object, or give shuffle and augmentation a seed.",
                ParallelWarning,
            )

    def _move(
        self,
        cursor: Cursor,
        step: int,
        first: Mark | None,
        num_rows: int,
        last_batch: LastBatch | None,
        shares: int,
    ) -> None:
        old, new = self.num_rows * (self.shares or shares), num_rows * shares
        is_resized = bool(old and new and old != new)
        more, batches = step - self.step, step - self.first_step + self.num_dropped
        self._share(shares, num_rows or self.num_rows)
        cursor.expected = Expected(*self.marks)
        start = cursor.place.epoch
        cursor.place = replace(self._place, first=self.marks[0] or first)
        kind = type(cursor.data).__name__
        if self.state is not None and not is_resized and more >= 0:
            if cursor.resumable is not None:
                cursor.restore(self.state)
                is_restored = cursor.epochs is None
                cursor.expected = replace(cursor.expected, is_restored=is_restored)
                cursor.skips = more
                return
            warn_user(
                "The checkpoint holds the position of a resumable iterator, but the "
                f"data is now a {kind} without `get_state` and `set_state`. Its first "
                f"{batches} batches are skipped instead.",
            )
        if self.pass_rows < 0 or more < 0:
            if is_resized:
                raise DataError(
                    f"{batches} batches of {old} rows were used, and a batch of {kind} "
                    f"has {new}. The position in rows is not known at this step: "
                    f"resume with batches of {old} rows, save, and then change the "
                    "number."
                )
            cursor.skip_batches(max(0, batches))
            return
        if is_resized:
            self._resize(cursor, step, last_batch)
            self.note = (
                f"Batches have {new} rows now and had {old}: the data goes on at row "
                f"{self.pass_rows * shares}."
            )
        elif cursor.is_numbered and self._is_whole_pass(cursor.data):
            cursor.returned.clear()
            cursor.open(self.epoch + 1)
            cursor.skips = more
            return
        cursor.skips_to, cursor.skips = (self.epoch, self.pass_rows), more
        cursor.place = replace(cursor.place, epoch=start, pass_rows=0)

    def _is_whole_pass(self, data: Any) -> bool:
        return num_batches_of(data) * self.num_rows <= self.pass_rows

    def _share(self, shares: int, num_rows: int) -> None:
        """Sets this process's count of rows for a split into ``shares`` parts."""
        if self.pass_rows > 0:
            rows = self.pass_rows * self.shares
            if rows % shares:
                raise DataError(
                    f"{rows} rows were used, and {shares} processes with data do not "
                    "divide them evenly. Resume on a number of processes that does, "
                    f"such as {self.shares}."
                )
            self.pass_rows = rows // shares
        self.shares, self.num_rows = shares, num_rows

    def _resize(self, cursor: Cursor, step: int, last_batch: LastBatch | None) -> None:
        """Counts steps as if all of them had used batches of the present size."""
        self.num_dropped = 0
        if cursor.epochs is None:
            return
        num_batches = num_batches_of(cursor.data)
        size, last = rows_at_ends(cursor.data)
        total = (num_batches - 1) * size + last or num_batches * self.num_rows
        epoch, rows = (self.pass_rows // total + self.epoch, self.pass_rows % total)
        per_pass = cursor.epochs.num_steps(last_batch) // cursor.epochs.count
        left, rest = divmod(total - rows, self.num_rows)
        left += bool(rest) and isinstance(last_batch, Pad)
        self.first_step = step - (epoch + 1) * per_pass + left

    def to_json(self) -> dict[str, Any]:
        """Returns the position as JSON values. All processes must call this."""
        following = self.marks[2]
        if self._cursor is not None and self._cursor.ahead:
            following, _ = self._cursor.ahead[0]
        # Each process may read different files, so the positions of all processes are
        # saved.
        mine = {"state": self.state, "marks": [*self.marks[:2], following]}
        found = allgather_object("position in the data", mine)
        counts = {name: getattr(self, name) for name in (*_COUNTS, *_PLACE)}
        return (
            counts
            | {f"{name}s": [x[name] for x in found] for name in ("state",)}
            | {"marks": [x["marks"] for x in found]}
        )

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """Returns the saved position; the start of the data if ``saved`` is empty.

        Warns if another number of processes has saved the position of an iterator.

        Raises:
            DataError: If `to_json` cannot have made ``saved``.
        """
        counts = {name: saved.get(name, 0) for name in _COUNTS}
        # A checkpoint of an earlier version holds only the number of batches.
        unknown = {"step": 0, "epoch": 0, "pass_rows": -1 if saved else 0, "shares": 0}
        counts |= {name: saved.get(name, unknown[name]) for name in _PLACE}
        states, marks = saved.get("states", [None]), saved.get("marks", [[None] * 3])
        numbers = all(isinstance(count, int) for count in counts.values())
        if not numbers or not isinstance(states, list) or not _are_marks(marks):
            raise DataError(
                f"The checkpoint's metadata gives the position in the data as "
                f"{dict(saved)}. It must hold the integers first_step and num_steps, "
                "and the lists states and marks."
            )
        state = None
        if len(states) == jax.process_count():
            state = states[jax.process_index()]
        # Rows can be counted by any number of processes. An iterator's position can be
        # restored only by as many processes as saved it.
        elif any(other is not None for other in states):
            warn_user(
                f"The position in the data was saved by {len(states)} processes and "
                f"cannot be restored on {jax.process_count()}. The batches used so far "
                "are skipped instead, which is right if each process still gives its "
                "share of the same global batches.",
            )
        if counts["pass_rows"] < 0 and len(states) != jax.process_count():
            counts["num_rows"] = 0  # the parts of a batch were of another size
        mine: Any = (None, None, None)
        if len(marks) == jax.process_count():
            mine = tuple(marks[jax.process_index()])
        return cls(state=state, marks=mine, **counts)


def _begins_alike(found: Mark, first: Mark) -> bool:
    """Returns True if all arrays agree; compares the first rows if the sizes differ."""
    has_same_size, pairs = found[0] == first[0], zip(found[1:], first[1:], strict=False)
    return len(found) == len(first) and all(
        is_same_array(f, s, has_same_size) for f, s in pairs
    )


def _are_marks(found: Any) -> bool:
    """Returns True if `DataState.to_json` can have made ``found``."""
    return isinstance(found, list) and all(
        isinstance(marks, list)
        and len(marks) == 3
        and all(mark is None or _is_mark(mark) for mark in marks)
        for marks in found
    )


def _is_mark(mark: Any) -> bool:
    if not isinstance(mark, list) or len(mark) < 2 or not isinstance(mark[0], int):
        return False
    kinds = [int, list, list, bool]
    return all(isinstance(x, list) and [*map(type, x)] == kinds for x in mark[1:])
