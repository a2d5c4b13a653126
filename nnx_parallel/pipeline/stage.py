"""Runs the layers of a stage: forward, and backward in one part or in two."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import PipelineError
from nnx_parallel.layers.stack.residuals import (
    Layers,
    LayerWithResiduals,
    SplitBackward,
)
from nnx_parallel.layers.stack.scan import Remat, apply_remat
from nnx_parallel.pipeline.cut import PartitionedJaxpr, check_unassigned
from nnx_parallel.precision import cast_floating
from nnx_parallel.programs import Origins, trace
from nnx_parallel.sharding.names import dotted

Stash = Literal["policy", "inputs"]

# `Count` is the number of layers to run. `Mark` has a flag for each layer, True if the
# layer is run. ``None`` means that all layers are run.
Count = jax.Array | None
Mark = jax.Array | None

# ``(totals of all layers, gradients of one layer, its index) -> totals``. A layer's
# gradients are added immediately to a scan's carry, which changes in place. As stacked
# outputs of the scan, they would take memory until they are added (0.3 of 2.8 GiB for 4
# layers of 4096/16384 on v5p). docs/library-notes.md, "Arrays and buffers"
Add = Callable[[dict, Any, jax.Array], dict]


@dataclass(eq=False, kw_only=True)
class Stage:
    """The layers of one stage, as functions of their arrays.

    Activations are lists of arrays that pass from stage to stage: the layers' input
    ``x`` and the arguments that every layer gets.

    Attributes:
        cut: The function that contains the layers. `Stage` traces one layer, once.
        arrays: Shapes of the arrays of all layers by key, with a ``layers`` dim.
        activations: Shapes of the stack's input.
        mesh: The mesh.
        axis: The mesh axis of the stages.
        compute: Dtype of the computation; ``None`` means the stored dtype.
        stash: Values that are kept between forward and backward. ``policy`` keeps the
            values that the remat policy chooses. ``inputs`` keeps only the stage's
            inputs, from which the backward pass runs the stage again. ``None`` keeps
            nothing, for an evaluation, which has no backward pass.
        is_split: True if the backward pass has two parts.

    Raises:
        PipelineError: If a layer cannot be run in a stage.
    """

    cut: PartitionedJaxpr
    arrays: dict
    activations: list
    mesh: Mesh
    axis: str
    compute: Any
    stash: Stash | None
    is_split: bool

    def __post_init__(self) -> None:
        arrays = self.arrays.items()
        one = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in arrays}
        # The layer is traced with the types of the manual region that runs it, for two
        # reasons. A constraint on the concrete mesh would give a value an aval that JAX
        # refuses to mix with the region's avals. And JAX would insert reshapes of
        # arguments if their types do not have the region's mesh.
        # docs/library-notes.md, "Partly manual regions"
        types = {self.axis: AxisType.Manual}
        manual = self.mesh.abstract_mesh.update_axis_types(types)
        whole = NamedSharding(manual, P())
        shapes, activations = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            (jax.eval_shape(self._cast, one), self.activations),
        )
        with jax.sharding.use_abstract_mesh(manual):
            self._layer = trace(self._checked_block, shapes, activations)
            self._check_closure()
            self._check_indices()
            x, after = self._layer.outputs
            self.num_x = len(x)
            before = self._layer.inputs[0]
            # An unchanged variable is the same object before and after the trace.
            self.state_keys = frozenset(k for k in after if after[k] is not before[k])
            if self.stash is None:
                return
            layer, (x, args) = self.split(shapes), self._split_args(activations)
            self._residuals = LayerWithResiduals(self._layer_vjp, layer, x, args)
            if self.is_split:
                saved = [v.aval for v in self._residuals.saved]
                # x replaces its cotangent, which has the same shape and dtype.
                kept = (layer.fixed, saved, args, x)
                self._backward_parts = SplitBackward(
                    self._layer_backward, layer.trained, kept
                )

    def split(self, arrays: dict) -> Layers:
        """Divides the layers' arrays, given by key, into trained, fixed and state."""
        trained, state = self.cut.trained, self.state_keys
        # The state is separate, because only variables that a forward pass changes are
        # carried from tick to tick and kept in a stash.
        return Layers(
            trained={k: x for k, x in arrays.items() if k in trained},
            fixed={k: x for k, x in arrays.items() if k not in trained | state},
            state={k: arrays[k] for k in state},
        )

    def run(
        self, layers: Layers, activations: list, count: Count = None
    ) -> tuple[list, dict]:
        """Runs the layers. Returns the activations to send, and the layers' state.

        Only the first ``count`` layers change the activations.
        """
        x, args = self._split_args(activations)

        def step(x: list, xs: tuple[Layers, Mark]) -> tuple[list, dict]:
            # Layers are cast one at a time, and the block gathers them one at a time.
            layer = self._cast_layers(xs[0])
            active, rest = self._partition(layer, [*x, *args])
            out, state = self._rematted(layer.trained, active, rest)
            return _choose(xs[1], out, x), state

        # xs: (layers of the chunk, ...)
        x, state = jax.lax.scan(step, x, (layers, _marks(layers, count)))
        return [*x, *args], state

    def forward(
        self, layers: Layers, activations: list, count: Count = None
    ) -> tuple[list, dict, Any]:
        """Runs the layers like `run`, and also returns the backward pass's stash."""
        if self.stash == "inputs":
            return *self.run(layers, activations, count), (layers.state, activations)
        return self._forward_saving(layers, activations, count)

    def _forward_saving(
        self, layers: Layers, activations: list, count: Count
    ) -> tuple[list, dict, Any]:
        x, args = self._split_args(activations)

        def step(x: list, xs: tuple[Layers, Mark]) -> tuple[list, Any]:
            layer = self._cast_layers(xs[0])
            out, *kept = self._residuals.forward(layer, x, args)
            return _choose(xs[1], out, x), kept

        xs = (layers, _marks(layers, count))
        x, (state, saved) = jax.lax.scan(step, x, xs)
        return [*x, *args], state, (args, saved)

    def backward(
        self,
        layers: Layers,
        stash: Any,
        cotangents: list,
        totals: dict | None = None,
        add: Add | None = None,
        count: Count = None,
    ) -> tuple[dict | None, list, Any]:
        """Runs the backward pass from the last layer to the first.

        Args:
            layers: The layers.
            stash: The stash from `forward`.
            cotangents: Cotangents of the activations that were sent.
            totals: Sums of the weight gradients so far.
            add: Adds the weight gradients of a layer to the totals. With ``None``,
                `backward_weight` computes and adds them.
            count: Number of layers to run, as in `run`. All layers get weight
                gradients, even layers that are not run.

        Returns:
            The totals, the cotangents to send back, and the inputs of
            `backward_weight`.
        """
        if self.stash == "inputs":
            # The layers are run again with the state from before the forward pass, so
            # that dropout draws the same masks.
            state, activations = stash
            layers = replace(layers, state=state)
            stash = self._forward_saving(layers, activations, count)[2]
        args, saved = stash
        run = self._layer_backward if add else self._backward_parts.run_input

        # The carry has the cotangents of x, sums of the arguments' cotangents, and the
        # totals.
        def step(carry: tuple[list, list, Any], xs: Any) -> tuple[Any, Any]:
            (layer, saved, index), mark = xs
            layer = self._cast_layers(layer)
            grads_x, grads_args, totals = carry
            kept = (layer.fixed, saved, args, grads_x)
            (new, more), for_weights = run(layer.trained, kept)
            grads_x = _choose(mark, new, grads_x)
            added = [a + b for a, b in zip(grads_args, more, strict=True)]
            grads_args = _choose(mark, added, grads_args)
            if add is None:
                return (grads_x, grads_args, totals), for_weights
            return (grads_x, grads_args, add(totals, for_weights, index)), None

        carry = (*self._split_args(cotangents), totals)
        xs = (_numbered(layers, saved), _marks(layers, count))
        carry, pending = jax.lax.scan(step, carry, xs, reverse=True)
        grads_x, grads_args, totals = carry
        return totals, [*grads_x, *grads_args], pending

    def backward_weight(
        self, layers: Layers, pending: Any, totals: dict, add: Add
    ) -> dict:
        """Returns the totals after the weight gradients have been added."""

        def step(totals: dict, xs: Any) -> tuple[dict, None]:
            layer, pending, index = self._cast_layers(xs[0]), xs[1], xs[2]
            grads = self._backward_parts.run_weight(layer.trained, pending)
            return add(totals, grads, index), None

        return jax.lax.scan(step, totals, _numbered(layers, pending))[0]

    def _checked_block(self, arrays: dict, activations: list) -> tuple[list, dict]:
        x, after = self.cut.run_layer(arrays, activations)
        assigned = [key for key in after if key in self.cut.call.params]
        # An evaluation discards assigned values after the microbatch, so they do no
        # harm.
        if self.stash is not None:
            check_unassigned(self.cut.layer_paths[key] for key in assigned)
        kept = {key: new for key, new in after.items() if key not in assigned}
        return x, {key: _like(new, arrays[key], key) for key, new in kept.items()}

    def _check_closure(self) -> None:
        """Checks that a layer only uses arrays of the loss that are passed to it."""
        if any(isinstance(x, Tracer) for x in self._layer.consts.values()):
            raise PipelineError(
                "A block of the Stack, or the step of stack.scan, uses an array of the "
                "loss that is not passed to it. A layer runs on one stage: pass the "
                "array as an argument of the Stack's call."
            )

    def _check_indices(self) -> None:
        """Checks that a layer does not gather or scatter by computed indices.

        In a region that is manual over ``pipe`` and automatic over other axes, XLA's
        partitioner aborts the process on computed indices,
        https://github.com/openxla/xla/issues/4340. Slices at a computed position are
        allowed, and so is a nested ``shard_map``.
        """
        sizes = self.mesh.shape.items()
        others = [name for name, size in sizes if name != self.axis and size > 1]
        # If all other axes have size 1, XLA does not partition a stage.
        if not others:
            return
        inputs = [frozenset({"input"}) for _ in jax.tree.leaves(self._layer.inputs)]
        indices = _ComputedIndices({*others})
        indices(inputs, self._layer)
        if found := indices.found:
            raise PipelineError(
                "A block of the Stack indexes an array by computed indices (JAX's "
                f"{sorted(found)}, from x[indices], jnp.take or x.at[indices].set). "
                "Inside a pipeline stage that is also split over "
                f"{others}, XLA's partitioner would abort the process. Replace the "
                "indexing by a product with jax.nn.one_hot(indices, size), or do it "
                "before the Stack and pass the result as an argument of the blocks, or "
                "use only Pipeline."
            )

    def _call(self, trained: dict, active: list, rest: Any) -> tuple[list, dict]:
        fixed, state, others = rest
        activations = [
            b if a is None else a for a, b in zip(active, others, strict=True)
        ]
        x, after = self._layer(trained | fixed | state, activations)
        return x, {key: after[key] for key in state}

    @property
    def _rematted(self) -> Callable[[dict, list, Any], tuple[list, dict]]:
        """One layer, which keeps the remat policy's values for the backward pass."""
        remat = self.cut.call.remat
        # Gathers need no policy here, because residuals that depend only on weights are
        # not kept.
        return apply_remat(self._call, _without_offload(remat))

    def _layer_vjp(
        self, layer: Layers, x: list, args: list
    ) -> tuple[list, dict, Callable]:
        """Returns a layer's output, its state, and its VJP."""
        active, rest = self._partition(layer, [*x, *args])
        x, vjp, state = jax.vjp(
            lambda trained, active: self._rematted(trained, active, rest),
            layer.trained,
            active,
            has_aux=True,
        )
        return x, state, vjp

    def _layer_backward(self, trained: dict, kept: Any) -> tuple[Any, dict]:
        """Returns cotangents of x and of the arguments, and gradients of weights."""
        fixed, saved, args, grads_x = kept
        grads, cotangents = self._residuals.vjp(trained, fixed, args, saved)(grads_x)
        return self._split_args([c for c in cotangents if c is not None]), grads

    def _split_args(self, activations: list) -> tuple[list, list]:
        """Splits activations into the arrays of ``x`` and of the arguments."""
        return activations[: self.num_x], activations[self.num_x :]

    def _partition(self, layer: Layers, activations: list) -> tuple[list, Any]:
        """Separates the activations that have cotangents from all other inputs.

        Returns the activations, with ``None`` for each activation without a cotangent,
        and all other inputs of the layer.
        """
        marked = list(zip(activations, self.cut.differentiated, strict=True))
        active = [x if is_active else None for x, is_active in marked]
        others = [None if is_active else x for x, is_active in marked]
        return active, (layer.fixed, layer.state, others)

    def _cast(self, arrays: dict) -> dict:
        """Casts parameters to the dtype of the computation. Gradients have it too."""
        computed = self.cut.call.params.keys() | self.cut.trained
        return {
            key: cast_floating(x, self.compute) if key in computed else x
            for key, x in arrays.items()
        }

    def _cast_layers(self, layers: Layers) -> Layers:
        return Layers(
            self._cast(layers.trained), self._cast(layers.fixed), layers.state
        )


def _like(new: jax.Array, old: jax.Array, key: Any) -> jax.Array:
    """Casts a variable's new value to its old dtype, like a step without a pipeline."""
    if new.shape != old.shape:
        raise PipelineError(
            f"A block of the Stack changed the shape of its variable `{dotted(key)}` "
            f"from {old.shape} to {new.shape}. Variables keep their shapes."
        )
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _marks(layers: Layers, count: Count) -> Mark:
    """Marks the layers to run: bool (layers,), or ``None`` if all layers are run."""
    if count is None:
        return None  # the program then has no masks
    return jnp.arange(len(jax.tree.leaves(layers)[0])) < count


def _choose(mark: Mark, new: list, old: list) -> list:
    """Returns the new arrays, or the old arrays if the layer is not run."""
    if mark is None:
        return new
    # A branch is not allowed, because its predicate would differ between stages.
    return [jnp.where(mark, a, b) for a, b in zip(new, old, strict=True)]


def _numbered(layers: Layers, stacked: Any) -> tuple[Layers, Any, jax.Array]:
    """Returns a backward scan's inputs: layers without state, values, and indices."""
    # The residuals contain all state that the backward pass needs.
    layers = Layers(layers.trained, layers.fixed, {})
    count = len(jax.tree.leaves((layers, stacked))[0])
    return layers, stacked, jnp.arange(count)


class _ComputedIndices(Origins):
    """Finds the gathers and scatters with indices computed from an input.

    Regions that are manual over all ``others`` are ignored, because XLA does not
    partition them.
    """

    def __init__(self, others: set[str]) -> None:
        self.found: set[str] = set()  # names of primitives
        self._others = others

    def apply(self, inputs: list, *eqns: jex.JaxprEqn) -> list:
        (eqn,) = eqns
        name, any_input = eqn.primitive.name, frozenset().union(*inputs)
        # Operand 1 of both primitives has the indices. Slices are other primitives.
        if (name == "gather" or name.startswith("scatter")) and inputs[1]:
            self.found.add(name)
        if self._others <= set(eqn.params.get("newly_manual_axes", ())):
            return [any_input] * len(eqn.outvars)
        outputs = None if name == "while" else self.nested(inputs, eqn)
        if outputs is not None:
            return outputs
        # A loop of unknown length may compute an index from its counter. Other
        # primitives take their operands in a different order. So any operand may be an
        # index.
        for inner in jex.jaxprs_in_params(eqn.params):
            self([any_input] * len(inner.invars), inner)
        return [any_input] * len(eqn.outvars)


def _without_offload(remat: Remat) -> Remat:
    """Refuses a policy when it moves a value to the host, as a stage keeps it."""
    if not callable(remat):
        return remat

    def policy(*args: Any, **params: Any) -> Any:
        kept = remat(*args, **params)
        if not isinstance(kept, bool) and hasattr(kept, "dst"):
            raise PipelineError(
                "The policy of remat= moves values to the host. A pipeline keeps the "
                "values of its microbatches on the devices. Use a policy that saves or "
                "recomputes, such as Save(*names)."
            )
        return kept

    return policy
