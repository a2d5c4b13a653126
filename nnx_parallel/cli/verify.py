"""Runs a script up to `Trainer.fit`, and then verifies one step."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nnx_parallel.cli.script import Reached, line_of, run_script
from nnx_parallel.data.rows import Pad
from nnx_parallel.distributed.runtime import print_once
from nnx_parallel.errors import ParallelError, VerificationError
from nnx_parallel.training.trainer import Trainer


def verify(script: str, arguments: Sequence[str] = ()) -> int:
    """Verifies one step of a script, and prints the report.

    The script runs on the devices that it would train on. Its first call of `fit` ends
    it: the state is the newest checkpoint of the run or, without one, a new state, and
    the batch is the first batch of its data. With several processes, each one runs this
    command.

    Returns:
        0 if the step is right, 1 if an array differs, 2 if no step could be compared
        with one device.
    """
    try:
        trainer, batch = _reach(Path(script), arguments)
        report = trainer.verify(batch)
    except VerificationError as error:
        print_once(str(error))
        return 1
    except _NothingToVerifyError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except ParallelError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    print_once(str(report))
    return 0 if report.comparisons[-1].errors else 2


class _NothingToVerifyError(Exception):
    """The script has no step that could be verified."""


def _reach(path: Path, arguments: Sequence[str]) -> tuple[Trainer, Any]:
    """Runs a script up to `Trainer.fit`; returns the Trainer and the first batch."""
    if not path.is_file():
        raise _NothingToVerifyError(f"Script '{path}' does not exist.")
    last_batch: Any = None

    def reach(self: Trainer, data: Any = None, *args: Any, **kwargs: Any) -> None:
        nonlocal last_batch
        last_batch = kwargs.get("last_batch")
        raise Reached(self, data)

    fit, Trainer.fit = Trainer.fit, reach  # pyright: ignore[reportAttributeAccessIssue]
    try:
        run_script(path, arguments)
        found = f"'{path}' ran to its end and did not call"
    except Reached as reached:
        return reached.trainer, _first_batch(reached.data, last_batch, path)
    except SystemExit as error:
        found = f"'{path}' exited with code {error.code}{line_of(error, path)} before"
    except Exception as error:
        name = type(error).__name__
        found = f"'{path}' failed{line_of(error, path)} ({name}: {error}) before"
    finally:
        Trainer.fit = fit
    raise _NothingToVerifyError(
        f"{found} Trainer.fit, whose step would be verified. If you write the loop "
        "yourself, call trainer.verify(batch) in it."
    )


def _first_batch(data: Iterable[Any], last_batch: Any, path: Path) -> Any:
    try:
        batch = next(iter(data))
    except Exception as error:
        name = type(error).__name__
        raise _NothingToVerifyError(
            f"The data of '{path}' gives no batch: {name}: {error}."
        ) from error
    return last_batch.fill(batch, 0) if isinstance(last_batch, Pad) else batch
