"use strict";
(function () {
  // Placeholders of reports/style.py: text, quiet text, grid, the panel under a figure, the recommended band.
  const themes = {
    light: { "#0072B2": "#0072B2", "#010203": "#16191d", "#010204": "#59616b", "#010205": "#e8ebef", "#010206": "#ffffff", "#010207": "#e3eef6" },
    // Okabe and Ito's blue is too dark to read on a dark panel; no figure holds their sky blue beside it.
    dark: { "#0072B2": "#4aa5e0", "#010203": "#e8eaed", "#010204": "#a0a8b1", "#010205": "#2a3138", "#010206": "#181c20", "#010207": "#1d3547" },
  };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)");
  const config = {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    showSendToCloud: false,
    plotlyServerURL: "",
    topojsonURL: "",
  };
  let printing = false;

  function draw(plot) {
    const theme = themes[dark.matches && !printing ? "dark" : "light"];
    const text = document.getElementById(plot.dataset.figure).textContent;
    const figure = JSON.parse(text.replace(/#01020[3-7]|#0072B2/g, (placeholder) => theme[placeholder]));
    // A finger that scrolls the page must not zoom a figure.
    figure.layout.dragmode = coarse.matches ? false : "zoom";
    const narrow = plot.clientWidth < 500;
    if (narrow) {
      // The legend takes more rows; hairlines between narrow bars would wash their colour out.
      figure.layout.margin = { l: 44, r: 8, t: 100, b: 52 };
      figure.layout.height += 56;
      figure.data.filter((trace) => trace.type === "bar").forEach((bar) => (bar.marker.line = { width: 0 }));
    }
    Plotly.react(plot, figure.data, figure.layout, Object.assign({ displayModeBar: narrow ? false : "hover" }, config));
    shape(plot);
  }

  // In print the drawing is scaled to the paper instead of drawn anew.
  function shape(plot) {
    const svgs = plot.querySelectorAll(".main-svg");
    if (!svgs.length) return;
    const width = svgs[0].getAttribute("width");
    const height = svgs[0].getAttribute("height");
    plot.style.setProperty("--shape", width + " / " + height);
    svgs.forEach((svg) => svg.setAttribute("viewBox", "0 0 " + width + " " + height));
  }

  // Figures near the screen are drawn at once, the others one by one when the browser has nothing else to do.
  const plots = Array.from(document.querySelectorAll(".plot"));
  const waiting = new Set(plots);
  function drawFirst(plot) {
    if (!waiting.delete(plot)) return;
    near.unobserve(plot);
    draw(plot);
    plot.on("plotly_afterplot", () => shape(plot));
  }
  function drawAll() {
    start();
    plots.forEach((plot) => (waiting.has(plot) ? drawFirst(plot) : draw(plot)));
  }
  const near = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => drawFirst(entry.target)),
    { rootMargin: "400px" },
  );
  const whenIdle = (work) =>
    window.requestIdleCallback ? window.requestIdleCallback(work, { timeout: 100 }) : window.setTimeout(work, 30);
  function drawRest() {
    const [next] = waiting;
    if (!next) return;
    drawFirst(next);
    whenIdle(drawRest);
  }
  // plotly.js takes a second to start, so the page is there to read, sort and copy from before it does.
  function start() {
    if (window.Plotly) return;
    const code = document.createElement("script");
    code.textContent = document.getElementById("plotly").textContent;
    document.head.append(code);
    plots.forEach((plot) => near.observe(plot));
    whenIdle(drawRest);
  }
  if (plots.length) window.setTimeout(start, 50);
  dark.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => {
    printing = true;
    if (dark.matches) drawAll();
    else {
      start();
      waiting.forEach(drawFirst);
    }
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    if (dark.matches) drawAll();
  });

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch (refused) {
      // No clipboard permission (some browsers on file: pages): the old way.
      const area = document.createElement("textarea");
      area.value = text;
      area.setAttribute("readonly", "");
      area.className = "visually-hidden";
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      if (!done) throw refused;
    }
  }
  document.querySelectorAll("[data-copy]").forEach((button) => {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      const status = document.getElementById("copied");
      try {
        await copy(button.dataset.text || document.getElementById(button.dataset.copy).textContent);
        button.textContent = "Copied";
        status.textContent = button.getAttribute("aria-label").replace("Copy", "Copied");
      } catch (refused) {
        button.textContent = "Select it";
        status.textContent = "The browser refused to copy; select the command instead.";
        window.getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      }
      button.focus();
      window.setTimeout(() => (button.textContent = label), 2000);
    });
  });

  document.querySelectorAll("table.sortable").forEach((table) => {
    const body = table.tBodies[0];
    table.querySelectorAll("thead button").forEach((button) => {
      button.addEventListener("click", () => {
        const heading = button.closest("th");
        const ascending = heading.getAttribute("aria-sort") !== "ascending";
        table.querySelectorAll("th[aria-sort]").forEach((other) => other.setAttribute("aria-sort", "none"));
        heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        const column = Number(button.dataset.column);
        const numeric = button.dataset.numeric === "yes";
        const key = (row) => row.cells[column].dataset.key;
        const order = (a, b) => {
          const [left, right] = [key(a), key(b)];
          if (left === "" || right === "") return (left === "") - (right === "");
          const difference = numeric ? Number(left) - Number(right) : left.localeCompare(right);
          return ascending ? difference : -difference;
        };
        body.append(...Array.from(body.rows).sort(order));
      });
    });
  });
})();
