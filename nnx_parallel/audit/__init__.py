"""Audits a compiled step: FLOPs, collectives with their bytes, and memory.

`audit` reads the program that XLA will run, on any backend, without running it.
"""

from nnx_parallel.audit.collectives import KINDS as KINDS
from nnx_parallel.audit.collectives import Collective as Collective
from nnx_parallel.audit.report import Report as Report
from nnx_parallel.audit.report import audit as audit
from nnx_parallel.audit.walk import Conditional as Conditional
