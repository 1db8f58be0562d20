"""The page in headless Chromium: no console error, no request, every figure drawn, sorting and copying work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import cast

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

#: Runs after the page's own scripts and leaves what it saw in an element.
PROBE = """
<pre id="probe"></pre>
<script>
(async () => {
  const copied = [];
  Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => void copied.push(text) } });
  const result = { figures: {}, sorted: {}, copied, errors: [] };
  document.querySelectorAll(".plot").forEach((plot) => {
    result.figures[plot.id] = {
      marks: plot.querySelectorAll(".points path, .point path, .js-line").length,
      width: plot.querySelector(".main-svg").getBoundingClientRect().width,
      ink: plot.querySelector(".xtick text, .ytick text").style.fill,
      panel: plot.clientWidth,
    };
  });
  const table = document.querySelector("table.sortable");
  const column = (index) => Array.from(table.tBodies[0].rows, (row) => row.cells[index].textContent);
  const buttons = Array.from(table.querySelectorAll("thead button"));
  const button = (title) => buttons.find((one) => one.textContent.startsWith(title));
  for (const [title, times] of [["P99 TBT", 1], ["Throughput", 2], ["Outcome", 1]]) {
    for (let i = 0; i < times; i++) button(title).click();
    const th = button(title).closest("th");
    result.sorted[title] = { order: th.getAttribute("aria-sort"), values: column(th.cellIndex) };
  }
  for (const copy of document.querySelectorAll("[data-copy]")) {
    copy.click();
    await new Promise((done) => setTimeout(done, 0));
    result.label = copy.textContent;
  }
  result.status = document.getElementById("copied").textContent;
  result.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  result.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  result.screen = window.innerWidth;
  if (window.parent !== window) window.parent.postMessage(JSON.stringify(result), "*");
  document.getElementById("probe").textContent = JSON.stringify(result);
})();
</script>
"""
#: Shows the copy on a screen of its own width: Chromium's window is never narrower than 500 pixels.
FRAME = """
<iframe src="probed.html" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="probe"></pre>
<script>onmessage = (event) => (document.getElementById("probe").textContent = event.data)</script>
"""


def chromium(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The DOM after the page has run, and what it wrote to the console."""
    quiet = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-dev-shm-usage "
        "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=5000"
    )
    command = [str(CHROMIUM), *quiet.split(), f"--user-data-dir={profile}", *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probe(report: Path, folder: Path, *flags: str, frame_width: int | None = None) -> dict[str, object]:
    """What PROBE saw in a copy of the report, at ``frame_width`` pixels where given."""
    page = report.read_text(encoding="utf-8")
    # The page's own policy would refuse the probe's script.
    page = re.sub(r"<meta http-equiv=[^>]*>", "", page, count=1)
    copy = folder / "probed.html"
    copy.write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    if frame_width is not None:
        outer = folder / "frame.html"
        outer.write_text(FRAME.format(width=frame_width))
        copy = outer
    dom, console = chromium(copy, folder / "profile", *flags)
    assert console == []
    found = re.search(r'<pre id="probe">(.+?)</pre>', dom, flags=re.DOTALL)
    assert found is not None, "the probe did not run"
    return cast("dict[str, object]", json.loads(unescape(found[1])))


@pytest.fixture(scope="module")
def seen(report: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return probe(report, tmp_path_factory.mktemp("light"), "--window-size=1280,900")


def test_the_page_opens_without_a_console_line_under_its_own_policy(report: Path, tmp_path: Path) -> None:
    dom, console = chromium(report, tmp_path)
    assert console == []
    assert dom.count('class="main-svg"') >= 5


def test_every_figure_is_drawn_with_data_and_nothing_is_requested(seen: dict[str, object]) -> None:
    drawn = cast("dict[str, dict[str, float]]", seen["figures"])
    assert set(drawn) == {f"plot-{name}" for name in ("budgets", "tails", "timeline", "pipeline", "history")}
    assert min(figure["marks"] for figure in drawn.values()) >= 4
    assert seen["requests"] == []
    assert seen["overflow"] == 0


def test_the_table_sorts_by_number_and_by_word_with_missing_values_last(seen: dict[str, object]) -> None:
    tables = cast("dict[str, dict[str, object]]", seen["sorted"])
    for title, order in (("P99 TBT", "ascending"), ("Throughput", "descending")):
        assert tables[title]["order"] == order
        values = cast("list[str]", tables[title]["values"])
        assert values[-1] == "–"
        numbers = [float(value.replace(",", "")) for value in values[:-1]]
        assert numbers == sorted(numbers, reverse=order == "descending")
    words = cast("list[str]", tables["Outcome"]["values"])
    assert words == sorted(words)


def test_each_copy_button_copies_its_command(seen: dict[str, object], report: Path) -> None:
    launch = json.loads((report.parent / "recommendation.json").read_text())["launch"]
    assert seen["copied"] == list(launch.values())
    assert seen["label"] == "Copied"
    assert seen["status"] == "Copied the Sarathi-Serve command"


def test_figures_follow_the_dark_theme(seen: dict[str, object], report: Path, tmp_path: Path) -> None:
    dark = probe(report, tmp_path, "--blink-settings=preferredColorScheme=0")
    for name, figure in cast("dict[str, dict[str, str]]", dark["figures"]).items():
        light_ink = cast("dict[str, dict[str, str]]", seen["figures"])[name]["ink"]
        assert luminance(figure["ink"]) > 0.4 > luminance(light_ink)


def test_a_390_pixel_screen_needs_no_sideways_scrolling(report: Path, tmp_path: Path) -> None:
    phone = probe(report, tmp_path, frame_width=390)
    assert phone["screen"] == 390
    assert phone["overflow"] == 0
    for figure in cast("dict[str, dict[str, float]]", phone["figures"]).values():
        assert figure["width"] <= figure["panel"] < 390


def luminance(color: str) -> float:
    """Mean of the channels of ``rgb(r, g, b)``, 0 to 1."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3 / 255
