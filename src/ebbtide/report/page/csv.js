// What is shown, as a file of comma-separated values.
"use strict";

const FORMULA = /^\s*[=+\-@|]/;
const NUMBER = /^[+-]?\d+(\.\d+)?$/;

/** A cell by RFC 4180. A text that a spreadsheet would read as a formula gets an apostrophe before it: models write
 * what they like. */
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const said = typeof value === "string" ? value : JSON.stringify(value);
  const text = FORMULA.test(said) && !NUMBER.test(said) ? `'${said}` : said;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function asCsv(rows) {
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function download(what, rows) {
  const run = shown.runs
    .map((one) => one.name)
    .join("-")
    .replace(/[^\w.-]+/g, "_")
    .slice(0, 60);
  const file = URL.createObjectURL(new Blob([asCsv(rows)], { type: "text/csv;charset=utf-8" }));
  make("a", { href: file, download: `${run}-${what}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(file), 10_000);
}

function tableOf(heading, rows) {
  return make(
    "table",
    {},
    make("thead", {}, make("tr", {}, ...heading.map((text) => make("th", { scope: "col", textContent: text })))),
    make(
      "tbody",
      {},
      ...rows.map((cells) => make("tr", {}, ...cells.map((text) => make("td", { textContent: text })))),
    ),
  );
}
