"""`plan`: enumerates candidates, drops any that cannot fit, and ranks the rest."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from flax import nnx

from nnx_parallel.errors import ParallelError, PlanError, suggest
from nnx_parallel.layers.stack.scan import Level, Remat
from nnx_parallel.mesh import leaving_mesh
from nnx_parallel.plan.calibration import stored
from nnx_parallel.plan.candidates import (
    Candidate,
    check_fix,
    enumerate_candidates,
    own_candidate,
)
from nnx_parallel.plan.compiled import compile_candidates, missing_compiler
from nnx_parallel.plan.costs import Facts
from nnx_parallel.plan.estimate import Estimate
from nnx_parallel.plan.hardware import Topology
from nnx_parallel.plan.parts import ModelFacts, Parts
from nnx_parallel.plan.report import (
    EQUAL,
    Entry,
    Plan,
    explain,
    order,
    simplest_first,
)
from nnx_parallel.plan.roofline import HOST, Assumptions, Costs, time_step
from nnx_parallel.precision import Precision
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.names import LOGICAL_AXES
from nnx_parallel.sharding.nnx_arrays import variables_of
from nnx_parallel.sharding.offload import Offload
from nnx_parallel.state import StatePlan
from nnx_parallel.strategies.base import Strategy
from nnx_parallel.training.model_flops import count_model_flops, one_device
from nnx_parallel.training.trainer import Trainer

# Except for the state, a step may need as little as this share of the estimated memory.
# A candidate that does not fit even then is not compiled.
_DOUBT = 0.5
# Most estimates are too high by less than this share (docs/benchmarks.md).
_ERROR = 0.25
# Number of candidates with `remat="full"` for which named values are tried too.
_NUM_VARIED = 8


@leaving_mesh()
def plan(
    trainer: Trainer | Parts,
    *,
    topology: str | Topology,
    batch: Any = None,
    player: str | None = None,
    candidates: Candidate | Strategy | Sequence[Candidate | Strategy] | None = None,
    fix: Mapping[str, Any] | None = None,
    compile: int | Literal["all"] = 4,
    num_processes: int = 1,
    cache: str | os.PathLike | None = None,
    assumptions: Assumptions | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Finds how a Trainer's step would run on devices that need not be present.

    It enumerates the strategies with sizes that divide the devices, the model and the
    batch, and uses formulas to drop strategies that cannot fit or win. It then compiles
    the best of the rest, each in a separate process. No array is made, and nothing is
    executed. State bytes are exact; activations are estimated until a candidate is
    compiled; times are ranges. The assumptions of the times are printed.

    Args:
        trainer: A Trainer, built on any devices; its strategy does not matter.
        topology: The devices to run on: ``"v5p:4x4x4"``, ``"2*v5e:16x16"``,
            ``"h100:64"``, ``"cpu:8"``, or a `Topology` of your hardware.
        batch: A global batch as passed to `Trainer.fit`, or its shapes.
        player: With `Players`, the player whose step is planned; by default the player
            with the most FLOPs in its step. The state has the arrays of all players.
        candidates: One candidate or several to compare; by default all that can divide
            the devices, the model and the batch. A `Strategy` is tried with the
            Trainer's microbatches and remat.
        fix: Fixed values, such as ``{"tensor": 8, "remat": "full"}``: sizes of axes,
            ``microbatches``, ``remat``, ``shard``, ``schedule``, ``stack``,
            ``sequence``, ``offload``, ``precision``.
        compile: How many of the best candidates are compiled, if there is a compiler
            for the topology. As many further candidates are compiled if none of them
            fits, or if the time of the fastest is outside of the range that the
            formulas gave. ``0``: none; only formulas are used. ``"all"``: every
            candidate that formulas do not rule out.
        num_processes: How many candidates are compiled at the same time; each needs
            some GiB of memory.
        cache: Directory for results of the compiler.
        assumptions: Shares of the data sheets' figures that the devices attain; by
            default the shares that `calibrate` has measured on such a device, or else
            assumed shares.
        on_progress: Called with a line of text from time to time.

    Returns:
        The `Plan`.

    Raises:
        PlanError: If there is no batch; if the topology, a fixed value, ``compile`` or
            ``player`` is invalid; or if no strategy divides the rows over the devices.

    Example:
        >>> import jax, optax
        >>> from flax import nnx
        >>> def loss(model, batch):
        ...     return ((model(batch["x"]) - batch["y"]) ** 2).mean()
        >>> trainer = Trainer(
        ...     lambda rngs: nnx.Linear(512, 512, rngs=rngs), optax.adam(1e-3), loss
        ... )
        >>> x = jax.ShapeDtypeStruct((64, 512), "float32")
        >>> found = plan(trainer, topology="h100:8", batch={"x": x, "y": x}, compile=0)
        >>> found.best.fits(found.topology)
        True
    """
    started = time.monotonic()
    parts = trainer if isinstance(trainer, Parts) else Parts.of(trainer, batch)
    where = topology if isinstance(topology, Topology) else Topology.parse(topology)
    assumed = assumptions or stored(where.hardware, cache) or Assumptions()
    check_fix(fix or {})
    is_count = isinstance(compile, int) and not isinstance(compile, bool)
    if compile != "all" and not (is_count and compile >= 0):
        raise PlanError(f"compile={compile!r} must be an int of at least 0, or 'all'.")
    parts = _of_player(parts, player)
    if candidates is None:
        found = enumerate_candidates(parts, where, fix)
    else:
        if isinstance(candidates, Candidate | Strategy):
            candidates = [candidates]
        found = [c for each in candidates for c in _as_candidates(parts, each)]
    if not found:
        raise PlanError("candidates=[] is empty. Leave it out to try all candidates.")
    on_progress(f"{len(found):,} candidates; estimating them by formulas")
    estimates = _Estimates(parts, where, assumed, {c.remat for c in found})
    entries = [estimates.of(candidate) for candidate in found]
    if candidates is None and "offload" not in (fix or {}) and parts.offload is None:
        # Offload costs time, so it is tried only for candidates that do not fit without
        # it.
        large = [e.candidate for e in entries if e.costs and not e.fits(where)]
        entries += [estimates.of(replace(c, offload=Offload())) for c in large]
    if candidates is None and "remat" not in (fix or {}):
        entries += _between_dots_and_full(entries, estimates, where)
    alive = plausible(entries, where)
    seconds = {"formulas": time.monotonic() - started}
    notes = _notes(parts, entries)
    if compile:
        count = len(alive) if compile == "all" else compile
        started = time.monotonic()
        if missing := missing_compiler(where):
            notes.append(f"only formulas: {missing}")
        else:
            given = num_processes, cache, on_progress
            done = compile_best(
                alive,
                where,
                count,
                lambda some: _compile_all(parts, some, where, assumed, *given),
            )
            notes += _open_notes(alive, done, where)
            by_candidate = {entry.candidate: entry for entry in done}
            entries = [by_candidate.get(e.candidate, e) for e in entries]
            seconds["compiling"] = time.monotonic() - started
    return _conclude(parts, where, assumed, entries, alive, notes, seconds)


def _between_dots_and_full(
    entries: Sequence[Entry], estimates: _Estimates, topology: Topology
) -> list[Entry]:
    """Returns candidates that keep some of the named values of a block.

    They are variants of the best candidates that fit with ``full`` and do not fit with
    ``dots``.
    """
    known = {entry.candidate: entry for entry in entries}
    full = [e for e in order(entries, topology) if e.candidate.remat == "full"]
    found = []
    for entry in full[:_NUM_VARIED]:
        dots = known.get(replace(entry.candidate, remat="dots"))
        if entry.fits(topology) and dots and not dots.fits(topology):
            saves = estimates.facts_of(entry.candidate).saves
            found += [replace(entry.candidate, remat=save) for save in saves]
    return [estimates.of(candidate) for candidate in found]


def _of_player(parts: Parts, player: str | None) -> Parts:
    """Returns the parts of a player's step; unchanged if there is only one loss."""
    names = [*parts.losses]
    if player is not None and player not in names:
        valid = f"Valid values: {names}." if names else "The Trainer has one loss."
        raise PlanError(
            f"player={player!r} is unknown. {valid}{suggest(player, names)}"
        )
    if not names or (parts.player and player is None):
        return parts
    whole = parts.on(one_device())

    def flops(name: str) -> float:
        return count_model_flops(whole.view(name), parts.losses[name], parts.batch)

    return parts.of_player(player or max(names, key=flops))


def _notes(parts: Parts, entries: Sequence[Entry]) -> list[str]:
    """Returns notes on the player, and on assumptions that `Assumptions` lacks."""
    notes = []
    if parts.player:
        others = [name for name in parts.losses if name != parts.player]
        notes.append(
            f"figures describe a step of the player {parts.player!r}; the state has "
            f"the arrays of all players; player= plans a step of another one: {others}"
        )
    if any(e.candidate.offload for e in entries):
        low, high = (rate / 1e9 for rate in HOST)
        notes.append(f"assumed: {low:g} to {high:g} GB/s between a device and its host")
    if any(e.candidate.precision for e in entries):
        notes.append(
            "the Trainer sets no precision, so bfloat16 products are tried too, which "
            "change the numbers (fix precision=own to leave them out)"
        )
    return notes


def _as_candidates(parts: Parts, given: Candidate | Strategy) -> list[Candidate]:
    if isinstance(given, Candidate):
        return [given]
    if not isinstance(given, Strategy):
        raise PlanError(
            f"candidates has {given!r}. Each must be a Candidate or a Strategy, such "
            "as FSDP()."
        )
    own = replace(own_candidate(parts), strategy=given)
    if parts.options.remat != "auto":
        return [own]
    levels = get_args(Level) if ModelFacts.of(parts).has_remat else ("none",)
    return [replace(own, remat=remat) for remat in levels]


class _Estimates:
    """Estimates candidates by formulas, with one trace for each precision."""

    def __init__(
        self,
        parts: Parts,
        topology: Topology,
        assumptions: Assumptions,
        remats: set[Remat],
    ) -> None:
        self._parts, self._topology = parts, topology
        self._assumptions, self._remats = assumptions, sorted(remats, key=repr)
        self._known: dict[Precision | None, tuple[Facts, _Places]] = {}

    def facts_of(self, candidate: Candidate) -> Facts:
        """Returns the facts in a candidate's precision."""
        precision = candidate.precision
        if precision not in self._known:
            parts = self._parts.with_precision(precision)
            platform = self._topology.hardware.platform
            facts = Facts.of(parts, self._remats, platform)
            self._known[precision] = facts, _Places(facts, self._topology)
        return self._known[precision][0]

    def of(self, candidate: Candidate) -> Entry:
        """Returns the costs of a candidate, or the reason why it cannot run."""
        facts, topology = self.facts_of(candidate), self._topology
        _, places = self._known[candidate.precision]
        state = places.of(candidate.strategy)
        costs: Costs | str = state if isinstance(state, str) else ""
        if isinstance(state, StatePlan):
            try:
                costs = Estimate(facts, candidate, topology, state).costs
            except ParallelError as error:  # such as rows that are not divisible
                costs = str(error)
        if isinstance(costs, str) or isinstance(state, str):
            return Entry(candidate=candidate, axis_sizes={}, refused=str(costs))
        sizes, dtype = dict(state.layout.mesh.shape), facts.parts.compute_dtype
        time = time_step(costs, topology, sizes, dtype, self._assumptions)
        return Entry(
            candidate=candidate,
            axis_sizes=sizes,
            estimate=costs,
            costs=costs,
            time=time,
            estimated_time=time,
            dtype=dtype,
        )


class _Places:
    """Places the training state under each strategy, or keeps the error.

    Strategies that differ only in how they run a step share a placement.
    """

    def __init__(self, facts: Facts, topology: Topology) -> None:
        self._facts, self._devices = facts, topology.devices
        self._by_counts: dict[Any, tuple[Parts, nnx.Module]] = {}
        self._by_claims: dict[Any, StatePlan] = {}
        self._by_strategy: dict[str, StatePlan | str] = {}

    def of(self, strategy: Strategy) -> StatePlan | str:
        """Returns the placement of the state, or the text of the error."""
        if (known := self._by_strategy.get(name := repr(strategy))) is None:
            known = self._by_strategy[name] = self._place(strategy)
        return known

    def _place(self, strategy: Strategy) -> StatePlan | str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                layout = strategy.layout(strategy.make_mesh(self._devices))
                parts, model = self._named(layout)
                strategy.check(model, layout.mesh)
                claims = layout.claims
                zero = [(z.rules, z.shard, z.along) for z in claims.zero]
                sizes = [*layout.mesh.shape.items()], claims.batch
                key = repr((sizes, claims.logical, zero, claims.rules))
                if key not in self._by_claims:
                    self._by_claims[key] = parts.on(layout)
                return replace(self._by_claims[key], layout=layout)
        except ParallelError as error:
            return str(error)

    def _named(self, layout: Layout) -> tuple[Parts, nnx.Module]:
        """Returns the parts and the model with the names of their dims on a layout."""
        # Derived names depend only on these numbers.
        key = tuple(map(layout.num_shards, LOGICAL_AXES))
        if key not in self._by_counts:
            parts = self._facts.parts.named_on(layout)
            self._by_counts[key] = parts, parts.rebuilt()
        return self._by_counts[key]


def plausible(entries: Sequence[Entry], topology: Topology) -> list[Entry]:
    """Returns the candidates that may fit and may be the fastest."""
    usable = topology.hardware.usable_bytes
    fitting = []
    for entry in entries:
        if entry.costs is None:
            continue
        sure = entry.costs.exact_bytes
        if sure + _DOUBT * (entry.costs.total_bytes - sure) <= usable:
            fitting.append(entry)
    # Only a candidate that surely fits may rule out others.
    safe = [e for e in fitting if e.costs and e.costs.total_bytes <= _DOUBT * usable]
    limit = min((e.time.slow for e in safe if e.time), default=float("inf"))
    return [e for e in fitting if e.time and e.time.fast <= limit]


def _with_room(topology: Topology) -> Topology:
    """Returns the topology with memory enlarged by the possible error of formulas."""
    hardware = topology.hardware
    more = replace(hardware, memory_bytes=(1 + _ERROR) * hardware.memory_bytes)
    return replace(topology, hardware=more)


def to_compile(entries: Sequence[Entry], topology: Topology, count: int) -> list[Entry]:
    """Selects candidates: the best that fit by formulas, and the best that may fit.

    The two kinds alternate, because formulas err a little.
    """
    roomy = _with_room(topology)
    turns = zip(order(entries, topology), order(entries, roomy), strict=True)
    by_candidate = {e.candidate: e for pair in turns for e in pair}
    return [*by_candidate.values()][:count]


def compile_best(
    alive: Sequence[Entry],
    topology: Topology,
    count: int,
    compiled: Callable[[Sequence[Entry]], list[Entry]],
) -> list[Entry]:
    """Compiles the best candidates, and more if the results contradict formulas.

    Results contradict the formulas if no compiled candidate fits, or if the time of the
    fastest one is outside the range that formulas gave it. The order by formulas is
    then unreliable, and ``count`` more candidates are compiled.

    Args:
        alive: Candidates, estimated by formulas.
        topology: The devices.
        count: Number of candidates to compile at first.
        compiled: Function that compiles some of the candidates.
    """
    done = compiled(to_compile(alive, topology, count))
    best = _fastest(done, topology)
    if best is not None and _is_as_expected(best):
        return done
    rest = could_win(alive, done, topology)
    return [*done, *compiled(to_compile(rest, topology, count))]


def _is_as_expected(entry: Entry) -> bool:
    """Returns True if the compiler's time is in the range of the formulas."""
    time, guess = entry.time, entry.estimated_time
    return bool(time and guess and guess.fast <= time.middle <= guess.slow)


def could_win(
    alive: Sequence[Entry], done: Sequence[Entry], topology: Topology
) -> list[Entry]:
    """Returns uncompiled candidates that may beat the fastest compiled one.

    A compiler's time is not compared with a formula's time directly. The fast end of a
    formula's range is first multiplied by the least ratio, over compiled candidates, of
    the compiler's time to the formula's time.
    """
    tried = {entry.candidate for entry in done}
    rest = [entry for entry in alive if entry.candidate not in tried]
    best = _fastest(done, topology)
    if best is None or best.time is None:
        return rest
    limit = best.time.middle / min(_ratios(done))
    return [e for e in rest if e.estimated_time and e.estimated_time.fast < limit]


def _ratios(done: Sequence[Entry]) -> list[float]:
    """Returns each compiled candidate's ratio of compiler time to formula time."""
    both = [(e.time, e.estimated_time) for e in done]
    return [time.middle / guess.middle for time, guess in both if time and guess]


def _fastest(done: Sequence[Entry], topology: Topology) -> Entry | None:
    """Returns the fastest compiled candidate that fits."""
    first = next(iter(order(done, topology)), None)
    return first if first is not None and first.fits(topology) else None


def _open_notes(
    alive: Sequence[Entry], done: Sequence[Entry], topology: Topology
) -> list[str]:
    """Returns a note on uncompiled candidates that could still be the fastest."""
    roomy = _with_room(topology)
    rest = [e for e in could_win(alive, done, topology) if e.fits(roomy)]
    ratios = _ratios(done)
    if not rest or not ratios:
        return []
    return [
        f"compiled steps take {min(ratios):.2f} to {max(ratios):.2f} times the "
        f"formulas' time; {len(rest):,} that were not compiled could be faster than "
        "the first, if their fastest estimates are corrected by these ratios"
    ]


def _compile_all(
    parts: Parts,
    entries: Sequence[Entry],
    topology: Topology,
    assumptions: Assumptions,
    num_processes: int,
    cache: str | os.PathLike | None,
    on_progress: Callable[[str], None],
) -> list[Entry]:
    def report(candidate: Candidate, found: Any) -> None:
        spent = f"{sum(found.seconds.values()):.0f} s"
        how = found.error or ("read from disk" if found.is_cached else spent)
        on_progress(f"{candidate.code}: {how}")

    done = compile_candidates(
        parts,
        [entry.candidate for entry in entries],
        topology,
        cache=cache,
        num_processes=num_processes,
        on_done=report,
    )
    compiled = []
    for entry, found in zip(entries, done, strict=True):
        if found.error or entry.estimate is None:
            refused = f"not compiled: {found.error}"
            compiled.append(replace(entry, costs=None, time=None, refused=refused))
            continue
        costs = found.costs(entry.estimate)
        sizes, dtype = entry.axis_sizes, entry.dtype
        spent = time_step(costs, topology, sizes, dtype, assumptions)
        compiled.append(replace(entry, costs=costs, time=spent))
    return compiled


def _conclude(
    parts: Parts,
    topology: Topology,
    assumptions: Assumptions,
    entries: Sequence[Entry],
    alive: Sequence[Entry],
    notes: Sequence[str],
    seconds: dict[str, float],
) -> Plan:
    ranked = order(entries, topology)
    compiled = [e for e in ranked if e.costs and e.costs.is_compiled]
    # Compiled candidates that fit come first, because an estimate may be too low.
    sure = [e for e in compiled if e.fits(topology)]
    ranked = [*sure, *(e for e in ranked if e not in sure)]
    ranked, num_equal = simplest_first(ranked, topology)
    if num_equal > 1:
        notes = [
            *notes,
            f"the first {num_equal} candidates are equally fast, within {EQUAL:.0%}; "
            "the simplest is first",
        ]
    best = ranked[0] if ranked and ranked[0].fits(topology) else None
    ranked = [
        replace(e, why="as fast" if 0 < i < num_equal else explain(e, best, topology))
        for i, e in enumerate(ranked)
    ]
    model = parts.rebuilt()
    trained = [v.get_value() for _, v in variables_of(model, parts.trained)]
    return Plan(
        topology=topology,
        model_name=type(model).__name__,
        num_params=sum(x.size for x in trained),
        num_rows=parts.num_rows,
        dtype=parts.compute_dtype,
        entries=tuple(ranked),
        num_enumerated=len(entries),
        num_dropped=len(entries) - len(alive),
        assumptions=assumptions,
        notes=tuple(notes),
        seconds=seconds,
    )
