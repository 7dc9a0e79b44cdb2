// What all parts of the page share: the data, colours, and how elements and charts are made.
// Names and texts come from models and tasks. They reach the page as textContent only, and Plotly only through plain().
"use strict";

const HOLDING_COLOURS = {
  weights: "#4e79a7",
  base: "#a0cbe8",
  grads: "#f28e2b",
  master: "#59a14f",
  moments: "#86c5bd",
  reference: "#b07aa1",
  kv_cache: "#edc948",
  activations: "#e15759",
  logits: "#ff9da7",
  workspace: "#9c755f",
  gathered: "#7b6888",
  other: "#a9b1bb",
};
const HOLDING_PATTERNS = {
  // so that no two are told apart by their hue alone
  base: "/",
  grads: "/",
  moments: "x",
  reference: "\\",
  activations: "-",
  logits: ".",
  workspace: "|",
  gathered: "+",
};
const PHASE_COLOURS = {
  generate: "#4477aa",
  score: "#66ccee",
  logprob: "#228833",
  train: "#c9a227",
  step: "#aa3377",
  save: "#8c6d5a",
  evaluate: "#9aa3ad",
};
const EXPOSED_COLOUR = "#d62728";
const RUN_COLOURS = 6; // --run-0 to --run-5 of page.css
const DASHES = [
  ["solid", "solid"],
  ["dash", "dashed"],
  ["dot", "dotted"],
]; // of Plotly and of CSS

let shown = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);
const several = () => shown.runs.length > 1;
const dashOf = (number) => DASHES[Math.floor(number / RUN_COLOURS) % DASHES.length];

/** An element with properties and children; strings become text, never HTML. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A text for Plotly, which reads some tags, entities and %{fields} in what it draws. */
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "% {");
}

/** A name where lines do not break. */
function brief(name) {
  return name.length > 32 ? `${name.slice(0, 14)}…${name.slice(-17)}` : name;
}

/** A number for people: as many digits as say something. */
function figure(value, digits = 3) {
  if (typeof value !== "number") return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(1);
  return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) >= 1000 ? 0 : digits });
}

/** Seconds for people: the two largest units. */
function duration(seconds) {
  if (seconds < 60) return `${figure(seconds, seconds < 10 ? 1 : 0)} s`;
  const [large, small, of, parts] =
    seconds < 3600 ? ["min", "s", 60, 60] : seconds < 86400 ? ["h", "min", 3600, 60] : ["d", "h", 86400, 24];
  const whole = Math.round(seconds / (of / parts));
  return `${Math.floor(whole / parts)} ${large} ${whole % parts} ${small}`;
}

/** The line that a run is drawn with. */
function swatch(number) {
  const mark = make("span", { className: "swatch" });
  mark.style.borderTop = `3px ${dashOf(number)[1]} var(--run-${number % RUN_COLOURS})`;
  return mark;
}

function fillChoice(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([value, text]) => make("option", { value, textContent: text })));
  if (options.some(([value]) => value === before)) select.value = before;
}

function figures(pairs) {
  return make(
    "dl",
    { className: "figures" },
    ...pairs.map(([name, value]) =>
      make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })),
    ),
  );
}

function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    ink: of("--ink"),
    quiet: of("--quiet"),
    grid: of("--grid"),
    rule: of("--rule"),
    card: of("--card"),
    runs: Array.from({ length: RUN_COLOURS }, (_, number) => of(`--run-${number}`)),
  };
}

/** Draws or redraws a chart in an element; a reader's zoom stays. */
function draw(element, traces, { xaxis = {}, yaxis = {}, ...layout } = {}) {
  const colours = theme();
  const axis = { gridcolor: colours.grid, zerolinecolor: colours.rule, linecolor: colours.rule, automargin: true };
  const touch = matchMedia("(pointer: coarse)").matches; // there a drag scrolls the page
  const still = { showgrid: false };
  return Plotly.react(
    element,
    traces,
    {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: colours.quiet },
      margin: { l: 56, r: 12, t: 8, b: 44 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: colours.ink } },
      hoverlabel: {
        bgcolor: colours.card,
        bordercolor: colours.rule,
        font: { color: colours.ink },
        align: "left",
        namelength: -1,
      },
      dragmode: touch ? false : "zoom",
      uirevision: "kept",
      ...layout,
      xaxis: { ...axis, ...still, ...xaxis },
      yaxis: { ...axis, ...yaxis },
    },
    { displayModeBar: false, responsive: true },
  );
}
