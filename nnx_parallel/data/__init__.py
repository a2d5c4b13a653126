"""Batches: pulled, checked and placed ahead of the step that needs them."""

from nnx_parallel.data.agreement import Lockstep as Lockstep
from nnx_parallel.data.batches import check_batch as check_batch
from nnx_parallel.data.batches import check_divisible as check_divisible
from nnx_parallel.data.batches import data_share as data_share
from nnx_parallel.data.batches import own_array as own_array
from nnx_parallel.data.batches import place_batch as place_batch
from nnx_parallel.data.position import Position as Position
from nnx_parallel.data.prefetch import Feed as Feed
from nnx_parallel.data.prefetch import Item as Item
from nnx_parallel.data.prefetch import Resumable as Resumable
from nnx_parallel.data.prefetch import check_data as check_data
from nnx_parallel.data.prefetch import decode_state as decode_state
from nnx_parallel.data.prefetch import encode_state as encode_state
from nnx_parallel.data.prefetch import is_one_shot as is_one_shot
