// Which metrics are drawn: all that the runs have, grouped by what stands before the slash, found by a part of their
// names.
"use strict";

const USUAL = ["reward", "evaluate/reward", "loss", "entropy", "grad_norm", "completion_tokens"];
const GENERAL = "general";
const FIRST_GROUPS = [GENERAL, "reward", "evaluate", "seconds"];
let offered = ""; // the keys that the list was made of

function allMetrics() {
  return [...new Set(shown.runs.flatMap((run) => run.tables.flatMap((table) => Object.keys(table.columns))))].sort();
}

/** The metrics that are drawn, in the order in which they were chosen. */
function drawnMetrics() {
  const known = allMetrics();
  if (view.metrics) return view.metrics.filter((key) => known.includes(key));
  const usual = USUAL.filter((key) => known.includes(key));
  return usual.length ? usual : known.slice(0, USUAL.length);
}

function chooseMetrics(keys) {
  view.metrics = keys;
  markChosen();
  drawCurves();
  keepView();
}

function toggleMetric(key, on) {
  chooseMetrics([...drawnMetrics().filter((one) => one !== key), ...(on ? [key] : [])]);
}

/** Name -> metrics: `seconds` stands with `seconds/train`; what has no such family is general. */
function groups(keys) {
  const found = new Map(FIRST_GROUPS.map((name) => [name, []]));
  for (const key of keys) {
    const name = key.split("/", 1)[0];
    const family = key.includes("/") || keys.some((other) => other.startsWith(`${name}/`));
    const group = family ? name : GENERAL;
    found.set(group, [...(found.get(group) || []), key]);
  }
  return [...found].filter(([, members]) => members.length);
}

function groupBox([name, keys]) {
  const choices = keys.map((key) => {
    const box = make("input", { type: "checkbox", value: key });
    box.addEventListener("change", () => toggleMetric(key, box.checked));
    const { unit, words } = meaningOf(key);
    const choice = make("label", { title: [words, unit && `in ${unit}`].filter(Boolean).join(", ") }, box, ` ${key}`);
    choice.dataset.key = key;
    return choice;
  });
  const box = make(
    "details",
    { open: name === GENERAL },
    make("summary", {}, `${name} `, make("span", { className: "quiet" })),
    ...choices,
  );
  box.dataset.group = name;
  return box;
}

/** Made anew only when there are other metrics than before, so that a live page leaves a reader's place in it. */
function fillMetrics() {
  const keys = allMetrics();
  if (JSON.stringify(keys) !== offered) {
    offered = JSON.stringify(keys);
    byId("metric-groups").replaceChildren(...groups(keys).map(groupBox));
  }
  markChosen();
  searchMetrics();
}

function markChosen() {
  const drawn = new Set(drawnMetrics());
  for (const group of byId("metric-groups").children) {
    const boxes = [...group.querySelectorAll("input")];
    boxes.forEach((box) => {
      box.checked = drawn.has(box.value);
    });
    group.querySelector("summary span").textContent = `${boxes.filter((box) => box.checked).length} of ${boxes.length}`;
  }
  byId("metrics-drawn").textContent = `${drawn.size} of ${allMetrics().length} drawn`;
}

const sought = () => byId("metric-search").value.trim().toLowerCase();
const foundMetrics = () => allMetrics().filter((key) => key.toLowerCase().includes(sought()));

function searchMetrics() {
  const found = new Set(foundMetrics());
  for (const group of byId("metric-groups").children) {
    const choices = [...group.querySelectorAll("label")];
    choices.forEach((choice) => {
      choice.hidden = !found.has(choice.dataset.key);
    });
    group.hidden = choices.every((choice) => choice.hidden);
    if (sought()) group.open = true;
  }
  byId("metrics-found").disabled = !sought();
  byId("metrics-found").textContent = sought() ? `Add the ${found.size} found` : "Add all found";
}

byId("metric-search").addEventListener("input", searchMetrics);
byId("metrics-found").addEventListener("click", () =>
  chooseMetrics([...new Set([...drawnMetrics(), ...foundMetrics()])]),
);
byId("metrics-usual").addEventListener("click", () => chooseMetrics(null));
byId("metrics-none").addEventListener("click", () => chooseMetrics([]));
byId("chooser").open = matchMedia("(min-width: 1001px)").matches;
