"""`Stack`: N alike blocks as one module, scanned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from flax import errors, nnx

from nnx_parallel.errors import StackError
from nnx_parallel.layers.remat import Remat, active_remat, apply_remat, check_remat
from nnx_parallel.layers.scan import StackCall, run_prefetched
from nnx_parallel.sharding.constrain import active_layout, use_params
from nnx_parallel.sharding.model import nest
from nnx_parallel.sharding.names import dotted, is_inexact, variables_of

Runner = Callable[[StackCall], tuple[Any, dict, Any]]
"""Runs all layers of a call: the output, the other variables after it, the slots."""


def run_layers(call: StackCall) -> tuple[Any, dict, Any]:
    """Runs the layers one after the other, as a scan."""
    if call.prefetch is not None:
        return run_prefetched(call)
    block = apply_remat(call.block, call.remat, gathers=call.gathers, prevent_cse=False)

    def step(x: Any, slices: tuple[dict, dict, Any]) -> tuple[Any, tuple[dict, Any]]:
        params, others, slot = slices
        x, others, slot = block(params, others, x, call.args, slot)
        return x, (others, slot)

    slices = (call.params, call.others, call.scanned)
    x, (others, scanned) = jax.lax.scan(step, call.x, slices)
    return x, others, scanned


_runner: ContextVar[Runner] = ContextVar("runner", default=run_layers)


@contextlib.contextmanager
def using_runner(runner: Runner) -> Iterator[None]:
    """Hands the calls of every `Stack` traced inside to ``runner``."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


def active_runner() -> Runner:
    """Who runs the layers of a stack; by default `run_layers`."""
    return _runner.get()


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
        self.layer = jax.vmap(lambda key: make_block(nnx.Rngs(key)))(keys)
        for _, variable in variables_of(self.layer):
            names = tuple(variable.get_metadata().get("out_sharding") or ())
            variable.set_metadata(out_sharding=("layers", *names), eager_sharding=False)

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
        run = active_runner() if scanned is None else run_layers
        x, others, scanned_out = run(call)
        if others:
            nnx.update(self.layer, nest(others))
        return x if scanned is None else (x, scanned_out)

    def _call(self, x: jax.Array, args: tuple, scanned: Any) -> StackCall:
        graphdef, _ = nnx.split(self.layer)
        params, others, placements = {}, {}, {}
        for path, variable in variables_of(self.layer):
            group = params if isinstance(variable, nnx.Param) else others
            group[path] = variable.get_value()
            if placement := variable.get_metadata().get("placement"):
                placements[path] = placement.of_layer()

        def inner(used: dict, others: dict, x: jax.Array, args: Any, slot: Any):
            module = nnx.merge(graphdef, nest(used | others))
            extra = () if slot is None else (slot,)
            out = module(x, *args, *extra)
            out, slot = out if slot is not None else (out, None)
            state = dict(variables_of(module))
            return out, {path: state[path].get_value() for path in others}, slot

        def block(params: dict, *rest: Any) -> tuple[Any, dict, Any]:
            return inner(use_params(params, placements), *rest)

        layout = active_layout()
        moves = any(p.used != p.stored for p in placements.values())
        smooth = all(map(is_inexact, jax.tree.leaves(x)))
        prefetches = moves and smooth and scanned is None and self.num_layers > 1
        return StackCall(
            block=block,
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
    """Whether a Variable was made before the present trace began; but no constant."""
    if type(variable) is nnx.Variable:
        return False  # its copies stay equal
    try:
        variable.set_value(variable.get_value())
    except errors.TraceContextError:
        return True
    return False


def _check_unshared(make_block: Callable[[nnx.Rngs], nnx.Module]) -> None:
    found: list[tuple[str, bool]] = []

    def build() -> nnx.Module:
        block = make_block(nnx.Rngs(0))
        leaves = jax.tree_util.tree_leaves_with_path(
            block, is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        for path, leaf in leaves:
            if isinstance(leaf, nnx.Variable):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                found.append((name, _is_from_outside(leaf)))
        return block

    once = dict(variables_of(nnx.eval_shape(build)))
    outside = [name for name, is_outside in found if is_outside]
    if outside:
        raise StackError(
            f"A block of the stack holds Variables from outside of it: {outside}. "
            "Stacked blocks would each train a copy of their own, without a word. "
            "Build them in make_block, or pass the shared module's output to the "
            "blocks as an argument."
        )
    paths = [name for name, _ in found]
    if len(paths) > len(once):
        shared = sorted(set(paths) - {dotted(path) for path in once})
        raise StackError(
            f"A block of the stack holds the same Variable in several places: {shared} "
            "stand elsewhere in it too. Stacked blocks would untie them without a "
            "word. Give each module its own, or keep the shared one outside the stack "
            "and pass it to the blocks as an argument."
        )
