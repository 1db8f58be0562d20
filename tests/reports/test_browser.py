"""The page in headless Chromium: no console error, no request, every figure drawn, sorting and copying work."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import cast

import pytest
from page_text import ALL_FIGURES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

#: Runs after the page's own scripts and tells the frame around it what it saw.
PROBE = """
(async () => {
  while (document.querySelector(".plot:not(.js-plotly-plot)")) await new Promise((done) => setTimeout(done, 20));
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
  await new Promise((done) => setTimeout(done, 2100));
  result.restored = Array.from(document.querySelectorAll("[data-copy]")).at(-1).textContent;
  result.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  result.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  result.screen = window.innerWidth;
  result.page = location.href.split("/").pop();
  window.parent.postMessage(JSON.stringify(result), "*");
})();
"""
#: One launch shows both screens: a light desktop and a dark phone. A frame may be narrower than Chromium's window ever
#: is.
FRAMES = """
<iframe src="plain.html" style="width:1280px;height:900px;border:0"></iframe>
<iframe src="dark.html" style="width:390px;height:900px;border:0"></iframe>
<pre id="seen"></pre>
<script>
  const seen = {};
  onmessage = (event) => {
    seen[JSON.parse(event.data).page] = JSON.parse(event.data);
    document.getElementById("seen").textContent = JSON.stringify(seen);
  };
</script>
"""
#: What a page sees where the reader prefers dark; the theme of the figures follows this query alone.
DARK = """
const ask = window.matchMedia.bind(window);
window.matchMedia = (query) =>
  query.includes("color-scheme: dark") ? { matches: true, addEventListener: () => {} } : ask(query);
"""
Seen = dict[str, object]


def chromium(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The DOM after the page has run, and what it wrote to the console."""
    quiet = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-dev-shm-usage "
        "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=15000"
    )
    command = [str(CHROMIUM), *quiet.split(), f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def allow(page: str, script: str, place: str) -> str:
    """The page with ``script`` before ``place``, and its hash in the page's own Content-Security-Policy."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    head, tail = page.split(place, 1)
    return f"{head}<script>{script}</script>{place}{tail}"


@pytest.fixture(scope="module")
def screens(report: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Seen], list[str]]:
    """What PROBE saw on each screen, and the console's lines."""
    folder = tmp_path_factory.mktemp("screens")
    plain = allow(report.read_text(encoding="utf-8"), PROBE, "</body>")
    (folder / "plain.html").write_text(plain, encoding="utf-8")
    (folder / "dark.html").write_text(allow(plain, DARK, "</head>"), encoding="utf-8")
    outer = folder / "frames.html"
    outer.write_text(FRAMES)
    dom, console = chromium(outer, folder / "profile")
    found = re.search(r'<pre id="seen">(.+?)</pre>', dom, flags=re.DOTALL)
    assert found is not None, "no probe reported"
    return cast("dict[str, Seen]", json.loads(unescape(found[1]))), console


@pytest.fixture(scope="module")
def seen(screens: tuple[dict[str, Seen], list[str]]) -> Seen:
    return screens[0]["plain.html"]


def test_the_page_runs_without_a_console_line_under_its_own_policy(
    screens: tuple[dict[str, Seen], list[str]],
) -> None:
    assert set(screens[0]) == {"plain.html", "dark.html"}
    assert screens[1] == []


def test_every_figure_is_drawn_with_data_and_nothing_is_requested(seen: Seen) -> None:
    drawn = cast("dict[str, dict[str, float]]", seen["figures"])
    assert set(drawn) == {f"plot-{name}" for name in ALL_FIGURES}
    assert min(figure["marks"] for figure in drawn.values()) >= 4
    assert seen["requests"] == []
    assert seen["overflow"] == 0


def test_the_table_sorts_by_number_and_by_word_with_missing_values_last(seen: Seen) -> None:
    tables = cast("dict[str, dict[str, object]]", seen["sorted"])
    for title, order in (("P99 TBT", "ascending"), ("Throughput", "descending")):
        assert tables[title]["order"] == order
        values = cast("list[str]", tables[title]["values"])
        assert values[-1] == "–"
        numbers = [float(value.replace(",", "")) for value in values[:-1]]
        assert numbers == sorted(numbers, reverse=order == "descending")
    words = cast("list[str]", tables["Outcome"]["values"])
    assert words == sorted(words)


def test_each_copy_button_copies_its_command(seen: Seen, report: Path) -> None:
    """The whole command, and the flags alone, which are what ``tilebudget show`` prints (tests/autotune)."""
    saved = json.loads((report.parent / "recommendation.json").read_text())
    assert seen["copied"] == [
        text for name in saved["launch"] for text in (saved["launch"][name], saved["flags"][name])
    ]
    assert seen["label"] == "Copied"
    assert seen["restored"] == "Copy flags"
    assert seen["status"] == "Copied the Sarathi-Serve flags"


def test_figures_follow_the_dark_theme(screens: tuple[dict[str, Seen], list[str]], seen: Seen) -> None:
    for name, figure in cast("dict[str, dict[str, str]]", screens[0]["dark.html"]["figures"]).items():
        light_ink = cast("dict[str, dict[str, str]]", seen["figures"])[name]["ink"]
        assert luminance(figure["ink"]) > 0.4 > luminance(light_ink)


def test_a_390_pixel_screen_needs_no_sideways_scrolling(screens: tuple[dict[str, Seen], list[str]]) -> None:
    phone = screens[0]["dark.html"]
    assert phone["screen"] == 390
    assert phone["overflow"] == 0
    for figure in cast("dict[str, dict[str, float]]", phone["figures"]).values():
        assert figure["width"] <= figure["panel"] < 390


def luminance(color: str) -> float:
    """Mean of the channels of ``rgb(r, g, b)``, 0 to 1."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3 / 255
