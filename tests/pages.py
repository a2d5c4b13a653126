"""Pages of Markdown: their blocks, and the output of their code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RUN = """
import contextlib, io, json, sys
namespace = {"__name__": "page"}
printed = []
for code, may_fail in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(code, "page", "exec"), namespace)
        except Exception as error:
            known = type(error).__module__ in ("nnx_parallel.errors", "builtins")
            if not (may_fail and known):
                raise
            print(f"{type(error).__name__}: {error}")
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Kind and text of each fenced block."""
    return FENCE.findall(page.read_text())


def run_page(page: Path, directory: Path) -> list[tuple[str, str | None]]:
    """The output of each Python block, and the text shown below it, if any.

    The blocks run in order in one namespace. One that has text below it may end with an
    error, which it then prints.
    """
    codes: list[str] = []
    shown: dict[int, str] = {}
    above = ""
    for kind, text in blocks(page):
        if kind == "python":
            codes.append(text)
        elif kind == "text" and above != "console":  # not a command's output
            shown[len(codes) - 1] = text
        above = kind
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        input=json.dumps([(code, i in shown) for i, code in enumerate(codes)]),
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            # A script for a cluster, tried on one machine, would warn of one device.
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as conftest.py has it
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    return [(text, shown.get(i)) for i, text in enumerate(printed)]
