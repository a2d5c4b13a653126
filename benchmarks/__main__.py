"""``python -m benchmarks NAME`` runs a benchmark on 8 simulated devices.

Without NAME it lists the benchmarks.

The table goes to standard output, and with ``--json PATH`` to a file too, together with
the command, the hardware and the versions.
"""

import argparse
import importlib
import sys

import jax

NAMES = {
    "overhead": "the Trainer's step against the same step written by hand",
    "first_step": "the time to the first step against plain nnx.jit on one device",
    "imports": "the time to import this library, after the libraries that it needs",
    "sharded_jit": "sharded_jit against jax.jit with the same shardings",
    "overlap": "bytes that a TPU's schedule overlaps with matmuls; compiled, not run",
    "maxtext": "the compiled step next to MaxText's (--python PATH has it); not run",
    "long_sequences": "memory and the ring's overlap on TPUs; compiled, not run",
    "experts": "memory and exchanges of mixtures of experts on TPUs; compiled, not run",
    "options": "bytes that options of the TPU compiler hide; compiled, not run",
    "memory": "memory of 20 steps by the formulas of plan and by the compiler",
    "published": "predicted speeds of TPUs against published ones; compiled, not run",
    "weights": "2 GB read by 1, 2 and 4 processes (--python PATH adds transformers)",
    "families": "logits of folders by transformers under strategies, beside its logits",
    "vision": "outputs of folders by transformers and timm, beside theirs",
    "fsdp": "FSDP against activations constrained by hand, and against none",
    "eight_bit": "a GPT trained in 8 bits, and TPU steps (--full); compiled, not run",
    "muon": "FLOPs and bytes of Muon over the least, and Optax's; compiled, not run",
    "faults": "a run killed at random moments, --rounds times",
    "copies": "machines of a run with copies in memory die, --rounds times",
    "integrity": "the cost of checksums, checks and asynchronous saves",
    "verification": "injected faults that verify and replays name, and their cost",
    "pipeline": "pipeline schedules: simulated, compiled and measured",
    "peers": "steps by hand, with nnx.jit and scalax (needs the extra `bench`)",
    "scaling": "CPU time and bytes over 1, 2, 4 and 8 devices",
    "gpu": "a GPT on one GPU against PyTorch (needs both; --tiny needs neither)",
    "strangers": "public models, unchanged, beside plain nnx.jit; --rounds of them",
    "mistakes": "mistakes of users, by whether a message says what to change",
    "grouped": "experts on one GPU against PyTorch's grouped products, likewise",
}

MODULES = {"peers": "compare"}
"""Module names that differ from their benchmarks: `benchmarks.peers` has the steps."""


def main() -> int:
    """Runs the named benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="\n".join(f"{name}: {what}" for name, what in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=NAMES)
    parser.add_argument("--rounds", type=int, help="interleaved rounds of steps")
    parser.add_argument(
        "--full", action="store_true", help="pipeline, maxtext: all cases"
    )
    parser.add_argument("--tiny", action="store_true", help="gpu, grouped, maxtext")
    parser.add_argument(
        "--python", help="maxtext, weights: python of the other library"
    )
    parser.add_argument("--json", metavar="PATH", help="write the figures to a file")
    options = parser.parse_args()
    if options.name is None:
        parser.print_help()
        return 2
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    module = MODULES.get(options.name, options.name)
    benchmark = importlib.import_module(f"benchmarks.{module}")
    given = {
        "rounds": options.rounds,
        "full": options.full,
        "tiny": options.tiny,
        "python": options.python,
    }
    table = benchmark.measure(**{name: value for name, value in given.items() if value})
    table.show()
    if options.json:
        table.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
