"use strict";
// Draws every plot in the colours of the page, again when the reader turns the lights on or off or the phone around.
(() => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const places = [...document.querySelectorAll("[data-spec]")];

  function config() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const font = getComputedStyle(document.body).fontFamily;
    return {
      background: null,
      font,
      view: { stroke: null },
      range: {
        ordinal: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map((priority) => colour(`p${priority}`)),
        category: [colour("p5"), colour("broken")],
      },
      axis: {
        labelColor: colour("soft"), titleColor: colour("soft"), gridColor: colour("line"), domainColor: colour("line"),
        tickColor: colour("line"), titleFontWeight: 400, labelFontSize: 11, titleFontSize: 12,
        labelFlush: true,
      },
      // Of one width, so that plots above each other begin at the same place.
      axisY: { minExtent: 40 },
      legend: { labelColor: colour("soft"), labelFontSize: 12 },
      customRange: [colour("transient"), colour("persistent")],
    };
  }

  // Plots above each other cannot ask for the width of their place themselves.
  function fitted(spec, width, kinds) {
    const copy = structuredClone(spec);
    for (const part of copy.vconcat ?? [copy]) {
      part.width = Math.max(150, width - 70);
      const colour = part.encoding.color;
      if (colour.field === "persistent") colour.scale.range = kinds;
    }
    return copy;
  }

  function draw() {
    const { customRange, ...look } = config();
    for (const place of places) {
      const spec = fitted(specs[Number(place.dataset.spec)], place.clientWidth, customRange);
      vegaEmbed(place, spec, { config: look, actions: false, renderer: "canvas" }).catch((error) => {
        place.textContent = `This plot could not be drawn: ${error.message}`;
      });
    }
  }

  let width = 0;
  let timer = 0;
  function redraw() {
    clearTimeout(timer);
    timer = setTimeout(draw, 150);
  }
  window.addEventListener("resize", () => {
    if (document.body.clientWidth !== width) {
      width = document.body.clientWidth;
      redraw();
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  width = document.body.clientWidth;
  draw();
})();
