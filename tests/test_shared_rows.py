"""Batch entries that all rows share: scheduled values, masks, tables."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, Composite, DataParallel, Pipeline, Trainer
from nnx_parallel.data import Shared, batches
from nnx_parallel.data.batches import Agreed, BatchAgreement
from nnx_parallel.errors import BatchShapeError, DataError
from nnx_parallel.layers import Stack
from tests.parity.runs import to_host

SEQ, WIDTH = 8, 16


class Block(nnx.Module):
    """Attention with a mask, and a residual connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.score = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqc,bkc->bqk", self.score(x), x)
        weights = jax.nn.softmax(jnp.where(mask[None], scores, -1e9))
        return x + weights @ self.value(x)


class Model(nnx.Module):
    """Blocks that share one mask."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = Stack(Block, 2, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return self.blocks(self.first(x), mask)


def loss(model: Any, batch: Any) -> jax.Array:
    out = model(batch["x"], batch["tables"]["mask"]) * batch["scale"]
    return (jnp.square(out - batch["y"]) * batch["tables"]["weights"]).mean()


X, Y = np.random.default_rng(0).normal(size=(2, 8, SEQ, WIDTH)).astype(np.float32)
TABLES = {
    # The mask has one row per position. It has as many rows as the batch, on purpose.
    "mask": np.tril(np.ones((SEQ, SEQ), bool)),
    "weights": np.linspace(0, 1, WIDTH, dtype=np.float32)[None, None],
}


def make_batch(scale: float = 0.5) -> dict:
    # Entries are sorted by name, so the shared entries come first.
    return {"scale": np.asarray(scale), "tables": Shared(TABLES), "x": X, "y": Y}


make_trainer = partial(
    Trainer,
    model=Model,
    optimizer=optax.sgd(0.1),
    loss=loss,
    strategy=FSDP(min_size=0),
    devices=jax.devices()[:4],
    loggers=(),
)


def raw(batch: dict) -> dict:
    """The batch in the form for plain NNX."""
    return batch | {"tables": TABLES}


def plain_losses(scales: list[float]) -> list[float]:
    """Losses in plain NNX."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    found = []
    for scale in scales:
        value, grads = nnx.value_and_grad(loss)(model, raw(make_batch(scale)))
        optimizer.update(model, grads)
        found.append(float(value))
    return found


STRATEGIES = {
    "data": DataParallel(),
    "pipeline": Composite(Pipeline(2), FSDP(min_size=0)),
}


@pytest.mark.parametrize(
    "name", ["data", pytest.param("pipeline", marks=pytest.mark.deep)]
)
def test_microbatches_receive_shared_entries_whole(name: str) -> None:
    trainer = make_trainer(strategy=STRATEGIES[name], num_microbatches=2)
    scales = [0.5, 0.25, 0.125]
    history = trainer.fit([make_batch(scale) for scale in scales], 3)
    np.testing.assert_allclose(history["loss"], plain_losses(scales), rtol=1e-5)
    # Shared entries also work in an evaluation, with rows that the devices do not
    # divide.
    part = make_batch() | {"x": X[:6], "y": Y[:6]}
    found, expected = trainer.evaluate([part])["loss"], loss(trainer.model, raw(part))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_predict_passes_shared_values() -> None:
    trainer = make_trainer()

    def function(model: Any, batch: Any) -> jax.Array:
        return model(batch["x"], batch["tables"]["mask"]) * batch["scale"]

    found = trainer.predict([make_batch()], function)
    expected = 0.5 * trainer.model(X, TABLES["mask"])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_shared_entries_are_replicated() -> None:
    placed = make_trainer().shard_batch(make_batch())
    assert placed["x"].sharding.shard_shape(X.shape) == (2, SEQ, WIDTH)
    shared = [placed["scale"], placed["tables"].value["mask"]]
    assert all(x.sharding.is_fully_replicated for x in shared)
    assert all(len(x.sharding.device_set) == 4 for x in shared)
    host = to_host({"mask": shared[1]})["mask"]
    np.testing.assert_array_equal(host, TABLES["mask"])


def test_changed_shape_of_shared_entry_raises() -> None:
    wider = {"mask": np.ones((SEQ, SEQ + 1), bool), "weights": TABLES["weights"]}
    batches = [make_batch(), make_batch() | {"tables": Shared(wider)}]
    message = "batch['tables'].value['mask'] of batch 1 has shape (8, 9)"
    with pytest.raises(BatchShapeError, match=re.escape(message)):
        make_trainer().fit(batches, 2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"mask": Shared(TABLES["mask"])}, "of type dict holds no arrays with rows"),
        (
            {"graph": Shared(TABLES)},
            "one large graph, its rows are the nodes that count in the loss: {'graph': "
            "Shared(graph), 'nodes': np.arange(num_nodes)}.",
        ),
        (
            {"x": X, "mask": Shared(0.5)},
            "batch['mask'].value of batch 0 has type",
        ),
        (
            {"x": X, "mask": Shared(np.array(2**40))},
            "holds 1099511627776. JAX",
        ),
    ],
)
def test_invalid_shared_entries_raise(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        make_trainer().fit([batch], 1)


class Graph(nnx.Module):
    """A convolution over the neighbours in a graph."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, graph: Any) -> jax.Array:
        sent = self.layer(graph["features"])[graph["senders"]]
        return jax.ops.segment_sum(sent, graph["receivers"], len(graph["features"]))


def test_rows_of_a_graph_are_its_nodes() -> None:
    rng = np.random.default_rng(1)
    graph = {
        "features": X[:, 0],
        "senders": rng.integers(0, 8, 13).astype(np.int32),
        "receivers": rng.integers(0, 8, 13).astype(np.int32),
    }
    nodes = np.arange(8, dtype=np.int32)

    def node_loss(model: Any, batch: Any) -> jax.Array:
        return jnp.square(model(batch["graph"])[batch["nodes"]] - 1).mean()

    batch = {"graph": Shared(graph), "nodes": nodes}
    trainer = make_trainer(model=Graph, loss=node_loss, num_microbatches=2)
    found = trainer.fit([batch] * 2, 2)["loss"]
    model = Graph(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for value in found:
        plain = {"graph": graph, "nodes": nodes}
        expected, grads = nnx.value_and_grad(node_loss)(model, plain)
        optimizer.update(model, grads)
        np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("rows", [2, 8])
def test_raw_key_is_never_taken_for_rows(rows: int) -> None:
    batch = {"x": X[:rows], "rng": np.asarray(jax.random.PRNGKey(0))}
    message = (
        "batch['rng'] of batch 0 is uint32 of shape (2,), like a raw PRNGKey. Give a "
        "key as jax.random.key(seed) or as nnx_parallel.data.Shared(key)"
    )
    with pytest.raises(DataError, match=re.escape(message)):
        make_trainer(devices=jax.devices()[:2]).fit([batch], 1)


def test_different_shared_values_on_processes_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = make_batch(0.25)

    def exchange(name: str, mine: list) -> list:
        theirs = [*mine[:3], batches.shared_checksums(other), *mine[4:]]
        return [mine, theirs]

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(batches, "allgather_object", exchange)
    message = (
        "Processes 0 and 1 have different values in entries of batch 4 that all rows "
        "share: [\"batch['scale']\"]."
    )
    with pytest.raises(BatchShapeError, match=re.escape(message)):
        BatchAgreement().check(make_batch(), index=4, num_read=4)
    assert BatchAgreement().check(other, index=4, num_read=4) == Agreed(8)
