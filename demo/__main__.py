"""``python -m demo``: train, resume, restore elsewhere, sample."""

import argparse
import os
import sys

import jax


def main() -> int:
    """Runs the demo on 8 simulated CPU devices."""
    # All of this counts only before the first device is used. Simulated devices share
    # a pool of threads, 8 of them for 8 devices: collectives that wait in all of them
    # have been seen to wait for ever. Each device needs some to spare.
    os.environ.setdefault("PJRT_NPROC", "32")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from demo.train import STRATEGIES, Settings, run

    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="default",
        help="how the run is spread over the devices (default: %(default)s)",
    )
    strategy = STRATEGIES[parser.parse_args().strategy]()
    try:
        run(strategy, Settings())
    except KeyboardInterrupt:
        print("\nInterrupted. Start it again: it goes on from the last checkpoint.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
