// The view: all that a reader has chosen, kept in the page's address after the #, so that a link shows the same.
// Controls say by data-view what they are called there. What is as it was at first is left out.
"use strict";

const KEPT_AFTER_MS = 200; // browsers refuse addresses that change with every movement of a slider
const view = { metrics: null, log: new Set(), hidden: new Set() }; // metrics: null for the usual ones
let keeping = 0;

const control = (name) => document.querySelector(`[data-view="${name}"]`);
const controls = () => [...document.querySelectorAll("[data-view]")];

function valueOf(element) {
  return element.type === "checkbox" ? (element.checked ? "1" : "0") : element.value;
}

function setValue(element, value) {
  if (element.type === "checkbox") element.checked = value === "1";
  else if (element.tagName !== "SELECT" || [...element.options].some((option) => option.value === value))
    element.value = value;
}

/** What a control says on a page that nobody has touched. */
function untouched(element) {
  if (element.type === "checkbox") return element.defaultChecked ? "1" : "0";
  return element.tagName === "SELECT" ? (element.options[0]?.value ?? "") : element.defaultValue;
}

function numberOf(name) {
  const { value } = control(name);
  return value === "" ? null : Number(value);
}

function address() {
  const kept = new URLSearchParams();
  if (view.metrics) (view.metrics.length ? view.metrics : [""]).forEach((key) => kept.append("metric", key));
  view.log.forEach((key) => kept.append("log", key));
  view.hidden.forEach((name) => kept.append("hide", name));
  controls()
    .filter((element) => valueOf(element) !== untouched(element))
    .forEach((element) => kept.set(element.dataset.view, valueOf(element)));
  return kept.size ? `#${kept}` : "";
}

function keepView() {
  clearTimeout(keeping);
  keeping = setTimeout(() => {
    if (address() !== location.hash) history.replaceState(null, "", location.pathname + location.search + address());
  }, KEPT_AFTER_MS);
}

/** Takes over what the address says. Names in it that no run has are kept and show nothing. */
function readView() {
  const kept = new URLSearchParams(location.hash.slice(1));
  view.metrics = kept.has("metric") ? [...new Set(kept.getAll("metric"))].filter(Boolean) : null;
  view.log = new Set(kept.getAll("log"));
  view.hidden = new Set(kept.getAll("hide"));
  controls().forEach((element) => setValue(element, kept.get(element.dataset.view) ?? untouched(element)));
}
