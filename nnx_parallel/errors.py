"""Named errors: what was found, the rule it breaks, and the values that are valid.

Each refines a built-in, so that ``except ValueError`` keeps working, and is empty but
for the docstring that teaches the rule. The message is written where the check stands.
"""

from __future__ import annotations


class ParallelError(Exception):
    """Base of every error that this library raises on purpose."""


class VersionError(ParallelError, ImportError):
    """The installed jax and flax must be of the supported versions."""


class DeviceMemoryError(ParallelError, MemoryError):
    """A step's state, gradients and activations must fit in the memory of a device."""


class DeviceCountError(ParallelError, RuntimeError):
    """The number of simulated devices is chosen before JAX first counts them."""


class MeshShapeError(ParallelError, ValueError):
    """The product of the axis sizes must equal the number of devices.

    One size may be left out (``None``); it takes the devices that remain.
    """


class MeshAxisTypeError(ParallelError, ValueError):
    """Every mesh axis must be ``AxisType.Auto``.

    ``jax.make_mesh`` makes Explicit axes by default, under which a plain model raises
    on ambiguous products.
    """


class UnknownAxisError(ParallelError, ValueError):
    """A name in a model or a spec must be a logical axis or a mesh axis."""


class IndivisibleDimError(ParallelError, ValueError):
    """A mesh axis must divide the dim that it shards."""


class SpecRankError(ParallelError, ValueError):
    """A spec must not be longer than the rank of its array."""


class CollectiveProductError(ParallelError, ValueError):
    """A collective product contracts dims of equal size and splits one that it keeps.

    What it gathers, scatters or splits over the axis is a kept dim; what it contracts
    has the same sizes in x and in w.
    """


class AttentionKernelError(ParallelError, ValueError):
    """A fused attention kernel runs on one platform, for some shapes and dtypes.

    cuDNN's takes float16 and bfloat16 on NVIDIA GPUs, Splash sequences of a multiple of
    128 on TPUs.
    """


class PlacementConflictError(ParallelError, ValueError):
    """Two claims must not meet on one dim, nor one mesh axis shard two dims."""


class PlacementTreeError(ParallelError, ValueError):
    """A tree of rules, specs and shardings must be a prefix of the tree it places.

    What stands at a node holds for everything below it; ``None`` leaves it alone.
    """


class UnmatchedRuleError(ParallelError, ValueError):
    """A strict set of rules must match every array, and every rule some array."""


class ModelError(ParallelError, ValueError):
    """The arrays of a model must stand in NNX Variables, so that all of them are kept.

    A parameter is an ``nnx.Param``; a table or another constant an ``nnx.Variable``.
    """


class StackError(ParallelError, ValueError):
    """The blocks of a stack must be alike and must not share arrays."""


class StateStructureError(ParallelError, ValueError):
    """A model must keep the structure, shapes and dtypes of its arrays in a step."""


class LossError(ParallelError, ValueError):
    """A loss returns a scalar or a ``Mean``, and perhaps a dict of metrics with it."""


class NonFiniteLossError(ParallelError, ArithmeticError):
    """The loss of every step must be finite; training stops at the first that is not.

    Only float16's loss scaling skips a step by itself.
    """


class DataError(ParallelError, ValueError):
    """Training data is an iterable of pytrees of numeric arrays that JAX can hold.

    Integers must fit the 32 bits that JAX keeps by default, and the position of a
    resumable iterator must be made of what JSON can hold.
    """


class BatchShapeError(DataError):
    """Dim 0 of every array in a batch is the rows, and shapes stay the same in a run.

    The number of rows must be a multiple of ``num_microbatches`` times the sizes of the
    mesh axes that shard the batch.
    """


class DataExhaustedError(DataError):
    """Training data must hold a batch for every step of the run."""


class LogFileError(ParallelError, ValueError):
    """A JSON lines logger appends only to files whose every line it could have written.

    It cuts the lines of a run that died, and must not cut another program's file.
    """


class CheckpointError(ParallelError, ValueError):
    """Checkpoints hold groups of ``jax.Array`` by path and metadata that JSON can hold.

    Their steps ascend: a step is saved once, and none is saved before the latest.
    """


class CheckpointDirectoryError(ParallelError, OSError):
    """Checkpoints need a directory that exists or can be made, and can be written."""


class CheckpointSaveError(ParallelError, RuntimeError):
    """A save failed after it had begun; the checkpoints before it are whole.

    A failure in the background is raised by the next call, under its own step.
    """


class CheckpointReadError(ParallelError, RuntimeError):
    """A checkpoint must be whole and written by this library."""


class CheckpointUnavailableError(ParallelError, OSError):
    """A checkpoint is read with memory, file handles and a disk that answers.

    Where they fail nothing is known of the checkpoint: it does not count as damaged.
    """


class CheckpointDamagedError(CheckpointReadError):
    """The arrays of a checkpoint must have the fingerprints that were saved with them.

    Whoever changes them in place makes a file that reads well and holds other values.
    """


class CheckpointNotFoundError(ParallelError, FileNotFoundError):
    """A step must have been saved, and kept, to be read."""


class CheckpointMismatchError(ParallelError, ValueError):
    """The arrays of a restored group must be those saved: paths, shapes and dtypes.

    Their shardings may differ in any way.
    """


class ProcessError(ParallelError, RuntimeError):
    """The processes of a run start together, and each takes part in every step."""


class DisagreementError(ParallelError, ValueError):
    """All processes of a run must run the same program on shares of the same shapes.

    JAX does not compare them: two programs that differ wait for one another for ever,
    or go on with different numbers.
    """


class ReplicaError(ParallelError, RuntimeError):
    """Copies of one array on several devices must hold the same bits."""


class ScheduleError(ParallelError, ValueError):
    """A pipeline schedule is a table that neighbouring stages can follow tick by tick.

    Every stage takes every microbatch once, in order, and no slot comes before what
    it needs: what a stage sends in one tick arrives in the next.
    """


class PipelineError(ParallelError, ValueError):
    """A pipeline spreads the layers of one ``Stack``, called once, over its stages.

    The layers divide by stages times chunks. The call stands in the loss itself, inside
    no transform, and nothing but the blocks uses the layers' parameters and variables.
    """
