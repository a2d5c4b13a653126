"""The layers of a `Stack`, one after the other: plainly, or gathering one layer ahead.

`run_layers` is a scan in which each layer gathers its own parameters. In
`run_prefetched` the scan carries the gathered parameters of one layer and gathers those
of the next, which nothing in the layer waits for: forward from the first layer to the
last, backward from the last to the first. A device holds two layers at most [1, 2].

JAX's own backward pass of such a scan would keep its carry, and so all layers gathered.
Here it is written out: a layer's residuals are found as in a pipeline's stage, without
what comes from its parameters alone.

References:
    [1] Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
    2023, section 3.3 (forward and backward prefetching),
    https://arxiv.org/abs/2304.11277
    [2] Rajbhandari et al., "ZeRO-Infinity", 2021, section 6.2 (overlap-centric design),
    https://arxiv.org/abs/2104.07857
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nnx_parallel.collectives.ring import Mode, gather_hops, join_hops
from nnx_parallel.layers.remat import Remat, apply_remat
from nnx_parallel.layers.residuals import (
    Layers,
    LayerWithResiduals,
    trace_residuals,
)
from nnx_parallel.sharding.constrain import active_layout
from nnx_parallel.sharding.layout import Layout, Placement
from nnx_parallel.sharding.names import dim_axes, is_inexact


@dataclass(frozen=True, eq=False, kw_only=True)
class StackCall:
    """One call of a `Stack`, as data for the function that runs its layers.

    Attributes:
        block: ``(params, others, x, args, slot) -> (x, others, slot)`` of one layer.
        inner: The same, of parameters that have been gathered.
        params: The layers' parameters by path, each with a leading ``layers`` dim.
        others: Their other variables, likewise.
        x: Input of the first layer.
        args: Passed to every layer as they are.
        scanned: A pytree with a leading ``layers`` dim, or ``None``.
        remat: What a layer keeps for the backward pass.
        placements: Placement of a layer's parameters, by path; where one says so, the
            block gathers. What is gathered is never kept.
        prefetch: How the next layer's parameters are gathered during the present
            layer, or ``None``.
    """

    block: Callable[..., tuple[Any, dict, Any]]
    inner: Callable[..., tuple[Any, dict, Any]]
    params: dict
    others: dict
    x: Any
    args: tuple
    scanned: Any
    remat: Remat
    placements: dict[Any, Placement]
    prefetch: Mode | None


def run_layers(call: StackCall) -> tuple[Any, dict, Any]:
    """Runs the layers one after the other, as a scan."""
    if call.prefetch is not None:
        return run_prefetched(call)
    gathers = any(p.is_gathered for p in call.placements.values())
    block = apply_remat(call.block, call.remat, gathers=gathers, prevent_cse=False)

    def step(x: Any, slices: tuple[dict, dict, Any]) -> tuple[Any, tuple[dict, Any]]:
        params, others, slot = slices
        x, others, slot = block(params, others, x, call.args, slot)
        return x, (others, slot)

    # Arrays of (layers, ...); a step has one layer's.
    slices = (call.params, call.others, call.scanned)
    x, (others, scanned) = jax.lax.scan(step, call.x, slices)
    return x, others, scanned


def run_prefetched(call: StackCall) -> tuple[Any, dict, None]:
    """Runs the layers of a call that says how to prefetch.

    Only reverse-mode derivatives are defined, as everywhere behind a custom gradient.
    """
    call = dataclasses.replace(call, x=jax.tree.map(jnp.asarray, call.x))
    layers = _make_layers(call)
    num_x = len(jax.tree.leaves(call.x))

    @jax.custom_vjp
    def run(params: dict, others: dict, arrays: list) -> tuple[list, dict]:
        return layers.forward(params, others, arrays, keeps=False)[0]

    def run_forward(params: dict, others: dict, arrays: list) -> tuple[Any, Any]:
        out, kept = layers.forward(params, others, arrays, keeps=True)
        return out, (params, arrays[num_x:], *kept)

    def run_backward(kept: Any, grads: tuple[list, dict]) -> tuple[dict, dict, list]:
        # `params` are the stored shards: only the last layer is kept gathered.
        params, args, gathered, saved = kept
        return layers.backward(params, args, (gathered, saved), *grads)

    run.defvjp(run_forward, run_backward)
    x, others = run(call.params, call.others, layers.arrays_of((call.x, call.args)))
    return jax.tree.unflatten(jax.tree.structure(call.x), x), others, None


@dataclass(frozen=True, eq=False, kw_only=True)
class _PrefetchedLayers:
    """The layers of a call, to run from one end to the other.

    Attributes:
        call: The call.
        layout: The layout that it is traced under.
        one: One layer, with its residuals.
    """

    call: StackCall
    layout: Layout
    one: LayerWithResiduals

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(next(iter(self.call.params.values())))

    def arrays_of(self, tree: Any) -> list:
        """The leaves that are arrays; the others stay as the call has them."""
        return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]

    def forward(
        self, params: dict, others: dict, arrays: list, *, keeps: bool
    ) -> tuple[tuple[list, dict], tuple]:
        """From the first layer to the last.

        The last one prefetches itself: the backward pass begins with it.

        Returns:
            The output with the other variables, and what is kept: the last layer
            gathered, and for each layer what its backward pass needs.
        """
        num_x, last = len(jax.tree.leaves(self.call.x)), self.num_layers - 1
        args = arrays[num_x:]

        def step(carry: tuple[list, dict], xs: tuple) -> tuple[tuple, tuple]:
            x, gathered = carry
            index, held, state = xs
            # One program for all layers: the last one gathers itself.
            hops = self._start(params, jnp.minimum(index + 1, last))
            layer = Layers(gathered | held, {}, state)
            x, state, saved = self.one.forward(layer, x, args)
            x, following = self._finish(x, hops)
            return (x, following), (state, saved if keeps else [])

        # Nothing runs during the first gather: one all-gather is best.
        first = {k: self._whole(k, x) for k, x in self._shards(params, 0).items()}
        start = (arrays[:num_x], first)
        # `params` whole, to be indexed one layer ahead; all else is sliced by the scan.
        slices = (jnp.arange(self.num_layers), self._held(params), others)
        (x, gathered), (others, saved) = jax.lax.scan(step, start, slices)
        return (x, others), (gathered, saved)

    def backward(
        self,
        params: dict,
        args: list,
        kept: tuple[dict, list],
        grads: list,
        grads_state: dict,
    ) -> tuple[dict, dict, list]:
        """From the last layer to the first, with what the forward pass has kept.

        Returns:
            Gradients of parameters, other variables, and arrays; ``None`` for what has
            none.
        """

        def step(carry: tuple[list, list, dict], xs: tuple) -> tuple[tuple, tuple]:
            grads, grads_args, gathered = carry
            index, held, saved, grads_state = xs
            hops = self._start(params, jnp.maximum(index - 1, 0))
            vjp = self.one.vjp(gathered | held, {}, args, saved)
            new, grads, more, grads_state = vjp((grads, grads_state))
            grads_args = [a + b for a, b in zip(grads_args, more, strict=True)]
            grads, following = self._finish(grads, hops)
            # Summed into shards here, or the scan would stack whole gradients.
            return (grads, grads_args, following), (self._scatter(new), grads_state)

        gathered, saved = kept
        floats = {k: g for k, g in grads_state.items() if is_inexact(g)}
        zeros = [jnp.zeros_like(a) for a in args if is_inexact(a)]
        slices = (jnp.arange(self.num_layers), self._held(params), saved, floats)
        (grads, grads_args, _), (new, floats) = jax.lax.scan(
            step, (grads, zeros, gathered), slices, reverse=True
        )
        rest = iter(grads_args)
        # A custom gradient wants None for integers and keys.
        grads += [next(rest) if is_inexact(a) else None for a in args]
        return new, {k: floats.get(k) for k in grads_state}, grads

    def _held(self, params: dict) -> dict:
        """The parameters that are used as they are stored."""
        places = self.call.placements
        return {k: p for k, p in params.items() if not _moves(places.get(k))}

    def _shards(self, params: dict, index: int | jax.Array) -> dict:
        """The shards that one layer has to gather."""
        found = {}
        for key, x in params.items():
            placement = self.call.placements.get(key)
            if placement is not None and _moves(placement):
                shard = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
                found[key] = _place(shard, self.layout.sharding(placement.stored))
        return found

    def _whole(self, key: Any, x: jax.Array) -> jax.Array:
        return _place(x, self.layout.sharding(self.call.placements[key].used))

    def _start(self, params: dict, index: jax.Array) -> dict:
        """Hops of the gather of one layer's parameters.

        Hops, because libtpu runs no all-gather asynchronously on v5p, and hops of
        ``collective-permute`` it does: of the layers' bytes 92 % are hidden forward and
        58 % backward (docs/library-notes.md, "The TPU compiler").
        """
        found = {}
        for key, x in self._shards(params, index).items():
            ring = self._ring(key, x.ndim)
            found[key] = gather_hops(x, **ring) if ring else [self._whole(key, x)]
        return found

    def _finish(self, x: list, hops: dict) -> tuple[list, dict]:
        """The gathered parameters, once the layer that runs meanwhile gave ``x``.

        The next layer's take the buffer of the present one's in the carry. Were the
        hops written there as they come, they would wait for the layer's last read: all
        ran behind the last product, 12 % of the bytes hidden.
        """
        x, hops = jax.lax.optimization_barrier((x, hops))
        found = {}
        for key, passed in hops.items():
            ring = self._ring(key, passed[0].ndim)
            found[key] = self._whole(
                key, join_hops(passed, **ring) if ring else passed[0]
            )
        return x, found

    def _ring(self, key: Any, ndim: int) -> dict[str, Any]:
        """How to gather hop by hop; empty if in one collective."""
        placement = self.call.placements[key]
        # More than one dim or axis at once is no ring of one axis.
        stored, used = (dim_axes(s, ndim) for s in (placement.stored, placement.used))
        split = [d for d in range(ndim) if stored[d] != used[d]]
        mode = self.call.prefetch
        if mode == "bulk" or len(split) != 1 or len(stored[split[0]]) != 1:
            return {}
        (axis,) = stored[split[0]]
        return {"axis": axis, "dim": split[0], "mode": mode, "mesh": self.layout.mesh}

    def _scatter(self, grads: dict) -> dict:
        """Gradients of one layer, summed straight into their shards."""

        def scatter(key: Any, grad: jax.Array) -> jax.Array:
            placement = self.call.placements.get(key)
            if placement is None or not placement.is_gathered:
                return grad
            return _place(grad, self.layout.sharding(placement.gradient))

        return {key: scatter(key, grad) for key, grad in grads.items()}


def _make_layers(call: StackCall) -> _PrefetchedLayers:
    layout = active_layout()
    assert layout is not None
    one = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (call.params, call.others)
    )
    leaves = jax.tree.leaves(call.x), jax.tree.leaves(call.args)
    x, args = ([a for a in part if isinstance(a, jax.Array)] for part in leaves)
    traced = trace_residuals(_block_vjp(call), Layers(one[0], {}, one[1]), x, args)
    return _PrefetchedLayers(call=call, layout=layout, one=traced)


def _block_vjp(call: StackCall) -> Callable[[Layers, list, list], tuple]:
    """One layer's ``(layer, x, args) -> (x, state, vjp)``.

    The VJP takes gradients of x and of the floating state, and gives those of
    parameters, x, floating arguments and floating state.
    """
    # Its parameters come gathered.
    block = apply_remat(call.inner, call.remat, gathers=False, prevent_cse=False)
    leaves, tree = jax.tree.flatten((call.x, call.args))

    def join(x: Sequence[Any], args: Sequence[Any]) -> tuple[Any, tuple]:
        rest = iter([*x, *args])
        return jax.tree.unflatten(
            tree, [next(rest) if isinstance(a, jax.Array) else a for a in leaves]
        )

    def block_vjp(layer: Layers, x: list, args: list) -> tuple[list, dict, Callable]:
        def run(trained: dict, x: list, floats: list, state: dict) -> Any:
            given = iter(floats)
            merged = [next(given) if is_inexact(a) else a for a in args]
            x_tree, args_tree = join(x, merged)
            out, after, _ = block(trained, layer.state | state, x_tree, args_tree, None)
            smooth = {k: v for k, v in after.items() if is_inexact(v)}
            # Integers and keys have no gradient: they leave as auxiliary outputs.
            return (jax.tree.leaves(out), smooth), after

        floats = [a for a in args if is_inexact(a)]
        state = {k: v for k, v in layer.state.items() if is_inexact(v)}
        (out, _), vjp, after = jax.vjp(
            run, layer.trained, x, floats, state, has_aux=True
        )
        return out, after, vjp

    return block_vjp


def _moves(placement: Placement | None) -> bool:
    return placement is not None and placement.used != placement.stored


def _place(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, sharding)
