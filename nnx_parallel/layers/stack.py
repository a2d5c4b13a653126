"""`Stack`: N alike blocks as one module, scanned."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from flax import errors, nnx

from nnx_parallel.errors import StackError
from nnx_parallel.layers.scan import (
    Remat,
    StackCall,
    active_remat,
    check_remat,
    run_layers,
)
from nnx_parallel.sharding.constrain import active_layout
from nnx_parallel.sharding.model import (
    ModelDef,
    arrays_of,
    build_model,
    update_arrays,
)
from nnx_parallel.sharding.names import dotted, is_inexact, path_of, variables_of

Runner = Callable[[StackCall], tuple[Any, dict, Any]]
"""Runs all layers of a call: the output, the other variables after it, the slots."""

_runner: ContextVar[Runner] = ContextVar("runner", default=run_layers)


@contextlib.contextmanager
def using_runner(runner: Runner) -> Iterator[None]:
    """Hands the calls of every `Stack` traced inside to ``runner``."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


class Stack(nnx.Module):
    """N alike blocks whose arrays have a leading ``layers`` dim.

    One block is traced and compiled, whatever N. It runs as a `jax.lax.scan` over the
    layers; parameters that the strategy stores sharded are gathered inside, one layer
    at a time, and again in the backward pass.

    Args:
        make_block: Builds one block from its ``nnx.Rngs``. The block maps
            ``(x, *args)`` to an array like ``x``.
        num_layers: N.
        rngs: Keys of all blocks.
        remat: What a block keeps for the backward pass; ``None`` follows the Trainer.

    Raises:
        StackError: If a block shares one Variable between two of its modules, or with
            a module outside the stack, which would silently untie, or if N < 1.

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
        make_block: Callable[[nnx.Rngs], nnx.Module],
        num_layers: int,
        *,
        rngs: nnx.Rngs,
        remat: Remat | None = None,
    ) -> None:
        if num_layers < 1:
            raise StackError(f"A stack of {num_layers} layers: it needs at least 1.")
        check_remat(remat)
        _check_unshared(make_block)
        self.num_layers = num_layers
        self.remat: Remat | None = remat
        keys = jax.random.split(rngs.params(), num_layers)
        self.layer = jax.vmap(lambda key: build_model(make_block, nnx.Rngs(key)))(keys)
        for _, leaf in nnx.to_flat_state(nnx.state(self.layer)):
            if isinstance(leaf, nnx.Variable):
                names = tuple(leaf.get_metadata().get("out_sharding") or ())
                # No mesh is known yet, on which Flax could place it now.
                leaf.set_metadata(out_sharding=("layers", *names), eager_sharding=False)

    def __call__(self, x: jax.Array, *args: Any, scanned: Any = None) -> Any:
        """Runs the blocks in order.

        Args:
            x: Input of the first block.
            args: Passed to every block as they are.
            scanned: A pytree with a leading dim of N (a cache): each block gets its
                own slice as last argument and returns ``(x, slice)``.

        Returns:
            The last block's output; ``(output, scanned)`` when ``scanned`` is given.
        """
        call = self._call(x, args, scanned)
        # A pipeline runs the layers of training and evaluation; decoding with a cache
        # is a scan everywhere.
        run = _runner.get() if scanned is None else run_layers
        x, others, scanned_out = run(call)
        if others:
            update_arrays(self.layer, others)
        return x if scanned is None else (x, scanned_out)

    def _call(self, x: jax.Array, args: tuple, scanned: Any) -> StackCall:
        model = ModelDef.of(self.layer)
        params, others, placements = {}, {}, {}
        for path, variable in variables_of(self.layer):
            group = params if isinstance(variable, nnx.Param) else others
            group[path] = variable.get_value()
            if placement := variable.get_metadata().get("placement"):
                placements[path] = placement.of_layer()

        def inner(used: dict, others: dict, x: jax.Array, args: Any, slot: Any):
            module = model.merge(used | others)
            slots = () if slot is None else (slot,)
            out = module(x, *args, *slots)
            out, slot = out if slots else (out, None)
            after = arrays_of(module)
            # By identity: a parameter that the block assigns is another array.
            assigned = {p: after[p] for p in used if after[p] is not used[p]}
            return out, {path: after[path] for path in others} | assigned, slot

        layout = active_layout()
        moves = any(p.used != p.stored for p in placements.values())
        # Prefetching has a custom gradient, by x and the arguments alone.
        smooth = all(map(is_inexact, jax.tree.leaves(x)))
        prefetches = moves and smooth and scanned is None and self.num_layers > 1
        return StackCall(
            inner=inner,
            params=params,
            others=others,
            x=x,
            args=args,
            scanned=scanned,
            remat=self.remat or active_remat(),
            placements=placements,
            prefetch=layout.prefetch if layout and prefetches else None,
        )


def _is_from_outside(variable: nnx.Variable) -> bool:
    """True if a Variable was made before the present trace, unless it is a constant."""
    if type(variable) is nnx.Variable:
        return False  # of no kind that changes: its copies stay equal
    try:
        variable.set_value(variable.get_value())
    except errors.TraceContextError:
        return True
    return False


def _check_unshared(make_block: Callable[[nnx.Rngs], nnx.Module]) -> None:
    """Checks that every Variable of a block is in one place, and made with the block.

    `jax.vmap` takes a module as a pytree, in which a shared Variable is a leaf in each
    place: the copies would silently train apart.
    """
    found: dict[str, bool] = {}  # whether each is from outside

    def build() -> nnx.Module:
        block = build_model(make_block, nnx.Rngs(0))
        leaves = jax.tree_util.tree_leaves_with_path(
            block, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        for path, leaf in leaves:
            if isinstance(leaf, nnx.Variable):
                found[path_of(path)] = _is_from_outside(leaf)
        return block

    # The pytree has a shared Variable as often as it occurs, NNX's graph once.
    leaves = nnx.to_flat_state(nnx.state(nnx.eval_shape(build)))
    once = [path for path, leaf in leaves if isinstance(leaf, nnx.Variable)]
    if outside := [name for name, is_outside in found.items() if is_outside]:
        raise StackError(
            f"A block of the stack holds Variables from outside of it: {outside}. "
            "Stacked blocks would silently train a copy each of their own. Build them "
            "in make_block, or pass the shared module's output to the blocks as an "
            "argument."
        )
    if len(found) > len(once):
        shared = sorted(found.keys() - set(map(dotted, once)))
        raise StackError(
            f"A block of the stack holds the same Variable in several places: {shared} "
            "are elsewhere in it too. Stacked blocks would silently untie them. Give "
            "each module its own, or keep the shared one outside the stack and pass it "
            "to the blocks as an argument."
        )
