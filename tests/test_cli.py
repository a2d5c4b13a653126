"""The command line: scripts for schedulers, and reports on checkpoints."""

import argparse
import dataclasses
import datetime
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

import nnx_parallel
from nnx_parallel import Checkpoint, Trainer
from nnx_parallel.checkpoint import CheckpointReader
from nnx_parallel.cli import _parsers, main  # pyright: ignore[reportPrivateUsage]
from nnx_parallel.cli.inspect import _judge  # pyright: ignore[reportPrivateUsage]
from nnx_parallel.cli.launch import MANIFESTS, Job
from nnx_parallel.distributed import PREEMPTED
from tests.processes.running import ENVIRONMENT

JOB = Job(
    command=("train gpt.py", "--lr", "3e-4", "it's"),
    num_processes=4,
    devices_per_process=8,
    max_restarts=2,
)


CPU_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_NUM_CPU_DEVICES": "8",
    "PJRT_NPROC": "32",
}


def exported(script: str) -> dict[str, str]:
    """The variables that a shell script exports."""
    return dict(re.findall(r"^export (\w+)=(\S+)$", script, re.MULTILINE))


def printed(kind: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    sizes = ["--processes", "4", "--devices-per-process", "8", "--max-restarts", "2"]
    script = ["train gpt.py", "--lr", "3e-4", "it's"]
    assert main(["launch", *sizes, *options, "--print", kind, *script]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["slurm", "tpu"])
def test_scripts_are_valid_bash(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.sh"
    script.write_text(printed(kind, capsys))
    done = subprocess.run(
        ["bash", "-n", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def run_script(kind: str, code: str, tmp_path: Path) -> tuple[int, list[str]]:
    """Runs a script with a fake scheduler, which records the arguments of its calls."""
    bin_directory, calls = tmp_path / "bin", tmp_path / "calls"
    bin_directory.mkdir()
    for name in ("srun", "gcloud", "scontrol"):
        tool = bin_directory / name
        tool.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> {calls}\n{code}\n')
        tool.chmod(0o755)
    script = tmp_path / "script.sh"
    script.write_text(MANIFESTS[kind](JOB))
    environment = {"PATH": f"{bin_directory}:/usr/bin:/bin", "TPU": "a", "ZONE": "b"}
    environment["SLURM_JOB_ID"] = "17"
    done = subprocess.run(["bash", script], env=environment, check=False)
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize("kind", ["slurm", "tpu"])
def test_scripts_run_the_command_once(kind: str, tmp_path: Path) -> None:
    code, calls = run_script(kind, "exit 0", tmp_path)
    assert code == 0
    assert len(calls) == 1
    assert "train gpt.py" in calls[0]
    assert "--lr 3e-4" in calls[0]


@pytest.mark.parametrize("kind", ["slurm", "tpu"])
def test_scripts_restart_given_number_of_times(kind: str, tmp_path: Path) -> None:
    code, calls = run_script(kind, "exit 75", tmp_path)
    assert code == 75
    assert len(calls) == 3


def test_slurm_requeues_preempted_run(tmp_path: Path) -> None:
    code, calls = run_script("slurm", f"exit {PREEMPTED}", tmp_path)
    assert code == PREEMPTED
    assert calls[1:] == ["requeue 17"]
    assert "train gpt.py" in calls[0]


def run_on_nodes(
    tmp_path: Path, job: Job, dead: dict[int, set[str]]
) -> tuple[int, list[str], str]:
    """Runs Slurm's script; each start of the run fails.

    Args:
        dead: The nodes that are lost after each start, by its number from 1.

    Returns:
        The exit code, the nodes of each start or "requeue", and the errors.
    """
    bin_directory, starts = tmp_path / "bin", tmp_path / "starts"
    bin_directory.mkdir()
    starts.touch()
    lost = "\n".join(f"{n} {x}" for n, nodes in dead.items() for x in nodes)
    (tmp_path / "dead").write_text(lost + "\n")
    tools = {
        "srun": f"""
node=$(echo "$*" | grep -o -e '--nodelist=[^ ]*')
number=$(wc -l < {starts})
case "$*" in
*nvidia-smi*)
  awk -v n="$number" -v x="${{node#*=}}" '$1 <= n && $2 == x {{exit 1}}' \\
    {tmp_path}/dead ;;
*) echo "${{node#*=}} $*" >> {starts}; exit 75 ;;
esac""",
        "scontrol": f"""
if [ "$1" = show ]; then printf 'n%s\\n' 1 2 3 4 5; else echo "$1" >> {starts}; fi""",
    }
    for name, code in tools.items():
        (bin_directory / name).write_text(f"#!/bin/bash{code}\n")
        (bin_directory / name).chmod(0o755)
    script = tmp_path / "script.sh"
    script.write_text(MANIFESTS["slurm"](job))
    environment = {"PATH": f"{bin_directory}:/usr/bin:/bin"}
    environment |= {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-5]"}
    command = ["bash", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, starts.read_text().splitlines(), done.stderr


def test_slurm_replaces_lost_nodes_by_spares_and_then_uses_fewer(
    tmp_path: Path,
) -> None:
    job = dataclasses.replace(JOB, spares=1, min_processes=3, max_restarts=5)
    lines = MANIFESTS["slurm"](job).splitlines()
    # Slurm accepts GPUs per task only with --ntasks.
    options = "--nodes=5", "--ntasks-per-node=1", "--gpus-per-node=8", "--no-kill"
    assert all(f"#SBATCH {x}" in lines for x in options)
    dead = {1: {"n2"}, 2: {"n5"}, 3: {"n1"}}
    code, starts, errors = run_on_nodes(tmp_path, job, dead)
    assert [x.split()[0] for x in starts] == [
        "n1,n2,n3,n4",
        "n1,n3,n4,n5",
        "n1,n3,n4",
        "requeue",
    ]
    assert "--nodes=3 --ntasks=3 --nodelist=n1,n3,n4 --kill-on-bad-exit" in starts[2]
    assert code == 1
    assert "Only 2 nodes answer, and 3 are needed." in errors
    assert "gpus-per-task" not in "\n".join(lines)


@pytest.mark.parametrize(
    "options",
    [["--spares", "1"], ["--spares", "1", "--cpu", "--devices-per-process", "2"]],
)
def test_spares_without_devices_raise(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--processes", "2", *options, "train.py"])
    assert "--spares needs --devices-per-process" in capsys.readouterr().err


def test_slurm_script_requests_tasks_devices_and_signal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed("slurm", capsys).splitlines()
    assert "#SBATCH --ntasks=4" in lines
    assert "#SBATCH --gpus-per-task=8" in lines
    # Without this variable, each jax process takes only the device whose index is the
    # number of the task on its node.
    assert "export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7" in lines
    assert "#SBATCH --signal=TERM@120" in lines
    on_cpu = printed("slurm", capsys, "--cpu")
    assert "gpus" not in on_cpu
    assert exported(on_cpu) == CPU_VARIABLES


def test_tpu_command_sets_cluster_variable(capsys: pytest.CaptureFixture[str]) -> None:
    # Over ssh, no variable identifies a TPU cluster. With this one, jax is initialized,
    # and reads the TPU's metadata.
    assert "--command='NNX_PARALLEL_CLUSTER=tpu python" in printed("tpu", capsys)


def test_jobset_matches_schema(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = yaml.safe_load(printed("jobset", capsys))
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert manifest["kind"] == "JobSet"
    name = manifest["metadata"]["name"]
    assert name == "train-gpt"
    spec = manifest["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 2
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": name}
    (jobs,) = spec["replicatedJobs"]
    assert (jobs["name"], jobs["replicas"]) == ("workers", 1)
    job = jobs["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (4, 4)
    assert job["completionMode"] == "Indexed"
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["command"] == ["python", *JOB.command]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    env = {variable["name"]: variable for variable in container["env"]}
    address = f"{name}-workers-0-0.{name}:8476"
    assert env["NNX_PARALLEL_COORDINATOR"]["value"] == address
    assert env["NNX_PARALLEL_NUM_PROCESSES"]["value"] == "4"
    field = env["NNX_PARALLEL_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_jobset_does_not_count_restarts_after_preemption(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = yaml.safe_load(printed("jobset", capsys))["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    codes, conditions = job["podFailurePolicy"]["rules"]
    assert codes["action"] == conditions["action"] == "FailJob"
    # Kubernetes refuses the policy unless a container has this name and pods are not
    # restarted.
    pod = job["template"]["spec"]
    container = codes["onExitCodes"].pop("containerName")
    assert container == pod["containers"][0]["name"]
    assert codes["onExitCodes"] == {"operator": "In", "values": [PREEMPTED]}
    assert conditions["onPodConditions"] == [
        {"type": "DisruptionTarget", "status": "True"}
    ]
    assert pod["restartPolicy"] == "Never"


def gke_pods(topology: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, Any]:
    """The Job and the pod in the manifest for a slice of TPUs."""
    assert main(["launch", "--print", "gke", "--topology", topology, *JOB.command]) == 0
    (jobs,) = yaml.safe_load(capsys.readouterr().out)["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    return job, job["template"]["spec"]


@pytest.mark.parametrize(
    ("topology", "label", "num_hosts", "chips"),
    [
        ("v5p:2x2x4", "tpu-v5p-slice", 4, 4),
        ("v5p:2x2x1", "tpu-v5p-slice", 1, 4),
        ("v4:4x4x4", "tpu-v4-podslice", 16, 4),
        ("v5e:4x8", "tpu-v5-lite-podslice", 8, 4),
        ("v6e:16x16", "tpu-v6e-slice", 64, 4),
        ("v6e:1x1", "tpu-v6e-slice", 1, 1),
    ],
)
def test_gke_manifest_has_a_pod_for_each_host(
    topology: str,
    label: str,
    num_hosts: int,
    chips: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, pod = gke_pods(topology, capsys)
    assert (job["parallelism"], job["completions"]) == (num_hosts, num_hosts)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology.partition(":")[2],
    }
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": chips}}
    assert container["command"] == ["python", *JOB.command]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env["NNX_PARALLEL_NUM_PROCESSES"] == str(num_hosts)
    # The other rules are those of the manifest for GPUs.
    given = {"command": JOB.command, "num_processes": num_hosts}
    gpus = yaml.safe_load(MANIFESTS["jobset"](Job(**given)))
    (jobs,) = gpus["spec"]["replicatedJobs"]
    assert job["podFailurePolicy"] == jobs["template"]["spec"]["podFailurePolicy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v5p:2x2"], "GKE has no slice 'v5p:2x2'. Write one slice"),
        (["--topology", "v9:2x2x1"], "no hardware is called 'v9'"),
        (["--topology", "h100:8"], "Kinds: v4, v5e, v5p, v6e."),
        (["--topology", "2*v5p:2x2x1"], "GKE has no slice '2*v5p:2x2x1'."),
        (["--topology", "v5p:1x1x5"], "at most 4 chips or a multiple of 4."),
        ([], "--print gke and --topology are used together"),
        (
            ["--topology", "v5p:2x2x4", "--processes", "2"],
            "--processes is 2, but v5p:2x2x4 has 4 hosts with 4 chips each.",
        ),
        (
            ["--topology", "v5p:2x2x4", "--devices-per-process", "8"],
            "--devices-per-process is 8, but v5p:2x2x4 has 4 hosts with 4 chips each.",
        ),
        (["--topology", "v5p:2x2x4", "--cpu"], "--cpu and --topology exclude"),
    ],
)
def test_wrong_topology_is_an_error(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if not options:
        options = ["--processes", "2"]
    with pytest.raises(SystemExit):
        main(["launch", "--print", "gke", *options, "train.py"])
    assert message in capsys.readouterr().err


def test_topology_is_only_for_gke(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--topology", "v5p:2x2x4", "train.py"])
    assert "--print gke and --topology are used together" in capsys.readouterr().err


def test_jobset_name_begins_with_letter(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--processes", "2", "--print", "jobset"]
    assert main(["launch", *options, "08_processes.py"]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert manifest["metadata"]["name"] == "run-08-processes"


def test_jobset_sets_variables_for_simulated_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    manifest = yaml.safe_load(printed("jobset", capsys, "--cpu"))
    (jobs,) = manifest["spec"]["replicatedJobs"]
    (container,) = jobs["template"]["spec"]["template"]["spec"]["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env.items() >= CPU_VARIABLES.items()
    assert container["resources"] == {"limits": {}}


def test_jobset_keeps_special_characters(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.py", "\N{GRINNING FACE}", "caf\xe9", "a\x85b", "tab\t"]
    assert main(["launch", "--processes", "2", "--print", "jobset", *words]) == 0
    manifest = yaml.safe_load(capsys.readouterr().out)
    (jobs,) = manifest["spec"]["replicatedJobs"]
    (container,) = jobs["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", *words]


def test_jobset_quotes_number_like_strings(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("jobset", capsys)
    assert '- "3e-4"\n' in text
    assert "replicas: 1\n" in text


def test_too_few_visible_devices_is_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    sizes = ["--processes", "2", "--devices-per-process", "2"]
    assert main(["launch", *sizes, "train.py"]) == 2
    message = (
        "CUDA_VISIBLE_DEVICES=0,1,2 names 3 devices, but 2 processes of 2 devices "
        "need 4. Launch fewer processes, or make more devices visible.\n"
    )
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("wrong", [["--processes", "0"], ["--max-restarts", "-1"]])
def test_invalid_process_and_restart_counts_fail(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--processes", "1", *wrong, "x.py"])
    message = "--processes must be at least 1 and --max-restarts at least 0"
    assert message in capsys.readouterr().err


def slurm_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The command that each process runs, for arguments of ``launch``."""
    assert main(["launch", "--print", "slurm", *arguments]) == 0
    return re.findall(r"--kill-on-bad-exit=1 (.*) && exit", capsys.readouterr().out)[0]


def test_launch_reads_options_after_script(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "train.py",
        "--steps",
        "10",
        "--processes=2",
        "x",
        "--",
        "--cpu",
        "--",
        "y",
    ]
    assert slurm_command(capsys, *words) == "python train.py --steps 10 x --cpu -- y"
    words = ["--processes", "2", "train.py", "--steps", "10", "--", "--cpu"]
    assert slurm_command(capsys, *words) == "python train.py --steps 10 --cpu"
    assert main(["launch", "--print", "slurm", "a.py", "--processes", "3"]) == 0
    assert "#SBATCH --ntasks=3\n" in capsys.readouterr().out


def test_ambiguous_option_after_script_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--processes", "2", "train.py", "--host=a"])
    message = (
        "error: --host=a follows the script, and both launch and the script may have "
        "this option. For launch, write it before train.py. For the script, write it "
        "after --: train.py -- --host=a\n"
    )
    assert capsys.readouterr().err.endswith(message)


def test_launch_needs_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "train.py", "--steps", "3"])
    assert "arguments are required: --processes\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "guess"),
    [("plann", " Did you mean 'plan'?"), ("inspcet", " Did you mean 'inspect'?")],
)
def test_misspelt_command_gets_guess(
    word: str, guess: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([word, "train.py"])
    commands = "Commands: launch, plan, verify, inspect, doctor."
    message = f"error: there is no command {word!r}.{guess} {commands}\n"
    assert capsys.readouterr().err.endswith(message)


def test_console_script_is_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    module, name = project["project"]["scripts"]["nnx-parallel"].split(":")
    monkeypatch.setattr(sys, "argv", ["/bin/nnx-parallel", "--help"])
    with pytest.raises(SystemExit, match="0"):
        getattr(importlib.import_module(module), name)()
    assert capsys.readouterr().out.startswith("usage: nnx-parallel [-h]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    trainer = Trainer(
        model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        optimizer=optax.adam(0.1),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        checkpoint=Checkpoint(directory, every=2),
        loggers=(),
    )
    trainer.fit([{"x": np.ones((8, 4), np.float32)}] * 4, 4)
    return directory


def test_inspect_arrays_lists_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run), "--verify", "--arrays"]) == 0
    text = capsys.readouterr().out
    assert text.count("complete: every array matches its checksum") == 2
    for line in (
        "strategy: DataParallel()",
        "model: Linear",
        "optimizer: ScaleByAdamState",
        "position: epoch 0, 32 rows read",
        "mesh: data=8",
        "model: 2 arrays, 80 B",
        "kernel  float32[4, 4]  ",
    ):
        assert line in text, text


def test_inspect_prints_table_of_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run)]) == 0
    text = capsys.readouterr().out
    where, header, *lines = text.splitlines()
    assert where == str(run)
    assert header.split() == ["step", "date", "size", "loss", "arrays"]
    today = datetime.datetime.now().strftime("%Y-%m-%d")
    saved = CheckpointReader(run)
    losses = {step: saved.describe(step).metrics["loss"] for step in (2, 4)}
    for (step, loss), line in zip(losses.items(), lines, strict=False):
        row = rf" +{step}  {today} \d\d:\d\d +[\d.]+ KiB +(\S+)  not verified"
        found = re.fullmatch(row, line)
        assert found, line
        assert float(found[1]) == pytest.approx(loss, rel=1e-4)
    assert "model: 2 arrays, 80 B" in text
    assert "optimizer_states" not in text
    assert "kernel" not in text  # only `--arrays` lists them
    assert max(map(len, (header, *lines[:2]))) <= 80


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action.choices, dict) and action.nargs == argparse.PARSER:
            for command in action.choices.values():
                yield from options_of(command)
        else:
            yield action


def test_every_option_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = list(options_of(_parsers()[0]))
    assert len(found) > 12
    assert [option.dest for option in found if not option.help] == []
    for command in ("launch", "plan", "inspect", "doctor"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert f"{command} [-h]" in capsys.readouterr().out


def test_version_lists_related_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    text = capsys.readouterr().out.replace("\n", " ")
    assert text.startswith(f"nnx-parallel {nnx_parallel.__version__} (python ")
    assert f"jax {jax.__version__}" in text


def test_inspect_reports_damage(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(run, directory)
    shutil.rmtree(directory / "4" / "model")
    shutil.copytree(directory / "2" / "model", directory / "4" / "model")
    (directory / "2" / "_CHECKPOINT_METADATA").unlink()
    assert main(["inspect", str(directory)]) == 1
    assert "DAMAGED: it has no metadata left" in capsys.readouterr().out
    assert main(["inspect", str(directory), "--verify"]) == 1
    assert "model: `kernel` has checksum" in capsys.readouterr().out


def test_inspect_needs_no_accelerator(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nnx_parallel", "inspect", str(run), "--verify"],
        env=ENVIRONMENT | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_deleted_step_is_not_damaged(run: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(run, directory)
    saved = CheckpointReader(directory)
    assert saved.steps == [2, 4]
    shutil.rmtree(directory / "2")
    _, verdict = _judge(saved, 2, verify=True)
    assert verdict == "deleted by the run meanwhile"
    _, verdict = _judge(saved, 4, verify=True)
    assert verdict.startswith("complete")


def test_step_in_deletion_is_checked_again(run: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(run, directory)
    (directory / "2" / "_CHECKPOINT_METADATA").unlink()
    saved = CheckpointReader(directory)
    assert list(saved.corrupt_steps) == [2]
    assert _judge(saved, 2, verify=False)[1] == "DAMAGED: it has no metadata left"
    shutil.rmtree(directory / "2")
    assert _judge(saved, 2, verify=False)[1].startswith("deleted")


def test_inspect_without_checkpoint_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "No directory" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"No checkpoint in '{tmp_path}'." in capsys.readouterr().err
