"""The compiled step: gradients of a batch, and one optimizer update.

A step is ``jax.jit`` over plain state. The model's graph is walked once, in the trace.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel.data.rows import (
    constrain_rows,
    is_marked,
    partition,
    split_rows,
    unmarked,
)
from nnx_parallel.errors import LossError, ModelError, ParallelWarning, warn_user
from nnx_parallel.layers.experts.moe import RouterState
from nnx_parallel.layers.loss import LabelRange, observing_labels
from nnx_parallel.layers.recipe import checking_layers
from nnx_parallel.layers.stack.scan import Remat, check_remat, default_remat
from nnx_parallel.layers.stack.stack import Stack, run_one_layer, using_runner
from nnx_parallel.metrics import (
    RESERVED_METRICS,
    Mean,
    check_scalar,
    result_of,
    split_loss_output,
)
from nnx_parallel.optimizers.by_layer import warn_of_stacked_updates
from nnx_parallel.optimizers.offload import check_offload
from nnx_parallel.optimizers.steps import (
    final_gradients,
    learning_rates,
    optimize,
    warn_of_direction,
    where,
)
from nnx_parallel.precision import Precision, cast_floating, sum_dtype
from nnx_parallel.programs import TracedFunction, is_call, reached, trace, variables_in
from nnx_parallel.sharding.checksum import hash_each
from nnx_parallel.sharding.constrain import in_context, noticing_idle_claims, using
from nnx_parallel.sharding.donation import Donating
from nnx_parallel.sharding.layout import Execution
from nnx_parallel.sharding.model import arrays_of, flatten, nest, plain_attributes
from nnx_parallel.sharding.names import dotted, path_of
from nnx_parallel.sharding.nnx_arrays import variables_of
from nnx_parallel.state import StatePlan, TrainState
from nnx_parallel.training.arguments import LossFn, LossOutput, SkipSteps
from nnx_parallel.training.compilation import jit_step
from nnx_parallel.training.diagnostics import (
    check_count,
    noting_call,
    warn_of_attributes,
    watching_wrapped,
)
from nnx_parallel.training.row_analysis import ROWS, SHARED, find_changes

Batch = Any
Metrics = dict[str, jax.Array]
Means = dict[str, Any]
"""Each `Mean` or `Sum` by name; ``loss`` is a `Mean`."""
Forward = Callable[[dict, dict, Batch, jax.Array], tuple[Means, dict]]
"""Maps ``(params, variables, batch, key)`` to means by name, and to new variables.

The new variables include trained parameters that the loss has assigned, but no other
parameters.
"""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a step.

    Attributes:
        num_microbatches: Number of parts of the batch. Their gradients are accumulated.
        remat: The values that the forward pass keeps, unless the model chooses them
            itself. `Programs` replaces ``"auto"`` before a step is made.
        compiler_options: Options that override the library's `compiler_options`.
        skip: The rule that skips bad steps; ``None`` if a bad step ends the run.
    """

    num_microbatches: int = 1
    remat: Remat | Literal["auto"] = "none"
    compiler_options: Mapping[str, Any] | None = None
    skip: SkipSteps | None = None

    def __post_init__(self) -> None:
        if self.remat != "auto":
            check_remat(self.remat)
        least = ", which does not split the batch"
        count = check_count("num_microbatches", self.num_microbatches, 1, least)
        object.__setattr__(self, "num_microbatches", count)

    @property
    def policy(self) -> Remat:
        """The remat policy; it is never ``"auto"``."""
        assert self.remat != "auto", "Programs.start replaces 'auto'"
        return self.remat


def takes_rngs(loss: Callable) -> bool:
    """Returns True if a loss has a parameter named ``rngs``, for random streams."""
    return "rngs" in inspect.signature(loss).parameters


def make_train_step(
    plan: StatePlan, loss: LossFn, options: StepOptions
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the compiled update: ``(state, batch) -> (state, metrics)``.

    The state is donated. A state that was donated before raises a `DonatedArrayError`.
    Metrics are arrays on the devices. The scalars are ``loss``, ``grad_norm`` and the
    metrics of the loss, and ``learning_rate`` if it can be read (`learning_rates`). A
    model with experts also has arrays ``(layers,)``, such as
    ``expert_loads/blocks.layer.mlp``, which `float` cannot convert. This expression
    leaves them out: ``{k: float(v) for k, v in metrics.items() if not v.ndim}``.
    """
    check_dtypes(plan)
    warn_of_modes(plan, options.policy)
    warn_of_direction(plan.tx)
    warn_of_adapters(plan)
    warn_of_stacked_updates(plan)
    check_offload(plan, options.policy)
    compute = partial(_compute, plan, loss, options, _Told())

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return _update(plan, options.skip, state, compute(plan.narrow(state), batch))

    # The new state takes the old state's memory and shardings. If no shardings were
    # given, the compiler would choose others, and the next call would compile again.
    step = jit_step(
        plan.layout,
        train_step,
        options.compiler_options,
        donate_argnums=0,
        out_shardings=(plan.whole.shardings, None),
    )
    return Donating(step, ("state", "batch"), (0,), plan.layout.mesh)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Computed:
    """The results of a batch, from which the optimizer updates the state.

    Attributes:
        assigned: Parameters that the loss has assigned; usually empty.
        grads: Gradients of the parameters, multiplied by the loss scale if there is
            one.
        variables: The other variables after the step.
        metrics: The loss and the other results of the loss, by name.
        found: Metrics that modules have computed in `finish_step`.
        counts: True if at least one row of the batch counts in the loss; ``None`` if
            every batch has such rows.
    """

    assigned: dict[str, Any]
    grads: dict[str, Any]
    variables: dict[str, Any]
    metrics: Metrics
    found: dict[str, jax.Array]
    counts: jax.Array | None


def make_split_step(
    plan: StatePlan, loss: LossFn, options: StepOptions
) -> tuple[Any, Any]:
    """Returns the step as two compiled programs, so that gradients can be compared.

    Returns:
        ``(state, batch) -> (Computed, hashes)``, which donates nothing, and ``(state,
        Computed) -> (state, metrics)``, which donates the state. The hashes are an
        array with one row per device; the columns are the arrays of `hashed_arrays`.
    """
    compute = partial(_compute, plan, loss, options, _Told())

    def compute_and_hash(state: TrainState, batch: Batch) -> tuple[Computed, jax.Array]:
        state = plan.narrow(state)
        computed = compute(state, batch)
        grads = plan.constrain(computed.grads, "gradient")
        stored = [x.sharding.spec for x in jax.tree.leaves(plan.abstract.params)]
        placed = [plan.placements[path].gradient for path in flatten(grads)]
        arrays = *jax.tree.leaves(state.params), *jax.tree.leaves(grads)
        hashes = hash_each(plan.layout.mesh, arrays, (*stored, *placed))
        return replace(computed, grads=grads), hashes

    jit = partial(jit_step, plan.layout, overrides=options.compiler_options)
    apply = jit(
        partial(_update, plan, options.skip),
        donate_argnums=0,
        out_shardings=(plan.whole.shardings, None),
    )
    return jit(compute_and_hash), Donating(apply, ("state", "computed"), (0,))


def hashed_arrays(plan: StatePlan) -> list[str]:
    """Returns the names of the arrays that `make_split_step` hashes, in its order."""
    paths = [
        path_of(keys) for keys, _ in jax.tree.leaves_with_path(plan.abstract.params)
    ]
    return [f"parameter `{path}`" for path in paths] + [
        f"gradient of `{path}`" for path in paths
    ]


class _Told:
    """Remembers that a step has warned, so that it does not warn for each shape."""

    is_told = False


def _compute(
    plan: StatePlan,
    loss: LossFn,
    options: StepOptions,
    told: _Told,
    state: TrainState,
    batch: Batch,
) -> Computed:
    """Computes the gradients of a batch and everything else that an update needs."""
    offload = plan.offload and plan.offload.activations
    with using(plan.layout), default_remat(options.policy, offload):
        # The key depends on the step, so that a resumed run draws the same numbers as
        # an uninterrupted run.
        key = jax.random.fold_in(state.key, state.step)
        arguments = state, batch, key, options.num_microbatches
        always: list[bool] = []
        if options.num_microbatches > 1 and not told.is_told:
            told.is_told = True
            texts = list[str]()
            # A loss may refuse these numbers of rows, be another program for each
            # number, or use operations that a jaxpr cannot show.
            with contextlib.suppress(Exception):
                texts = changes_by_microbatches(plan, loss, *arguments)
            for text in texts:
                warn_user(text, ParallelWarning)
        # A player's loss may leave out layers of other players.
        recipe = None if plan.player else plan.precision.products
        with (
            noticing_idle_claims(plan.layout),
            checking_layers(plan.model.copy(), recipe),
        ):
            grads, variables, means = execution_of(plan).gradients(
                plan, _forward(plan, loss, always), *arguments
            )
        trained, after = flatten(state.params), flatten(variables)
        assigned = nest({path: x for path, x in after.items() if path in trained})
        params, variables = plan.take_assigned(state.params, variables)
        variables, found = finish_step(plan, params, variables)
        counts = None if always and all(always) else jnp.asarray(means["loss"].counts)
        metrics = {
            name: x if isinstance(x, jax.Array) else result_of(x)
            for name, x in means.items()
        }
        for name, value in metrics.items():
            check_scalar(value, f"In training, metric {name!r}")
    return Computed(
        assigned=assigned,
        grads=grads,
        variables=variables,
        metrics=metrics,
        found=found,
        counts=counts,
    )


def call_loss(
    precision: Precision,
    loss: LossFn,
    model: nnx.Module,
    batch: Batch,
    key: jax.Array,
    name: str = "the loss",
) -> LossOutput:
    """Calls a loss by its signature, with floating-point inputs in the right dtype.

    An error in the loss gets a note with ``name``, the batch's shapes and the model.
    """
    batch = unmarked(cast_floating(batch, precision.inputs))
    # The key depends on the step and the microbatch but never on a device, so that the
    # numbers do not depend on the strategy.
    rngs = {"rngs": nnx.Rngs(key)} if takes_rngs(loss) else {}
    with noting_call(name, model, batch), watching_wrapped(model):
        return loss(model, batch, **rngs)


def check_padding(
    plan: StatePlan, loss: LossFn, state: TrainState, batch: Batch, weights: str
) -> None:
    """Raises an error if rows of weight 0 would change a loss or a model.

    The loss is only traced. A value that depends on the rows must also depend on the
    weights. If it does not, it is certainly wrong. If it does, it may still be wrong.

    Raises:
        LossError: If values would change; the message names them.
    """
    state, forward = plan.narrow(state), in_context(plan.layout, _forward(plan, loss))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step itself will give the warnings
        key = jax.random.fold_in(state.key, state.step)
        traced = trace(
            forward, state.params, state.variables, batch, key, inlined=is_call
        )
    entries, structure = jax.tree.flatten(batch, is_leaf=is_marked)
    inputs = structure.flatten_up_to(traced.inputs[2])
    has_rows = [not is_marked(x) and x.ndim > 0 for x in entries]
    mask = variables_in(jax.tree.leaves(traced.inputs[2][weights]))
    rows = {v for v, has in zip(inputs, has_rows, strict=True) if has}.difference(mask)
    by_rows, by_weights = reached(traced.eqns, rows), reached(traced.eqns, mask)

    def is_from(found: set, part: Any) -> bool:
        return not found.isdisjoint(variables_in(jax.tree.leaves(part)))

    means, variables = traced.outputs
    wrong = [
        f"the metric {name!r}" if name != "loss" else "the loss"
        for name, mean in means.items()
        for part in (mean.terms if isinstance(mean, Mean) else (mean,))
        if is_from(by_rows, part.total)
        and not all(is_from(by_weights, x) for x in vars(part).values() if x != ())
    ]
    wrong += [
        f"`{path_of(keys)}`"
        for keys, x in jax.tree.leaves_with_path(variables)
        if is_from(by_rows, x) and not is_from(by_weights, x)
    ]
    if wrong:
        raise LossError(
            f"last_batch=Pad({weights!r}) adds rows of weight 0, which would change "
            f"{', '.join(dict.fromkeys(wrong))}. A loss or metric of the rows must be "
            f"a Mean whose total and weight follow from batch[{weights!r}], such as "
            f"cross_entropy(logits, labels, batch[{weights!r}]); batch statistics "
            "count every row. Return a Mean, or leave the batch out: last_batch='drop'."
            f"{_remedy_of_mixtures(plan, wrong)}"
        )


def _remedy_of_mixtures(plan: StatePlan, wrong: Sequence[str]) -> str:
    """Returns a remedy if rows of weight 0 change routers' states, or an empty text."""
    routers = {
        f"`{dotted(path)}`"
        for path, leaf in nnx.to_flat_state(plan.model.state)
        if isinstance(leaf, RouterState)
    }
    if routers.isdisjoint(wrong):
        return ""
    return (
        " The router of an MoE counts these rows too: use last_batch=Pad('segments') "
        "and pass batch['segments'] to the model, which ignores rows whose segment is "
        "0."
    )


def changes_by_microbatches(
    plan: StatePlan,
    loss: LossFn,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    num_microbatches: int,
) -> list[str]:
    """Returns warnings if a loss has values that certainly depend on microbatches.

    The loss is only traced, once with the rows of two microbatches and once with four.
    """
    rows, shared, join = partition(batch)
    forward = in_context(plan.layout, _forward(plan, loss))

    def with_rows(factor: int) -> TracedFunction:
        count = factor * rows[0].shape[0] // num_microbatches
        some = [jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) for x in rows]
        return trace(forward, state.params, state.variables, join(some, shared), key)

    with warnings.catch_warnings(), using_runner(run_one_layer):
        warnings.simplefilter("ignore")  # the step itself will give the warnings
        traces = [with_rows(2), with_rows(4)]
    given = state.params, state.variables, join([ROWS] * len(rows), shared), key
    known = [x if x is ROWS else SHARED for x in jax.tree.leaves(given)]
    return find_changes(traces, known, num_microbatches)


def execution_of(plan: StatePlan) -> Execution:
    """Returns the strategy's `Execution`; by default it accumulates microbatches."""
    return plan.layout.claims.execution or AccumulateMicrobatches()


def _forward(
    plan: StatePlan, loss: LossFn, always_counts: list[bool] | None = None
) -> Forward:
    """Returns the loss as a function of arrays, which gives means and new variables.

    Each trace appends True to ``always_counts`` if the loss's weight is a constant.
    """

    def forward(
        params: dict, variables: dict, batch: Batch, key: jax.Array
    ) -> tuple[Means, dict]:
        with jax.named_scope("forward"):
            model = plan.merge(
                params, variables, training=True, cast_stacked=False, key=key
            )
            given = arrays_of(model)  # compared by identity: assigned arrays are new
            plain = plain_attributes(model)
            mean, metrics = split_loss_output(
                call_loss(plan.precision, loss, model, batch, key)
            )
            if always_counts is not None:
                always_counts.append(mean.counts is True)
            after = arrays_of(model)
            warn_of_statistics(plan, model, given, after)
            warn_of_attributes(plain, plain_attributes(model), "the loss")
        after = plan.variables_after(variables, given, after)
        return {"loss": mean, **metrics}, after

    return plan.gathering(forward)


@dataclass(frozen=True)
class AccumulateMicrobatches(Execution):
    """Runs one microbatch after the other on the entire mesh, and sums gradients."""

    def observe_labels(self, run: Callable[[], Any]) -> list[LabelRange]:
        """Returns labels that our losses find while ``run`` is traced and executed."""
        with observing_labels() as seen:
            jax.block_until_ready(run())
        return seen

    def gradients(
        self,
        plan: StatePlan,
        forward: Forward,
        state: TrainState,
        batch: Batch,
        key: jax.Array,
        num_microbatches: int,
    ) -> tuple[dict, dict, Means]:
        """Returns gradients of the batch's mean loss, new variables, and means."""
        if num_microbatches > 1:
            microbatches = split_rows(plan.layout, batch, num_microbatches)
            return _accumulate(plan, forward, state, microbatches, key)
        batch = constrain_rows(plan.layout, batch, 0)

        def objective(params: dict) -> tuple[jax.Array, tuple[Means, dict]]:
            means, variables = forward(params, state.variables, batch, key)
            return state.scaled(means["loss"].value), (means, variables)

        grads, (means, variables) = jax.grad(objective, has_aux=True)(state.params)
        if plan.offloads_optimizer:
            # This cast undoes JAX's last cast of the gradients. Without it, the loop of
            # the update would read twice the bytes.
            grads = cast_floating(grads, plan.precision.compute)
        return grads, variables, means

    def outputs(
        self,
        plan: StatePlan,
        function: Callable[[nnx.Module, Batch, jax.Array], Any],
        arrays: tuple[dict, dict],
        batch: Batch,
        key: jax.Array,
        num_microbatches: int,
        *,
        join: Callable[[Any], Any],
        needs_stack: bool,
    ) -> Any:
        """Returns the outputs of the entire batch at once."""
        return plan.evaluate(function, *arrays, batch, key)


def _accumulate(
    plan: StatePlan, forward: Forward, state: TrainState, batches: Batch, key: jax.Array
) -> tuple[dict, dict, Means]:
    """Scans over microbatches, ``(microbatch, row, ...)``, and sums the gradients."""
    rows, shared, join = partition(batches)
    indexed = (jnp.arange(rows[0].shape[0]), rows)

    def run(params: dict, variables: dict, item: Any) -> tuple[Means, dict]:
        index, rows = item
        microbatch = join(rows, shared)
        return forward(params, variables, microbatch, jax.random.fold_in(key, index))

    # If the loss assigns parameters, the next microbatch gets the new values, as with
    # other variables. The loss is traced here with the step's arrays instead of shapes,
    # so that the scans can reuse the trace.
    first = partial(jax.tree.map, lambda x: x[0], indexed)
    _, after = jax.eval_shape(lambda: run(state.params, state.variables, first()))
    arrays = flatten(state.params) | flatten(state.variables)
    carried = nest({path: arrays[path] for path in flatten(after)})

    def weigh(variables: dict, item: Any) -> tuple[dict, Any]:
        means, variables = run(*plan.take_assigned(state.params, variables), item)
        return variables, [term.weight for term in means["loss"].terms]

    # Each term of the loss is divided by its weight in the entire batch, so the weights
    # are needed before the first gradient. They usually depend only on the data. Then
    # this scan costs no forward pass, because the compiler drops all computations that
    # the weights do not need.
    _, weights = jax.lax.scan(weigh, carried, indexed)
    weights = [jnp.sum(w, dtype=sum_dtype(w)) for w in weights]

    def objective(params: dict, variables: dict, item: Any) -> Any:
        means, variables = run(params, variables, item)
        return state.scaled(means["loss"].over(weights)), (means, variables)

    def step(carry: Any, item: Any) -> tuple[Any, Means]:
        grads, variables = carry
        compute = jax.grad(objective, has_aux=True)
        params, variables = plan.take_assigned(state.params, variables)
        new, (means, variables) = compute(params, variables, item)
        # Gradients are placed before they are added, so that the sum of a sharded
        # gradient is sharded too.
        new = plan.constrain(new, "gradient")
        grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, new)
        return (plan.constrain(grads, "gradient"), variables), means

    def zero(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, plan.precision.gradient_dtype(x.dtype))

    zeros = jax.tree.map(zero, state.params)
    start = (plan.constrain(zeros, "gradient"), carried)
    (grads, variables), means = jax.lax.scan(step, start, indexed)
    return grads, variables, jax.tree.map(lambda x: jnp.sum(x, axis=0), means)


def _update(
    plan: StatePlan, skip: SkipSteps | None, state: TrainState, computed: Computed
) -> tuple[TrainState, Metrics]:
    """Returns the entire state after a step, and its metrics.

    Args:
        plan: The placement of all arrays.
        skip: The rule that skips bad steps.
        state: The entire state before the step.
        computed: The gradients and other results of the batch.
    """
    new, metrics = _apply_gradients(plan, skip, plan.narrow(state), computed)
    if plan.player:
        # The run itself reads names that are reserved: it reports them for each step.
        shared = {name: x for name, x in metrics.items() if name in RESERVED_METRICS}
        own = computed.metrics.keys() | {"grad_norm"}
        metrics = {
            f"{plan.player}/{name}"
            if name in own or name.startswith("learning_rate")
            else name: x
            for name, x in metrics.items()
        } | shared
    return plan.widen(state, new), metrics


def _apply_gradients(
    plan: StatePlan, skip: SkipSteps | None, state: TrainState, computed: Computed
) -> tuple[TrainState, Metrics]:
    """Returns the state after a step as its player sees it, and the metrics."""
    grads, counts, metrics = computed.grads, computed.counts, {**computed.metrics}
    variables, assigned = computed.variables, flatten(computed.assigned)
    params = nest(flatten(state.params) | assigned)
    with jax.named_scope("optimizer"):
        metrics["grad_norm"] = optax.tree.norm(final_gradients(plan, state, grads))
        # If any gradient has a NaN or an infinity, their norm is not finite.
        is_finite = jnp.isfinite(metrics["grad_norm"])
        conditions = [] if counts is None else [counts]
        if state.loss_scale is not None or skip is not None:
            conditions.append(is_finite)
        if skip is not None:
            conditions.append(jnp.isfinite(metrics["loss"]))
        if skip is not None and skip.max_grad_norm is not None:
            conditions.append(metrics["grad_norm"] <= skip.max_grad_norm)
        is_kept = reduce(jnp.logical_and, conditions) if conditions else None
        params, opt_state = optimize(plan, state, params, grads, metrics, is_kept)
        # The counts of an offloaded optimizer are in host memory.
        before = () if plan.offloads_optimizer else state.opt_state
        metrics |= learning_rates(plan.tx, before, opt_state)
        if (ema := state.ema) is not None:
            # The average is computed in its dtype, float32, because in bfloat16 a
            # change of a thousandth would be lost.
            latest = jax.tree.map(lambda x, old: x.astype(old.dtype), params, ema)
            ema = optax.incremental_update(latest, ema, 1 - plan.ema_decay)  # pyright: ignore[reportOperatorIssue]
        new = replace(state, step=state.step + 1, params=params, variables=variables)
        new = replace(new, opt_state=opt_state, ema=ema)
        if is_kept is not None:
            metrics["skipped"] = 1 - is_kept.astype(jnp.int32)
            kept = where(is_kept, *(replace(x, opt_state=()) for x in (new, state)))
            new = replace(kept, step=new.step, opt_state=opt_state)
        if state.loss_scale is not None:
            # With float16, a step with gradients that overflow changes the loss scale.
            metrics["loss_scale"] = state.loss_scale.scale
            new = replace(new, loss_scale=state.loss_scale.adjust(is_finite))
        return new, computed.found | metrics


def check_dtypes(plan: StatePlan) -> None:
    """Raises a `ModelError` if a trained array has a dtype without gradients."""
    for path, x in flatten(plan.abstract.params).items():
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise ModelError(
                f"`{dotted(path)}` is trained and has dtype {x.dtype}, which has no "
                "gradient. Keep it in an nnx.Variable instead of an nnx.Param, or "
                "leave it out of wrt=."
            )


def warn_of_modes(plan: StatePlan, remat: Remat | Literal["auto"]) -> None:
    """Warns of a model in evaluation mode, and of a ``remat`` without effect."""
    if plan.is_evaluating:
        warn_user(
            "The model is in evaluation mode and is trained in this mode: without "
            "dropout, with frozen batch statistics. Call model.train() first if this "
            "is not intended.",
        )
    has_stack = any(isinstance(module, Stack) for module in plan.modules)
    if remat != "none" and not has_stack:
        warn_user(
            f"remat={remat!r} acts on the blocks of a Stack, and this model "
            "has none: nothing is recomputed. Put its repeated blocks into a Stack, or "
            "use nnx.remat inside the model.",
        )


def warn_of_adapters(plan: StatePlan) -> None:
    """Warns if adapters are trained together with all other parameters."""
    model = plan.model.copy()
    adapters = {path for path, _ in variables_of(model, nnx.LoRAParam)}
    params = {path for path, _ in variables_of(model, nnx.Param)}
    if adapters and not plan.player and params == params & plan.trained_paths:
        warn_user(
            "The model has adapters of LoRA, and all its other parameters are trained "
            "too. To train only the adapters, pass Trainer(wrt=nnx.LoRAParam).",
            ParallelWarning,
        )


def warn_of_statistics(
    plan: StatePlan, model: nnx.Module, given: dict, after: dict
) -> None:
    """Warns of BatchNorm statistics that the loss has not updated."""
    still = [
        dotted((*path, name))
        for path, module in nnx.iter_modules(model)
        # A BatchNorm with use_running_average=True is frozen on purpose.
        if isinstance(module, nnx.BatchNorm) and not module.use_running_average
        # A player's loss need not run the parts that other players train.
        if not plan.player or any(p[: len(path)] == path for p in plan.trained_paths)
        for name in ("mean", "var")
        if after.get((*path, name)) is given.get((*path, name))
    ]
    if still and not plan.is_evaluating:
        shown = ", ".join(f"`{path}`" for path in still[:4])
        warn_user(
            f"The loss leaves {len(still)} batch statistics as they are: {shown}. In "
            "training mode BatchNorm updates them: call the model that the loss is "
            "given, not a copy, and without use_running_average=True.",
        )


def finish_step(
    plan: StatePlan, params: dict, variables: dict
) -> tuple[dict, dict[str, jax.Array]]:
    """Calls modules that have `finish_step`; returns variables and metrics afterwards.

    Such a module has a method ``finish_step() -> dict[str, Array | Mean]``, as `MoE`
    does. It runs once for all layers of a `Stack`, on arrays with a ``layers`` dim. If
    several modules give scalars of the same name, the largest is taken. If they give a
    `Mean`, it is taken over all modules. The name of an array ``(layers,)`` includes
    the path of its module, as in ``name/blocks.layer.mlp``. Only loggers that show each
    layer get these arrays.
    """
    if not any(hasattr(module, "finish_step") for module in plan.modules):
        return variables, {}
    before = flatten(variables)
    model = plan.model.merge(flatten(params) | before)
    metrics: dict[str, jax.Array] = {}
    means: dict[str, Mean] = {}
    # All processes get the arrays of all layers, because their loggers read them. A
    # pipeline has split the layers.
    replicated = plan.layout.sharding(P())
    for path, module in nnx.iter_modules(model):
        for name, x in getattr(module, "finish_step", dict)().items():
            if isinstance(x, Mean):
                means[name] = means[name].merge(x) if name in means else x
            elif x.ndim:
                x = jax.lax.with_sharding_constraint(x, replicated)
                metrics[f"{name}/{dotted(path)}"] = x
            else:
                metrics[name] = jnp.maximum(metrics[name], x) if name in metrics else x
    after = arrays_of(model)
    metrics |= {name: result_of(mean) for name, mean in means.items()}
    return nest({path: after[path] for path in before}), metrics
