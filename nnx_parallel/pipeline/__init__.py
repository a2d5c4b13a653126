"""Pipeline schedules as data: tables of ticks, what they cost, what they keep."""

from nnx_parallel.pipeline.buffers import Buffers as Buffers
from nnx_parallel.pipeline.buffers import check_buffers as check_buffers
from nnx_parallel.pipeline.buffers import plan_buffers as plan_buffers
from nnx_parallel.pipeline.draw import Drawing as Drawing
from nnx_parallel.pipeline.schedules import Fixed as Fixed
from nnx_parallel.pipeline.schedules import GPipe as GPipe
from nnx_parallel.pipeline.schedules import Interleaved as Interleaved
from nnx_parallel.pipeline.schedules import OneFOneB as OneFOneB
from nnx_parallel.pipeline.schedules import Schedule as Schedule
from nnx_parallel.pipeline.schedules import ZeroBubble as ZeroBubble
from nnx_parallel.pipeline.simulate import Simulation as Simulation
from nnx_parallel.pipeline.slots import Slot as Slot
from nnx_parallel.pipeline.slots import Slots as Slots
from nnx_parallel.pipeline.table import Table as Table
