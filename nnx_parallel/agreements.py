"""What processes compare before the first step of a fit."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from nnx_parallel.distributed import agree, exchange, hash_code, versions
from nnx_parallel.errors import DisagreementError
from nnx_parallel.sharding.optimizer import state_path
from nnx_parallel.state import StatePlan


def agree_on_run(
    plan: StatePlan, loss: Callable, settings: dict[str, Any], step: int
) -> None:
    """Checks that all processes are about to continue the same run.

    Args:
        plan: The model's structure and the place of every array.
        loss: The user's loss.
        settings: What else must be the same, by name, as JSON can hold it.
        step: The step from which the fit starts.

    Raises:
        DisagreementError: On all processes; it names the process, the field and both
            values.
    """
    if jax.process_count() == 1:
        return
    mesh = plan.layout.mesh
    places = [f"{d.process_index}:{d.id}" for d in mesh.devices.flat]
    arrays = jax.tree_util.tree_leaves_with_path(plan.abstract)
    fields = {
        **{f"version of {name}": found for name, found in versions().items()},
        **settings,
        "devices in the mesh's order": " ".join(places),
        "step to start from": step,
        "loss": hash_code(loss),
        "optimizer": str(jax.tree.structure(plan.abstract.opt_state)),
        **{
            state_path(path): f"{x.dtype}{list(x.shape)} {x.sharding.spec}"
            for path, x in arrays
        },
    }
    agree("run", fields)


def agree_on_program(lowered: jax.stages.Lowered) -> None:
    """Checks that all processes are about to run the same program.

    Args:
        lowered: The step, not yet compiled.

    Raises:
        DisagreementError: On all processes.
    """
    if jax.process_count() == 1:
        return
    text = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:12]
    agree(
        "compiled step (model, loss or optimizer differ in their code or constants)",
        {"program": text},
    )


def agree_on_batch(batch: Any) -> None:
    """Checks that all processes hold their parts of one global batch.

    Args:
        batch: The first batch, placed.

    Raises:
        DisagreementError: On all processes.

    Warns:
        UserWarning: If two processes have given the same rows as different parts of
            the batch.
    """
    if jax.process_count() == 1:
        return
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    agree(
        "first batch",
        {
            f"batch{jax.tree_util.keystr(path)}": f"{x.dtype}{list(x.shape)} (global)"
            for path, x in leaves
        },
    )
    _compare_rows(batch)


def _compare_rows(batch: Any) -> None:
    digest = hashlib.sha256()
    rows: set[str] = set()
    for x in jax.tree.leaves(batch):
        for shard in sorted(x.addressable_shards, key=lambda s: str(s.index)):
            rows.add(str(shard.index[:1]))
            digest.update(np.asarray(shard.data).tobytes())
    found = exchange("rows of the first batch", [sorted(rows), digest.hexdigest()])
    for process, (part, value) in enumerate(found):
        for other, (other_part, other_value) in enumerate(found[:process]):
            if part == other_part and value != other_value:
                raise DisagreementError(
                    f"Processes {other} and {process} hold the same part of the batch "
                    "but gave different rows. Processes whose trainer.data_share is "
                    "equal must read the same data in the same order."
                )
            if part != other_part and value == other_value and process == 1:
                warnings.warn(
                    f"Processes {other} and {process} gave the same rows as different "
                    "parts of the first batch. Each process gives its share: the part "
                    "that trainer.data_share = (index, count) names.",
                    stacklevel=2,
                )
