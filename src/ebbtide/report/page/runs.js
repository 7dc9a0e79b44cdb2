// The runs at a glance: how far each is, what it learnt, how long it took, and what it ran with.
"use strict";

const PACE_STEPS = 20; // over which the pace of a run is taken

function columnOf(run, key) {
  return run.tables.find((table) => key in table.columns)?.columns[key];
}

function firstAndLast(run, key) {
  const known = (columnOf(run, key) || []).filter((value) => value !== null);
  return known.length > 1
    ? `${figure(known[0])} → ${figure(known.at(-1))}`
    : known.length
      ? figure(known[0])
      : undefined;
}

function last(run, key) {
  return (columnOf(run, key) || []).findLast((value) => value !== null);
}

/** A fact of a run's last step, with its unit; undefined where there is none. */
function lastWith(run, key, unit, digits = 2) {
  const value = last(run, key);
  return typeof value === "number" ? `${figure(value, digits)}${unit}` : undefined;
}

/** Seconds that a run has yet to go, at the pace of its last steps. */
function secondsLeft(run) {
  const { step, time } = run.tables[0];
  const from = Math.max(0, step.length - 1 - PACE_STEPS);
  const left = run.steps - step.at(-1);
  return shown.served && left > 0 && step.length - from > 1
    ? (left * (time.at(-1) - time[from])) / (step.at(-1) - step[from])
    : undefined;
}

/** A version, or those that a resumed run had one after another. */
function versionOf(run, name) {
  const known = run.starts.map((start) => start.versions[name]).filter((value) => value !== undefined);
  return known
    .filter((value, place) => value !== known[place - 1])
    .map(shortened)
    .join(", then ");
}

const shortened = (value) => value.replace(/^([0-9a-f]{12})[0-9a-f]{28}/, "$1"); // a commit

function withVersions(run) {
  const of = (name) => versionOf(run, name);
  if (!run.starts.length) return "versions are not recorded";
  const commit = of("commit") && ` (commit ${of("commit")})`;
  const began = run.starts[0].time && `started ${run.starts[0].time.replace("T", " ").replace("+00:00", " UTC")}`;
  return [
    `Ebbtide ${of("ebbtide")}${commit}`,
    ...["torch", "transformers", "python", "cuda"].map((name) => of(name) && `${name} ${of(name)}`),
    of("device"),
    began,
  ]
    .filter(Boolean)
    .join(" · ");
}

/** [what, value] of a run; undefined where it has none. */
function factsOf(run) {
  const { step, time } = run.tables[0];
  const left = secondsLeft(run);
  const onGpu = run.starts.some((start) => start.versions.cuda);
  return [
    ["steps done", `${figure(step.at(-1) ?? 0)}${run.steps ? ` of ${figure(run.steps)}` : ""}`],
    ["time taken, without loading", time.length ? duration(time.at(-1)) : undefined],
    ["time left at this pace", left && duration(left)],
    ["reward, first → last", firstAndLast(run, "reward")],
    ["held-out reward, first → last", firstAndLast(run, "evaluate/reward")],
    ["last step took", lastWith(run, "seconds", " s")],
    ["last step waited for memory moves", lastWith(run, "seconds_exposed", " s")],
    ["tokens a second, last step", lastWith(run, "tokens_per_second", "", 0)],
    [onGpu ? "peak GPU memory, last step" : "peak memory, last step", lastWith(run, "peak_gib", " GiB")],
  ];
}

/** One run with all that is known of it. */
function card(run) {
  const about = Object.entries(run.about)
    .map(([name, value]) => `${name} ${value}`)
    .join(" · ");
  return make(
    "div",
    { className: "run" },
    make("p", { className: "quiet", textContent: about }),
    make("p", { className: "quiet", textContent: withVersions(run) }),
    figures(factsOf(run).filter(([, value]) => value !== undefined)),
  );
}

/** Several runs, a line for each. What they ran with stands below, where they are compared. */
function comparison() {
  const facts = shown.runs.map(factsOf);
  const places = [...facts[0].keys()].filter((place) => facts.some((of) => of[place][1] !== undefined));
  const table = tableOf(
    ["run", ...places.map((place) => facts.find((of) => of[place][1] !== undefined)[place][0])],
    facts.map((of, number) => [shown.runs[number].name, ...places.map((place) => of[place][1] ?? "–")]),
  );
  [...table.tBodies[0].rows].forEach((row, number) => row.cells[0].prepend(swatch(number)));
  const region = make("div", { className: "run scroll", tabIndex: 0 }, table);
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", "The runs at a glance");
  return region;
}

function drawRuns() {
  byId("title").textContent = shown.runs.map((run) => run.name).join(" · ");
  byId("runs").replaceChildren(several() ? comparison() : card(shown.runs[0]));
}
