"""Runs the command line for ``python -m nnx_parallel``."""

import sys

from nnx_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
