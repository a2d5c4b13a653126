"""Claims: all that a strategy claims, as one value that merges.

A new kind of claim is one more field of `Claims`, merged in ``__or__`` and read where
it takes effect; neither `Strategy` nor `Composite` changes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jax.sharding import Mesh

from nnx_parallel.collectives.ring import Mode, Overlap
from nnx_parallel.errors import PlacementConflictError
from nnx_parallel.sharding.names import MeshAxes
from nnx_parallel.sharding.rules import (
    FSDPRules,
    Rules,
    logical_items,
    merge_logical,
)

ZeroKind = Literal["params", "gradients", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class ZeroAxis:
    """A mesh axis that splits training state which the computation uses whole [1].

    Attributes:
        rules: The axis and how it chooses a dim.
        shard: State that it splits: ``params`` (ZeRO-3: parameters, gradients and
            optimizer state), ``gradients`` (ZeRO-2: the last two) or ``optimizer``
            (ZeRO-1).
        prefetch: How a `Stack` gathers a layer's parameters while the one before it
            runs: in one collective (``bulk``), or hop by hop; ``None``: each layer
            gathers its own.

    References:
        [1] Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models", 2020, section 5, https://arxiv.org/abs/1910.02054
    """

    rules: FSDPRules
    shard: ZeroKind = "params"
    prefetch: Mode | None = None


# Abstract, since `training` must not import `pipeline`: each has a form of its own.
# Without a claim it is `AccumulateMicrobatches`.
class Execution(abc.ABC):
    """How a step is run on the mesh: its gradients, and its outputs.

    A plan is a `StatePlan`, a state a `TrainState`, which come later in the order of
    imports. `merge`, `gradients` and `outputs` are traced.
    """

    def check(self, model: Any, mesh: Mesh) -> None:  # noqa: B027
        """Refuses a model that cannot be run so, before anything is compiled.

        Args:
            model: The model, concrete or abstract.
            mesh: The mesh.
        """

    def merge(self, plan: Any, params: dict, variables: dict, *, training: bool) -> Any:
        """The model as the loss sees it: cast to the compute dtype, gathered at use."""
        return plan.merge(params, variables, training=training)

    @abc.abstractmethod
    def observe_labels(self, run: Callable[[], Any]) -> list[Any]:
        """Calls ``run``, which evaluates the loss; the `LabelRange` of each call of it.

        None where callbacks inside the loss cannot report them.
        """

    @abc.abstractmethod
    def gradients(
        self,
        plan: Any,
        forward: Callable[[dict, dict, Any, Any], tuple[dict, dict]],
        state: Any,
        batch: Any,
        key: Any,
        num_microbatches: int,
    ) -> tuple[dict, dict, dict]:
        """Gradients of the batch's mean loss, summed over microbatches and devices.

        Args:
            plan: The model's structure and the place of every array.
            forward: ``(params, variables, batch, key)`` to means by name, ``loss``
                among them, and the variables after it.
            state: The training state.
            batch: The global batch, which is run in ``num_microbatches`` parts.
            key: Random key of the step.
            num_microbatches: Number of parts.

        Returns:
            Gradients of the parameters, the variables after the step, and the means.
        """

    @abc.abstractmethod
    def outputs(
        self,
        plan: Any,
        function: Callable[[Any, Any, Any], Any],
        arrays: tuple[dict, dict],
        batch: Any,
        key: Any,
        num_microbatches: int,
        *,
        join: Callable[[Any], Any],
        needs_stack: bool,
    ) -> Any:
        """Outputs of a function of the model in evaluation mode.

        Args:
            plan: The model's structure and the place of every array.
            function: ``(model, batch, key)`` to outputs.
            arrays: The parameters, and all other variables.
            batch: The global batch.
            key: Random key.
            num_microbatches: Parts of the batch, if it is run in parts.
            join: Outputs with a leading dim of microbatches to those of the batch.
            needs_stack: Whether a function that calls no `Stack` is an error where the
                model is cut at its stack; else it is run whole.
        """


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Mesh axes, and what they split: batch, arrays, the step; merged by ``|``.

    Attributes:
        axis_sizes: Size of each mesh axis that it owns; ``None`` takes the devices that
            remain.
        batch: Mesh axes that split the batch.
        logical: Mesh axes by logical name, for parameters and activations alike.
        activations: Mesh axes by logical name for activations alone. They yield:
            another dim of the same activation that claims the axis has it.
        zero: Axes that split training state which is gathered at use.
        rules: Explicit rules of the user; they come before names and choices.
        overlap: How products that gather their input or scatter their output run:
            ``ring`` or ``bidirectional``; ``None``: as the partitioner has it.
        execution: How the step is run; ``None``: one microbatch after the other.
        owner: The strategy that claims, as messages call it.
        parts: The claims that were merged into these.

    Example:
        >>> left = Claims(axis_sizes={"fsdp": None}, batch=("fsdp",))
        >>> right = Claims(axis_sizes={"tensor": 2}, logical={"mlp": "tensor"})
        >>> (left | right).axis_sizes
        {'fsdp': None, 'tensor': 2}
    """

    axis_sizes: Mapping[str, int | None] = field(default_factory=dict)
    batch: tuple[str, ...] = ()
    logical: Mapping[str, MeshAxes] = field(default_factory=dict)
    activations: Mapping[str, MeshAxes] = field(default_factory=dict)
    zero: tuple[ZeroAxis, ...] = ()
    rules: tuple[Rules, ...] = ()
    overlap: Overlap | None = None
    execution: Execution | None = None
    owner: str = "a strategy"
    parts: tuple[Claims, ...] = ()

    def __or__(self, other: Claims) -> Claims:
        """Both claims as one.

        Raises:
            PlacementConflictError: If both use one mesh axis, run the step, or give
                one name to different axes and no `LogicalRules` decide it.
        """
        # Pair by pair, so that a message names the two strategies that disagree.
        left, right = self.parts or (self,), other.parts or (other,)
        decided = {name for name, _ in logical_items(self.rules + other.rules)}
        for mine in left:
            for theirs in right:
                mine._check_axes(theirs)
                mine._check_names(theirs, decided)
        # Keys of `axis_sizes` are disjoint now; at most one side has an execution.
        # `owner` stays the default: messages take the owners from `parts`.
        return Claims(
            axis_sizes={**self.axis_sizes, **other.axis_sizes},
            batch=self.batch + other.batch,
            # Equal where both have a name, or a rule decides in `on`.
            logical={**self.logical, **other.logical},
            activations={**self.activations, **other.activations},
            zero=self.zero + other.zero,
            rules=self.rules + other.rules,
            overlap=self.overlap or other.overlap,
            execution=self.execution or other.execution,
            parts=left + right,
        )

    def _check_axes(self, other: Claims) -> None:
        for axis in self.axis_sizes:
            if axis in other.axis_sizes:
                raise PlacementConflictError(
                    f"Both {self.owner} and {other.owner} use the mesh axis {axis!r}. "
                    "Each part of a Composite needs axes of its own: keep one of them "
                    "and give it the product of the sizes."
                )
        if self.execution and other.execution:
            raise PlacementConflictError(
                f"Both {self.owner} and {other.owner} say how the step is run. A "
                "Composite can hold one such part: keep one of them."
            )

    def _check_names(self, other: Claims, decided: set[str]) -> None:
        for name, axes in self.logical.items():
            if other.logical.get(name, axes) != axes and name not in decided:
                raise PlacementConflictError(
                    f"{self.owner} gives dims named {name!r} to {axes!r}, "
                    f"{other.owner} gives them to {other.logical[name]!r}. Decide with "
                    f"rules=(LogicalRules({{{name!r}: ...}}),)."
                )

    def on(self, mesh: Mesh) -> Claims:
        """The claims over one mesh: its order of axes, and the user's word on names.

        Raises:
            PlacementConflictError: If two `LogicalRules` contradict each other.
        """
        # The user's word on a name holds for activations too.
        decided = {name for name, _ in logical_items(self.rules)}
        activations = merge_logical((), self.activations)
        return replace(
            self,
            # The order of the mesh, however the parts were merged: rows that not all
            # axes divide are split by the outer ones (`Layout.batch_spec`).
            batch=tuple(axis for axis in mesh.axis_names if axis in self.batch),
            logical=merge_logical(self.rules, self.logical),
            activations={n: a for n, a in activations.items() if n not in decided},
        )
