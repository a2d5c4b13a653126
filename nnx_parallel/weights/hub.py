"""Uploads a model's folder to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from nnx_parallel.distributed.agreement import allgather_object
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
        WeightsError: If huggingface-hub is not installed; if the repository cannot be
            created, for example without a token; or as in `save_pretrained`. An error
            of the upload is raised on process 0.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise WeightsError(
            "push_to_hub needs huggingface-hub: pip install 'nnx-parallel[hub]'."
        ) from None
    api, is_first = HfApi(), jax.process_index() == 0
    error: Exception | None = None
    if is_first:
        try:
            api.create_repo(repository, private=private, exist_ok=True)
        except Exception as found:  # huggingface-hub has many classes of errors
            error = found
    # A missing token must not cost the whole export, nor leave processes that wait.
    text, *_ = allgather_object("push_to_hub", error and repr(error))
    if text is not None:
        message = f"Process 0 cannot create the repository {repository!r}: {text}"
        raise WeightsError(message) from error
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        save_pretrained(folder, model, **options)
        if is_first:
            api.upload_folder(repo_id=repository, folder_path=folder)
