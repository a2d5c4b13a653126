"""Strategy: its claims, and the verbs that follow from them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.mesh import Device, check_mesh, make_mesh
from nnx_parallel.sharding.claims import Claims
from nnx_parallel.sharding.layout import Layout
from nnx_parallel.sharding.model import (
    abstract_model,
    place_model,
    placed_arrays,
    stored_shardings,
    stored_specs,
)
from nnx_parallel.sharding.names import is_spec
from nnx_parallel.visualize.describe import Description, describe_model


@dataclass(frozen=True)
class Strategy(abc.ABC):
    """Where parameters, optimizer state and batch live, and how the step is run.

    A technique of your own subclasses this and answers once, in `claims`. Strategies
    are values: they hold no arrays and no mesh, compare by their fields, and combine in
    a `Composite`.

    Example:
        >>> from nnx_parallel import Claims
        >>> class Rows(Strategy):
        ...     def claims(self):
        ...         return Claims(axis_sizes={"rows": None}, batch=("rows",))
        >>> Rows().layout().batch_spec(16)
        P('rows',)
    """

    def __repr__(self) -> str:
        """The arguments that differ from their defaults."""
        # Processes compare the reprs of their strategies before the first step, and
        # errors of a Composite name its parts by them.
        changed = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != _default(field)
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    @abc.abstractmethod
    def claims(self) -> Claims:
        """My mesh axes, and what they split."""

    # Not abstract: most techniques run any model.
    def check(self, model: nnx.Module, mesh: Mesh) -> None:
        """Refuses a model that I cannot run, before anything is compiled.

        By default one that my claims' `Execution` cannot run.

        Args:
            model: The model, concrete or abstract.
            mesh: The mesh, with my axes.
        """
        if (execution := self.claims().execution) is not None:
            execution.check(model, mesh)

    @property
    def axis_sizes(self) -> Mapping[str, int | None]:
        """Size of each of my mesh axes; ``None`` takes the devices that remain."""
        return self.claims().axis_sizes

    def make_mesh(self, devices: Sequence[Device] | None = None) -> Mesh:
        """A mesh over all ``devices`` (by default all there are) with my axes.

        Raises:
            MeshShapeError: If my sizes do not multiply to the number of devices.
        """
        return make_mesh(self.axis_sizes, devices)

    def layout(self, mesh: Mesh | None = None) -> Layout:
        """My claims on one mesh, by default over all devices.

        Raises:
            MeshShapeError: If the mesh has other sizes than I state.
            UnknownAxisError: If the mesh has other axes than mine.
            MeshAxisTypeError: If an axis of the mesh is not Auto.
        """
        mesh = self.make_mesh() if mesh is None else mesh
        claims = self.claims()
        check_mesh(mesh, claims.axis_sizes)
        return Layout(mesh=mesh, claims=claims.on(mesh))

    def init(
        self,
        model_fn: Callable[[nnx.Rngs], nnx.Module],
        rngs: nnx.Rngs | int,
        *,
        mesh: Mesh | None = None,
    ) -> nnx.Module:
        """Builds a model already sharded: no device ever holds it whole.

        Args:
            model_fn: Builds the model from its ``nnx.Rngs``.
            rngs: Random streams, or a seed. The numbers do not depend on the strategy.
            mesh: The mesh; by default over all devices.

        Returns:
            The model, its arrays global and placed as `specs` says.
        """
        rngs = nnx.Rngs(rngs) if isinstance(rngs, int) else rngs
        return self._placed(model_fn, rngs, self.layout(mesh))

    def split(
        self, model: nnx.Module, *, mesh: Mesh | None = None
    ) -> tuple[nnx.GraphDef, nnx.State]:
        """``nnx.split`` with the state placed on the mesh.

        Arrays that lie elsewhere are copied; the model keeps its own.
        """
        # A model that is built already draws nothing from these streams.
        return nnx.split(self._placed(model, nnx.Rngs(0), self.layout(mesh)))

    def _placed(
        self,
        source: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
        rngs: nnx.Rngs,
        layout: Layout,
    ) -> nnx.Module:
        # Placements are written into metadata, so into a copy: the user's model keeps
        # its own. The graphdef takes them along, and keeps tied weights tied.
        abstract = abstract_model(source, rngs)
        shardings = stored_shardings(place_model(abstract, layout), layout)
        graphdef, _ = nnx.split(abstract)
        return nnx.merge(graphdef, placed_arrays(source, rngs, shardings))

    def merge(self, graphdef: nnx.GraphDef, state: nnx.State) -> nnx.Module:
        """``nnx.merge``: the model with the arrays of ``state``."""
        return nnx.merge(graphdef, state)

    def specs(self, state: nnx.State, *, mesh: Mesh | None = None) -> nnx.State:
        """The spec in which each array of a state is stored, as the same tree."""
        return stored_specs(state, self.layout(mesh))

    def shardings(self, state: nnx.State, *, mesh: Mesh | None = None) -> nnx.State:
        """`specs` on the mesh: what ``jax.device_put`` and ``jax.jit`` take."""
        layout = self.layout(mesh)
        specs = stored_specs(state, layout)
        return jax.tree.map(layout.sharding, specs, is_leaf=is_spec)

    def describe(
        self,
        model: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
        *,
        optimizer: object = None,
        mesh: Mesh | None = None,
    ) -> Description:
        """A table of every array: specs, bytes per device, and why.

        Args:
            model: A model, concrete or abstract, or the function that builds it;
                nothing is allocated.
            optimizer: An Optax transformation, to count its state too.
            mesh: The mesh; by default over all devices.

        Example:
            >>> from nnx_parallel import FSDP
            >>> table = FSDP().describe(lambda rngs: nnx.Linear(64, 64, rngs=rngs))
            >>> print(table.summary())
            per device: parameters 2.25 KiB, gradients 2.25 KiB
            replicated: bias (64,) 256 B (64 elements < min_size 1024)
        """
        abstract = abstract_model(model, nnx.Rngs(0))
        return describe_model(abstract, self.layout(mesh), optimizer)


def _default(field: dataclasses.Field) -> object:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()
