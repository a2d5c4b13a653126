"""Batches: pulled, checked and placed ahead of the step that needs them."""

from nnx_parallel.data.batches import check_batch as check_batch
from nnx_parallel.data.batches import check_divisible as check_divisible
from nnx_parallel.data.encoding import decode_state as decode_state
from nnx_parallel.data.encoding import encode_state as encode_state
from nnx_parallel.data.feed import Feed as Feed
from nnx_parallel.data.feed import Item as Item
from nnx_parallel.data.feed import Resumable as Resumable
from nnx_parallel.data.feed import check_data as check_data
from nnx_parallel.data.feed import is_one_shot as is_one_shot
from nnx_parallel.data.lockstep import Lockstep as Lockstep
from nnx_parallel.data.place import data_share as data_share
from nnx_parallel.data.place import own_array as own_array
from nnx_parallel.data.place import place_batch as place_batch
from nnx_parallel.data.position import Position as Position
