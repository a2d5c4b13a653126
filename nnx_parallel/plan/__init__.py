"""`plan`: estimates a step's cost on absent devices, and finds the best strategy.

`plan` takes a Trainer, the shapes of a batch and the name of a topology. It returns a
`Plan`: candidates, the best first, with their memory and time. Start reading in
`search`.
"""

from nnx_parallel.plan.calibration import calibrate as calibrate
from nnx_parallel.plan.candidates import Candidate as Candidate
from nnx_parallel.plan.hardware import HARDWARE as HARDWARE
from nnx_parallel.plan.hardware import Hardware as Hardware
from nnx_parallel.plan.hardware import Topology as Topology
from nnx_parallel.plan.pictures import draw_memory as draw_memory
from nnx_parallel.plan.pictures import draw_roofline as draw_roofline
from nnx_parallel.plan.pictures import draw_timeline as draw_timeline
from nnx_parallel.plan.pictures import render as render
from nnx_parallel.plan.pictures import save as save
from nnx_parallel.plan.remedies import find_remedies as find_remedies
from nnx_parallel.plan.report import Entry as Entry
from nnx_parallel.plan.report import Plan as Plan
from nnx_parallel.plan.roofline import Assumptions as Assumptions
from nnx_parallel.plan.search import plan as plan
from nnx_parallel.visualize.figures import Figure as Figure
