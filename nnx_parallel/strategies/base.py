"""The base class `Strategy`, with methods that apply its claims, and `Composite`."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import jax
from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.errors import suggests_names
from nnx_parallel.init import first_arrays
from nnx_parallel.mesh import MESH_AXES, Device, auto_mesh, check_mesh, make_mesh
from nnx_parallel.sharding.layout import Claims, Layout
from nnx_parallel.sharding.model import (
    ModelDef,
    ModelFn,
    abstract_model,
    flatten,
    place_model,
    stored_shardings,
    stored_specs,
)
from nnx_parallel.sharding.model_specs import building_on
from nnx_parallel.sharding.rules import Rules, check_rules
from nnx_parallel.sharding.specs import is_spec
from nnx_parallel.visualize.describe import (
    Description,
    describe_model,
    warn_idle_parts,
)

Source = nnx.Module | ModelFn


@dataclass(frozen=True)
class Strategy(abc.ABC):
    """Decides where parameters, optimizer state and batch live, and how a step runs.

    To add a technique, subclass this and implement `claims`. Strategies are values:
    they hold no arrays and no mesh, compare by their fields, and combine in a
    `Composite`.

    Example:
        >>> from nnx_parallel.strategies import Claims
        >>> class Rows(Strategy):
        ...     def claims(self):
        ...         return Claims(axis_sizes={"rows": None}, batch=("rows",))
        >>> Rows().layout().batch_spec(16)
        P('rows',)
    """

    def __repr__(self) -> str:
        """The arguments that differ from their defaults."""
        # Processes compare the reprs of their strategies before the first step, and the
        # errors of a Composite contain the reprs of its parts.
        changed = []
        for field in dataclasses.fields(self):
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            if (value := getattr(self, field.name)) != default:
                changed.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(changed)})"

    @abc.abstractmethod
    def claims(self) -> Claims:
        """The strategy's mesh axes, and the dims that they split."""

    # This is not abstract, because most techniques can run any model.
    def check(self, model: nnx.Module, mesh: Mesh) -> None:
        """Refuses a concrete or abstract model that cannot be run on a mesh.

        By default, the `Execution` of the claims checks the model, if there is one.
        This happens before anything is compiled.
        """
        if (execution := self.claims().execution) is not None:
            execution.check(model, mesh)

    @property
    def axis_sizes(self) -> Mapping[str, int | None]:
        """Size of each mesh axis; ``None`` uses all remaining devices."""
        return self.claims().axis_sizes

    def make_mesh(self, devices: Sequence[Device] | None = None) -> Mesh:
        """Makes a mesh with the strategy's axes over ``devices``, by default over all.

        Raises:
            MeshShapeError: If the strategy's sizes do not multiply to the number of
                devices.
        """
        return make_mesh(self.axis_sizes, devices)

    def layout(self, mesh: Mesh | None = None) -> Layout:
        """Returns the strategy's claims on a mesh, by default one over all devices.

        The axes of the layout's mesh are Auto, even if the axes of ``mesh`` are
        Explicit.

        Raises:
            MeshShapeError: If the sizes of the mesh differ from the strategy's.
            UnknownAxisError: If the axes of the mesh differ from the strategy's.
            MeshAxisTypeError: If an axis of the mesh is Manual.
        """
        mesh = self.make_mesh() if mesh is None else auto_mesh(mesh)
        claims = replace(self.claims(), owner=repr(self))  # messages name this owner
        check_mesh(mesh, claims.axis_sizes)
        return Layout(mesh=mesh, claims=claims.on(mesh))

    def init(
        self, model_fn: ModelFn, rngs: nnx.Rngs | int, *, mesh: Mesh | None = None
    ) -> nnx.Module:
        """Builds a model in shards, so that no device ever holds the whole model.

        Its arrays are global, and placed on the mesh (by default over all devices) by
        the specs that `specs` returns. The random numbers come from ``nnx.Rngs`` or a
        seed, and do not depend on the strategy.
        """
        return self._placed(model_fn, rngs, mesh)

    def split(
        self, model: nnx.Module, *, mesh: Mesh | None = None
    ) -> tuple[nnx.GraphDef, nnx.State]:
        """``nnx.split`` with the state placed on the mesh.

        Arrays with another placement are copied; ``model`` itself does not change.
        """
        # The model has been built, so it draws no random numbers from these streams.
        return nnx.split(self._placed(model, 0, mesh))

    def _placed(
        self, source: Source, rngs: nnx.Rngs | int, mesh: Mesh | None
    ) -> nnx.Module:
        layout = self.layout(mesh)
        # Placements are written into the metadata of an abstract copy, so that the
        # user's model stays unchanged. The copy's graphdef carries them, and keeps tied
        # weights tied.
        with building_on(layout):
            rngs = nnx.Rngs(rngs) if isinstance(rngs, int) else rngs
            abstract = abstract_model(source, rngs)
            placements = place_model(abstract, layout)
            warn_idle_parts(abstract, layout, placements)
            shardings = stored_shardings(placements, layout)
            arrays = first_arrays(source, rngs, shardings)
            return ModelDef.of(abstract).merge(flatten(arrays))

    def merge(self, graphdef: nnx.GraphDef, state: nnx.State) -> nnx.Module:
        """``nnx.merge``: the model with the arrays of ``state``."""
        return nnx.merge(graphdef, state)

    def specs(self, state: nnx.State, *, mesh: Mesh | None = None) -> nnx.State:
        """Returns the spec in which each array of a state is stored, as a tree."""
        return stored_specs(state, self.layout(mesh))

    def shardings(self, state: nnx.State, *, mesh: Mesh | None = None) -> nnx.State:
        """Returns `specs` as shardings, for ``jax.device_put`` and ``jax.jit``."""
        layout = self.layout(mesh)
        specs = stored_specs(state, layout)
        return jax.tree.map(layout.sharding, specs, is_leaf=is_spec)

    def describe(
        self, model: Source, *, optimizer: object = None, mesh: Mesh | None = None
    ) -> Description:
        """Returns a table of all arrays: specs, bytes per device, and the reasons.

        The model is concrete or abstract, or a function that builds it; nothing is
        allocated. If ``optimizer`` is an Optax transformation, the table includes its
        state.

        Example:
            >>> from nnx_parallel import FSDP
            >>> table = FSDP().describe(lambda rngs: nnx.Linear(64, 64, rngs=rngs))
            >>> print(table.summary())
            per device: parameters 2.25 KiB, gradients 2.25 KiB
            replicated: bias (64,) 256 B (64 elements < min_size 1024)
        """
        layout = self.layout(mesh)
        with building_on(layout):
            abstract = abstract_model(model, nnx.Rngs(0))
            return describe_model(abstract, layout, optimizer)


@suggests_names
@dataclass(frozen=True, init=False)
class Composite(Strategy):
    """Several strategies over one mesh: hybrid, 2D and 3D parallelism.

    The batch is split over the batch axes of all parts, and each array is split over
    the axes that the parts give to its dims. The order of the arguments does not
    matter: the axes of the mesh are ordered by the amount of their communication.
    ``rules`` for single arrays are added to the rules of the parts.

    Raises:
        PlacementConflictError: If two parts use the same mesh axis, or give one name
            to different axes.

    Example:
        >>> from nnx_parallel import FSDP, TensorParallel
        >>> strategy = Composite(FSDP(), TensorParallel(2))
        >>> dict(strategy.make_mesh().shape)
        {'fsdp': 4, 'tensor': 2}
        >>> strategy == Composite(TensorParallel(2), FSDP())
        True
    """

    parts: tuple[Strategy, ...]
    rules: tuple[Rules, ...] = ()

    def __init__(self, *parts: Strategy, rules: tuple[Rules, ...] = ()) -> None:
        if not parts:
            raise ValueError("Composite() has no strategies. Give it at least one.")
        for each in parts:
            if not isinstance(each, Strategy):
                name = getattr(each, "__name__", type(each).__name__)
                raise TypeError(
                    f"Composite({name}): each argument must be a strategy, as in "
                    "Composite(TensorParallel(2), FSDP()), not a list or a class."
                )
        # The parts are flattened and sorted in the mesh's order, so that equivalent
        # composites compare equal.
        flat: list[Strategy] = []
        rules = check_rules(rules, "Composite")
        for part in sorted(parts, key=_mesh_order):
            is_nested = isinstance(part, Composite)
            flat += part.parts if is_nested else (part,)
            rules = (*rules, *(part.rules if is_nested else ()))
        object.__setattr__(self, "parts", tuple(sorted(flat, key=_mesh_order)))
        object.__setattr__(self, "rules", tuple(rules))
        self.claims()  # refuses parts that contradict each other

    def claims(self) -> Claims:
        """The claims of all parts, merged."""
        claims = [part.claims() for part in self.parts]
        # Rules come first, because a rule of any part may decide a name that two other
        # parts claim.
        rules = self.rules + tuple(rule for each in claims for rule in each.rules)
        owned = (
            replace(each, rules=(), owner=repr(part))
            for part, each in zip(self.parts, claims, strict=True)
        )
        return reduce(or_, owned, Claims(rules=rules))

    def check(self, model: nnx.Module, mesh: Mesh) -> None:
        """Refuses a model that one of the parts cannot run."""
        for part in self.parts:
            part.check(model, mesh)

    def __repr__(self) -> str:
        rules = f", rules={self.rules}" if self.rules else ""
        return f"Composite({', '.join(map(repr, self.parts))}{rules})"


def _mesh_order(strategy: Strategy) -> tuple[int, str]:
    # An axis that is not in `MESH_AXES` comes first, because the amount of its
    # communication is unknown.
    first = next(iter(strategy.claims().axis_sizes))
    return (MESH_AXES.index(first) if first in MESH_AXES else -1, first)
