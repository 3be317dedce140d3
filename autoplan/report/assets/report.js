// Zooming and reading the charts; the page is whole without it. Needs d3 (bundled).
"use strict";
(() => {
  const keysThatMove = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  const time = (s) => {
    for (const [step, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]])
      if (Math.abs(s) >= step) return `${+(s / step).toPrecision(4)} ${unit}`;
    return "0";
  };

  function button(box, label, name, act) {
    box.append("button").attr("type", "button").attr("aria-label", name).text(label).on("click", act);
  }

  // Zoom buttons, dragging, Ctrl and the wheel; `moved` is told the transform in the chart's own units.
  function zoomable(box, svg, most, extent, moved) {
    const zoom = d3.zoom().scaleExtent([1, most]).extent([[extent[0], extent[1]], [extent[2], extent[3]]])
      .translateExtent([[extent[0], extent[1]], [extent[2], extent[3]]])
      .filter((e) => e.type === "wheel" ? e.ctrlKey || e.metaKey : !e.button && (e.type !== "touchstart" || e.touches.length > 1))
      .on("zoom", (e) => moved(e.transform));
    svg.call(zoom).on("dblclick.zoom", null);
    const tools = box.insert("div", ":first-child").attr("class", "tools");
    const by = (k) => () => svg.call(zoom.scaleBy, k);
    button(tools, "−", "zoom out", by(0.5));
    button(tools, "+", "zoom in", by(2));
    button(tools, "whole", "show the whole chart", () => svg.call(zoom.transform, d3.zoomIdentity));
    return { zoom, by };
  }

  function graph(node) {
    const box = d3.select(node), svg = box.select("svg"), inside = svg.select(".scaled");
    const [, , wide, high] = svg.attr("viewBox").split(" ").map(Number);
    const { zoom, by } = zoomable(box, svg, 8, [0, 0, wide, high], (t) => inside.attr("transform", t));
    box.on("keydown", (e) => {
      if (e.target !== node) return;
      const way = keysThatMove[e.key], k = d3.zoomTransform(svg.node()).k;
      if (way && k > 1) svg.call(zoom.translateBy, (way[0] * wide) / 10 / k, (way[1] * high) / 10 / k);
      else if (e.key === "+" || e.key === "=") by(1.5)();
      else if (e.key === "-") by(1 / 1.5)();
      else if (e.key === "0") svg.call(zoom.transform, d3.zoomIdentity);
      else return;
      e.preventDefault();
    });
  }

  // Undo the packing of a track: gaps after the block before, lengths by kind.
  function blocks(track) {
    let clock = 0;
    return track.k.map((kind, i) => {
      const [what, stage, length, parts] = track.kinds[kind];
      const start = clock + track.g[i];
      clock = start + length;
      return { what, stage, start, end: clock, m: track.m[i], parts };
    });
  }

  function said(track, block, unit) {
    if (block.once) return `${track.name}: ${block.once}, ${time((block.end - block.start) * unit)}, from ${time(block.start * unit)}`;
    const parts = block.parts.map(([cause, s]) => `${cause} ${s}`).join(", ");
    return `${track.name}, stage ${block.stage}: ${block.what} of micro-batch ${block.m}, ` +
      `${time(block.start * unit)} to ${time(block.end * unit)}${parts ? ` (${parts})` : ""}`;
  }

  function timeline(node) {
    const box = d3.select(node), svg = box.select("svg"), readout = box.select(".readout");
    const data = JSON.parse(box.select("script").text()), unit = data.step_s / 1e6;
    const tracks = data.tracks.map((track) => ({
      ...track,
      blocks: d3.sort(
        blocks(track).concat(track.once.map(([once, start, end]) => ({ once, start, end }))), (b) => b.start,
      ),
    }));
    const { left, width, top, row } = data, bottom = top + row * tracks.length;
    const scaled = svg.select(".scaled"), axis = svg.select(".axis"), labels = svg.select(".labels");
    const whole = d3.scaleLinear([0, data.step_s], [left, left + width]);
    const at = { track: 0, block: -1 };
    let now = whole;
    const outline = svg.append("rect").attr("class", "picked").attr("height", row - 6).attr("visibility", "hidden")
      .attr("clip-path", svg.select(".labels").attr("clip-path"));
    axis.selectAll("*").remove();

    function draw(t) {
      now = t.rescaleX(whole);
      scaled.attr("transform", `translate(${t.x},0) scale(${t.k},1)`);
      axis.attr("transform", `translate(0,${bottom})`).call(d3.axisBottom(now).ticks(8).tickSizeOuter(0).tickFormat(time));
      number();
      place();
    }

    // Micro-batch numbers where a block is wide enough, of what is in sight.
    function number() {
      const [from, to] = now.domain().map((s) => s / unit), found = [];
      tracks.forEach((track, i) => track.blocks.forEach((b) => {
        if (b.once || b.end < from || b.start > to || found.length > 1500) return;
        const x = now(b.start * unit), w = now(b.end * unit) - x;
        if (w > 7 * String(b.m).length + 5) found.push([x + w / 2, top + i * row + row / 2 + 4, b.m]);
      }));
      labels.selectAll("text").data(found).join("text").attr("text-anchor", "middle")
        .attr("x", (d) => d[0]).attr("y", (d) => d[1]).text((d) => d[2]);
    }

    function place() {
      const block = tracks[at.track]?.blocks[at.block];
      if (!block) return;
      outline.attr("visibility", "visible").attr("x", now(block.start * unit)).attr("y", top + at.track * row + 3)
        .attr("width", Math.max(1, now(block.end * unit) - now(block.start * unit)));
    }

    function pick(track, block) {
      at.track = track;
      at.block = block;
      readout.text(said(tracks[track], tracks[track].blocks[block], unit));
      place();
    }

    const nearest = (track, when) => {
      const list = tracks[track].blocks;
      return Math.min(list.length - 1, Math.max(0, d3.bisector((b) => b.start).right(list, when) - 1));
    };
    svg.on("pointermove", (e) => {
      const [x, y] = d3.pointer(e, svg.node());
      const track = Math.floor((y - top) / row), when = now.invert(x) / unit;
      if (!tracks[track] || x < left) return;
      const block = nearest(track, when);
      if (when <= tracks[track].blocks[block].end) pick(track, block);
      else readout.text(`${tracks[track].name}: waiting at ${time(when * unit)}`);
    });
    const { zoom, by } = zoomable(box, svg, 400, [left, 0, left + width, bottom], draw);
    // The chart zooms about its left edge, not the drawing's.
    svg.call(zoom.transform, d3.zoomIdentity);
    box.on("keydown", (e) => {
      if (e.target !== node) return;
      const way = keysThatMove[e.key];
      if (way && way[0]) pick(at.track, Math.min(tracks[at.track].blocks.length - 1, Math.max(0, at.block - way[0])));
      else if (way) {
        const when = tracks[at.track].blocks[at.block]?.start ?? 0;
        const track = Math.min(tracks.length - 1, Math.max(0, at.track - way[1]));
        pick(track, nearest(track, when));
      } else if (e.key === "Home" || e.key === "End") pick(at.track, e.key === "Home" ? 0 : tracks[at.track].blocks.length - 1);
      else if (e.key === "+" || e.key === "=") by(2)();
      else if (e.key === "-") by(0.5)();
      else if (e.key === "0") svg.call(zoom.transform, d3.zoomIdentity);
      else return;
      const block = tracks[at.track]?.blocks[at.block], x = block && now(block.start * unit);
      if (x < left || x > left + width) svg.call(zoom.translateTo, whole(block.start * unit), 0);
      e.preventDefault();
    });
  }

  document.querySelectorAll('[data-zoom="xy"]').forEach(graph);
  document.querySelectorAll('[data-zoom="x"]').forEach(timeline);
  // A link to a layout opens it; so does printing, for the stage that was open anyway.
  const open = () => document.getElementById(decodeURIComponent(location.hash.slice(1)))?.setAttribute("open", "");
  addEventListener("hashchange", open);
  document.querySelectorAll('a[href^="#layout-"]').forEach((a) => a.addEventListener("click", () =>
    document.getElementById(a.getAttribute("href").slice(1))?.setAttribute("open", "")));
  open();
  document.documentElement.dataset.ready = "yes";
})();
