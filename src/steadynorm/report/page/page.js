// Draws the page's plots and keeps its state in the address: theme, hidden runs, scales, zoom.
// Every text from the data reaches plotly through `label`, which escapes it, and the document not at all.
(() => {
  "use strict";
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const data = JSON.parse(document.getElementById("data").textContent);
  const cards = all("figure[data-plot]");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;

  // ---- what is packed into the page

  async function unpack(node) {
    const bytes = Uint8Array.from(atob(node.textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
  }

  // the policy allows this very script, by its hash
  const plotly = unpack(document.getElementById("plotly")).then((found) => found.text()).then((code) => {
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
  });

  const DASHES = ["solid", "dot", "dashdot", "longdash", "longdashdot"];
  const COLOURS = 8;

  // ---- state <-> address

  const state = { theme: "", hidden: new Set(), log: null, logs: new Map(), wide: new Set(), zoom: new Map() };

  function load() {
    const given = new URLSearchParams(location.hash.slice(1));
    const names = (key) => new Set(given.getAll(key));
    const theme = given.get("theme");
    state.theme = theme === "dark" || theme === "light" ? theme : "";
    const [hide, show] = [names("hide"), names("show")];
    state.hidden = new Set(data.toggles.flatMap((name, i) =>
      (given.has("show") ? !show.has(name) : hide.has(name)) ? [i] : []));
    state.log = given.has("log") ? given.get("log") === "1" : null;
    state.logs = new Map();
    state.zoom = new Map();
    for (const [key, value] of given) {
      if (key.startsWith("log.")) state.logs.set(key.slice(4), value === "1");
      const range = value.split(",").map(Number);
      if (key.startsWith("zoom.") && range.length === 2 && range.every(Number.isFinite)) state.zoom.set(key.slice(5), range);
    }
    state.wide = names("wide");
  }

  function save() {
    const given = new URLSearchParams();
    if (state.theme) given.set("theme", state.theme);
    const few = state.hidden.size <= data.toggles.length / 2;
    data.toggles.forEach((name, i) => {
      if (state.hidden.has(i) === few) given.append(few ? "hide" : "show", name);
    });
    if (!few && !given.has("show")) given.set("show", "");
    if (state.log !== null) given.set("log", state.log ? "1" : "0");
    for (const [id, on] of state.logs) given.set(`log.${id}`, on ? "1" : "0");
    for (const id of state.wide) given.append("wide", id);
    for (const [axis, range] of state.zoom) given.set(`zoom.${axis}`, range.map((v) => Number(v.toPrecision(7))).join(","));
    history.replaceState(null, "", `#${given}`);
  }

  const dark = () => (state.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
  const logY = (plot) => Boolean(plot.positive && (state.logs.get(plot.id) ?? state.log ?? plot.logY));
  const shows = (entry) => entry.run === undefined || !state.hidden.has(entry.run);

  // ---- what plotly is given

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const length = () => (innerWidth < 640 ? 22 : 44);

  // text as plotly shows it: its own markup escaped, the middle of long names left out (or all but `half` at the start)
  function label(text, limit = length(), half = Math.floor(limit / 2)) {
    const letters = [...text.replace(/\s+/g, " ")];
    const short = letters.length > limit ? [...letters.slice(0, half), "…", ...letters.slice(half + 1 - limit)] : letters;
    return short.join("").replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function traces(plot, log) {
    const several = new Set(plot.series.map((s) => s.name)).size > 1;
    const names = plot.series.map((s) => {
      if (s.run === undefined || s.name.includes(data.toggles[s.run])) return label(s.name);
      const run = label(data.toggles[s.run]);
      return several ? `${run} · ${label(s.name)}` : run;
    });
    return plot.series.flatMap((series, i) => {
      const x = data.x[series.x];
      const ink = colour(`--c${series.colour % COLOURS}`);
      const dash = series.style === "dash" ? "dash" : DASHES[Math.floor(series.colour / COLOURS) % DASHES.length];
      const points = series.style === "points";
      const trace = {
        type: "scatter", x, y: series.y, name: names[i], visible: shows(series),
        mode: points ? "markers" : x.length <= 40 ? "lines+markers" : "lines",
        line: { color: ink, width: (plot.series.length > 30 ? 1 : x.length > 300 ? 1.5 : 1.9) + 3 * (series.under ?? 0), dash },
        marker: { color: ink, size: points ? 7 : 4.5 },
      };
      if (points && series.error) trace.error_y = { type: "data", array: series.error, color: ink, thickness: 1.4, width: 4 };
      return !points && series.error ? [band(series, x, ink, log), trace] : [trace];
    });
  }

  function band(series, x, ink, log) {
    const kept = x.map((_, i) => i).filter((i) => series.y[i] !== null && series.error[i] !== null);
    const low = (i) => (log ? Math.max(series.y[i] - series.error[i], series.y[i] / 100) : series.y[i] - series.error[i]);
    const back = [...kept].reverse();
    return {
      type: "scatter", mode: "lines", fill: "toself", fillcolor: `${ink}2e`, line: { width: 0 }, hoverinfo: "skip",
      visible: shows(series), x: [...kept, ...back].map((i) => x[i]),
      y: [...kept.map((i) => series.y[i] + series.error[i]), ...back.map(low)],
    };
  }

  // plotly scales y to all of x; zoomed in, we scale it to what is seen
  function seenRange(plot, [from, to], log) {
    let [low, high] = [Infinity, -Infinity];
    for (const series of plot.series.filter(shows)) {
      const x = data.x[series.x];
      series.y.forEach((y, i) => {
        if (x[i] < from || x[i] > to || y === null || (log && y <= 0)) return;
        low = Math.min(low, y);
        high = Math.max(high, y);
      });
    }
    if (low > high) return undefined;
    if (plot.zero && !log) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
    const pad = (b - a) * 0.06 || Math.abs(a) * 0.05 || 1;
    return [a - pad, b + pad];
  }

  function layout(plot, log) {
    const axis = {
      gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true,
      tickfont: { size: 11.5, color: colour("--muted") }, exponentformat: "power", minexponent: 4, ticks: "",
    };
    const range = plot.logX ? undefined : state.zoom.get(plot.xLabel);
    const ranges = range && plot.kind === "plot" ? seenRange(plot, range, log) : undefined;
    return {
      autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      margin: { l: 44, r: 12, t: 8, b: 34 }, dragmode: touch ? false : "zoom",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--text") },
      hovermode: plot.kind === "plot" && plot.series.filter(shows).length <= 16 ? "x unified" : "closest", hoverdistance: 30,
      hoverlabel: {
        bgcolor: colour("--card"), bordercolor: colour("--line"), font: { size: 12, color: colour("--text") }, namelength: -1,
      },
      xaxis: {
        ...axis, type: plot.logX ? "log" : "linear", showgrid: false, showline: true, fixedrange: touch, zeroline: false,
        title: { text: label(plot.xLabel), font: { size: 12, color: colour("--muted") }, standoff: 6 },
        ...(range ? { range, autorange: false } : { autorange: true }), exponentformat: "SI", hoverformat: ",~r", nticks: 7,
        unifiedhovertitle: { text: `${label(plot.xLabel)} %{x}` }, spikecolor: colour("--muted"), spikethickness: 1, spikedash: "dot",
      },
      yaxis: {
        ...axis, type: log ? "log" : "linear", fixedrange: true, rangemode: plot.zero ? "tozero" : "normal", nticks: 6,
        hoverformat: ".5~g", ...(ranges ? { range: ranges, autorange: false } : { autorange: true }),
      },
    };
  }

  function heat(plot, node) {
    const names = plot.y.map((name) => label(name, 200));
    const step = Math.ceil((names.length * 13) / Math.max(node.clientHeight - 50, 60)); // rows that have room for a name
    const shown = names.map((_, i) => i).filter((i) => i % step === 0);
    const form = layout(plot, false);
    const where = (plot.middle - plot.low) / (plot.high - plot.low);
    const stops = [0, where / 2, where, (1 + where) / 2, 1];
    form.margin.l = 8;
    form.yaxis = {
      ...form.yaxis, type: "category", autorange: "reversed", showgrid: false, tickmode: "array",
      tickvals: shown.map((i) => names[i]), ticktext: shown.map((i) => `${label(plot.y[i], innerWidth < 640 ? 16 : 26, 0)} `),
    };
    const trace = {
      type: "heatmap", x: data.x[plot.x], y: names, z: plot.z, zmin: plot.low, zmax: plot.high, hoverongaps: false,
      colorscale: stops.map((at, i) => [at, colour(`--heat${i}`)]),
      colorbar: { thickness: 9, outlinewidth: 0, len: 1.04, xpad: 6, tickfont: { size: 11, color: colour("--muted") }, nticks: 5 },
      hovertemplate: `%{y}<br>${label(plot.xLabel)} %{x}<br>${label(plot.yLabel)} <b>%{z:.4~g}</b><extra></extra>`,
    };
    return [[trace], form];
  }

  // ---- drawing: what is seen now, the rest when it comes into view

  const seen = new Set();

  async function draw(index) {
    await plotly;
    const [plot, node] = [data.plots[index], cards[index].querySelector(".plot")];
    if (node.dataset.drawn === "1" || cards[index].hidden) return;
    const log = plot.kind === "plot" && logY(plot);
    const [drawn, form] = plot.kind === "plot" ? [traces(plot, log), layout(plot, log)] : heat(plot, node);
    const first = !node.dataset.drawn;
    node.dataset.drawn = "1";
    await Plotly.react(node, drawn, form, { displayModeBar: false, responsive: true, doubleClick: false, showTips: false });
    if (!first) return;
    node.on("plotly_relayout", (change) => {
      const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (plot.logX || !range.every(Number.isFinite)) return;
      state.zoom.set(plot.xLabel, range);
      apply();
    });
    node.on("plotly_doubleclick", () => {
      state.zoom.delete(plot.xLabel);
      if (plot.logX) Plotly.relayout(node, { "xaxis.autorange": true });
      apply();
    });
  }

  const drawAll = () => Promise.all(data.plots.map((_, index) => draw(index)));

  function press(button, on) {
    button.setAttribute("aria-pressed", String(on));
  }

  function apply({ keep = false } = {}) {
    if (!keep) save();
    root.dataset.theme = dark() ? "dark" : "light";
    press(document.getElementById("theme"), dark());
    all(".chip").forEach((chip) => press(chip, !state.hidden.has(Number(chip.dataset.run))));
    all("tr[data-run]").forEach((row) => row.classList.toggle("off", state.hidden.has(Number(row.dataset.run))));
    cards.forEach((card, index) => {
      const plot = data.plots[index];
      card.hidden = plot.kind === "heat" && !shows(plot);
      card.classList.toggle("spread", state.wide.has(plot.id));
      all(".log", card).forEach((button) => press(button, logY(plot)));
      press(card.querySelector(".wide"), state.wide.has(plot.id));
      const node = card.querySelector(".plot");
      if (node.dataset.drawn) node.dataset.drawn = "0";
    });
    const global = document.getElementById("log");
    if (global) press(global, data.plots.filter((plot) => plot.positive).every(logY));
    seen.forEach(draw);
  }

  // ---- controls

  function on(selector, event, act) {
    all(selector).forEach((node) => node.addEventListener(event, () => act(node)));
  }

  on("#theme", "click", () => {
    state.theme = dark() ? "light" : "dark";
    apply();
  });
  on("#log", "click", (button) => {
    state.log = button.getAttribute("aria-pressed") !== "true";
    state.logs.clear();
    apply();
  });
  on(".log", "click", (button) => {
    const plot = data.plots[button.closest("figure").dataset.plot];
    state.logs.set(plot.id, !logY(plot));
    apply();
  });
  on(".wide", "click", (button) => {
    const { id } = data.plots[button.closest("figure").dataset.plot];
    if (!state.wide.delete(id)) state.wide.add(id);
    apply();
    const node = button.closest("figure").querySelector(".plot");
    if (node.data) Plotly.Plots.resize(node);
  });
  on(".chip", "click", (chip) => {
    const run = Number(chip.dataset.run);
    if (!state.hidden.delete(run)) state.hidden.add(run);
    apply();
  });
  on(".chip", "dblclick", (chip) => {
    state.hidden = new Set(data.toggles.keys());
    state.hidden.delete(Number(chip.dataset.run));
    apply();
  });
  on("[data-every]", "click", (button) => {
    for (const chip of all(".chip:not([hidden])")) {
      const run = Number(chip.dataset.run);
      if (button.dataset.every) state.hidden.delete(run);
      else state.hidden.add(run);
    }
    apply();
  });
  on(".filter", "input", (input) => {
    const wanted = input.value.toLowerCase();
    all(".chip").forEach((chip) => { chip.hidden = !data.toggles[chip.dataset.run].toLowerCase().includes(wanted); });
  });
  on("[data-section]", "click", (button) => all(".text")[button.dataset.section].scrollIntoView({ behavior: "smooth" }));
  on("[data-save]", "click", async (button) => {
    const packed = all("script[data-file]").find((each) => each.dataset.file === button.dataset.save);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await (await unpack(packed)).blob());
    link.download = button.dataset.save;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  });
  on("th button", "click", (button) => {
    const heading = button.closest("th");
    const rising = heading.getAttribute("aria-sort") !== "ascending";
    all("th", heading.parentNode).forEach((each) => each.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const body = heading.closest("table").tBodies[0];
    const at = heading.cellIndex;
    const value = (row) => row.cells[at].dataset.value ?? row.cells[at].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const [p, q] = [parseFloat(x), parseFloat(y)];
      const order = Number.isNaN(p) || Number.isNaN(q) ? Number.isNaN(p) - Number.isNaN(q) || x.localeCompare(y) : p - q;
      return rising ? order : -order;
    });
    body.append(...rows);
  });

  all("table").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((heading, at) => {
      heading.classList.toggle("number", table.tBodies[0].rows[0]?.cells[at].classList.contains("number"));
    });
  });
  prefersDark.addEventListener("change", () => apply({ keep: true }));
  addEventListener("hashchange", () => {
    load();
    apply({ keep: true });
  });
  addEventListener("beforeprint", drawAll);
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const index = Number(entry.target.dataset.plot);
      if (entry.isIntersecting) {
        seen.add(index);
        draw(index);
      } else seen.delete(index);
    }
  }, { rootMargin: "300px 0px" });
  load();
  apply({ keep: true });
  cards.forEach((card) => watcher.observe(card));
  window.page = { drawAll, state, data };
})();
