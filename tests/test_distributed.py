"""Start-up, agreement, signals and the watchdog, as far as one process shows them."""

import dataclasses
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from flax import nnx

from nnx_parallel import FSDP, DataParallel, Faults, Trainer, initialize
from nnx_parallel.distributed import (
    HUNG,
    Termination,
    Watchdog,
    check_consistent,
    messages,
    runtime,
)
from nnx_parallel.distributed.initialize import ProcessSpec, find_process
from nnx_parallel.distributed.messages import Client, Server, connect, listen
from nnx_parallel.errors import (
    CheckpointSaveError,
    DisagreementError,
    ProcessError,
)
from nnx_parallel.sharding import PolicyRules
from nnx_parallel.sharding.rules import hash_code
from tests.processes.running import ENVIRONMENT, ROOT
from tests.waiting import wait_until

SBATCH = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NODELIST": "n[0-3]"}
STEP = SBATCH | {
    "SLURM_STEP_NODELIST": "n[0-3]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (STEP | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        # A shell on a node is not a task.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, None),
        (SBATCH, None),
        (SBATCH | {"SLURM_NTASKS": "4"}, None),
        (STEP, ProcessSpec()),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ProcessSpec()),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, ProcessSpec()),
        ({"NNX_PARALLEL_CLUSTER": "tpu"}, ProcessSpec()),
        (
            {
                "NNX_PARALLEL_COORDINATOR": "h:1",
                "NNX_PARALLEL_NUM_PROCESSES": "3",
                "NNX_PARALLEL_PROCESS_ID": "2",
                "SLURM_JOB_ID": "1",
            },
            ProcessSpec(coordinator_address="h:1", num_processes=3, process_id=2),
        ),
    ],
)
def test_process_finds_cluster_settings(
    environment: dict[str, str], place: ProcessSpec | None
) -> None:
    assert find_process(ProcessSpec(), environment) == place


def test_explicit_settings_override_environment() -> None:
    told = ProcessSpec(coordinator_address="h:1", num_processes=2, process_id=0)
    assert find_process(told, {"SLURM_JOB_ID": "1"}) == told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"num_processes": 2, "process_id": 0, "coordinator_address": "h:1"},
            "initialize() came too late: JAX has started and found 8 devices. Call it "
            "at the start of the script, before any code that uses an array or a "
            "device.",
        ),
    ],
)
def test_late_initialize_raises(given: dict[str, Any], message: str) -> None:
    assert jax.device_count() == 8
    with pytest.raises(ProcessError, match=re.escape(message)):
        initialize(**given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "num_processes=2",
            "initialize() got coordinator_address=None, num_processes=2, "
            "process_id=None. Give all three arguments, or none: then they are read "
            "from the environment.",
        ),
        (
            "'h:1', 2, 2",
            "process_id=2 is invalid for num_processes=2. It must be from 0 to 1.",
        ),
    ],
)
def test_incomplete_process_settings_raise(call: str, message: str) -> None:
    script = f"import nnx_parallel; nnx_parallel.initialize({call})"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr


def test_invalid_process_count_raises() -> None:
    environment = {
        "JAX_COORDINATOR_ADDRESS": "h:1",
        "JAX_NUM_PROCESSES": "two",
        "JAX_PROCESS_ID": "0",
    }
    message = "The environment variable JAX_NUM_PROCESSES is 'two'. It must be an"
    with pytest.raises(ProcessError, match=re.escape(message)):
        find_process(ProcessSpec(), environment)


def test_one_process_always_agrees() -> None:
    check_consistent("seed", {"seed": 1})


def test_hash_code_depends_on_behavior() -> None:
    def make(number: int) -> Any:
        return lambda x: x + number

    def other(x: int) -> int:
        return x - 1

    assert hash_code(make(1)) == hash_code(partial(make(1)))
    assert hash_code(other) != hash_code(make(1))
    assert hash_code(len) == "len"


SETS = """
from nnx_parallel.sharding.rules import hash_code
print(hash_code(lambda x: x in {"mlp", "heads", "vocab", ("a", "b", "c")}))
print(hash_code(lambda x: (lambda y: y in {"one", "two", "three"})(x)))
"""


def test_hash_code_ignores_hash_seed() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", SETS],
            env=ENVIRONMENT | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]


def test_strategy_description_has_no_addresses() -> None:
    def policy(info: Any) -> None:
        return None

    def loss(model: Any, batch: Any) -> jax.Array:
        return model(batch).mean()

    def linear(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(2, 2, rngs=rngs)

    @dataclasses.dataclass(frozen=True, repr=False)
    class Mine(DataParallel):
        choose: Any = None

    for strategy in (FSDP(rules=(PolicyRules(policy),)), Mine(choose=policy)):
        trainer = Trainer(linear, optax.sgd(0.1), loss, strategy=strategy)
        text = trainer._run.checkpoints.description["strategy"]  # pyright: ignore[reportPrivateUsage]
        assert "policy" in text
        assert " at 0x" not in text
    assert repr(PolicyRules(policy)) == f"PolicyRules({hash_code(policy)})"


def test_termination_records_signal_and_restores_handler() -> None:
    with Termination() as termination:
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.is_requested
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_earlier_handler_warns_and_is_called() -> None:
    calls = []

    def mine(number: int, frame: Any) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with pytest.warns(UserWarning, match=r"A handler of SIGTERM, `.*mine`, was in"):
            termination = Termination().__enter__()
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.is_requested
        assert calls == [signal.SIGTERM]
        termination.__exit__()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_swallowing_handler_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    def mine(number: int, frame: Any) -> None:
        pass

    with Termination() as termination:
        termination.check()
        assert len(recwarn) == 0
        before = signal.signal(signal.SIGTERM, mine)
        with pytest.warns(UserWarning, match="a preemption will end the run"):
            termination.check()
        termination.check()
        signal.signal(signal.SIGTERM, before)


def test_invalid_step_timeout_raises() -> None:
    message = "step_timeout=0 is invalid. It must be a positive number of seconds, None"
    with pytest.raises(ValueError, match=re.escape(message)):
        Watchdog(0)
    with pytest.raises(ValueError, match=re.escape(message)):
        Faults(step_timeout=0)


@pytest.mark.parametrize(
    ("processes", "step_seconds", "awaited", "limit"),
    [
        (1, [60.0], "step", None),
        (2, [], "step", 1800),
        (2, [0.5], "step", 600),
        (2, [60.0, 70.0, 3000.0], "step", 1400),
        (2, [0.5], "batch of the evaluation", 1800),
    ],
)
def test_default_step_timeout_follows_median(
    monkeypatch: pytest.MonkeyPatch,
    processes: int,
    step_seconds: list[float],
    awaited: str,
    limit: float | None,
) -> None:
    monkeypatch.setattr(runtime, "process_count", lambda: processes)
    assert Watchdog(Faults().step_timeout, step_seconds).limit(awaited) == limit
    assert Watchdog(5, step_seconds).limit(awaited) == 5
    assert Watchdog(None, step_seconds).limit(awaited) is None


@pytest.mark.parametrize(("timeout", "counts"), [("auto", False), (0.1, True)])
def test_only_default_step_timeout_leaves_out_data(
    monkeypatch: pytest.MonkeyPatch, timeout: Any, counts: bool
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(runtime, "_AUTO_SECONDS", 0.1)
    monkeypatch.setattr(runtime, "process_count", lambda: 2)
    monkeypatch.setattr(runtime.faulthandler, "dump_traceback", lambda **_: None)
    monkeypatch.setattr(runtime, "_ending", threading.Lock())
    monkeypatch.setattr(runtime, "_end", lambda *_: ended.set())
    watchdog = Watchdog(timeout, [1e-3])

    def read() -> Iterator[int]:
        for step in range(2):
            assert ended.wait(0.5) is (counts and step > 0)
            yield step

    for step in watchdog.reading(read()):
        watchdog.arm(step)
    assert ended.is_set() is counts
    watchdog.arm(2)
    assert ended.wait(5)
    watchdog.disarm()


def can_listen(host: str) -> bool:
    try:
        listen(host).close()
    except OSError:
        return False
    return True


def join_server(server: Server, process: int, host: str = "127.0.0.1") -> Connection:
    connection = connect(host, server.port, b"key")
    connection.send_bytes(json.dumps({"process": process}).encode())
    return connection


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("is_open_to_all", [False, True])
def test_silent_connection_delays_no_process(host: str, is_open_to_all: bool) -> None:
    if not can_listen(host):
        pytest.skip(f"this machine has no {host}")
    server = Server("" if is_open_to_all else host, 2, b"key")
    with socket.create_connection((host, server.port)):
        peers = [join_server(server, process, host) for process in range(2)]
        for process, peer in enumerate(peers):
            put = {"op": "put", "key": "x", "value": process}
            peer.send_bytes(json.dumps(put).encode())
        for peer in peers:
            assert peer.poll(30)
            assert json.loads(peer.recv_bytes())["values"] == [0, 1]
            peer.close()


def test_default_socket_timeout_has_no_effect() -> None:
    server = Server("localhost", 1, b"key")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.2)
    try:
        peer = join_server(server, 0, "localhost")
        assert not peer.poll(0.5)
        peer.send_bytes(json.dumps({"op": "put", "key": "x", "value": 1}).encode())
        assert json.loads(peer.recv_bytes())["values"] == [1]
        peer.close()
    finally:
        socket.setdefaulttimeout(before)


def test_connection_without_key_raises() -> None:
    server = Server("127.0.0.1", 1, b"another", join_seconds=1)
    with pytest.raises(AuthenticationError):
        join_server(server, 0)


def test_missing_processes_are_named() -> None:
    server = Server("127.0.0.1", 3, b"key", join_seconds=1)
    with join_server(server, 1) as peer:
        assert peer.poll(30)
        assert json.loads(peer.recv_bytes()) == {
            "op": "lost",
            "process": 0,
            "reason": "it did not join within 1 s. Missing processes: [0, 2]",
        }


def test_skipped_exchange_does_not_shift_others() -> None:
    server = Server("127.0.0.1", 2, b"key")
    clients = [
        Client(join_server(server, i), None, lambda *lost: None) for i in range(2)
    ]
    first, second, third = (
        [client.reserve("x") for client in clients] for _ in range(3)
    )
    results: dict[tuple[str, int], list] = {}

    def give(turn: str, process: int, keys: list[str]) -> None:
        value = f"{turn} of {process}"
        results[turn, process] = clients[process].allgather(keys[process], value, 30)

    # No process makes the first exchange. Each process makes the others in another
    # order.
    turns = [("second", 0, second), ("third", 1, third), ("second", 1, second)]
    threads = [threading.Thread(target=give, args=turn) for turn in turns]
    for thread in threads:
        thread.start()
    give("third", 0, third)
    for thread in threads:
        thread.join()
    assert first == ["x 1", "x 1"]
    assert results == {
        (turn, process): [f"{turn} of 0", f"{turn} of 1"]
        for turn in ("second", "third")
        for process in range(2)
    }
    for client in clients:
        client.end()


def all_threads_are_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each thread of a test appear as the main thread of a process."""
    monkeypatch.setattr(threading, "main_thread", threading.current_thread)


def test_mutually_waiting_processes_report_locations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_threads_are_main(monkeypatch)
    server = Server("127.0.0.1", 3, b"key")
    clients = [
        Client(join_server(server, i), None, lambda *lost: None) for i in range(3)
    ]

    def call(process: int, name: str) -> str:
        client = clients[process]
        try:
            client.allgather(client.reserve(name), None, 30)
        except DisagreementError as error:
            return str(error)
        return "met"

    with ThreadPoolExecutor(3) as pool:
        # A slow process is not an error.
        slow = [pool.submit(call, i, "fit") for i in range(2)]
        assert not wait_until(slow[0].done, seconds=0.3)
        assert call(2, "fit") == "met"
        assert [future.result() for future in slow] == ["met", "met"]
        found = [pool.submit(call, i, n) for i, n in enumerate(("a", "b", "b"))]
        for future in found:
            text = future.result()
            assert text.startswith("The processes wait for each other: process 0 is ")
            assert "test_distributed.py:" in text
    for client in clients:
        client.end()


def test_slow_process_reports_location(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(messages, "_NOTICE_SECONDS", 0.2)
    server = Server("127.0.0.1", 2, b"key")
    clients = [
        Client(join_server(server, i), None, lambda *lost: None) for i in range(2)
    ]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].allgather, "the data 1", 1, 30)
        line = "Process 0 waits in 'the data' for this process, which is in waiting.py:"
        text = ""

        def is_told() -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return line in text and "for processes [1]; their output says where" in text

        assert wait_until(is_told, seconds=20), text
        clients[1].allgather("the data 1", 1, 30)
        assert waiting.result() == [1]
    for client in clients:
        client.end()


BROKEN = """
import os, sys
from nnx_parallel.distributed.runtime import install
install(lambda reason: os.write(1, f"told: {reason}".encode()))
raise ValueError("this is not read")
"""


def test_process_exits_despite_broken_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", BROKEN],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=writer,
        check=False,
        timeout=60,
    )
    os.close(writer)
    assert done.returncode == 1
    assert done.stdout == b"told: ValueError: this is not read"


HANGING_EVALUATION = """
import threading, time
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
from nnx_parallel import Callback, Faults, Precision, Trainer

class Rows:
    hang = False

    def __iter__(self):
        if self.hang:
            threading.Event().wait()
        yield from (np.ones((8, 4), np.float32), np.ones((7, 4), np.float32))

class Slow(Callback):
    def on_eval_end(self, trainer, step, metrics):
        print("evaluated at", step, flush=True)
        time.sleep(1.5)
        Rows.hang = step == 2

def loss(model, batch):
    time.sleep(1.5)  # as long as it takes to compile
    return (model(batch) ** 2).mean()

trainer = Trainer(
    lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    optax.sgd(0.1),
    loss,
    precision=Precision(params=jnp.bfloat16),
    ema_decay=0.5,  # of another dtype, and so another program
    callbacks=[Slow()],
    loggers=(),
    faults=Faults(step_timeout=1),
)
trainer.evaluate(Rows(), ema=True)
trainer.fit([np.ones((8, 4), np.float32)] * 3, 3, eval_data=Rows(), eval_every=1)
"""


@pytest.mark.faults
def test_watchdog_ends_hanging_but_not_compiling_evaluation() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING_EVALUATION],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.split("\n")[:-1] == ["evaluated at 1", "evaluated at 2"]
    assert done.returncode == HUNG, done.stderr
    assert (
        "No batch of the evaluation has ended for 1 s (step_timeout) after step 3 was "
        "dispatched"
    ) in done.stderr


LISTENING = """
import os, sys
import nnx_parallel
nnx_parallel.initialize()
mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").readlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
            print("listens on", fields[1].split(":")[0])
"""


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_launched_run_listens_locally_only(tmp_path: Path) -> None:
    script = tmp_path / "listening.py"
    script.write_text(LISTENING)
    launch = [sys.executable, "-m", "nnx_parallel", "launch", "--processes", "2"]
    done = subprocess.run(
        [*launch, "--cpu", str(script)],
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    addresses = set(re.findall(r"listens on (\w+)", done.stdout))
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert addresses, done.stdout
    assert addresses <= loopback | {"00000000000000000000000001000000"}


def test_logging_records_are_tagged(caplog: pytest.LogCaptureFixture) -> None:
    from nnx_parallel.distributed.runtime import tag, tag_logging

    factory = logging.getLogRecordFactory()
    try:
        tag_logging()
        logging.getLogger("x").warning("50 %s", "percent")
        assert tag() == ""  # a single process has no tag
        assert caplog.messages == ["50 percent"]
    finally:
        logging.setLogRecordFactory(factory)


GLOO = ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")


@pytest.mark.parametrize(
    ("error", "cause", "waits"),
    [
        (GLOO, None, True),
        (CheckpointSaveError("Saving step 5 failed"), GLOO, True),
        (CheckpointSaveError("Saving step 5 failed"), OSError("no space left"), False),
        (ValueError("a mistake"), None, False),
    ],
)
def test_failed_collective_waits_for_lost_process(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    cause: Exception | None,
    waits: bool,
) -> None:
    """Another thread learns which process is lost, and ends the waiting thread."""
    heard, ended = threading.Event(), threading.Event()
    waited: list[float] = []
    monkeypatch.setattr(heard, "wait", lambda seconds: waited.append(seconds))
    monkeypatch.setattr(runtime.threading, "Event", lambda: heard)
    monkeypatch.setattr(runtime, "_ending", threading.Lock())
    monkeypatch.setattr(runtime, "_end", lambda *given: ended.set())
    monkeypatch.setattr(runtime, "_notify", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored after the test
    runtime.install(lambda reason: None)
    error.__cause__ = cause
    sys.excepthook(type(error), error, None)
    assert bool(waited) is waits
    assert ended.is_set()
