"""Pictures: which device holds what, and which stage runs what when."""

from nnx_parallel.visualize.draw import visualize as visualize
from nnx_parallel.visualize.picture import Picture as Picture
