"""Rewrites a traced program so that XLA partitions it correctly, and as its specs say.

XLA's partitioner has two faults: it multiplies sums by the size of mesh axes that do
not split them, and on some layouts it aborts the process. Neither gives a warning
(docs/library-notes.md, "What the partitioner computes wrongly"). So the program is
traced together with its derivatives, and each convolution is replaced before XLA
compiles the program.

XLA does not see the specs that a model passes by ``out_sharding=``. The output of each
such equation gets a constraint (`sharding.model_specs`).
"""

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from nnx_parallel.mesh import free_axes, manual_region, mesh_here
from nnx_parallel.programs import run
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model_specs import constrain_output, spec_in


def partition_correctly(
    layout: Layout, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps a function so that XLA partitions its program correctly.

    The values do not change. Take derivatives inside ``function``; do not differentiate
    the wrapped function. On one device, ``function`` is returned unchanged.
    """
    if layout.mesh.size == 1:
        return function

    @wraps(function)  # the program gets the function's name
    def corrected(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        program = correct(layout, program)
        outputs = jex.jaxpr_as_fun(program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return corrected


def correct(layout: Layout, program: Any, *, is_complete: bool = True) -> Any:
    """Rewrites a closed jaxpr so that XLA partitions it correctly (see this module).

    Args:
        layout: The layout of the program.
        program: The closed jaxpr.
        is_complete: False if callers may take derivatives of the result. Then the
            convolutions of these derivatives are correct too.

    Returns:
        The new jaxpr, or ``program`` itself if nothing changes.
    """
    return _Corrector(layout, is_complete).correct(program)


class _Corrector:
    """Replaces equations in a program and in the programs nested in it."""

    def __init__(self, layout: Layout, is_complete: bool) -> None:
        self._layout, self._is_complete = layout, is_complete
        # A program that is called twice is corrected once, so that JAX lowers it once.
        # The old program is kept too, so that no other object gets its id.
        self._known: dict[tuple, tuple[Any, Any]] = {}

    def correct(self, value: Any) -> Any:
        """Corrects a program or the parameter of an equation.

        Returns the same object if nothing changes.
        """
        if isinstance(value, tuple | list):
            new = [self.correct(x) for x in value]
            changed = any(a is not b for a, b in zip(value, new, strict=True))
            return type(value)(new) if changed else value
        if isinstance(value, jex.Jaxpr):
            key = id(value), frozenset(jax.sharding.get_abstract_mesh().manual_axes)
            if key not in self._known:
                self._known[key] = value, self._correct_equations(value)
            return self._known[key][1]
        # In jax 0.10, a nested program is a `ClosedJaxpr` around the jaxpr.
        if isinstance(getattr(value, "jaxpr", None), jex.Jaxpr):
            new = self.correct(value.jaxpr)
            return value if new is value.jaxpr else value.replace(jaxpr=new)
        return value

    def _correct_equations(self, program: Any) -> Any:
        eqns = [self._correct_equation(eqn) for eqn in program.eqns]
        changed = any(a is not b for a, b in zip(program.eqns, eqns, strict=True))
        return program.replace(eqns=eqns) if changed else program

    def _correct_equation(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        if eqn.primitive.name == "shard_map":
            mesh = _mesh_inside(eqn)
            if not mesh.auto_axes:  # XLA partitions nothing there
                return eqn
            with jax.sharding.use_abstract_mesh(mesh):
                return self._correct_nested(eqn)
        if found := spec_in(eqn):
            return self._with_constraint(eqn, *found)
        if eqn.primitive.name != "conv_general_dilated":
            return self._correct_nested(eqn)
        convolution = _Convolution(eqn, self._layout, self._is_complete)
        return _call_in_place_of(eqn, convolution.run)

    def _with_constraint(self, eqn: jex.JaxprEqn, name: str, spec: P) -> jex.JaxprEqn:
        """Moves the spec of an equation from a parameter to constraints of outputs."""
        plain = eqn.replace(params=eqn.params | {name: None})
        plain = None if name == "dst_sharding" else self._correct_equation(plain)

        def constrained(*args: jax.Array) -> list[jax.Array]:
            outputs = list(args)  # `reshard` only moves its operand
            if plain is not None:
                pairs = zip(plain.invars, args, strict=True)
                values = {v: x for v, x in pairs if isinstance(v, jex.Var)}
                outputs = run([plain], plain.outvars, values)
            return [constrain_output(self._layout, x, spec) for x in outputs]

        return _call_in_place_of(eqn, constrained)

    def _correct_nested(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        params = {name: self.correct(value) for name, value in eqn.params.items()}
        changed = any(params[name] is not eqn.params[name] for name in params)
        return eqn.replace(params=params) if changed else eqn


def _call_in_place_of(eqn: jex.JaxprEqn, function: Callable) -> jex.JaxprEqn:
    """Makes one equation that calls a function of an equation's inputs."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals
    ]
    # `jit` makes one equation, which gets the inputs and outputs of the old one.
    call = jax.make_jaxpr(jax.jit(function))(*shapes).eqns[0]
    return call.replace(
        invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info
    )


def _mesh_inside(eqn: jex.JaxprEqn) -> Any:
    """Returns the abstract mesh that code inside a ``shard_map`` finds."""
    mesh = eqn.params["mesh"]
    mesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    types = dict.fromkeys(eqn.params["newly_manual_axes"], AxisType.Manual)
    return mesh.update_axis_types(types)


class _Convolution:
    """One convolution; ``run(lhs, rhs)`` computes it."""

    def __init__(self, eqn: jex.JaxprEqn, layout: Layout, is_complete: bool) -> None:
        self._eqn, self._layout = eqn, layout
        # Each spec lists the dims of an array in this order: batch, features, window. A
        # kernel has its output features in place of the batch.
        dims = eqn.params["dimension_numbers"]
        self._specs = dims.lhs_spec, dims.rhs_spec, dims.out_spec
        self._mesh, free = mesh_here(layout.mesh), free_axes(layout.mesh)
        self._axes = [axis for axis in self._mesh.axis_names if axis in free]
        self._sums_rows = eqn.params["batch_group_count"] > 1
        # XLA partitions a depthwise convolution well, by rows or by channels that are
        # already split. For other convolutions with groups it gathers the batch, or, if
        # the window has one entry, aborts the process. A derivative that is taken
        # outside of this program is correct only if the convolution runs in a manual
        # region.
        has_groups = self._sums_rows or eqn.params["feature_group_count"] > 1
        shape = eqn.invars[1].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
        is_depthwise = shape[dims.rhs_spec[1]] == 1
        is_narrow = prod(shape[d] for d in dims.rhs_spec[2:]) == 1
        is_divided = is_depthwise and is_complete and not is_narrow
        in_region = self._sums_rows or (has_groups and not is_divided)
        self.run = self._run_on_shards if in_region else self._run_unsplit

    def _bind(self, lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
        return self._eqn.primitive.bind(lhs, rhs, **self._eqn.params | params)

    def _run_unsplit(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Runs the convolution with window dims that no axis splits.

        Features may be split if there is one group, or if the product of the axis sizes
        divides the number of groups. Otherwise an axis could split a group, and then
        the partitioner fails.
        """
        groups = self._eqn.params["feature_group_count"]
        count = prod(self._mesh.shape[axis] for axis in self._axes)
        is_split = groups == 1 or groups % count == 0

        def place(x: jax.Array, spec: Sequence[int], batch: Sequence[int]) -> jax.Array:
            free = spec[:2] if is_split else batch
            if len(free) == x.ndim:
                return x
            entries = [P.UNCONSTRAINED if d in free else None for d in range(x.ndim)]
            sharding = self._layout.sharding(P(*entries))
            return jax.lax.with_sharding_constraint(x, sharding)

        lhs_spec, rhs_spec, out_spec = self._specs
        out = self._bind(place(lhs, lhs_spec, lhs_spec[:1]), place(rhs, rhs_spec, ()))
        return place(out, out_spec, out_spec[:1])

    def _run_on_shards(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Runs a convolution with groups: each device computes its rows and groups.

        A convolution that computes a kernel's gradient has the groups in its batch dim
        and the rows in its feature dim, which it contracts. Each device then sums over
        its rows, and one all-reduce adds these sums.
        """
        lhs_spec, rhs_spec, out_spec = self._specs
        name = ("batch" if self._sums_rows else "feature") + "_group_count"
        groups = self._eqn.params[name]
        at, other = (1, 0) if self._sums_rows else (0, 1)  # rows and groups of lhs
        rows, split = self._divide(lhs.shape[lhs_spec[at]], groups)
        local = {name: groups // prod(self._mesh.shape[axis] for axis in split)}

        def run(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            out = self._bind(lhs, rhs, **local)
            return jax.lax.psum(out, rows) if self._sums_rows and rows else out

        summed, kept = (rows, ()) if self._sums_rows else ((), rows)

        def spec(ndim: int, dims: dict[int, Sequence[str]]) -> P:
            return P(*(tuple(dims.get(d, ())) or None for d in range(ndim)))

        of_lhs = spec(lhs.ndim, {lhs_spec[other]: split, lhs_spec[at]: rows})
        of_rhs = spec(rhs.ndim, {rhs_spec[0]: split, rhs_spec[1]: summed})
        of_out = spec(lhs.ndim, {out_spec[1]: split, out_spec[0]: kept})
        region = manual_region(run, self._layout.mesh, (of_lhs, of_rhs), of_out)
        return region(lhs, rhs)

    def _divide(self, num_rows: int, num_groups: int) -> tuple[tuple, tuple]:
        """Chooses the axes that split the rows, and the axes that split the groups."""
        batch = self._layout.claims.batch
        order = [a for a in batch if a in self._axes]
        order += [a for a in self._axes if a not in order]
        lengths = [num_rows, num_groups]
        found: tuple[list[str], list[str]] = ([], [])
        for axis in order:
            size = self._mesh.shape[axis]
            if batch and axis not in batch and not self._sums_rows:
                continue  # computing twice is cheaper than sending
            # Axes of the batch split rows first. Other axes split groups first. Often
            # they already split the channels (a layer under tensor parallelism).
            # Otherwise the array is replicated over them, and splitting it along any
            # dim costs nothing.
            for which in (0, 1) if axis in batch or not batch else (1, 0):
                if size > 1 and lengths[which] % size == 0:
                    lengths[which] //= size
                    found[which].append(axis)
                    break
        return tuple(found[0]), tuple(found[1])
