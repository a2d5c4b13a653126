"""`Stack`: a module that stores N equal blocks as one and scans over them."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import errors, nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import StackError
from nnx_parallel.layers.stack.build import check_blocks, stack_blocks, unstack_block
from nnx_parallel.layers.stack.scan import (
    Remat,
    StackCall,
    active_remat,
    check_carry,
    check_remat,
    run_layers,
)
from nnx_parallel.sharding.constrain import active_layout, note_effect
from nnx_parallel.sharding.model import (
    ModelDef,
    arrays_of,
    build_model,
    update_arrays,
)
from nnx_parallel.sharding.names import dotted, path_of
from nnx_parallel.sharding.nnx_arrays import is_inexact, name_dim, variables_of
from nnx_parallel.sharding.specs import dim_axes

Runner = Callable[[StackCall], tuple[Any, dict, Any]]
"""A function that runs all layers of a call.

It returns the output, the variables that are not parameters, and the scanned outputs.
"""

Step = Callable[..., tuple[Any, Any]]
"""The step of one block: ``(block, x, slice, *args, **kwargs) -> (x, out)``."""

_runner: ContextVar[Runner] = ContextVar("runner", default=run_layers)


@contextlib.contextmanager
def using_runner(runner: Runner) -> Iterator[None]:
    """Makes ``runner`` run the layers of every `Stack` traced in the context."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


class ByBlock(NamedTuple):
    """One value for each block of a group, for a `Stack` whose blocks alternate.

    Attributes:
        values: Pytrees, whose structures may differ.
    """

    values: tuple[Any, ...]


class Stack(nnx.Module):
    """N equal blocks, stored as one block whose arrays have a leading ``layers`` dim.

    Only one block is traced and compiled, for any N. A call is a `jax.lax.scan` over
    the layers. If the strategy stores parameters in shards, the scan gathers them one
    layer at a time, and gathers them again in the backward pass.

    An optimizer that computes a property of a complete array, such as the norm in
    ``optax.lamb``, treats all layers of an array as one array. With `by_layer`, it
    treats each layer separately.

    Args:
        make_block: A function that builds one block from an ``nnx.Rngs``. The block
            maps ``(x, *args)`` to an array with the shape and dtype of ``x``. If blocks
            of several kinds alternate, pass a list with a function for each kind. Then
            a layer of the stack is a group, an ``nnx.List`` with a block of each kind.
        num_layers: N, the number of blocks. For blocks of several kinds, N is the
            number of groups.
        rngs: Keys for all blocks.
        remat: The values that the backward pass recomputes (`Remat`); ``None`` uses the
            Trainer's policy.

    Raises:
        StackError: If N < 1, or if a block shares a Variable between two of its modules
            or with a module outside the stack. The stacked copies of this Variable
            would silently become different in training.

    Example:
        >>> def make_block(rngs):
        ...     return nnx.Linear(4, 4, rngs=rngs)
        >>> stack = Stack(make_block, 3, rngs=nnx.Rngs(0))
        >>> stack.layer.kernel.shape
        (3, 4, 4)
        >>> stack(jax.numpy.ones((2, 4))).shape
        (2, 4)
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module] | Sequence[Callable],
        num_layers: int,
        *,
        rngs: nnx.Rngs,
        remat: Remat | None = None,
    ) -> None:
        if num_layers < 1:
            raise StackError(
                f"num_layers={num_layers}. A Stack needs at least 1 layer."
            )
        check_remat(remat)
        makers = make_block if isinstance(make_block, Sequence) else [make_block]
        if not makers:
            raise StackError("make_block is []. A Stack needs at least 1 function.")

        def make_layer(rngs: nnx.Rngs) -> nnx.Module:
            blocks = [build_model(make, rngs) for make in makers]
            return nnx.List(blocks) if blocks[1:] else blocks[0]

        _check_unshared(make_layer)
        self.num_layers = num_layers
        self.period = len(makers)
        self.remat: Remat | None = remat
        keys = jax.random.split(rngs.params(), num_layers)
        self.layer = jax.vmap(lambda key: make_layer(nnx.Rngs(key)))(keys)
        self.name_layers()

    @classmethod
    def of(
        cls, blocks: Sequence[Any], *, period: int = 1, remat: Remat | None = None
    ) -> Self:
        """Makes a stack of blocks that are already built, such as pretrained blocks.

        The stack copies the arrays of the blocks, and the blocks do not change. Blocks
        may be abstract, from ``nnx.eval_shape``.

        Args:
            blocks: A list, ``nnx.List`` or tuple of N modules that differ only in the
                values of their arrays.
            period: Length of the repeating pattern, if blocks of several kinds
                alternate. Then a layer of the stack is a group of ``period`` blocks,
                ``num_layers`` is N / period, and FSDP gathers one group at a time.
            remat: As in `Stack`, but for a group.

        Raises:
            StackError: If two blocks differ in anything but the values of their arrays
                (the message describes the first difference), if they share a Variable,
                or if N is not a multiple of the period.

        Example:
            >>> blocks = [nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)]
            >>> stack = Stack.of(blocks)
            >>> stack.layer.kernel.shape
            (3, 4, 4)
            >>> bool((stack.unstack()[2].kernel == blocks[2].kernel).all())
            True
        """
        if not isinstance(blocks, Iterable):
            raise StackError(
                f"Stack.of got one {type(blocks).__name__}. It takes a list of blocks: "
                "an nnx.List, a list, a tuple, or the layers of an nnx.Sequential."
            )
        blocks = list(blocks)
        check_blocks(blocks, period)
        groups = range(0, len(blocks), period)
        layers = [nnx.List(blocks[i : i + period]) for i in groups]
        # An NNX object exists only if its class was called. So the code makes a stack
        # of an empty block and then sets its layer.
        stack = cls(lambda _: nnx.Module(), len(layers), rngs=nnx.Rngs(0), remat=remat)
        stack.period = period
        stack.layer = stack_blocks(layers if period > 1 else blocks)
        stack.name_layers()
        return stack

    def unstack(self) -> list[Any]:
        """Returns the blocks in order, with copies of their arrays."""
        count = range(self.num_layers)
        layers: list[Any] = [unstack_block(self.layer, i) for i in count]
        return layers if self.period == 1 else [block for g in layers for block in g]

    def name_layers(self) -> None:
        """Gives the leading dim of every array the name ``layers``."""
        for _, leaf in nnx.to_flat_state(nnx.state(self.layer)):
            if isinstance(leaf, nnx.Variable):
                name_dim(leaf)

    def __call__(self, x: Any, *args: Any, scanned: Any = None, **kwargs: Any) -> Any:
        """Runs the blocks in order.

        Args:
            x: Input of the first block: an array or a pytree of arrays.
            args: Arguments that every block gets. If one is an ``nnx.Rngs``, the blocks
                draw from it in order, as in a Python loop.
            scanned: A pytree of arrays with a leading dim of all blocks, such as a
                cache. Each block gets its slice as the last positional argument, and
                returns ``(x, slice)``. If blocks of several kinds alternate,
                ``scanned`` may be a `ByBlock` instead. It has a pytree for each block
                of a group, whose arrays have a leading dim of size N.
            kwargs: Keyword arguments that every block gets.

        Returns:
            The last block's output, or ``(output, scanned)`` if ``scanned`` is given.

        Raises:
            StackError: If a `ByBlock` does not have a value for each block of a group.
        """
        if isinstance(scanned, ByBlock) and len(scanned.values) != self.period:
            raise StackError(
                f"The ByBlock has {len(scanned.values)} values, but a group of this "
                f"Stack has {self.period} blocks. Give one value for each block."
            )

        def step(block: Any, x: Any, slot: Any, *args: Any, **kwargs: Any) -> Any:
            if slot is None:
                return block(x, *args, **kwargs), None
            return block(x, *args, slot, **kwargs)

        is_plain = scanned is None
        x, scanned_out = self._scan(step, x, scanned, (args, kwargs), is_plain)
        return x if scanned is None else (x, scanned_out)

    def scan(
        self, step: Step, x: Any, xs: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Runs ``jax.lax.scan`` over the blocks, with a step that the caller writes.

        Args:
            step: The body of the loop:
                ``(block, x, slice, *args, **kwargs) -> (x, out)``. It must not close
                over arrays; pass them as arguments.
            x: Input of the first step. Each later step gets the ``x`` that the step
                before it returned.
            xs: A pytree of arrays with a leading dim of size N, or a list of N equal
                modules, such as caches. Each step gets its ``slice``.
            args: Arguments that every step gets.
            kwargs: Keyword arguments that every step gets.

        Returns:
            The last ``x``, and the ``out`` of all steps, stacked along a leading dim of
            size N.

        Example:
            >>> stack = Stack.of([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(3)])
            >>> def step(block, x, scale):
            ...     x = block(x) * scale
            ...     return x, x.mean()
            >>> x, means = stack.scan(step, jax.numpy.ones((2, 4)), jax.numpy.ones(3))
            >>> means.shape
            (3,)
        """
        return self._scan(step, x, xs, (args, kwargs), is_plain=False)

    def _scan(
        self, step: Step, x: Any, xs: Any, inputs: tuple, is_plain: bool
    ) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(inputs, is_leaf=_is_stream)
        if any(map(_is_stream, leaves)):
            return self._scan_with_streams(step, x, xs, leaves, tree)
        if isinstance(xs, nnx.List | list) and isinstance(next(iter(xs)), nnx.Module):
            xs = stack_blocks(xs)
        joins = self.period > 1 and not isinstance(xs, ByBlock)
        if joins:
            # (N * period, ...) -> (N, period, ...)
            sizes = self.num_layers, self.period
            xs = jax.tree.map(lambda a: a.reshape(*sizes, *a.shape[1:]), xs)
        is_group = self.period > 1 or isinstance(xs, ByBlock)
        step = _in_groups(step) if is_group else step
        call = self._call(step, x, inputs, xs, is_plain)
        # In training and evaluation, a pipeline may run the layers. Calls with `xs`,
        # such as decoding with a cache, always use a scan.
        run = _runner.get() if xs is None else run_layers
        x, others, out = (run_in_halves if run is run_layers else run)(call)
        if others:
            update_arrays(self.layer, others)
        if joins:
            out = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out)
        return x, out

    def _scan_with_streams(
        self, step: Step, x: Any, xs: Any, leaves: list, tree: Any
    ) -> tuple[Any, Any]:
        """Runs `scan` for arguments with random streams, which the scan carries."""
        at = [i for i, leaf in enumerate(leaves) if _is_stream(leaf)]
        streams = nnx.List([leaves[i] for i in at])
        graphdef, state = nnx.split(streams)
        leaves = [None if i in at else leaf for i, leaf in enumerate(leaves)]

        def inner(block: Any, carry: Any, slot: Any, *leaves: Any) -> tuple[Any, Any]:
            x, state = carry
            streams = nnx.merge(graphdef, state)
            filled = dict(enumerate(leaves)) | dict(zip(at, streams, strict=True))
            args, kwargs = jax.tree.unflatten(tree, filled.values())
            x, out = step(block, x, slot, *args, **kwargs)
            return (x, nnx.to_pure_dict(nnx.state(streams))), out

        carry = (x, nnx.to_pure_dict(state))
        (x, after), out = self.scan(inner, carry, xs, *leaves)
        nnx.update(streams, after)
        return x, out

    def _call(
        self, step: Step, x: Any, inputs: tuple, xs: Any, is_plain: bool
    ) -> StackCall:
        model = ModelDef.of(self.layer)
        params, others, placements = {}, {}, {}
        for path, variable in variables_of(self.layer):
            group = params if isinstance(variable, nnx.Param) else others
            group[path] = variable.get_value()
            if placement := variable.get_metadata().get("placement"):
                placements[path] = placement.of_layer()

        def inner(used: dict, others: dict, x: Any, inputs: tuple, slot: Any):
            module = model.merge(used | others)
            args, kwargs = inputs
            out, slot = step(module, x, slot, *args, **kwargs)
            check_carry(x, out)
            after = arrays_of(module)
            # A parameter that is not the same object has been assigned by the block.
            assigned = {p: after[p] for p in used if after[p] is not used[p]}
            return out, {path: after[path] for path in others} | assigned, slot

        layout = active_layout()
        moves = any(p.used != p.stored for p in placements.values())
        # The custom gradient of prefetching needs an x of only floating-point arrays.
        smooth = all(map(is_inexact, jax.tree.leaves(x)))
        prefetches = moves and smooth and xs is None and self.num_layers > 1
        prefetches = bool(layout and layout.prefetches and prefetches)
        call = StackCall(
            inner=inner,
            params=params,
            others=others,
            x=x,
            args=inputs,
            scanned=xs,
            remat=self.remat or active_remat(),
            placements=placements,
            is_plain=is_plain,
            prefetches=prefetches,
        )
        call.note_names()
        return replace(call, prefetches=False) if prefetches and call.has_out else call


def run_one_layer(call: StackCall) -> tuple[Any, dict, Any]:
    """Runs the first layer instead of all layers, in a trace that examines a model.

    Variables that the layer does not assign stay the same objects.
    """
    first = partial(jax.tree.map, lambda x: x[0])
    given = first(call.others)
    x, after, out = call.block(first(call.params), given, call.x, call.args, None)
    others = {
        path: array if after[path] is given[path] else array.copy()
        for path, array in call.others.items()
    }
    count = jax.tree.leaves((call.params, call.others))[0].shape[:1]
    # (...) -> (layers, ...)
    return x, others, jax.tree.map(lambda a: jax.lax.broadcast(a, count), out)


def run_in_halves(call: StackCall) -> tuple[Any, dict, Any]:
    """Runs the layers on two halves of each device's rows, if the layout requests it.

    Each layer runs both halves, and neither half waits for the other. So the transfers
    of one half can run during the products of the other half ([3] of `TensorParallel`).
    In all other cases, this function is equal to `run_layers`.
    """
    layout, x = active_layout(), call.x
    if layout is None or not layout.claims.halves or not _is_of_rows(call):
        return run_layers(call)
    axes = dim_axes(layout.batch_spec(len(x)), 1)[0]
    shards = math.prod(layout.mesh.shape[axis] for axis in axes)
    if len(x) % (2 * shards):
        return run_layers(call)
    note_effect("halves")

    def place(x: jax.Array) -> jax.Array:
        spec = P(axes, *[P.UNCONSTRAINED] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, layout.sharding(spec))

    def half_of(x: Any, i: int) -> Any:
        if not _belongs_to_rows(x, call.x):
            return x
        # (rows, ...) -> (shards, 2, rows of a half, ...); each device keeps its rows.
        parts = place(x.reshape(shards, 2, -1, *x.shape[1:]))
        return place(parts[:, i].reshape(-1, *x.shape[1:]))

    def inner(params: dict, others: dict, halves: tuple, args: tuple, slot: Any) -> Any:
        first, others, slot = call.inner(params, others, halves[0], args[0], slot)
        other, others, slot = call.inner(params, others, halves[1], args[1], slot)
        return (first, other), others, slot

    x = tuple(half_of(x, i) for i in range(2))
    args = tuple(jax.tree.map(partial(half_of, i=i), call.args) for i in range(2))
    halves, others, slot = run_layers(replace(call, inner=inner, x=x, args=args))
    parts = [x.reshape(shards, -1, *x.shape[1:]) for x in halves]
    return place(jnp.stack(parts, axis=1).reshape(call.x.shape)), others, slot


def _is_of_rows(call: StackCall) -> bool:
    """Returns True if a layer's arguments and variables can be split like its rows.

    The computation of the layer is not checked, and might still mix rows.
    """
    x = call.x
    # A layer that is not plain may return losses of experts. If x has fewer than 3
    # dims, it may come from a `jax.vmap` over rows, and then dim 0 is the sequence.
    if not call.is_plain or not isinstance(x, jax.Array) or x.ndim < 3:
        return False
    # Variables that are not parameters cannot be split. They are counters, statistics
    # of a batch, or keys that draw a mask for all rows.
    args = jax.tree.leaves(call.args)
    return not call.others and all(
        _belongs_to_rows(a, x) or _is_of_no_row(a, x) for a in args
    )


def _belongs_to_rows(a: Any, x: jax.Array) -> bool:
    """Returns True for ``x``, and for integer arrays ``(batch, seq)``, as segments."""
    # If `batch` and `seq` are equal, an array of this shape may also be a mask
    # `(seq, seq)`, so the result is False.
    is_of_tokens = getattr(a, "shape", ()) == x.shape[:2] and len(x) != x.shape[1]
    return a is x or (is_of_tokens and not is_inexact(a))


def _is_of_no_row(a: Any, x: jax.Array) -> bool:
    """Returns True if no dim of an array can be the rows; False for random keys."""
    keys = (jax.dtypes.prng_key, jnp.unsignedinteger)
    is_key = any(jnp.issubdtype(jnp.result_type(a), kind) for kind in keys)
    return not is_key and all(size % len(x) for size in jnp.shape(a))


def _in_groups(step: Step) -> Step:
    """Makes a step that runs all blocks of a group, one after the other."""

    def run(group: Any, x: Any, slices: Any, *args: Any, **kwargs: Any) -> Any:
        outs = []
        for i, block in enumerate(group):
            if isinstance(slices, ByBlock):
                own = slices.values[i]
            else:
                own = jax.tree.map(lambda a, i=i: a[i], slices)
            x, out = step(block, x, own, *args, **kwargs)
            outs.append(out)
        if isinstance(slices, ByBlock):
            return x, ByBlock(tuple(outs))
        return x, jax.tree.map(lambda *each: jnp.stack(each), *outs)

    return run


def _is_stream(x: object) -> bool:
    return isinstance(x, nnx.Rngs | nnx.RngStream)


def _is_from_outside(variable: nnx.Variable) -> bool:
    """Returns True if a Variable was made outside of the present trace.

    The result is False for a plain `nnx.Variable`.
    """
    if type(variable) is nnx.Variable:
        return False  # a plain `nnx.Variable` does not change, so copies stay equal
    try:
        variable.set_value(variable.get_value())
    except errors.TraceContextError:
        return True
    return False


def _check_unshared(make_block: Callable[[nnx.Rngs], nnx.Module]) -> None:
    """Checks that a block holds each Variable only once, and builds it itself.

    `jax.vmap` treats a module as a pytree. There, a Variable that is shared by several
    modules has a separate leaf for each of them, and these copies would silently become
    different in training.
    """
    found: dict[str, bool] = {}  # True if the Variable is from outside

    def build() -> nnx.Module:
        block = build_model(make_block, nnx.Rngs(0))
        leaves = jax.tree_util.tree_leaves_with_path(
            block, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        for path, leaf in leaves:
            if isinstance(leaf, nnx.Variable):
                found[path_of(path)] = _is_from_outside(leaf)
        return block

    # The pytree has a shared Variable several times, but NNX's graph has it only once.
    leaves = nnx.to_flat_state(nnx.state(nnx.eval_shape(build)))
    once = [path for path, leaf in leaves if isinstance(leaf, nnx.Variable)]
    if outside := [name for name, is_outside in found.items() if is_outside]:
        raise StackError(
            f"A block of the stack holds Variables from outside the block: {outside}. "
            "Each stacked block would silently train a separate copy. Build the "
            "Variables in make_block, or pass the shared module's output to the blocks "
            "as an argument."
        )
    if len(found) > len(once):
        shared = sorted(found.keys() - set(map(dotted, once)))
        raise StackError(
            f"A block of the stack holds the same Variable in several places: {shared} "
            "also occur elsewhere in the block. Stacking would silently untie them. "
            "Give each module a separate Variable, or keep the shared Variable outside "
            "the stack and pass it to the blocks as an argument."
        )
