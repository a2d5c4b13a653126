"""Products in 8 bits: the loss of a small model, and compiled steps of a large one.

The demo's GPT is trained with each recipe, from the same start on the same batches. The
steps of Llama 2 7B and single products are compiled for TPUs and not run: their cycles
are the compiler's estimates.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.maxtext import OPTIONS, llama2_7b, read
from benchmarks.timing import Table
from benchmarks.tpu_steps import Case, compile_step, figures_of
from demo.corpus import RandomWindows, spread_windows, standard_library
from demo.train import Settings, bits_per_byte, with_muon
from nnx_parallel import FSDP, DataParallel, Precision, Trainer
from nnx_parallel.audit.transfers import compile_with_text
from nnx_parallel.models import GPT
from nnx_parallel.plan import Topology

RECIPES = {
    "bfloat16": Precision.mixed_bfloat16(),
    "int8": Precision.int8(),
    "float8": Precision.fp8(),
    "mxfp8": Precision.mxfp8(),
    "int8, forward only": Precision.int8(gradient=False),
    "float8, e5m2 gradients": Precision.fp8(gradient="float8_e5m2"),
}
NUM_STEPS, ROWS = 500, 4


CASES = {
    f"v5p {recipe}": Case(
        config=lambda: replace(llama2_7b(), num_layers=4),
        strategy=FSDP(64),
        topology="v5p:4x4x4",
        rows=128,
        precision=RECIPES[recipe],
        options=OPTIONS,
    )
    for recipe in ("bfloat16", "int8")
}
"""Steps of 4 layers of Llama 2 7B on 64 chips, by recipe."""

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "v7x:2x2x1")
OPERANDS = {
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
    "int8": ("int8", "int8", "int32"),
    "float8": ("float8_e4m3fn", "float8_e4m3fn", "float32"),
}
"""The dtypes of both operands and of the result of a product."""


def measure(rounds: int = 1, *, full: bool = False, tiny: bool = False) -> Table:
    """The held-out bits per byte of each recipe, and figures of compiled steps.

    Args:
        rounds: Has no effect.
        full: The compiled steps too: each takes a minute.
        tiny: Only a few training steps.
    """
    del rounds
    table = Table("products in 8 bits: the demo's GPT, and Llama 2 7B (not run)")
    num_steps = 2 if tiny else NUM_STEPS
    bits = {name: train(precision, num_steps) for name, precision in RECIPES.items()}
    for name, found in bits.items():
        change = found / bits["bfloat16"] - 1
        text = f"{found:.4f} bits per byte ({change:+.2%})"
        table.add(f"{name}: held out after {num_steps} steps", text)
    for chip in () if tiny else CHIPS:
        cycles = figures_of(__spec__.name, chip)
        text = ", ".join(f"{k} {n / 1e3:.4g} thousand" for k, n in cycles.items())
        table.add(f"{chip.split(':')[0]}: estimated cycles of a product", text)
    for name in CASES if full else ():
        found = figures_of(__spec__.name, name)
        table.add(f"{name}: estimated cycles", f"{found['cycles'] / 1e6:.4g} million")
        table.add(f"{name}: a chip sends", f"{found['sent'] / 2**30:.3g} GiB")
        share = found["at peak"] / found["cycles"]
        table.add(f"{name}: share of products at peak", f"{share:.1%}")
    return table


def train(precision: Precision, num_steps: int) -> float:
    """Trains the demo's GPT; returns the bits per byte of held-out text."""
    settings, corpus = Settings(num_steps=num_steps), standard_library()
    sizes = {"global_batch_size": ROWS, "seq_len": settings.seq_len}
    batches = RandomWindows(text=corpus.train, **sizes)
    held_out = spread_windows(corpus.valid, num_batches=16, **sizes)
    trainer = Trainer(
        lambda rngs: GPT(settings.model, rngs=rngs),
        lambda model: with_muon(model, num_steps),
        bits_per_byte,
        strategy=DataParallel(1),
        devices=jax.devices()[:1],
        precision=precision,
        loggers=(),
    )
    trainer.fit(batches, num_steps)
    return float(trainer.evaluate(held_out)["loss"])


def cycles_of_products(topology: str) -> dict[str, int]:
    """Estimated cycles of (8192, 4096) times (4096, 4096) on one chip, by dtype."""
    place = SingleDeviceSharding(Topology.parse(topology).described()[0])
    found = {}
    for name, (left, right, out) in OPERANDS.items():
        x = jax.ShapeDtypeStruct((8192, 4096), left, sharding=place)
        w = jax.ShapeDtypeStruct((4096, 4096), right, sharding=place)
        run = jax.jit(partial(jnp.matmul, preferred_element_type=out))
        _, text = compile_with_text(run.lower(x, w))
        each = re.findall(r'"estimated_cycles":"(\d+)"', text)
        found[name] = sum(map(int, each))
    return found


def compile_and_read(case: Case) -> dict[str, float]:
    """A step of this library, compiled and read in this process."""
    topology = Topology.parse(case.topology)
    text, found = compile_step(case)
    devices = case.strategy.make_mesh(topology.described()).devices.flat
    return found | read(text, topology, [*devices])


if __name__ == "__main__":
    name = sys.argv[1]
    is_chip = name in CHIPS
    print(
        json.dumps(
            cycles_of_products(name) if is_chip else compile_and_read(CASES[name])
        )
    )
