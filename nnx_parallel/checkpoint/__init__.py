"""Checkpoints whose files know no strategy: arrays by path in groups, and metadata.

A group is a flat dict, ``{"blocks.mlp.up.kernel": array, ...}``; a checkpoint holds
several (``params``, ``optimizer``, ...) under one step. Shapes are global, so that any
strategy on any number of devices can read what another wrote. A save copies the
arrays, returns, and writes behind the training; the files appear all at once or never.
"""

from nnx_parallel.checkpoint.checkpointer import Checkpointer as Checkpointer
from nnx_parallel.checkpoint.contents import AbstractGroups as AbstractGroups
from nnx_parallel.checkpoint.contents import Groups as Groups
from nnx_parallel.checkpoint.contents import StoredCheckpoint as StoredCheckpoint
from nnx_parallel.checkpoint.manager import Storage as Storage
from nnx_parallel.checkpoint.options import Checkpoint as Checkpoint
