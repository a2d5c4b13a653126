"""Named errors, which give the found value, the rule that it breaks, and valid values.

Each class refines a built-in error, so that ``except ValueError`` keeps working. A
class has only a docstring, which explains the rule. The message is written where the
rule is checked. For unknown arguments, `suggests_names` writes the message.
"""

import contextlib
import difflib
import functools
import importlib
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, TypeVar

_PACKAGE = f"{Path(__file__).parent}{os.sep}"

T = TypeVar("T", bound=Callable[..., Any])

_OTHER_NAMES = {
    "num_epochs": "epochs max_epochs num_train_epochs",
    "num_steps": "steps max_steps train_steps",
    "last_batch": "drop_last drop_remainder",
    "num_microbatches": "accumulate_grad_batches gradient_accumulation_steps grad_accum"
    " gradient_accumulation microbatches",
    "global_batch_size": "batch_size",
    "eval_data": "val_data validation_data eval_dataset",
    "eval_every": "val_every",
    "optimizer": "tx",
    "loss": "loss_fn",
    "loggers": "logger",
    "precision": "dtype",
    "checkpoint": "checkpoint_dir output_dir",
    "remat": "gradient_checkpointing activation_checkpointing",
    "size": "num_shards num_stages num_devices degree world_size tp_size pp_size",
    "shard": "stage zero_stage sharding_strategy reshard_after_forward",
    "min_size": "min_num_params min_weight_size min_fsdp_size",
    "directory": "path dirpath root",
    "every": "save_every save_steps save_interval_steps every_n_train_steps",
    "keep_last": "keep max_to_keep save_total_limit total_limit",
    "keep_best": "monitor metric best_fn metric_for_best_model",
    "best_mode": "mode greater_is_better",
    "num_best": "save_top_k top_k",
    "asynchronous": "async_save enable_async_checkpointing",
    "params": "param_dtype",
    "compute": "dtype compute_dtype",
    "num_layers": "n_layer n_layers num_hidden_layers num_blocks depth",
    "embed_dim": "n_embd d_model hidden_size embed_size model_dim",
    "num_heads": "n_head n_heads num_attention_heads",
    "num_kv_heads": "n_kv_heads num_key_value_heads",
    "seq_len": "block_size n_ctx n_positions max_position_embeddings context_length",
    "vocab_size": "n_vocab num_embeddings",
    "num_experts": "num_local_experts n_routed_experts num_routed_experts n_experts",
    "top_k": "k num_experts_per_tok num_selected_experts experts_per_token",
    "mlp_dim": "hidden_dim intermediate_size moe_intermediate_size ffn_dim d_ff",
    "shared_dim": "n_shared_experts num_shared_experts",
    "normalise": "normalize norm_topk_prob renormalize",
    "scale": "routed_scaling_factor",
    "num_groups": "n_group n_groups",
    "top_groups": "topk_group topk_groups",
    "bias_rate": "bias_update_speed bias_update_rate",
    "max_new_tokens": "max_length max_tokens num_tokens n_tokens",
    "balance_loss": "aux_loss aux_loss_coef router_aux_loss_coef load_balance_loss",
    "z_loss": "router_z_loss router_z_loss_coef",
}
"""Names that our arguments have in other libraries."""

_HINTS = {
    "shard": " ZeRO-3 is 'params', ZeRO-2 'gradients', ZeRO-1 'optimizer'.",
    "shared_dim": " It is the total width of all shared experts.",
}

_FIRST = {
    "Trainer.save": " It saves to the directory in Trainer(checkpoint=...).",
    "WandbLogger": " Write WandbLogger(project=...).",
    **{name: f" Write {name}(config, rngs=rngs)." for name in ("GPT", "ViT", "ResNet")},
}
"""Remedies for positional arguments that a method or class does not take."""

_NOT_SUGGESTED = ("GPT", "ViT", "ResNet", "generate")
"""Classes and functions whose arguments are not suggested to others."""

_GROUPS = {"Evaluation": "eval_", "Faults": "", "Debugging": "", "Backend": ""}
"""Classes that group options of the Trainer, and the former prefix of the options."""

_KNOWN: dict[str, list[str]] = {}
"""Names of arguments, by the class or method that `suggests_names` decorates."""


def suggests_names(taker: T) -> T:
    """Makes errors about unknown arguments of a method or class suggest valid ones.

    For a name from another library, the error suggests our argument with the same
    purpose. For a keyword of another class, it names that class. For any other keyword,
    it suggests the nearest name.
    """
    if inspect.isclass(taker):  # a dataclass of options, for example
        taker.__init__ = suggests_names(taker.__init__)
        return taker  # pyright: ignore[reportReturnType]
    parameters = list(inspect.signature(taker).parameters.values())
    if parameters[0].name == "self":
        del parameters[0]
    known = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    title = taker.__qualname__.removesuffix(".__init__")
    _KNOWN[title] = known
    kinds = [p.kind for p in parameters]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    most = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    most_given = most + ("." in taker.__qualname__)  # with `self`

    @functools.wraps(taker)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if len(args) > most_given and title in _FIRST:
            count = len(args) - most_given + most
            raise TypeError(
                f"{title} takes {most} positional arguments, but got {count}."
                + _FIRST[title]
            )
        for name in kwargs:
            if name not in known and not takes_any:
                remedy = _remedy(title, name)
                raise TypeError(f"{title} has no argument {name!r}. {remedy}")
        return taker(*args, **kwargs)

    return wrapped  # pyright: ignore[reportReturnType]


def _remedy(title: str, name: str) -> str:
    if title == "Trainer" and (place := grouped(name)):
        group, option = place
        return f"It is {option}: pass {group}={option}."
    known = _KNOWN[title]
    ours = [own for own, theirs in _OTHER_NAMES.items() if name in theirs.split()]
    near = [own for own in ours if own in known]
    owners = {x: known for x, known in _KNOWN.items() if x not in _NOT_SUGGESTED}
    homes = {own: [x for x in owners if own in owners[x]] for own in (name, *ours)}
    own, owners = next(((x, y) for x, y in homes.items() if y), ("", []))
    if owners and not near:
        has = "has" if len(owners) == 1 else "have"
        return f"{', '.join(owners)} {has}: {own}=.{_HINTS.get(own, '')}"
    if near := near or difflib.get_close_matches(name, known, n=1):
        return f"Did you mean {near[0]}=?{_HINTS.get(near[0], '')}"
    return f"See help({title})."


def grouped(name: str) -> tuple[str, str] | None:
    """Returns the group of an option of the Trainer, or ``None``.

    The result is the Trainer's argument and the code for it, such as ``"faults"`` and
    ``"Faults(on_non_finite=...)"``.
    """
    for group, prefix in _GROUPS.items():
        option = name.removeprefix(prefix)
        if name == prefix + option and option in _KNOWN.get(group, ()):
            return group.lower(), f"{group}({option}=...)"
    return None


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'?`` for the nearest known name, or an empty text."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


HOMES = (
    *("layers", "models", "strategies", "schedules", "sharding", "optimizers", "data"),
    *("loggers", "audit", "collectives", "precision", "distributed", "weights", "plan"),
)
"""Packages and modules with public names, in the order in which they are searched."""


def home_of(name: str) -> str:
    """Returns the package or module that has this public name, or "".

    The import is in this function, because the packages import this module.
    """
    for home in HOMES if not name.startswith("_") else ():
        module = importlib.import_module(f"nnx_parallel.{home}")
        # A module also has names that it has imported from other libraries.
        owner = getattr(getattr(module, name, None), "__module__", None) or ""
        if owner.startswith("nnx_parallel."):
            return module.__name__
    return ""


def kind_of(value: object) -> str:
    """Describes a value of the wrong kind, for an error message."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    if isinstance(value, str | int | float):
        return f"{value!r}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns with the location of the innermost line outside this package.

    On a thread of the package, such as the thread that reads data, the location is the
    line at which the main thread waits.
    """
    frame = user_frame()
    if frame.f_code.co_filename == threading.__file__:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        main = frames.get(threading.main_thread().ident or 0)
        # The outermost frame is taken, because inner frames may belong to JAX, which
        # calls the package while it traces.
        *_, frame = frame, *_callers(main)
    known = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(text, category, *place, module, known)


def user_frame() -> FrameType:
    """Returns the innermost frame outside this package."""
    here = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    return next(_callers(here), here)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames outside this package that call into it, innermost first."""
    is_inside = False
    while frame is not None:
        code, was_inside = frame.f_code, is_inside
        is_inside = code.co_filename.startswith(_PACKAGE)
        # `contextlib` counts as inside if it calls a context manager of the package.
        is_inside |= was_inside and code.co_filename == contextlib.__file__
        # The `__init__` that a dataclass generates has no file.
        is_inside |= (code.co_filename, code.co_name) == ("<string>", "__init__")
        if was_inside and not is_inside:
            yield frame
        frame = frame.f_back


def hide_own_frames(error: BaseException) -> None:
    """Removes this package's frames from an error's traceback.

    A bare ``raise`` that follows in the same ``except`` block adds no frame.
    """
    kept, links, link = None, list[TracebackType](), error.__traceback__
    while link is not None:
        links.append(link)
        link = link.tb_next
    for link in reversed(links):
        if not link.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            place = link.tb_frame, link.tb_lasti, link.tb_lineno
            kept = TracebackType(kept, *place)
    error.__traceback__ = kept


class ParallelError(Exception):
    """Base class of all errors that this library raises on purpose.

    The traceback ends with a link to the documentation of the class, if the metadata of
    the installed package has the address of the documentation.

    Attributes:
        exit_code: The launcher exits with this code if the error has ended a process.
            With several processes, each process exits with it too.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if address := _site():
            # The link is a note and not part of the message, which programs may compare
            # or log.
            name = f"{__name__}.{type(self).__name__}"
            self.add_note(f"More: {address.rstrip('/')}/errors.html#{name}")


@functools.cache
def _site() -> str | None:
    """Returns the address under ``Documentation`` in the package's metadata."""
    try:
        urls = metadata("nnx-parallel").get_all("Project-URL") or []
    except PackageNotFoundError:  # this is a checkout that is not installed
        return None
    # Core metadata has "Documentation, https://..."; the label may be in any case.
    pairs = (url.partition(", ")[::2] for url in urls)
    return next((url for label, url in pairs if label.lower() == "documentation"), None)


class ParallelWarning(UserWarning):
    """An argument has no effect, or has another effect than it seems to have."""


class VersionError(ParallelError, ImportError):
    """The installed versions of jax and flax must be supported."""


class DeviceMemoryError(ParallelError, MemoryError):
    """A step's state, gradients and activations must fit in the memory of a device."""

    exit_code = 77


class DeviceCountError(ParallelError, RuntimeError):
    """The number of simulated devices must be set before JAX counts its devices."""


class MeshShapeError(ParallelError, ValueError):
    """Axis sizes must multiply to the number of devices; one may be left out."""


class MeshAxisTypeError(ParallelError, ValueError):
    """Mesh axes must be Auto or Explicit, and are used as Auto axes.

    A mesh from ``jax.make_mesh`` has Explicit axes and is accepted. Manual axes are
    not accepted, and a model must not make axes Explicit.
    """


class UnknownAxisError(ParallelError, ValueError):
    """A name in a model or a spec must be a logical axis or a mesh axis."""


class ProgramTextError(ParallelError, RuntimeError):
    """The audit reads the text of a program, so jaxlib must be able to print it.

    A jaxlib that is older than the compiler cannot print it. The compiler itself can
    write the text to a file.
    """


class IndivisibleDimError(ParallelError, ValueError):
    """The size of a mesh axis must divide the dim that it shards."""


class SpecRankError(ParallelError, ValueError):
    """A spec must not be longer than the rank of its array."""


class CollectiveProductError(ParallelError, ValueError):
    """A collective matmul contracts dims of equal size, and shards a dim it keeps."""


class AttentionKernelError(ParallelError, ValueError):
    """A fused attention kernel supports one platform, and only some shapes and dtypes.

    cuDNN takes 16-bit floats on NVIDIA GPUs. Splash attention takes sequence lengths
    that are multiples of 128, on TPUs.
    """


class PlacementConflictError(ParallelError, ValueError):
    """A dim has at most one claim; a mesh axis shards at most one dim of an array."""


class PlacementTreeError(ParallelError, ValueError):
    """A tree of rules, specs and shardings must be a prefix of the tree that it places.

    The value at a node applies to everything below the node. ``None`` changes nothing.
    """


class RuleError(ParallelError, TypeError):
    """A rule needs a method ``match`` that returns a spec and a reason, or ``None``."""


class DonatedArrayError(ParallelError, RuntimeError):
    """A donated array cannot be used after the call that donated it.

    Use the call's result in place of the array. Copy an array that you need later.
    """


class UnmatchedRuleError(ParallelError, ValueError):
    """With strict rules, each array needs a rule, and each rule must match an array."""


class ModelError(ParallelError, ValueError):
    """The arrays of a model must be in NNX Variables, so that all of them are saved.

    A parameter is an ``nnx.Param``. A table or another constant is an ``nnx.Variable``.
    """


class StackError(ParallelError, ValueError):
    """The blocks of a stack must be alike and must not share arrays."""


class EightBitError(ParallelError, ValueError):
    """``layers=`` must match layers that support 8-bit products.

    The products must not overlap with their communication. In the MX format, dims must
    have complete blocks. Stochastic rounding does not work in experts or in a Pipeline.
    """


class ExpertsError(ParallelError, ValueError):
    """Each token needs enough experts, and a mesh axis must divide their number."""


class WeightsError(ParallelError, ValueError):
    """Files of weights must be complete, and have the names and shapes of the model."""


class StateStructureError(ParallelError, ValueError):
    """A model must keep the structure, shapes and dtypes of its arrays in a step."""


class LossError(ParallelError, ValueError):
    """A loss returns a scalar or a ``Mean``, and optionally a dict of metrics."""


class OptimizerError(ParallelError, ValueError):
    """An optimizer gets gradients, parameters and the loss, but cannot recompute them.

    It gets ``value=`` and ``grad=`` if it accepts them. A line search needs
    ``value_fn=``, and so does not work. An optimizer of matrices gets only arrays that
    its dimension numbers turn into matrices.
    """


class OffloadError(ParallelError, ValueError):
    """Arrays can be kept in host memory if the devices can access it during a step.

    The ``remat`` of a ``Stack`` can keep the inputs of its blocks there, but not
    together with FSDP's prefetch.
    """


class NonFiniteLossError(ParallelError, ArithmeticError):
    """Loss, gradients and updates of every step must be finite.

    ``Faults(on_non_finite="skip")`` skips steps that are not finite, and so does
    float16's loss scaling. A state that is not finite is never saved.
    """

    exit_code = 78


class DataError(ParallelError, ValueError):
    """Training data is an iterable of pytrees of numeric arrays that JAX can hold.

    Integers must fit in 32 bits. JSON must be able to hold the state of an iterator.
    """


class BatchShapeError(DataError):
    """Dim 0 of every array in a batch counts rows, and shapes stay the same in a run.

    The number of rows must be a multiple of ``num_microbatches`` times the sizes of the
    batch's mesh axes.
    """


class DataExhaustedError(DataError):
    """Training data must hold a batch for every step of the run."""


class LogFileError(ParallelError, ValueError):
    """A JSON lines logger appends only to a file that it could have written itself.

    It removes lines that a dead run left, and must not change another program's file.
    """


class CheckpointError(ParallelError, ValueError):
    """A checkpoint holds groups of ``jax.Array`` by path, and metadata as JSON values.

    Steps ascend: each step is saved only once, and never after a later step.
    """


class CheckpointDirectoryError(ParallelError, OSError):
    """Checkpoints need a directory that only this run creates and writes to."""


class CheckpointSaveError(ParallelError, RuntimeError):
    """A save failed after it had begun; earlier checkpoints are intact.

    If it failed in the background, the next call raises this error, which names the
    step.
    """


class CheckpointReadError(ParallelError, RuntimeError):
    """A checkpoint must be complete, and this library must have written it."""


class CheckpointFormatError(ParallelError, RuntimeError):
    """A checkpoint must have a format that the installed version of this library reads.

    A checkpoint of another program or of a later version is not damaged, so it is left
    unchanged.
    """


class CheckpointUnavailableError(ParallelError, OSError):
    """Reading a checkpoint needs memory, file handles and a disk that responds.

    If one of these is missing, the checkpoint may still be intact, so it is not treated
    as corrupt.
    """


class CheckpointDamagedError(CheckpointReadError):
    """The arrays of a checkpoint must have the checksums that were saved with them.

    A file with flipped bits may be read without an error and give other values.
    """


class CheckpointNotFoundError(ParallelError, FileNotFoundError):
    """A step can be read only if it was saved and not deleted afterwards."""


class CheckpointMismatchError(ParallelError, ValueError):
    """Restored arrays need the saved paths, shapes and dtypes; shardings may differ."""


class ProcessError(ParallelError, RuntimeError):
    """The processes of a run start together, and all take part in every step."""


class DisagreementError(ParallelError, ValueError):
    """All processes must run the same program, on data shares of the same shapes.

    Different programs deadlock, or silently continue with different numbers.
    """


class ReplicaError(ParallelError, RuntimeError):
    """Copies of an array on several devices must have the same bits."""


class ReplayError(ParallelError, RuntimeError):
    """The same step from the same state must give the same bits each time it is run."""


class VerificationError(ParallelError, ArithmeticError):
    """A step must compute the same numbers as one device, up to rounding.

    The attribute ``report`` is the `Verification`.
    """

    report: Any = None


class ScheduleError(ParallelError, ValueError):
    """A pipeline schedule is a table that neighbouring stages can follow tick by tick.

    Every stage takes every microbatch once, in order. The inputs of a slot must exist
    before its tick: an activation that is sent in one tick arrives in the next tick.
    """


class PipelineError(ParallelError, ValueError):
    """A pipeline spreads the layers of one ``Stack``, called once, over its stages.

    Each chunk of each stage has at least one layer. The loss calls the stack directly,
    not inside a transform. Only the blocks use the layers' parameters and variables.
    """


class PlanError(ParallelError, ValueError):
    """A plan needs a Trainer, the shapes of a batch, and devices that it knows.

    Neither the Trainer's arrays nor the devices need to exist. A script is run on this
    machine up to its call of ``Trainer.fit``.
    """
