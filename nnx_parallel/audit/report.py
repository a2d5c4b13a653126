"""`audit`, and the `Report` that it returns."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from nnx_parallel.audit.collectives import KINDS, Collective, axes_of_groups
from nnx_parallel.audit.hlo import Module, parse
from nnx_parallel.audit.walk import TRIPS, Conditional, CostWalk, scope_of
from nnx_parallel.drawing import aligned, as_html
from nnx_parallel.errors import ProgramTextError, kind_of


@dataclass(frozen=True, kw_only=True)
class Report:
    """Computation, communication and memory of one run of a program on one device.

    Attributes:
        flops: Floating-point operations of dots and convolutions, and of Pallas kernels
            that state their number. A multiplication and an addition count as two.
        grouped_flops: The part of ``flops`` in grouped products. On TPUs all rows of
            the operand are counted, although the kernel works in tiles of rows and
            skips the tiles after the last group's rows. On CPUs each group multiplies
            all rows, and all of these products are counted.
        grouped_products: Number of grouped products: `jax.lax.ragged_dot` on TPUs, and
            the products of `nnx_parallel.layers.MoE`. On CPUs a grouped product may
            take several dots.
        collectives: Every collective instruction among more than one device, including
            collectives that a TPU's SparseCores run.
        unread: Instructions that send in an unknown way, such as a kernel that writes
            into another device's memory. ``source`` has the kernel's name. An
            instruction's bytes are its operands or its results, whichever are larger.
            They count as sent and not hidden.
        conditionals: Every conditional. The other attributes count only its most
            expensive branch, by FLOPs and then by bytes in collectives.
        unknown_loops: Loops whose trip count depends on data. Their bodies count once.
            Further rounds of `MoE`, which balanced tokens do not need, do not count.
        custom_calls: Number of executions, by target, of kernels whose FLOPs are
            unknown and not counted.
        opcodes: Number of instructions in the text, by opcode; an instruction in a loop
            counts once. Programs with different numbers are different.
        temporary_bytes: Bytes of scratch memory. This and the next two attributes are
            `None` for a text.
        argument_bytes: Bytes of the arguments.
        output_bytes: Bytes of the results, including donated arguments.
    """

    flops: float
    grouped_flops: float
    grouped_products: int
    collectives: tuple[Collective, ...]
    unread: tuple[Collective, ...]
    conditionals: tuple[Conditional, ...]
    unknown_loops: tuple[str, ...]
    custom_calls: Counter[str]
    opcodes: Counter[str]
    temporary_bytes: int | None
    argument_bytes: int | None
    output_bytes: int | None

    def count(self, kind: str | None = None) -> int:
        """Counts a run's executions of collectives of one kind in `KINDS`, or of all.

        Raises:
            ValueError: If the kind is unknown.
        """
        return sum(each.count for each in self._of_kind(kind))

    def bytes(self, kind: str | None = None) -> int:
        """Sums bytes per device and run, for the same collectives as `count`.

        These are bytes of the data, as in `Collective.bytes_each`, in all trips of
        loops.
        """
        return sum(each.bytes for each in self._of_kind(kind))

    def sent_bytes(self, kind: str | None = None) -> float:
        """Sums `Collective.sent_bytes` for the same collectives as `count`.

        Without a kind, `unread` instructions are included.
        """
        return sum(each.sent_bytes for each in self._sent(kind))

    @property
    def hidden_share(self) -> float | None:
        """The share of all sent bytes that products hide, from 0 to 1.

        A collective is hidden if the compiler's schedule has a product between its
        start and its end. This is an upper bound, not a time, because the product may
        be shorter than the collective. `None` if nothing is sent, or the program is not
        scheduled.
        """
        return self.hidden_share_of(None)

    def hidden_share_of(self, kind: str | None) -> float | None:
        """Returns `hidden_share` for the collectives of one kind."""
        sent = self._sent(kind)
        total = sum(each.sent_bytes for each in sent)
        if not total or any(each.is_hidden is None for each in sent):
            return None
        return sum(each.sent_bytes for each in sent if each.is_hidden) / total

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, with bytes and shares of each collective."""
        plain = {k: v for k, v in vars(self).items() if not isinstance(v, tuple)}
        return plain | {
            "custom_calls": dict(self.custom_calls),
            "opcodes": dict(self.opcodes),
            "sent_bytes": self.sent_bytes(),
            "hidden_share": self.hidden_share,
            "collectives": [_collective_json(each) for each in self.collectives],
            "unread": [_collective_json(each) for each in self.unread],
            "conditionals": [
                vars(each) | {"branch_flops": list(each.branch_flops)}
                for each in self.conditionals
            ],
            "unknown_loops": list(self.unknown_loops),
        }

    def table(self) -> str:
        """Returns the totals, then a line for each group of equal collectives."""
        return "\n".join((*self._totals(), "", aligned(self._rows())))

    def _rows(self) -> list[tuple[str, ...]]:
        # Layers outside of a loop have equal collectives. These share one row, with
        # their counts added.
        alike = Counter()
        for each in (*self.collectives, *self.unread):
            alike[replace(each, count=1, groups=None)] += each.count
        header = ("collective", "count", "each", "total", "group", "axes", "hidden")
        rows = [(*header, "source")]
        rows += [
            (
                each.kind + (" (async)" if each.asynchronous else ""),
                str(count),
                _readable(each.bytes_each, "B"),
                _readable(each.bytes_each * count, "B"),
                str(each.group_size),
                "-" if each.axes is None else ", ".join(each.axes),
                {True: "yes", False: "no", None: "-"}[each.is_hidden],
                # The source of a collective of many arrays has the names of all of
                # them.
                each.source[:100] + "..." * (len(each.source) > 100),
            )
            for each, count in sorted(alike.items(), key=lambda item: item[0].kind)
        ]
        return rows

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        sent = f"{self.count()} collectives of {_readable(self.bytes(), 'B')}"
        return f"<{_readable(self.flops, '')} FLOPs, {sent} on each device>"

    def _repr_html_(self) -> str:
        header, *rows = self._rows()
        return as_html(header, rows, title=repr(self)[1:-1], notes=self._totals())

    def _of_kind(self, kind: str | None) -> tuple[Collective, ...]:
        if kind is not None and kind not in KINDS:
            known = ", ".join(KINDS)
            raise ValueError(f"No collective is called {kind!r}. Kinds: {known}.")
        return tuple(c for c in self.collectives if kind in (None, c.kind))

    def _sent(self, kind: str | None) -> tuple[Collective, ...]:
        return self._of_kind(kind) + (() if kind else self.unread)

    def _totals(self) -> Iterator[str]:
        yield f"FLOPs per device: {_readable(self.flops, '')}"
        if self.grouped_products:
            flops = _readable(self.grouped_flops, "")
            yield f"in {self.grouped_products} grouped products: {flops}"
        memory = (self.temporary_bytes, self.argument_bytes, self.output_bytes)
        names = ("temporaries", "arguments", "outputs")
        for name, size in zip(names, memory, strict=True):
            if size is not None:
                yield f"{name}: {_readable(size, 'B')}"
        if (share := self.hidden_share) is not None:
            sent = _readable(self.sent_bytes(), "B")
            yield f"sent by each device: {sent}, {share:.1%} of it behind products"
        for each in self.unread:
            yield f"not understood, counted as sent and not hidden: {each.source}"
        for source in self.unknown_loops:
            counted = (
                "counted once" if TRIPS.get(scope_of(source), 1) else "not counted"
            )
            yield f"loop of unknown length, {counted}: {source}"
        for each in self.conditionals:
            yield f"conditional, most expensive branch counted: {each.source}"
        if calls := ", ".join(f"{k} x {n}" for k, n in self.custom_calls.items()):
            yield f"kernels with unknown FLOPs: {calls}"


def audit(
    compiled: jax.stages.Compiled | str,
    *,
    mesh: Mesh | None = None,
    taken: Mapping[str, float] | None = None,
    trips: Mapping[str, int] | None = None,
) -> Report:
    """Counts the FLOPs and the collectives of a compiled program.

    Nothing is run. The body of a loop counts once for each iteration, which XLA's
    `cost_analysis` does not do.

    Args:
        compiled: `jax.jit(f).lower(...).compile()`, or the text of optimised HLO, for
            any backend.
        mesh: The report names the axes of this mesh. By default, it is the mesh of the
            compiled program's arguments or results.
        taken: Share of the executions in which a conditional takes its most expensive
            branch, by the `jax.named_scope` directly around it. FLOPs are then the mean
            over branches. Collectives are counted in the most expensive branch.
        trips: Number of trips of loops whose length depends on data, by the
            `jax.named_scope` directly around each loop.

    Raises:
        TypeError: If ``compiled`` is not a program.
        ValueError: If a text is not optimised HLO, or if a scope has no conditional or
            loop.
        ProgramTextError: If this jaxlib cannot print the program because the compiler
            is newer. The message says how to get the text.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> def layers(x):
        ...     return jax.lax.scan(lambda x, _: (x @ x, None), x, length=16)[0]
        >>> report = audit(jax.jit(layers).lower(jnp.ones((8, 8))).compile())
        >>> report.flops == 16 * 2 * 8**3
        True
        >>> report.count("all-gather")
        0
    """
    # `cost_analysis` counts the body of a loop once, and does not count collectives.
    is_text = isinstance(compiled, str)
    if not is_text and not hasattr(compiled, "as_text"):
        raise TypeError(
            f"audit got {kind_of(compiled)}. It takes a compiled program, such as "
            "trainer.train_step.lower(trainer.state, batch).compile(), or its text."
        )
    module = parse(compiled if is_text else _text_of(compiled))
    memory = None if is_text else compiled.memory_analysis()
    taken, trips = taken or {}, trips or {}
    cost = CostWalk(module, trips, taken).program()
    scopes = {each.scope for each in cost.conditionals}
    if missing := taken.keys() - scopes:
        raise ValueError(
            f"taken= names the scopes {sorted(missing)}, but the conditionals are in "
            f"{sorted(scopes)}. Put jax.named_scope directly around the jax.lax.cond."
        )
    if trips:
        _check_trips(module, trips)
    all_instructions = (c.instructions.values() for c in module.computations.values())
    opcodes = Counter(each.opcode for each in chain.from_iterable(all_instructions))
    mesh = mesh or (None if is_text else _mesh_of(compiled, module))
    collectives = tuple(_with_axes(each, mesh) for each in cost.collectives)
    return Report(
        # Each field of `Cost` is also a field of `Report`.
        **vars(replace(cost, collectives=collectives)),
        opcodes=opcodes,
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
        argument_bytes=getattr(memory, "argument_size_in_bytes", None),
        output_bytes=getattr(memory, "output_size_in_bytes", None),
    )


def flops_of(compiled: jax.stages.Compiled) -> float:
    """Returns `Report.flops` of a compiled program, in half of the time of `audit`."""
    module = parse(_text_of(compiled))
    return CostWalk(module).program().flops


def _with_axes(collective: Collective, mesh: Mesh | None) -> Collective:
    if mesh is None or collective.groups is None:
        return collective
    axes = axes_of_groups(collective.groups, dict(mesh.shape))
    return replace(collective, axes=axes)


def _mesh_of(compiled: jax.stages.Compiled, module: Module) -> Mesh | None:
    """Returns a mesh with all devices of the program, on which an array is sharded."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    for each in shardings:
        if isinstance(each, NamedSharding) and each.mesh.size == module.num_devices:
            return each.mesh  # pyright: ignore[reportReturnType]
    return None


def _collective_json(collective: Collective) -> dict[str, Any]:
    facts = vars(collective) | {"bytes": collective.bytes}
    facts["sent_bytes"] = collective.sent_bytes
    # Tuples become lists, as in JSON that is read back.
    facts["dtypes"] = list(collective.dtypes)
    facts["axes"] = None if collective.axes is None else list(collective.axes)
    groups = collective.groups
    facts["groups"] = None if groups is None else [list(group) for group in groups]
    return facts


def _check_trips(module: Module, trips: Mapping[str, int]) -> None:
    """Refuses names of scopes that are not around a loop of unknown length."""
    found = CostWalk(module).program().unknown_loops
    scopes = set(map(scope_of, found))
    if missing := trips.keys() - scopes:
        raise ValueError(
            f"trips= names the scopes {sorted(missing)}, but the loops of unknown "
            f"length are in {sorted(scopes)}. Put jax.named_scope directly around the "
            "jax.lax.while_loop."
        )


def _text_of(compiled: jax.stages.Compiled) -> str:
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        # For work on sparse cores libtpu 0.0.52 writes an `async-update` with several
        # operands, which jaxlib 0.10 does not know.
        raise ProgramTextError(
            f"jaxlib {version('jaxlib')} cannot print this program: its compiler is "
            f"newer ({str(error).splitlines()[0]}). Update jax; or compile with "
            "`compile(compiler_options={'xla_dump_to': DIRECTORY})` and pass `audit` "
            "the text of the file in that directory that ends in "
            "`after_optimizations.txt`."
        ) from error


def _readable(number: float, unit: str) -> str:
    """Formats 1,500 as `1.50 k`."""
    # Units are decimal, as for bandwidths and FLOPs per second. Elsewhere memory is in
    # KiB.
    thousands = max(0, math.floor(math.log10(number) / 3)) if number else 0
    scaled = f"{number / 1000**thousands:.{2 if thousands else 0}f}"
    return f"{scaled} {' kMGTPE'[thousands].strip()}{unit}".strip()
