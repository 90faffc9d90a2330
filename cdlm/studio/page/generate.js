// The tab "Generate": a prompt and settings in, samples out.

import { Column } from "./column.js";
import { announce, hideError, showError } from "./notices.js";
import { Player } from "./player.js";
import { enter, pair, SettingsForm } from "./settings.js";

const BLANK = /___|\[MASK(:\d+)?\]/;
const $ = (id) => document.getElementById(id);

/** `properties` describes the settings of the sampler. */
export async function startGenerate(models, limits, properties) {
  const callbacks = { onChange: refresh, onModelChange: updateSettings, onRegenerate: regenerate };
  const columns = [0, 1].map((index) => new Column(index, models, callbacks));
  const active = () => ($("two-columns").checked ? columns : columns.slice(0, 1));
  const player = new Player(active, { scrub: $("scrub"), play: $("play"), readout: $("scrub-value") });
  $("columns").append(...columns.map((column) => column.root));
  $("two-columns").checked = models.length > 1;
  $("length").max = limits.max_length;
  pair($("seed-slider"), $("seed"));
  let preparing = false; // between the click and the requests
  const form = new SettingsForm(properties, () => active().map((column) => column.model), limits, refresh);
  drawLegend();
  await form.update();

  $("settings").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  $("settings").addEventListener("input", refresh);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("settings").requestSubmit();
  });
  $("cancel").addEventListener("click", () => columns.forEach((column) => column.cancel()));
  $("dice").addEventListener("click", () => enter($("seed"), Math.floor(Math.random() * 1e6)));
  $("two-columns").addEventListener("change", () => {
    if (!$("two-columns").checked) columns[1].cancel();
    updateSettings();
  });
  $("colour-by").addEventListener("click", () => {
    const confidence = $("colour-by").getAttribute("aria-checked") !== "true";
    $("colour-by").setAttribute("aria-checked", confidence);
    drawLegend();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    if ($("panel-generate").hidden || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, summary, [role=tab], [role=option]")) return;
    player.nudge(event.key === "ArrowLeft" ? -1 : 1);
    event.preventDefault();
  });

  function updateSettings() {
    refresh();
    form.update();
  }

  async function generate() {
    const prompt = $("prompt").value;
    const infill = BLANK.test(prompt);
    const capable = active().filter((column) => !infill || column.model.process !== "none");
    hideError();
    if (capable.length === 0) {
      showError("An autoregressive model cannot fill blanks: choose another model, or leave out ___ and [MASK].");
      return;
    }
    for (const column of active()) if (!capable.includes(column)) column.clear();
    const chosen = $("length").value === "" ? null : Number($("length").value);
    const length = ({ model }) => chosen ?? Math.min(model.max_length || limits.max_length, limits.max_length);
    const blanks = { text: prompt, span_length: Number($("span-length").value) };
    const body = (column) => (infill ? blanks : { prompt, max_length: length(column) });
    await run(capable, infill ? "/v1/infill" : "/v1/completions", body, length);
  }

  async function regenerate(column) {
    hideError();
    const positions = [...column.selected].sort((a, b) => a - b);
    // Another seed each time, or the same selection would bring back the same tokens.
    const seed = (Number($("seed").value) + ++column.regenerations) % 2 ** 31;
    const body = { token_ids: column.choice.token_ids, masked_positions: positions, seed };
    await run([column], "/v1/infill", () => body, () => positions.length);
  }

  /** Generate in some columns at once, with a `body` for each; `expectedSteps` holds where the server does not know the
   * number of steps. */
  async function run(chosen, path, body, expectedSteps) {
    announce("Generating …");
    preparing = true;
    refresh();
    await form.running; // the settings may have changed a moment ago
    preparing = false;
    if (matchMedia("(max-width: 60rem)").matches) $("stage").scrollIntoView({ block: "start" });
    const runs = chosen.map((column) => {
      const { model } = column;
      const request = { model: model.id, seed: Number($("seed").value), ...form.given(model), ...body(column) };
      return column.run(path, request, expectedSteps(column), form.summary(model));
    });
    player.follow();
    const outcomes = await Promise.allSettled(runs);
    const failures = new Set(outcomes.filter(({ reason }) => reason).map(({ reason }) => reason.message));
    if (failures.size) showError([...failures].join("\n"));
    else announce(outcomes.every(({ value }) => value) ? "Finished." : "Cancelled.");
  }

  function refresh() {
    const chosen = active().map((column) => column.model);
    const busy = preparing || columns.some((column) => column.busy);
    const infill = BLANK.test($("prompt").value);
    columns[1].root.hidden = !$("two-columns").checked;
    $("columns").classList.toggle("two", $("two-columns").checked);
    $("generate").disabled = busy || form.responses.size === 0;
    $("cancel").disabled = !busy;
    $("legend-noise").hidden = !chosen.some((model) => model.process !== "none" && !model.absorbing);
    $("span-length-field").hidden = !infill;
    $("length-field").hidden = infill;
    $("prompt-hint").textContent = hint(infill, $("prompt").value);
    for (const column of active()) if (!column.timeline) column.setSummary(form.summary(column.model));
    player.refresh();
  }
}

function hint(infill, prompt) {
  if (infill) return "The blanks will be filled; the rest stays.";
  return prompt ? "The text will be continued." : "Empty: unconditional samples.";
}

function drawLegend() {
  const confidence = $("colour-by").getAttribute("aria-checked") === "true";
  $("stage").dataset.colour = confidence ? "confidence" : "step";
  $("legend-from").textContent = confidence ? "unlikely" : "first step";
  $("legend-to").textContent = confidence ? "certain" : "last step";
  $("legend-text").textContent = confidence
    ? "Colours show the probability of each token when it was drawn."
    : "Colours show the step in which each token was drawn.";
  $("legend-scale").replaceChildren(
    ...Array.from({ length: 12 }, (_, i) => {
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      for (const name of ["--when", "--sure"]) swatch.style.setProperty(name, i / 11);
      return swatch;
    }),
  );
}
