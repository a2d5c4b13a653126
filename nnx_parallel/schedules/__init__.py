"""Pipeline schedules as data: tables of ticks, and their costs and memory."""

from nnx_parallel.schedules.schedules import Fixed as Fixed
from nnx_parallel.schedules.schedules import GPipe as GPipe
from nnx_parallel.schedules.schedules import Interleaved as Interleaved
from nnx_parallel.schedules.schedules import OneFOneB as OneFOneB
from nnx_parallel.schedules.schedules import Schedule as Schedule
from nnx_parallel.schedules.schedules import ZeroBubble as ZeroBubble
from nnx_parallel.schedules.simulate import Simulation as Simulation
from nnx_parallel.schedules.slots import Slot as Slot
from nnx_parallel.schedules.slots import Slots as Slots
from nnx_parallel.schedules.table import Buffers as Buffers
from nnx_parallel.schedules.table import Table as Table
from nnx_parallel.schedules.table import plan_buffers as plan_buffers
