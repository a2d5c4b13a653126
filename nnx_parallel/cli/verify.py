"""Verifies a script's training: runs the script up to `Trainer.fit`, and one step."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnx_parallel.cli.script import Reached, run_script
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
        0 if the step is right, 1 if an array differs, 2 if there is no step to verify.
    """
    path = Path(script)
    if not path.is_file():
        sys.stderr.write(f"Script {script!r} does not exist.\n")
        return 2

    def reach(self: Trainer, data: Any = None, *args: Any, **kwargs: Any) -> None:
        raise Reached(self, data)

    fit, Trainer.fit = Trainer.fit, reach  # pyright: ignore[reportAttributeAccessIssue]
    try:
        run_script(path, arguments)
    except Reached as reached:
        trainer, data = reached.trainer, reached.data
    else:
        sys.stderr.write(
            f"'{script}' ran to its end and did not call Trainer.fit, whose step would "
            "be verified. In a loop of your own, call trainer.verify(batch).\n"
        )
        return 2
    finally:
        Trainer.fit = fit
    try:
        print_once(str(trainer.verify(next(iter(data)))))
    except VerificationError as error:
        print_once(str(error))
        return 1
    except ParallelError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0
