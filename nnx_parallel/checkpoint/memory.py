"""Copies of the training state in the memory of machines, for fast restarts.

A checkpoint on storage is made every few minutes, and the steps since then are lost if
a process dies. A copy in memory is made every few steps. It outlives its process, and a
second copy on another machine outlives the machine:

- A part of an array that several machines hold, as under data parallelism, needs no
  second copy.
- Any other part is sent to a neighbour, which is a process on another machine.

Two copies are kept: a new copy overwrites the older one, so that a complete copy exists
at any moment. After a restart the processes find the newest step of which every part is
in the memory of some machine. Each process reads the parts that its layout needs, from
its machine or from another one, so the number of processes may change.

A copy is read only if it is intact, if this user wrote it with this format, and if it
belongs to this run: the directory of checkpoints has a file with the run's identifier,
and a copy names the newest checkpoint that was on storage at that time.
"""

import contextlib
import itertools
import json
import os
import secrets
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.checkpoint.checksum import digest
from nnx_parallel.checkpoint.contents import (
    AbstractGroups,
    Groups,
    StoredCheckpoint,
    check_header,
    stored_array,
)
from nnx_parallel.checkpoint.copies import (
    Bounds,
    Buffer,
    Copy,
    Layout,
    Name,
    check_index,
    free_bytes,
    list_names,
    overlap,
    places_of,
    private_directory,
    read_layout,
    shape_of,
    slices,
    spell,
    write_index,
)
from nnx_parallel.checkpoint.files import LiteralPath, is_url, read_json
from nnx_parallel.checkpoint.lock import boot_id
from nnx_parallel.distributed.agreement import allgather_object, reserve_allgather
from nnx_parallel.distributed.peers import Peers
from nnx_parallel.distributed.runtime import process_count, process_index
from nnx_parallel.durable import move, sync
from nnx_parallel.errors import (
    CheckpointDirectoryError,
    CheckpointFormatError,
    CheckpointReadError,
    ParallelError,
    ReplicaError,
    warn_user,
)
from nnx_parallel.files import MAX_BYTES, MAX_VALUES
from nnx_parallel.precision import format_bytes
from nnx_parallel.sharding.checksum import Checksums

RUN = "memory_copies.json"
"""File in the directory of checkpoints that identifies the run for its copies."""

_THREADS = 8
_PIECE_BYTES = 2**26  # larger arrays are copied by several threads
_FINISH_SECONDS = 60.0


def forget_copies(directory: str) -> None:
    """Makes all copies in memory of a run's steps unreadable, on all machines.

    Raises ``CheckpointDirectoryError`` on all processes if process 0 cannot do this.
    """
    problem, path = "", LiteralPath(directory) / RUN
    try:
        if process_index() == 0:
            path.unlink(missing_ok=True)
    except OSError as error:
        problem = str(error)
    if problem := allgather_object("older copies in memory", problem)[0]:
        raise CheckpointDirectoryError(f"Cannot delete '{path}': {problem}.")


def _identify_run(directory: str, *, is_new: bool = False) -> str:
    """Returns the identifier of the run in a directory, which process 0 may create."""
    run, problem, path = "", "", LiteralPath(directory) / RUN
    if process_index() == 0:
        try:
            with contextlib.suppress(FileNotFoundError):
                run = "" if is_new else str(read_json(path).get("run", ""))
            if not run:
                run = secrets.token_hex(16)
                _write(path, json.dumps({"run": run}) + "\n")
        except (OSError, ValueError) as error:
            problem = str(error)
    run, problem = allgather_object("run of copies in memory", [run, problem])[0]
    if problem:
        raise CheckpointDirectoryError(
            f"Cannot read or write '{path}', which says which copies in memory belong "
            f"to this run: {problem.rstrip('.')}."
        )
    return run


def _write(path: LiteralPath, text: str) -> None:
    """Writes a file, which appears complete or not at all."""
    if is_url(os.fspath(path)):
        path.write_text(text)
        return
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    sync(temporary)
    move(Path(temporary), Path(path))


def find_neighbours(machines: Sequence[Sequence[Any]]) -> list[int | None]:
    """Returns the process that holds the second copies of each process.

    Args:
        machines: For each process, an identifier of its machine and identifiers of its
            directory. Processes with the same identifiers see the same files.

    Returns:
        For each process, a process on another machine, or one that sees another
        directory of the same machine, or ``None`` if all see the same files.

    Example:
        >>> find_neighbours([["a", 1], ["a", 1], ["b", 1], ["b", 1]])
        [2, 3, 0, 1]
        >>> find_neighbours([["a", 1], ["a", 1]])
        [None, None]
    """
    keys = [tuple(key) for key in machines]
    order = list(dict.fromkeys(keys))
    members = {key: [i for i, x in enumerate(keys) if x == key] for key in order}
    found: list[int | None] = []
    for process, key in enumerate(keys):
        start = order.index(key)
        later = [*order[start + 1 :], *order[:start]]
        other = next((x for x in later if x[0] != key[0]), next(iter(later), None))
        hosts = members[other] if other else []
        rank = members[key].index(process)
        found.append(hosts[rank % len(hosts)] if hosts else None)
    return found


@lru_cache(maxsize=1024)
def _holders(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> dict[Bounds, tuple[int, ...]]:
    """Returns the processes that hold each part of an array."""
    found: dict[Bounds, set[int]] = defaultdict(set)
    for device, index in sharding.devices_indices_map(shape).items():
        found[_bounds(index, shape)].add(device.process_index)
    return {bounds: tuple(sorted(x)) for bounds, x in sorted(found.items())}


def _bounds(index: Iterable[slice], shape: tuple[int, ...]) -> Bounds:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _words(x: Any) -> Any:
    """Returns an array, or for random keys their uint32 words; may be abstract."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    plain = jax.ShapeDtypeStruct(x.shape, x.dtype)
    words = jax.eval_shape(jax.random.key_data, plain)
    spec = P(*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)), None)
    sharding = NamedSharding(x.sharding.mesh, spec)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=sharding)


@dataclass
class Found:
    """A complete copy in memory, and the files that hold its parts.

    Attributes:
        step: Number of updates done.
        attempt: Text that all files of the copy have in common.
        holders: For each part, the machines and the names of the files that hold it.
        copies: The files that this process can read, by name.
        index: An index of the copy.
    """

    step: int
    attempt: str
    holders: dict[int, list[tuple[int, Name]]]
    copies: dict[Name, Copy]
    index: dict[str, Any]

    @property
    def layout(self) -> Layout:
        """The arrays and their parts."""
        return read_layout(self.index["layout"])

    def by_array(self) -> dict[tuple[str, str], list[tuple[int, Bounds]]]:
        """Returns the numbers and bounds of the parts of each array."""
        found = defaultdict[tuple[str, str], list[tuple[int, Bounds]]](list)
        for number, part in enumerate(self.layout.parts):
            found[part.group, part.path].append((number, part.bounds))
        return found


@dataclass(eq=False)
class _Staged:
    """A copy in progress on this process."""

    name: Name
    index: dict[str, Any]
    layout: Layout
    exchange: Callable[[Any], list]
    buffer: Buffer | None = None
    error: Exception | None = None
    problem: str = ""
    has_ended: threading.Event = field(default_factory=threading.Event)


class MemoryCopies:
    """Makes, finds and reads the copies in memory of one run.

    All processes make the same calls in the same order.

    Args:
        directory: Directory of the run's checkpoints, which exists.
        memory_directory: Directory in the memory of a machine.
        every: Number of steps between copies.

    Attributes:
        notes: A line for each copy that is newer than storage and that `find` could not
            use.

    Raises:
        CheckpointDirectoryError: On all processes, if a process cannot make the
            directory.
    """

    def __init__(self, directory: str, memory_directory: str, every: int) -> None:
        self.notes: list[str] = []
        self._where, self.every = memory_directory, every
        problem, key = "", "run-" + digest({"directory": directory})[:16]
        root = Path(os.path.expandvars(memory_directory))
        try:
            if "$" in str(root):
                raise OSError(
                    f"a variable in memory_directory='{root}' is not set; set it, or "
                    "name another directory"
                )
            self._run = root / f"nnx_parallel-{os.getuid()}" / key
            self._make_directory()
        except OSError as error:
            problem = str(error)
        problems = allgather_object("directory of copies in memory", problem)
        if bad := [f"On process {i}: {x}" for i, x in enumerate(problems) if x]:
            raise CheckpointDirectoryError(
                f"Cannot keep copies in memory: {'; '.join(bad)}. Choose a directory "
                "in memory that this user may write: memory_directory=..."
            )
        self._directory = directory
        self._id = _identify_run(directory)
        self._buffers: dict[Name, Buffer] = {}
        self._spare: list[Buffer] = []
        self._staged: _Staged | None = None
        # The newest complete copy, and the copy that the run resumed from.
        self._newest: tuple[int, str] | None = None
        self._resumed: tuple[int, str] | None = None
        self._known: tuple[list[Any], Layout] | None = None
        self._found: tuple[Found | None] | None = None
        self._served: dict[Name, Copy] = {}
        self._lock = threading.Lock()  # for the two collections of buffers
        self._has_old = True
        self._peers = Peers(self._answer, self._identify())
        order = list(dict.fromkeys(map(tuple, self._peers.facts)))
        self._machine = [order.index(tuple(x)) for x in self._peers.facts]
        self._neighbours = find_neighbours(self._peers.facts)

    def _make_directory(self) -> None:
        private_directory(self._run.parent)
        private_directory(self._run)

    def _identify(self) -> list[Any]:
        """Returns identifiers of this machine and of the directory."""
        boot, found = "", self._run.stat()
        with contextlib.suppress(OSError):
            boot = boot_id()
        return [boot, found.st_dev, found.st_ino]

    def begin(self) -> None:
        """Makes older copies unreadable, unless the run resumed from one of them.

        A run that continues from elsewhere may reach other values at the same steps.
        """
        if self._newest is None:
            self._id = _identify_run(self._directory, is_new=True)

    # How the files are laid out.

    def _local(self, machine: int | None = None) -> list[int]:
        """Returns the processes on a machine, by default on this one."""
        mine = self._machine[process_index()] if machine is None else machine
        return [i for i, x in enumerate(self._machine) if x == mine]

    @property
    def _is_first(self) -> bool:
        """True if this process deletes and lists the files of its machine."""
        return self._local()[0] == process_index()

    def _layout(self, words: Mapping[str, Mapping[str, Any]]) -> Layout:
        """Returns the parts of all arrays, with the processes that store them."""

        def divide(key: tuple[jax.sharding.Sharding, tuple[int, ...]]) -> list[Any]:
            found = []
            for bounds, processes in _holders(*key).items():
                first: dict[int, int] = {}
                for process in processes:
                    first.setdefault(self._machine[process], process)
                owners = sorted(first.values())
                is_sent = len(owners) == 1 and self._neighbours[owners[0]] is not None
                found.append([bounds, owners, is_sent])
            return found

        arrays = [
            (group, path, x.dtype.name, x.shape, (x.sharding, x.shape))
            for group, path, x in _walk(words)
        ]
        if self._known is None or self._known[0] != arrays:
            self._known = arrays, read_layout(spell(arrays, divide))
        return self._known[1]

    def bytes_of(self, groups: AbstractGroups) -> list[int]:
        """Returns the bytes that each process keeps in the memory of its machine."""
        layout = self._layout(_all_words(groups))
        found = [0] * process_count()
        for owner, holder in enumerate(self._neighbours):
            # The newest two copies are kept.
            found[owner] += 2 * layout.bytes_of(owner, is_second=False)
            if holder is not None:
                found[holder] += 2 * layout.bytes_of(owner, is_second=True)
        return found

    def check_space(self, groups: AbstractGroups) -> str:
        """Checks that two copies fit, and returns a line with their size.

        Raises:
            CheckpointDirectoryError: On all processes, if a machine has too little
                memory for them.
        """
        layout = self._layout(_all_words(groups))
        count = sum(map(layout.text.count, ",[{"))
        if len(layout.text) > MAX_BYTES // 2 or count > MAX_VALUES // 2:
            raise CheckpointDirectoryError(
                f"The index of a copy in memory would have {len(layout.text):,} "
                "characters, which is too much to read back: the arrays are divided "
                "into too many parts. Leave memory_every out."
            )
        needed = self.bytes_of(groups)
        mine = sum(needed[i] for i in self._local())
        held = sum(x.stat().st_size for x in self._run.iterdir() if x.is_file())
        free = free_bytes(self._run) + held
        for process, left in enumerate(allgather_object("free memory", free - mine)):
            if left < 0:
                total = sum(needed[i] for i in self._local(self._machine[process]))
                raise CheckpointDirectoryError(
                    f"The copies in memory take {format_bytes(total)} on the machine "
                    f"of process {process}, and '{self._where}' has only "
                    f"{format_bytes(total + left)}. Give the directory or the "
                    "container more memory (docker run --shm-size), choose another "
                    "memory_directory, or leave memory_every out. Runs that were given "
                    f"up may have left files in '{self._run.parent}'."
                )
        num_machines = len(set(self._machine))
        second = "on one machine: they survive a process, but not the machine"
        if num_machines > 1:
            second = f"{num_machines} machines hold every part"
        if any(part.is_sent for part in layout.parts):
            second = f"with second copies on a neighbour, {num_machines} machines"
        return (
            f"every {self.every:,} steps in '{self._where}', "
            f"{format_bytes(max(needed))} a process, {second}"
        )

    # How a copy is made.

    def stage(
        self,
        groups: Groups,
        header: dict[str, Any],
        start_checksums: Callable[[], Callable[[], Checksums]],
        saved: int,
    ) -> None:
        """Copies arrays into memory; they may be donated once this returns.

        The second copies are sent in the background. If the copy before this one is
        still in progress, the call waits for it, so that no copy is left out. A failure
        gives a warning, and training goes on.

        Args:
            groups: Arrays by group and path.
            header: Header of a checkpoint of this state.
            start_checksums: Starts to compute the checksums of the arrays on the
                devices, and returns a function that waits for them.
            saved: The newest step on storage, or -1.
        """
        if self._staged is not None:
            self._staged.has_ended.wait()
        attempt = allgather_object("copies in memory", secrets.token_hex(8))[0]
        self._report()
        self._release()
        if self._has_old:
            # The copy that the run resumed from stays until a newer one is complete.
            self._has_old = self._newest == self._resumed
            self._delete_old()
        me, step = process_index(), int(header["step"])
        words = _all_words(groups)
        layout = self._layout(words)
        head = {"run": self._id, "saved": saved, "header": header}
        staged = self._staged = _Staged(
            name=Name(step, attempt, me, False),
            index={**head, "layout": layout.text},
            layout=layout,
            exchange=reserve_allgather("copy in memory"),
        )
        try:
            try:
                self._make_directory()  # somebody may have deleted it
                self._fill(staged, words)
            except OSError as error:
                staged.error = error
            # The devices compute checksums only now, so that the copy is not delayed.
            checksums = start_checksums()
        except BaseException:  # for example a second Ctrl-C
            staged.has_ended.set()
            raise
        threading.Thread(
            target=self._finish,
            args=(staged, checksums),
            name="nnx_parallel.memory",
            daemon=True,
        ).start()

    def _fill(self, staged: _Staged, words: Groups) -> None:
        """Copies the parts that this process stores into a buffer."""
        layout, (*_, me, _) = staged.layout, staged.name
        numbers = layout.numbers(me, is_second=False)
        offsets, size = places_of(numbers, layout.sizes)
        buffer = staged.buffer = self._take(staged.name, size)

        @cache
        def shards(group: str, path: str) -> dict[Bounds, Any]:
            x = words[group][path]
            return {_bounds(s.index, x.shape): s.data for s in x.addressable_shards}

        def copy(number: int) -> None:
            part, start = layout.parts[number], offsets[number]
            source = np.asarray(shards(part.group, part.path)[part.bounds])
            target = buffer.bytes[start : start + layout.sizes[number]]
            target = target.view(source.dtype).reshape(source.shape)
            count = max(1, source.nbytes // _PIECE_BYTES)
            if count == 1 or not source.ndim:
                np.copyto(target, source)
                return
            pieces = (np.array_split(x, count) for x in (target, source))
            list(inner.map(np.copyto, *pieces))

        with (
            ThreadPoolExecutor(_THREADS) as inner,
            ThreadPoolExecutor(_THREADS) as pool,
        ):
            list(pool.map(copy, numbers))

    def _take(self, name: Name, size: int) -> Buffer:
        """Returns a buffer of a size, if possible a spare one."""
        with self._lock:
            found = next((x for x in self._spare if x.size == size), None)
            if found is None:
                return Buffer(self._run / f"{name.stem}.part", size)
            self._spare.remove(found)
            return found

    def _finish(self, staged: _Staged, checksums: Callable[[], Checksums]) -> None:
        """Completes a copy in the background, on a thread of each process."""
        try:
            # All processes take part in this exchange, even after a problem.
            staged.index["checksums"] = checksums()
            if staged.error is None:
                self._complete(staged)
        except Exception as error:  # any error, because the others wait below
            staged.error = staged.error or error
        try:
            mine = staged.error and f"process {process_index()}: {staged.error}"
            staged.problem = next(filter(None, staged.exchange(mine)), "")
            if not staged.problem:
                self._newest = staged.name[:2]
            elif staged.buffer is not None:
                with self._lock:
                    self._buffers.setdefault(staged.name, staged.buffer)
            self._delete_except(self._newest)
        except ParallelError as error:
            staged.problem = str(error)
        finally:
            staged.has_ended.set()

    def _complete(self, staged: _Staged) -> None:
        """Writes the index of this process's file, and sends the second copies."""
        buffer, layout, me = staged.buffer, staged.layout, process_index()
        assert buffer is not None
        numbers = layout.numbers(me, is_second=False)
        places = _places(buffer.bytes, numbers, layout.sizes)
        self._publish(staged.name, buffer, {**staged.index, "places": places})
        holder, sent = self._neighbours[me], layout.numbers(me, is_second=True)
        if sent and holder is not None:
            offsets, size = places_of(sent, layout.sizes)
            second = {str(i): [offsets[i], places[str(i)][1]] for i in sent}
            index = {**staged.index, "places": second}
            data, starts = buffer.bytes.data, [places[str(i)][0] for i in sent]
            arrays = (
                data[start : start + layout.sizes[i]]
                for i, start in zip(sent, starts, strict=True)
            )
            name = staged.name._replace(is_second=True)
            request = {"op": "hold", "name": name, "size": size, "index": index}
            self._peers.ask(holder, request, arrays)

    def _publish(self, name: Name, buffer: Buffer, index: Mapping[str, Any]) -> None:
        with self._lock:
            self._buffers[name] = buffer
        buffer.rename(self._run / f"{name.stem}.data")
        write_index(self._run, name, index)

    def _hold(self, request: dict[str, Any], connection: Connection) -> None:
        """Receives the second copy of another process."""
        name, index = Name(*request["name"]), request["index"]
        sizes = read_layout(index["layout"]).sizes
        # All arrays are received, even if there is no memory for them, because the next
        # request comes after them.
        buffer, problem = None, OSError("it has no memory for the second copy")
        try:
            buffer = self._take(name, int(request["size"]))
        except OSError as error:
            problem = error
        try:
            for number, (start, _) in index["places"].items():
                if buffer is None:
                    connection.recv_bytes()
                    continue
                end = start + sizes[int(number)]
                connection.recv_bytes_into(buffer.bytes.data[start:end])
            if buffer is None:
                raise problem
            found = _places(buffer.bytes, [*map(int, index["places"])], sizes)
            if found != index["places"]:
                raise ValueError("the parts that arrived have other checksums")
        except Exception:
            if buffer is not None:
                with self._lock:
                    self._spare.append(buffer)
            raise
        self._publish(name, buffer, index)

    def _delete_except(self, kept: tuple[int, str] | None) -> None:
        """Deletes this object's copies but one, and keeps their memory for reuse."""
        with self._lock:
            for name, buffer in list(self._buffers.items()):
                if name[:2] != kept:
                    # Without its index, a file is not read.
                    (self._run / f"{name.stem}.json").unlink(missing_ok=True)
                    del self._buffers[name]
                    try:
                        buffer.rename(self._run / f"spare-{secrets.token_hex(8)}.part")
                        self._spare.append(buffer)
                    except OSError:  # somebody has deleted the file
                        buffer.remove()

    def _delete_old(self) -> None:
        """Deletes files of earlier processes, except the copy that the run began with.

        No process writes until all machines have done so.
        """
        while self._spare:
            self._spare.pop().remove()
        if self._is_first:
            kept = "{}-{}".format(*self._newest) if self._newest else None
            for path in _with_indexes_first(self._run):
                if path.name.partition(".")[0] != kept:
                    path.unlink(missing_ok=True)
        allgather_object("deletion of old copies", None)

    def _report(self) -> None:
        """Warns if the last copy failed; raises ``ReplicaError`` if devices differ."""
        staged, self._staged = self._staged, None
        if staged is None or not staged.problem:
            return
        if isinstance(staged.error, ReplicaError):
            raise staged.error
        warn_user(
            f"Step {staged.name.step} could not be copied into memory "
            f"({staged.problem.rstrip('.')}). Training goes on."
        )

    # How a copy is found and read.

    def find(self, newest: int, listed: int) -> Found | None:
        """Returns the newest complete and intact copy, or ``None``.

        The result is the same on all processes, and is kept for later calls.

        Args:
            newest: The newest complete step on storage, or -1. Copies of earlier steps
                are not considered.
            listed: The newest step on storage, complete or not.
        """
        if self._found is None:
            names = list(list_names(self._run)) if self._is_first else []
            found = allgather_object("copies found", [newest, listed, names])
            files = defaultdict[tuple[int, str], list[tuple[int, Name]]](list)
            for process, (*_, theirs) in enumerate(found):
                for name in itertools.starmap(Name, theirs):
                    files[name[:2]].append((self._machine[process], name))
            # If the processes see different steps on storage, the reader raises an
            # error.
            agree = all(x[:2] == found[0][:2] for x in found)
            steps = sorted((x for x in files if agree and x[0] >= newest), reverse=True)
            tries = (self._check(*x, files[x], listed) for x in steps)
            self._found = (next((x for x in tries if x is not None), None),)
        return self._found[0]

    def _check(
        self, step: int, attempt: str, files: list[tuple[int, Name]], listed: int
    ) -> Found | None:
        """Returns a copy if all of its parts are intact in some file."""
        me = process_index()
        local = self._local()
        here = [name for machine, name in files if machine == self._machine[me]]
        copies: dict[Name, Copy] = {}
        for name in here:
            with contextlib.suppress(OSError, ValueError, CheckpointFormatError):
                copy = Copy(self._run, name)
                check_header(copy.header, step, "The copy")
                if copy.index["run"] == self._id and copy.index["saved"] <= listed:
                    copies[name] = copy
        # The processes of a machine divide its files among them.
        mine = here[local.index(me) :: len(local)]
        with ThreadPoolExecutor(_THREADS) as pool:
            damaged = pool.map(
                lambda x: copies[x].damaged() if x in copies else None, mine
            )
            checked = [[name, bad] for name, bad in zip(mine, damaged, strict=True)]
        results = allgather_object("checked copies", checked)
        bad = {
            (self._machine[process], Name(*name)): parts
            for process, found in enumerate(results)
            for name, parts in found
        }
        index = next(iter(copies.values())).index if copies else None
        found = None
        if index is not None:
            holders = _find_holders(read_layout(index["layout"]), files, bad)
            found = Found(step, attempt, holders, copies, index)
        missing = found and sum(not x for x in found.holders.values())
        counts = allgather_object("missing parts", missing)
        present = [i for i, count in enumerate(counts) if count is not None]
        if not present or any(counts[i] for i in present):
            lost = f"{counts[present[0]]} parts" if present else "all parts"
            self.notes.append(
                f"The copy of step {step} in memory is not used: {lost} are missing or "
                "damaged on all machines, or belong to another run."
            )
            return None
        if found is None:
            found = self._ask_for_index(present[0], files, bad)
        return found

    def _ask_for_index(
        self,
        process: int,
        files: list[tuple[int, Name]],
        bad: Mapping[tuple[int, Name], list[int] | None],
    ) -> Found:
        """Returns a copy of which this machine has no file."""
        machine = self._machine[process]
        name = next(x for at, x in files if at == machine and bad[at, x] is not None)
        reply, _ = self._peers.ask(process, {"op": "index", "name": name})
        index = check_index(reply["index"])
        holders = _find_holders(read_layout(index["layout"]), files, bad)
        return Found(name.step, name.attempt, holders, {}, index)

    def describe(self, found: Found) -> StoredCheckpoint:
        """Returns the contents of a copy, without its arrays."""
        header = check_header(found.index["header"], found.step, "The copy in memory")
        keys, arrays = header["keys"], found.layout.arrays
        return StoredCheckpoint(
            step=found.step,
            groups={
                name: {
                    path: stored_array(shape, dtype, keys[name].get(path))
                    for path, (dtype, shape) in arrays.get(name, {}).items()
                }
                for name in header["sizes"]
            },
            checksums=found.index["checksums"],
            meta=header["meta"],
            metrics=header["metrics"],
            base=header.get("base", {}),
        )

    def load(self, found: Found, wanted: AbstractGroups) -> dict[str, Any]:
        """Returns the arrays of a copy in the requested layout.

        Raises:
            CheckpointReadError: On all processes, if a process cannot read a part.
        """
        problem, read = "", dict[str, Any]()
        by_array = found.by_array()
        try:
            for group, path, x in _walk(wanted):
                parts = by_array[group, path]
                array = self._assemble(found, parts, _words(x))
                if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                    impl = found.index["header"]["keys"][group][path]
                    array = jax.random.wrap_key_data(array, impl=impl)
                read.setdefault(group, {})[path] = array
        except (OSError, ValueError, ParallelError) as error:
            problem = str(error)
        # A process that has read its parts may still be asked for parts.
        problems = allgather_object("read copies", problem)
        if bad := [f"On process {i}: {x}" for i, x in enumerate(problems) if x]:
            raise CheckpointReadError("; ".join(bad))
        return read

    def _assemble(
        self, found: Found, parts: Sequence[tuple[int, Bounds]], wanted: Any
    ) -> jax.Array:
        """Makes an array from the parts that this process needs."""

        @cache  # several devices may hold the same part
        def read(bounds: Bounds) -> np.ndarray:
            target = np.empty(shape_of(bounds), wanted.dtype)
            for number, part in parts:
                if (both := overlap(bounds, part)) is not None:
                    source = self._read(found, number, both, wanted.dtype)
                    target[slices(both, bounds)] = source
            return target

        shape = wanted.shape
        return jax.make_array_from_callback(
            shape, wanted.sharding, lambda index: read(_bounds(index or (), shape))
        )

    def _read(
        self, found: Found, number: int, bounds: Bounds, dtype: Any
    ) -> np.ndarray:
        """Returns elements of a part, from this machine if it has them."""
        holders = found.holders[number]
        part = found.layout.parts[number].bounds
        for _, name in (x for x in holders if x[0] == self._machine[process_index()]):
            if name in found.copies:
                return found.copies[name].read(number)[slices(bounds, part)]
        machine, name = holders[process_index() % len(holders)]
        hosts = self._local(machine)
        request = {"op": "read", "name": name, "part": number, "bounds": bounds}
        reply, (data,) = self._peers.ask(hosts[process_index() % len(hosts)], request)
        if zlib.crc32(data) != reply["crc"]:
            raise ValueError("a part arrived with another checksum")
        return np.frombuffer(data, dtype).reshape(shape_of(bounds))

    def _answer(
        self, request: dict[str, Any], connection: Connection
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Answers a request of another process."""
        if request["op"] == "hold":
            self._hold(request, connection)
            return {}, []
        name = Name(*request["name"])
        if (copy := self._served.get(name)) is None:
            copy = self._served[name] = Copy(self._run, name)
        if request["op"] == "index":
            return {"index": copy.index}, []
        number, bounds = int(request["part"]), [(a, b) for a, b in request["bounds"]]
        part = copy.read(number)[
            slices(tuple(bounds), copy.layout.parts[number].bounds)
        ]
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
        return {"crc": zlib.crc32(data)}, [data]

    def lacks_copies(self, found: Found) -> bool:
        """Returns True if the loss of one machine would make a copy incomplete."""
        has_others = len(set(self._machine)) > 1
        machines = ({machine for machine, _ in x} for x in found.holders.values())
        return has_others and any(len(x) < 2 for x in machines)

    def use(self, found: Found) -> None:
        """Keeps a copy, which the run resumed from, until there is a newer one."""
        self._newest = self._resumed = found.step, found.attempt
        self._release()

    def _release(self) -> None:
        """Drops the files that were found, so that their memory can be freed."""
        self._found, self._served = None, {}

    def close(self, *, saved: int | None) -> None:
        """Ends the copies. Deletes them if the saved step is at least as new.

        All processes pass the same ``saved``. A process waits only for a copy in
        progress.
        """
        if self._staged is not None:
            self._staged.has_ended.wait(_FINISH_SECONDS)
        self.abandon()
        newest = max((name.step for name in list_names(self._run)), default=-1)
        if saved is not None and saved >= newest:
            for path in _with_indexes_first(self._run):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process was faster
                self._run.rmdir()

    def abandon(self) -> None:
        """Ends this object, and leaves the copies for the next start."""
        self._release()
        self._peers.close()
        # The mapped memory would stay in use even after the files are deleted.
        with self._lock:
            for buffer in (*self._buffers.values(), *self._spare):
                buffer.close()


def _with_indexes_first(directory: Path) -> list[Path]:
    """Returns a directory's files, indexes first: a file without one is not read."""
    found: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        found = sorted(directory.iterdir(), key=lambda path: path.suffix != ".json")
    return found


def _walk(groups: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for group in sorted(groups):
        for path in sorted(groups[group]):
            yield group, path, groups[group][path]


def _all_words(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {p: _words(x) for p, x in g.items()} for name, g in groups.items()}


def _places(
    data: np.ndarray, numbers: Sequence[int], sizes: Sequence[int]
) -> dict[str, list[int]]:
    """Returns the offset and checksum of each part in a file, as JSON values."""
    offsets, _ = places_of(numbers, sizes)
    view = data.data
    parts = (view[start : start + sizes[i]] for i, start in offsets.items())
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = pool.map(zlib.crc32, parts)
        return {str(i): [offsets[i], x] for i, x in zip(offsets, sums, strict=True)}


def _find_holders(
    layout: Layout,
    files: Sequence[tuple[int, Name]],
    bad: Mapping[tuple[int, Name], list[int] | None],
) -> dict[int, list[tuple[int, Name]]]:
    """Returns the intact files that hold each part, with their machines."""
    found: dict[int, list[tuple[int, Name]]] = {i: [] for i in range(len(layout.parts))}
    for file in files:
        if (damaged := bad.get(file)) is not None:
            _, name = file
            numbers = layout.numbers(name.owner, is_second=name.is_second)
            for number in {*numbers}.difference(damaged):
                found[number].append(file)
    return found
