"""Twenty mistakes of a first day with the library, beyond `test_arguments`.

Each error states the mistake, the rule and a valid value, before a step is compiled.
"""

import re
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel
from nnx_parallel import (
    FSDP,
    Backend,
    Checkpoint,
    Composite,
    Debugging,
    Faults,
    OneFOneB,
    Pipeline,
    TensorParallel,
    Trainer,
    audit,
    make_mesh,
)
from nnx_parallel.errors import ModelError
from nnx_parallel.models import GPTConfig, ViTConfig


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def loss(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) ** 2).mean()


SGD = optax.sgd(0.1)
X = np.ones((8, 4), np.float32)
BATCH = {"x": X}


def make(**options: Any) -> Trainer:
    settings: dict[str, Any] = {"model": Net, "optimizer": SGD, "loss": loss}
    settings["loggers"] = ()
    return Trainer(**(settings | options))


def fit(data: Any = (BATCH,), num_steps: Any = 1, **options: Any) -> Any:
    return make(**options).fit(data, num_steps)


def exchanged(batch: Any, model: Any) -> Any:
    return loss(model, batch)


def of_logits(model: Any, batch: Any) -> Any:
    return model(batch["x"])


class Tensor:
    """A PyTorch array, which a DataLoader returns by default."""

    __module__ = "torch"


def with_logits(model: Any, batch: Any) -> Any:
    return loss(model, batch), {"logits": of_logits(model, batch)}


def update_by_hand(trainer: Any) -> None:
    """A callback in the style of other libraries."""


CALL: Any = Trainer
ONE = (
    "Data is one {}. It must be an iterable of batches; pass `[batch]` for a single "
    "one."
)
SEEDS = "It must be an integer of 32 bits: from -2147483648 to 2147483647."
POSITIVE = (
    "must be a whole number of at least 1 (keep_last, keep_every, memory_every may be "
    "None; every and keep_every may also be a datetime.timedelta)."
)
OPTIMIZER = (
    "Pass an Optax transformation such as optax.adamw(3e-4), optax.MultiSteps(...), or "
    "a function of the abstract model that returns one."
)
SCALAR = (
    "has shape (8, 4) and dtype float32. It must be a real scalar or a Mean(total, "
    "weight): reduce it, for instance with .mean()."
)

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "rows that eight devices cannot share": (
        lambda: fit([{"x": np.ones((12, 4), np.float32)}], strategy=FSDP()),
        "Batch of 12 rows cannot be split: 1 microbatch * fsdp=8 need a multiple of 8 "
        "rows. Nearest: 8, 16.",
    ),
    "more microbatches than rows": (
        lambda: fit(num_microbatches=3),
        "Batch of 8 rows cannot be split: 3 microbatches * data=8 need a multiple of "
        "24 rows. Nearest: 24.",
    ),
    "rows that are not those stated": (
        lambda: fit(global_batch_size=16),
        "The batch has 8 rows, but global_batch_size=16. Make the two equal, or leave "
        "global_batch_size out.",
    ),
    "a loss that returns logits": (
        lambda: fit(loss=of_logits),
        f"The loss {SCALAR}",
    ),
    "logits as a metric": (
        lambda: fit(loss=with_logits),
        f"Metric 'logits' {SCALAR} A Sum(array) may have any shape.",
    ),
    "a loss that returns nothing": (
        lambda: fit(loss=lambda model, batch: None),
        "The loss is a NoneType. It must be a real scalar or a Mean(total, weight).",
    ),
    "a loss with the batch first": (
        lambda: make(loss=exchanged),
        "The loss has the signature (batch: Any, model: Any) -> Any, but the model is "
        "its first argument. Write loss(model, batch).",
    ),
    "one array in place of batches": (
        lambda: fit(np.ones((64, 4))),
        ONE.format("ndarray"),
    ),
    "one batch to evaluate": (
        lambda: make().evaluate(BATCH),
        ONE.format("dict"),
    ),
    "one batch to predict": (
        lambda: make().predict(X),
        ONE.format("ndarray"),
    ),
    "a function in place of data": (
        lambda: fit(lambda: [BATCH]),
        "Data of type function cannot be iterated over. It must be an iterable of "
        "batches, for instance a list, an object with `__iter__`, or a Grain dataset.",
    ),
    "lists of numbers in a batch": (
        lambda: fit([{"x": [[1.0, 2.0, 3.0, 4.0]] * 8}]),
        "batch['x'][0][0] of batch 0 has type float. Leaves must be NumPy or JAX "
        "arrays: convert it with `np.asarray`, so that dim 0 is the rows. An array "
        "without dims, such as np.asarray(0.5), is shared by all rows.",
    ),
    "a DataLoader's own arrays": (
        lambda: fit([{"x": Tensor()}]),
        "batch['x'] of batch 0 has type Tensor. Leaves must be NumPy or JAX arrays: "
        "convert it with `np.asarray`, so that dim 0 is the rows. An array without "
        "dims, such as np.asarray(0.5), is shared by all rows. In a DataLoader, "
        "collate_fn does this.",
    ),
    "text in a batch": (
        lambda: fit([BATCH | {"label": np.array(["cat"] * 8)}]),
        "batch['label'] of batch 0 has dtype <U3. Leaves must hold booleans or "
        "numbers: encode it, or leave it out of the batch.",
    ),
    "arrays of unlike rows": (
        lambda: fit([{"x": X, "y": np.ones(6, np.float32)}]),
        "Arrays of batch 0 disagree about the number of rows (batch['x']: 8, "
        "batch['y']: 6). Dim 0 of every array is the rows of the global batch; give an "
        "array that all rows share as nnx_parallel.data.Shared(array), such as the "
        "edges of a graph.",
    ),
    "a number of steps in quotes": (
        lambda: fit(num_steps="100"),
        "num_steps='100'. It must be an integer of at least 0: all updates of the run, "
        "including earlier ones.",
    ),
    "no data to evaluate on": (
        lambda: make().fit([BATCH], 1, eval_every=1),
        "eval_every=1 without eval_data: nothing would be evaluated. Pass eval_data=, "
        "or leave eval_every out.",
    ),
    "data to evaluate on by position": (
        lambda: CALL.fit(make(), [BATCH], 1, [BATCH]),
        "Trainer.fit() takes from 2 to 3 positional arguments but 4 were given",
    ),
    "a strategy by position": (
        lambda: CALL(Net, SGD, loss, FSDP()),
        "Trainer.__init__() takes from 3 to 4 positional arguments but 5 were given",
    ),
    "the length of a fit in the constructor": (
        lambda: CALL(Net, SGD, loss, max_epochs=3),
        "Trainer has no argument 'max_epochs'. Trainer.fit has: num_epochs=.",
    ),
    "a strategy in the fit": (
        lambda: CALL.fit(make(), [BATCH], 1, strategy=FSDP()),
        "Trainer.fit has no argument 'strategy'. Trainer has: strategy=.",
    ),
    "three of eight devices": (
        lambda: make(strategy=TensorParallel(3)),
        "Mesh tensor=3 covers 3 devices but 8 are available. Axis sizes must multiply "
        "to 8; leave one size out to infer it, or pass devices=jax.devices()[:3]. "
        "Valid sizes of one axis: [1, 2, 4, 8].",
    ),
    "a size that is a word": (
        lambda: make(strategy=FSDP("params")),  # pyright: ignore[reportArgumentType]
        "Mesh axis 'fsdp' has size 'params'. A size is an integer of at least 1; leave "
        "it out to take the devices that remain.",
    ),
    "a mesh of other axes": (
        lambda: make(strategy=FSDP(), backend=Backend(mesh=make_mesh({"data": 8}))),
        "The mesh has axes ['data'] but the strategy uses ['fsdp']. They must be the "
        "same names: build the mesh with strategy.make_mesh(), or compose strategies "
        "for every axis of the mesh.",
    ),
    "a mesh of another size": (
        lambda: make(
            strategy=FSDP(8), backend=Backend(mesh=FSDP().make_mesh(jax.devices()[:4]))
        ),
        "The strategy asks for fsdp=8 but the mesh has fsdp=4. Make the two equal, or "
        "leave the strategy's size out to take the mesh's size.",
    ),
    "no parts": (
        Composite,
        "Composite() has no strategies. Give it at least one.",
    ),
    "a schedule's name": (
        lambda: Pipeline(2, "1f1b"),  # pyright: ignore[reportArgumentType]
        "Pipeline(schedule='1f1b'): it must be a Schedule, such as OneFOneB() or "
        "Interleaved(chunks=2), or a Table.",
    ),
    "a schedule's class": (
        lambda: Pipeline(2, OneFOneB),  # pyright: ignore[reportArgumentType]
        "Pipeline(schedule=<class 'nnx_parallel.schedules.schedules.OneFOneB'>): it "
        "must be a Schedule, such as OneFOneB() or Interleaved(chunks=2), or a Table.",
    ),
    "a learning rate's schedule for the optimizer": (
        lambda: make(optimizer=optax.cosine_decay_schedule(1e-3, 100)),
        "optimizer is a function that optax.cosine_decay_schedule returned. It must be "
        "a complete transformation; a schedule can be its learning rate: "
        "optax.adamw(schedule).",
    ),
    "an optimizer of NNX": (
        lambda: make(optimizer=nnx.Optimizer(Net(nnx.Rngs(0)), SGD, wrt=nnx.Param)),
        "optimizer is an nnx.Optimizer. The Trainer keeps the optimizer's state "
        "itself: pass the Optax transformation that it was made from.",
    ),
    "a list of transformations": (
        lambda: make(optimizer=[optax.clip(1.0), SGD]),
        f"optimizer is of type list. {OPTIMIZER}",
    ),
    "a callback that is a function": (
        lambda: make(callbacks=update_by_hand),
        "callbacks is a function. It must be a list, even for a single Callback, "
        "such as [SaveSamples()].",
    ),
    "names in a dict": (
        lambda: make(names={"kernel": ("embed", "mlp")}),
        "names is a dict. It must be 'auto' (with sample=batch), or a PathNames, such "
        "as TRANSFORMER_NAMES, or pairs of a regex and the names of the dims: "
        "PathNames((r'up\\.kernel', ('embed', 'mlp'))).",
    ),
    "what is trained, in quotes": (
        lambda: make(wrt="Param"),
        "wrt=Param selects no Variable of the model, so nothing would be trained. The "
        "model has Variables of kinds ['Param'].",
    ),
    "a random key for a seed": (
        lambda: make(seed=0.5),
        f"seed=0.5. {SEEDS}",
    ),
    "remat switched on": (
        lambda: make(remat=True),
        "Unknown remat policy True. Policies: ['none', 'dots', 'full'], Save(*names), "
        "a policy of jax.checkpoint_policies, or None to follow the Trainer's. Call a "
        "function that makes a policy, such as save_only_these_names, first.",
    ),
    "an average's decay in quotes": (
        lambda: make(ema_decay="0.99"),
        "ema_decay='0.99'. It must be a number of at least 0 and below 1, such as "
        "0.999.",
    ),
    "a timeout in words": (
        lambda: make(faults=Faults(step_timeout="5m")),  # pyright: ignore[reportArgumentType]
        "step_timeout='5m' is invalid. It must be a positive number of seconds, None "
        "for no limit, or 'auto'.",
    ),
    "one step to profile": (
        lambda: make(debugging=Debugging(profile=5)),  # pyright: ignore[reportArgumentType]
        "profile=5 covers no step. Give two numbers of steps, 0 <= start < stop, such "
        "as (10, 15).",
    ),
    "a save every epoch": (
        lambda: Checkpoint("runs/a", every="epoch"),  # pyright: ignore[reportArgumentType]
        f"Checkpoint(every='epoch') {POSITIVE}",
    ),
    "the best, of what": (
        lambda: Checkpoint("runs/a", keep_best=True),  # pyright: ignore[reportArgumentType]
        "Checkpoint(keep_best=True) must be the name of a metric, such as 'eval_loss', "
        "or None.",
    ),
    "a save to nowhere": (
        lambda: make().save(),
        "This Trainer has no checkpoint directory. Pass checkpoint='runs/name'.",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_raises_with_remedy(name: str) -> None:
    mistake, message = MISTAKES[name]
    with pytest.raises(
        (TypeError, ValueError, FileNotFoundError),
        # JAX may add lines about its traceback.
        match=rf"\A{re.escape(message)}(\n|\Z)",
    ):
        mistake()


def test_model_with_more_arguments_raises() -> None:
    message = (
        "cannot be called with only rngs: missing a required argument: 'in_features'. "
        "Pass lambda rngs: Model(..., rngs=rngs)."
    )
    with pytest.raises(TypeError, match=f"^model=.* {re.escape(message)}"):
        make(model=nnx.Linear)


class Counted(Net):
    """A model with a trained integer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.count = nnx.Param(jax.numpy.arange(4))


OTHER_HABITS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "test": (
        lambda: make().test([BATCH]),
        AttributeError,
        "A Trainer has no method 'test'. Call trainer.evaluate(data).",
    ),
    "load": (
        lambda: make().load("run"),
        AttributeError,
        "A Trainer has no method 'load'. Call trainer.restore() for a checkpoint, or "
        "load_weights(path) for weights.",
    ),
    "train": (
        lambda: make().train([BATCH]),
        AttributeError,
        "A Trainer has no method 'train'. Call trainer.fit(data, num_steps=...).",
    ),
    "resume": (
        lambda: make().resume("run"),
        AttributeError,
        "A Trainer has no method 'resume'. Call trainer.fit(...), which resumes from "
        "the newest step in Trainer(checkpoint=...).",
    ),
    "compile": (
        lambda: make().compile(SGD, loss),
        AttributeError,
        "A Trainer has no method 'compile'. Its step is compiled at the first call of "
        "fit. Pass the optimizer and the loss to the Trainer: Trainer(model, "
        "optimizer, loss).",
    ),
    "summary": (
        lambda: make().summary(),
        AttributeError,
        "A Trainer has no method 'summary'. Call trainer.describe().",
    ),
    "train_on_batch": (
        lambda: make().train_on_batch(BATCH),
        AttributeError,
        "A Trainer has no method 'train_on_batch'. Call trainer.train_step("
        "trainer.state, trainer.shard_batch(batch)), which returns the new state and "
        "the metrics. Assign the state to trainer.state.",
    ),
    "save_pretrained": (
        lambda: make().save_pretrained("out"),
        AttributeError,
        "A Trainer has no method 'save_pretrained'. Write from nnx_parallel.weights "
        "import save_pretrained, and call save_pretrained(directory, "
        "trainer.eval_model).",
    ),
    "push_to_hub": (
        lambda: make().push_to_hub("me/model"),
        AttributeError,
        "A Trainer has no method 'push_to_hub'. Write from nnx_parallel.weights import "
        "push_to_hub, and call push_to_hub('org/model', trainer.eval_model).",
    ),
    "state_dict": (
        lambda: make().state_dict(),
        AttributeError,
        "A Trainer has no method 'state_dict'. Read trainer.state, which has "
        "parameters, optimizer state and step, or nnx.state(trainer.model) for the "
        "weights.",
    ),
    "load_state_dict": (
        lambda: make().load_state_dict({}),
        AttributeError,
        "A Trainer has no method 'load_state_dict'. Call trainer.restore() for a "
        "checkpoint, or load_weights(path) for weights.",
    ),
    "sizes of a model": (
        lambda: GPTConfig.tiny(n_layer=3),
        TypeError,
        "GPTConfig has no argument 'n_layer'. Did you mean num_layers=?",
    ),
    "misspelt size of a model": (
        lambda: ViTConfig.tiny(patchsize=3),
        TypeError,
        "ViTConfig has no argument 'patchsize'. Did you mean patch_size=?",
    ),
    "save": (
        lambda: CALL.save(make(), "run"),
        TypeError,
        "Trainer.save takes 0 positional arguments, but got 1. It saves to the "
        "directory in Trainer(checkpoint=...).",
    ),
    "predict": (
        lambda: CALL.predict(make(), loss, [BATCH]),
        TypeError,
        "The data of predict is a function. The order is predict(data, function).",
    ),
    "integers": (
        lambda: fit(model=Counted),
        ModelError,
        "`count` is trained and has dtype int32, which has no gradient.",
    ),
    "variable": (
        lambda: make(model=Net(nnx.Rngs(0)).layer.kernel),
        TypeError,
        "model is a Param. Pass the module that has this Variable.",
    ),
    "audit": (
        lambda: audit(cast("Any", Net)),
        TypeError,
        "audit got the class Net. It takes a",
    ),
    "models": (
        lambda: nnx_parallel.GPT,
        ImportError,
        "GPT is in nnx_parallel.models: from nnx_parallel.models import GPT.",
    ),
    "names that moved": (
        lambda: nnx_parallel.Pad,
        ImportError,
        "Pad is in nnx_parallel.data: from nnx_parallel.data import Pad.",
    ),
    "functions that moved": (
        lambda: nnx_parallel.by_matrix,
        ImportError,
        "by_matrix is in nnx_parallel.optimizers: from nnx_parallel.optimizers import "
        "by_matrix.",
    ),
}


@pytest.mark.parametrize(
    ("call", "error", "message"), OTHER_HABITS.values(), ids=OTHER_HABITS
)
def test_habits_of_other_libraries_are_answered(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_remedies_for_other_names_work() -> None:
    trainer = make()
    assert "layer.kernel" in str(trainer.describe())
    trainer.state, metrics = trainer.train_step(
        trainer.state, trainer.shard_batch(BATCH)
    )
    assert trainer.step == 1
    assert np.isfinite(float(metrics["loss"]))
    assert {"layer"} == set(nnx.state(trainer.model))


def test_unknown_name_of_package_raises() -> None:
    # Modules of the package have the names `Any` and `Path`, but only import them.
    for name in ("Any", "Path", "Trainr"):
        message = f"module 'nnx_parallel' has no attribute '{name}'"
        with pytest.raises(AttributeError, match=re.escape(message)):
            getattr(nnx_parallel, name)
    assert {"Trainer", "sharding", "__version__"} <= set(dir(nnx_parallel))
    assert "state" not in dir(nnx_parallel)


def test_error_in_property_is_not_hidden() -> None:
    assert not hasattr(make(), "missing")
    trainer = make()
    object.__setattr__(trainer, "_run", None)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
        _ = trainer.step
