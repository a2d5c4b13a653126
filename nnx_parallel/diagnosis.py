"""What went wrong, from the state that a run has left."""

from __future__ import annotations

from nnx_parallel.checkpoint import Storage
from nnx_parallel.engine import Engine


def explain_non_finite(engine: Engine, storage: Storage) -> str:
    """What the state holds that is not finite, and the way back."""
    step = int(engine.state.step)
    bad = engine.non_finite_arrays()
    saved = storage.latest_step
    way_back = "no checkpoint" if saved is None else f"a checkpoint of step {saved}"
    kept = f"Nothing was saved from the bad step on; there is {way_back}."
    wrong = [found for found in engine.label_ranges() if not found.is_valid]
    if wrong:
        found = wrong[0]
        return (
            f"The first batch has labels from {found.lowest} to {found.highest}, but "
            f"the logits have {found.num_classes} classes: valid labels are 0 to "
            f"{found.num_classes - 1}. Give labels to leave out a weight of 0. {kept}"
        )
    if not bad:
        return (
            f"All arrays are finite at step {step}, the last one done. {kept} "
            "Look at the batch of the bad step, and at what the loss does with it."
        )
    shown = ", ".join(f"`{path}`" for path in bad[:5])
    return (
        f"Not finite at step {step}, the last one done: {shown} ({len(bad)} "
        f"arrays). {kept} Lower the learning rate, clip with "
        "optax.clip_by_global_norm, or look at the batches of these steps."
    )
