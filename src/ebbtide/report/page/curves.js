// The chosen metrics side by side, all runs in each chart, against the step or the time.
"use strict";

const POINTS_WITH_MARKS = 40; // up to which each point of a curve is marked
const TIME_UNITS = [
  [300, 1, "s"],
  [3 * 3600, 60, "min"],
  [3 * 86400, 3600, "h"],
  [Infinity, 86400, "days"],
]; // up to, seconds, name
const frames = new Map(); // metric -> its figure on the page
const near = new Set(); // figures that are on the screen or almost

const overTime = () => control("x").value === "time";
const drawnRuns = () =>
  shown.runs.map((run, number) => ({ run, number })).filter(({ run }) => !view.hidden.has(run.name));

function timeUnit() {
  const longest = Math.max(0, ...drawnRuns().map(({ run }) => run.tables[0].time.at(-1) || 0));
  return TIME_UNITS.find(([most]) => longest < most);
}

/** A run's values of a metric, where it has any, from the step or second `from` to the one `to`. */
function series(run, key) {
  const table = run.tables.find((one) => key in one.columns);
  if (!table) return { step: [], time: [], x: [], y: [], smooth: [] };
  const column = table.columns[key];
  const known = [...column.keys()].filter((place) => column[place] !== null);
  const all = known.map((place) => column[place]);
  const weight = Number(control("smooth").value);
  const smooth = weight ? smoothed(all, weight) : all;
  const at = overTime() ? table.time : table.step;
  const [from, to] = [numberOf("from") ?? -Infinity, numberOf("to") ?? Infinity];
  const seen = [...known.keys()].filter((place) => at[known[place]] >= from && at[known[place]] <= to);
  const pick = (list) => seen.map((place) => list[known[place]]);
  return {
    step: pick(table.step),
    time: pick(table.time),
    x: pick(at),
    y: seen.map((place) => all[place]),
    smooth: seen.map((place) => smooth[place]),
  };
}

/** The exponential moving average that TensorBoard draws: begun without a bias towards 0. */
function smoothed(values, weight) {
  let sum = 0;
  let whole = 0;
  return values.map((value) => {
    sum = sum * weight + value * (1 - weight);
    whole = whole * weight + (1 - weight);
    return sum / whole;
  });
}

/** A run's curve; smoothed, what was recorded lies faint behind it and stands in brackets where the mouse is. */
function tracesOf({ run, number }, key, seconds) {
  const { x, y, smooth } = series(run, key);
  if (!y.length) return [];
  const line = { color: theme().runs[number % RUN_COLOURS], width: 2, dash: dashOf(number)[0] };
  const base = {
    type: "scatter",
    mode: y.length <= POINTS_WITH_MARKS ? "lines+markers" : "lines",
    name: plain(brief(run.name)),
    line,
    marker: { color: line.color, size: 5 },
    x: overTime() ? x.map((value) => value / seconds) : x,
    showlegend: false,
  };
  if (!Number(control("smooth").value)) return [{ ...base, y, hovertemplate: "%{y:.4~g}" }];
  const raw = { ...base, y, mode: "lines", line: { ...line, width: 1 }, opacity: 0.35, hoverinfo: "skip" };
  return [raw, { ...base, y: smooth, customdata: y, hovertemplate: "%{y:.4~g} (%{customdata:.4~g})" }];
}

/** A figure of one metric, made once and kept, as redrawing keeps a reader's zoom. */
function frame(key) {
  if (frames.has(key)) return frames.get(key);
  const log = make("button", { type: "button", textContent: "log", title: "logarithmic y axis" });
  const remove = make("button", { type: "button", textContent: "×", title: "remove this chart" });
  log.setAttribute("aria-label", `logarithmic y axis for ${key}`);
  remove.setAttribute("aria-label", `remove ${key}`);
  log.addEventListener("click", () => {
    if (!view.log.delete(key)) view.log.add(key);
    drawCurve(key);
    keepView();
  });
  remove.addEventListener("click", () => {
    const after = frames.get(key).nextElementSibling || frames.get(key).previousElementSibling;
    toggleMetric(key, false);
    (after?.querySelector(".remove") || byId("metric-search")).focus(); // where the keyboard goes on
  });
  log.className = "log";
  remove.className = "remove";
  const chart = make("div", { className: "chart" });
  chart.setAttribute("role", "img");
  const caption = make(
    "figcaption",
    {},
    make("span", { className: "metric" }, make("b", { textContent: key }), ` ${meaningOf(key).words}`),
    log,
    remove,
  );
  const made = make("figure", {}, caption, make("ul", { className: "latest" }), chart);
  made.dataset.metric = key;
  frames.set(key, made);
  watching.observe(made);
  return made;
}

/** A chart is drawn when it comes near the screen: fifty at once would take seconds. */
const watching = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) near.delete(target);
      else {
        near.add(target);
        drawCurve(target.dataset.metric);
      }
    }
  },
  { rootMargin: "400px" },
);

const recent = (value) => figure(value, Math.abs(value) < 10 ? 4 : 1);

function drawCurve(key) {
  const made = frames.get(key);
  const [, seconds, unit] = timeUnit();
  const chart = made.querySelector(".chart");
  const log = view.log.has(key);
  const runs = drawnRuns();
  made.querySelector(".log").setAttribute("aria-pressed", String(log));
  const latest = runs
    .map(({ run, number }) => ({ run, number, value: series(run, key).smooth.at(-1) }))
    .filter(({ value }) => value !== undefined);
  made
    .querySelector(".latest")
    .replaceChildren(
      ...latest.map(({ run, number, value }) =>
        make("li", { title: run.name }, ...(several() ? [swatch(number)] : ["last "]), recent(value)),
      ),
    );
  chart.setAttribute(
    "aria-label",
    `${key}: ${latest.map(({ run, value }) => `${run.name} ${recent(value)}`).join(", ") || "no values yet"}`,
  );
  const range = [control("from"), control("to")].map(({ value }) => value).join();
  const began = chart.classList.contains("js-plotly-plot");
  draw(
    chart,
    runs.flatMap((one) => tracesOf(one, key, seconds)),
    {
      margin: { l: 50, r: 10, t: 6, b: 40 },
      hovermode: "x unified",
      xaxis: {
        title: { text: overTime() ? `time in ${unit}` : "step" },
        uirevision: `${overTime()} ${range}`,
        unifiedhovertitle: { text: overTime() ? `%{x:.4~g} ${unit}` : "step %{x}" },
      },
      yaxis: {
        title: { text: plain(meaningOf(key).unit) },
        type: log ? "log" : "linear",
        uirevision: `${log} ${range}`,
        exponentformat: "e",
        minorloglabels: "none",
      },
    },
  );
  if (!began) chart.on("plotly_relayout", (change) => zoomed(change, overTime() ? timeUnit()[1] : 1));
}

/** What a reader drags in one chart holds for all. */
function zoomed(change, unit) {
  const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (from === undefined && !change["xaxis.autorange"]) return;
  control("from").value = from === undefined ? "" : Number((from * unit).toPrecision(6));
  control("to").value = to === undefined ? "" : Number((to * unit).toPrecision(6));
  drawCurves();
  keepView();
}

function drawCurves() {
  const keys = drawnMetrics();
  const weight = Number(control("smooth").value);
  byId("smoothing-said").textContent = weight ? weight.toFixed(2) : "none";
  byId("x-unit").textContent = overTime() ? "seconds" : "steps";
  for (const [key, made] of frames) {
    if (!keys.includes(key)) {
      watching.unobserve(made);
      near.delete(made);
      frames.delete(key);
      Plotly.purge(made.querySelector(".chart"));
    }
  }
  const before = [...byId("curves").children].map((made) => made.dataset.metric).join("\n");
  if (before !== keys.join("\n") || !keys.length) {
    byId("curves").replaceChildren(
      ...(keys.length
        ? keys.map(frame)
        : [make("p", { className: "quiet", textContent: "No metric is drawn: choose some." })]),
    );
  }
  near.forEach((made) => drawCurve(made.dataset.metric));
}

/** Which runs are drawn: the boxes are made once, as a page's runs stay the same. */
function frameRuns() {
  const there = byId("drawn-runs");
  there.hidden = !several();
  there.append(
    ...shown.runs.map((run, number) => {
      const box = make("input", { type: "checkbox", value: run.name });
      box.addEventListener("change", () => {
        if (box.checked) view.hidden.delete(run.name);
        else view.hidden.add(run.name);
        drawCurves();
        keepView();
      });
      return make("label", { title: run.name }, box, swatch(number), brief(run.name));
    }),
  );
}

function markRuns() {
  byId("drawn-runs")
    .querySelectorAll("input")
    .forEach((box) => {
      box.checked = !view.hidden.has(box.value);
    });
}

/** What the charts show: each run's steps, and every metric as it was recorded and, where chosen, smoothed. */
function curvesAsRows() {
  const keys = drawnMetrics();
  const weight = Number(control("smooth").value);
  const names = keys.flatMap((key) => [key, ...(weight ? [`${key} smoothed ${weight}`] : [])]);
  const rows = drawnRuns().flatMap(({ run }) => {
    const steps = new Map();
    keys.forEach((key, place) => {
      const { step, time, y, smooth } = series(run, key);
      step.forEach((number, at) => {
        const row = steps.get(number) || [run.name, number, time[at], ...names.map(() => null)];
        const column = 3 + place * (weight ? 2 : 1);
        row[column] = y[at];
        if (weight) row[column + 1] = smooth[at];
        steps.set(number, row);
      });
    });
    return [...steps.values()].sort((one, other) => one[1] - other[1]);
  });
  return [["run", "step", "seconds", ...names], ...rows];
}

byId("curves-csv").addEventListener("click", () => download("curves", curvesAsRows()));
byId("whole-run").addEventListener("click", () => {
  control("from").value = control("to").value = "";
  drawCurves();
  keepView();
});
control("x").addEventListener("change", () => {
  control("from").value = control("to").value = ""; // steps are no seconds
});
["x", "smooth", "from", "to"].forEach((name) =>
  control(name).addEventListener("input", () => requestAnimationFrame(drawCurves)),
);
addEventListener("beforeprint", () => frames.forEach((_, key) => drawCurve(key)));
