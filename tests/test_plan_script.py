"""`plan` reads a script without training; errors name what prevents planning."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_parallel.cli.names import Names
from nnx_parallel.cli.plan import parse_fix, plan_script
from nnx_parallel.errors import PlanError
from nnx_parallel.plan import Topology
from nnx_parallel.plan.parts import Parts

HEAD = """
import numpy as np, optax, sys
from flax import nnx
from nnx_parallel import FSDP, Trainer

def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()

def make_trainer():
    return Trainer(
        lambda rngs: nnx.Linear(64, 64, rngs=rngs), optax.adam(1e-3), loss,
        strategy=FSDP(8), checkpoint="runs",
    )

batch = {"x": np.ones((64, 64), np.float32), "y": np.ones((64, 64), np.float32)}
"""


def run(directory: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(HEAD + body)
    command = [sys.executable, "-m", "nnx_parallel", "plan", "train.py"]
    given = ["--topology", "cpu:8", "--compile", "0", *options]
    return subprocess.run(
        command + given, capture_output=True, text=True, check=False, cwd=directory
    )


@pytest.mark.slow
def test_script_is_planned_without_training(tmp_path: Path) -> None:
    body = "import os, tempfile\nwith tempfile.TemporaryDirectory() as directory:\n"
    body += "    os.makedirs(directory + '/a/b')\n"
    body += "    os.rmdir(directory + '/a/b')\n"
    body += "    make_trainer().fit([batch] * int(sys.argv[1]), num_steps=9)\n"
    body += "open('x', 'w')"
    page = ("--html", "plan.html", "--json", "plan.json", "--compile", "1")
    cache = ("--fix", "remat=none", "--fix", "fsdp=8", "--cache", "cache")
    done = run(tmp_path, body, *page, *cache, "--", "3")
    assert done.returncode == 0, done.stderr
    assert "Linear of 4,160 parameters, 64 rows a step, on cpu:8" in done.stdout
    assert "Trainer(..., strategy=FSDP(size=8" in done.stdout
    assert "1 compiled" in done.stdout
    assert (tmp_path / "plan.html").exists()
    assert (tmp_path / "plan.json").exists()
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "runs").exists()


REFUSED = {
    "no trainer": ("print('hello')", "ran to its end, and built no Trainer"),
    "no fit": ("make_trainer()", "built a Trainer and did not call fit"),
    "other training": (
        "optax.apply_updates({}, {})",
        "trains by optax.apply_updates in line",
    ),
    "read model": ("make_trainer().model", "reads trainer.model in line"),
    "idle step": ("make_trainer().train_step", "and did not call fit"),
    "plain loop": ("optax.apply_updates({}, {})", "--model, --tx, --loss, --batch."),
    "network": (
        "import socket\nsocket.create_connection(('192.0.2.1', 80))",
        "opens a network connection to 192.0.2.1:80 in line",
    ),
    "datagram": (
        "import socket\nopened = socket.socket(type=socket.SOCK_DGRAM)\n"
        "opened.sendto(b'x', ('192.0.2.1', 9))",
        "sends over the network to 192.0.2.1:9 in line",
    ),
    "deletion": (
        "import os\nos.remove('/nowhere/mine')",
        "deletes '/nowhere/mine' in line",
    ),
    "failure": ("1 / 0", "failed before it trained in line"),
    "no data": (
        "make_trainer().fit(iter(()), num_steps=1)",
        "gives no batch here: StopIteration",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED)
def test_unplannable_script_fails_with_message(
    tmp_path: Path, body: str, message: str
) -> None:
    done = run(tmp_path, body)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_script_with_offload_is_planned(tmp_path: Path) -> None:
    body = """
from nnx_parallel import Backend, Offload
build = lambda rngs: nnx.Linear(64, 64, rngs=rngs)
trainer = Trainer(build, optax.adam(1e-3), loss, backend=Backend(offload=Offload()))
trainer.fit([batch], num_steps=1)
"""
    done = run(tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert "offload=Offload(optimizer=True" in done.stdout.splitlines()[-1]


LOOPS = {
    "train_step": (
        """
trainer = make_trainer()
state = trainer.state
for _ in range(9):
    state, _ = trainer.train_step(state, trainer.shard_batch(batch))
""",
        (),
    ),
    "nnx.jit": (
        """
@nnx.jit
def train_step(model, optimizer, batch):
    loss_of_model, grads = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, grads)

def main():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    for data in [batch] * 9:
        train_step(model, optimizer, data)

if __name__ == "__main__":
    main()
""",
        ("--model", "model", "--tx", "optimizer", "--loss", "loss", "--batch", "data"),
    ),
    "Players": (
        """
from nnx_parallel import Player, Players
first = Player(optax.adam(1e-3), loss, nnx.Param)
players = Players(first=first, second=Player(optax.sgd(1.0), loss, nnx.Param))
trainer = Trainer(lambda rngs: nnx.Linear(64, 64, rngs=rngs), players)
trainer.fit([batch], num_steps=9)
""",
        ("--player", "second"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loop_of_script_is_planned(tmp_path: Path, name: str) -> None:
    body, options = LOOPS[name]
    done = run(tmp_path, body, *options)
    assert done.returncode == 0, done.stderr
    assert "Linear of 4,160 parameters, 64 rows a step, on cpu:8" in done.stdout


def loss(model: Any, batch: Any) -> jax.Array:
    return model(batch["x"]).mean()


def scopes() -> list[dict[str, Any]]:
    """Returns global and local variables of a script with a plain NNX loop."""
    net = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    tx = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
    batch = {"x": np.ones((8, 4), np.float32)}
    return [{"np": np, "nnx": nnx}, {"net": net, "tx": tx, "f": loss, "batch": batch}]


NAMED = {"model": "net", "tx": "tx", "loss": "f", "batch": ["batch"]}
ALL = "A script without a Trainer needs --model, --tx, --loss and --batch"


def test_plain_loop_is_planned_by_names() -> None:
    parts = named_parts()
    assert (parts.num_rows, parts.wrt) == (8, nnx.Param)
    assert Names.of(dict.fromkeys(NAMED)) is None


def named_parts(**changed: Any) -> Parts:
    names = Names.of(NAMED | changed)
    assert names is not None
    return names.parts_in(scopes(), Topology.parse("cpu:8"), None, "train.py")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": None}, f"{ALL}, each with the name of a variable. Missing: --loss."),
        ({"batch": []}, "Missing: --batch."),
        ({"model": "a.b"}, "--model 'a.b' is not a name. It must be the name of a"),
        (
            {"model": "nett"},
            "--model 'nett' is not a variable of 'train.py' when training begins. It "
            "must be a model, or a class or function that takes rngs and returns one. "
            "Did you mean 'net'? Valid values: ['net'].",
        ),
        ({"tx": "net"}, "Valid values: ['tx']."),
        ({"loss": "np"}, "Valid values: ['f']."),
        ({"batch": ["tx"]}, "Valid values: ['batch']."),
        ({"model": "f"}, "--model, --tx and --loss of 'train.py' cannot be trained: "),
    ],
)
def test_names_of_unsuitable_variables_raise(changed: dict, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        named_parts(**changed)


@pytest.mark.slow
def test_batch_option_takes_shapes(tmp_path: Path) -> None:
    shapes = ("--batch", "x=float32[128,64]", "--batch", "y=float32[128,64]")
    done = run(tmp_path, "make_trainer()", *shapes)
    assert done.returncode == 0, done.stderr
    assert "128 rows a step" in done.stdout
    wrong = run(tmp_path, "make_trainer()", "--batch", "x=float[1")
    assert "write NAME=DTYPE[SHAPE]" in wrong.stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"compile": "some"}, "--compile 'some': it must be a number, or all"),
        ({"json": "plan.txt"}, "--json 'plan.txt': the file's name must end in .json"),
        ({"batch": ["x"]}, "--batch 'x': write NAME=DTYPE[SHAPE]"),
        ({"fix": ["tenser=2"]}, "fix has 'tenser'. Did you mean 'tensor'?"),
        ({"topology": "pod"}, "topology='pod' is unknown"),
        ({}, "Script 'none.py' does not exist"),
    ],
)
def test_invalid_options_fail_with_message(
    capsys: pytest.CaptureFixture[str], changed: dict, message: str
) -> None:
    settings = {
        "topology": "cpu:8",
        "fix": [],
        "batch": [],
        "compile": "0",
        "processes": 1,
        "cache": None,
        "json": None,
        "html": None,
        "script": "none.py",
        "arguments": [],
        **dict.fromkeys(("player", "model", "tx", "loss")),
    }
    assert plan_script(settings | changed) == 2
    assert message in capsys.readouterr().err


def test_fix_option_parses_values() -> None:
    found = parse_fix(["tensor=8", "sequence=true", "remat=full"])
    assert found == {"tensor": 8, "sequence": True, "remat": "full"}
    with pytest.raises(PlanError, match="write NAME=VALUE"):
        parse_fix(["tensor"])
