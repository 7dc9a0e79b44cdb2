// A step through its phases: memory by holding and seconds, measured, with what the plan predicted drawn over them; and
// the plan in words.
"use strict";

const PHASE_ORDER = Object.keys(PHASE_COLOURS);
const HOLDING_ORDER = Object.keys(HOLDING_COLOURS);
const WAITING = "waiting for memory moves (exposed)";

function inOrder(names, order) {
  const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  return [...new Set(names)].sort((one, other) => place(one) - place(other));
}

function fillSteps() {
  const steps = inOrder(
    shown.runs.flatMap((run) => run.phases.map((one) => one.step)),
    [],
  ).sort((one, other) => other - one);
  fillChoice(byId("step-choice"), [
    ["last", several() ? "the last of each run" : `the last${steps.length ? ` (${steps[0]})` : ""}`],
    ["middle", "the one that took the median of all seconds"],
    ...steps.map((step) => [String(step), String(step)]),
  ]);
}

/** The chosen step of a run; of a run that has not come so far or does not hold it, the one before. */
function chosenStep(run) {
  const choice = byId("step-choice").value;
  if (choice === "middle") return run.middle;
  if (choice === "last" || choice === "") return run.phases.at(-1);
  return run.phases.findLast((one) => one.step <= Number(choice)) || run.phases[0];
}

/** Where each phase stands on the x axis: evenly, or as wide as its seconds. */
function places(names, phases, toScale) {
  let begin = 0;
  return names.map((name) => {
    const width = toScale ? phases[name].seconds || 0 : 1;
    begin += width;
    return { name, centre: begin - width / 2, width: toScale ? width : 0.72, span: width };
  });
}

/** The x axis of phases; to scale, names go only where there is room for them. */
function phaseAxis(spots, toScale) {
  if (toScale) {
    const whole = spots.reduce((sum, spot) => sum + spot.span, 0);
    const named = spots.filter((spot) => spot.span > whole / 14);
    return {
      title: { text: "seconds of the step, phase by phase" },
      tickvals: named.map((s) => s.centre),
      ticktext: named.map((s) => plain(s.name)),
      range: [0, whole],
      fixedrange: true,
    };
  }
  return {
    title: { text: "phase" },
    tickvals: spots.map((spot) => spot.centre),
    ticktext: spots.map((spot) => plain(spot.name)),
    range: [0, spots.length],
    fixedrange: true,
  };
}

/** Lines over the bars of the phases that have a prediction, and a point in the middle of each that tells more. */
function predicted(spots, plan, value, say, name) {
  const known = spots.filter((spot) => typeof value(plan?.phases?.[spot.name] || {}) === "number");
  if (!known.length) return [];
  const { ink, card } = theme();
  const of = (spot) => plan.phases[spot.name];
  const reach = (spot) => spot.width / 2 + (spot.width < spot.span ? 0.08 : 0);
  const line = {
    type: "scatter",
    mode: "lines",
    name,
    hoverinfo: "skip",
    connectgaps: false,
    x: known.flatMap((spot) => [spot.centre - reach(spot), spot.centre + reach(spot), null]),
    y: known.flatMap((spot) => [value(of(spot)), value(of(spot)), null]),
  };
  return [
    { ...line, showlegend: false, line: { color: card, width: 6 } },
    { ...line, line: { color: ink, width: 2.5, dash: "5px,2px" } },
    {
      type: "scatter",
      mode: "markers",
      name,
      showlegend: false,
      marker: { color: ink, size: 7, symbol: "diamond" },
      x: known.map((spot) => spot.centre),
      y: known.map((spot) => value(of(spot))),
      text: known.map((spot) => say(spot.name, of(spot))),
      hovertemplate: "%{text}<extra></extra>",
    },
  ];
}

function saidMemory(phase, of) {
  const parts = Object.entries(of.device_gib || {}).filter(([, gib]) => gib > 0);
  return [
    `<b>${plain(phase)}, predicted ${figure(of.peak_gib)} GiB</b>`,
    ...parts.map(([name, gib]) => `${plain(name)} ${figure(gib)} GiB`),
  ].join("<br>");
}

function memoryTraces(spots, phases, plan) {
  const holdings = inOrder(
    spots.flatMap((spot) => Object.keys(phases[spot.name].device)),
    HOLDING_ORDER,
  );
  const gib = (spot, holding) => Math.max(0, phases[spot.name].device[holding] || 0);
  const there = holdings.filter((holding) => spots.some((spot) => gib(spot, holding) > 0));
  const bars = there.map((holding) => ({
    type: "bar",
    name: plain(holding),
    marker: {
      color: HOLDING_COLOURS[holding] || "#888888",
      line: { width: 0.5, color: theme().card },
      pattern: {
        shape: HOLDING_PATTERNS[holding] || "",
        fgcolor: "rgba(0,0,0,0.45)",
        fillmode: "overlay",
        size: 7,
        solidity: 0.22,
      },
    },
    x: spots.map((spot) => spot.centre),
    width: spots.map((spot) => spot.width),
    y: spots.map((spot) => gib(spot, holding)),
    text: spots.map(
      (spot) =>
        `<b>${plain(spot.name)}</b><br>${plain(holding)} ${figure(gib(spot, holding))} GiB<br>` +
        `of ${figure(phases[spot.name].peak)} GiB at its peak`,
    ),
    textposition: "none",
    hovertemplate: "%{text}<extra></extra>",
  }));
  return [...bars, ...predicted(spots, plan, (of) => of.peak_gib, saidMemory, "predicted peak")];
}

function secondsTraces(spots, phases, plan) {
  const exposed = (spot) => Math.min(phases[spot.name].exposed || 0, phases[spot.name].seconds || 0);
  const bar = (name, value, marker) => ({
    type: "bar",
    name,
    marker,
    showlegend: name === WAITING,
    x: spots.map((spot) => spot.centre),
    width: spots.map((spot) => spot.width),
    y: spots.map(value),
    text: spots.map(
      (spot) =>
        `<b>${plain(spot.name)}</b> ${figure(phases[spot.name].seconds)} s<br>` +
        `compute waited ${figure(exposed(spot))} s of it for memory moves<br>` +
        `${figure(phases[spot.name].moved)} GiB moved`,
    ),
    textposition: "none",
    hovertemplate: "%{text}<extra></extra>",
  });
  const say = (phase, of) =>
    `<b>${plain(phase)}, predicted ${figure(of.seconds)} s</b><br>` +
    `compute waits ${figure(of.seconds_exposed)} s of it for memory moves`;
  return [
    bar("compute", (spot) => (phases[spot.name].seconds || 0) - exposed(spot), {
      color: spots.map((spot) => PHASE_COLOURS[spot.name] || "#888888"),
    }),
    bar(WAITING, exposed, {
      color: EXPOSED_COLOUR,
      pattern: { shape: "/", bgcolor: EXPOSED_COLOUR, fgcolor: "#ffffff", size: 6, solidity: 0.3 },
    }),
    ...predicted(spots, plan, (of) => of.seconds, say, "predicted seconds"),
  ];
}

/** Measured beside predicted: a heading, and a row for each phase. */
function phaseRows(phases, plan) {
  const foretold = (one) => (plan ? [one] : []);
  const heading = [
    "phase",
    "peak GiB",
    ...foretold("predicted peak GiB"),
    "seconds",
    ...foretold("predicted seconds"),
    "seconds waiting for memory moves",
    "GiB moved",
  ];
  const rows = inOrder(Object.keys(phases), PHASE_ORDER).map((name) => {
    const of = phases[name];
    const said = plan?.phases?.[name] || {};
    return [name, of.peak, ...foretold(said.peak_gib), of.seconds, ...foretold(said.seconds), of.exposed, of.moved];
  });
  return { heading, rows };
}

function comparedTable(phases, plan) {
  const { heading, rows } = phaseRows(phases, plan);
  return make(
    "div",
    { className: "scroll" },
    tableOf(
      heading,
      rows.map(([name, ...values]) => [name, ...values.map((value) => figure(value))]),
    ),
  );
}

/** The chosen step of every run, with all columns that any of them has. */
function phasesAsRows() {
  const plan = shown.runs.find((run) => run.plan)?.plan;
  const rows = shown.runs.flatMap((run) => {
    const { step, phases } = chosenStep(run) || { step: null, phases: {} };
    return phaseRows(phases, plan && (run.plan || {})).rows.map((row) => [run.name, step, ...row]);
  });
  return [["run", "step", ...phaseRows({}, plan).heading], ...rows];
}

/** The frames of the charts, made once, as redrawing keeps them: of several runs, all their memory side by side and
 * then their seconds. */
function frameSteps() {
  const frame = (kind) => (_, number) =>
    make(
      "figure",
      {},
      make("figcaption", { id: `${kind}-${number}-caption` }),
      make("div", { className: "chart", id: `${kind}-${number}` }),
    );
  const [memory, seconds] = ["memory", "seconds"].map((kind) => shown.runs.map(frame(kind)));
  const grids = several() ? [memory, seconds] : [[...memory, ...seconds]];
  byId("steps").replaceChildren(
    ...grids.map((figures) => make("div", { className: "charts" }, ...figures)),
    make(
      "details",
      { className: "compared" },
      make("summary", { textContent: "The same as a table: memory, seconds and moves of each phase" }),
      ...shown.runs.map((run, number) => make("div", { id: `figures-${number}` })),
    ),
  );
}

function drawSteps() {
  const chosen = shown.runs.map((run) => chosenStep(run) || { step: null, phases: {} });
  const top = (value, plan) =>
    1.1 *
    Math.max(
      0,
      ...chosen
        .flatMap((step, number) => [
          ...Object.values(step.phases).map(value),
          ...Object.keys(step.phases).map((name) => plan(shown.runs[number].plan?.phases?.[name] || {})),
        ])
        .map((v) => v || 0),
    );
  const highest = top(
    (of) => of.peak,
    (of) => of.peak_gib,
  ); // the same scale for all runs
  const longest = top(
    (of) => of.seconds,
    (of) => of.seconds,
  );
  shown.runs.forEach((run, number) => {
    const { step, phases } = chosen[number];
    const names = inOrder(Object.keys(phases), PHASE_ORDER);
    const toScale = byId("to-scale").checked;
    const wide = places(names, phases, toScale);
    const even = places(names, phases, false);
    const at = `${several() ? `${run.name}, ` : ""}${step === null ? "no step yet" : `step ${step}`}`;
    byId(`memory-${number}-caption`).textContent = `Memory at each phase's peak, by what holds it; ${at}`;
    byId(`seconds-${number}-caption`).textContent = `Seconds of each phase; ${at}`;
    const bars = { barmode: "stack", dragmode: false, showlegend: true };
    draw(byId(`memory-${number}`), memoryTraces(wide, phases, run.plan), {
      ...bars,
      ...budgetLine(run.plan, highest),
      xaxis: phaseAxis(wide, toScale),
      yaxis: { title: { text: "GiB" }, range: [0, highest || 1], fixedrange: true },
    });
    draw(byId(`seconds-${number}`), secondsTraces(even, phases, run.plan), {
      ...bars,
      xaxis: phaseAxis(even, false),
      yaxis: { title: { text: "seconds" }, range: [0, longest || 1], fixedrange: true },
    });
    byId(`figures-${number}`).replaceChildren(
      ...(several() ? [make("h3", { textContent: at })] : []),
      comparedTable(phases, run.plan),
    );
  });
}

/** The budget, where it is near enough to be on the chart. */
function budgetLine(plan, highest) {
  const budget = plan?.budget_gib;
  if (typeof budget !== "number" || budget > highest) return {};
  const line = {
    type: "line",
    xref: "paper",
    x0: 0,
    x1: 1,
    y0: budget,
    y1: budget,
    line: { color: EXPOSED_COLOUR, width: 1.5, dash: "dot" },
  };
  return {
    shapes: [line],
    annotations: [
      {
        xref: "paper",
        x: 1,
        y: budget,
        text: `budget ${figure(budget)} GiB`,
        showarrow: false,
        xanchor: "right",
        yanchor: "bottom",
        bgcolor: theme().card,
        borderpad: 1,
      },
    ],
  };
}

function drawPlans() {
  const planned = shown.runs.map((run, number) => ({ run, number })).filter(({ run }) => run.plan);
  byId("plan-section").hidden = !planned.length;
  byId("plans").replaceChildren(
    ...planned.map(({ run, number }) => {
      const { words, fits, budget_gib: budget, step_seconds: seconds } = run.plan;
      const machine = run.plan.machine || {};
      const facts = [
        machine.name,
        typeof machine.device_gib === "number" ? `${figure(machine.device_gib, 1)} GiB on the device` : null,
        typeof budget === "number" ? `a budget of ${figure(budget, 1)} GiB` : null,
        typeof seconds === "number" ? `${figure(seconds, 2)} s a step predicted` : null,
        machine.rates ? `rates: ${machine.rates}` : null,
      ]
        .filter(Boolean)
        .join(" · ");
      return make(
        "div",
        { className: "plan" },
        ...(several() ? [make("h3", {}, swatch(number), run.name)] : []),
        make("p", { className: "quiet", textContent: facts }),
        ...(fits === false ? [make("p", { className: "bad", textContent: "The plan does not fit the budget." })] : []),
        make("ul", {}, ...(Array.isArray(words) ? words : []).map((text) => make("li", { textContent: text }))),
      );
    }),
  );
}

byId("step-choice").addEventListener("change", drawSteps);
byId("to-scale").addEventListener("change", drawSteps);
byId("phases-csv").addEventListener("click", () => download("phases", phasesAsRows()));
