"""Uploads a model's folder to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from nnx_parallel.errors import WeightsError
from nnx_parallel.weights.export import save_pretrained


def push_to_hub(
    repository: str,
    model: nnx.Module,
    *,
    private: bool | None = None,
    **options: Any,
) -> None:
    """Writes a folder with `save_pretrained`, and uploads it to the Hugging Face hub.

    The extra ``hub`` installs huggingface-hub, which finds the token of
    ``hf auth login`` or of the variable ``HF_TOKEN``. In a run of several processes,
    all processes must call this function, and process 0 writes and uploads.

    Args:
        repository: Name of the repository, ``org/model``. It is created if it does not
            exist.
        model: The model, such as ``trainer.eval_model``.
        private: Whether a new repository is private; ``None`` takes the default of the
            organisation.
        options: Further arguments of `save_pretrained`, such as ``source`` or
            ``dtype``.

    Raises:
        WeightsError: If huggingface-hub is not installed, or as in `save_pretrained`.
    """
    try:
        from huggingface_hub import HfApi  # pyright: ignore
    except ImportError:
        raise WeightsError(
            "push_to_hub needs huggingface-hub: pip install 'nnx-parallel[hub]'."
        ) from None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        save_pretrained(folder, model, **options)
        if jax.process_index() == 0:
            api = HfApi()
            api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder)
