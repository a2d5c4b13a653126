"""Training state: parameters, other variables, optimizer state and step.

A `StatePlan` is computed once, from shapes only. The state consists of nested dicts of
global arrays, so ``jax.jit`` can flatten it without walking the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel.errors import EightBitError, StateStructureError
from nnx_parallel.init import compute_in_shards, first_arrays
from nnx_parallel.layers.recipe import layers_in_eight_bits, set_recipe
from nnx_parallel.layers.stack.gather import gather_late
from nnx_parallel.precision import LossScale, Precision, cast_floating, sum_dtype
from nnx_parallel.sharding.constrain import using
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import (
    MODES,
    ModelDef,
    ModelFn,
    Path,
    ReadsArrays,
    arrays_from,
    arrays_of,
    flatten,
    nest,
    place_model,
    placed_copies,
    set_default_modes,
    stored_shardings,
)
from nnx_parallel.sharding.model_specs import building_on
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import variables_of
from nnx_parallel.sharding.offload import Offload, check_host_memory
from nnx_parallel.sharding.optimizer import (
    Optimizer,
    as_transformation,
    optimizer_shardings,
)
from nnx_parallel.sharding.placement import Placement


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The arrays that a training step takes and returns. All of them are global.

    Attributes:
        step: int32 scalar, the number of optimizer updates done.
        params: Trained parameters, in nested dicts by attribute.
        variables: All other arrays of the model: frozen parameters, batch statistics,
            random streams.
        opt_state: Optax state; with several players, a dict of states by player.
        key: Random key. If the loss takes ``rngs``, each step derives a key from it.
        ema: Exponential moving average of ``params``, or ``None``.
        loss_scale: The loss scale for float16, or ``None``.
    """

    step: jax.Array
    params: dict[str, Any]
    variables: dict[str, Any]
    opt_state: optax.OptState
    key: jax.Array
    ema: dict[str, Any] | None = None
    loss_scale: LossScale | None = None

    def scaled(self, loss: jax.Array) -> jax.Array:
        """Returns a loss, multiplied by the loss scale if the state has one."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def with_new_average(self) -> TrainState:
        """Returns the state with its moving average restarted from the parameters."""
        if self.ema is None:
            return self
        # The arrays are copied, because a step donates both parameters and average.
        ema = jax.tree.map(
            lambda x, old: x.astype(old.dtype, copy=True), self.params, self.ema
        )
        return dataclasses.replace(self, ema=ema)


@dataclass(frozen=True)
class Share:
    """The part of a state that one player trains.

    Attributes:
        tx: The player's optimizer.
        paths: Paths of the parameters that the player's optimizer updates.
    """

    tx: Optimizer
    paths: frozenset[Path]


@dataclass(frozen=True, kw_only=True)
class StatePlan:
    """A model's structure and the placement of every array, before the arrays exist.

    Attributes:
        model_name: Name of the model's class.
        layout: The mesh and the strategy's claims on it.
        model: The model's structure. Its modules keep the training or evaluation mode
            that they have in the user's model.
        eval_model: The model's structure, with all modules in evaluation mode.
        placements: Placement of each array of the model, by path.
        param_placements: Placements of all parameters, trained or frozen.
        trained_paths: Paths of the trained parameters.
        abstract: The state, with shapes, dtypes and shardings (`jax.ShapeDtypeStruct`)
            instead of arrays.
        ema_decay: Decay of the moving average, or ``None``.
        offload: The arrays that are kept in host memory, or ``None``.
        shares: The players' shares by name; empty if there is only one loss.
        player: The player of a `view`, or an empty name.
        whole: The plan of the entire state. It differs from this plan in a `view`.
    """

    model_name: str
    layout: Layout
    model: ModelDef
    eval_model: ModelDef
    placements: dict[Path, Placement]
    param_placements: dict[Path, Placement]
    trained_paths: frozenset[Path]
    abstract: TrainState
    tx: Optimizer
    precision: Precision
    ema_decay: float | None
    offload: Offload | None = None
    shares: Mapping[str, Share] = field(default_factory=dict)
    player: str = ""
    _whole: StatePlan | None = None

    @property
    def whole(self) -> StatePlan:
        """The plan of the entire state."""
        return self._whole or self

    def view(self, player: str) -> StatePlan:
        """Returns the plan of the state as one player sees it.

        In this plan, the parameters of other players are among the variables, which a
        step of this player does not train.
        """
        share = self.shares[player]
        view = dataclasses.replace(
            self,
            player=player,
            trained_paths=share.paths,
            tx=share.tx,
            shares={},
            _whole=self,
        )
        return dataclasses.replace(view, abstract=view.narrow(self.abstract))

    def narrow(self, state: TrainState) -> TrainState:
        """Returns a state as the player of this `view` sees it."""
        if not self.player:
            return state

        def split(tree: dict) -> tuple[dict, dict]:
            mine, others = {}, {}
            for path, x in flatten(tree).items():
                (mine if path in self.trained_paths else others)[path] = x
            return nest(mine), others

        params, others = split(state.params)
        states: Any = state.opt_state
        return dataclasses.replace(
            state,
            params=params,
            variables=nest(flatten(state.variables) | others),
            opt_state=states[self.player],
            ema=None if state.ema is None else split(state.ema)[0],
        )

    def widen(self, state: TrainState, new: TrainState) -> TrainState:
        """Returns the entire state after a step of the player of this `view`.

        Args:
            state: The entire state before the step.
            new: The state after the step, as the player sees it.
        """
        if not self.player:
            return new
        arrays = flatten(new.params) | flatten(new.variables)
        params, variables = (
            nest({path: arrays[path] for path in flatten(tree)})
            for tree in (state.params, state.variables)
        )
        ema = state.ema and nest(flatten(state.ema) | flatten(new.ema or {}))
        states: Any = state.opt_state
        opt_state = states | {self.player: new.opt_state}
        return dataclasses.replace(
            new, params=params, variables=variables, opt_state=opt_state, ema=ema
        )

    @property
    def offloads_optimizer(self) -> bool:
        """True if optimizer state is kept in host memory."""
        return self.offload is not None and self.offload.optimizer

    @property
    def shardings(self) -> TrainState:
        """The sharding of each array of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    @property
    def modules(self) -> list[nnx.Module]:
        """Every module of the model, with shapes instead of arrays."""
        arrays = flatten(self.abstract.params) | flatten(self.abstract.variables)
        return [module for _, module in nnx.iter_modules(self.model.merge(arrays))]

    @property
    def is_evaluating(self) -> bool:
        """True if every module that has a mode was passed in evaluation mode."""
        modes = [getattr(m, name, None) for m in self.modules for name in MODES]
        flags = [mode for mode in modes if isinstance(mode, bool)]
        return bool(flags) and all(flags)

    def build(self, arrays: dict, seed: jax.Array | int) -> TrainState:
        """Returns the initial state, made from all arrays of the model."""
        params, others, ema = {}, {}, None
        for path, x in flatten(arrays).items():
            group = params if path in self.trained_paths else others
            is_param = path in self.param_placements
            x = cast_floating(x, self.precision.params) if is_param else x
            # `jnp.full` makes weakly typed arrays. The first step would return them
            # with a strong type, and the second step would have to be compiled again.
            if jax.typeof(x).weak_type:
                x = jax.lax.convert_element_type(x, jnp.result_type(x))
            group[path] = x
        params = nest(params)
        if self.ema_decay is not None:
            # The average is at least float32, because bfloat16 loses a change of a
            # thousandth. It is a copy, because a step donates both average and
            # parameters.
            ema = jax.tree.map(lambda x: jnp.array(x, sum_dtype(x)), params)
        return TrainState(
            step=jnp.int32(0),
            params=params,
            variables=nest(others),
            # This must run under jit. Otherwise the optimizer's counters would be on
            # device 0, and the step, which runs on the mesh, would reject them.
            opt_state=self.tx.init(params),
            # The constant separates this stream from the model's, which has the same
            # seed.
            key=jax.random.fold_in(jax.random.key(seed), 0x1055),
            ema=ema,
            loss_scale=LossScale.create() if self.precision.needs_loss_scale else None,
        )

    def merge(
        self,
        params: dict,
        variables: dict,
        *,
        training: bool,
        cast_stacked: bool = True,
        key: jax.Array | None = None,
    ) -> nnx.Module:
        """Returns the model as the loss sees it, cast to the compute dtype.

        If ``cast_stacked`` is False, a pipeline's layers are not cast here, but in the
        stages that run them. ``key`` is for stochastic rounding in 8-bit products.
        """
        flat, places = flatten(params) | flatten(variables), self.param_placements
        # A set would have a different order in each process, and each process would
        # then trace a different program.
        for path, place in places.items():
            if cast_stacked or not place.is_staged:
                # The cast comes before the gather, which then sends bfloat16.
                flat[path] = cast_floating(flat[path], self.precision.compute)
        model = self.model if training else self.eval_model
        # The new Variables have the metadata of the graphdef. It contains the
        # placements, which the layers read.
        merged = model.merge(flat)
        if self.precision.products is not None:
            set_recipe(merged, self.precision.products, key)
        return merged

    def gathering(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that parameters are gathered where they are used.

        The function's arguments are ``(params, variables, *rest)``.
        """
        places = self.param_placements.items()
        return gather_late(function, {p: x for p, x in places if x.is_gathered})

    def evaluate(
        self, function: Callable[..., Any], params: dict, variables: dict, *args: Any
    ) -> Any:
        """Calls a function with the model in evaluation mode, on the entire mesh."""

        def run(params: dict, variables: dict, *args: Any) -> Any:
            return function(self.merge(params, variables, training=False), *args)

        with using(self.layout):
            return self.gathering(run)(params, variables, *args)

    def variables_after(
        self, variables: dict, given: dict[Path, Any], after: dict[Path, Any]
    ) -> dict[str, Any]:
        """Returns variables after a forward pass, and parameters that it assigned.

        Both have the dtypes in which the state stores them. ``given`` and ``after`` are
        the results of `arrays_of` for the model before and after that pass.

        Raises:
            StateStructureError: If an array was removed or added, or if its shape
                changed.
        """
        others, trained = flatten(variables), flatten(self.abstract.params)
        # A set would have a different order in each process, and each process would
        # then trace a different program.
        changed = (p for p in self.placements if after.get(p) is not given.get(p))
        before = others | {p: trained[p] for p in changed if p in trained}
        problems = [f"`{dotted(p)}` is gone" for p in before if p not in after]
        problems += [f"`{dotted(p)}` is new" for p in after if p not in given]
        problems += [
            f"`{dotted(p)}` went from shape {x.shape} to {after[p].shape}"
            for p, x in before.items()
            if p in after and x.shape != after[p].shape
        ]
        # The compiled step accepts only one structure of the state.
        if problems:
            raise StateStructureError(
                f"The loss changed the model's structure: {'; '.join(problems)}. A "
                "model keeps the names and shapes of its Variables from step to step: "
                "create all of them in __init__. If a step computes other values, "
                "return them as metrics."
            )
        # If the loss has not assigned an array, the stored array is kept. The model had
        # a cast copy of it, and the cast must not cost a frozen parameter any bits.
        kept = {
            path: x if after[path] is given[path] else after[path].astype(x.dtype)
            for path, x in before.items()
        }
        assigned = nest({path: kept.pop(path) for path in before if path in trained})
        # Assigned parameters have the sharding with which they were used. They move to
        # the sharding with which they are stored.
        return nest(kept | flatten(self.constrain(assigned, "stored")))

    def take_assigned(self, params: dict, after: dict) -> tuple[dict, dict]:
        """Splits a result of `variables_after` into parameters and other variables."""
        flat, others = flatten(params), flatten(after)
        assigned = {path: others.pop(path) for path in flat if path in others}
        return nest(flat | assigned), nest(others)

    def assign(
        self, state: TrainState, arrays: dict[Path, Any], *, ema: bool
    ) -> tuple[TrainState, dict[Path, jax.Array]]:
        """Returns a state with some arrays replaced, and the new placed arrays by path.

        Args:
            state: The state, which does not change.
            arrays: New arrays of the model by path, on the host or on any devices.
            ema: True to assign the arrays of parameters to their moving average.

        Raises:
            StateStructureError: If an array's shape differs from its shape in the
                state.
        """
        groups = ("ema" if ema else "params", "variables")
        wanted: dict[Path, Any] = {}
        for group in groups:
            wanted |= flatten(getattr(self.abstract, group))
        if problems := [
            f"`{dotted(path)}` has shape {jnp.shape(x)} instead of {wanted[path].shape}"
            for path, x in arrays.items()
            if jnp.shape(x) != wanted[path].shape
        ]:
            raise StateStructureError(
                f"Cannot assign to trainer.model: {'; '.join(problems)}. The arrays of "
                "a run keep their shapes: build a new Trainer for another model."
            )
        cast = {path: jnp.asarray(x, wanted[path].dtype) for path, x in arrays.items()}
        placed = placed_copies(cast, {path: wanted[path].sharding for path in cast})

        for group in groups:
            flat = flatten(getattr(state, group))
            flat |= {path: placed[path] for path in flat if path in placed}
            state = dataclasses.replace(state, **{group: nest(flat)})
        return state, placed

    def constrain(self, params: dict, role: str) -> dict:
        """Constrains trained parameters, or a tree like them, to specs of one role.

        ``role`` is a field of `Placement`, such as ``"stored"``.
        """
        specs = {path: getattr(self.placements[path], role) for path in flatten(params)}
        shardings = {path: self.layout.sharding(spec) for path, spec in specs.items()}
        return jax.lax.with_sharding_constraint(params, nest(shardings))


def _check_products(
    model: nnx.Module, precision: Precision, placements: dict[Path, Placement]
) -> None:
    """Checks that the selected products can run in 8 bits under a layout."""
    if (recipe := precision.products) is None:
        return
    layers_in_eight_bits(model, recipe)
    is_staged = any(place.is_staged for place in placements.values())
    if is_staged and recipe.rounding == "stochastic":
        raise EightBitError(
            "rounding='stochastic' needs a key for each layer in each step, and the "
            "stages of a Pipeline get no keys. Pass rounding='nearest', or use FSDP or "
            "TensorParallel instead."
        )


def plan_state(
    model: nnx.Module,
    layout: Layout,
    optimizer: object,
    *,
    wrt: Any = nnx.Param,
    precision: Precision | None = None,
    ema_decay: float | None = None,
    offload: Offload | None = None,
) -> StatePlan:
    """Decides the placement of every array of a training state, from shapes only.

    Args:
        model: The abstract model. The placements are written into its metadata.
        layout: The mesh and the strategy's claims on it.
        optimizer: An Optax transformation or a function of the abstract model; with
            several players, a dict of them by player.
        wrt: Filter of the Variables to train; with several players, a dict like
            ``optimizer``.
        precision: The dtypes. With computation in float16, the state has a loss scale.
        ema_decay: Decay of a moving average of the parameters, or ``None``.
        offload: The arrays that are kept in host memory, or ``None``.

    Raises:
        ValueError: If ``wrt`` selects no Variable, or if ``ema_decay`` is not a number
            of at least 0 and below 1.
        OffloadError: If the devices cannot access host memory.
        EightBitError: If `Precision.products` matches no layer, or a layer whose
            products cannot run in 8 bits.
    """
    if offload is not None:
        check_host_memory(layout.mesh)
    is_number = isinstance(ema_decay, int | float)
    if ema_decay is not None and not (is_number and 0 <= ema_decay < 1):
        raise ValueError(
            f"ema_decay={ema_decay!r}. It must be a number of at least 0 and below 1, "
            "such as 0.999."
        )
    precision = precision or Precision()
    is_one = not isinstance(optimizer, dict)
    optimizers, filters = ({"": optimizer}, {"": wrt}) if is_one else (optimizer, wrt)
    txs = {name: as_transformation(each, model) for name, each in optimizers.items()}
    placements = place_model(model, layout)
    _check_products(model, precision, placements)
    training = ModelDef.of(set_default_modes(model))
    # The mode is part of the structure, so it is changed only after `training` is made.
    # The arrays do not change.
    model.eval()
    shares = {name: Share(txs[name], _trained(model, filters, name)) for name in txs}
    trained_paths = frozenset[Path]().union(*(each.paths for each in shares.values()))
    are_params = {p for p, v in variables_of(model) if isinstance(v, nnx.Param)}
    are_params |= trained_paths
    plan = StatePlan(
        model_name=type(model).__name__,
        layout=layout,
        model=training,
        eval_model=ModelDef.of(model),
        placements=placements,
        param_placements={p: x for p, x in placements.items() if p in are_params},
        trained_paths=trained_paths,
        # The plan itself computes the state's shapes, so they are filled in below.
        abstract=None,  # pyright: ignore[reportArgumentType]
        tx=txs[""] if is_one else _side_by_side(shares),
        precision=precision,
        ema_decay=ema_decay,
        offload=offload,
        shares={} if is_one else shares,
    )
    arrays = nest(arrays_of(model))
    return dataclasses.replace(plan, abstract=_abstract_state(plan, arrays))


def _trained(model: nnx.Module, filters: Mapping[str, Any], name: str) -> frozenset:
    """Returns the paths that a player's filter selects; there must be at least one."""
    wrt = filters[name]
    paths = frozenset(path for path, _ in variables_of(model, wrt))
    if not paths:
        kinds = sorted({type(v).__name__ for _, v in variables_of(model)})
        owner, parts = (f"Player {name!r}: ", ", in the parts ") if name else ("", "")
        if name:
            parts += str(sorted({str(path[0]) for path, _ in variables_of(model)}))
        raise ValueError(
            f"{owner}wrt={wrt} selects no Variable of the model, so nothing would be "
            f"trained. The model has Variables of kinds {kinds}{parts}."
        )
    return paths


def _side_by_side(shares: Mapping[str, Share]) -> Optimizer:
    """Returns a transformation that has the states of all players, by name.

    Its update is only traced, to find out how the states change.
    """

    def of(share: Share, tree: Any) -> dict:
        return nest({p: x for p, x in flatten(tree).items() if p in share.paths})

    def init(params: Any) -> dict[str, Any]:
        return {
            name: share.tx.init(of(share, params)) for name, share in shares.items()
        }

    def update(grads: Any, states: Any, params: Any, **known: Any) -> tuple[Any, Any]:
        updates, new = flatten(grads), {}
        for name, share in shares.items():
            tx: Any = optax.with_extra_args_support(share.tx)
            mine = {k: of(share, x) if k == "grad" else x for k, x in known.items()}
            found, new[name] = tx.update(
                of(share, grads), states[name], of(share, params), **mine
            )
            updates |= flatten(found)
        return nest(updates), new

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _abstract_state(plan: StatePlan, arrays: dict) -> TrainState:
    """Returns the state's shapes and shardings, given shapes of the model's arrays."""
    state = jax.eval_shape(plan.build, arrays, 0)
    layout, stored = plan.layout, stored_shardings(plan.placements, plan.layout)
    shapes = {path: tuple(x.shape) for path, x in flatten(state.params).items()}

    def like_model(tree: dict) -> dict:
        return nest({path: stored[path] for path in flatten(tree)})

    shardings = dataclasses.replace(
        # Step, key and loss scale are replicated.
        jax.tree.map(lambda _: layout.sharding(P()), state),
        params=like_model(state.params),
        variables=like_model(state.variables),
        ema=None if state.ema is None else like_model(state.ema),
        opt_state=optimizer_shardings(
            state.opt_state,
            shapes,
            plan.placements,
            layout,
            on_host=plan.offloads_optimizer,
        ),
    )

    def place(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, state, shardings)


def init_state(
    plan: StatePlan, source: nnx.Module | ModelFn, rngs: nnx.Rngs, seed: int
) -> TrainState:
    """Builds the state. Every array has its final sharding from the start.

    Args:
        plan: The placement of every array.
        source: The model, or the function that builds it. The arrays of a model are
            copied.
        rngs: Random streams for the function.
        seed: Seed of the state's key.
    """
    with building_on(plan.layout):
        if isinstance(source, nnx.Module | ReadsArrays):
            shardings = stored_shardings(plan.placements, plan.layout)
            args = first_arrays(source, rngs, shardings), jnp.asarray(seed)
            # The arrays need no copy, because nothing else refers to them.
            return compute_in_shards(plan.build, args, plan.shardings, owns_args=True)
        make_arrays, streams = arrays_from(source, rngs)

        def build_all(streams: dict, seed: jax.Array | int) -> TrainState:
            return plan.build(make_arrays(streams), seed)

        args = streams, jnp.asarray(seed)
        return compute_in_shards(build_all, args, plan.shardings)
