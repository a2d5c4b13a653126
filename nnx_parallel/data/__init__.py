"""Batches: reads, checks and places them before the step that needs them."""

from nnx_parallel.data.batches import BatchAgreement as BatchAgreement
from nnx_parallel.data.batches import check_batch as check_batch
from nnx_parallel.data.batches import check_divisible as check_divisible
from nnx_parallel.data.batches import copy_if_writeable as copy_if_writeable
from nnx_parallel.data.batches import data_share as data_share
from nnx_parallel.data.batches import place_batch as place_batch
from nnx_parallel.data.position import Resumable as Resumable
from nnx_parallel.data.position import decode_state as decode_state
from nnx_parallel.data.position import encode_state as encode_state
from nnx_parallel.data.position import is_one_shot as is_one_shot
from nnx_parallel.data.prefetch import PlacedBatch as PlacedBatch
from nnx_parallel.data.prefetch import PrefetchIterator as PrefetchIterator
from nnx_parallel.data.prefetch import check_data as check_data
from nnx_parallel.data.reading import DataState as DataState
from nnx_parallel.data.rows import Pad as Pad
from nnx_parallel.data.rows import Shared as Shared
