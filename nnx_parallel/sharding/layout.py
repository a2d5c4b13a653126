"""Layout: claims on a mesh, and the four specs of every array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.collectives.ring import Mode
from nnx_parallel.errors import UnknownAxisError
from nnx_parallel.mesh import MESH_AXES
from nnx_parallel.sharding.claims import Claims, ZeroKind
from nnx_parallel.sharding.names import (
    LOGICAL_AXES,
    ArrayInfo,
    DimAxes,
    as_tuple,
    check_spec,
    dim_axes,
    dividing_prefix,
    suggest,
    to_spec,
)
from nnx_parallel.sharding.rules import LogicalRules, answer_of


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The four specs of one array, and why.

    Attributes:
        stored: Between steps.
        used: In the computation; differs from ``stored`` where it is gathered at use.
        gradient: Of its gradient, once summed.
        optimizer: Of its optimizer state.
        reason: Which rule decided, or what kept it replicated.
        is_stacked: Whether dim 0 enumerates layers: then the `Stack` gathers it, one
            layer at a time.
    """

    stored: P
    used: P
    gradient: P
    optimizer: P
    reason: str
    is_stacked: bool = False

    def of_layer(self) -> Placement:
        """The placement of one layer of a stacked array."""
        # (layers, ...) to (...), in all four roles.
        roles = ("stored", "used", "gradient", "optimizer")
        specs: dict[str, Any] = {role: P(*getattr(self, role)[1:]) for role in roles}
        return replace(self, **specs, is_stacked=False)

    @property
    def is_gathered(self) -> bool:
        """True if the computation uses it in another layout than it is stored in."""
        return self.used != self.stored or self.gradient != self.stored


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Claims on a mesh: where everything lives.

    Attributes:
        mesh: The mesh, all of its axes Auto.
        claims: A strategy's `Claims.on` this mesh; by default none.

    Raises:
        UnknownAxisError: If a logical name is given to an axis that the mesh lacks.
    """

    mesh: Mesh
    claims: Claims = field(default_factory=Claims)

    def __post_init__(self) -> None:
        claims = self.claims
        for name, axes in (*claims.logical.items(), *claims.activations.items()):
            for axis in as_tuple(axes):
                if axis not in self.mesh.shape:
                    raise UnknownAxisError(
                        f"Dims named {name!r} are given to the mesh axis {axis!r}, "
                        f"which the mesh lacks.{suggest(axis, self.mesh.axis_names)} "
                        f"Its axes: {list(self.mesh.axis_names)}. Map the name to one "
                        "of them, or to None to replicate."
                    )

    @property
    def prefetch(self) -> Mode | None:
        """How a stack gathers its next layer's parameters, or ``None``."""
        return next((z.prefetch for z in self.claims.zero if z.prefetch), None)

    def is_silent(self, names: Sequence) -> bool:
        """True if it says nothing about an array's names: a mesh alone does not."""
        claims = self.claims
        has_claims = claims.logical or claims.batch or claims.activations
        return not has_claims and self.mesh.shape.keys().isdisjoint(names)

    def sharding(self, spec: P) -> NamedSharding:
        """The spec on this mesh; in a manual region, on the mesh as it is there."""
        # JAX refuses to mix values that are placed on one and on the other: the aval
        # of a manual region has the region's mesh
        # (docs/library-notes.md, "Partly manual regions").
        context = jax.sharding.get_abstract_mesh()
        mesh = context if context.manual_axes else self.mesh
        return NamedSharding(mesh, spec)

    def place(self, info: ArrayInfo) -> Placement:
        """The four specs of an array.

        Raises:
            UnknownAxisError: If it carries an unknown name.
            SpecRankError: If a rule's spec is longer than its rank.
            IndivisibleDimError: If an axis does not divide a dim that a rule or a name
                gives to it.
            PlacementConflictError: If claims collide.
        """
        # `Claims.on` has applied LogicalRules: they change names, and place no array.
        rules = tuple(r for r in self.claims.rules if not isinstance(r, LogicalRules))
        if explicit := answer_of(rules, info, self.mesh):
            # The user's word on every dim: FSDP adds no axis, even if all are whole.
            spec, reason = explicit
            axes = dim_axes(spec, len(info.shape))
        else:
            axes, reason = self._by_names(info)
            axes, reason = self._with_zero_axes(info, axes, reason)
        return self._placement(info, axes, reason)

    def _by_names(self, info: ArrayInfo) -> tuple[DimAxes, str]:
        if info.names is None:
            return ((),) * len(info.shape), ""
        axes = tuple(self.axes_of(name, info.path) for name in info.names)
        if info.is_stacked and "layers" not in self.claims.logical:
            axes = ((), *axes[1:])  # also where a mesh axis is called so
        check_spec(info.path, info.shape, to_spec(axes), self.mesh)
        found = [
            f"{name!r} -> {'+'.join(dim)}"
            for name, dim in zip(info.names, axes, strict=True)
            if dim
        ]
        return axes, "name " + ", ".join(found) if found else ""

    def axes_of(
        self, name: str | Sequence[str] | None, path: str = ""
    ) -> tuple[str, ...]:
        """Mesh axes of one dim's name; a mesh axis names itself.

        Raises:
            UnknownAxisError: If the name is neither a logical nor a mesh axis.
        """
        if name is None:
            return ()
        if not isinstance(name, str):
            return tuple(axis for part in name for axis in self.axes_of(part, path))
        if name in self.claims.logical:
            return as_tuple(self.claims.logical[name])
        if name == "batch":
            return self.claims.batch
        if name in self.mesh.shape:
            return (name,)
        # A model names dims for techniques that this run does not use.
        if name in LOGICAL_AXES or name in MESH_AXES:
            return ()
        where = f" of `{path}`" if path else ""
        raise UnknownAxisError(
            f"Name {name!r}{where} is neither a logical axis nor a mesh axis."
            f"{suggest(name, (*LOGICAL_AXES, *self.mesh.axis_names))} Map it with "
            f"rules=(LogicalRules({{{name!r}: 'tensor'}}),), or to None to replicate. "
            f"Logical axes: {list(LOGICAL_AXES)}; axes of this mesh: "
            f"{list(self.mesh.axis_names)}."
        )

    def _with_zero_axes(
        self, info: ArrayInfo, axes: DimAxes, reason: str
    ) -> tuple[DimAxes, str]:
        reasons = [reason] if reason else []
        # Only parameters are gathered at use; statistics and counters are small.
        for zero in self.claims.zero if info.is_param else ():
            if any(zero.rules.axis in dim for dim in axes):
                continue  # a name gives it a dim already
            taken = tuple(bool(dim) for dim in axes)
            dim, why = zero.rules.choose_dim(info, taken, self.mesh)
            reasons.append(why)
            if dim is not None:
                axes = (*axes[:dim], (zero.rules.axis,), *axes[dim + 1 :])
        if not reasons and self.mesh.size > 1:
            reasons.append("no rule names it" if info.is_param else "not a parameter")
        return axes, "; ".join(reasons)

    def _placement(self, info: ArrayInfo, axes: DimAxes, reason: str) -> Placement:
        # ZeRO-1, 2 and 3 are one array of axes, from which each role drops some.
        def spec(*kept: ZeroKind) -> P:
            dropped = {z.rules.axis for z in self.claims.zero if z.shard not in kept}
            return to_spec([tuple(a for a in dim if a not in dropped) for dim in axes])

        return Placement(
            stored=spec("params"),
            used=spec() if info.is_param else spec("params"),
            gradient=spec("params", "gradients"),
            optimizer=spec("params", "gradients", "optimizer"),
            reason=reason,
            is_stacked=info.is_stacked,
        )

    def batch_spec(self, num_rows: int) -> P:
        """Spec of a batch's dim 0: as many of the batch axes as divide the rows."""
        # An evaluation's last batch may be short: it is then split less.
        kept = dividing_prefix(num_rows, self.claims.batch, self.mesh.shape)
        return P(kept) if kept else P()

    def activation_axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes of a logical name for activations alone."""
        return as_tuple(self.claims.activations.get(name))

    def activation_spec(self, shape: Sequence[int], names: Sequence) -> P:
        """Spec of an activation; axes that do not divide their dim are left out."""
        # Two rounds: what names claim comes first, whichever dim is written first.
        axes, used = self._claimed(shape, names)
        for dim, (size, name) in enumerate(zip(shape, names, strict=True)):
            more = self.activation_axes(name) if isinstance(name, str) else ()
            free = [axis for axis in more if axis not in used]
            kept = dividing_prefix(size, (*axes[dim], *free), self.mesh.shape)
            used.update(kept)
            axes[dim] = kept
        return to_spec(tuple(axes))

    def used_spec(self, shape: Sequence[int], names: Sequence) -> P:
        """Spec of a parameter in the computation, by its names alone."""
        return to_spec(tuple(self._claimed(shape, names)[0]))

    def _claimed(
        self, shape: Sequence[int], names: Sequence
    ) -> tuple[list[tuple[str, ...]], set[str]]:
        """Axes of each dim by its name, as many as divide it, and all of them."""
        axes: list[tuple[str, ...]] = []
        used: set[str] = set()
        for size, name in zip(shape, names, strict=True):
            free = [axis for axis in self.axes_of(name) if axis not in used]
            kept = dividing_prefix(size, free, self.mesh.shape)
            used.update(kept)
            axes.append(kept)
        return axes, used
