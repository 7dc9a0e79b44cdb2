// The rollout browser: filters, a list, and each sample with its tokens coloured by how likely they were.
"use strict";

const SHOWN_AT_ONCE = 50;
const UNLIKELY = -5; // the log-prob of the strongest colour
const filters = byId("filters");
let limit = SHOWN_AT_ONCE;

function allSamples() {
  return shown.runs.flatMap((run, number) => run.rollouts.map((sample) => ({ ...sample, run: number })));
}

let samples = [];

function wanted() {
  const form = new FormData(filters);
  const number = (name) => (form.get(name) === "" || form.get(name) === null ? null : Number(form.get(name)));
  const [low, high, first, last] = ["low", "high", "first", "last"].map(number);
  const text = String(form.get("text") || "").toLowerCase();
  const finish = form.get("finish");
  const run = form.get("run");
  return (sample) =>
    (!run || sample.run === Number(run)) && (low === null || sample.reward >= low) && (high === null || sample.reward <= high) &&
    (first === null || sample.step >= first) && (last === null || sample.step <= last) &&
    (!finish || (finish === "failure" ? Boolean(sample.failure) : sample.finish === finish)) &&
    (!text || String(sample.prompt).toLowerCase().includes(text) || String(sample.completion).toLowerCase().includes(text));
}

function meanLogprob(sample) {
  const known = (sample.logprobs || []).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : Infinity;
}

const ORDERS = {
  newest: (one, other) => other.step - one.step || one.group - other.group || one.sample - other.sample,
  best: (one, other) => other.reward - one.reward || other.step - one.step,
  worst: (one, other) => one.reward - other.reward || other.step - one.step,
  advantage: (one, other) => Math.abs(other.advantage) - Math.abs(one.advantage) || other.step - one.step,
  surprise: (one, other) => one.likely - other.likely || other.step - one.step,
};

/** The completion, token by token; as one text where its log-probs were not kept. */
function coloured(sample) {
  const box = make("pre", { className: "text completion" });
  const letters = Array.from(sample.completion || ""); // code points, as Python counts them
  if (!Array.isArray(sample.token_chars) || !Array.isArray(sample.logprobs)) {
    box.textContent = sample.completion;
    return box;
  }
  let done = 0;
  sample.token_chars.forEach((length, place) => {
    box.append(token(letters.slice(done, done + length).join(""), sample.logprobs[place]));
    done += length;
  });
  box.append(letters.slice(done).join(""));
  return box;
}

function token(text, logprob) {
  const piece = make("span", { className: text ? "token" : "token bare", textContent: text });
  const known = typeof logprob === "number";
  piece.style.setProperty("--weight", known ? Math.min(1, logprob / UNLIKELY).toFixed(3) : "0");
  const why = text ? "" : "a token without a text of its own, as an end token or a part of a character: ";
  if (known) piece.title = `${why}log-prob ${logprob.toFixed(4)}, probability ${Math.exp(logprob).toPrecision(2)}`;
  return piece;
}

function inside(sample) {
  const signed = (value) => (typeof value === "number" ? (value > 0 ? "+" : "") + figure(value) : "–");
  const parts = Object.entries(sample.parts || {}).map(([name, value]) => [name, figure(value)]);
  const rows = [["reward", figure(sample.reward)], ...parts, ["advantage", signed(sample.advantage)], ["tokens", figure(sample.tokens)],
    ["mean log-prob", Number.isFinite(sample.likely) ? figure(sample.likely) : "not kept"], ["ended", sample.finish === "stop" ? "by itself" : "at the limit"]];
  const text = (value) => make("pre", { className: "text", textContent: typeof value === "string" ? value : JSON.stringify(value) });
  return make("div", { className: "inside" },
    make("dl", { className: "figures" }, ...rows.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value })))),
    ...(sample.failure ? [make("p", { className: "bad", textContent: `not scored (${sample.failure}): ${sample.failure_message || ""}` })] : []),
    make("h4", { textContent: "prompt" }), text(sample.prompt),
    make("h4", { textContent: "completion" }), coloured(sample),
    ...(sample.answer === null || sample.answer === undefined ? [] : [make("h4", { textContent: "answer" }), text(sample.answer)]));
}

function item(sample) {
  const mark = (name, value) => make("span", { className: "figure" }, `${name} `, make("b", { textContent: value }));
  const short = (value) => String(value).slice(0, 200).replace(/\s+/g, " ");
  const details = make("details", {}, make("summary", {},
    ...(several() ? [make("span", { className: "figure", title: shown.runs[sample.run].name }, swatch(runColour(sample.run)))] : []),
    mark("step", figure(sample.step)), mark("reward", figure(sample.reward)), mark("advantage", figure(sample.advantage, 2)),
    make("span", { className: "short", textContent: `${short(sample.prompt)} ⟶ ${short(sample.completion)}` })));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(inside(sample));
  });
  return make("li", {}, details);
}

function listSamples() {
  const order = ORDERS[new FormData(filters).get("order")] || ORDERS.newest;
  const found = samples.filter(wanted()).sort(order);
  const visible = found.slice(0, limit);
  byId("samples").replaceChildren(...visible.map(item));
  const rest = visible.length < found.length ? `; ${figure(visible.length)} are listed` : "";
  byId("found").textContent = samples.length ? `${figure(found.length)} of ${figure(samples.length)} samples match${rest}.` : "No samples yet.";
  byId("more").hidden = visible.length === found.length;
}

/** New data: the list waits while somebody reads a sample in it. */
function takeSamples() {
  samples = allSamples();
  samples.forEach((sample) => { sample.likely = meanLogprob(sample); });
  const missing = shown.runs.filter((run) => run.samples > run.rollouts.length).map((run) =>
    `${several() ? `Of ${run.name} the` : "The"} page holds ${figure(run.rollouts.length)} of about ${figure(run.samples)} samples, the newest ones and others spread over the run`);
  byId("left-out").textContent = missing.length ? `${missing.join("; ")}. All of them are in rollouts.jsonl.` : "";
  byId("run-filter").hidden = !several();
  fillChoice(filters.elements.run, [["", "all"], ...shown.runs.map((run, number) => [String(number), run.name])]);
  if (byId("samples").querySelector("details[open]")) byId("found").textContent = "There are new samples: close those that are open, or change a filter, to list them.";
  else listSamples();
}

function afresh() {
  limit = SHOWN_AT_ONCE;
  listSamples();
}

filters.addEventListener("input", afresh);
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () => setTimeout(afresh)); // the fields are empty only after it
byId("more").addEventListener("click", () => {
  limit += SHOWN_AT_ONCE;
  listSamples();
});
byId("colour-tokens").addEventListener("change", (event) => byId("samples").classList.toggle("uncoloured", !event.target.checked));
byId("scale").append("probability ", ...[1, 0.5, 0.1, 0.01].map((value) => token(String(value), Math.log(value))));
