"""Models in the style of public code train to the same numbers as in plain NNX.

Most models run under one strategy in `make test` or `make test-deep`. The full product
takes some minutes and is marked ``slow``.
"""

import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from nnx_parallel import (
    FSDP,
    Composite,
    DataParallel,
    Pipeline,
    Strategy,
    TensorParallel,
    Trainer,
)
from nnx_parallel.errors import PipelineError
from tests.parity.checks import assert_params_close
from tests.strangers import runs
from tests.strangers.cases import (
    CASES,
    NUM_STEPS,
    Case,
    make_batches,
    stacked,
    table,
    unstacked,
)
from tests.strangers.runs import Run, variables

# Some gradients are zero up to rounding, for example of a bias before batch statistics
# or of an attention key's bias. Adam would turn that rounding into full steps. This eps
# prevents it.
TX = optax.adam(1e-3, eps=1e-3)
BATCHES = make_batches()

STRATEGIES: dict[str, tuple[Strategy, int]] = {  # each with its number of devices
    "alone": (DataParallel(1), 1),
    "fsdp": (FSDP(min_size=0), 4),
    "tensor": (Composite(TensorParallel(2), FSDP(min_size=0)), 4),
    "pipeline": (Pipeline(2), 2),
}
# `test_path_names` also tests the Llama and its pipeline. The U-Net and the decoder
# take half of the total compile time, so only the full product has them.
QUICK = {
    "gemma": "tensor",
    "clip": "tensor",
    "vae": "fsdp",
    "critics": "tensor",
}
DEEP = {
    "lm1b": "tensor",
    "cnn": "fsdp",
    "lora": "tensor",
    "vit": "tensor",
    "lstm": "fsdp",
    "mamba": "tensor",
    "scan": "fsdp",
}


pytestmark = [
    # Flax and this library warn about a table outside of Variables, and about `sow`.
    pytest.mark.filterwarnings("ignore:Arrays in no Variable"),
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _as_others_run_them() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"):
        yield


@cache
def plain(name: str) -> Run:
    """Losses and all variables after training with plain NNX."""
    return runs.plain(CASES[name], TX)


def make_trainer(case: Case, name: str, build: Any = None) -> Trainer:
    strategy, num_devices = STRATEGIES[name]
    return Trainer(
        build or case.build,
        TX,
        case.loss,
        strategy=Composite(strategy, rules=case.rules) if case.rules else strategy,
        names=case.names,
        wrt=case.wrt,
        num_microbatches=2 if name == "pipeline" else 1,
        devices=jax.devices()[:num_devices],
        loggers=(),
    )


def pairs() -> Iterator[Any]:
    for name, case in CASES.items():
        for strategy in STRATEGIES:
            if strategy == "pipeline" and not case.blocks:
                continue
            marks = () if QUICK.get(name) == strategy else pytest.mark.slow
            marks = pytest.mark.deep if DEEP.get(name) == strategy else marks
            yield pytest.param(name, strategy, marks=marks, id=f"{name}-{strategy}")


@pytest.mark.parametrize(("name", "strategy"), [*pairs()])
def test_training_matches_plain_nnx(name: str, strategy: str) -> None:
    case = CASES[name]
    is_stacked = strategy == "pipeline"
    build = partial(stacked, case) if is_stacked else case.build
    trainer = make_trainer(case, strategy, build)
    expected = plain(name)
    found = trainer.fit(BATCHES, NUM_STEPS)["loss"]
    np.testing.assert_allclose(found, expected.losses, rtol=1e-5)
    model = unstacked(case, trainer.model) if is_stacked else trainer.model
    assert_params_close(variables(model), expected.arrays)


@pytest.mark.parametrize("name", CASES)
def test_pipeline_error_names_missing_stack(name: str) -> None:
    blocks = CASES[name].blocks
    line = f"model.{blocks} = nnx.List([Stack.of(model.{blocks})]) is enough); or use"
    expected = line if blocks else "as Stack.of(blocks) does; or use"
    with pytest.raises(PipelineError, match="has no Stack.*" + re.escape(expected)):
        make_trainer(CASES[name], "pipeline")


def test_howto_lists_all_shapes() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto.md"
    assert "\n".join(table()) in page.read_text()
