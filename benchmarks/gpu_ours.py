"""This library's side of the comparison on a GPU."""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp
import optax

from benchmarks.gpu_task import Task
from nnx_parallel import DataParallel, Precision, Trainer
from nnx_parallel.models import GPT, next_token_loss

_product = jax.jit(jnp.matmul)


class Ours:
    """A Trainer on one device, with its compiled step.

    Args:
        task: The task to train.
        is_packed: Whether rows are packed with several documents, where no token
            attends to another document.
    """

    def __init__(self, task: Task, *, is_packed: bool = False) -> None:
        trainer = Trainer(
            lambda rngs: GPT(task.model, rngs=rngs),
            optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1),
            next_token_loss,
            strategy=DataParallel(),
            devices=jax.devices()[:1],
            precision=Precision.mixed_bfloat16(),
            loggers=(),
        )
        batch = {"tokens": task.tokens()}
        if is_packed:
            batch["segments"] = task.documents()
        self._batch = trainer.shard_batch(batch)
        self._step, self._state = trainer.train_step, trainer.state
        self._size = task.product_size

    def train(self, num_steps: int) -> float:
        """Dispatches the steps, and waits for the last."""
        loss = jnp.zeros(())
        for _ in range(num_steps):
            self._state, metrics = self._step(self._state, self._batch)
            loss = metrics["loss"]
        jax.block_until_ready(self._state)
        return float(loss)

    def multiply(self, count: int) -> None:
        """Multiplies the same two matrices, and holds one result at a time."""
        product = None
        for _ in range(count):
            product = _product(*self._matrices)
        jax.block_until_ready(product)

    @cached_property
    def _matrices(self) -> tuple[jax.Array, ...]:
        shape = (self._size, self._size)
        keys = jax.random.split(jax.random.key(0))
        return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)

    def peak_bytes(self) -> int | None:
        """Peak memory of XLA's allocator."""
        stats = jax.devices()[0].memory_stats()
        return None if stats is None else stats["peak_bytes_in_use"]
