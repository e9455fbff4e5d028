"""The page in a real headless browser, at the width of a phone and of a desktop, in light and dark mode.

A page that frames it measures what is too wide, and whether a script ran.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.show.page import write_report
from tests.show.page_helpers import nasty

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None,
        reason=f"none of {', '.join(NAMES)} is installed: apt install chromium",
    ),
]

FRAME = """<!doctype html><meta charset=utf-8><body><iframe id=f src="report.html" style="width:WIDTHpx;height:900px">
</iframe><pre id=found></pre><script>
document.getElementById("f").onload = function () {
  const page = this.contentDocument, view = this.contentWindow;
  const pictures = [...page.querySelectorAll("figure img")];
  document.getElementById("found").textContent = JSON.stringify({
    title: page.title, scripts: page.scripts.length, hacked: view.hacked === 1,
    width: page.documentElement.scrollWidth, pictures: pictures.length,
    small: pictures.filter(e => e.naturalWidth < 200 || e.width < 200 || e.height < 40).map(e => e.alt),
    background: view.getComputedStyle(page.body).backgroundColor, ink: view.getComputedStyle(page.body).color,
    filter: view.getComputedStyle(pictures[0]).filter,
    wide: [...page.querySelectorAll("body *")].filter(e => !e.closest(".scroll") &&
      e.getBoundingClientRect().right > WIDTH + 1).map(e => e.tagName + "." + e.className).slice(0, 5),
  });
};
</script>"""


def look(report: Path, width: int, dark: bool = False) -> dict[str, Any]:
    """The measurements of the framing page; the browser keeps its profile beside the report."""
    assert BROWSER is not None
    frame = report.with_name("frame.html")
    frame.write_text(FRAME.replace("WIDTH", str(width)))
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--allow-file-access-from-files",
        f"--user-data-dir={report.with_name('profile')}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--window-size={width + 100},1000",
    ]
    printed = browse([BROWSER, *options, "--dump-dom", frame.as_uri()])
    answer = re.search(r'<pre id="found">(.+?)</pre>', printed, re.DOTALL)
    assert answer, printed[-2000:]
    facts: dict[str, Any] = json.loads(html.unescape(answer[1]))
    return facts


def browse(command: list[str]) -> str:
    """The browser's output. Browsers sometimes hang when they start or exit; such a one is killed with its children and
    started again."""
    for _ in range(3):
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as child:
            try:
                return child.communicate(timeout=40)[0]
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
    raise AssertionError("the browser hung three times")


@pytest.mark.parametrize("width", [360, 1200])
def test_a_page_fits_its_screen(
    width: int, learned: Path, grown: Path, tmp_path: Path
) -> None:
    found = look(write_report([grown, learned], tmp_path / "report.html"), width)
    assert found["pictures"] > 5
    assert found["width"] <= width
    assert found["wide"] == []
    assert found["small"] == []


def test_the_page_and_its_charts_follow_light_and_dark_mode(
    learned: Path, tmp_path: Path
) -> None:
    report = write_report([learned], tmp_path / "report.html")
    light, dark = look(report, 800), look(report, 800, dark=True)
    assert brightness(light["background"]) > brightness(light["ink"]) + 150
    assert brightness(dark["ink"]) > brightness(dark["background"]) + 150
    assert "invert" not in light["filter"]
    assert "invert" in dark["filter"]


def brightness(colour: str) -> float:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


def test_names_with_markup_run_nothing(grown: Path, copy: Callable[..., Path]) -> None:
    folder = copy(grown, nasty, name="<script>window.hacked=1<!--")
    found = look(write_report([folder]), 800)
    assert found["title"] == "Esper: <script>window.hacked=1<!--"
    assert found["scripts"] == 0
    assert not found["hacked"]
    assert found["pictures"] > 3
    assert found["wide"] == []
