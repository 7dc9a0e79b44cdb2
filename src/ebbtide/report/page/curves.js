// The runs at a glance, and what they learn: reward, loss, and any other figure against the step.
"use strict";

const SMOOTHED_FROM = 150; // points; below that a curve is read as it is
const UNITS = [
  [/^seconds/, "seconds"], [/_gib(\/|$)/, "GiB"], [/^tokens_per_second$/, "tokens/s"], [/tokens$/, "tokens"],
  [/^(entropy|kl|mismatch_kl)$/, "nats per token"], [/^mismatch/, "nats"], [/^samples|_groups$|^groups_|^updates/, "count"],
  [/pass@|^finished$|^clipped$/, "share"],
];

function lastOf(column) {
  return (column || []).findLast((value) => value !== null);
}

function drawRuns() {
  byId("title").textContent = shown.runs.map((run) => run.name).join(" · ");
  byId("runs").replaceChildren(...shown.runs.map((run, number) => {
    const columns = run.columns;
    const first = (columns.reward || []).find((value) => value !== null);
    const reward = lastOf(columns.reward);
    const tiles = [
      ["step", `${figure(lastOf(columns.step) ?? 0)}${run.steps ? ` of ${figure(run.steps)}` : ""}`],
      ["reward", reward === undefined ? undefined : `${figure(first)} → ${figure(reward)}`],
      ["held-out reward", columns["evaluate/reward"] && figure(lastOf(columns["evaluate/reward"]))],
      ["last step", columns.seconds && `${figure(lastOf(columns.seconds), 2)} s`],
      ["of it exposed", columns.seconds && columns.seconds_exposed && `${figure(lastOf(columns.seconds_exposed), 2)} s`],
      ["tokens/s", columns.tokens_per_second && figure(lastOf(columns.tokens_per_second), 0)],
      ["peak", columns.peak_gib && `${figure(lastOf(columns.peak_gib), 2)} GiB`],
    ].filter(([, value]) => value !== undefined);
    const about = Object.entries(run.about).map(([name, value]) => `${name} ${value}`).join(" · ");
    return make("div", { className: "run" },
      make("h3", {}, ...(several() ? [swatch(runColour(number))] : []), run.name),
      make("p", { className: "quiet", textContent: about }),
      make("dl", { className: "figures" }, ...tiles.map(([name, value]) =>
        make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })))));
  }));
}

/** The mean of each point and its neighbours. */
function smoothed(values) {
  const reach = Math.max(2, Math.round(values.length / 60));
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, place) => {
    const from = Math.max(0, place - reach);
    const to = Math.min(values.length, place + reach + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

/** A figure of one run: the curve, and for a long one its running mean over it. */
function curve(run, number, key, label, look = {}) {
  const column = run.columns[key] || [];
  const places = [...column.keys()].filter((place) => column[place] !== null);
  if (!places.length) return [];
  const x = places.map((place) => run.columns.step[place]);
  const y = places.map((place) => column[place]);
  const name = plain(several() ? brief(run.name) : label);
  const line = { color: runColour(number), width: 2, ...look.line };
  const base = { type: "scatter", mode: look.mode || (y.length > 1 ? "lines" : "markers"), x, y, name, line, marker: { color: line.color, size: 6 }, showlegend: several() && !look.quiet };
  base.hovertemplate = `${plain(label)} at step %{x}: %{y:.4~g}<extra>%{fullData.name}</extra>`;
  if (y.length < SMOOTHED_FROM) return [base];
  const raw = { ...base, line: { ...line, width: 1 }, opacity: 0.35, showlegend: false };
  return [raw, { ...base, y: smoothed(y), line: { ...line, width: 2.2 }, hovertemplate: `${plain(label)} around step %{x}: %{y:.4~g}<extra>%{fullData.name}</extra>` }];
}

function drawCurves() {
  const over = (key, label, look) => shown.runs.flatMap((run, number) => curve(run, number, key, label, look));
  const steps = { title: { text: "step" } };
  draw("reward", [
    ...over("reward", "reward"),
    ...over("evaluate/reward", "held-out reward", { mode: "lines+markers", line: { dash: "dot", width: 1.5 }, quiet: true }),
  ], { xaxis: steps, yaxis: { title: { text: "reward" } } });
  draw("loss", over("loss", "loss"), { xaxis: steps, yaxis: { title: { text: "loss" } } });
  const key = byId("metric-choice").value;
  const unit = (UNITS.find(([pattern]) => pattern.test(key)) || [null, ""])[1];
  draw("metric", key ? over(key, key) : [], {
    xaxis: steps,
    yaxis: { title: { text: plain(unit && unit !== key ? `${key} (${unit})` : key) } },
    uirevision: key, // another figure, another range
  });
}

function fillMetrics() {
  const keys = new Set(shown.runs.flatMap((run) => Object.keys(run.columns)));
  ["step", "reward", "loss"].forEach((key) => keys.delete(key));
  const preferred = ["entropy", "grad_norm", "tokens_per_second"].find((key) => keys.has(key));
  const select = byId("metric-choice");
  const chosen = select.value || preferred;
  fillChoice(select, [...keys].sort().map((key) => [key, key]));
  if (chosen && keys.has(chosen)) select.value = chosen;
}

byId("metric-choice").addEventListener("change", drawCurves);
