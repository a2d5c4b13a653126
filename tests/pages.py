"""Markdown pages: their fenced blocks, and the output of their Python code."""

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
    """Returns the kind and the text of each fenced block."""
    return FENCE.findall(page.read_text())


def run_page(page: Path, directory: Path) -> list[tuple[str, str | None]]:
    """Returns each Python block's output and the text block below it, or None.

    The blocks run in order in one namespace. A block with a text block below it may end
    with an error, which is then part of its output.
    """
    codes: list[str] = []
    shown: dict[int, str] = {}
    above = ""
    for kind, text in blocks(page):
        if kind == "python":
            codes.append(text)
        elif kind == "text" and above != "console":  # skips the output of a command
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
            # With one device, a script that is written for a cluster would warn.
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as in conftest.py
            "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    return [(text, shown.get(i)) for i, text in enumerate(printed)]
