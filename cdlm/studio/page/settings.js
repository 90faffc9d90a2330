// The settings of the sampler: controls are built from the description of the service. Which values go together, and what
// holds where none is given, is the response of /v1/settings.

import { post } from "./api.js";

const MAIN = ["temperature", "top_p", "guidance", "order"]; // always visible, as are the steps; all others on demand
const SLIDERS = { temperature: [0.05, 2, 0.05], top_p: [0.05, 1, 0.05] }; // [minimum, maximum, step]
const CAPABILITIES = { absorbing: "a masked model", has_mask: "a model with a mask token" };
const $ = (id) => document.getElementById(id);

export class SettingsForm {
  /** `properties` describes the settings, `models()` are those in use; `updated()` is called after a response. */
  constructor(properties, models, limits, updated) {
    this.models = models;
    this.updated = updated;
    this.changed = new Map(); // the settings that the user has changed, by name
    this.responses = new Map(); // the responses of /v1/settings, by model
    this.controls = new Map();
    $("steps").max = Math.floor(Math.log2(limits.max_steps));
    const names = Object.keys(properties).filter((name) => name !== "model");
    const sorted = [...MAIN.filter((name) => names.includes(name)), ...names.filter((name) => !MAIN.includes(name))];
    for (const name of sorted) this.add(name, properties[name]);
    $("reset").addEventListener("click", () => this.reset());
  }

  add(name, property) {
    const control = name === "steps" ? stepsControl() : buildControl(name, property, MAIN.includes(name));
    control.property = property;
    control.resetButton.addEventListener("click", () => this.reset([name]));
    control.input.addEventListener("input", () => {
      const value = control.read();
      if (value === null) this.changed.delete(name);
      else this.changed.set(name, value);
      this.update();
    });
    control.input.addEventListener("blur", () => this.show()); // what was not written while it had the focus
    this.controls.set(name, control);
  }

  /** Back to the settings of the models. */
  reset(names = [...this.changed.keys()]) {
    for (const name of names) this.changed.delete(name);
    this.update();
  }

  /** Ask the server what the settings amount to, and again if they change meanwhile. */
  update() {
    this.outdated = true;
    this.running ??= this.ask().finally(() => (this.running = undefined));
    return this.running;
  }

  async ask() {
    while (this.outdated) {
      this.outdated = false;
      const models = [...new Set(this.models())];
      const responses = await Promise.all(models.map((model) => this.resolve(model)));
      this.responses = new Map(responses.map((response, i) => [models[i].id, response]));
    }
    this.show();
    this.updated();
  }

  async resolve(model) {
    try {
      return await post("/v1/settings", { model: model.id, ...Object.fromEntries(this.changed) });
    } catch (error) {
      return { error: error.message };
    }
  }

  /** The settings that a request to this model has to give: those that were changed, as far as they apply. */
  given(model) {
    const ignored = this.responses.get(model.id)?.ignored ?? [];
    return Object.fromEntries([...this.changed].filter(([name]) => !ignored.includes(name)));
  }

  summary(model) {
    return this.responses.get(model.id)?.summary ?? "";
  }

  show() {
    const all = [...this.responses.values()];
    const valid = all.filter((response) => !response.error);
    $("settings-error").textContent = [...new Set(all.map(({ error }) => error).filter(Boolean))].join("\n");
    $("reset").hidden = this.changed.size === 0;
    for (const [name, control] of this.controls) {
      const changed = this.changed.has(name);
      control.field.classList.toggle("changed", changed);
      control.resetButton.hidden = !changed;
      if (valid.length === 0) continue; // nothing is known: leave the controls as they are
      const available = valid.some((response) => response.available.includes(name));
      control.setAvailable(available);
      control.field.title = available ? control.property.description : this.reason(control.property);
      for (const option of control.input.options ?? []) {
        option.disabled = !valid.some(({ choices }) => choices[name].includes(option.value));
      }
      const response = valid.find(({ sources }) => name in sources);
      // A choice that nobody has made is shown as its default, "auto" rather than what that amounts to.
      const unmade = !response || (control.input.options && response.sources[name] === "default");
      if (!changed) control.write(unmade ? control.property["x-default"] ?? null : response.settings[name]);
    }
  }

  /** Why a setting cannot be changed. */
  reason({ "x-requires": capability }) {
    const lacking = capability && !this.models().some((model) => model[capability]);
    return lacking ? `Requires ${CAPABILITIES[capability] ?? capability}` : "Has no effect with the other settings";
  }
}

/** A slider over the powers of two. */
function stepsControl() {
  const input = $("steps");
  const showValue = (steps) => {
    $("steps-value").textContent = steps ?? "–";
    input.setAttribute("aria-valuetext", steps === null ? "no steps" : `${steps} steps`);
  };
  input.addEventListener("input", () => showValue(2 ** Number(input.value)));
  return {
    input,
    field: input.closest(".field"),
    resetButton: input.closest(".field").querySelector(".reset"),
    read: () => 2 ** Number(input.value),
    write(steps) {
      if (steps !== null) input.value = Math.round(Math.log2(steps));
      showValue(steps);
    },
    setAvailable: (available) => (input.disabled = !available),
  };
}

/** A select for a choice, a box for a number or a text; some numbers have a slider as well. */
function buildControl(name, property, main) {
  const id = name.replaceAll("_", "-");
  const type = property.anyOf?.find((each) => each.type !== "null") ?? property;
  const label = name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");
  const field = $("setting").content.firstElementChild.cloneNode(true);
  const resetButton = field.querySelector(".reset");
  field.querySelector("label").textContent = label;
  field.querySelector("label").htmlFor = id;
  field.querySelector("label").id = `${id}-name`;
  resetButton.setAttribute("aria-label", `Reset ${label}`);
  const input = document.createElement(type.enum ? "select" : "input");
  input.id = id;
  if (type.enum) input.append(...type.enum.map((value) => new Option(value, value)));
  else setAttributes(input, type);
  field.append(input);
  let slider = null;
  if (name in SLIDERS) {
    slider = document.createElement("input");
    slider.setAttribute("aria-labelledby", `${id}-name`);
    slider.id = `${id}-slider`;
    slider.type = "range";
    [slider.min, slider.max, slider.step] = SLIDERS[name];
    field.classList.add("slid");
    field.append(slider);
    pair(slider, input);
  }
  $(main ? "main-settings" : "more-settings").append(field);
  return {
    input,
    field,
    resetButton,
    read: () => (input.value === "" ? null : input.type === "number" ? Number(input.value) : input.value),
    write(value) {
      if (document.activeElement === input) return; // something may be typed into it
      input.value = value ?? "";
      if (slider && value !== null) slider.value = value;
    },
    setAvailable(available) {
      field.hidden = !available && !main;
      input.disabled = !available;
      if (slider) slider.disabled = !available;
    },
  };
}

export function setAttributes(input, { type, minimum, exclusiveMinimum, maximum }) {
  input.type = type === "string" ? "text" : "number";
  if (type === "string") return;
  input.step = type === "integer" ? 1 : "any";
  input.min = minimum ?? exclusiveMinimum ?? "";
  input.max = maximum ?? "";
  input.placeholder = "off";
}

/** A slider and a box for one number: the slider has the usual range, the box any. Arrows move both by its step. */
export function pair(slider, box) {
  slider.addEventListener("input", (event) => {
    event.stopPropagation();
    enter(box, slider.value);
  });
  box.addEventListener("input", () => {
    if (box.value !== "") slider.value = box.value;
  });
  box.addEventListener("keydown", (event) => {
    const direction = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!direction) return;
    const next = Number((Number(box.value) + direction * slider.step).toFixed(4));
    const limited = Math.max(box.min, next);
    enter(box, box.max === "" ? limited : Math.min(box.max, limited));
    event.preventDefault();
  });
}

/** Set the value of an input as if it had been typed. */
export function enter(input, value) {
  input.value = value;
  input.dispatchEvent(new Event("input", { bubbles: true }));
}
