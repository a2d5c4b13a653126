"""Named errors: what was found, the rule that it breaks, and the valid values.

Each refines a built-in, so that ``except ValueError`` keeps working, and holds nothing
but a docstring that teaches the rule. The message is written at the check.
"""

import sys
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parent)


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that led here: the innermost that calls this package.

    On a thread of the package itself, such as that of the data, that is the line of the
    main thread which waits for it.
    """
    here = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    frame = next(_callers(here), here)
    if frame.f_code.co_filename == threading.__file__:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        main = frames.get(threading.main_thread().ident or 0)
        # The outermost: JAX, which traces for the package, calls it too.
        *_, frame = frame, *_callers(main)
    known = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, category, *place, frame.f_globals["__name__"], known)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames outside of this package that call it, from the innermost."""
    is_inside = False
    while frame is not None:
        was_inside, is_inside = is_inside, frame.f_code.co_filename.startswith(_PACKAGE)
        if was_inside and not is_inside:
            yield frame
        frame = frame.f_back


class ParallelError(Exception):
    """Base of every error that this library raises on purpose.

    Its traceback ends with a link to what the site says about the class, if the
    installed package names its site.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if address := _site():
            # A note, not the message: that stays what a program compares or logs.
            name = f"{__name__}.{type(self).__name__}"
            self.add_note(f"More: {address.rstrip('/')}/errors.html#{name}")


@cache
def _site() -> str | None:
    """The address under ``Documentation`` in the metadata of the package."""
    try:
        urls = metadata("nnx-parallel").get_all("Project-URL") or []
    except PackageNotFoundError:  # a checkout that is not installed
        return None
    # "Documentation, https://..." as core metadata has it, the label in any case.
    pairs = (url.partition(", ")[::2] for url in urls)
    return next((url for label, url in pairs if label.lower() == "documentation"), None)


class ParallelWarning(UserWarning):
    """Something has no effect, or another one than it seems to have."""


class VersionError(ParallelError, ImportError):
    """The installed jax and flax must be of the supported versions."""


class DeviceMemoryError(ParallelError, MemoryError):
    """A step's state, gradients and activations must fit in the memory of a device."""


class DeviceCountError(ParallelError, RuntimeError):
    """The number of simulated devices is set before JAX first counts its devices."""


class MeshShapeError(ParallelError, ValueError):
    """Axis sizes multiply to the number of devices; at most one may be left out."""


class MeshAxisTypeError(ParallelError, ValueError):
    """Mesh axes must be ``AxisType.Auto``; ``jax.make_mesh`` makes Explicit ones."""


class UnknownAxisError(ParallelError, ValueError):
    """A name in a model or a spec must be a logical axis or a mesh axis."""


class IndivisibleDimError(ParallelError, ValueError):
    """The size of a mesh axis must divide the dim that it shards."""


class SpecRankError(ParallelError, ValueError):
    """A spec must not be longer than the rank of its array."""


class CollectiveProductError(ParallelError, ValueError):
    """A collective matmul contracts dims of equal size and shards one that it keeps."""


class AttentionKernelError(ParallelError, ValueError):
    """A fused attention kernel runs on one platform, for some shapes and dtypes.

    cuDNN: 16-bit floats on NVIDIA GPUs. Splash: sequences of multiples of 128 on TPUs.
    """


class PlacementConflictError(ParallelError, ValueError):
    """A dim has at most one claim, and a mesh axis shards at most one of its dims."""


class PlacementTreeError(ParallelError, ValueError):
    """A tree of rules, specs and shardings must be a prefix of the tree it places.

    The value at a node holds for everything below it; ``None`` leaves it alone.
    """


class RuleError(ParallelError, TypeError):
    """A rule is an object whose method ``match`` answers with a spec, or passes."""


class DonatedArrayError(ParallelError, RuntimeError):
    """A donated array is gone after the call, so each is passed once and used once.

    Keep what the call returns in its place; copy an array that you need later.
    """


class UnmatchedRuleError(ParallelError, ValueError):
    """A strict set of rules must match every array, and every rule some array."""


class ModelError(ParallelError, ValueError):
    """The arrays of a model must be in NNX Variables, so that all of them are saved.

    A parameter is an ``nnx.Param``; a table or another constant an ``nnx.Variable``.
    """


class StackError(ParallelError, ValueError):
    """The blocks of a stack must be alike and must not share arrays."""


class StateStructureError(ParallelError, ValueError):
    """A model must keep the structure, shapes and dtypes of its arrays in a step."""


class LossError(ParallelError, ValueError):
    """A loss returns a scalar or a ``Mean``, and optionally a dict of metrics."""


class OptimizerError(ParallelError, ValueError):
    """An optimizer gets gradients and parameters, the loss and nothing that recomputes.

    As ``value=`` and ``grad=`` where it takes these; a line search needs ``value_fn=``.
    """


class NonFiniteLossError(ParallelError, ArithmeticError):
    """The loss of every step must be finite; only float16's scaling skips a step."""


class DataError(ParallelError, ValueError):
    """Training data is an iterable of pytrees of numeric arrays that JAX can hold.

    Integers must fit 32 bits, and JSON must hold the state of a resumable iterator.
    """


class BatchShapeError(DataError):
    """Dim 0 of every array in a batch holds the rows; shapes stay the same in a run.

    ``num_microbatches`` times the sizes of the batch's mesh axes must divide the rows.
    """


class DataExhaustedError(DataError):
    """Training data must hold a batch for every step of the run."""


class LogFileError(ParallelError, ValueError):
    """A JSON lines logger appends only to files whose every line it could have written.

    It removes the lines of a run that died, and must not touch another program's file.
    """


class CheckpointError(ParallelError, ValueError):
    """Checkpoints hold groups of ``jax.Array`` by path and metadata that JSON can hold.

    Steps ascend: each is saved once, and none after a later one.
    """


class CheckpointDirectoryError(ParallelError, OSError):
    """Checkpoints need a directory that this run, and no other, can make and write."""


class CheckpointSaveError(ParallelError, RuntimeError):
    """A save failed after it had started; the checkpoints before it are intact.

    A failure in the background is raised by the next call and names its own step.
    """


class CheckpointReadError(ParallelError, RuntimeError):
    """A checkpoint must be complete and written by this library."""


class CheckpointFormatError(ParallelError, RuntimeError):
    """A checkpoint must be of this library, and of a version that this one can read.

    Another program's, and a later version's, are no damage: nothing is done to them.
    """


class CheckpointUnavailableError(ParallelError, OSError):
    """Reading a checkpoint needs memory, file handles and a disk that responds.

    Where these fail nothing is known about the checkpoint; it is not called corrupt.
    """


class CheckpointDamagedError(CheckpointReadError):
    """The arrays of a checkpoint must have the checksums that were saved with them.

    A file with flipped bits may read without an error and hold other values.
    """


class CheckpointNotFoundError(ParallelError, FileNotFoundError):
    """A step can be read only if it was saved and not deleted since."""


class CheckpointMismatchError(ParallelError, ValueError):
    """Restored arrays have the saved paths, shapes and dtypes; shardings may differ."""


class ProcessError(ParallelError, RuntimeError):
    """The processes of a run start together, and all take part in every step."""


class DisagreementError(ParallelError, ValueError):
    """All processes of a run must run the same program on shares of the same shapes.

    Programs that differ deadlock, or silently continue with different numbers.
    """


class ReplicaError(ParallelError, RuntimeError):
    """Copies of one array on several devices must hold the same bits."""


class ScheduleError(ParallelError, ValueError):
    """A pipeline schedule is a table that neighbouring stages can follow tick by tick.

    Every stage takes every microbatch once, in order, and no slot comes before its
    inputs: an activation sent in one tick arrives in the next.
    """


class PipelineError(ParallelError, ValueError):
    """A pipeline spreads the layers of one ``Stack``, called once, over its stages.

    Stages times chunks divide the number of layers. The loss calls the stack directly,
    inside no transform, and only the blocks use the layers' parameters and variables.
    """
