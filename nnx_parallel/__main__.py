"""``python -m nnx_parallel``: `launch`, `inspect` and `doctor`."""

import sys

from nnx_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())
