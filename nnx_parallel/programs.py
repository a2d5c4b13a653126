"""Functions that inline calls of a traced program, cut it, run it and interpret it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import starmap
from typing import Any

import jax
import jax.extend.core as jex

from nnx_parallel.errors import warn_user

# jax 0.12 removed `ClosedJaxpr` from the type stubs, but not from the module.
ClosedJaxpr: Any = vars(jex)["ClosedJaxpr"]

Eqns = Sequence[jex.JaxprEqn]

Choice = Callable[[jex.JaxprEqn], bool]

"""A predicate of an equation: True for a call that `inline` replaces."""

_DEBUG_INFO = jex.DebugInfo("jit", "part of a loss", None, None)


def is_call(eqn: jex.JaxprEqn) -> bool:
    """Returns True if an equation only calls a jaxpr.

    The primitive of ``jax.checkpoint`` is ``remat2``.
    """
    return eqn.primitive.name in ("jit", "closed_call", "remat2")


_CALLS = (
    *("jit", "closed_call", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "shard_map"),
)


_ELEMENTWISE = (
    "neg convert_element_type copy copy_p real imag reduce_precision name pcast pvary "
    "optimization_barrier sharding_constraint mesh_cast layout_constraint reshard "
    "stop_gradient add sub add_any mul div sqrt rsqrt square integer_pow max min clamp "
    "select_n eq ne lt le gt ge is_finite not and or xor sign exp exp2 log log1p expm1 "
    "tanh sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2 logistic erf "
    "erfc erf_inv lgamma digamma cbrt pow rem floor ceil round abs nextafter "
    "bitcast_convert_type shift_left shift_right_logical shift_right_arithmetic "
    "population_count clz"
)

ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Names of primitives that compute each entry from the operands' entries there."""


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """A traced function of arrays. A part of its equations can be run separately."""

    eqns: Eqns
    consts: dict[jex.Var, Any]  # the arrays that the function closes over
    inputs: tuple  # the tree of arguments, with a variable for each array
    outputs: Any  # the tree of results, with a variable or literal for each array
    shapes: Any  # the tree of results, with a `jax.ShapeDtypeStruct` for each array
    effects: Collection[Any]  # effects of all equations, such as prints

    def __call__(self, *args: Any) -> Any:
        """Computes all results."""
        return run(self.eqns, self.outputs, self.consts | bind(self.inputs, args))

    def evaluate(self, wanted: Any, known: Mapping[jex.Var, Any]) -> Any:
        """Computes a tree of variables, with only the equations that it needs.

        Args:
            wanted: A tree of variables and literals of this program.
            known: Values of variables: inputs, or results of earlier equations.
        """
        env = self.consts | dict(known)
        return run(needed(self.eqns, jax.tree.leaves(wanted), env), wanted, env)


def trace(
    function: Callable, *args: Any, inlined: Choice = lambda eqn: False
) -> TracedFunction:
    """Traces a function of pytrees.

    Args:
        function: The function.
        args: The function's arguments: trees of arrays or of ``jax.ShapeDtypeStruct``.
        inlined: Chooses the calls that are replaced by their equations.
    """
    # The trace sees avals, not values, so nothing is computed.
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr = inline(closed.jaxpr, inlined)
    return TracedFunction(
        eqns=jaxpr.eqns,
        consts=dict(zip(jaxpr.constvars, closed.consts, strict=True)),
        inputs=jax.tree.unflatten(jax.tree.structure(args), jaxpr.invars),
        outputs=jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.outvars),
        shapes=shapes,
        effects=jaxpr.effects,
    )


def bind(variables: Any, values: Any) -> dict[jex.Var, Any]:
    """Maps the variables in one tree to the values at the same places in another."""
    leaves = jax.tree.leaves(variables), jax.tree.leaves(values)
    return dict(zip(*leaves, strict=True))


def walk(program: jex.Jaxpr | TracedFunction) -> Iterator[tuple[jex.JaxprEqn, tuple]]:
    """Yields all equations, also nested ones, with the names of outer primitives."""
    for eqn in program.eqns:
        yield eqn, ()
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from ((e, (eqn.primitive.name, *path)) for e, path in walk(inner))


def names_in(eqns: Eqns) -> set[str]:
    """Returns the names of all primitives in equations, also in nested equations."""
    found = {eqn.primitive.name for eqn in eqns}
    nested = (x for eqn in eqns for x in jex.jaxprs_in_params(eqn.params))
    return found.union(*(names_in(jaxpr.eqns) for jaxpr in nested))


def variables_in(atoms: Iterable[Any]) -> list[jex.Var]:
    """Returns the variables among atoms, without literals."""
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


def needed(
    eqns: Eqns, outputs: Iterable[Any], given: Collection[jex.Var] = ()
) -> list[jex.JaxprEqn]:
    """Returns the equations that outputs depend on, if ``given`` variables are known.

    The equations keep their order.
    """
    wanted = set(variables_in(outputs)).difference(given)
    found = []
    # The loop runs backwards. One pass is enough, because only later equations use the
    # results of an equation.
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in variables_in(eqn.invars) if v not in given)
    return found[::-1]


def inputs_of(eqns: Eqns, outputs: Iterable[Any] = ()) -> list[jex.Var]:
    """Returns the variables that equations and ``outputs`` use but do not compute."""
    made = {var for eqn in eqns for var in eqn.outvars}
    used = variables_in([*(a for eqn in eqns for a in eqn.invars), *outputs])
    # The order is kept, because a set would give each process a different program.
    return list(dict.fromkeys(v for v in used if v not in made))


def derived(eqns: Eqns, given: Iterable[jex.Var]) -> set[jex.Var]:
    """Returns ``given`` and the variables that depend on no other inputs."""
    found = set(given)
    for eqn in eqns:
        # An equation without inputs, such as iota, depends on no other inputs either.
        if found.issuperset(variables_in(eqn.invars)):
            found.update(eqn.outvars)
    return found


def reached(eqns: Eqns, given: Iterable[jex.Var]) -> set[jex.Var]:
    """Returns ``given`` and the variables that depend on any of them."""
    found = set(given)
    for eqn in eqns:
        if not found.isdisjoint(variables_in(eqn.invars)):
            found.update(eqn.outvars)
    return found


def warn_of_effects(traced: TracedFunction) -> None:
    """Warns about prints and callbacks, which `needed` leaves out."""
    if traced.effects:
        warn_user(
            "The loss, or a block of its Stack, prints or calls back into Python "
            "(jax.debug.print, callbacks). Under a Pipeline, and with FSDP's prefetch, "
            "only the operations that the outputs need are run, in another order, and "
            "some run twice. The prints and callbacks are left out. Debug with "
            "DataParallel(1), which computes the same numbers.",
        )


def run(eqns: Eqns, wanted: Any, env: Mapping[jex.Var, Any]) -> Any:
    """Evaluates equations; JAX can trace and differentiate the evaluation.

    Args:
        eqns: The equations, in order.
        wanted: A tree of variables and literals. Their values are returned.
        env: The values of all variables that the equations use but do not compute.
    """
    outvars, tree = jax.tree.flatten(wanted)
    # Only variables that are used become inputs. A jaxpr needs a value for each input,
    # and the caller may not know inputs of equations that are left out.
    invars = inputs_of(eqns, outvars)
    jaxpr = jex.Jaxpr(
        constvars=[],
        invars=invars,
        outvars=outvars,
        eqns=list(eqns),
        effects=frozenset[Any]().union(*(eqn.effects for eqn in eqns)),
        debug_info=_DEBUG_INFO,
    )
    function = jex.jaxpr_as_fun(ClosedJaxpr(jaxpr, []))
    return jax.tree.unflatten(tree, function(*(env[var] for var in invars)))


def inline(jaxpr: jex.Jaxpr, wanted: Choice = is_call) -> jex.Jaxpr:
    """Replaces the ``wanted`` calls of a program by the equations that they call."""
    fresh = jex.gensym()
    eqns: list[jex.JaxprEqn] = []

    def emit(body: jex.Jaxpr, names: dict[jex.Var, Any], scope: Any = None) -> list:
        """Adds a body's equations; returns its outputs as variables of the program.

        ``names`` maps the body's variables to variables of the program. ``scope`` holds
        the names of the enclosing calls, for profiles and `audit`.
        """

        def rename(atoms: Iterable[Any]) -> list:
            return [a if isinstance(a, jex.Literal) else names[a] for a in atoms]

        for eqn in body.eqns:
            invars = rename(eqn.invars)
            source = eqn.source_info
            if scope is not None:
                source = source.replace(name_stack=scope + source.name_stack)
            inner = None
            if is_call(eqn) and wanted(eqn):
                inner = next(jex.jaxprs_in_params(eqn.params))
            # A call that closes over constants stays a call, because its constants are
            # values, and equations need variables.
            if inner is not None and not inner.constvars:
                called = source.name_stack
                if "name" in eqn.params:
                    called = called.extend(f"jit({eqn.params['name']})")
                given = dict(zip(inner.invars, invars, strict=True))
                outvars = emit(inner, given, called)
            else:
                # If a jaxpr is called twice, its equations are copied twice. Each copy
                # needs new variables.
                outvars = [
                    v if isinstance(v, jex.DropVar) else fresh(v.aval)
                    for v in eqn.outvars
                ]
                changed = {"invars": invars, "outvars": outvars, "source_info": source}
                eqns.append(eqn.replace(**changed))
            names.update(zip(eqn.outvars, outvars, strict=True))
        return rename(body.outvars)

    outvars = emit(jaxpr, {v: v for v in (*jaxpr.constvars, *jaxpr.invars)})
    # A new Jaxpr would count its constants among the inputs in jax 0.12
    # (docs/library-notes.md, "Tracing and compiling").
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=_DEBUG_INFO)


class Fold:
    """An interpreter of programs: it computes a value for each variable.

    A subclass defines what a value is, and computes the values of an equation's outputs
    from the values of its inputs.

    An instance can interpret several programs with the same equations at once, such as
    traces for different sizes. Methods then get one literal or equation of each
    program. If the programs have different numbers of equations, a call raises a
    `ValueError`.
    """

    def constant(self, *numbers: Any) -> Any:
        """Returns the value of a literal, or of an array that a program closes over."""
        raise NotImplementedError

    def unlike(self) -> Any:
        """Returns the value of an atom that is a literal in only some programs."""
        raise NotImplementedError

    def apply(self, inputs: list, *eqns: jex.JaxprEqn) -> list:
        """Maps the values of an equation's inputs to the values of its outputs.

        An implementation can use `nested` for calls, branches and loops.
        """
        raise NotImplementedError

    def join(self, a: Any, b: Any) -> Any:
        """Returns a value for a variable that has one of two values.

        A loop's interpretation repeats the call until the result no longer changes, so
        repeated calls must reach a fixed point.
        """
        raise NotImplementedError

    def decided(self, value: Any, by: Any) -> Any:
        """Returns the value of an output of a branch or loop.

        Args:
            value: The value of the output, if the predicate or index is ignored.
            by: The value of the predicate or index that decides what runs.
        """
        return self.join(value, by)

    def __call__(self, inputs: Iterable, *programs: Any) -> Any:
        """Maps the values of a program's input arrays to the values of its outputs.

        A program is a `TracedFunction`, a closed jaxpr, or a jaxpr without constants.
        """
        traced = list(map(_as_traced, programs))
        first = traced[0]
        consts = zip(*(each.consts.values() for each in traced), strict=True)
        known = dict(zip(first.consts, starmap(self.constant, consts), strict=True))
        known |= dict(zip(jax.tree.leaves(first.inputs), inputs, strict=True))
        for eqns in zip(*(each.eqns for each in traced), strict=True):
            operands = zip(*(eqn.invars for eqn in eqns), strict=True)
            values = [self._read(known, *atoms) for atoms in operands]
            outputs = self.apply(values, *eqns)
            known.update(zip(eqns[0].outvars, outputs, strict=True))
        return jax.tree.map(partial(self._read, known), *(x.outputs for x in traced))

    def nested(self, inputs: list, *eqns: jex.JaxprEqn) -> list | None:
        """Interprets a call, branch or loop; returns ``None`` for other equations."""
        name, params = eqns[0].primitive.name, [eqn.params for eqn in eqns]
        if name == "cond":
            which, *rest = inputs
            branches = zip(*(p["branches"] for p in params), strict=True)
            found = zip(*(self(rest, *bodies) for bodies in branches), strict=True)
            return [self.decided(reduce(self.join, xs), which) for xs in found]
        if name == "scan":
            bodies = [p["jaxpr"] for p in params]
            first, end = carried_by_scan(eqns[0])
            return self._loop(inputs[:first], inputs[first:end], inputs[end:], bodies)
        if name == "while":
            first, end = params[0]["cond_nconsts"], params[0]["body_nconsts"]
            end += first
            bodies = [p["body_jaxpr"] for p in params]
            carry = self._loop(inputs[first:end], inputs[end:], [], bodies)
            ends = [p["cond_jaxpr"] for p in params]
            (which,) = self([*inputs[:first], *carry], *ends)
            return [self.decided(x, which) for x in carry]
        if name not in _CALLS:
            return None
        kinds = jex.Jaxpr, ClosedJaxpr  # the same class in jax 0.12
        values = [[x for x in p.values() if isinstance(x, kinds)] for p in params]
        return self(inputs, *(body for (body,) in values))

    def _loop(self, consts: list, carry: list, xs: list, bodies: list) -> list:
        """Interprets a loop's body until the carried values stay the same."""
        while True:
            outputs = self([*consts, *carry, *xs], *bodies)
            new = list(map(self.join, carry, outputs))
            if new == carry:
                return [*carry, *outputs[len(carry) :]]
            carry = new

    def _read(self, known: Mapping[jex.Var, Any], *atoms: Any) -> Any:
        are_literals = {isinstance(atom, jex.Literal) for atom in atoms}
        if len(are_literals) == 2:
            return self.unlike()
        if are_literals == {True}:
            return self.constant(*(atom.val for atom in atoms))
        return known[atoms[0]]


def _as_traced(program: Any) -> TracedFunction:
    if isinstance(program, TracedFunction):
        return program
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    return TracedFunction(
        eqns=jaxpr.eqns,
        consts=dict(zip(jaxpr.constvars, consts, strict=True)),
        inputs=jaxpr.invars,
        outputs=jaxpr.outvars,
        shapes=[atom.aval for atom in jaxpr.outvars],
        effects=jaxpr.effects,
    )


def carried_by_scan(eqn: jex.JaxprEqn) -> tuple[int, int]:
    """Returns the indices at which a scan's carried operands begin and end.

    Constants come before them, and the arrays that the scan slices come after them.
    """
    (body,) = jex.jaxprs_in_params(eqn.params)

    def num_sliced(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        pairs = zip(outer, inner, strict=True)
        return sum(a.aval.ndim > b.aval.ndim for a, b in pairs)

    # Sliced arrays are counted by rank: inside the body they have one dim less. In jax
    # 0.12 the equation has no parameters with these numbers.
    end = len(eqn.invars) - num_sliced(eqn.invars, body.invars)
    num_carried = len(eqn.outvars) - num_sliced(eqn.outvars, body.outvars)
    return end - num_carried, end


class Origins(Fold):
    """Finds the inputs that each value depends on.

    A value is a frozen set with the names of inputs. The caller chooses these names.
    """

    def constant(self, *numbers: Any) -> frozenset:
        """Returns the empty set."""
        del numbers
        return frozenset()

    def join(self, a: frozenset, b: frozenset) -> frozenset:
        """Returns the union of two sets."""
        return a | b

    def apply(self, inputs: list, *eqns: jex.JaxprEqn) -> list:
        """Returns the union of the inputs' sets for each output of a plain equation."""
        outputs = self.nested(inputs, *eqns)
        if outputs is None:
            outputs = [frozenset().union(*inputs)] * len(eqns[0].outvars)
        return outputs
