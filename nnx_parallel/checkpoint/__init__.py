"""Checkpoints that do not depend on a strategy: arrays in groups, and metadata.

A group is a flat dict, ``{"blocks.mlp.up.kernel": array, ...}``; a checkpoint holds
several (``model``, ``optimizer``, ...) under one step. Shapes are global, so that any
strategy on any number of devices can read another strategy's checkpoint. A save copies
the arrays to the host and returns; the files are written in the background, and the
checkpoint appears complete or not at all.

A run has one `CheckpointManager`. Any number of `CheckpointReader` objects can read the
directory at the same time.
"""

from nnx_parallel.checkpoint.contents import StoredCheckpoint as StoredCheckpoint
from nnx_parallel.checkpoint.manager import CheckpointManager as CheckpointManager
from nnx_parallel.checkpoint.options import Checkpoint as Checkpoint
from nnx_parallel.checkpoint.reader import CheckpointReader as CheckpointReader
