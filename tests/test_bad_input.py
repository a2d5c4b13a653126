"""Mistakes of users: each error states the mistake, the rule, and valid values."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnx_parallel
from nnx_parallel import (
    FSDP,
    Callback,
    Checkpoint,
    Composite,
    DataParallel,
    ExpertParallel,
    Player,
    Players,
    Trainer,
)
from nnx_parallel.checkpoint.options import check_space
from nnx_parallel.errors import (
    BatchShapeError,
    CheckpointDirectoryError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    DataError,
    DeviceMemoryError,
    ExpertsError,
    LossError,
    ModelError,
    NonFiniteLossError,
    VersionError,
)
from nnx_parallel.layers import Embed, cross_entropy, linear_cross_entropy
from nnx_parallel.mesh import check_versions, simulate_devices
from nnx_parallel.models import GPT, GPTConfig, next_token_loss
from nnx_parallel.sharding.model import abstract_model
from nnx_parallel.state import plan_state
from nnx_parallel.training.diagnostics import explaining_memory


def squares(model: Any, batch: Any) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


make_trainer = partial(
    Trainer,
    model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    optimizer=optax.sgd(0.05),
    loss=squares,
    loggers=(),
)


BATCH = {"x": np.ones((8, 4), np.float32)}
WIDTH = (
    "It takes arrays whose last dim is 4: change the data, or in_features of the layer."
)


@pytest.mark.parametrize("fused", [False, True])
def test_labels_outside_classes_raise(fused: bool) -> None:
    def loss(model: Any, batch: Any) -> Any:
        if fused:
            hidden, kernel = batch["x"][:, None], model.kernel[...]
            return linear_cross_entropy(hidden, kernel, batch["y"][:, None])
        return cross_entropy(model(batch["x"]), batch["y"])

    labels = np.array([0, 1, 2, 3, 0, 1, 2, 4], np.int32)
    message = (
        "The step's batch has labels from 0 to 4, but the logits have 4 classes: valid "
        "labels are 0 to 3. To leave out a label, give it the weight 0."
    )
    with pytest.raises(NonFiniteLossError, match=re.escape(message)):
        make_trainer(
            model=lambda rngs: nnx.Linear(4, 4, use_bias=not fused, rngs=rngs),
            loss=loss,
        ).fit([BATCH | {"y": labels}] * 3, 3)


@pytest.mark.parametrize(
    ("table", "name"), [(Embed, "tokens or positions"), (nnx.Embed, "batch['x']")]
)
def test_tokens_beyond_table_raise(table: Any, name: str) -> None:
    tokens = np.full((8, 2), 20, np.int32)
    message = (
        f"The step's batch has {name} from 20 to 20, but the model's table has 16 "
        "rows: "
        "valid tokens are 0 to 15. Use the tokenizer that belongs to the model"
    )
    trainer = make_trainer(model=lambda rngs: table(16, 4, rngs=rngs))
    with pytest.raises(NonFiniteLossError, match=re.escape(message)):
        trainer.fit([{"x": tokens}] * 3, 3)


def optax_loss(model: Any, batch: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(model(batch["x"]), batch["y"]).mean()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"y": np.array([0, 1, 2, 3, 0, 1, 2, 4], np.int32)},
            "batch['y'] from 0 to 4, and the loss looks it up in 4 entries, such as "
            "logits: valid values are 0 to 3.",
        ),
        (
            {"y": np.array([0, 1, 2, 3, 0, 1, 2, -100], np.int32)},
            "batch['y'] from -100 to 3, and the loss looks it up in 4 entries",
        ),
        (
            {"x": np.where(np.eye(8, 4) > 0, np.nan, 1).astype(np.float32)},
            "4 NaN in batch['x'], the first in row 0.",
        ),
    ],
)
def test_wrong_values_in_late_batch_are_named(wrong: dict, message: str) -> None:
    good = BATCH | {"y": np.zeros(8, np.int32)}
    data = [*[good] * 6, good | wrong, good, good, good]
    message = f"The step's batch has {message}"
    with pytest.raises(NonFiniteLossError, match=re.escape(message)) as found:
        make_trainer(loss=optax_loss).fit(data, 10)
    text = str(found.value)
    assert text.startswith("Step 7: loss nan")
    # The cause comes before the arrays that it has made NaN.
    assert message in text.partition("Not finite at step")[0]
    assert "Lower the learning rate" not in text


def test_error_in_loss_names_shapes_and_model() -> None:
    wide = {"x": np.ones((16, 9), np.float32), "y": np.zeros(16, np.int32)}
    note = "in the loss, batch {x: f32[16,9], y: i32[16]}, model Linear"
    note += f". {WIDTH}"
    with pytest.raises(TypeError) as found:
        make_trainer(loss=optax_loss).fit([wide], 1)
    assert found.value.__notes__[-1] == note
    assert found.value.__notes__.count(note) == 1
    with pytest.raises(KeyError) as missing:
        make_trainer(loss=optax_loss).fit([BATCH], 1)
    assert missing.value.__notes__[-1] == (
        "in the loss, batch {x: f32[8,4]}, model Linear. The batch has no 'y'. Its "
        "names: ['x']."
    )


class Perceptron(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)[..., :3]
        return x


def of_pairs(model: Any, batch: Any) -> Any:
    return optax_loss(model, {"x": batch["x"], "y": batch["y"]})


def swapped(a: Any, b: Any) -> Any:
    return optax_loss(b, a)


def called(a: Any, b: Any) -> Any:
    return b(a).sum()


@pytest.mark.parametrize(
    ("loss", "batch", "kind", "note"),
    [
        (
            of_pairs,
            (BATCH["x"], np.zeros(8, np.int32)),
            TypeError,
            "in the loss, batch (f32[8,4], i32[8]), model Linear. The batch is a "
            "tuple: unpack it, as in x, y = batch.",
        ),
        (
            swapped,
            BATCH,
            TypeError,
            "in the loss, batch {x: f32[8,4]}, model Linear. The model is the first "
            "argument, and the batch the second: loss(model, batch).",
        ),
        (
            called,
            BATCH,
            TypeError,
            "in the loss, batch {x: f32[8,4]}, model Linear. The model is the first "
            "argument, and the batch the second: loss(model, batch).",
        ),
        (
            optax_loss,
            {"x": BATCH["x"], "labels": np.zeros(8, np.int32), "Y": BATCH["x"]},
            KeyError,
            "in the loss, batch {Y: f32[8,4], labels: i32[8], x: f32[8,4]}, model "
            "Linear. The batch has no 'y'. Its names: ['Y', 'labels', 'x'].",
        ),
    ],
)
def test_common_mistakes_in_loss_get_remedy(
    loss: Any, batch: Any, kind: type[Exception], note: str
) -> None:
    with pytest.raises(kind) as found:
        make_trainer(loss=loss).fit([batch], 1)
    assert found.value.__notes__[-1] == note


def test_error_in_layer_names_layer() -> None:
    with pytest.raises(TypeError) as found:
        make_trainer(model=Perceptron).fit([BATCH], 1)
    assert found.value.__notes__[-1] == (
        "in the loss, batch {x: f32[8,4]}, model Perceptron, layer `layers.1`, a "
        f"Linear of {{bias: f32[4], kernel: f32[4,4]}}. {WIDTH}"
    )


def files_in_trace(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_traceback_of_error_in_loss_has_only_users_frames() -> None:
    def in_fit() -> None:
        make_trainer(loss=optax_loss).fit([BATCH], 1)

    def in_evaluation() -> None:
        make_trainer().evaluate([BATCH], loss=optax_loss)

    def in_prediction() -> None:
        make_trainer().predict([BATCH], optax_loss)

    package = str(Path(nnx_parallel.__file__).parent)
    for call in (in_fit, in_evaluation, in_prediction):
        with pytest.raises(KeyError) as found:
            call()
        # The test, the call of the Trainer, and the loss; JAX hides its frames too.
        assert files_in_trace(found.value) == [__file__] * 3
        with pytest.raises(KeyError) as found, jax_filtering("off"):
            call()
        files = files_in_trace(found.value)
        assert any(file.startswith(package) for file in files)
        assert files[-1] == __file__


@contextlib.contextmanager
def jax_filtering(mode: str) -> Iterator[None]:
    config: Any = jax.config  # jax 0.10 does not declare the setting
    before = config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def test_traceback_of_own_error_has_only_users_frames() -> None:
    trainer = make_trainer(loss=lambda model, batch: model(batch["x"]))
    with pytest.raises(LossError) as found:
        trainer.fit([BATCH], 1)
    assert files_in_trace(found.value) == [__file__]
    with pytest.raises(BatchShapeError) as found:
        trainer.shard_batch({"x": np.ones((7, 4), np.float32)})
    assert files_in_trace(found.value) == [__file__]
    with pytest.raises(LossError) as found, jax_filtering("off"):
        trainer.fit([BATCH], 1)
    assert len(files_in_trace(found.value)) > 3


@pytest.mark.parametrize("num_losses", [1, 2])
def test_error_in_step_of_custom_loop_is_shown_like_error_of_fit(
    num_losses: int,
) -> None:
    wide = {"x": np.ones((16, 9), np.float32), "y": np.zeros(16, np.int32)}
    player = Player(optax.sgd(0.1), optax_loss, nnx.Param)
    options: dict[str, Any] = {"optimizer": optax.sgd(0.1), "loss": optax_loss}
    if num_losses > 1:
        options = {"optimizer": Players(a=player, b=player), "loss": None}
    trainer = make_trainer(**options)
    batch = trainer.shard_batch(wide)
    step: Any = trainer.train_step
    note = "in the loss, batch {x: f32[16,9], y: i32[16]}, model Linear"
    for call in (step, step.lower, step.trace):
        with pytest.raises(TypeError) as found:
            call(trainer.state, batch)
        assert found.value.__notes__[-1] == f"{note}. {WIDTH}"
        files = files_in_trace(found.value)
        package = str(Path(nnx_parallel.__file__).parent)
        assert not [file for file in files if file.startswith(package)]
        assert files[0] == __file__


class Noted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.note = nnx.Param("x")


@pytest.mark.parametrize("is_built", [False, True])
def test_param_of_text_raises(*, is_built: bool) -> None:
    message = (
        "`note`, a Param, holds 'x', which is not an array. Keep text and other "
        "settings in plain attributes of the module, without Param(...)."
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        make_trainer(model=Noted(nnx.Rngs(0)) if is_built else Noted)


def test_labels_of_weight_zero_are_ignored() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["x"]), batch["y"], batch["weights"])

    labels = np.array([0, 1, 2, 3, 0, 1, 2, -100], np.int32)
    weights = np.float32(labels >= 0)
    batch = BATCH | {"y": labels, "weights": weights}
    history = make_trainer(loss=loss).fit([batch], 1)
    assert np.isfinite(history["loss"]).all()


def test_loss_that_closes_over_model_raises() -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def loss(_: Any, batch: Any) -> jax.Array:
        return squares(model, batch)

    message = (
        "The loss uses the model as 'model' from outside, where it is not trained: its "
        "gradient would be 0. Use the first argument of the loss instead"
    )
    with pytest.raises(LossError, match=re.escape(message)):
        make_trainer(model=model, loss=loss)


def test_loss_may_call_functions_defined_later() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return helper(model, batch)

    trainer = make_trainer(model=nnx.Linear(4, 4, rngs=nnx.Rngs(0)), loss=loss)
    helper = squares
    assert np.isfinite(trainer.fit([BATCH], 1)["loss"]).all()


class Table(nnx.Module):
    """A product, and a constant outside of Variables."""

    def __init__(self, rngs: nnx.Rngs, make: Any = jnp.arange) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.table = make(4.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * self.table[...][None]


def test_duplicate_array_paths_raise() -> None:
    inner = nnx.Dict({"b": nnx.Param(jnp.ones(2))})
    model = nnx.Dict({"a.b": nnx.Param(jnp.ones(2)), "a": inner})
    with pytest.raises(ModelError, match=re.escape("are called ['a.b']. The parts")):
        make_trainer(model=model)


@pytest.mark.parametrize("is_built", [False, True])
def test_variables_may_hold_constants_and_numbers(*, is_built: bool) -> None:
    def build(rngs: nnx.Rngs) -> Any:
        model: Any = Table(rngs, lambda stop: nnx.Variable(jnp.arange(stop)))
        model.linear.bias = nnx.Param(0.5)
        return model

    model = build(nnx.Rngs(0)) if is_built else build
    trainer = make_trainer(model=model, strategy=FSDP(min_size=0))
    losses = trainer.fit([BATCH] * 2, 2)["loss"]
    assert losses[1] < losses[0]
    trained: Any = trainer.model
    np.testing.assert_array_equal(trained.table[...], np.arange(4.0))


def test_invalid_eval_every_raises() -> None:
    message = (
        "eval_every=-2. It must be an integer of at least 0; 0 and None evaluate only "
        "at the end."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer().fit([BATCH], 1, eval_data=[BATCH], eval_every=-2)


@pytest.mark.parametrize("num_steps", [7.5, 1e1, -1, True])
def test_invalid_num_steps_raises(num_steps: Any) -> None:
    message = f"num_steps={num_steps}. It must be an integer of at least 0: all updates"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer().fit([BATCH] * 8, num_steps)


def test_restore_with_directory_as_step_raises(tmp_path: Path) -> None:
    trainer: Any = make_trainer()
    for directory in ("runs/tiny", tmp_path):
        message = "None for the latest; a directory is passed by name: directory="
        with pytest.raises(TypeError, match=re.escape(message + repr(str(directory)))):
            trainer.restore(directory)


def test_restore_with_another_optimizer_raises(tmp_path: Path) -> None:
    make_trainer(checkpoint=tmp_path).fit([BATCH], 1)
    other = make_trainer(checkpoint=tmp_path, optimizer=optax.adam(0.1))
    message = ", or restore only the weights: trainer.restore(weights_only=True). Saved"
    with pytest.raises(CheckpointMismatchError, match=re.escape(message)):
        other.fit([BATCH] * 2, 2)
    other.restore(weights_only=True)
    wide = make_trainer(model=lambda rngs: nnx.Linear(8, 8, rngs=rngs))
    with pytest.raises(CheckpointMismatchError) as found:
        wide.restore(directory=tmp_path)
    assert "weights_only" not in str(found.value)


def test_unknown_history_metric_raises() -> None:
    trainer = make_trainer()
    history = trainer.fit([BATCH], 1)
    with pytest.raises(
        KeyError, match=r"'val_loss' is not a metric of this fit\. It has"
    ):
        history["val_loss"]
    with pytest.warns(UserWarning, match="This fit trains nothing"):
        empty = trainer.fit([BATCH], 1)
    with pytest.raises(KeyError, match="'loss': the fit ran no step"):
        empty["loss"]
    assert history.get("val_loss") is None


def test_train_step_without_state_raises() -> None:
    step: Any = make_trainer().train_step
    message = "The step takes (state, batch), but got 1 arguments."
    with pytest.raises(TypeError, match=re.escape(message)):
        step(BATCH)


def test_predict_error_explains_whole_batches() -> None:
    with pytest.raises((TypeError, ValueError)) as found:
        make_trainer().predict([BATCH])
    message = "predict called model(batch) with a whole batch: ['x']. Pass a"
    assert any(note.startswith(message) for note in found.value.__notes__)


@pytest.mark.parametrize("count", ["8", 0])
def test_invalid_device_count_raises(count: Any) -> None:
    with pytest.raises(ValueError, match=r"It takes a number of devices\."):
        simulate_devices(count)


def test_missing_eval_data_raises() -> None:
    with pytest.raises(ValueError, match="eval_every=2 without eval_data"):
        make_trainer().fit([BATCH] * 2, 2, eval_every=2)
    with pytest.raises(DataError, match="eval_data is empty"):
        make_trainer().fit([BATCH] * 2, 2, eval_data=[])
    batches = grain.MapDataset.source([BATCH]).to_iter_dataset()
    with pytest.raises(DataError, match="eval_data is an iterator"):
        make_trainer().fit([BATCH] * 2, 2, eval_data=iter(batches))


@pytest.mark.parametrize("seed", [2**31, -(2**31) - 1, 0.5])
def test_invalid_seed_raises(seed: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"seed={seed}. It must be")):
        make_trainer(seed=seed)


@pytest.mark.parametrize("name", ["eval_loss", "step_seconds", "mfu", "time"])
def test_reserved_metric_name_raises(name: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return squares(model, batch), {name: 1.0}

    message = f"A metric is named {name!r}, which the run reports itself."
    with pytest.raises(LossError, match=re.escape(message)):
        make_trainer(loss=loss).fit([BATCH], 1)


def test_model_with_donated_arrays_raises() -> None:
    trainer = make_trainer()
    model = trainer.model
    trainer.fit([BATCH], 1)
    message = "of the model was donated to a step, and is gone. Read trainer.model "
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(model=model)


def test_integer_loss_raises() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.int32(3)

    message = "The loss has dtype int32, which has no gradient."
    with pytest.raises(LossError, match=re.escape(message)):
        make_trainer(loss=loss).fit([BATCH], 1)


def test_nonfinite_first_loss_raises() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.log(-1.0 - squares(model, batch))

    message = r"Step 1: loss nan, .* No earlier step of this fit was finite\."
    with pytest.raises(NonFiniteLossError, match=message):
        make_trainer(loss=loss).fit([BATCH] * 2, 2)


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, use_running_average=None, rngs=rngs)
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array, *, frozen: bool) -> jax.Array:
        return self.linear(self.norm(x, use_running_average=frozen or None))


def test_unchanged_batch_statistics_warn() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return (model(batch["x"], frozen=True) ** 2).mean()

    message = (
        "The loss leaves 2 batch statistics as they are: `norm.mean`, `norm.var`. In "
        "training mode BatchNorm updates them"
    )
    trainer = make_trainer(model=Normed, loss=loss)
    with pytest.warns(UserWarning, match=re.escape(message)):
        trainer.fit([BATCH], 1)


def test_updated_batch_statistics_do_not_warn() -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        return (model(batch["x"], frozen=False) ** 2).mean()

    make_trainer(model=Normed, loss=loss).fit([BATCH], 1)


def test_updates_below_bfloat16_resolution_warn() -> None:
    def make(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(4, 4, param_dtype=jnp.bfloat16, use_bias=False, rngs=rngs)

    trainer = make_trainer(model=make, optimizer=optax.sgd(1e-6))
    message = "of the updates are too small to change a parameter of 16 bits"
    with pytest.warns(UserWarning, match=re.escape(message)):
        history = trainer.fit([BATCH] * 3, 3)
    assert history["lost_updates"][0] > 0.5
    history = make_trainer(model=make, optimizer=optax.sgd(0.5)).fit([BATCH], 1)
    assert history["lost_updates"][0] < 0.1


def test_saving_run_with_generator_warns(tmp_path: Path) -> None:
    def batches() -> Iterator[dict]:
        while True:
            yield BATCH

    message = (
        "The run saves checkpoints, but its data is a one-shot iterator (generator), "
        "whose position cannot be saved"
    )
    with pytest.warns(UserWarning, match=re.escape(message)) as found:
        make_trainer(checkpoint=tmp_path).fit(batches(), 1)
    assert [warning.filename for warning in found] == [__file__]


def test_changed_hyperparameters_warn_on_resume(tmp_path: Path) -> None:
    def train(rate: float, steps: int) -> None:
        make = optax.inject_hyperparams(optax.sgd, static_args=("nesterov",))
        schedule = optax.linear_schedule(0.9, 0.5, 10)
        optimizer = make(learning_rate=rate, momentum=schedule)
        make_trainer(optimizer=optimizer, checkpoint=tmp_path).fit([BATCH] * 4, steps)

    train(0.1, 2)
    train(0.1, 3)  # the schedule's progress is not a change
    message = (
        "Hyperparameters have changed since the checkpoint: learning_rate: 0.1 in the "
        "checkpoint, 0.2 in the optimizer now. The checkpoint's values are used"
    )
    with pytest.warns(UserWarning, match=re.escape(message)) as found:
        train(0.2, 4)
    assert [warning.filename for warning in found] == [__file__]


def test_wrong_global_batch_size_raises() -> None:
    message = "The batch has 8 rows, but global_batch_size=16. Make the two equal"
    with pytest.raises(BatchShapeError, match=re.escape(message)):
        make_trainer(global_batch_size=16).fit([BATCH], 1)


def test_out_of_memory_raises_device_memory_error() -> None:
    strategy = DataParallel(2)
    layout = strategy.layout(strategy.make_mesh(jax.devices()[:2]))
    model = abstract_model(lambda rngs: nnx.Linear(4, 4, rngs=rngs), nnx.Rngs(0))
    plan = plan_state(model, layout, optax.adam(0.1))
    with pytest.raises(DeviceMemoryError) as caught, explaining_memory(plan, 4, 1000):
        # This array exceeds a process's address space, so no machine can allocate it.
        jnp.zeros((2**23, 2**23)).block_until_ready()
    text = str(caught.value)
    assert text.startswith("Out of device memory: RESOURCE_EXHAUSTED: ")
    for line in (
        "On each device: parameters 80 bytes, as many or more for gradients, optimizer "
        "state 164 bytes.",
        "Gradients and activations of the step: 1,000 bytes.",
        "Less for activations: num_microbatches=8, by up to 500 bytes; or remat=",
        "Less for the state: strategy=FSDP() over 2 devices, by 122 bytes on each.",
    ):
        assert line in text


def test_other_runtime_errors_pass_unchanged() -> None:
    plan: Any = None
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="something else"),
        explaining_memory(plan, 1, None),
    ):
        raise jax.errors.JaxRuntimeError("something else")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            {"jax": "0.9.2", "flax": "0.12.8"},
            "Found jax 0.9.2. nnx_parallel runs on jax 0.10 or newer, below 0.13: pip "
            "install 'jax>=0.10,<0.13'",
        ),
        (
            {"jax": "0.10.2", "flax": "0.12.7"},
            "Found flax 0.12.7. nnx_parallel runs on flax 0.12.8 or newer, below 0.13",
        ),
    ],
)
def test_old_versions_raise(found: dict[str, str], message: str) -> None:
    with pytest.raises(VersionError, match=re.escape(message)):
        check_versions(found)


def test_untested_versions_warn() -> None:
    message = "Found jax 0.13.0, which is untested. nnx_parallel runs on jax 0.10 or"
    with pytest.warns(UserWarning, match=re.escape(message)):
        check_versions({"jax": "0.13.0", "flax": "0.12.12"})


class Holder(nnx.Module):
    """A layer, and an array of size 0."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.unused = nnx.BatchStat(jnp.zeros((0, 3)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def test_empty_array_raises_before_training(tmp_path: Path) -> None:
    trainer = make_trainer(model=Holder, checkpoint=tmp_path)
    message = "Cannot save `unused` of group 'model': its shape (0, 3) has no elements."
    with pytest.raises(CheckpointError, match=re.escape(message)):
        trainer.fit([BATCH] * 2, 2)
    assert trainer.step == 0


def test_full_disk_raises_before_training(tmp_path: Path) -> None:
    needed = 2**60
    message = f"A checkpoint of this run takes {needed:,} bytes, but only "
    with pytest.raises(CheckpointDirectoryError, match=re.escape(message)):
        check_space(str(tmp_path), needed)
    check_space(str(tmp_path), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_damage": "ignore"}, "on_damage='ignore') must be 'error' or 'previous'"),
        ({"on_save_error": "no"}, "on_save_error='no') must be 'raise' or 'warn'."),
    ],
)
def test_invalid_checkpoint_options_raise(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint("run", **options)


class Unplugged(Callback):
    """Makes the disk fail during the save of step 4, and restores it afterwards."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._away = directory, directory.with_name("away")

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == 4:
            self._directory.rename(self._away)
            self._directory.write_text("no directory")
        if step == 5:
            self._directory.unlink()
            self._away.rename(self._directory)


@pytest.mark.parametrize("choice", ["raise", "warn"])
def test_failed_save_raises_or_warns(choice: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = Checkpoint(
        run, every=2, on_save_error=choice, keep_last=None, asynchronous=False
    )
    trainer = make_trainer(checkpoint=options, callbacks=(Unplugged(run),))
    message = re.escape(f"Saving step 4 in '{run}' failed: ")
    if choice == "raise":
        with pytest.raises(CheckpointSaveError, match=message):
            trainer.fit([BATCH] * 8, 8)
        assert (tmp_path / "away" / "2").is_dir()
    else:
        with pytest.warns(UserWarning, match=message + ".* Training goes on"):
            trainer.fit([BATCH] * 8, 8)
        assert {p.name for p in run.iterdir() if p.name.isdigit()} == {"2", "6", "8"}


MIXTURE = GPTConfig.tiny_experts(num_layers=1, vocab_size=16, seq_len=4, embed_dim=16)
TOKENS = {"tokens": np.arange(40, dtype=np.int32).reshape(8, 5) % 16}


def build_gpt(rngs: nnx.Rngs) -> GPT:
    return GPT(MIXTURE, rngs=rngs)


@pytest.mark.parametrize(
    ("options", "num_devices", "message"),
    [
        (
            {"model": build_gpt, "strategy": ExpertParallel(3)},
            3,
            "`blocks.layer.mlp` has 8 experts, which expert=3 devices cannot share "
            "evenly. The size of ExpertParallel can be one of [1, 2, 4, 8].",
        ),
        (
            {"strategy": Composite(ExpertParallel(4), FSDP())},
            8,
            "Linear has no experts: ExpertParallel splits the experts of "
            "nnx_parallel.layers.MoE, and dims that are named 'expert'. Without them "
            "its axis only splits the batch. Take DataParallel(4) or FSDP(4) instead; "
            "or name the dim of experts: names='auto', or PathNames((r'up$', "
            "('expert', 'embed', 'mlp'))).",
        ),
        (
            {"model": build_gpt, "strategy": ExpertParallel(2, exchange="ragged")},
            2,
            "ExpertParallel(exchange='ragged') cannot run on CPUs, for which JAX has "
            "no ragged all-to-all. Take exchange='gather', or None to choose.",
        ),
    ],
)
def test_unsplittable_experts_raise(
    options: dict[str, Any], num_devices: int, message: str
) -> None:
    """The error is raised before compilation."""
    with pytest.raises(ExpertsError, match=re.escape(message)):
        make_trainer(**options, devices=jax.devices()[:num_devices])


def test_rows_indivisible_by_expert_axis_raise() -> None:
    options = {"model": build_gpt, "loss": next_token_loss}
    trainer = make_trainer(**options, strategy=ExpertParallel(8))
    message = "Batch of 6 rows cannot be split: 1 microbatch * expert=8 need a multiple"
    with pytest.raises(BatchShapeError, match=re.escape(message)):
        trainer.fit([{"tokens": TOKENS["tokens"][:6]}], 1)


def test_loss_without_balance_loss_warns() -> None:
    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["tokens"][:, :-1])
        return cross_entropy(logits, batch["tokens"][:, 1:])

    assert MIXTURE.experts is not None
    config = replace(MIXTURE, experts=replace(MIXTURE.experts, balance_loss=0.01))
    trainer = make_trainer(
        model=lambda rngs: GPT(config, rngs=rngs),
        loss=loss,
        devices=jax.devices()[:1],
    )
    message = (
        "The loss does not include the losses of the experts, "
        "Experts(balance_loss, z_loss), because it is computed from logits. Use "
        "next_token_loss, or add the mean"
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        trainer.fit([TOKENS], 1)
    trainer.evaluate([TOKENS])  # evaluations do not balance experts
