// What the runs were: every setting of config.yaml and every version, side by side; of several runs at first only where
// they differ.
"use strict";

const VERSION_NAMES = { ebbtide: "Ebbtide", commit: "Ebbtide's commit", python: "Python", cuda: "CUDA" };

/** [kind, name, value of each run]; null where a run has none. */
function settingRows() {
  const named = (of) => [...new Set(shown.runs.flatMap(of))];
  const versions = named((run) => run.starts.flatMap((start) => Object.keys(start.versions)));
  const settings = named((run) => Object.keys(run.config));
  return [
    ...versions.map((name) => [
      "version",
      VERSION_NAMES[name] || name,
      shown.runs.map((run) => versionOf(run, name) || null),
    ]),
    ...settings.map((name) => ["config", name, shown.runs.map((run) => run.config[name] ?? null)]),
  ];
}

let listed = ""; // what the table was made of

const differs = (values) => values.some((value) => value !== values[0]);

function wantedSettings() {
  const text = control("setting").value.trim().toLowerCase();
  const only = several() && control("differing").checked;
  return settingRows().filter(
    ([, name, values]) =>
      (!only || differs(values)) &&
      (!text ||
        [name, ...values].some((value) =>
          String(value ?? "")
            .toLowerCase()
            .includes(text),
        )),
  );
}

function drawSettings() {
  byId("differing").hidden = !several();
  const all = settingRows();
  const rows = wantedSettings();
  if (JSON.stringify([all.length, rows]) === listed) return; // a live page leaves a reader's place in it
  listed = JSON.stringify([all.length, rows]);
  const same = all.filter(([, , values]) => !differs(values)).length;
  byId("settings-said").textContent = !all.length
    ? "There is neither a config.yaml nor a versions.jsonl."
    : several()
      ? `${all.length - same} of ${all.length} differ between the runs; ${rows.length} are listed.`
      : `${rows.length} of ${all.length} are listed.`;
  const heading = ["of", "setting", ...shown.runs.map((run) => (several() ? run.name : "value"))];
  const table = tableOf(
    heading,
    rows.map(([kind, name, values]) => [kind, name, ...values.map((value) => value ?? "not there")]),
  );
  [...table.tBodies[0].rows].forEach((row, place) => {
    const values = rows[place][2];
    [...row.cells].slice(2).forEach((one, number) => one.classList.toggle("other", values[number] !== values[0]));
  });
  byId("settings").replaceChildren(...(rows.length ? [table] : []));
}

byId("settings-csv").addEventListener("click", () =>
  download("settings", [
    ["of", "setting", ...shown.runs.map((run) => run.name)],
    ...wantedSettings().map(([kind, name, values]) => [kind, name, ...values]),
  ]),
);
["setting", "differing"].forEach((name) => control(name).addEventListener("input", drawSettings));
