"""Runs the layers of a `Stack` in order, with remat and prefetching."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from nnx_parallel.errors import StackError, suggest
from nnx_parallel.layers.stack.residuals import Layers, LayerWithResiduals
from nnx_parallel.programs import is_call, trace, variables_in, walk
from nnx_parallel.sharding.constrain import (
    active_layout,
    saves_all_but_gathers,
    use_params,
    without_complex,
)
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import is_inexact
from nnx_parallel.sharding.offload import HOST, Kept
from nnx_parallel.sharding.placement import Placement

Level = Literal["none", "dots", "full"]
"""A preset policy for the values that the backward pass recomputes (`Remat`)."""


@dataclass(frozen=True, init=False, repr=False)
class Save:
    """Keeps the values with these names, and recomputes all other values of a block.

    A value gets a name from ``jax.ad_checkpoint.checkpoint_name``. In the models of
    this library, the names are ``query`` and ``key`` (both after their rotation),
    ``value``, ``attention`` (the output of attention), ``attention_out`` (its
    projection), ``mlp_up`` and ``mlp_gate``. If ``attention`` is kept, the backward
    pass does not run the kernel ``splash`` or attention in blocks again.

    Args:
        names: At least one name. If no block has a value with a name, the first step of
            a Trainer raises a `StackError`.

    Raises:
        ValueError: If no name is given, or if a name is not a string with characters.

    Example:
        >>> Save("attention", "mlp_up")
        Save('attention', 'mlp_up')
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                "Save needs one or more strings with characters, such as "
                f"Save('attention'), but it has {list(names)}."
            )
        object.__setattr__(self, "names", names)

    def __repr__(self) -> str:
        return f"Save({', '.join(map(repr, self.names))})"


Remat = Level | Save | Callable[..., Any]
"""The values that the backward pass recomputes [1].

- ``none``: no value; every activation is kept. Gathered parameters are not kept, but
  gathered again.
- ``dots``: all values except the outputs of products with weights, which are kept.
  Recomputed values are norms, activation functions and attention scores.
- ``full``: the complete block. Only the input of each block is kept.
- `Save`: all values except the values that it names, which are kept.
- a policy of ``jax.checkpoint_policies``: all values that the policy does not save.
  Gathered parameters are gathered again.

References:
    [1] Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
    https://arxiv.org/abs/1604.06174
"""

OVERLAPPED = "overlapped_matmul"
"""Checkpoint name by which remat policies recognise products in rings and in 8 bits."""

BLOCK_INPUT = "block_input"
"""Checkpoint name of the input of a block; this input can be kept in host memory."""

_place = jax.lax.with_sharding_constraint

_default: ContextVar[Remat] = ContextVar("remat", default="none")
_offloaded: ContextVar[Kept | None] = ContextVar("offloaded", default=None)
# The names of values in all stacks that have the same `Save`.
_names: ContextVar[dict[Save, set[str]] | None] = ContextVar("names", default=None)


def is_remat(value: Any) -> bool:
    """Returns True if a value is a `Remat`."""
    if isinstance(value, str | Save) or not callable(value):
        return isinstance(value, Save) or value in get_args(Level)
    # A policy gets a primitive and its operands. A function that makes policies, or
    # `jax.checkpoint` itself, fails here or returns a function.
    try:
        return not callable(value(jax.lax.sin_p, jax.ShapeDtypeStruct((), jnp.float32)))
    except Exception:
        return False


def check_remat(remat: Any) -> None:
    """Raises a ValueError if a value is neither a `Remat` nor ``None``."""
    if remat is not None and not is_remat(remat):
        raise ValueError(
            f"Unknown remat policy {remat!r}. Policies: {list(get_args(Level))}, "
            "Save(*names), a policy of jax.checkpoint_policies, or None to follow the "
            "Trainer's. Call a function that makes a policy, such as "
            "save_only_these_names, first."
        )


@contextlib.contextmanager
def default_remat(remat: Remat, offload: Kept | None = None) -> Iterator[None]:
    """Sets the default policy of every `Stack` that is traced in the context.

    With ``offload``, the values that ``offload`` names are kept in host memory.

    Raises:
        StackError: At the end, if a `Save` has a name that no `Stack` with it has.
    """
    found: dict[Save, set[str]] = {}
    token, names = _default.set(remat), _names.set(found)
    offloaded = _offloaded.set(offload)
    try:
        yield
        for save, known in found.items():
            _check_names(save, known)
    finally:
        _default.reset(token)
        _names.reset(names)
        _offloaded.reset(offloaded)


def _check_names(save: Save, known: set[str]) -> None:
    for name in save.names:
        if name not in known:
            raise StackError(
                f"remat={save!r}: no value of a block has the name {name!r}."
                f"{suggest(name, known)} Names of the blocks: {sorted(known)}. "
                "jax.ad_checkpoint.checkpoint_name(x, name) names a value."
            )


def active_remat() -> Remat:
    """Returns the policy that `default_remat` has set."""
    return _default.get()


def apply_remat(function: Callable, remat: Remat) -> Callable:
    """Wraps the body of a scan in a checkpoint with the policy of ``remat``."""
    if remat == "none":
        return function
    policy = _policy(remat)
    if _offloaded.get() == "block_inputs":
        policy = _with_inputs_on_host(policy)
    # A checkpoint around a `Stack` would replace the policies of the checkpoints inside
    # it. `prevent_cse` is not needed, because in a scan the compiler cannot merge the
    # recomputation with the forward pass.
    return jax.checkpoint(function, policy=policy, prevent_cse=False)


def _policy(remat: Remat) -> Callable[..., Any]:
    """Returns the policy for `jax.checkpoint`; ``remat`` is not ``"none"``."""
    policies = jax.checkpoint_policies
    if remat == "full":
        return policies.nothing_saveable
    if isinstance(remat, Save):
        return without_complex(policies.save_only_these_names(*remat.names))
    if callable(remat):
        return lambda *args, **kwargs: (
            saves_all_but_gathers(*args, **kwargs) and remat(*args, **kwargs)
        )
    # Products with weights have no batch dims, but products in attention have batch
    # dims. A ring is a custom gradient around many small products, so the policy
    # recognises it by its name.
    return without_complex(
        policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable,
            policies.save_only_these_names(OVERLAPPED),
        )
    )


def _with_inputs_on_host(policy: Callable) -> Callable:
    """Changes a policy so that it keeps a block's input in host memory."""
    moves = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst=HOST,
    )

    # A policy may return an object for "recompute", which counts as true in Python. So
    # only the name decides which of the two policies is asked.
    def either(*args: Any, **params: Any) -> Any:
        return (moves if params.get("name") == BLOCK_INPUT else policy)(*args, **params)

    return either


@dataclass(frozen=True, kw_only=True, eq=False)
class StackCall:
    """One call of a `Stack`, with all data that a function needs to run the layers."""

    # One layer: (gathered params, others, x, args, slot) -> (x, others, out). `slot` is
    # the layer's entry of `scanned`, or None. `out` is what it returns beside `x`.
    inner: Callable[..., tuple[Any, dict, Any]]
    params: dict  # by path, each with a leading `layers` dim
    others: dict  # the other variables by path, with a leading `layers` dim
    x: Any  # input of the first layer
    args: tuple  # (args, kwargs), passed unchanged to every layer
    scanned: Any  # a pytree with a leading `layers` dim, or None
    remat: Remat  # which values the backward pass recomputes
    placements: dict[Any, Placement]  # by path, placements of one layer's arrays
    is_plain: bool  # True if a layer only calls its block, and returns only the output
    prefetches: bool  # True to gather the next layer's first kernel during each layer

    @property
    def has_out(self) -> bool:
        """True if a layer returns more than an output and its variables."""
        if self.is_plain:
            return False
        params, others = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            (self.params, self.others),
        )
        inner = partial(self.inner, x=self.x, inputs=self.args, slot=None)
        return bool(jax.tree.leaves(jax.eval_shape(inner, params, others)[2]))

    def note_names(self) -> None:
        """Notes the names of values in a layer, for the check in `default_remat`."""
        found = _names.get()
        if found is None or not isinstance(self.remat, Save):
            return
        params, others, slot = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            (self.params, self.others, self.scanned),
        )

        def gradient(params: dict, others: dict, slot: Any) -> Any:
            def run(params: dict) -> Any:
                return self.inner(params, others, self.x, self.args, slot)[0]

            # A kernel names its output only if the call is differentiated.
            return jax.vjp(run, params)[0]

        traced = trace(gradient, params, others, slot)
        named = (eqn for eqn, _ in walk(traced) if eqn.primitive.name == "name")
        names = found.setdefault(self.remat, set())
        names.update(eqn.params["name"] for eqn in named)

    def block(self, params: dict, *arrays: Any) -> tuple[Any, dict, Any]:
        """Runs one layer, and gives its input the checkpoint name `BLOCK_INPUT`."""
        others, x, *rest = arrays
        # The block uses the named value instead of `x`, so that only one copy is kept.
        x = jax.tree.map(partial(checkpoint_name, name=BLOCK_INPUT), x)
        return self.inner(params, others, x, *rest)


def check_carry(given: Any, found: Any) -> None:
    """Checks that a layer's output is a valid input of the next layer."""
    given, found = (
        jax.tree.map(lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}", tree)
        for tree in (given, found)
    )
    if found != given:
        raise StackError(
            f"A block of the Stack maps {given} to {found}. The output must have the "
            "structure, shapes and dtypes of the input, because it is the input of the "
            "next block. If a block returns more values, or takes or returns them in "
            "another order, use stack.scan(step, x, xs, *args)."
        )


def run_layers(call: StackCall) -> tuple[Any, dict, Any]:
    """Runs the layers as a scan; `gather_late` gathers each layer's parameters."""
    call = _with_array_args(call)
    if call.prefetches:
        return _run_prefetched(call)
    block = apply_remat(call.block, call.remat)

    def step(x: Any, slices: tuple[dict, dict, Any]) -> tuple[Any, tuple[dict, Any]]:
        params, others, slot = slices
        x, others, slot = block(params, others, x, call.args, slot)
        return x, (others, slot)

    # Arrays are (layers, ...); a step of the scan has one layer's slice.
    slices = (call.params, call.others, call.scanned)
    x, (others, scanned) = jax.lax.scan(step, call.x, slices)
    return x, others, scanned


def _with_array_args(call: StackCall) -> StackCall:
    """Binds arguments that are not arrays to the function of the call.

    As arguments they would be traced under remat. If they are bound, a flag such as
    ``training=True`` stays a Python value.
    """
    leaves, tree = jax.tree.flatten(call.args)
    are_arrays = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    if all(are_arrays):
        return call

    def inner(params: dict, others: dict, x: Any, arrays: tuple, slot: Any) -> tuple:
        rest = iter(arrays)
        pairs = zip(leaves, are_arrays, strict=True)
        filled = [next(rest) if is_array else leaf for leaf, is_array in pairs]
        args = jax.tree.unflatten(tree, filled)
        return call.inner(params, others, x, args, slot)

    return replace(call, inner=inner, args=tuple(compress(leaves, are_arrays)))


def _run_prefetched(call: StackCall) -> tuple[Any, dict, None]:
    """Runs the layers of a call that prefetches.

    The result can be differentiated only in reverse mode, like all functions with
    custom gradients in this package.
    """
    layers = _PrefetchedLayers(call)

    # JAX's backward pass of such a scan would keep the carry of each step, and so the
    # gathered parameters of all layers.
    @jax.custom_vjp
    def run(params: dict, others: dict, arrays: list) -> tuple[list, dict]:
        return layers.forward(params, others, arrays, keeps=False)[0]

    run.defvjp(layers.forward, layers.backward)
    x, others = run(call.params, call.others, layers.arrays)
    return jax.tree.unflatten(jax.tree.structure(call.x), x), others, None


class _PrefetchedLayers:
    """The layers of a call; each layer gathers the next layer's first kernel.

    The carry of the scan has a layer's gathered parameters, up to its first kernel.
    While a layer runs, the scan gathers the same parameters of the next layer, and no
    operation of the present layer waits for them. The next layer is the following layer
    in the forward pass, and the preceding layer in the backward pass. A layer gathers
    its other parameters during its products [1, 2]. As in a stage of a pipeline,
    `LayerWithResiduals` finds the residuals.

    References:
        [1] Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
        Parallel", 2023, section 3.3 (forward and backward prefetching),
        https://arxiv.org/abs/2304.11277
        [2] Rajbhandari et al., "ZeRO-Infinity", 2021, section 6.2 (overlap-centric
        design), https://arxiv.org/abs/2104.07857
    """

    def __init__(self, call: StackCall) -> None:
        layout = active_layout()
        assert layout is not None
        self.call = call
        x = jax.tree.map(jnp.asarray, call.x)
        self.leaves, self.tree = jax.tree.flatten((x, call.args))
        # The arrays of x come before the arrays of the arguments. The arguments may
        # also have leaves that are not arrays.
        self.arrays = [a for a in self.leaves if isinstance(a, jax.Array)]
        self.num_x = len(jax.tree.leaves(x))
        self.num_layers = len(next(iter(call.params.values())))
        params, others = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            (call.params, call.others),
        )
        places = {
            k: p for k, p in call.placements.items() if k in params and p.is_gathered
        }
        moved = {k: p for k, p in places.items() if p.used != p.stored}
        first = _used_first(call, params, others)
        # A layer gathers these parameters while it computes with earlier parameters.
        self.own = {k: p for k, p in moved.items() if k not in first}
        moved = {k: p for k, p in moved.items() if k in first}
        self.stored = {k: layout.sharding(p.stored) for k, p in moved.items()}
        self.used = {k: layout.sharding(p.used) for k, p in moved.items()}
        self.gradients = {k: layout.sharding(p.gradient) for k, p in places.items()}
        x, args = self.arrays[: self.num_x], self.arrays[self.num_x :]
        self.one = LayerWithResiduals(
            self._block_vjp, Layers(params, {}, others), x, args
        )

    def forward(
        self, params: dict, others: dict, arrays: list, *, keeps: bool = True
    ) -> tuple[tuple[list, dict], tuple]:
        """Returns ``(output, other variables)``, and the values for `backward`."""
        x, args = arrays[: self.num_x], arrays[self.num_x :]

        def step(carry: tuple[list, dict], xs: tuple) -> tuple[tuple, tuple]:
            x, gathered = carry
            index, held, state = xs
            # All layers run the same program, so the last layer also gathers
            # parameters: its own. The backward pass begins with them.
            ahead = self._gather(params, jnp.minimum(index + 1, self.num_layers - 1))
            layer = Layers(gathered | held, {}, state)
            x, state, saved = self.one.forward(layer, x, args)
            x, following = self._finish(x, ahead)
            return (x, following), (state, saved if keeps else [])

        first = self._gather(params, 0)
        # The scan does not slice the parameters that it gathers in advance, because
        # each step needs the slice of the next layer. It slices all other arrays.
        slices = (jnp.arange(self.num_layers), self._held(params), others)
        (x, gathered), (others, saved) = jax.lax.scan(step, (x, first), slices)
        # For the backward pass, `params` are kept as stored shards. Only the last
        # layer's parameters are kept gathered.
        return (x, others), (params, args, gathered, saved)

    def backward(self, kept: tuple, grads: tuple[list, dict]) -> tuple:
        """Computes the gradients of parameters, variables and arrays.

        The gradients of integers and keys are ``None``.
        """
        params, args, gathered, saved = kept
        grads_x, grads_state = grads

        def step(carry: tuple[list, list, dict], xs: tuple) -> tuple[tuple, tuple]:
            grads_x, grads_args, gathered = carry
            index, held, saved, grads_state = xs
            ahead = self._gather(params, jnp.maximum(index - 1, 0))
            vjp = self.one.vjp(gathered | held, {}, args, saved)
            new, grads_x, more, grads_state = vjp((grads_x, grads_state))
            grads_args = [a + b for a, b in zip(grads_args, more, strict=True)]
            grads_x, following = self._finish(grads_x, ahead)
            # Gradients are reduced to shards in each step. Otherwise the scan would
            # stack complete gradients.
            places = self.gradients
            new = {
                k: _place(g, places[k]) if k in places else g for k, g in new.items()
            }
            return (grads_x, grads_args, following), (new, grads_state)

        floats = {k: g for k, g in grads_state.items() if is_inexact(g)}
        zeros = [jnp.zeros_like(a) for a in args if is_inexact(a)]
        slices = (jnp.arange(self.num_layers), self._held(params), saved, floats)
        (grads_x, grads_args, _), (new, floats) = jax.lax.scan(
            step, (grads_x, zeros, gathered), slices, reverse=True
        )
        rest = iter(grads_args)
        # A custom gradient must be None for integers and keys.
        grads_args = [next(rest) if is_inexact(a) else None for a in args]
        return new, {k: floats.get(k) for k in grads_state}, [*grads_x, *grads_args]

    def _held(self, params: dict) -> dict:
        """Returns the parameters that are not gathered in advance."""
        return {k: x for k, x in params.items() if k not in self.used}

    def _gather(self, params: dict, index: int | jax.Array) -> dict:
        """Gathers the parameters up to the first kernel of one layer."""
        slice_of = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
        moved = {k: x for k, x in params.items() if k in self.used}
        shards = {k: _place(slice_of(x), self.stored[k]) for k, x in moved.items()}
        return {k: _place(x, self.used[k]) for k, x in shards.items()}

    def _finish(self, x: list, ahead: dict) -> tuple[list, dict]:
        """Passes ``x`` and the next layer's gathered parameters through one barrier.

        In the carry, the next layer's parameters replace the present layer's parameters
        in the same buffer. Without this barrier, they would be gathered directly into
        this buffer, and would wait until the present layer no longer reads it.
        """
        x, ahead = jax.lax.optimization_barrier((x, ahead))
        return x, {k: _place(whole, self.used[k]) for k, whole in ahead.items()}

    def _block_vjp(
        self, layer: Layers, x: list, args: list
    ) -> tuple[list, dict, Callable]:
        """Computes one layer's output, its state, and its VJP.

        The VJP maps gradients of the output and of the floating-point state to
        gradients of the parameters, of x, and of the floating-point arguments and
        state.
        """

        def inner(params: dict, *arrays: Any) -> tuple[Any, dict, Any]:
            # The other parameters are already gathered.
            return self.call.inner(use_params(params, self.own), *arrays)

        block = apply_remat(inner, self.call.remat)
        if self.call.remat == "none" and self.own:
            policy = saves_all_but_gathers
            block = jax.checkpoint(inner, policy=policy, prevent_cse=False)

        def run(trained: dict, x: list, floats: list, state: dict) -> Any:
            given = iter(floats)
            arrays = iter([*x, *(next(given) if is_inexact(a) else a for a in args)])
            leaves = (
                next(arrays) if isinstance(a, jax.Array) else a for a in self.leaves
            )
            x, inputs = jax.tree.unflatten(self.tree, leaves)
            out, after, _ = block(trained, layer.state | state, x, inputs, None)
            if assigned := sorted(dotted(path) for path in after if path in trained):
                raise StackError(
                    f"A block of the Stack assigns its parameters: {assigned}. This "
                    "is not possible with FSDP(prefetch='first'), which gathers the "
                    "next layer's parameters during each block. Leave prefetch out "
                    "for such blocks."
                )
            smooth = {k: v for k, v in after.items() if is_inexact(v)}
            # Integers and keys have no gradient, so `after` is an auxiliary output.
            return (jax.tree.leaves(out), smooth), after

        floats = [a for a in args if is_inexact(a)]
        state = {k: v for k, v in layer.state.items() if is_inexact(v)}
        (out, _), vjp, after = jax.vjp(
            run, layer.trained, x, floats, state, has_aux=True
        )
        return out, after, vjp


def _used_first(call: StackCall, params: dict, others: dict) -> set:
    """Returns the keys of the parameters that a layer reads up to its first kernel."""
    traced = trace(call.inner, params, others, call.x, call.args, None, inlined=is_call)
    keys = {var: key for key, var in traced.inputs[0].items()}
    read = (v for eqn in traced.eqns for v in variables_in(eqn.invars) if v in keys)
    found = set()
    for var in read:
        found.add(keys[var])
        if var.aval.ndim > 1:  # pyright: ignore[reportAttributeAccessIssue]
            break
    return found
