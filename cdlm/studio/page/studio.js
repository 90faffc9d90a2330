// The page as a whole: tabs, theme, and what the first tab needs from the server.

import { get } from "./api.js";
import { startGenerate } from "./generate.js";
import { startMoons } from "./moons.js";
import { showError } from "./notices.js";
import { startResults } from "./results.js";
import { startSudoku } from "./sudoku.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
const starts = { "tab-results": startResults, "tab-sudoku": startSudoku, "tab-moons": startMoons }; // called when a tab is first opened

function open(tab) {
  for (const other of tabs) {
    const selected = other === tab;
    other.setAttribute("aria-selected", selected);
    other.tabIndex = selected ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = !selected;
  }
  const start = starts[tab.id];
  delete starts[tab.id];
  if (start) start().catch((error) => { starts[tab.id] = start; showError(error.message); });
}

for (const tab of tabs) tab.addEventListener("click", () => open(tab));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const current = tabs.indexOf(event.target);
  const targets = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: -1 };
  if (current < 0 || !(event.key in targets)) return;
  const target = tabs.at(targets[event.key] % tabs.length);
  open(target);
  target.focus();
  event.preventDefault();
});

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("theme", root.dataset.theme);
  } catch {
    // Storage may be forbidden: then the choice lasts as long as the page.
  }
});

try {
  const [models, limits, service] = await Promise.all(["/v1/models", "/v1/limits", "/openapi.json"].map(get));
  if (models.data.length === 0) throw new Error("The server has no models.");
  await startGenerate(models.data, limits, service.components.schemas.SettingsRequest.properties);
} catch (error) {
  showError(error.message);
}
