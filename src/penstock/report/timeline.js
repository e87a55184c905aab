"use strict";
// Draws the trace: copies on one lane, steps and their stalls on another, and packed weights on their way on a third, if
// there are any. Each lane is a slider over its spans.
(() => {
  const root = document.getElementById("timeline");
  const stored = document.getElementById("trace-data").textContent;
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const copies = {kind: "copy", title: "Copies", top: 56, spans: []};
  const steps = {kind: "compute", title: "Steps", top: 112, spans: []};
  const link = {kind: "link", title: "Link, packed", top: 168, spans: []};
  const lanes = [copies, steps, link];
  const laneHeight = 34, axisHeight = 18, runsTop = 20, runsHeight = 16;
  const hint = "Point at a span, or focus a lane: arrow keys go from span to span, Page Up and Page Down from run to "
    + "run, + and \u2212 zoom, 0 shows everything.";

  for (const event of JSON.parse(stored).traceEvents) {
    if (event.ph !== "X") continue;
    const lane = lanes.find((each) => each.kind === event.cat);
    lane.spans.push({
      name: event.name, ...event.args,
      begin: Math.round(event.ts * 1000), end: Math.round((event.ts + event.dur) * 1000),
    });
  }
  if (!link.spans.length) lanes.pop();
  for (const lane of lanes) lane.spans.sort((a, b) => a.begin - b.begin);
  const stalls = new Map(data.stalls.map((stall) => [stall.run + "/" + stall.step, stall]));
  const everything = lanes.flatMap((lane) => lane.spans);
  if (!everything.length) return;
  const first = everything.reduce((least, span) => Math.min(least, span.begin), Infinity);
  const last = everything.reduce((most, span) => Math.max(most, span.end), -Infinity);

  // ---- numbers as text

  const whole = (value) => value.toLocaleString("en-US");
  const time = (ns) => {
    if (ns < 1e3) return `${ns} ns`;
    return ns < 1e6 ? `${(ns / 1e3).toFixed(3)} \u00b5s` : `${(ns / 1e6).toFixed(6)} ms`;
  };
  const said = (lane, span) => {
    const where = `begins at ${time(span.begin)}, run ${whole(span.run)} of ${span.method}`;
    const took = time(span.end - span.begin);
    if (lane !== steps) {
      const rate = span.GB_per_s === null ? "too short to be timed" : `${span.GB_per_s} GB/s`;
      const what = lane === link ? "Packed bytes of copy" : "Copy";
      return `${what} ${span.index}, ${span.name}: ${whole(span.bytes)} bytes in ${took}, ${rate}; ${where}`;
    }
    const stall = stalls.get(span.run + "/" + span.index);
    const waited = stall ? `; stalled before it for ${time(stall.stall_ns)} at most, for ${stall.weight}` : "";
    return `Step ${span.index}, ${span.name}: ${took}; ${where}${waited}`;
  };

  // ---- elements

  const make = (tag, parent, attributes, content) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (content) element.textContent = content;
    parent.append(element);
    return element;
  };
  root.textContent = "";
  const tools = make("div", root, {class: "tools", role: "group", "aria-label": "Timeline view"});
  const area = make("div", root, {class: lanes.includes(link) ? "area three" : "area"});
  const canvas = make("canvas", area, {"aria-hidden": "true"});
  const readout = make("p", root, {class: "readout", id: "timeline-readout"}, hint);
  const pen = canvas.getContext("2d");
  for (const lane of lanes) {
    const from = lane.top - 15;
    lane.caption = make("span", area, {class: "caption", "aria-hidden": "true", style: `top:${from}px`}, lane.title);
    lane.element = make("div", area, {
      class: "lane", role: "slider", tabindex: "0", "data-lane": lane.kind,
      "aria-label": `${lane.title} of the trace`, "aria-describedby": root.dataset.described,
      "aria-valuemin": "1", "aria-valuemax": String(Math.max(1, lane.spans.length)),
      "aria-valuenow": "1", "aria-valuetext": "none",
      style: `top:${lane.top}px;height:${laneHeight}px`,
    });
    lane.chosen = 0;
  }

  // ---- the view, in ns

  const view = {from: first, to: last};
  let focused = null, pointed = null, queued = false;
  const least = 200;
  const look = (from, to) => {
    const width = Math.min(Math.max(to - from, least), (last - first) * 1.04 || least);
    const margin = (last - first) * 0.02;
    view.from = Math.min(Math.max(from, first - margin), last + margin - width);
    view.to = view.from + width;
    root.dataset.from = String(view.from);
    root.dataset.to = String(view.to);
    redraw();
  };
  const zoom = (factor, around) => {
    const at = around === undefined ? (view.from + view.to) / 2 : around;
    look(at - (at - view.from) * factor, at + (view.to - at) * factor);
  };
  const fit = () => look(first - (last - first) * 0.02, last + (last - first) * 0.02);
  const lookAt = (run) => {
    const margin = (run.end_ns - run.begin_ns) * 0.03;
    look(run.begin_ns - margin, run.end_ns + margin);
  };
  const runAt = (step) => {
    const middle = (view.from + view.to) / 2;
    const current = data.runs.findIndex((run) => run.end_ns >= middle);
    const index = (current < 0 ? data.runs.length - 1 : current) + step;
    return data.runs[Math.max(0, Math.min(data.runs.length - 1, index))];
  };
  const reveal = (span) => {
    if (span.begin >= view.from && span.end <= view.to) return;
    const width = Math.max(view.to - view.from, (span.end - span.begin) * 1.2);
    const middle = (span.begin + span.end) / 2;
    look(middle - width / 2, middle + width / 2);
  };

  const choose = (lane, index) => {
    if (!lane.spans.length) return;
    lane.chosen = Math.max(0, Math.min(lane.spans.length - 1, index));
    const span = lane.spans[lane.chosen];
    lane.element.setAttribute("aria-valuenow", String(lane.chosen + 1));
    lane.element.setAttribute("aria-valuetext", said(lane, span));
    readout.textContent = said(lane, span);
    reveal(span);
    redraw();
  };

  // ---- drawing

  const redraw = () => {
    if (queued) return;
    queued = true;
    requestAnimationFrame(draw);
  };
  const ticks = (width) => {
    const span = view.to - view.from;
    const power = 10 ** Math.floor(Math.log10(span / Math.max(2, width / 110)));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => span / each <= width / 80) || 10 * power;
    const found = [];
    for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) found.push(at);
    return {step, found};
  };
  const tickText = (ns, step) => {
    const [unit, name] = step >= 1e6 ? [1e6, "ms"] : step >= 1e3 ? [1e3, "\u00b5s"] : [1, "ns"];
    return `${Number((ns / unit).toFixed(3)).toLocaleString("en-US")} ${name}`;
  };
  // Of spans in the order of their beginnings, none of which overlap, the first that ends after a moment.
  const firstAfter = (spans, moment) => {
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].end < moment) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  const draw = () => {
    queued = false;
    const width = area.clientWidth, height = area.clientHeight, dense = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(height * dense);
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue("--" + name).trim();
    const x = (ns) => (ns - view.from) / (view.to - view.from) * width;
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";

    const label = (content, left, right, middle, ink) => {
      const room = Math.min(right, width) - Math.max(left, 0) - 8;
      if (room < 30) return;
      let shown = content;
      if (pen.measureText(shown).width > room) {
        const keep = Math.floor(shown.length * room / pen.measureText(shown).width) - 1;
        if (keep < 3) return;
        shown = shown.slice(0, keep) + "\u2026";
      }
      pen.fillStyle = ink;
      pen.fillText(shown, Math.max(left, 0) + 4, middle);
    };

    const {step, found} = ticks(width);
    for (const at of found) {
      pen.fillStyle = colour("line");
      pen.fillRect(Math.round(x(at)), axisHeight - 4, 1, height - axisHeight + 4);
      pen.fillStyle = colour("muted");
      if (x(at) + 60 < width) pen.fillText(tickText(at, step), Math.round(x(at)) + 4, axisHeight / 2);
    }
    for (const run of data.runs) {
      const left = x(run.begin_ns), right = x(run.end_ns);
      if (right < 0 || left > width) continue;
      pen.fillStyle = colour("band");
      pen.fillRect(left, runsTop, Math.max(1, right - left), runsHeight);
      label(`run ${run.run} ${run.method}`, left, right, runsTop + runsHeight / 2 + 0.5, colour("text"));
    }
    for (const stall of data.stalls) {
      const left = x(stall.begin_ns), right = x(stall.begin_ns + stall.stall_ns);
      if (right < 0 || left > width) continue;
      hatch(Math.max(left, -8), steps.top, Math.min(right, width + 8), laneHeight, colour("stall"));
    }
    for (const lane of lanes) {
      const ink = colour(lane === steps ? "step" : "copy");
      for (let k = firstAfter(lane.spans, view.from); k < lane.spans.length; k++) {
        const span = lane.spans[k], left = x(span.begin), right = x(span.end);
        if (left > width) break;
        pen.fillStyle = ink;
        // A hair's breadth between neighbours, and never so narrow that a span is not seen.
        pen.fillRect(left, lane.top, Math.max(0.75, right - left - 0.5), laneHeight);
        if (right - left > 40) label(span.name, left, right, lane.top + laneHeight / 2, colour("on-bar"));
      }
      const hovered = pointed && pointed.lane === lane ? pointed.span : null;
      const marked = focused === lane ? lane.spans[lane.chosen] : hovered;
      if (!marked) continue;
      pen.strokeStyle = colour("text");
      pen.lineWidth = 2;
      const wide = Math.max(3, x(marked.end) - x(marked.begin) + 3);
      pen.strokeRect(x(marked.begin) - 2, lane.top - 2, wide, laneHeight + 4);
    }
  };
  const hatch = (left, top, right, height, ink) => {
    const wide = Math.max(1, right - left);
    pen.save();
    pen.beginPath();
    pen.rect(left, top, wide, height);
    pen.clip();
    pen.strokeStyle = ink;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (let at = Math.floor((left - height) / 5) * 5; at < right; at += 5) {
      pen.moveTo(at, top + height);
      pen.lineTo(at + height, top);
    }
    pen.stroke();
    pen.fillStyle = ink;
    pen.fillRect(left, top, wide, 2);
    pen.fillRect(left, top + height - 2, wide, 2);
    pen.restore();
  };

  // ---- hands on it

  for (const [title, act] of [
    ["Show everything", fit],
    ["Zoom in", () => zoom(0.5)],
    ["Zoom out", () => zoom(2)],
    ["Previous run", () => lookAt(runAt(-1))],
    ["Next run", () => lookAt(runAt(1))],
  ]) make("button", tools, {type: "button"}, title).addEventListener("click", act);

  const keys = (lane, event) => {
    const span = lane.spans[lane.chosen];
    const otherRun = (step) => {
      let k = lane.chosen;
      while (lane.spans[k + step] && lane.spans[k].run === span.run) k += step;
      return k;
    };
    const steps = {
      ArrowRight: () => lane.chosen + 1, ArrowLeft: () => lane.chosen - 1,
      ArrowUp: () => lane.chosen + 1, ArrowDown: () => lane.chosen - 1,
      Home: () => 0, End: () => lane.spans.length - 1,
      PageDown: () => otherRun(1), PageUp: () => otherRun(-1),
    };
    const middle = span ? (span.begin + span.end) / 2 : undefined;
    const views = {"+": () => zoom(0.5, middle), "=": () => zoom(0.5, middle), "-": () => zoom(2, middle), "0": fit};
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (steps[event.key]) choose(lane, steps[event.key]());
    else if (views[event.key]) views[event.key]();
    else return;
    event.preventDefault();
  };
  const momentAt = (event) => {
    const box = area.getBoundingClientRect();
    return view.from + (event.clientX - box.left) / box.width * (view.to - view.from);
  };
  const point = (lane, event) => {
    const moment = momentAt(event), near = (view.to - view.from) / area.clientWidth * 4;
    const k = firstAfter(lane.spans, moment);
    const away = (span) => span ? Math.max(span.begin - moment, moment - span.end, 0) : Infinity;
    const best = away(lane.spans[k - 1]) < away(lane.spans[k]) ? lane.spans[k - 1] : lane.spans[k];
    pointed = away(best) <= near ? {lane, span: best} : null;
    readout.textContent = pointed ? said(lane, best) : hint;
    redraw();
  };
  for (const lane of lanes) {
    lane.element.addEventListener("keydown", (event) => keys(lane, event));
    lane.element.addEventListener("focus", () => { focused = lane; choose(lane, lane.chosen); });
    lane.element.addEventListener("blur", () => { focused = null; readout.textContent = hint; redraw(); });
    lane.element.addEventListener("pointermove", (event) => { if (!dragging) point(lane, event); });
    lane.element.addEventListener("pointerleave", () => {
      pointed = null;
      readout.textContent = focused ? said(focused, focused.spans[focused.chosen]) : hint;
      redraw();
    });
    lane.element.addEventListener("click", () => {
      if (pointed && pointed.lane === lane) choose(lane, lane.spans.indexOf(pointed.span));
    });
  }
  let dragging = null;
  area.addEventListener("pointerdown", (event) => {
    dragging = {x: event.clientX, from: view.from, to: view.to};
  });
  window.addEventListener("pointermove", (event) => {
    if (!dragging) return;
    const moved = (event.clientX - dragging.x) / area.clientWidth * (dragging.to - dragging.from);
    look(dragging.from - moved, dragging.to - moved);
  });
  for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, () => { dragging = null; });
  area.addEventListener("wheel", (event) => {
    // Without a key the page scrolls, as it does everywhere else.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, momentAt(event));
  }, {passive: false});

  document.getElementById("save-trace").addEventListener("click", () => {
    const address = URL.createObjectURL(new Blob([stored], {type: "application/json"}));
    const link = make("a", document.body, {href: address, download: "trace.json", hidden: ""});
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  });

  new ResizeObserver(redraw).observe(area);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  // First the last run of the method that the page is about; focus begins where one looks.
  const shown = data.runs.filter((run) => run.method === data.summary.method).pop();
  if (shown) lookAt(shown);
  else fit();
  for (const lane of lanes) {
    if (!lane.spans.length) continue;
    lane.chosen = Math.min(firstAfter(lane.spans, shown ? shown.begin_ns + 1 : first), lane.spans.length - 1);
    lane.element.setAttribute("aria-valuenow", String(lane.chosen + 1));
    lane.element.setAttribute("aria-valuetext", said(lane, lane.spans[lane.chosen]));
  }
})();
