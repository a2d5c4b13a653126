"""How a strategy wants the step pipelined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nnx_parallel.pipeline.schedules import Schedule

Stash = Literal["policy", "inputs"]
Gather = Literal["microbatch", "step"]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What `Pipeline` says, for the code that runs the step.

    Attributes:
        axis: Mesh axis of the stages.
        schedule: Makes the table.
        stash: What a stage keeps of a microbatch between its slots.
        gather: How often weights that FSDP shards are gathered.
    """

    axis: str
    schedule: Schedule
    stash: Stash
    gather: Gather
