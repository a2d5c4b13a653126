"""The parts of a training step, separate from the devices that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel.data.batches import check_divisible
from nnx_parallel.data.rows import is_marked, partition
from nnx_parallel.errors import PlanError, kind_of
from nnx_parallel.layers.dense import Dense
from nnx_parallel.layers.experts.moe import MoE
from nnx_parallel.layers.stack.stack import Stack
from nnx_parallel.pipeline.division import find_stack
from nnx_parallel.precision import Precision
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import ModelDef
from nnx_parallel.sharding.names import ArrayInfo, dotted
from nnx_parallel.sharding.offload import Offload
from nnx_parallel.sharding.optimizer import Optimizer
from nnx_parallel.state import StatePlan, plan_state
from nnx_parallel.strategies.base import Strategy
from nnx_parallel.strategies.tensor_parallel import TENSOR_NAMES
from nnx_parallel.training.arguments import LossFn
from nnx_parallel.training.model_flops import one_device
from nnx_parallel.training.naming import name_by_loss
from nnx_parallel.training.step import StepOptions

PLANNED_OFFLOAD = "_planned_offload"
"""Name of an attribute: the offload that a Trainer for described devices requests."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A Trainer's model, optimizer and loss, without values, and a batch's shapes.

    Attributes:
        model: The model's structure, with shapes for arrays.
        tx: The Optax transformation; with players, a dict of them by player.
        loss: The loss.
        wrt: Filter of the Variables that are trained; with players, a dict like ``tx``.
        precision: The dtypes.
        ema_decay: Decay of a moving average, or ``None``.
        strategy: The Trainer's strategy.
        options: The Trainer's microbatches, remat, and compiler options.
        batch: Shapes of a global batch.
        offload: ``Backend.offload`` of the Trainer, or ``None``.
        derives_names: True if the names of ``model`` must still be derived from the
            loss. They depend on the layout (`named_on`).
        losses: The losses of all players by name; empty if there is only one loss.
        player: The player whose step is planned, with the loss ``loss``.
    """

    model: ModelDef
    tx: Optimizer | dict[str, Optimizer]
    loss: LossFn
    wrt: Any
    precision: Precision
    ema_decay: float | None
    strategy: Strategy
    options: StepOptions
    batch: Any
    offload: Offload | None = None
    derives_names: bool = False
    losses: Mapping[str, LossFn] = field(default_factory=dict)
    player: str = ""

    @classmethod
    def of(cls, trainer: Any, batch: Any) -> Parts:
        """Reads the parts of a Trainer. Its arrays need not exist yet.

        Raises:
            PlanError: If ``trainer`` is not a Trainer, or the batch has no shapes.
        """
        # A plan only reads these private attributes.
        held = getattr(trainer, "__dict__", {})
        run, programs = held.get("_run"), held.get("_programs")
        if run is None or programs is None:
            raise PlanError(
                f"plan got {kind_of(trainer)}. Pass a Trainer, built on any devices: "
                "plan(Trainer(model, optimizer, loss), ...)."
            )
        plan: StatePlan = run.plan
        unnamed = held.get("_unnamed")
        return cls(
            model=unnamed or plan.model,
            derives_names=unnamed is not None,
            tx={name: share.tx for name, share in plan.shares.items()} or plan.tx,
            loss=programs.loss,
            losses=programs.players.losses if programs.players else {},
            wrt=run.wrt,
            precision=plan.precision,
            ema_decay=plan.ema_decay,
            strategy=trainer.strategy,
            options=programs.options,
            batch=shapes_of(batch),
            offload=plan.offload or held.get(PLANNED_OFFLOAD),
        )

    @property
    def num_rows(self) -> int:
        """Rows of a global batch."""
        arrays, _, _ = partition(self.batch)
        return jax.tree.leaves(arrays)[0].shape[0]

    @property
    def compute_dtype(self) -> str:
        """The dtype of the products."""
        if self.precision.compute is not None:
            return str(self.precision.compute)
        sizes: dict[str, int] = {}
        for x in jax.tree.leaves(self.model.state):
            if jnp.issubdtype(x.dtype, jnp.floating):
                sizes[str(x.dtype)] = sizes.get(str(x.dtype), 0) + x.size
        return max(sizes, key=lambda name: sizes[name], default="float32")

    def rebuilt(self) -> nnx.Module:
        """Returns a copy of the abstract model, with metadata that may be changed."""
        return self.model.copy()

    @property
    def trained(self) -> Any:
        """Filter of the Variables that are trained, by any player."""
        return nnx.Any(*self.wrt.values()) if isinstance(self.wrt, dict) else self.wrt

    def of_player(self, name: str) -> Parts:
        """Returns the parts of one player's step."""
        return replace(self, player=name, loss=self.losses[name])

    def with_rows(self, num_rows: int) -> Parts:
        """Returns the parts with a different number of rows in a batch."""
        arrays, shared, join = partition(self.batch)

        def resize(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype)

        return replace(self, batch=join(jax.tree.map(resize, arrays), shared))

    def with_precision(self, precision: Precision | None) -> Parts:
        """Returns the parts with a different precision; unchanged for ``None``."""
        return self if precision is None else replace(self, precision=precision)

    def named_on(self, layout: Layout) -> Parts:
        """Returns the parts with the names that the loss gives to dims on a layout.

        Names that the user gave do not depend on the layout.
        """
        if not self.derives_names:
            return self
        kinds = {"wrt": self.wrt, "precision": self.precision}
        losses = [*self.losses.values()] or [self.loss]
        model = name_by_loss(self.model, losses, self.batch, layout, **kinds)
        return replace(self, model=ModelDef.of(model), derives_names=False)

    def on(self, layout: Layout, offload: Offload | None = None) -> StatePlan:
        """Places the training state. Raises the same errors as `Trainer`.

        Stand-ins for absent devices cannot say which memory they reach. So ``offload``
        is only for devices that a compiler describes.
        """
        plan = plan_state(
            self.named_on(layout).rebuilt(),
            layout,
            self.tx,
            wrt=self.wrt,
            precision=self.precision,
            ema_decay=self.ema_decay,
            offload=offload,
        )
        return plan.view(self.player) if self.player else plan

    def batch_on(self, layout: Layout, num_microbatches: int) -> Any:
        """Returns the batch's shapes with their shardings.

        Raises:
            BatchShapeError: If devices and microbatches do not divide the batch's rows.
        """
        rows = self.num_rows
        sizes = {axis: layout.mesh.shape[axis] for axis in layout.claims.batch}
        check_divisible(rows, num_microbatches, sizes)
        arrays, shared, join = partition(self.batch)

        def placed(spec: P) -> Callable[[Any], jax.ShapeDtypeStruct]:
            sharding = layout.sharding(spec)
            return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        rows_on_mesh = jax.tree.map(placed(layout.batch_spec(rows)), arrays)
        return join(rows_on_mesh, jax.tree.map(placed(P()), shared))


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that limit the sizes of mesh axes and other options.

    Attributes:
        stacks: Number of layers of each `Stack` by path, the largest stack first.
        num_experts: Number of experts of each mixture; 0 without mixtures.
        named: Sizes of named dims of parameters, by name.
        has_remat: True if the Trainer's remat affects a stack.
        has_dense: True if the model has layers that name their activations.
    """

    stacks: dict[str, int]
    num_experts: int
    named: dict[str, set[int]]
    has_remat: bool
    has_dense: bool

    @classmethod
    def of(cls, parts: Parts) -> ModelFacts:
        """Reads the facts from the model in ``parts``."""
        # On one device, derived names do not depend on sizes.
        named = parts.named_on(one_device()).model
        model = parts.rebuilt()
        found = {p: m for p, m in nnx.iter_modules(model) if isinstance(m, Stack)}
        # The stack that a pipeline chooses comes first.
        first = find_stack(model, None)
        stacks = {dotted(p): m for p, m in (first, *found.items())} if first else {}
        experts = [m for _, m in nnx.iter_modules(model) if isinstance(m, MoE)]
        return cls(
            stacks={path: stack.num_layers for path, stack in stacks.items()},
            num_experts=experts[0].experts.num_experts if experts else 0,
            named=sizes_by_name(named.infos),
            has_remat=any(stack.remat is None for stack in stacks.values()),
            has_dense=any(isinstance(m, Dense) for _, m in nnx.iter_modules(model)),
        )

    def tensor_divides(self, size: int) -> bool:
        """Returns True if `TensorParallel` of a size splits this model evenly."""
        sizes = [n for name in TENSOR_NAMES for n in self.named.get(name, ())]
        return bool(sizes) and all(n % size == 0 for n in sizes)


def sizes_by_name(infos: Iterable[ArrayInfo]) -> dict[str, set[int]]:
    """Returns the sizes of the named dims of arrays, by name."""
    named: dict[str, set[int]] = {}
    for info in infos:
        for name, size in zip(info.names or (), info.shape, strict=False):
            if isinstance(name, str):
                named.setdefault(name, set()).add(size)
    return named


def shapes_of(batch: Any) -> Any:
    """Returns a batch's shapes, with the dtypes that JAX will give it.

    Raises:
        PlanError: If a leaf is not an array.
    """

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise PlanError(
                f"A leaf of batch= is {kind_of(x)}. A batch is a pytree of arrays or "
                "of jax.ShapeDtypeStruct, whose dim 0 is the rows of the global batch."
            )
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))

    if not jax.tree.leaves(batch, is_leaf=is_marked):
        raise PlanError(
            "plan got no batch. Pass one as for fit, or its shapes, such as batch="
            "{'tokens': jax.ShapeDtypeStruct((512, 4097), 'int32')}."
        )
    return jax.tree.map(shape, batch)
