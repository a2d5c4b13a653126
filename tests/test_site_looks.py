"""How each kind of page looks: on a phone and a desktop, light and dark.

`looks.js` finds measurable faults. A person can judge the rest from the pictures.
"""

import json
from itertools import product
from pathlib import Path

import pytest

from tests.browser import CHECK, HTML, PAGES, Quiet, chromium, evaluate, serve

pytestmark = pytest.mark.slow
server = serve

LOOKS = (Path(__file__).parent / "looks.js").read_text()
PICTURES = HTML.parent / "screenshots"
WIDTHS = (390, 1280)
THEMES = ("light", "dark")
TALLEST = 12_000


@pytest.mark.parametrize("name", PAGES)
def test_page_has_no_layout_faults(name: str, server: str, tmp_path: Path) -> None:
    """Saves pictures in docs/_build/screenshots for a person to look at."""
    script = f"""{LOOKS}
    const found = [];
    for (const [width, theme] of {json.dumps(list(product(WIDTHS, THEMES)))}) {{
      const frame = await load("/{PAGES[name]}", width, theme);
      const page = frame.contentDocument;
      const height = page.documentElement.scrollHeight;
      frame.style.height = `${{height}}px`; // nothing waits to be scrolled to
      await new Promise((resolve) => setTimeout(resolve, 300));
      found.push([width, theme, height, await faults(page, width, theme === "dark")]);
      frame.remove();
    }}
    return found;
    """
    found = evaluate(server, tmp_path, script)
    assert [(width, theme) for width, theme, *_ in found] == [*product(WIDTHS, THEMES)]
    for width in WIDTHS:
        height = max(tall for at, _, tall, _ in found if at == width)
        take_picture(server, tmp_path, name, (width, min(height, TALLEST)))
    faults = {(width, theme): lines for width, theme, _, lines in found if lines}
    assert faults == {}


def take_picture(server: str, profile: Path, name: str, size: tuple[int, int]) -> None:
    """Takes one picture of a page, with the light theme left of the dark theme."""
    PICTURES.mkdir(exist_ok=True)
    picture = PICTURES / f"{name}-{size[0]}.png"
    picture.unlink(missing_ok=True)
    Quiet.check = CHECK.replace(
        "SCRIPT",
        f"""
        document.body.style.display = "flex";
        document.getElementById("result").hidden = true;
        for (const theme of {json.dumps(THEMES)}) {{
          const frame = await load("/{PAGES[name]}", {size[0]}, theme);
          frame.style.flex = "none";
          frame.style.height = "{size[1]}px";
        }}
        """,
    )
    chromium(
        profile,
        f"--screenshot={picture}",
        f"--window-size={len(THEMES) * size[0]},{size[1]}",
        f"{server}/__check__",
    )
    assert picture.stat().st_size > 10_000


FAULTY = """<!doctype html><style>
article div { width: 90px; white-space: nowrap }
</style><body style="margin:0"><article>
<p>Ten words that are here to be read, and no more.</p>
<div>A line that is wider than its box</div>
<p style="color:#ccc">Pale</p>
<svg width="90" height="30"><rect width="90" height="30" fill="#111"/>
<text x="5" y="20" fill="#333">dark on dark</text></svg>
<div style="height:400px"></div>
<pre style="width:500px;overflow:visible">code</pre>
<p>One</p><p>Two</p><p>Three</p>
</article></body>"""


def test_layout_faults_are_detected(server: str, tmp_path: Path) -> None:
    script = f"""{LOOKS}
    const frame = await load("/robots.txt", 390);
    const page = frame.contentDocument;
    page.open(); page.write({json.dumps(FAULTY)}); page.close();
    await new Promise((resolve) => setTimeout(resolve, 300));
    return faults(page, 390, true);
    """
    found = evaluate(server, tmp_path, script)
    for fault in (
        "the page is 500 px wide",
        '"A line that is wider than its box" is wider than its div',
        '"Pale" (p) has a contrast of 1.6',
        '"dark on dark" (in a picture) has a contrast of 1.5',
        'code does not scroll: "code"',
        "the menu has no button",
    ):
        assert fault in found, found
    assert any(" px are empty at " in fault for fault in found)
