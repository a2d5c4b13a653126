"""The complete state from which a run continues, saved and restored as a whole."""

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, get_args

import jax
from flax import nnx

from nnx_parallel.checkpoint.contents import from_groups, to_groups
from nnx_parallel.checkpoint.manager import CheckpointManager
from nnx_parallel.checkpoint.options import Checkpoint
from nnx_parallel.checkpoint.plain import read_weights
from nnx_parallel.checkpoint.reader import CheckpointReader
from nnx_parallel.data.reading import DataState
from nnx_parallel.distributed.agreement import meet, strip_addresses, versions
from nnx_parallel.drawing import aligned
from nnx_parallel.errors import (
    CheckpointError,
    DonatedArrayError,
    NonFiniteLossError,
    ParallelWarning,
    StateStructureError,
    kind_of,
    warn_user,
)
from nnx_parallel.layers.quantised import QuantisedParam
from nnx_parallel.layers.stack.build import find_blocks
from nnx_parallel.optimizers.steps import state_kinds, warn_of_changes
from nnx_parallel.sharding.model import (
    ModelFn,
    Path,
    arrays_of,
    flatten,
    plain_attributes,
    update_arrays,
)
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import (
    flatten_pure,
    is_inexact,
    is_inside,
    stacks_of,
    variables_of,
)
from nnx_parallel.state import StatePlan, TrainState, init_state
from nnx_parallel.training.callback import Callback, restore_states, states_of
from nnx_parallel.training.compilation import ENVIRONMENT, Options, format_options
from nnx_parallel.training.diagnostics import broken_arrays, warn_of_attributes
from nnx_parallel.training.evaluation import Judged
from nnx_parallel.training.verified import facts_to_verify, last_verified
from nnx_parallel.visualize.describe import Description, describe_model

Kind = Literal["params", "ema", "eval"]
"""The parameters of a model that the user gets. `Judged` computes ``"eval"``."""

# A Stack saves little time with fewer blocks.
_MANY_BLOCKS = 4


class HandedModel:
    """A model that was given to the user, and the arrays that it had at that time."""

    def __init__(self, model: nnx.Module, arrays: Mapping[Path, jax.Array]) -> None:
        # All references are weak. The memory of arrays must be freed even if the user
        # keeps the model, and this object must not keep the model alive.
        self._model = weakref.ref(model)
        self._given = {path: weakref.ref(x) for path, x in arrays.items()}
        self._params, self._plain = _params_of(model), plain_attributes(model)

    @property
    def is_alive(self) -> bool:
        """True while the model is referenced."""
        return self._model() is not None

    def note(self, arrays: Mapping[Path, jax.Array]) -> None:
        """Puts arrays of the state into the model, and remembers them."""
        if (model := self._model()) is not None:
            update_arrays(model, arrays)
        self._given |= {path: weakref.ref(x) for path, x in arrays.items()}

    def assigned(self) -> dict[Path, Any]:
        """Returns the arrays of `replaced`, and checks the rest of the model.

        Raises:
            StateStructureError: If a parameter was removed or added.
        """
        if (model := self._model()) is None:
            return {}
        if changed := sorted(map(dotted, self._params ^ _params_of(model))):
            raise StateStructureError(
                f"Parameters of trainer.model were removed or added: {changed}. A run "
                "keeps its parameters: assign arrays to them, and build a new Trainer "
                "for another model."
            )
        before, self._plain = self._plain, plain_attributes(model)
        warn_of_attributes(before, self._plain, "trainer.model")
        return self.replaced()

    def replaced(self) -> dict[Path, Any]:
        """Returns the arrays that the user has replaced, except random streams."""
        if (model := self._model()) is None:
            return {}
        # A stream advances when the model draws from it. If the user samples between
        # two steps, the random numbers of the run must not change.
        streams = {p for p, v in variables_of(model) if isinstance(v, nnx.RngState)}
        present = arrays_of(model)
        return {
            path: present[path]
            for path, given in self._given.items()
            if path in present and path not in streams and present[path] is not given()
        }

    def end(self) -> None:
        """Deletes the arrays that a step has donated; reading them raises an error."""
        for given in self._given.values():
            if (array := given()) is not None and array.is_deleted():
                # The call is needed for jax 0.10, which can crash when it reads an
                # array that was only donated (docs/library-notes.md, "Arrays and
                # buffers").
                array.delete()


def _params_of(model: nnx.Module) -> set[Path]:
    return {path for path, _ in variables_of(model, nnx.Param)}


@dataclass
class RunState:
    """The training state, the position in the data, and the newest metrics of a run.

    A checkpoint holds all three. So a resumed run computes the next step from the next
    batch. The metrics are updated only when a fit pauses to evaluate or save.

    Attributes:
        seed: Seed of the model and of the loss's random numbers.
        wrt: Filter of the Variables that are trained; with several players, a dict of
            filters by player.
        checkpoints: The checkpoints of this run.
        judged: The parameters that are evaluated.
        callbacks: Callbacks; their states are saved with the run.
        metrics: Metrics of the step at which the fit paused last, and of its
            evaluation. The entry ``"step"`` is the number of the step.
        is_fresh: True if a fit must look for a checkpoint to continue from. This is so
            until the state is trained, or the user restores a state of this run.
        report: Function that shows a line of text to the user.
    """

    plan: StatePlan
    source: nnx.Module | ModelFn
    seed: int
    checkpoints: CheckpointManager
    judged: Judged
    callbacks: Sequence[Callback] = ()
    wrt: Any = nnx.Param
    data: DataState = field(default_factory=DataState)
    metrics: dict[str, float] = field(default_factory=dict)
    is_fresh: bool = True
    report: Callable[[str], object] = str
    _read_step: int | None = None  # the step that the first use of `state` read
    _is_assigned: bool = False  # True if the user assigned arrays to a model
    _excused: frozenset[str] | None = None  # paths not finite when the fit began
    _state: TrainState | None = None
    _aside: Callable[[], TrainState] | None = None  # restores the state (`set_aside`)
    _is_counting: bool = False
    _is_introduced: bool = False
    # `_models` has the models of this state, by the kind of their parameters.
    # `_used_up` has models of earlier states. Their arrays were donated.
    _models: dict[Kind, tuple[nnx.Module, HandedModel]] = field(default_factory=dict)
    _used_up: list[HandedModel] = field(default_factory=list)

    @property
    def state(self) -> TrainState:
        """The training state, with the values assigned to `model`.

        On first use the state is read from the run's newest checkpoint, or built.
        """
        self._take_back()
        # The constructor builds no state, because a fit that resumes would discard it.
        if self._state is None:
            self._begin()
        assert self._state is not None
        if self._state.step.is_deleted():
            raise DonatedArrayError(
                "The Trainer's state is gone: a step has taken its memory for the new "
                "state. Assign the new state in a custom loop: trainer.state, metrics "
                "= trainer.train_step(trainer.state, batch)."
            )
        # The parameters come before the average, because assigned parameters restart
        # the average. Values that were assigned to the average are set after that.
        for kind in get_args(Kind):
            if kind in self._models:
                self._take_assigned(kind, self._models[kind][1])
        return self._state

    def _take_assigned(self, kind: Kind, handed: HandedModel) -> None:
        if not (assigned := handed.assigned()):
            return
        if kind == "eval" and (paths := assigned.keys() & self.plan.trained_paths):
            del self._models[kind]
            raise StateStructureError(
                f"Assigned to trainer.eval_model: {sorted(map(dotted, paths))}. These "
                "parameters are computed from the state at each call. Assign to "
                "trainer.model instead."
            )
        self._is_assigned, is_ema = True, kind == "ema"
        state: Any = self._state
        self._state, placed = self.plan.assign(state, assigned, ema=is_ema)
        handed.note(placed)
        if kind == "params":
            self._restart_average(assigned)

    def _restart_average(self, assigned: Mapping[Path, Any]) -> None:
        """Restarts the average if parameters are assigned before the first step."""
        state: Any = self._state
        new = {p: x for p, x in assigned.items() if p in self.plan.trained_paths}
        if state.ema is None or not new or int(state.step):
            return
        self._state, placed = self.plan.assign(state, new, ema=True)
        if "ema" in self._models:
            self._models["ema"][1].note(placed)

    @state.setter
    def state(self, state: TrainState) -> None:
        if not isinstance(state, TrainState):
            raise TypeError(
                f"trainer.state is assigned {kind_of(state)}. It must be a TrainState, "
                "such as the first result of trainer.train_step(state, batch)."
            )
        if self._shapes != (found := _shapes_of(state)):
            arrays = (flatten_pure(x) for x in (self.plan.whole.abstract, state))
            wanted, found = ({p: x.shape for p, x in each.items()} for each in arrays)
            wrong = [p for p in wanted | found if wanted.get(p) != found.get(p)]
            shown = [
                f"`{path}` has shape {found.get(path)} instead of {wanted.get(path)}"
                for path in wrong[:3]
            ]
            differ = f"{len(wrong)} arrays differ: {'; '.join(shown)}"
            raise StateStructureError(
                "The state belongs to another run. "
                f"{differ if wrong else 'Its pytree has another structure'}. Assign a "
                "state of this Trainer."
            )
        self._replace(state)
        self.is_fresh = self._is_assigned = False

    @cached_property
    def _shapes(self) -> Any:
        return _shapes_of(self.plan.whole.abstract)

    @contextlib.contextmanager
    def set_aside(self, restore: Callable[[], TrainState]) -> Iterator[None]:
        """Makes a context in which the state is not on the devices.

        The state is restored at the end of the context. Arrays to which other objects
        refer, such as models, stay on the devices. If the context ends with an error,
        the traceback keeps arrays on the devices, so the state is restored only at its
        next use.
        """
        self._state, self._aside = None, restore
        yield
        self._take_back()

    def _take_back(self) -> None:
        if self._aside is not None:
            self._state = self._aside()
            self._aside = None

    def _first_state(self) -> TrainState:
        rngs = nnx.Rngs(self.seed)
        return init_state(self.plan, self.source, rngs, self.seed)

    def _present_state(self) -> TrainState:
        """Returns the state, or a new state if there is no state yet.

        No checkpoint is read, because the caller replaces the state.
        """
        self._take_back()
        return self._first_state() if self._state is None else self.state

    def _begin(self) -> None:
        abstract = self.plan.abstract
        found, notes = self.checkpoints.resume(abstract, self.base, read_only=True)
        if found is None:
            self._state = self._first_state()
            return
        self._state, meta, _ = found
        self._go_on(meta)
        self._read_step = int(self._state.step)
        notes = [*notes, *self._changes_since(meta)]
        where = f"step {self._read_step} in '{self.checkpoints.directory}'"
        self.report(
            "\n".join([*notes, f"The run is at its newest checkpoint, {where}."])
        )

    def _replace(self, state: TrainState) -> None:
        if self._models and jax.tree.leaves(self._state.params)[0].is_deleted():  # pyright: ignore[reportOptionalMemberAccess]
            for _, handed in self._models.values():
                handed.end()
                self._used_up.append(handed)
        self._state, self._models, self._read_step = state, {}, None

    def model(self, kind: Kind) -> nnx.Module:
        """Returns the model with the state's arrays.

        Calls with the same state return the same object.
        """
        state = self.state
        self.check_models()
        if kind == "eval" and not callable(self.judged.choice):
            kind = self.judged.choice
        if kind not in self._models:
            params: Any = {"params": state.params, "ema": state.ema}.get(kind)
            arrays = flatten(params or self.judged(state)) | flatten(state.variables)
            model = self.plan.eval_model.merge(arrays)
            self._models[kind] = (model, HandedModel(model, arrays))
        model, _ = self._models[kind]
        model.eval()
        return model

    def begin(self, call: str) -> None:
        """Waits until all processes make this call, and then calls `check_models`."""
        meet(call)
        self._take_back()
        self.check_models()

    def check_models(self) -> None:
        """Raises an error if the user assigned values to a model of an earlier step.

        A later step has donated the other arrays of such a model.

        Raises:
            StateStructureError: If values were assigned. The error is raised only once,
                and its message has the paths.
        """
        used_up, self._used_up = self._used_up, []
        for handed in used_up:
            if assigned := ", ".join(f"`{dotted(p)}`" for p in handed.replaced()):
                raise StateStructureError(
                    f"Assigned to a model of an earlier step: {assigned}. The steps "
                    "since then have donated its other arrays, and do not see these "
                    "values. Read trainer.model again after each step, and assign to "
                    "this new model."
                )
        self._used_up = [handed for handed in used_up if handed.is_alive]

    @property
    def step(self) -> int:
        """Number of updates done. Reading it waits for the newest update."""
        return int(self.state.step)

    @contextlib.contextmanager
    def counting_steps(self) -> Iterator[None]:
        """Makes a context in which a fit counts steps from the state that it found."""
        # Metrics of an earlier fit may belong to a step that this fit reaches again.
        self._is_counting, self.metrics = True, {}
        try:
            yield
        finally:
            self._is_counting = False

    def save(
        self, step: int | None = None, *, once: bool = True, may_skip: bool = False
    ) -> None:
        """Begins to save this run under a step, by default the step of the state.

        A fit passes the step from its counter, because a callback may have changed the
        state's step. ``once`` and ``may_skip`` are arguments of
        `CheckpointManager.save`.
        """
        step = self.step if step is None else step
        progress, metrics = self._progress(step)
        self.checkpoints.save(
            self.state, step, progress, metrics, once=once, may_skip=may_skip
        )

    def save_last(self) -> None:
        """Saves the step that was read from memory, if the fit has trained no step."""
        own = self.checkpoints
        if own.copied_step == self.step != own.latest_step:
            self.save()

    def copy(self, step: int) -> None:
        """Copies this run into memory under a step."""
        self.checkpoints.copy(self.state, step, *self._progress(step))

    def _progress(self, step: int) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the position and the metrics to save; checks the state."""
        self._check_finite(step)
        # All processes exchange values in `to_json`, even if nothing is to be saved.
        progress: dict[str, Any] = {"position": self.data.to_json()}
        if states := states_of(self.callbacks):
            progress["callbacks"] = states
        return progress, self.metrics if self.metrics.get("step") == step else {}

    def excuse_arrays(self) -> None:
        """Notes the arrays that are not finite when a fit begins.

        These arrays do not prevent a save.
        """
        if self.checkpoints.options is not None:
            self._excused = frozenset(broken_arrays(self.state))

    def broken_arrays(self) -> list[str]:
        """Returns arrays that make training impossible, except excused ones."""
        excused = self._excused or ()
        return [path for path in broken_arrays(self.state) if path not in excused]

    def _check_finite(self, step: int) -> None:
        """Raises `NonFiniteLossError` if the state must not be saved.

        Even finite gradients can give an update that is not finite: a schedule may
        divide by zero, or a moment may overflow.
        """
        broken = self.broken_arrays()
        if self._excused is None:  # no fit has trained the state
            paths = flatten_pure(self.state.params)
            broken = [path for path in broken if path in paths]
        if bad := [f"`{path}`" for path in broken]:
            raise NonFiniteLossError(
                f"Step {step}: not finite after its update: {', '.join(bad[:5])} "
                f"({len(bad)} arrays). It is not saved."
            )

    def restore(
        self,
        step: int | Literal["best"] | None,
        directory: str | os.PathLike | Checkpoint | None,
        *,
        weights_only: bool,
        rewind: bool = False,
    ) -> None:
        """Replaces the state with a saved state; see `Trainer.restore`."""
        if rewind and (directory is not None or weights_only):
            raise ValueError(
                "restore(rewind=True) goes back in the Trainer's own directory, with "
                "all of its state. Leave directory= and weights_only= out."
            )
        if isinstance(step, os.PathLike) or (isinstance(step, str) and step != "best"):
            raise TypeError(
                f"restore got step={step!r}. A step is a number, 'best', or None for "
                f"the latest; a directory is passed by name: directory={str(step)!r}."
            )
        if self._is_counting and not weights_only:
            raise CheckpointError(
                "restore() was called in the middle of a fit, which counts its steps "
                "from the state that it began with. Call trainer.stop(reason), and "
                "restore and fit again after that; or restore weights_only=True."
            )
        own = self.checkpoints
        where = own.options if directory is None else directory
        meta = None
        source = CheckpointReader(where, own.description)
        if weights_only:
            state = source.restore_weights(self._present_state(), step)
        else:
            state, meta = source.restore_state(self.plan.abstract, step, self.base)
        if rewind:
            with own:  # first of all, because another run may be writing there
                moved = own.set_aside(int(state.step))
            if moved:
                self.report(moved)
        if meta is not None:
            self._go_on(meta)
            self.metrics = {}
        # A state of another run is only a starting point. If the same program is
        # started again, it must resume from this run's checkpoints.
        is_fresh = self.is_fresh and source.directory != own.directory
        self._replace(state)
        self.is_fresh, self._is_assigned = is_fresh, False

    def base(self) -> Mapping[str, jax.Array]:
        """Returns the model's arrays. A checkpoint may hold only checksums of them."""
        return to_groups(self._present_state())["model"]

    def load_weights(self, path: str | os.PathLike, only: Any) -> None:
        """Reads weights of a plain checkpoint; see `Trainer.load_weights`."""
        state = self._present_state()
        held = flatten(state.params) | flatten(state.variables)
        model = self.plan.model.merge(held)
        arrays = to_groups(state)["model"]
        names = [dotted(found) for found, _ in variables_of(model, only)]
        found = read_weights(path, {name: arrays[name] for name in names}, arrays)
        # A run starts from these weights, as from a state of another directory.
        self._replace(from_groups(state, {"model": arrays | found}))

    def resume(self) -> str:
        """Continues from the newest checkpoint, if the state is fresh and there is one.

        Returns a message about the resume, or an empty text if there is none.

        Raises:
            CheckpointError: If the resume would discard values assigned to `model`.
        """
        if not self.is_fresh:
            return ""
        own, notes = self.checkpoints, list[str]()
        has_first = self._state is not None and self._read_step is None
        if self._state is not None:
            self._check_assigned()
        if self._read_step is not None and own.is_newest(self._read_step):
            own.last_saved = self._read_step
            state, where = self.state, f"in '{own.directory}'"
        else:
            found, notes = own.resume(self.plan.abstract, self.base)
            if found is None:
                return "\n".join(notes)
            state, meta, where = found
            notes = [*notes, *self._changes_since(meta)]
            self._go_on(meta)
        warn_of_changes(self.plan, state)
        if state is not self._state:
            self._replace(state)
        self.is_fresh, self._read_step = False, None
        done = f"Resumed from step {self.step} {where}."
        if has_first:
            done += " The weights that the Trainer had before this fit are not used."
        return "\n".join([*notes, done])

    def _changes_since(self, meta: Mapping[str, Any]) -> Iterator[str]:
        own = self.checkpoints.description
        before, now = meta.get("eval_params"), own.get("eval_params")
        if before not in (now, None):
            yield (
                f"The checkpoint evaluated {before}, and this run evaluates {now}: "
                "their metrics are not comparable."
            )
        before, now = meta.get("seed"), own["seed"]
        if before not in (now, None):
            warn_user(
                f"seed={now} has no effect: the run goes on from a checkpoint with the "
                f"random numbers of seed={before}. For another seed, start a new run "
                "in another directory.",
                ParallelWarning,
            )
        before, now = (list(x.get("players", {}).items()) for x in (meta, own))
        if before != now:
            yield (
                f"The players' steps in each turn were {dict(before)} and are now "
                f"{dict(now)}: the order of turns is as if they had been so from the "
                "first step."
            )

    def _check_assigned(self) -> None:
        """Raises an error if a fit would discard values assigned to `model`."""
        _ = self.state  # takes the assigned values
        # A run that died before its first save builds its weights again. Then the copy
        # in memory replaces them, and `resume` says so.
        step = self.checkpoints.latest_step if self._is_assigned else None
        if step is not None:
            raise CheckpointError(
                "trainer.model was given new values before a fit that resumes from "
                f"step {step} in '{self.checkpoints.directory}'. For values that a run "
                "begins with, assign them only in a new run: if trainer.step == 0. To "
                "change a run that goes on, call trainer.restore() before you assign."
            )

    def _go_on(self, meta: Mapping[str, Any]) -> None:
        self.data = DataState.from_json(meta.get("position", {}))
        restore_states(self.callbacks, meta.get("callbacks", ()))

    def header(
        self, num_steps: int, options: Options, refused: Mapping[str, str]
    ) -> str:
        """Returns the layout and the run in words, for the start of the first fit.

        Later calls return an empty text. ``options`` are the compiler options, and
        ``refused`` maps each option that the compiler refuses to the reason.
        """
        if self._is_introduced:
            return ""
        self._is_introduced = True
        # A run may have done more steps than this fit asks for.
        of = "of" if self.step <= num_steps else "done, and this fit asks for"
        facts = self.facts()
        del facts["step"]  # it comes last
        own = self.checkpoints
        if own.local_directory is not None:
            known = facts_to_verify(own.description, self.plan, options)
            facts["verified"] = last_verified(own.local_directory, known)
        path, count = self._blocks()
        if count >= _MANY_BLOCKS:
            facts["blocks"] = (
                f"the {count} equal blocks of `{dotted(path)}` are compiled separately;"
                " if they run in sequence, layers.Stack.of(blocks) compiles only one"
            )
        facts["step"] = f"{self.step} {of} {num_steps}"
        if options or refused:
            facts["compiler options"] = format_options(options, refused)
        return aligned([*facts.items()])

    def _blocks(self) -> tuple[Path, int]:
        """Returns the path and the length of the longest list of equal blocks.

        The length is 0 if there is no such list.
        """
        model = self.plan.model.copy()
        # Attributes of a user's module may be of any type, and a comparison of two of
        # them may raise any error. A fit must not end because of this advice.
        with contextlib.suppress(Exception):
            path, count = find_blocks(model)
            if not is_inside(path, stacks_of(model)):
                return path, count
        return (), 0

    def announce(self) -> None:
        """Reports that the first fit begins, before any array is made."""
        if not self._is_introduced:
            found, names = versions(), ("jax", "flax", "optax")
            libraries = ", ".join(f"{name} {found[name]}" for name in names)
            self.report(
                f"Preparing {self.checkpoints.description['model']} with {libraries}."
            )

    def config(self, num_steps: int) -> dict[str, Any]:
        """Returns the settings of the run as JSON values, for loggers."""
        run = self.checkpoints.description
        mesh = self.plan.layout.mesh
        kinds = Counter(device.device_kind for device in mesh.devices.flat)
        names = (
            *("strategy", "mesh", "model", "optimizer", "num_params"),
            *("num_microbatches", "seed", "players"),
        )
        return {
            **{name: run[name] for name in names if name in run},
            "num_steps": num_steps,
            "devices": dict(kinds),
            "precision": repr(self.plan.precision),
            "versions": versions(),
        }

    def describe(self) -> Description:
        """Returns the placement of every array, with reasons. Traces nothing."""
        plan = self.plan
        return describe_model(
            plan.model.copy(),
            plan.layout,
            wrt=nnx.Any(*self.wrt.values()) if plan.shares else self.wrt,
            precision=plan.precision,
            keeps_average=plan.ema_decay is not None,
            placements=plan.placements,
            opt_state=plan.abstract.opt_state,
        )

    def facts(self) -> dict[str, str]:
        """Returns facts about the run, as texts by name.

        The call builds no state and does not wait for a step.
        """
        run, options = self.checkpoints.description, self.checkpoints.options
        mesh, state = self.plan.layout.mesh, self._state
        described, trained = self.describe(), run["num_params"]
        params = [
            variable
            for _, variable in variables_of(self.plan.model.copy())
            if isinstance(variable, nnx.Param)
        ]
        total = sum(
            x.num_params if isinstance(x, QuantisedParam) else x.get_value().size
            for x in params
        )
        kinds = Counter(device.device_kind for device in mesh.devices.flat)
        devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        count = len({device.process_index for device in mesh.devices.flat})
        facts = {
            "model": f"{run['model']}, {total:,} parameters"
            + f", {trained:,} of them trained" * (trained != total),
            "strategy": run["strategy"],
            "devices": devices + f", of {count} processes" * (count > 1),
            "mesh": " * ".join(f"{axis}={size}" for axis, size in mesh.shape.items()),
            "per device": described.per_device,
        }
        if notes := [x for x in described.notes if x.startswith("8 bits")]:
            facts["products"] = notes[0]
        if (execution := self.plan.layout.claims.execution) and (
            waits := execution.describe_waits(mesh, run["num_microbatches"])
        ):
            facts["pipeline"] = waits
        if bare := [
            f"`{dotted(path)}`"
            for path, variable in variables_of(self.plan.model.copy())
            if type(variable) is nnx.Variable
            and is_inexact(variable.get_value())
            and path not in self.plan.trained_paths
        ]:
            shown = ", ".join(bare[:4]) + ", ..." * (len(bare) > 4)
            facts["not trained"] = f"{shown}: nnx.Variable; nnx.Param is trained"
        if players := run.get("players"):
            facts["turns"] = ", ".join(f"{name} x {x}" for name, x in players.items())
        if self.judged.choice != "params":
            facts["evaluated"] = self.judged.description
        if options is not None:
            every = options.every
            if isinstance(every, timedelta):
                seconds = every.total_seconds()
                are_many = seconds >= 120
                often = f"{seconds / 60:g} minutes" if are_many else f"{seconds:g} s"
            else:
                often = f"{every:,} steps"
            where = self.checkpoints.directory
            facts["checkpoints"] = f"'{where}', every {often} and at the end"
        if note := self.checkpoints.copies_note:
            facts["copies"] = note
        facts |= {name: x for name in ENVIRONMENT if (x := os.environ.get(name))}
        step: Any = state and state.step
        is_known = state and not step.is_deleted() and step.is_ready()
        return facts | {"step": f"{int(step)}" if is_known else "-"}


def _shapes_of(state: TrainState) -> Any:
    leaves, structure = jax.tree.flatten(state)
    return structure, [x.shape for x in leaves]


def frozen_paths(plan: StatePlan) -> frozenset[str]:
    """Returns dotted paths of the parameters that are not trained."""
    return frozenset(map(dotted, plan.param_placements.keys() - plan.trained_paths))


def describe_run(
    plan: StatePlan,
    strategy: object,
    num_microbatches: int,
    seed: int,
    *,
    is_saved: bool = True,
) -> dict[str, Any]:
    """Returns the description of a run in its checkpoints, as JSON values.

    The kinds of the optimizer's states are included only if the run has checkpoints,
    because the optimizer's update must be traced to find them.
    """
    nodes: list[Any] = []

    def visit(node: Any) -> bool:
        nodes.append(node)
        return False  # so that the traversal goes on to the nodes inside

    jax.tree.leaves(plan.abstract.opt_state, is_leaf=visit)
    # Optax does not tell an optimizer's name, only the types of its states. The
    # outermost type comes first.
    kinds = dict.fromkeys(type(x).__name__ for x in nodes if hasattr(x, "_fields"))
    products = plan.precision.products
    return {
        "strategy": strip_addresses(repr(strategy)),
        "mesh": dict(plan.layout.mesh.shape),
        "model": plan.model_name,
        "optimizer": ", ".join(kind for kind in kinds if kind != "EmptyState"),
        "num_params": sum(x.size for x in jax.tree.leaves(plan.abstract.params)),
        "num_microbatches": num_microbatches,
        "seed": seed,
        **({"products": repr(products)} if products else {}),
        **({"optimizer_states": state_kinds(plan)} if is_saved else {}),
    }
