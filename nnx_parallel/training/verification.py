"""`verify`: one step of a run, compared between runs, programs and devices.

The library promises the numbers of one device under every strategy. The library's tests
show this for its models on simulated devices. `verify` shows it for the user's model,
compiler and devices.

A step does not return gradients, so it is split into two halves to compare gradients.
The updates are compared for equal gradients, because an optimizer such as Adam hides a
constant factor of a gradient, and turns the rounding of a tiny gradient into a large
difference.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.data.rows import partition
from nnx_parallel.distributed.agreement import allgather_object
from nnx_parallel.drawing import aligned
from nnx_parallel.errors import ParallelError, ReplayError, VerificationError
from nnx_parallel.layers.stack.stack import Stack
from nnx_parallel.sharding.checksum import data_of, start_hashes
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import flatten, nest
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import variables_of
from nnx_parallel.sharding.tree import gather
from nnx_parallel.state import StatePlan, TrainState, plan_state
from nnx_parallel.strategies.base import Composite, Strategy
from nnx_parallel.strategies.data_parallel import DataParallel
from nnx_parallel.strategies.fsdp import FSDP
from nnx_parallel.training.auto_remat import memory_limit
from nnx_parallel.training.comparison import (
    GRADIENT,
    MAX_NOISE,
    Arrays,
    Bounds,
    Comparison,
    Difference,
    Hashes,
    HostCopy,
    Part,
    Sums,
    as_keys,
    compare,
    cut,
    differing,
    fetch,
    join,
    key_kind,
    label,
    named,
    sum_up,
    wide,
)
from nnx_parallel.training.evaluation import Programs
from nnx_parallel.training.run_state import RunState
from nnx_parallel.training.step import Batch, Computed, Metrics, hashed_arrays
from nnx_parallel.training.verified import facts_to_verify, note_verified

_NO_MEMORY = "RESOURCE_EXHAUSTED"
"""The runtime's errors contain this word if memory is exhausted."""

_GROUPS = {
    "params": "parameter",
    "opt_state": "optimizer state",
    "variables": "variable",
    "ema": "average",
}
"""Groups of the state, and their names in reports."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The report of `Trainer.verify`; ``str`` formats it.

    Attributes:
        step: The step of the verified state.
        comparisons: All comparisons.
        remedy: A line of code that avoids the fault; empty if there is no fault, or if
            no such line was found.
        seconds: Duration in seconds, including compilations.
    """

    step: int
    comparisons: tuple[Comparison, ...]
    remedy: str = ""
    seconds: float = 0.0

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All arrays that differ, in the order in which a step computes them."""
        return tuple(d for c in self.comparisons for d in c.differences)

    def __str__(self) -> str:
        """Returns the report as text."""
        lines = [aligned([(c.name, c.result, c.note) for c in self.comparisons])]
        for comparison in self.comparisons:
            if comparison.differences:
                lines.append(f"The step differs from {comparison.name}:")
                lines += [f"  {d}" for d in comparison.differences[:10]]
            if comparison.skipped:
                shown = ", ".join(comparison.skipped[:3])
                lines.append(
                    f"Not compared with {comparison.name}, because rounding moves them "
                    f"by more than {MAX_NOISE:.0%}: {len(comparison.skipped)} arrays, "
                    f"such as {shown}."
                )
        return "\n".join([*lines, self.remedy]).rstrip()


def _computed_arrays(computed: Computed) -> dict[str, jax.Array]:
    """Returns the loss, metrics, gradients and variables of a batch, by name."""
    metrics = {**computed.metrics}
    found = {"the loss": metrics.pop("loss")}
    found |= {f"metric {name!r}": x for name, x in metrics.items()}
    grads, variables = flatten(computed.grads), flatten(computed.variables)
    found |= {f"{GRADIENT}`{dotted(path)}`": x for path, x in grads.items()}
    return found | {f"variable `{dotted(path)}`": x for path, x in variables.items()}


def _updated_arrays(state: TrainState, metrics: Metrics) -> dict[str, jax.Array]:
    """Returns all results of a step, by name."""
    found = {
        f"{_GROUPS.get(group.name, 'state')} `{path or group.name}` after the update": x
        for group in fields(state)
        for path, x in named(getattr(state, group.name)).items()
    }
    return found | {f"metric {name!r}": x for name, x in metrics.items()}


def _changes(before: Arrays, after: Arrays) -> dict[str, dict[Bounds, Part]]:
    """Returns updated arrays. Parameters, moments and averages are given as changes.

    A step changes these values only a little, so the error of a change would look small
    relative to the value.
    """

    def change(path: str | None, bounds: Bounds, part: Part) -> Part:
        if path is None:
            return part
        old = before[path][bounds].values
        return replace(part, values=wide(part.values) - wide(old))

    return {
        name: {b: change(_path_before(name), b, part) for b, part in parts.items()}
        for name, parts in after.items()
    }


def _path_before(name: str) -> str | None:
    """Returns an array's path in the state, if an update changes it only a little."""
    kind, *rest = name.split("`")
    groups = {f"{name} ": group for group, name in _GROUPS.items()}
    group = groups.get(kind)
    return f"{group}.{rest[0]}" if group and group != "variables" else None


def hashes_of(plan: StatePlan, hashes: jax.Array) -> dict[str, dict[str, int]]:
    """Moves the hashes of `make_split_step` to the host, and names them."""
    shards = hashes.addressable_shards
    devices = [label(shard.device) for shard in shards]
    values = np.stack([np.asarray(shard.data).ravel() for shard in shards], axis=-1)
    return {
        name: dict(zip(devices, row, strict=True))
        for name, row in zip(hashed_arrays(plan), values.tolist(), strict=True)
    }


def _hashes(arrays: dict[str, jax.Array]) -> dict[str, dict[str, int]]:
    names = {d.id: label(d) for x in arrays.values() for d in x.sharding.device_set}
    found = start_hashes([*arrays.values()])()
    return {
        array: {names[i]: value for i, value in by_device.items()}
        for array, by_device in zip(arrays, found, strict=True)
    }


def replay(
    programs: Programs, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Runs a step and computes its gradients twice. All processes must call this.

    Raises:
        ReplayError: On all processes, before the update, if any bit differs.
    """
    compute, update = programs.split_step
    first = compute(state, batch)[1]  # the hashes, without the gradients
    computed, second = compute(state, batch)
    hashes = (hashes_of(programs.plan, x) for x in (first, second))
    if found := differing(*hashes):
        lines = [f"  {array}: {devices}" for array, devices in found.items()]
        raise ReplayError(
            f"The gradients of step {int(state.step) + 1} were computed twice, with "
            f"different bits in {len(found)} arrays:\n"
            + "\n".join(lines[:20])
            + "\nThe same program with the same input gave two results, so a device is "
            "faulty, or an operation is not deterministic (on GPUs, set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true). The step was not done and "
            "nothing was saved. If a parameter differs, the memory of its devices is "
            "faulty. If only gradients differ, check all devices of the first gradient."
        )
    return update(state, computed)


@dataclass(frozen=True, eq=False)
class Run:
    """The two halves of a step, for given programs, batch and state.

    Attributes:
        programs: The programs.
        batch: The batch, on the programs' mesh.
        state: Function that returns the state on the programs' mesh, as new arrays.
    """

    programs: Programs
    batch: Batch
    state: Callable[[], TrainState]

    @cached_property
    def computed(self) -> Computed:
        """The results of the first half, on the devices."""
        computed, _ = self.compute(self.state())
        return computed

    @cached_property
    def arrays(self) -> Arrays:
        """The loss, metrics, gradients and variables, on the host."""
        return fetch(_computed_arrays(self.computed))

    def compute(self, state: TrainState) -> tuple[Computed, Hashes]:
        """Runs the first half, and hashes parameters and gradients."""
        with _quietly():
            computed, hashes = self.programs.split_step[0](state, self.batch)
        return computed, hashes_of(self.programs.plan, hashes)

    def update(self, computed: Computed) -> dict[str, jax.Array]:
        """Runs the second half for given results of the first half."""
        with _quietly():
            results = self.programs.split_step[1](self.state(), computed)
        return _updated_arrays(*results)

    def fits(self) -> bool:
        """Returns False if the first half needs more memory than a device has.

        True does not mean that both halves fit.
        """
        limit = memory_limit(self.programs.plan.layout.mesh.local_devices[0])
        if limit is None:
            return True
        abstract = self.programs.plan.whole.abstract
        with _quietly():
            lowered = self.programs.split_step[0].lower(abstract, self.batch)
        found = lowered.compile().memory_analysis()
        if found is None:
            return True
        sizes = (found.argument_size_in_bytes, found.output_size_in_bytes)
        return sum(sizes) + found.temp_size_in_bytes <= limit


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hides the warnings of a verification's programs. The step itself gives them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Whole:
    """The entire state and batch of a run on the host, for programs on other meshes."""

    def __init__(self, own: Run) -> None:
        state = own.state()
        self._kinds = jax.tree.map(lambda x: [key_kind(x)], state)
        self._state = gather(jax.tree.map(data_of, state))
        rows, shared, self._join = partition(own.batch)
        self._rows, self._shared = gather(rows), gather(shared)
        self.num_rows = self._rows[0].shape[0]
        layout, options = own.programs.plan.layout, own.programs.options
        sizes = (layout.mesh.shape[axis] for axis in layout.claims.batch)
        self._unit = math.prod(sizes) * options.num_microbatches

    def row_counts(self) -> Iterator[int]:
        """Yields numbers of rows that devices can share: all, half, and so on."""
        count = self.num_rows
        while count:
            yield count
            count = count // 2 // self._unit * self._unit

    def batch(self, layout: Layout, rows: int) -> Batch:
        """Puts the first rows on a mesh."""
        spec = layout.batch_spec(rows)
        arrays = [_put(x[:rows], layout.sharding(spec)) for x in self._rows]
        shared = [_put(x, layout.sharding(P())) for x in self._shared]
        return self._join(arrays, shared)

    def run(self, programs: Programs, rows: int) -> Run:
        """Returns a `Run` of other programs on the first rows."""
        shardings = programs.plan.whole.shardings

        def state() -> TrainState:
            return jax.tree.map(
                lambda x, kind, sharding: as_keys(_put(x, sharding), *kind),
                *(self._state, self._kinds, shardings),
            )

        return Run(programs, self.batch(programs.plan.layout, rows), state)


def _put(x: Any, sharding: Any) -> jax.Array:
    """Puts an array on devices. Every process must have the entire array."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _gather(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    return gather({name: data_of(x) for name, x in arrays.items()})


def _moved(computed: Computed, plan: StatePlan) -> Computed:
    """Moves the results of the first half to another mesh, through the host."""
    layout = plan.layout
    stored = flatten(plan.shardings.params)
    places: Any = jax.tree.map(lambda x: layout.sharding(P()), computed)
    places = replace(
        places,
        assigned=nest({path: stored[path] for path in flatten(computed.assigned)}),
        variables=plan.shardings.variables,
        grads=nest(
            {
                path: layout.sharding(plan.placements[path].gradient)
                for path in flatten(computed.grads)
            }
        ),
    )

    def move(x: jax.Array, place: NamedSharding) -> jax.Array:
        return as_keys(_put(gather(data_of(x)), place), key_kind(x))

    return jax.tree.map(move, computed, places)


def _nudged(tree: dict, dtype: Any) -> dict:
    """Moves each number up or down by a unit in the last place of a dtype.

    The effect is about as large as the effect of one rounding.
    """
    leaves, structure = jax.tree.flatten(tree)
    nudge = _nudge(tuple(x.sharding for x in leaves), dtype)
    return structure.unflatten(nudge(leaves))


@lru_cache(maxsize=16)
def _nudge(shardings: tuple[Any, ...], dtype: Any) -> Callable[[list], list]:
    """Returns the compiled function for `_nudged`."""

    def nudge(leaves: list[jax.Array]) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(leaves))
        moved = []
        for x, key in zip(leaves, keys, strict=True):
            if jnp.issubdtype(x.dtype, jnp.inexact):
                eps = max(float(jnp.finfo(d).eps) for d in (dtype or x.dtype, x.dtype))
                real = jnp.promote_types(jnp.float32, jnp.finfo(x.dtype).dtype)
                signs = jax.random.rademacher(key, x.shape, real)
                x = (x * (1 + eps * signs)).astype(x.dtype)
            moved.append(x)
        return moved

    return jax.jit(nudge, out_shardings=list(shardings))


def _floor(dtype: Any) -> float:
    """Returns the relative error that is always allowed for a dtype.

    Sums in different orders differ by some roundings. 16-bit numbers are usually added
    in float32, so fewer roundings to 16 bits occur.
    """
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    eps = float(jnp.finfo(dtype).eps)
    return 100 * eps if eps < 1e-5 else 4 * eps


@dataclass(frozen=True, eq=False)
class _Judge:
    """Compares one run with others, up to the effect of rounding on its arrays.

    Attributes:
        own: The run to compare with others.
        before: The state before the step, on the host, by path.
    """

    own: Run
    before: Arrays

    @cached_property
    def updated(self) -> Arrays:
        """The arrays after the second half, as `_changes` returns them."""
        return self.update(self.own, self.own.computed)

    def update(self, run: Run, computed: Computed) -> Arrays:
        """Runs the second half of a run on the same mesh."""
        return _changes(self.before, fetch(run.update(computed)))

    def of_gradients(
        self, name: str, right: Arrays, mine: Arrays | None = None
    ) -> Comparison:
        """Compares the first half with the first half of another program."""
        computes = _floor(self._compute or jnp.int32)
        floors = {
            array: max(computes, floor) if (floor := _floor(x.dtype)) else 0.0
            for array, x in _computed_arrays(self.own.computed).items()
        }
        mine = mine or self.own.arrays
        return compare(name, mine, right, noise=self._noise[0], floors=floors)

    def of_update(self, name: str, right: Arrays) -> Comparison:
        """Compares the second half with another program's, given equal gradients."""
        computed = self.own.computed
        moved = replace(computed, grads=_nudged(computed.grads, None))
        noise = sum_up(self.update(self.own, moved), self.updated)
        return compare(name, self.updated, right, noise=noise, floors=self._floors)

    def of_step(self, name: str, new: Arrays) -> Comparison:
        """Compares an entire step with the two halves."""
        noise, floors = self._noise[1], self._floors
        return compare(name, new, self.updated, noise=noise, floors=floors)

    @property
    def _compute(self) -> Any:
        return self.own.programs.plan.precision.compute

    @cached_property
    def _noise(self) -> tuple[dict[str, Sums], dict[str, Sums]]:
        """The effect of one rounding of the parameters on gradients, and on a step."""
        state = self.own.state()
        moved = replace(state, params=_nudged(state.params, self._compute))
        computed, _ = self.own.compute(moved)
        del state, moved
        gradients = sum_up(fetch(_computed_arrays(computed)), self.own.arrays)
        return gradients, sum_up(self.update(self.own, computed), self.updated)

    @cached_property
    def _floors(self) -> dict[str, float]:
        """The relative errors that are always allowed for updated arrays."""
        changes, floors = sum_up(self.updated, self.updated), dict[str, float]()
        values = sum_up(self.before, self.before)
        stored = _updated_arrays(self.own.programs.plan.whole.abstract, {})
        for array, parts in self.updated.items():
            dtype = next(iter(parts.values())).values.dtype
            floors[array] = _floor(stored[array].dtype if array in stored else dtype)
            path = _path_before(array)
            if path is not None and changes[array].size:
                # A change is the difference of two rounded values.
                exact = not jnp.issubdtype(stored[array].dtype, jnp.inexact)
                eps = 0.0 if exact else float(jnp.finfo(stored[array].dtype).eps)
                floors[array] += 2 * eps * values[path].size / changes[array].size
        return floors


class Verifier:
    """Verifies steps of a run; see `Trainer.verify`.

    Args:
        run: The run.
        programs: The run's programs.
        strategy: The run's strategy.
        warm_start: Directory of a plan, from which a fit would read the step.
    """

    def __init__(
        self, run: RunState, programs: Programs, strategy: Strategy, warm_start: Any
    ) -> None:
        self._run, self._programs = run, programs
        self._strategy, self._warm_start = strategy, warm_start
        self._remedy = ""
        # These programs are compiled once for all calls. The keys are the player, the
        # note about the layers of the model, and the number of devices.
        self._references: dict[tuple[str, str, int], Programs] = {}

    def __call__(self, batch: Batch) -> Verification:
        """Compares one step, and leaves the state as it was.

        Raises:
            VerificationError: If an array differs.
        """
        start, self._remedy = time.perf_counter(), ""
        state = self._run.state
        step, kept = int(state.step), HostCopy(state)
        del state
        # The devices never hold the state twice, because it is in host memory.
        with self._run.set_aside(kept.restore):
            found = tuple(self._comparisons(self._programs.at(step), batch, kept))
        seconds = time.perf_counter() - start
        report = Verification(
            step=step, comparisons=found, remedy=self._remedy, seconds=seconds
        )
        self._note(report)
        if report.differences:
            first = report.differences[0]
            error = VerificationError(f"Step {step}: {first}.\n{report}")
            error.report = report
            raise error
        return report

    def _note(self, report: Verification) -> None:
        """Records the first comparison with differences, or else the last one."""
        own, comparisons = self._run.checkpoints, report.comparisons
        options, _ = self._programs.compiler_options
        facts = facts_to_verify(own.description, self._programs.plan, options)
        wrong = (each for each in comparisons if each.differences)
        chosen = next(wrong, comparisons[-1])
        result = f"{chosen.result}, with {chosen.name}"
        note_verified(own.local_directory, facts, report.step, result)

    def _comparisons(
        self, programs: Programs, batch: Batch, kept: HostCopy
    ) -> Iterator[Comparison]:
        placed = programs.shard_batch(batch)
        if programs.is_auto:
            programs.choose(kept.restore(), placed, self._warm_start)
        judge = _Judge(Run(programs, placed, kept.restore), kept.arrays)
        again, new = self._run_again(judge)
        yield again
        yield judge.of_step("the same step in two halves", new)
        yield self._without_options(judge)
        yield self._on_few_devices(judge)

    def _run_again(self, judge: _Judge) -> tuple[Comparison, Arrays]:
        """Runs the step and its first half twice; returns the first step's changes."""
        own, state = judge.own, judge.own.state()
        halves = [own.compute(state)[1] for _ in range(2)]
        step, _ = own.programs.start(state, own.batch, self._warm_start)
        steps, changes = [], []
        for _ in range(2):
            results = _updated_arrays(*step(state, own.batch))
            steps.append(_hashes(results))
            changes.append(_changes(judge.before, fetch(results)))
            del results
            state = own.state()
        found = differing(*halves) | differing(*steps)
        names = *halves[0], *steps[0]
        comparison = Comparison(
            name="itself, run again",
            note="every bit on every device",
            errors={name: math.inf if name in found else 0.0 for name in names},
            differences=tuple(
                Difference(array=array, where=devices)
                for array, devices in found.items()
            ),
        )
        return comparison, changes[0]

    def _vary(
        self,
        programs: Programs,
        layout: Layout,
        left_out: Iterable[str] = (),
        model: nnx.Module | None = None,
    ) -> Programs:
        """Returns programs for another layout or model, or without some options."""
        plan, options = programs.plan, programs.options
        given = {**(options.compiler_options or {}), **dict.fromkeys(left_out)}
        shares = plan.whole.shares
        other = plan_state(
            model or plan.model.copy(),
            layout,
            {name: share.tx for name, share in shares.items()} or plan.tx,
            wrt=self._run.wrt,
            precision=plan.precision,
            ema_decay=plan.ema_decay,
            offload=plan.offload if layout.mesh == plan.layout.mesh else None,
        )
        changed = replace(options, compiler_options=given)
        view = other.view(plan.player) if plan.player else other
        return Programs(view, programs.loss, changed)

    def _without_options(self, judge: _Judge) -> Comparison:
        """Compares with the same strategy, without compiler options and overlap."""
        name, own = "the step without options", judge.own
        layout, options = own.programs.plan.layout, own.programs.compiler_options[0]
        plain = _without_overlap(layout)
        if plain == layout and not options:
            note = "the strategy overlaps nothing, and no compiler option is set"
            return Comparison(name=name, note=note)

        def compare_without(layout: Layout, left_out: Iterable[str]) -> Comparison:
            run = replace(own, programs=self._vary(own.programs, layout, left_out))
            found = judge.of_gradients(name, run.arrays)
            right = judge.update(run, own.computed)
            return join(found, judge.of_update(name, right))

        found = compare_without(plain, options)
        if found.differences:
            # If an option is at fault, a program without it differs from the step.
            faulty = [x for x in options if compare_without(layout, [x]).differences]
            if plain != layout and not faulty:
                line = f"strategy={_plain_strategy(self._strategy)!r}"
            else:
                left_out = dict.fromkeys(faulty[:1] or options)
                line = f"backend=Backend(compiler_options={left_out})"
            self._remedy = f"To avoid it: Trainer(..., {line})."
        parts = ["overlap"] * (plain != layout) + [f"{len(options)} options"]
        return replace(found, note=f"without {' and '.join(parts)}")

    def _on_few_devices(self, judge: _Judge) -> Comparison:
        """Compares with one device, or the fewest devices that hold the step."""
        for smaller, note in self._models(judge):
            whole, programs = _Whole(smaller.own), smaller.own.programs
            mesh = programs.plan.layout.mesh
            local = mesh.local_devices
            # Not all devices are used, because FSDP would be compared with itself.
            for count in _doubled(min(len(local), max(mesh.size - 1, 1))):
                strategy = FSDP(count) if count > 1 else DataParallel(1)
                key = programs.plan.player, note, count
                if (other := self._references.get(key)) is None:
                    layout = strategy.layout(strategy.make_mesh(local[:count]))
                    options = programs.compiler_options[0]
                    other = self._vary(programs, layout, options)
                    self._references[key] = other
                name = f"{count} devices" if count > 1 else "one device"
                for rows in whole.row_counts():
                    found = self._compare_with(smaller, whole, other, rows, name)
                    if found is not None:
                        return replace(found, note=f"{found.note}{note}")
        note = "not even the smallest part of the step fits into memory"
        return Comparison(name="one device", note=note)

    def _compare_with(
        self, judge: _Judge, whole: _Whole, programs: Programs, rows: int, name: str
    ) -> Comparison | None:
        """Compares with another program on some rows; ``None`` if they do not fit."""
        if rows < whole.num_rows:
            part = whole.batch(judge.own.programs.plan.layout, rows)
            judge = replace(judge, own=replace(judge.own, batch=part))
        run, failure = whole.run(programs, rows), ""
        right = updated = {}
        try:
            if not run.fits():
                failure = _NO_MEMORY
            else:
                right = _gather(_computed_arrays(run.computed))
                moved = _moved(judge.own.computed, programs.plan)
                updated = _gather(run.update(moved))
        except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
            # A loss may need the mesh of its strategy, for example.
            failure = str(error).partition("\n")[0]
        # Each process has a separate reference. They go on only if all references ran.
        if any(failures := allgather_object("reference", failure)):
            if any(_NO_MEMORY in each for each in failures):
                return None
            failure = next(filter(None, failures))
            return Comparison(name=name, note=f"the step does not run there: {failure}")
        right = cut(right, judge.own.arrays)
        changed = _changes(judge.before, cut(updated, judge.updated))
        found = judge.of_gradients(name, right)
        found = join(found, judge.of_update(name, changed))
        if found.differences and not self._remedy:
            self._remedy = self._other_strategy(judge, whole, rows, right)
        return replace(found, note=f"{rows:,} of {whole.num_rows:,} rows")

    def _other_strategy(
        self, judge: _Judge, whole: _Whole, rows: int, right: Arrays
    ) -> str:
        """Returns a line with a strategy that gives the right gradients, if any."""
        devices = [*judge.own.programs.plan.layout.mesh.devices.flat]
        for strategy in (FSDP(), DataParallel()):
            layout = strategy.layout(strategy.make_mesh(devices))
            try:
                programs = self._vary(judge.own.programs, layout)
                computed = whole.run(programs, rows).computed
            except (ParallelError, ValueError):  # such as for an indivisible batch
                continue
            found = cut(_gather(_computed_arrays(computed)), right)
            if not judge.of_gradients("", right, found).differences:
                return f"To avoid it: Trainer(..., strategy={strategy!r})."
        return ""

    def _models(self, judge: _Judge) -> Iterator[tuple[_Judge, str]]:
        """Yields the run, and then runs with fewer layers in each `Stack`."""
        yield judge, ""
        own, plan = judge.own, judge.own.programs.plan
        counts = [m.num_layers for m in plan.modules if isinstance(m, Stack)]
        for layers in _doubled(max(counts, default=1) - 1):
            model = plan.model.copy()
            shorten(model, layers)
            try:
                # A pipeline needs a layer for each stage.
                self._strategy.check(model, plan.layout.mesh)
                programs = self._vary(own.programs, plan.layout, model=model)
            except ParallelError:
                continue
            kept = HostCopy(_first_layers(own.state(), programs.plan.whole))
            smaller = Run(programs, own.batch, kept.restore)
            yield _Judge(smaller, kept.arrays), f", {layers} of {max(counts)} layers"


def _doubled(most: int) -> Iterator[int]:
    """Yields 1, 2, 4 and so on, up to ``most``."""
    count = 1
    while count <= most:
        yield count
        count *= 2


def _without_overlap(layout: Layout) -> Layout:
    """Returns a layout that leaves all transfers to the partitioner."""
    claims = layout.claims
    zero = tuple(replace(each, prefetches=False) for each in claims.zero)
    return replace(
        layout, claims=replace(claims, overlap=None, halves=False, zero=zero)
    )


def _plain_strategy(strategy: Strategy) -> Strategy:
    """Returns a strategy without its options that overlap transfers."""
    if isinstance(strategy, Composite):
        parts = map(_plain_strategy, strategy.parts)
        return Composite(*parts, rules=strategy.rules)
    names = {"overlap", "prefetch"} & vars(strategy).keys()
    return replace(strategy, **dict.fromkeys(names))


def shorten(model: nnx.Module, layers: int) -> None:
    """Leaves only the first layers of each outermost `Stack` of an abstract model."""
    found = {p: m for p, m in nnx.iter_modules(model) if isinstance(m, Stack)}
    for path, stack in found.items():
        is_inner = any(path[: len(p)] == p for p in found if p != path)
        if is_inner or stack.num_layers <= layers:
            continue
        stack.num_layers = layers
        for _, variable in variables_of(stack):
            x = variable.get_raw_value()
            shape = layers, *x.shape[1:]
            variable.set_raw_value(jax.ShapeDtypeStruct(shape, x.dtype))


def _first_layers(state: TrainState, plan: StatePlan) -> TrainState:
    """Returns the first state of a shortened model, with the arrays of a state."""
    wanted = flatten(plan.abstract.params) | flatten(plan.abstract.variables)

    @partial(jax.jit, out_shardings=plan.shardings)
    def cut_layers(params: dict, variables: dict) -> TrainState:
        arrays = flatten(params) | flatten(variables)
        found = {p: x[: wanted[p].shape[0]] if x.ndim else x for p, x in arrays.items()}
        return plan.build(nest(found), 0)

    return cut_layers(state.params, state.variables)
