"""Shows pages of the built site in headless Chromium.

A test page loads pages of the site in frames as wide as a phone and a desktop, measures
these pages, and writes its results. Chromium prints them.
"""

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

HTML = Path(__file__).parents[1] / "docs" / "_build" / "html"
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
PAGES = {
    "home": "index.html",
    "install": "install.html",
    "quickstart": "quickstart.html",
    "choose": "choose.html",
    "plan": "plan.html",
    "practices": "best-practices.html",
    "worked": "worked.html",
    "migrating": "migrating.html",
    "tutorials": "tutorials.html",
    "tutorial": "tutorials/03_fsdp.html",
    "howto": "howto.html",
    "recipes": "recipes.html",
    "pitfalls": "pitfalls.html",
    "faq": "faq.html",
    "api": "api/strategies.html",
    "models": "api/models.html",
    "errors": "errors.html",
    "glossary": "glossary.html",
    "benchmarks": "benchmarks.html",
}
"""One page of every kind."""

CHECK = """<!doctype html><body style="margin:0"><pre id="result">waiting</pre><script>
const load = (url, width, theme = "light") => new Promise((resolve) => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.onload = () => {
    const root = frame.contentDocument.documentElement;
    root.dataset.theme = theme;
    // Transitions are off, so that no colour is measured halfway through a change.
    const still = "<style>* { transition: none !important }</style>";
    root.insertAdjacentHTML("beforeend", still);
    setTimeout(() => resolve(frame), 300);
  };
  frame.src = url;
  document.body.append(frame);
});
const wait = async (found) => {
  for (let i = 0; i < 100 && !found(); i++) {
    await new Promise((r) => setTimeout(r, 100));
  }
  return found();
};
const run = async () => { SCRIPT };
run().catch((e) => ({error: String(e)})).then((value) => {
  const encoded = encodeURIComponent(JSON.stringify(value));
  document.getElementById("result").textContent = `=== ${encoded} ===`;
});
</script>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site and the test page."""

    check = ""

    def do_GET(self) -> None:
        if not self.path.startswith("/__check__"):
            super().do_GET()
            return
        body = type(self).check.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppresses the log of requests."""


@pytest.fixture(scope="module", name="server")
def serve() -> Iterator[str]:
    """Serves the built site and yields its address."""
    if not Path(CHROMIUM).exists():
        pytest.skip(
            "Chromium is missing: it is not on the path or at /usr/bin/chromium."
        )
    if not (HTML / "index.html").exists():
        pytest.skip("The site is not built. `make docs` builds it in docs/_build/html.")
    handler = functools.partial(Quiet, directory=str(HTML))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def chromium(profile: Path, *arguments: str) -> str:
    """Runs headless Chromium and returns its output."""
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=30000",
        *arguments,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def evaluate(server: str, profile: Path, script: str) -> Any:
    """Runs a script in the test page and returns its value."""
    Quiet.check = CHECK.replace("SCRIPT", script)
    dom = chromium(profile, "--dump-dom", f"{server}/__check__")
    found = re.search(r"=== (\S*) ===</pre>", dom)
    assert found, dom[:2000]
    return json.loads(unquote(found[1]))
