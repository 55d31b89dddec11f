// Script of the console's pages: charts, the mark of live figures, "all" of a column of boxes, the key of the filter.
// Without it all pages can be read and all forms be sent.
"use strict";

(() => {
  const SERIES = ["--series-1", "--series-2", "--series-3", "--series-4"];
  const charts = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function shorten(value) {
    if (value === null || value === undefined) return "–";
    for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
      if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)}${unit}`;
    }
    return `${+value.toPrecision(3)}`;
  }

  // All times of the console are in UTC.
  function clock(seconds) {
    return new Date(seconds * 1000).toISOString().slice(11, seconds % 60 ? 19 : 16);
  }

  function draw(element) {
    const { first, last, series } = JSON.parse(element.dataset.chart);
    const values = Object.values(series);
    const step = (last - first) / Math.max((values[0]?.length ?? 0) - 1, 1);
    const data = [(values[0] ?? []).map((_, index) => first + index * step), ...values];
    const known = charts.get(element);
    if (known && known.names.join() === Object.keys(series).join()) {
      known.plot.setData(data);
      return;
    }
    known?.plot.destroy();
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const plot = new uPlot(
      {
        width: Math.max(element.clientWidth, 120),
        height: Math.max(element.clientHeight, 80),
        legend: { show: false },
        cursor: { y: false, drag: { setScale: false } },
        scales: {
          // A console that was just started shows ten minutes, not the few seconds that it knows; without values the last.
          x: { range: (_, least, most) => ((end) => [Math.min(least ?? end, end - 600), end])(most ?? Date.now() / 1000) },
          y: { range: (_, least, most) => [Math.min(0, least ?? 0), Math.max(most ?? 1, 1)] },
        },
        axes: [{ ...axis, size: 24, space: 70, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 44, values: (_, ticks) => ticks.map(shorten) }],
        series: [
          {},
          ...Object.keys(series).map((name, index) => ({
            label: name,
            stroke: () => colour(SERIES[index % SERIES.length]),
            width: 1.5,
            points: { show: false },
          })),
        ],
      },
      data,
      element,
    );
    charts.set(element, { plot, names: Object.keys(series) });
  }

  function drawAll() {
    for (const [element, { plot }] of charts) {
      if (!element.isConnected) {
        plot.destroy();
        charts.delete(element);
      }
    }
    document.querySelectorAll("[data-chart]").forEach(draw);
  }

  function drawAnew() {
    for (const { plot } of charts.values()) plot.destroy();
    charts.clear();
    drawAll();
  }

  // Pages that are no longer live, because the console or the login has ended, must not look as if they were.
  function showLive(is_live, text) {
    const mark = document.getElementById("live-mark");
    if (!mark) return;
    mark.classList.toggle("on", is_live);
    mark.classList.toggle("off", !is_live);
    mark.textContent = text;
  }

  // hx-sse asks for a stream with each request of htmx; only elements that connect to one want it.
  document.addEventListener("htmx:config:request", (event) => {
    const { sourceElement, request } = event.detail.ctx;
    if (!sourceElement.hasAttribute("hx-sse:connect")) request.headers.Accept = "text/html";
  });
  document.addEventListener("htmx:before:response", (event) => {
    const { raw } = event.detail.ctx.response;
    if (raw.redirected || raw.status === 401) {
      event.preventDefault();
      location.reload();
    }
    if (raw.status === 429) showLive(false, "not live: too many pages are open");
  });
  document.addEventListener("htmx:sse:after:connection", () => showLive(true, "live"));
  document.addEventListener("htmx:sse:error", (event) => {
    showLive(false, `not live since ${clock(Math.trunc(Date.now() / 1000))} UTC`);
    if (event.detail.status === 401) location.reload();
  });
  document.addEventListener("failed", (event) => showLive(false, event.detail.data));
  document.addEventListener("login", () => location.reload());
  document.addEventListener("htmx:sse:after:message", (event) => {
    if (!event.detail.message.event) showLive(true, "live");
  });

  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box.dataset?.all) {
      document.querySelectorAll(`input[type=checkbox][name="${CSS.escape(box.dataset.all)}"]`).forEach((each) => {
        each.checked = box.checked;
      });
    }
  });

  document.addEventListener("keydown", (event) => {
    const is_typing = event.target.closest?.("input, select, textarea");
    if (event.key !== "/" || is_typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const filter = document.querySelector("[data-filter]");
    if (filter) {
      event.preventDefault();
      filter.focus();
    }
  });

  let resized = 0;
  addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => {
      for (const [element, { plot }] of charts) plot.setSize({ width: element.clientWidth, height: element.clientHeight });
    }, 100);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAnew);
  document.addEventListener("htmx:after:settle", drawAll);
  document.addEventListener("DOMContentLoaded", drawAll);
})();
