// The rollout browser: filters, prompts with their samples, and each completion with its tokens coloured by how likely
// they were.
"use strict";

const SHOWN_AT_ONCE = 50; // prompts in the list, and samples in one of them
const UNLIKELY = -5; // the log-prob of the strongest colour
const filters = byId("filters");
let limit = SHOWN_AT_ONCE;
let samples = [];

function allSamples() {
  return shown.runs.flatMap((run, number) =>
    run.rollouts.map((sample) => ({ ...sample, run: number, likely: meanLogprob(sample) })),
  );
}

function wanted() {
  const form = new FormData(filters);
  const number = (name) => (form.get(name) === "" || form.get(name) === null ? null : Number(form.get(name)));
  const [low, high, first, last] = ["low", "high", "first", "last"].map(number);
  const text = String(form.get("text") || "").toLowerCase();
  const finish = form.get("finish");
  const run = form.get("run");
  return (sample) =>
    (!run || shown.runs[sample.run].name === run) &&
    (low === null || sample.reward >= low) &&
    (high === null || sample.reward <= high) &&
    (first === null || sample.step >= first) &&
    (last === null || sample.step <= last) &&
    (!finish || (finish === "failure" ? Boolean(sample.failure) : sample.finish === finish)) &&
    (!text ||
      String(sample.prompt).toLowerCase().includes(text) ||
      String(sample.completion).toLowerCase().includes(text));
}

function meanLogprob(sample) {
  const all = sample.turns ? sample.turns.flatMap((turn) => turn.logprobs || []) : sample.logprobs || [];
  const known = all.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : Infinity;
}

const ORDERS = {
  newest: (one, other) => other.step - one.step || one.group - other.group || one.sample - other.sample,
  best: (one, other) => other.reward - one.reward || other.step - one.step,
  worst: (one, other) => one.reward - other.reward || other.step - one.step,
  advantage: (one, other) => Math.abs(other.advantage) - Math.abs(one.advantage) || other.step - one.step,
  surprise: (one, other) => one.likely - other.likely || other.step - one.step,
};

const GROUPS = {
  prompt: (sample) => JSON.stringify([sample.run, sample.step, sample.group]),
  text: (sample) => JSON.stringify([sample.prompt]),
  none: (_, place) => String(place),
};

/** The samples that match, in the chosen order, as lists of those that belong together. A group stands where its first
 * sample does. */
function grouped() {
  const form = new FormData(filters);
  const found = samples.filter(wanted()).sort(ORDERS[form.get("order")] || ORDERS.newest);
  const keyOf = GROUPS[form.get("group")] || GROUPS.prompt;
  const groups = new Map();
  found.forEach((sample, place) => {
    const key = keyOf(sample, place);
    if (groups.has(key)) groups.get(key).push(sample);
    else groups.set(key, [sample]);
  });
  return { found, groups: [...groups.values()] };
}

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

const signed = (value) => (typeof value === "number" ? (value > 0 ? "+" : "") + figure(value) : "–");
const same = (list, of) => list.every((sample) => JSON.stringify(of(sample)) === JSON.stringify(of(list[0])));
const text = (value) =>
  make("pre", { className: "text", textContent: typeof value === "string" ? value : JSON.stringify(value) });

/** The turns of an episode: what was sampled, what the environment answered, the tools that were called, the reward. */
function turnsOf(sample) {
  return sample.turns.flatMap((turn, place) => {
    const calls = (turn.calls || []).length ? `, calls ${turn.calls.join(", ")}` : "";
    const failed = turn.failed_calls ? `, ${turn.failed_calls} failed` : "";
    const title = `turn ${place + 1}: ${figure(turn.tokens)} tokens, reward ${figure(turn.reward)}${calls}${failed}`;
    return [
      make("h4", { textContent: title }),
      coloured(turn),
      ...(turn.answer ? [make("h4", { textContent: "environment" }), text(turn.answer)] : []),
    ];
  });
}

/** One completion with its figures; which step and run it is of where that is not the same for the whole group. */
function one(sample, group) {
  const rows = [
    ...(several() && !same(group, (other) => other.run) ? [["run", shown.runs[sample.run].name]] : []),
    ...(same(group, (other) => other.step) ? [] : [["step", figure(sample.step)]]),
    ["reward", figure(sample.reward)],
    ...Object.entries(sample.parts || {}).map(([name, value]) => [`part: ${name}`, figure(value)]),
    ["advantage", signed(sample.advantage)],
    ["tokens", figure(sample.tokens)],
    ["mean log-prob", Number.isFinite(sample.likely) ? figure(sample.likely) : "not kept"],
    ...(sample.turns ? [["turns", figure(sample.turns.length)]] : []),
    ["ended", sample.finish === "stop" ? "by itself" : `at the limit of ${sample.turns ? "turns or " : ""}tokens`],
  ];
  return make(
    "div",
    { className: "sample" },
    figures(rows),
    ...(sample.failure
      ? [
          make("p", {
            className: "bad",
            textContent: `not scored (${sample.failure}): ${sample.failure_message || ""}`,
          }),
        ]
      : []),
    ...(sample.turns ? turnsOf(sample) : [make("h4", { textContent: "completion" }), coloured(sample)]),
    ...(same(group, (other) => other.answer) ? [] : answerOf(sample)),
  );
}

function answerOf(sample) {
  return sample.answer === null || sample.answer === undefined
    ? []
    : [make("h4", { textContent: "expected answer" }), text(sample.answer)];
}

/** The prompt and its answer once, then every completion. */
function inside(group) {
  const rest = group.slice(SHOWN_AT_ONCE);
  const more = make("button", { type: "button", textContent: `Show ${rest.length} more completions` });
  more.addEventListener("click", () => more.replaceWith(...rest.map((sample) => one(sample, group))));
  return make(
    "div",
    { className: "inside" },
    make("h4", { textContent: "prompt" }),
    text(group[0].prompt),
    ...(same(group, (sample) => sample.answer) ? answerOf(group[0]) : []),
    ...group.slice(0, SHOWN_AT_ONCE).map((sample) => one(sample, group)),
    ...(rest.length ? [more] : []),
  );
}

function spanOf(values, digits) {
  const known = values.filter((value) => typeof value === "number");
  const [least, most] = [Math.min(...known), Math.max(...known)];
  return !known.length
    ? "–"
    : least === most
      ? figure(least, digits)
      : `${figure(least, digits)} to ${figure(most, digits)}`;
}

/** How many samples of a prompt are here; of how many, where filters or the size of the page left some out. */
function sizeOf(group) {
  const whole = shown.runs[group[0].run].group;
  const ofOneStep = new FormData(filters).get("group") === "prompt";
  return ofOneStep && typeof whole === "number" && group.length < whole
    ? `${figure(group.length)} of ${figure(whole)}`
    : figure(group.length);
}

/** A line of the list: which step, how many samples, their rewards, and the texts in short. */
function item(group) {
  const mark = (name, value) => make("span", { className: "figure" }, `${name} `, make("b", { textContent: value }));
  const short = (value) => String(value).slice(0, 200).replace(/\s+/g, " ");
  const rewards = group.map((sample) => sample.reward).filter((value) => typeof value === "number");
  const alone = group.length === 1;
  const runs = [...new Set(group.map((sample) => sample.run))];
  const marks = [
    mark(
      same(group, (sample) => sample.step) ? "step" : "steps",
      spanOf(
        group.map((sample) => sample.step),
        0,
      ),
    ),
    ...(alone
      ? [mark("reward", figure(group[0].reward)), mark("advantage", signed(group[0].advantage))]
      : [
          mark("samples", sizeOf(group)),
          mark(
            "mean reward",
            rewards.length ? figure(rewards.reduce((sum, value) => sum + value, 0) / rewards.length) : "–",
          ),
          mark("from", spanOf(rewards)),
        ]),
  ];
  const details = make(
    "details",
    {},
    make(
      "summary",
      {},
      ...(several()
        ? [
            make(
              "span",
              { className: "figure", title: runs.map((run) => shown.runs[run].name).join(", ") },
              ...runs.map(swatch),
            ),
          ]
        : []),
      ...marks,
      make("span", {
        className: "short",
        textContent: alone ? `${short(group[0].prompt)} ⟶ ${short(group[0].completion)}` : short(group[0].prompt),
      }),
    ),
  );
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(inside(group));
  });
  return make("li", {}, details);
}

function listSamples() {
  const { found, groups } = grouped();
  const visible = groups.slice(0, limit);
  byId("samples").replaceChildren(...visible.map(item));
  const prompts = new FormData(filters).get("group") === "none" ? "" : `, in ${figure(groups.length)} groups`;
  const rest = visible.length < groups.length ? `; the first ${figure(visible.length)} are listed` : "";
  byId("found").textContent = samples.length
    ? `${figure(found.length)} of ${figure(samples.length)} samples match${prompts}${rest}.`
    : "No samples yet.";
  byId("more").hidden = visible.length === groups.length;
}

/** New data: the list waits while somebody reads a sample in it. */
function takeSamples() {
  samples = allSamples();
  const missing = shown.runs
    .filter((run) => run.samples > run.rollouts.length)
    .map(
      (run) =>
        `${several() ? `Of ${run.name} the` : "The"} page holds ${figure(run.rollouts.length)} of about ` +
        `${figure(run.samples)} samples, the newest ones and others spread over the run`,
    );
  byId("left-out").textContent = missing.length ? `${missing.join("; ")}. All of them are in rollouts.jsonl.` : "";
  if (byId("samples").querySelector("details[open]"))
    byId("found").textContent = "There are new samples: close those that are open, or change a filter, to list them.";
  else listSamples();
}

function fillRunFilter() {
  byId("run-filter").hidden = !several();
  fillChoice(filters.elements.run, [["", "all"], ...shown.runs.map((run) => [run.name, run.name])]);
}

function rolloutsAsRows() {
  const { found } = grouped();
  const parts = [...new Set(found.flatMap((sample) => Object.keys(sample.parts || {})))];
  const keys = [
    "step",
    "group",
    "sample",
    "prompt",
    "answer",
    "completion",
    "reward",
    "advantage",
    "finish",
    "tokens",
    "failure",
    "failure_message",
  ];
  return [
    ["run", ...keys, ...parts.map((name) => `reward/${name}`)],
    ...found.map((sample) => [
      shown.runs[sample.run].name,
      ...keys.map((key) => sample[key]),
      ...parts.map((name) => sample.parts?.[name]),
    ]),
  ];
}

function afresh() {
  limit = SHOWN_AT_ONCE;
  listSamples();
}

function colourTokens() {
  byId("samples").classList.toggle("uncoloured", !byId("colour-tokens").checked);
}

filters.addEventListener("input", afresh);
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () =>
  setTimeout(() => {
    // the fields are empty only after it
    afresh();
    keepView();
  }),
);
byId("more").addEventListener("click", () => {
  limit += SHOWN_AT_ONCE;
  listSamples();
});
byId("colour-tokens").addEventListener("change", colourTokens);
byId("rollouts-csv").addEventListener("click", () => download("rollouts", rolloutsAsRows()));
byId("scale").append("probability ", ...[1, 0.5, 0.1, 0.01].map((value) => token(String(value), Math.log(value))));
