# %% [markdown]
# # 8. Many processes and machines
#
# A process drives the devices of one machine. Several machines need several processes, which all
# run the same script. This tutorial starts real ones on a laptop, checks that they compute the
# numbers of one, and then kills some.

# %%
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

directory = Path(tempfile.mkdtemp())

# %% [markdown]
# ## The script
#
# Three lines differ from a script for one process:
#
# - `initialize()` joins the other processes. It comes first, and does nothing for a single one.
# - `data_share` says which rows of each batch this process loads.
# - `print_once` prints on one process only.
#
# The callback is here to do harm: on request, process 1 sends itself a signal after step 5, but
# not after a restart, which the launcher counts.

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
from nnx_parallel import FSDP, Callback, Checkpoint, Trainer, print_once

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
script = directory / "train.py"
script.write_text(SCRIPT)

# %% [markdown]
# ## Two processes give the numbers of one
#
# `launch` starts the processes of a machine, and prefixes each line with the number of its
# process. `--cpu` simulates the devices. First one process with 4 devices.


# %%
# Notebooks set FORCE_COLOR for their children; these write to a pipe.
ENVIRONMENT = {key: x for key, x in os.environ.items() if key != "FORCE_COLOR"}


def run(*command):
    """Runs `python -m nnx_parallel ...`; returns its exit code and its output."""
    done = subprocess.run(
        [sys.executable, "-m", "nnx_parallel", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ENVIRONMENT,
        text=True,
        check=False,
    )
    text = done.stdout.replace(str(directory), "...")
    # Gloo, which communicates between CPU processes, prints a greeting in each.
    lines = [line for line in text.splitlines() if "[Gloo]" not in line]
    return done.returncode, "\n".join(lines)


def launch(name, *harm, processes=2, devices=2, max_restarts=0):
    options = ["--cpu", "--processes", processes, "--devices-per-process", devices]
    options += ["--max-restarts", max_restarts]
    code, text = run("launch", *options, script, directory / name, *harm)
    print(f"{text}\nexit code {code}")
    return code


assert launch("one", processes=1, devices=4) == 0

# %% [markdown]
# Now two processes with 2 devices each: the same script, the same 64 rows per step, 32 from
# each process.

# %%
assert launch("two", processes=2, devices=2) == 0

# %% [markdown]
# FSDP shards over 4 devices both times, now across processes. The losses are equal up to
# rounding, since sums over devices have another order.


# %%
def losses(name):
    lines = (directory / name / "metrics.jsonl").read_text().splitlines()
    entries = map(json.loads, lines)
    return np.array([entry["loss"] for entry in entries if "loss" in entry])


print(np.stack([losses("one"), losses("two")]))  # (2, 12)
assert losses("two").shape == (12,)
np.testing.assert_allclose(losses("two"), losses("one"), rtol=1e-5)

# %% [markdown]
# ## One process dies
#
# SIGKILL ends process 1 without a message, as Linux does when memory is exhausted. Process 0
# would deadlock in the next collective. Instead it prints which process is lost, and ends.

# %%
code = launch("killed", "SIGKILL")
seconds = time.time() - (directory / "killed" / "harmed").stat().st_mtime
print(f"all over {seconds:.1f} s after the signal")
assert code == 128 + signal.SIGKILL
assert seconds < 30
assert (directory / "killed" / "4").is_dir()

# %% [markdown]
# The exit code is that of the first process to fail, as in a shell: 128 plus the signal's number.
# The checkpoint of step 4 remains.
#
# ## Restarts
#
# The same command resumes; with `--max-restarts 1` the launcher restarts once automatically.
# Process 1 dies again after step 5, but not after the restart.

# %%
assert launch("killed", "SIGKILL", max_restarts=1) == 0

# %% [markdown]
# Three starts, two deaths, and bit for bit the losses of the uninterrupted run.

# %%
np.testing.assert_array_equal(losses("killed"), losses("two"))

# %% [markdown]
# ## Preemption
#
# Clouds and schedulers first send SIGTERM, and then wait some seconds. Process 1 gets it. All
# processes agree on the step after which they stop, save it, and exit with code 0: nothing has
# failed.

# %%
assert launch("taken", "SIGTERM") == 0

# %% [markdown]
# Checkpoints can be verified without a run: `inspect --verify` reads every array and compares its
# checksum.

# %%
code, text = run("inspect", directory / "taken", "--verify")
steps = [line for line in text.splitlines() if line.startswith("  step  ")]
print("\n".join(steps))
assert code == 0
assert all("whole: every array has its checksum" in line for line in steps)
assert int(steps[-1].split()[1]) == len(losses("taken"))
np.testing.assert_array_equal(losses("taken"), losses("two")[: len(losses("taken"))])

# %% [markdown]
# ## On a cluster
#
# There the scheduler starts the processes, one or more per machine, and the script does not
# change: `initialize()` reads the environment. `--print` writes the input of the scheduler. For
# Slurm that is a batch script.


# %%
def manifest(kind):
    sizes = ["--processes", 16, "--devices-per-process", 4, "--max-restarts", 3]
    code, text = run("launch", *sizes, "--print", kind, "train.py", "runs/a")
    assert code == 0
    return text


def is_bash(text):
    return (
        subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode
        == 0
    )


slurm = manifest("slurm")
print(slurm)
assert is_bash(slurm)

# %% [markdown]
# For Kubernetes with JobSet it is a manifest.

# %%
print(manifest("jobset"))

# %% [markdown]
# For a TPU slice it is a command for every host.

# %%
tpu = manifest("tpu")
print(tpu)
assert is_bash(tpu)

# %% [markdown]
# [Many processes](../processes.md) lists what else can fail, and the messages.
#
# ## Exercise
#
# Launch four processes of one device each with `Composite(TensorParallel(2), FSDP())`. Before you
# run it: how many shares does the data have, and which processes load the same rows? Then make one
# of them load other rows, and read the error before the first step.
