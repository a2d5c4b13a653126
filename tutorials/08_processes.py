# %% [markdown]
# # 8. Many processes and machines
#
# Several machines need several processes, and all processes run the same script. This tutorial
# starts real processes on a laptop, compares their numbers with a single process, and then kills
# some of them.

# %%
import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

directory = Path(tempfile.mkdtemp())
script = directory / "train.py"

# %% [markdown]
# ## The script
#
# Three lines differ from a script for one process:
#
# - `initialize()` comes first. It joins the other processes, and does nothing if there is only one.
# - `data_share` says which rows of each batch this process loads.
# - `print_once` prints on one process only.
#
# The callback simulates a failure: at the first start, process 1 sends itself a signal after step
# 5.

# %%
SCRIPT = """
import os
import signal
import sys
from pathlib import Path

import jax
import nnx_parallel
import numpy as np
import optax
from flax import nnx
from nnx_parallel import FSDP, Callback, Checkpoint, Trainer
from nnx_parallel.distributed import print_once

nnx_parallel.initialize()
directory, harm = Path(sys.argv[1]), sys.argv[2:]  # harm: [] or [signal]


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 256, rngs=rngs)
        self.down = nnx.Linear(256, 32, rngs=rngs)

    def __call__(self, x):  # (batch, 32) -> (batch, 32)
        return self.down(nnx.gelu(self.up(x)))


def loss(model, batch):
    return ((model(batch) - batch[:, ::-1]) ** 2).mean()  # learn to reverse a row


class Harm(Callback):
    def on_step_end(self, trainer, step, metrics):
        is_first_start = os.environ.get("NNX_PARALLEL_RESTART", "0") == "0"
        if harm and step == 5 and jax.process_index() == 1 and is_first_start:
            (directory / "harmed").touch()
            os.kill(os.getpid(), signal.Signals[harm[0]])


class Batches:  # every iteration starts from the first batch
    def __init__(self, index, count):
        self.index, self.count = index, count

    def __iter__(self):
        rng = np.random.default_rng(0)
        while True:
            rows = rng.normal(size=(64, 32)).astype(np.float32)  # the global batch
            yield np.split(rows, self.count)[self.index]  # (64 / count, 32): its share


trainer = Trainer(
    MLP,
    optax.adamw(1e-2),
    loss,
    strategy=FSDP(),
    global_batch_size=64,
    # The next step waits for a save, so that the tutorial always has the same output.
    checkpoint=Checkpoint(directory, every=4, asynchronous=False),
    callbacks=(Harm(),),
    log_every=1,
)
index, count = trainer.data_share
print(f"share {index} of {count}, {jax.local_device_count()} devices")
print_once("devices:", jax.device_count())
trainer.fit(Batches(index, count), num_steps=12)
"""

# %% [markdown]
# ## Two processes compute the same numbers as one
#
# In a terminal, the command is `python -m nnx_parallel launch --processes 2 train.py`. On this
# page, a function runs the same command.

# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code"}
script.write_text(SCRIPT)
# Notebooks set this variable for their child processes, but these write to a pipe.
os.environ.pop("FORCE_COLOR", None)


def run(*command):
    """Runs `python -m nnx_parallel ...`; returns its exit code and its output."""
    sys.argv = ["nnx_parallel", *map(str, command)]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_module("nnx_parallel", run_name="__main__")
        except SystemExit as end:
            code = end.code
    text = output.getvalue().replace(str(directory), "...")
    # Gloo, which communicates between CPU processes, prints a greeting in each.
    lines = [line for line in text.splitlines() if "[Gloo]" not in line]
    return code, "\n".join(lines)


def launch(name, *harm, processes=2, devices=2, max_restarts=0):
    """Runs the script on simulated devices; prints its output, returns its exit code."""
    options = ["--cpu", "--processes", processes, "--devices-per-process", devices]
    options += ["--max-restarts", max_restarts]
    code, text = run("launch", *options, script, directory / name, *harm)
    print(f"{text}\nexit code {code}")
    return code


def losses(name):
    """Returns the losses in the run's `metrics.jsonl`, one per step."""
    lines = (directory / name / "metrics.jsonl").read_text().splitlines()
    entries = map(json.loads, lines)
    return np.array([entry["loss"] for entry in entries if "loss" in entry])


# %% [markdown]
# First, one process with 4 devices:

# %%
one_code = launch("one", processes=1, devices=4)

# %% [markdown]
# Now two processes with 2 devices each. Each process loads 32 of the 64 rows of a step:

# %%
two_code = launch("two", processes=2, devices=2)

# %% [markdown]
# FSDP shards over 4 devices in both runs. The losses are equal up to rounding, because sums over
# devices are added in another order:

# %%
print(np.stack([losses("one"), losses("two")]))  # (2, 12)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert one_code == two_code == 0
assert losses("two").shape == (12,)
np.testing.assert_allclose(losses("two"), losses("one"), rtol=1e-5)

# %% [markdown]
# ## One process dies
#
# SIGKILL ends process 1 without a message, as Linux does when memory is exhausted. Process 0 prints
# which process is lost, and ends.

# %%
killed_code = launch("killed", "SIGKILL")
seconds = time.time() - (directory / "killed" / "harmed").stat().st_mtime
print(f"all processes ended {seconds:.1f} s after the signal")

# %% [markdown]
# The exit code is the code of the first process to fail. As in a shell, it is 128 plus the number of
# the signal. The checkpoint of step 4 remains.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert killed_code == 128 + signal.SIGKILL
assert seconds < 30
assert (directory / "killed" / "4").is_dir()

# %% [markdown]
# ## Restarts
#
# With `--max-restarts 1` the launcher restarts all processes, at most once. Here process 1 dies
# again after step 5:

# %%
restarted_code = launch("killed", "SIGKILL", max_restarts=1)

# %% [markdown]
# The processes were started three times and killed twice. The losses equal the losses of the
# uninterrupted run bit for bit.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert restarted_code == 0
np.testing.assert_array_equal(losses("killed"), losses("two"))

# %% [markdown]
# ## Preemption
#
# Clouds and schedulers send SIGTERM some seconds before they take a machine away. Here process 1
# gets it. All processes agree on a step, save it, and exit with code 143. Slurm, Kubernetes and
# `--max-restarts` then start the run again.

# %%
taken_code = launch("taken", "SIGTERM")

# %% [markdown]
# `inspect` lists the checkpoints of a run. With `--verify` it reads every array and compares its
# checksum:

# %%
verify_code, text = run("inspect", directory / "taken", "--verify")
print(text)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
assert (taken_code, verify_code) == (128 + signal.SIGTERM, 0)
count = len(losses("taken"))
assert (directory / "taken" / str(count)).is_dir()
np.testing.assert_array_equal(losses("taken"), losses("two")[:count])

# %% [markdown]
# ## On a cluster
#
# The scheduler starts the processes, and `initialize()` reads its environment. `launch --print`
# writes the input of the scheduler.


# %% tags=["hide-input"] mystnb={"code_prompt_show": "Show the code"}
def manifest(kind):
    """Returns the output of `launch --print kind` for 16 processes of 4 devices."""
    sizes = ["--processes", 16, "--devices-per-process", 4, "--max-restarts", 3]
    code, text = run("launch", *sizes, "--print", kind, "train.py", "runs/a")
    assert code == 0
    return text


# %% [markdown]
# For Slurm it is a batch script:

# %%
slurm = manifest("slurm")
print(slurm)

# %% [markdown]
# For Kubernetes with JobSet it is a manifest:

# %%
print(manifest("jobset"))

# %% [markdown]
# For a TPU slice it is a script that runs the command on every host:

# %%
tpu = manifest("tpu")
print(tpu)

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Check"}
for text in (slurm, tpu):  # bash accepts them
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)

# %% [markdown]
# [Many processes](../processes.md) lists other failures and their messages.
#
# ## Exercise
#
# Launch four processes of one device each with `Composite(TensorParallel(2), FSDP())`. Before you
# run it: how many shares does the data have, and which processes load the same rows? Then let one
# process load other rows, and read the error before the first step.

# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show an answer"}
# The mesh is fsdp=2 * tensor=2. The batch is sharded over `fsdp` only, so it has two shares:
# processes 0 and 1, a tensor-parallel pair, load the same rows, and so do processes 2 and 3.
changed = SCRIPT.replace(
    "strategy=FSDP()", "strategy=Composite(TensorParallel(2), FSDP())"
)
changed = changed.replace("import FSDP,", "import FSDP, Composite, TensorParallel,")
# Process 1 loads the rows of the other share.
changed = changed.replace(
    "Batches(index, count)", "Batches(index ^ (jax.process_index() == 1), count)"
)
script.write_text(changed)
options = ["--cpu", "--processes", 4, "--devices-per-process", 1]
other_code, text = run("launch", *options, script, directory / "other")
lines = [line for line in text.splitlines() if "share " in line or "Error: " in line]
print("\n".join(sorted(line for line in lines if "is lost" not in line)))
assert other_code == 1
assert "hold the same part of the batch but gave different rows" in text
