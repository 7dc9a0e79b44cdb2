// Draws everything, and while the page is served, asks for new data and draws it again.
"use strict";

const EVERY_MS = 2000;

/** What there is to choose from. */
function fillAll() {
  fillSteps();
  fillRunFilter();
}

function drawAll() {
  drawRuns();
  markRuns();
  fillMetrics();
  drawCurves();
  drawSteps();
  drawPlans();
  drawSettings();
  colourTokens();
  takeSamples();
}

let tag = "";

/** The data if it is other than the page's; null if it is not. */
async function asked() {
  const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
  if (answer.status === 304) return null;
  if (!answer.ok) throw new Error(`it answers ${answer.status}`);
  const data = await answer.json();
  tag = answer.headers.get("ETag") || "";
  return data;
}

async function refresh() {
  let data = null;
  try {
    data = await asked();
    byId("state").textContent = `live, read at ${new Date().toLocaleTimeString()}`;
  } catch (problem) {
    byId("state").textContent =
      `not live, as the server cannot be read (${problem.message}): this is what was read last`;
  }
  setTimeout(refresh, EVERY_MS);
  if (data) {
    shown = data;
    fillAll();
    drawAll();
  }
}

frameRuns();
frameSteps();
fillAll();
readView();
drawAll();
document.addEventListener("input", (event) => {
  if (event.target.dataset.view) keepView();
});
addEventListener("hashchange", () => {
  readView();
  drawAll();
  afresh();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawCurves();
  drawSteps();
});
if (shown.served) refresh();
document.documentElement.dataset.drawn = "yes";
