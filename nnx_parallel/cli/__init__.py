"""``python -m nnx_parallel``: `launch` processes, `inspect` checkpoints."""

from nnx_parallel.cli.parse import main as main
