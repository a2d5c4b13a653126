"""``python -m demo``: trains, resumes, restores on other devices, and samples text."""

import argparse
import sys

from nnx_parallel import simulate_devices


def main() -> int:
    """Runs the demo on 8 simulated CPU devices."""
    simulate_devices(8)
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
        print("\nInterrupted. Start it again: it continues from the last checkpoint.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
