"""Pipeline parallelism: the layers of a `Stack` are spread over stages."""

from dataclasses import dataclass, field
from typing import get_args

from nnx_parallel.errors import suggests_names
from nnx_parallel.pipeline.run import Gather, PipelineSchedule
from nnx_parallel.pipeline.stage import Stash
from nnx_parallel.schedules.schedules import Fixed, OneFOneB, Schedule
from nnx_parallel.schedules.table import Table
from nnx_parallel.sharding.layout import Claims
from nnx_parallel.strategies.base import Strategy


@suggests_names
@dataclass(frozen=True, repr=False)
class Pipeline(Strategy):
    """Pipeline parallelism: stages of consecutive layers, run on many microbatches.

    The layers of one `Stack` of the model are spread over the mesh axis ``pipe``. All
    devices together compute the parts of the loss before and after this stack. These
    parts may call other stacks (DeepSeek-V3's first layers, an encoder). The part
    before the stack runs twice, the second time for the backward pass. Loss and
    gradients are the same as on a single device. Set the Trainer's ``num_microbatches``
    to several times ``size``: more microbatches make the schedule more efficient.

    Attributes:
        size: Number of stages. If it does not divide the number of layers, some stages
            have one layer less and wait for the others; `Table.simulate` gives the
            cost. In this case each array of the stack is split along another dim, and a
            device stores ``1 / size`` of it. Once per step the device sends its part
            (in the dtype of the computation) to the stages that run these layers, and
            receives the gradients of its part. During the step, each stage holds a copy
            of its layers' parameters.
        schedule: `GPipe`, `OneFOneB`, `Interleaved` or `ZeroBubble`, which cite their
            papers; another `Schedule`; or a `Table`.
        stash: The values that a stage keeps for a microbatch between the forward and
            the backward slot. ``policy``: the values that the remat policy saves
            (``none``: all activations of its layers; ``full``: the input of each
            layer). ``inputs``: only the input of the stage. The backward slot runs the
            layers again, so a stage holds the policy's values for only one microbatch
            at a time.
        gather: How often FSDP's shards of a stage's weights are gathered.
            ``microbatch``: layer by layer in every slot; a device holds the gathered
            weights of one layer. ``step``: once per step; a device holds the gathered
            weights of its stage (parameters / size, in the compute dtype), and sends
            them once instead of twice per microbatch. With both values, gradients are
            reduce-scattered once per microbatch.
        stack: Path of the stack that runs in stages, such as ``"decoder.blocks"``;
            ``None``: the stack with the most parameters.

    Example:
        >>> from nnx_parallel import Composite, FSDP, TensorParallel
        >>> strategy = Composite(Pipeline(2), TensorParallel(2), FSDP())
        >>> dict(strategy.make_mesh().shape)
        {'pipe': 2, 'fsdp': 2, 'tensor': 2}
    """

    size: int
    schedule: Schedule | Table = field(default_factory=OneFOneB)
    stash: Stash = "policy"
    gather: Gather = "microbatch"
    stack: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(
                f"Pipeline({self.size!r}): the number of stages is an integer of at "
                "least 1, such as Pipeline(4)."
            )
        if isinstance(self.schedule, Table):
            # A table is made for one number of stages and one number of microbatches.
            # `Fixed` checks both.
            object.__setattr__(self, "schedule", Fixed(self.schedule))
        if not isinstance(self.schedule, Schedule):
            raise TypeError(
                f"Pipeline(schedule={self.schedule!r}): it must be a Schedule, such as "
                "OneFOneB() or Interleaved(chunks=2), or a Table."
            )
        if self.stack is not None and not isinstance(self.stack, str):
            raise TypeError(
                f"Pipeline(stack={self.stack!r}): it must be the path of a Stack of "
                "the model, such as 'blocks', or None for the Stack with the most "
                "parameters."
            )
        for name, kind in (("stash", Stash), ("gather", Gather)):
            own, valid = getattr(self, name), list(get_args(kind))
            if own not in valid:
                raise ValueError(f"Pipeline({name}={own!r}): valid values are {valid}.")

    def claims(self) -> Claims:
        """``pipe`` splits the layers, and a schedule runs them."""
        assert isinstance(self.schedule, Schedule)
        execution = PipelineSchedule(
            axis="pipe",
            schedule=self.schedule,
            stash=self.stash,
            gather=self.gather,
            stack=self.stack,
        )
        return Claims(
            axis_sizes={"pipe": self.size},
            # With every schedule a stage stores a block of consecutive layers.
            logical={"layers": "pipe"},
            execution=execution,
        )
