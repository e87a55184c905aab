"use strict";
// Makes a chart's points reachable: by pointer, and by arrow keys as a slider whose value is what a point says.
(() => {
  const hint = "Point at the chart, or focus it and use the arrow keys.";
  for (const figure of document.querySelectorAll("figure.chart")) {
    const plot = figure.querySelector(".plot");
    const svg = plot.querySelector("svg");
    const readout = figure.querySelector(".readout");
    const marks = [...svg.querySelectorAll(".mark")].sort(
      (a, b) => Number(a.dataset.budget) - Number(b.dataset.budget));
    if (!marks.length) continue;
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    ring.setAttribute("class", "ring");
    ring.setAttribute("r", "8");
    ring.setAttribute("visibility", "hidden");
    svg.append(ring);
    svg.removeAttribute("role");
    svg.setAttribute("aria-hidden", "true");
    let chosen = 0;

    const show = (index) => {
      chosen = Math.max(0, Math.min(marks.length - 1, index));
      const {x, y, said} = marks[chosen].dataset;
      ring.setAttribute("cx", x);
      ring.setAttribute("cy", y);
      ring.setAttribute("visibility", "visible");
      readout.textContent = said;
      plot.setAttribute("aria-valuenow", String(chosen + 1));
      plot.setAttribute("aria-valuetext", said);
    };
    const hide = () => {
      ring.setAttribute("visibility", "hidden");
      readout.textContent = hint;
    };

    plot.tabIndex = 0;
    plot.setAttribute("role", "slider");
    plot.setAttribute("aria-label", svg.getAttribute("aria-label"));
    plot.setAttribute("aria-valuemin", "1");
    plot.setAttribute("aria-valuemax", String(marks.length));
    show(0);
    hide();
    plot.addEventListener("focus", () => show(chosen));
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const target = {
        ArrowRight: chosen + 1, ArrowUp: chosen + 1, ArrowLeft: chosen - 1, ArrowDown: chosen - 1,
        Home: 0, End: marks.length - 1,
      }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      show(target);
    });
    plot.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale;
      const y = (event.clientY - box.top) * scale;
      const far = (mark) => Math.hypot(Number(mark.dataset.x) - x, (Number(mark.dataset.y) - y) / 4);
      show(marks.indexOf(marks.reduce((best, mark) => (far(mark) < far(best) ? mark : best))));
    });
    plot.addEventListener("pointerleave", () => {
      if (document.activeElement === plot) show(chosen);
      else hide();
    });
  }
})();
