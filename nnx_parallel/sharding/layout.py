"""`Claims` holds everything that a strategy decides; `Layout` applies it to a mesh.

To add a kind of claim, add a field to `Claims`, merge it in ``__or__``, and read it
where it takes effect.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.collectives.ring import ExpertAxis, SequenceAxis
from nnx_parallel.errors import PlacementConflictError, UnknownAxisError, suggest
from nnx_parallel.mesh import mesh_here
from nnx_parallel.sharding.names import (
    LOGICAL_AXES,
    ArrayInfo,
    DimAxes,
    MeshAxes,
    as_tuple,
)
from nnx_parallel.sharding.placement import Placement, Staged, choose_other_dim
from nnx_parallel.sharding.rules import (
    FSDPRules,
    Rules,
    ZeroAxis,
    ZeroKind,
    answer_of,
    check_rules,
    logical_items,
    placing_rules,
)
from nnx_parallel.sharding.specs import (
    absent_from,
    axes_on,
    check_spec,
    dim_axes,
    dividing_prefix,
    in_order,
    merge_axes,
    spec_on,
    splits_rows,
    to_spec,
)

NO_REASON = "no rule names it"
"""The reason for a parameter that no claim splits."""


# This is an abstract class, because `training` and `pipeline` each have a subclass, and
# `training` must not import `pipeline`. If no strategy claims an execution, a step uses
# `AccumulateMicrobatches`.
class Execution(abc.ABC):
    """A way to run a step on the mesh: it computes gradients and outputs.

    In the methods, ``plan`` is a `StatePlan` and ``state`` a `TrainState`. `gradients`
    and `outputs` are traced.
    """

    def check(self, model: Any, mesh: Mesh) -> None:  # noqa: B027
        """Refuses a concrete or abstract model that it cannot run on a mesh."""

    def find_staged(self, model: Any, mesh: Mesh) -> Staged | None:
        """Returns the `Stack` that runs in stages, or ``None``."""
        return None

    def describe(self, model: Any, mesh: Mesh) -> tuple[str, ...]:
        """Returns notes about this model, as lines of `describe`."""
        return ()

    def describe_waits(self, mesh: Mesh, num_microbatches: int) -> str:
        """Returns the share of a step in which devices wait, and how to lower it.

        The text is empty if devices seldom wait.
        """
        return ""

    def observe_labels(self, run: Callable[[], Any]) -> list[Any]:
        """Calls ``run``; returns the `LabelRange` of each call of a library loss in it.

        The list is empty if the losses cannot report their labels.
        """
        return []  # callbacks inside a loss that is cut into parts do not run

    @abc.abstractmethod
    def gradients(
        self,
        plan: Any,
        forward: Callable[[dict, dict, Any, Any], tuple[dict, dict]],
        state: Any,
        batch: Any,
        key: Any,
        num_microbatches: int,
    ) -> tuple[dict, dict, dict]:
        """Computes the gradients of the batch's mean loss.

        Args:
            plan: The plan of the state.
            forward: A function ``(params, variables, batch, key)``. It returns means by
                name, one of them ``loss``, and the new variables. These include
                trained parameters that the loss has assigned.
            state: The state before the step.
            batch: The batch.
            key: The random key of the step.
            num_microbatches: The number of microbatches.

        Returns:
            The gradients of the parameters, summed over microbatches and devices; the
            variables after the step, with the assigned parameters; and the means.
        """

    @abc.abstractmethod
    def outputs(
        self,
        plan: Any,
        function: Callable[[Any, Any, Any], Any],
        arrays: tuple[dict, dict],
        batch: Any,
        key: Any,
        num_microbatches: int,
        *,
        join: Callable[[Any], Any],
        needs_stack: bool,
    ) -> Any:
        """Computes the outputs of a function of a model in evaluation mode.

        Args:
            plan: The plan of the state.
            function: A function ``(model, batch, key)``.
            arrays: The parameters, and all other variables.
            batch: The batch.
            key: The random key.
            num_microbatches: The number of microbatches.
            join: Converts outputs with a leading dim of microbatches to outputs of the
                batch.
            needs_stack: What happens under a pipeline if the function does not call
                the `Stack`. True: an error. False: the function runs without stages.
        """


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The mesh axes of a strategy and their use; ``|`` merges two claims.

    Attributes:
        axis_sizes: Size of each mesh axis of the strategy. ``None``: the axis uses all
            remaining devices.
        batch: Mesh axes that split the batch.
        logical: Mesh axes by logical name, for parameters and activations alike.
        activations: Mesh axes by logical name, only for activations. If two strategies
            claim a name, both axes split the dim. An axis that ``logical`` gives to
            another dim of the same activation is left to that dim.
        zero: Axes that split training state which the computation gathers at use. In
            this order, each axis splits one dim that no other axis splits. An array
            without such a dim is not split over the axis.
        rules: Explicit rules of the user, which decide before names and `FSDPRules`.
        overlap: How products that gather or scatter overlap with their transfers.
            ``None`` leaves this to XLA's partitioner.
        halves: True if a `Stack` runs two halves of the rows at the same time.
        sequence: The axis of long sequences, and attention's exchange over it.
        experts: The axis of experts, and the exchange of tokens over it. The first axis
            of ``zero`` splits state together with the axes of ``sequence`` and
            ``experts``.
        execution: How the step is run. ``None``: one microbatch after the other.
        owner: The name of the strategy in messages.
        parts: The claims that were merged into this object.

    Example:
        >>> left = Claims(axis_sizes={"fsdp": None}, batch=("fsdp",))
        >>> right = Claims(axis_sizes={"tensor": 2}, logical={"mlp": "tensor"})
        >>> (left | right).axis_sizes
        {'fsdp': None, 'tensor': 2}
    """

    axis_sizes: Mapping[str, int | None] = field(default_factory=dict)
    batch: tuple[str, ...] = ()
    logical: Mapping[str, MeshAxes] = field(default_factory=dict)
    activations: Mapping[str, MeshAxes] = field(default_factory=dict)
    zero: tuple[ZeroAxis, ...] = ()
    rules: tuple[Rules, ...] = ()
    overlap: Literal["ring"] | None = None
    halves: bool = False
    sequence: SequenceAxis | None = None
    experts: ExpertAxis | None = None
    execution: Execution | None = None
    owner: str = "a strategy"
    parts: tuple[Claims, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", check_rules(self.rules, self.owner))

    def __or__(self, other: Claims) -> Claims:
        """Merges two claims.

        Raises:
            PlacementConflictError: If both use the same mesh axis, if both say how the
                step is run, or if they give a name different axes and no `LogicalRules`
                decide about it.
        """
        # Pairs of parts are checked, so that a message names two strategies.
        left, right = self.parts or (self,), other.parts or (other,)
        decided = {name for name, _ in logical_items(self.rules + other.rules)}
        for mine, theirs in itertools.product(left, right):
            mine._check(theirs, decided)
        # `owner` keeps its default, because messages take the owners from `parts`.
        return Claims(
            axis_sizes={**self.axis_sizes, **other.axis_sizes},
            batch=self.batch + other.batch,
            # If both have a name, its axes are equal, or a rule decides in `on`.
            logical={**self.logical, **other.logical},
            activations=merge_axes(self.activations, other.activations),
            zero=self.zero + other.zero,
            rules=self.rules + other.rules,
            overlap=self.overlap or other.overlap,
            halves=self.halves or other.halves,
            sequence=self.sequence or other.sequence,
            experts=self.experts or other.experts,
            execution=self.execution or other.execution,
            parts=left + right,
        )

    def _check(self, other: Claims, decided: set[str]) -> None:
        for axis in self.axis_sizes:
            if axis in other.axis_sizes:
                raise PlacementConflictError(
                    f"Both {self.owner} and {other.owner} use the mesh axis {axis!r}. "
                    "Each part of a Composite needs separate axes: keep one of them "
                    "and give it the product of the sizes."
                )
        if self.execution and other.execution:
            raise PlacementConflictError(
                f"Both {self.owner} and {other.owner} say how the step is run. A "
                "Composite can hold one such part: keep one of them."
            )
        for name, axes in self.logical.items():
            if other.logical.get(name, axes) != axes and name not in decided:
                raise PlacementConflictError(
                    f"{self.owner} maps dims named {name!r} to {axes!r}, {other.owner} "
                    f"maps them to {other.logical[name]!r}. Decide with "
                    f"rules=(LogicalRules({{{name!r}: ...}}),)."
                )

    def on(self, mesh: Mesh) -> Claims:
        """Returns the claims with axes in a mesh's order and `LogicalRules` applied."""
        decided: dict[str, tuple[str, ...]] = {}
        for name, axes in logical_items(self.rules):
            claimed = axes_on(mesh, axes)  # 'tensor' and ('tensor',) agree
            if decided.setdefault(name, claimed) != claimed:
                raise PlacementConflictError(
                    f"Two LogicalRules map dims named {name!r} to {decided[name]} and "
                    f"to {claimed}. Keep one."
                )
        activations = {n: a for n, a in self.activations.items() if n not in decided}
        owned = (self.experts, self.sequence)
        along = in_order(tuple(each.axis for each in owned if each), mesh)
        return replace(
            self,
            # The axes are in the mesh's order. If their product does not divide the
            # number of rows, only the first axes split the rows.
            batch=tuple(axis for axis in mesh.axis_names if axis in self.batch),
            logical={n: axes_on(mesh, a) for n, a in self.logical.items()} | decided,
            # The user's rule for a name holds for activations too. Outer axes split
            # first, so that devices along the inner axes hold neighbouring parts.
            activations={
                n: in_order(axes_on(mesh, a), mesh) for n, a in activations.items()
            },
            zero=tuple(replace(z, along=along) for z in self.zero[:1]) + self.zero[1:],
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Claims on a mesh: they decide the place of every array.

    Attributes:
        mesh: The mesh. All axes are Auto.
        claims: The result of `Claims.on` for this mesh, which has all axes of the
            claims.
    """

    mesh: Mesh
    claims: Claims = field(default_factory=Claims)

    def __hash__(self) -> int:
        # Claims have dicts. Few layouts of a program have equal meshes.
        return hash(self.mesh)

    def __post_init__(self) -> None:
        claims = self.claims
        for name, axes in (*claims.logical.items(), *claims.activations.items()):
            for axis in as_tuple(axes):
                if axis not in self.mesh.shape:
                    raise UnknownAxisError(
                        f"Dims named {name!r} are mapped to the mesh axis {axis!r}, "
                        f"which the mesh lacks.{suggest(axis, self.mesh.axis_names)} "
                        f"Its axes: {list(self.mesh.axis_names)}. Map the name to one "
                        "of them, or to None to replicate."
                    )

    @property
    def prefetches(self) -> bool:
        """True if a `Stack` gathers the first kernel of the next layer in advance."""
        return any(z.prefetches for z in self.claims.zero)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Returns the axis that splits long sequences, as a tuple; ``()`` without one.

        This axis splits no parameter.
        """
        split = self.claims.sequence
        return (split.axis,) if split else ()

    def is_silent(self, names: Sequence) -> bool:
        """True if the claims are empty, as for a bare mesh, and no name is an axis."""
        claims = self.claims.logical or self.claims.batch or self.claims.activations
        named = (axis for name in names for axis in as_tuple(name))
        return not claims and self.mesh.shape.keys().isdisjoint(named)

    def sharding(self, spec: P) -> NamedSharding:
        """Returns a sharding on this mesh, or on the mesh of a surrounding region."""
        # JAX refuses to mix values on the two meshes, and values in a manual region
        # have the region's mesh (docs/library-notes.md, "Partly manual regions").
        return NamedSharding(mesh_here(self.mesh), spec)

    def place(self, info: ArrayInfo) -> Placement:
        """Decides the four specs of an array; raises the errors of `check_spec`."""
        given: list[MeshAxes] = list(info.names or ())

        def translate(spec: P) -> P:
            given[:] = spec  # the spec replaces the names
            return self.translate(spec)

        stage_axes: tuple[str, ...] = ()
        rules = placing_rules(self.claims.rules, self.mesh)
        explicit = answer_of(rules, info, self.mesh, translate=translate)
        if explicit:
            # The user's spec decides every dim. FSDP adds no axis, even if the spec
            # splits no dim.
            spec, reason = explicit
            axes = dim_axes(spec, len(info.shape))
        else:
            axes, reason = self._by_names(info)
            axes, reason = self._with_zero_axes(info, axes, reason)
            axes, reason, stage_axes = self._with_moved_axes(info, axes, reason)

        found = self.claims.experts  # experts are not gathered over their axis
        expert_axes = (
            {found.axis} if found and "expert" in (info.names or ()) else set()
        )

        # `axes` has all axes of ZeRO-1, 2 and 3. The spec of each role drops some of
        # them.
        def with_zero(*kept: ZeroKind) -> P:
            idle = (z for z in self.claims.zero if z.shard not in kept)
            dropped = {axis for z in idle for axis in z.axes} - expert_axes
            dropped |= set() if kept else {*stage_axes}
            return to_spec([tuple(a for a in dim if a not in dropped) for dim in axes])

        return Placement(
            stored=with_zero("params"),
            used=with_zero() if info.is_param else with_zero("params"),
            gradient=with_zero("params", "gradients"),
            optimizer=with_zero("params", "gradients", "optimizer"),
            reason=reason,
            is_stacked=info.is_stacked,
            absent=absent_from(self.mesh, given, self.claims.logical),
            stage_axes=stage_axes,
        )

    def translate(self, spec: P, *, is_activation: bool = False) -> P:
        """Translates a spec to the axes of this mesh (`spec_on`)."""
        # With a strategy, axes of the spec may be missing, so that users can change the
        # strategy. With a bare mesh, a missing axis is an error.
        if not self.claims.axis_sizes:
            return spec
        return spec_on(self.mesh, spec, self.claims.batch if is_activation else None)

    def _by_names(self, info: ArrayInfo) -> tuple[DimAxes, str]:
        if info.names is None:
            return ((),) * len(info.shape), ""
        named = tuple(self.axes_of(name, info.path) for name in info.names)
        axes = tuple(map(self._without_whole_heads, info.names, info.shape, named))
        if info.is_stacked and not self._splits_layers(info):
            axes = ((), *axes[1:])  # also if a mesh axis is called "layers"
        check_spec(info.path, info.shape, to_spec(axes), self.mesh, info.names)
        pairs = zip(info.names, axes, strict=True)
        found = [f"{name!r} -> {'+'.join(dim)}" for name, dim in pairs if dim]
        if "kv_heads" in info.names and axes != named and not found:
            return axes, "fewer key heads than devices: each device has all of them"
        return axes, "name " + ", ".join(found) if found else ""

    def _without_whole_heads(
        self, name: MeshAxes, size: int, axes: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Returns the axes of a dim, without axes for key heads if these are too few.

        Then each device has all key heads, and attention takes the heads that the
        device's queries use.
        """
        parts = math.prod(self.mesh.shape.get(axis, 1) for axis in axes)
        is_whole = name == "kv_heads" and parts > size and parts % size == 0
        return () if is_whole else axes

    def _splits_layers(self, info: ArrayInfo) -> bool:
        """True if the strategy gives an array's dim named ``layers`` a mesh axis."""
        if self.claims.execution is None:
            return "layers" in self.claims.logical  # `check_spec` checks the size
        size = self.num_shards("layers")
        return info.splits_layers and info.shape[0] % size == 0

    def _with_moved_axes(
        self, info: ArrayInfo, axes: DimAxes, reason: str
    ) -> tuple[DimAxes, str, tuple[str, ...]]:
        """Adds axes of stages to another dim if they cannot split the layers."""
        wanted = self.axes_of("layers") if self.claims.execution else ()
        free = not any(axis in dim for dim in axes for axis in wanted)
        is_moved = info.is_stacked and info.is_param and not self._splits_layers(info)
        if not (is_moved and wanted and free):
            return axes, reason, ()
        least = FSDPRules.min_size
        dim, why = choose_other_dim(info, axes, wanted, self.mesh, least)
        reason = "; ".join(filter(None, (reason, why)))
        if dim is None:
            return axes, reason, ()
        # The axes of stages come last in the dim, so that within a stage, each FSDP
        # shard is a block of neighbouring entries.
        return (*axes[:dim], (*axes[dim], *wanted), *axes[dim + 1 :]), reason, wanted

    def axes_of(self, name: MeshAxes, path: str = "") -> tuple[str, ...]:
        """Returns the mesh axes of a dim's name; the name may itself be a mesh axis.

        Raises:
            UnknownAxisError: If the name is neither a logical axis nor a mesh axis.
        """
        if name is None:
            return ()
        if not isinstance(name, str):
            return tuple(axis for part in name for axis in self.axes_of(part, path))
        if name in self.claims.logical:
            return as_tuple(self.claims.logical[name])
        if name == "batch" and self.claims.batch:
            return self.claims.batch
        axes = axes_on(self.mesh, name)
        if all(axis in self.mesh.shape for axis in axes):
            return axes
        # A model also names dims for techniques that this run does not use.
        if name in LOGICAL_AXES:
            return ()
        where = f" of `{path}`" if path else ""
        raise UnknownAxisError(
            f"Name {name!r}{where} is neither a logical axis nor a mesh axis."
            f"{suggest(name, (*LOGICAL_AXES, *self.mesh.axis_names))} Map it with "
            f"rules=(LogicalRules({{{name!r}: 'tensor'}}),), or to None to replicate. "
            f"Logical axes: {list(LOGICAL_AXES)}; axes of this mesh: "
            f"{list(self.mesh.axis_names)}."
        )

    def num_shards(self, name: str) -> int:
        """Returns the number of parts into which a dim with this name is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes_of(name))

    def _with_zero_axes(
        self, info: ArrayInfo, axes: DimAxes, reason: str
    ) -> tuple[DimAxes, str]:
        reasons = [reason] if reason else []
        # Only parameters are gathered at use; statistics and counters are small.
        for zero in self.claims.zero if info.is_param else ():
            if any(zero.rules.axis in dim for dim in axes):
                continue  # a name already gives the axis to a dim
            along = tuple(a for a in zero.along if not any(a in dim for dim in axes))
            dim, why = zero.rules.choose_dim(info, axes, self.mesh, along)
            if dim is None and along:  # the first axis may still divide a dim
                along = ()
                dim, why = zero.rules.choose_dim(info, axes, self.mesh)
            reasons.append(why)
            if dim is not None:
                axes = (*axes[:dim], (zero.rules.axis, *along), *axes[dim + 1 :])
        if not reasons and self.mesh.size > 1:
            reasons.append(NO_REASON if info.is_param else "not a parameter")
        return axes, "; ".join(reasons)

    def batch_spec(self, num_rows: int) -> P:
        """Returns the spec of a batch, with the batch axes that divide its dim 0."""
        # The last batch of an evaluation may be short, and is then split over fewer
        # axes.
        kept = dividing_prefix(num_rows, self.claims.batch, self.mesh.shape)
        return P(kept) if kept else P()

    def activation_axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes that a logical name has only for activations."""
        return as_tuple(self.claims.activations.get(name))

    def activation_spec(self, shape: Sequence[int], names: Sequence) -> P:
        """Returns the spec of an activation, without axes that do not divide a dim."""
        known, mesh = self.claims.logical, self.mesh
        names = [
            "batch" if n not in known and splits_rows(mesh, n) else n for n in names
        ]
        # `logical` gives axes to all dims before `activations` gives any, so that the
        # order of the dims does not matter.
        axes = self._claimed(shape, names)
        for dim, (size, name) in enumerate(zip(shape, names, strict=True)):
            more = self.activation_axes(name) if isinstance(name, str) else ()
            free = [axis for axis in more if not any(axis in each for each in axes)]
            axes[dim] = dividing_prefix(size, (*axes[dim], *free), self.mesh.shape)
        return to_spec(axes)

    def used_spec(self, shape: Sequence[int], names: Sequence) -> P:
        """Returns the spec of a parameter in the computation, from its names."""
        return to_spec(self._claimed(shape, names))

    def _claimed(self, shape: Sequence[int], names: Sequence) -> list[tuple[str, ...]]:
        """Returns the axes that the name of each dim claims and that divide the dim."""
        axes: list[tuple[str, ...]] = []
        for size, name in zip(shape, names, strict=True):
            named = self.axes_of(name)
            free = [axis for axis in named if not any(axis in each for each in axes)]
            axes.append(dividing_prefix(size, free, self.mesh.shape))
        return axes
