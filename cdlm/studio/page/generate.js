// The tab "Write": settings in, texts out.

import { Column } from "./column.js";
import { Player } from "./player.js";
import { hideError, say, showError } from "./notices.js";

const BLANK = /___|\[MASK(:\d+)?\]/;
const CERTAIN = ["probability", "margin", "entropy-bound"]; // orders that leave nothing for a tail
const $ = (id) => document.getElementById(id);

/** `asks` describes what a request may say, setting by setting. */
export function startWrite(models, limits, asks) {
  const columns = [0, 1].map((index) => new Column(index, models, { changed: refresh, chosen: follow, rewrite }));
  const active = () => ($("two-columns").checked ? columns : columns.slice(0, 1));
  const player = new Player(active, { scrub: $("scrub"), play: $("play"), readout: $("scrub-value") });
  $("columns").append(...columns.map((column) => column.root));
  $("two-columns").checked = models.length > 1;
  $("steps").max = Math.floor(Math.log2(limits.steps));
  $("length").max = limits.length;
  for (const name of ["order", "tail"]) {
    const { enum: words, default: usual } = asks[name];
    $(name).replaceChildren(...words.map((word) => new Option(word, word, word === usual, word === usual)));
  }
  for (const name of ["temperature", "top-p", "seed"]) pair($(`${name}-slider`), $(name));
  const own = () => columns[0].model.sampling;
  let adopted = adopt(nearest(own(), own()[0]?.steps ?? 2 ** Number($("steps").value), asks));
  drawLegend();
  refresh();

  $("settings").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  $("settings").addEventListener("input", refresh);
  $("steps").addEventListener("input", () => follow(columns[0]));
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("settings").requestSubmit();
  });
  $("cancel").addEventListener("click", () => columns.forEach((column) => column.cancel()));
  $("dice").addEventListener("click", () => enter($("seed"), Math.floor(Math.random() * 1e6)));
  $("two-columns").addEventListener("change", () => {
    if (!$("two-columns").checked) columns[1].cancel();
    refresh();
  });
  $("colour-by").addEventListener("click", () => {
    const confidence = $("colour-by").getAttribute("aria-checked") !== "true";
    $("colour-by").setAttribute("aria-checked", confidence);
    drawLegend();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    if ($("panel-write").hidden || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, summary, [role=tab], [role=option]")) return;
    player.nudge(event.key === "ArrowLeft" ? -1 : 1);
    event.preventDefault();
  });

  /** Few steps want other settings than many, and so does another model: they follow, unless somebody has changed them. */
  function follow(column) {
    if (column === columns[0] && untouched(adopted)) adopted = adopt(nearest(own(), 2 ** Number($("steps").value), asks));
  }

  /** What the controls say, as far as it means something to this model. */
  function settings(model) {
    return {
      model: model.id,
      n: 1,
      steps: counted(model) ? 2 ** Number($("steps").value) : null,
      temperature: Number($("temperature").value),
      top_p: Number($("top-p").value),
      guidance: model.has_mask ? Number($("guidance").value) : 0,
      seed: Number($("seed").value),
      order: order(model),
      tail: tailed(model) ? $("tail").value : "none",
    };
  }

  async function generate() {
    const prompt = $("prompt").value;
    const infill = BLANK.test(prompt);
    const able = active().filter((column) => !infill || column.model.process !== "none");
    hideError();
    if (able.length === 0) {
      showError("A model that writes from left to right cannot fill in blanks: choose another, or leave out ___ and [MASK].");
      return;
    }
    for (const column of active()) if (!able.includes(column)) column.clear();
    await write(able, (column) => {
      const { model } = column;
      const length = $("length").value === "" ? null : Number($("length").value);
      const body = infill ? { text: prompt, width: Number($("width").value) } : { prompt, max_tokens: length };
      const path = infill ? "/v1/infill" : "/v1/completions";
      return column.run(path, { ...settings(model), ...body }, length ?? (model.length || limits.length));
    });
  }

  async function rewrite(column) {
    hideError();
    const masked = [...column.marked].sort((a, b) => a - b);
    // Another seed each time, or the same marks would bring back the same words.
    const seed = (Number($("seed").value) + ++column.rewrites) % 2 ** 31;
    const body = { ...settings(column.model), tokens: column.choice.tokens, masked, seed };
    await write([column], () => column.run("/v1/infill", body, masked.length));
  }

  async function write(chosen, run) {
    say("Writing …");
    if (matchMedia("(max-width: 60rem)").matches) $("stage").scrollIntoView({ block: "start" });
    const runs = chosen.map(run);
    player.follow();
    const ends = await Promise.allSettled(runs);
    const failures = new Set(ends.filter(({ reason }) => reason).map(({ reason }) => reason.message));
    if (failures.size) showError([...failures].join("\n"));
    else say(ends.every(({ value }) => value) ? "The text is finished." : "Cancelled.");
  }

  function refresh() {
    const chosen = active().map((column) => column.model);
    const busy = columns.some((column) => column.busy);
    const infill = BLANK.test($("prompt").value);
    const steps = 2 ** Number($("steps").value);
    columns[1].root.hidden = !$("two-columns").checked;
    $("columns").classList.toggle("two", $("two-columns").checked);
    $("generate").disabled = busy;
    $("cancel").disabled = !busy;
    $("steps-value").textContent = steps;
    $("steps").setAttribute("aria-valuetext", `${steps} steps`);
    $("order").disabled = !chosen.some((model) => model.absorbing);
    $("guidance").disabled = !chosen.some((model) => model.has_mask);
    $("guidance").title = $("guidance").disabled ? "Guidance requires a model with a mask token" : "Lean on the context: 0.5 or 1";
    $("tail").disabled = !chosen.some(tailed);
    $("order").title = $("order").disabled ? "Only masked models can choose their order" : asks.order.description;
    $("tail").title = asks.tail.description;
    $("legend-noise").hidden = !chosen.some((model) => model.process !== "none" && !model.absorbing);
    $("width-field").hidden = !infill;
    $("width").disabled = !infill;
    $("length-field").hidden = infill;
    $("length").disabled = infill;
    $("prompt-hint").textContent = hint(infill, $("prompt").value);
    player.refresh();
  }
}

function order({ absorbing }) {
  return absorbing ? $("order").value : "random";
}

/** Whether the number of steps is ours to choose. */
function counted(model) {
  return model.process !== "none" && order(model) !== "first-hitting";
}

function tailed(model) {
  return counted(model) && !CERTAIN.includes(order(model));
}

function hint(infill, prompt) {
  if (infill) return "The blanks will be filled in, the rest stays.";
  return prompt ? "The text will be continued." : "Empty: the model writes whatever it likes.";
}

/** A slider and a box for one number: the slider has the usual ones, the box any. Arrows move both by the slider's step. */
function pair(slider, box) {
  slider.addEventListener("input", () => (box.value = slider.value));
  box.addEventListener("input", () => {
    if (box.value !== "") slider.value = box.value;
  });
  box.addEventListener("keydown", (event) => {
    const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!way) return;
    const next = Number((Number(box.value) + way * slider.step).toFixed(4));
    enter(box, Math.min(box.max, Math.max(box.min, next)));
    event.preventDefault();
  });
}

/** Of the settings that a model writes best with, those for the nearest number of steps; what they leave out is as usual. */
function nearest(own, steps, asks) {
  const far = (one) => Math.abs(Math.log(one.steps / steps));
  const best = own.reduce((best, one) => (far(one) < far(best) ? one : best), own[0] ?? {});
  const shown = own.flatMap(Object.keys).filter((name) => $(box(name))); // the page has no control for some
  return { ...Object.fromEntries(shown.map((name) => [name, best[name] ?? asks[name].default])), steps };
}

/** Set the controls as a model writes best. */
function adopt(own) {
  const { steps, ...others } = own;
  if (steps) $("steps").value = Math.round(Math.log2(steps));
  for (const [name, value] of Object.entries(others)) enter($(box(name)), value);
  return own;
}

/** Whether the controls still say what was adopted, whatever the steps. */
function untouched({ steps, ...others }) {
  return Object.entries(others).every(([name, value]) => $(box(name)).value === String(value));
}

function box(setting) {
  return setting.replace("_", "-");
}

/** As if it had been typed. */
function enter(box, value) {
  box.value = value;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

function drawLegend() {
  const confidence = $("colour-by").getAttribute("aria-checked") === "true";
  $("stage").dataset.colour = confidence ? "confidence" : "when";
  $("legend-from").textContent = confidence ? "unsure" : "first step";
  $("legend-to").textContent = confidence ? "sure" : "last step";
  $("legend-text").textContent = confidence
    ? "Colours show how probable the model found each token when it drew it."
    : "Colours show in which step each token was revealed.";
  $("legend-scale").replaceChildren(
    ...Array.from({ length: 12 }, (_, i) => {
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      for (const name of ["--when", "--sure"]) swatch.style.setProperty(name, i / 11);
      return swatch;
    }),
  );
}
