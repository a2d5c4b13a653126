"""Messages of a fit other than metrics: at the start, at saves, at the end."""

import io
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from nnx_parallel import FSDP, Checkpoint, Composite, DataParallel, Trainer
from nnx_parallel.loggers import ConsoleLogger, JSONLinesLogger, Logger
from nnx_parallel.precision import format_number


class Memory(Logger):
    """Collects messages, and asserts that the logger is open when they arrive."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._is_open = False

    def start(self, *, first_step: int, num_steps: int) -> None:
        self._is_open = True

    def finish(self) -> None:
        self._is_open = False

    def log(self, step: int, metrics: Any) -> None:
        pass

    def message(self, text: str) -> None:
        assert self._is_open
        self.messages.append(text)


def make_trainer(*loggers: Logger, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "model": lambda rngs: nnx.Linear(64, 64, rngs=rngs),
        "optimizer": optax.adam(0.1),
        "strategy": Composite(DataParallel(2), FSDP()),
    }
    loss = lambda model, batch: (model(batch) ** 2).mean()  # noqa: E731
    return Trainer(loss=loss, loggers=loggers, **(settings | options))


DATA = [np.ones((8, 64), np.float32)] * 8


def test_fit_header_describes_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Too late for JAX, which has read it.
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    memory = Memory()
    options = Checkpoint(tmp_path / "run", every=3)
    trainer = make_trainer(memory, checkpoint=options, ema_decay=0.9)
    trainer.fit(DATA, 4)
    header, first, last, summary = memory.messages
    assert header.splitlines() == [
        "model        Linear, 4,160 parameters",
        "strategy     Composite(DataParallel(size=2), FSDP())",
        "devices      8 x cpu",
        "mesh         data=2 * fsdp=4",
        "per device   parameters 4.25 KiB, gradients 4.25 KiB, optimizer state 8.504 "
        "KiB, moving average 4.25 KiB",
        "evaluated    the moving average, ema_decay=0.9",
        f"checkpoints  '{tmp_path / 'run'}', every 3 steps and at the end",
        "XLA_FLAGS    --xla_dump_to=/tmp/x",
        "verified     never; trainer.verify(batch) compares a step with one device",
        "step         0 of 4",
    ]
    where = re.escape(f"in '{tmp_path / 'run'}'")
    assert re.fullmatch(rf"Saved step 3 {where} \(\d+\.\d s\)", first)
    assert re.fullmatch(rf"Saved step 4 {where} \(\d+\.\d s\)", last)
    where = f"Step 4 is saved in '{tmp_path / 'run'}'."
    assert re.fullmatch(rf"Trained 4 steps in \d:\d\d\. {re.escape(where)}", summary)
    trainer.fit(DATA, 5)  # the header appears only once
    assert len(memory.messages) == 6
    again = Memory()
    make_trainer(again, checkpoint=options, ema_decay=0.9).fit(DATA, 6)
    header, resumed, *_ = again.messages
    assert header.splitlines()[-1] == "step         5 of 6"
    assert resumed == f"Resumed from step 5 in '{tmp_path / 'run'}'."


def test_header_advises_stack_for_many_equal_blocks() -> None:
    def build(count: int) -> Any:
        return lambda rngs: nnx.Sequential(
            *(nnx.Linear(64, 64, rngs=rngs) for _ in range(count))
        )

    texts = []
    for count in (3, 4):
        memory = Memory()
        make_trainer(memory, model=build(count)).fit(DATA[:1], 1)
        texts.append(memory.messages[0])
        assert re.match(r"Trained 1 step in", memory.messages[-1])
    advice = "the 4 equal blocks of `layers` are compiled separately"
    assert [advice in text for text in texts] == [False, True]


@pytest.mark.filterwarnings("ignore:The learning rate is -0.1")
def test_summary_names_best_evaluation() -> None:
    memory = Memory()
    trainer = make_trainer(memory, optimizer=optax.sgd(-0.1))  # the loss rises
    history = trainer.fit(DATA, 4, eval_data=DATA[:1], eval_every=2)
    best = format_number(history["eval_loss"].min())
    assert re.fullmatch(
        rf"Trained 4 steps in \d:\d\d\. Best eval_loss {best} at step 2\. "
        r"Not saved: the Trainer has no checkpoint=\.",
        memory.messages[-1],
    )


class Configured(Memory):
    def __init__(self) -> None:
        super().__init__()
        self.configs: list[dict[str, Any]] = []

    def configure(self, config: dict[str, Any]) -> None:
        self.configs.append(config)


def test_loggers_get_settings_of_run() -> None:
    logger = Configured()
    make_trainer(logger, strategy=FSDP(), seed=3).fit(DATA, 1)
    run, batch = logger.configs
    assert run["strategy"] == "FSDP()"
    assert run["mesh"] == {"fsdp": 8}
    assert (run["num_params"], run["seed"], run["num_steps"]) == (4160, 3, 1)
    assert (run["model"], run["num_microbatches"]) == ("Linear", 1)
    assert run["versions"]["jax"] == jax.__version__
    assert run["devices"] == {"cpu": 8}
    assert batch == {"batch": "f32[8,64]", "num_rows": 8}
    assert json.loads(json.dumps(run)) == run


def test_first_line_comes_before_arrays(capfd: Any) -> None:
    def build(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(64, 64, rngs=rngs)

    class Watching(ConsoleLogger):
        def start(self, *, first_step: int, num_steps: int) -> None:
            lines.append(capfd.readouterr().out)

    lines: list[str] = []
    trainer = make_trainer(Watching(), model=build)
    trainer.fit(DATA, 1)
    trainer.fit(DATA, 2)
    assert re.fullmatch(
        r"Preparing Linear with jax .*, flax .*, optax .*\.\n", lines[0]
    )
    assert "Preparing" not in lines[1]


def held(tree: Any) -> int:
    """Bytes of a tree's arrays on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def test_described_bytes_match_arrays() -> None:
    trainer: Any = make_trainer(
        model=lambda rngs: nnx.LoRA(
            64, 8, 64, base_module=nnx.Linear(64, 64, rngs=rngs), rngs=rngs
        ),
        strategy=FSDP(min_size=0),
        wrt=nnx.LoRAParam,
    )
    found, state = trainer.describe(), trainer.state
    assert found.params_bytes == held((state.params, state.variables))
    assert found.gradients_bytes == held(state.params)
    assert found.optimizer_bytes == held(state.opt_state)
    assert f"per device: {found.per_device}" == found.summary().splitlines()[0]
    assert found.per_device in trainer._repr_html_()
    assert "5,184 parameters, 1,024 of them trained" in trainer._repr_html_()


def test_fit_without_loggers_prints_nothing(capfd: Any) -> None:
    make_trainer().fit(DATA, 2)
    assert capfd.readouterr() == ("", "")


def test_terminal_and_file_get_same_messages(tmp_path: Path) -> None:
    file = io.StringIO()
    console = ConsoleLogger(console=Console(file=file, width=40))
    lines = JSONLinesLogger(tmp_path / "metrics.jsonl")
    make_trainer(console, lines, checkpoint=tmp_path / "run").fit(DATA, 2)
    text = file.getvalue()
    assert text.startswith("model        Linear, 4,160 parameters\n")
    assert re.search(r"^Saved step 2 in '", text, re.MULTILINE)
    written = (tmp_path / "metrics.jsonl").read_text()
    assert '"message": "model ' in written
    assert '"message": "Saved step 2 in ' in written


def test_save_that_ends_after_error_is_reported(tmp_path: Path) -> None:
    """`Memory` asserts that the loggers are still open at the report."""

    def batches() -> Any:
        yield from DATA[:2]
        raise OSError("the disk with the data is gone")

    memory = Memory()
    trainer = make_trainer(memory, checkpoint=Checkpoint(tmp_path, every=2))
    with pytest.raises(OSError, match="the disk"), pytest.warns(match="one-shot"):
        trainer.fit(batches(), 4)
    assert memory.messages[-1].startswith("Saved step 2 in ")
