"""How the processes of a run start, compare values, and end together."""

from nnx_parallel.distributed.agreement import allgather_object as allgather_object
from nnx_parallel.distributed.agreement import check_consistent as check_consistent
from nnx_parallel.distributed.agreement import reserve_allgather as reserve_allgather
from nnx_parallel.distributed.agreement import strip_addresses as strip_addresses
from nnx_parallel.distributed.agreement import versions as versions
from nnx_parallel.distributed.initialize import initialize as initialize
from nnx_parallel.distributed.messages import join as join
from nnx_parallel.distributed.runtime import HUNG as HUNG
from nnx_parallel.distributed.runtime import PEER_LOST as PEER_LOST
from nnx_parallel.distributed.runtime import PREEMPTED as PREEMPTED
from nnx_parallel.distributed.runtime import Termination as Termination
from nnx_parallel.distributed.runtime import Watchdog as Watchdog
from nnx_parallel.distributed.runtime import print_once as print_once
