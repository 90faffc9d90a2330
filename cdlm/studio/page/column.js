// One column: a model, its sample token by token, and the selection of tokens to generate again.

import { cancelJob, stream } from "./api.js";
import { Timeline } from "./timeline.js";

const AUTOREGRESSIVE = "An autoregressive model cannot regenerate tokens within a text.";
const MASK_WIDTH = 4; // characters, while it is not known what will stand there

export class Column {
  /** `onChange()` is called when a column starts or stops, `onModelChange()` for another model, `onRegenerate(column)` by its button. */
  constructor(index, models, { onChange, onModelChange, onRegenerate }) {
    this.root = document.getElementById("column").content.firstElementChild.cloneNode(true);
    this.root.dataset.testid = `column-${index}`;
    this.models = models;
    this.onChange = onChange;
    this.timeline = null;
    this.at = 0;
    this.choice = null; // the finished sample, as the server gave it
    this.selected = new Set();
    this.regenerations = 0;
    this.spans = [];
    this.entries = []; // what each span shows now
    this.fresh = [];

    this.menu = this.part("model");
    this.menu.id = `model-${index}`;
    this.root.querySelector("label").htmlFor = this.menu.id;
    for (const model of models) this.menu.append(new Option(modelLabel(model), model.id));
    this.menu.selectedIndex = Math.min(index, models.length - 1);
    this.menu.addEventListener("change", () => {
      this.clear();
      onModelChange();
    });

    this.text = this.part("text");
    this.text.setAttribute("aria-label", `Sample ${index + 1}`);
    this.text.addEventListener("click", (event) => this.onClick(event));
    this.text.addEventListener("mousedown", (event) => {
      if (event.shiftKey && this.editable) event.preventDefault(); // selects a range of tokens, no text
    });
    this.text.addEventListener("keydown", (event) => this.onKey(event));
    this.part("regenerate").addEventListener("click", () => onRegenerate(this));
    this.part("unselect").addEventListener("click", () => this.unselect());
    this.clear();
  }

  part(name) {
    return this.root.querySelector(`[data-testid="${name}"]`);
  }

  get model() {
    return this.models.find((model) => model.id === this.menu.value);
  }

  get busy() {
    return this.controller !== undefined;
  }

  /** Back to an empty page. */
  clear() {
    this.cancel();
    this.timeline = null;
    this.choice = null;
    this.reset();
    const blanks = Array.from({ length: 48 }, (_, i) => {
      const blank = document.createElement("span");
      blank.className = "ghost";
      blank.style.setProperty("--chars", 2 + ((i * 7) % 6));
      return blank;
    });
    this.text.replaceChildren(...blanks);
    this.setState("idle", "");
    this.showStats();
    this.refresh();
  }

  reset() {
    this.at = 0;
    this.selected.clear();
    this.spans = [];
    this.entries = [];
    this.fresh = [];
    this.text.replaceChildren();
  }

  // Generating

  /** Streams one sample. The old one stays until the new one begins. Resolves to whether it was finished. */
  async run(path, body, expectedSteps, summary) {
    this.cancel();
    const controller = new AbortController();
    this.controller = controller;
    let begun = false;
    this.setState("waiting", "waiting");
    this.refresh();
    this.onChange();
    try {
      let finished = null;
      for await (const { id, queue_position: ahead, choices, usage } of stream(path, body, controller.signal)) {
        this.job = id;
        if (ahead !== undefined) this.setState("waiting", ahead > 0 ? `waiting, ${ahead} ahead` : "waiting");
        const [choice] = choices; // a column has one sample
        if (choice?.draft) {
          const { draft } = choice;
          if (!begun) this.begin(new Timeline(expectedSteps), summary);
          begun = true;
          this.timeline.add(draft);
          this.showStats(draft);
          if (draft.step === 0) this.show(0);
        } else if (choice) {
          finished = choice;
        } else if (usage) {
          this.finish(finished, usage);
        }
      }
      if (!this.choice) throw new Error("The connection ended before the sample was finished.");
      this.setState("done", "");
      return true;
    } catch (error) {
      if (controller.signal.aborted) {
        if (this.controller === controller) this.setState("cancelled", "cancelled");
        return false;
      }
      this.setState("failed", "failed");
      throw error;
    } finally {
      if (this.controller === controller) {
        this.controller = this.job = undefined;
        this.refresh();
        this.onChange();
      }
    }
  }

  begin(timeline, summary) {
    this.timeline = timeline;
    this.setSummary(summary);
    this.choice = null;
    this.reset();
    this.setState("running", "generating …");
    this.refresh();
    this.onChange();
  }

  finish(choice, usage) {
    this.choice = choice;
    this.timeline.finish(this.choice.pieces);
    this.entries = []; // the scale of colours may have changed with the number of steps
    this.show(this.at);
    this.showStats({ nfe: this.choice.nfe, seconds: usage.seconds, entropy: this.choice.entropy });
  }

  cancel() {
    if (!this.busy) return;
    this.controller.abort();
    if (this.job) cancelJob(this.job);
  }

  // Showing

  show(at) {
    const step = Math.floor(at);
    const finished = this.choice && step >= this.timeline.last;
    this.at = at;
    for (const span of this.fresh) span.classList.remove("fresh");
    this.fresh = [];
    for (let i = 0; i < this.timeline.length; i++) {
      const entry = this.timeline.entry(i, step);
      const span = (this.spans[i] ??= this.newSpan(i));
      if (entry !== this.entries[i]) this.dress(span, i, entry);
      this.entries[i] = entry;
      if (!finished && entry?.since === step && step > 0 && entry.piece !== null) {
        span.classList.add("fresh");
        this.fresh.push(span);
      }
    }
    for (const span of this.spans.splice(this.timeline.length)) span.remove();
    const editable = this.editable;
    if (this.text.classList.contains("editable") !== editable) this.refresh();
  }

  newSpan(position) {
    const span = document.createElement("span");
    span.className = "token";
    span.hidden = true; // until there is something to show
    span.dataset.position = position;
    this.text.append(span);
    return span;
  }

  dress(span, position, entry) {
    span.hidden = !entry || (entry.given && entry.piece === ""); // BOS and EOS padding are not part of the text
    if (!entry) return;
    const { piece, probability, since, given } = entry;
    const masked = piece === null;
    span.textContent = piece ?? "";
    span.dataset.step = since;
    span.classList.toggle("mask", masked);
    span.classList.toggle("given", given);
    span.classList.toggle("noise", !masked && !given && since === 0);
    span.classList.toggle("unknown", !masked && since > 0 && probability === null);
    span.style.setProperty("--when", this.timeline.when(entry).toFixed(3));
    span.style.setProperty("--sure", (probability ?? 0).toFixed(3));
    span.style.setProperty("--chars", masked ? Math.max(1, this.timeline.future(position, entry)?.length ?? MASK_WIDTH) : 0);
    span.title = tooltip(entry, this.timeline.total);
  }

  showStats({ nfe, seconds, entropy } = {}) {
    this.part("nfe").textContent = number(nfe, 0);
    this.part("seconds").textContent = number(seconds, 2);
    this.part("entropy").textContent = entropy == null ? "–" : `${number(entropy, 2)} nats`;
  }

  setState(state, label) {
    this.root.dataset.state = state;
    this.part("state").textContent = label;
  }

  /** The settings of the sample, or of the next one while there is none. */
  setSummary(summary) {
    this.part("summary").textContent = summary;
  }

  // Selecting

  /** Tokens can be selected once the sample is finished and its end is shown. */
  get editable() {
    return Boolean(this.choice) && !this.busy && this.model.process !== "none" && this.at >= this.timeline.last;
  }

  refresh() {
    const obstacle = this.model.process === "none" ? AUTOREGRESSIVE : null;
    const editable = this.editable;
    const regenerate = this.part("regenerate");
    this.text.classList.toggle("editable", editable);
    this.text.setAttribute("aria-busy", this.busy);
    this.text.setAttribute("role", editable ? "listbox" : "group");
    if (editable) {
      this.text.setAttribute("aria-multiselectable", "true");
      this.text.setAttribute("aria-orientation", "horizontal");
    } else {
      this.text.removeAttribute("aria-multiselectable");
      this.text.removeAttribute("aria-orientation");
    }
    const stop = this.spans.find((span) => span.tabIndex === 0) ?? this.spans[0];
    this.spans.forEach((span, i) => {
      span.classList.toggle("selected", this.selected.has(i));
      if (editable) {
        span.tabIndex = span === stop ? 0 : -1;
        span.setAttribute("role", "option");
        span.setAttribute("aria-selected", this.selected.has(i));
      } else {
        for (const name of ["tabindex", "role", "aria-selected"]) span.removeAttribute(name);
      }
    });
    const count = this.selected.size;
    regenerate.disabled = !editable || count === 0;
    regenerate.title = obstacle ?? (count ? "" : "Select tokens first, by clicking them or by Enter");
    regenerate.textContent = count ? `Regenerate selected tokens (${count})` : "Regenerate selected tokens";
    this.part("unselect").hidden = !editable || count === 0;
    this.part("hint").classList.toggle("whole", Boolean(obstacle));
    this.part("hint").textContent = obstacle ?? (editable && count === 0 ? "Click tokens to select them." : "");
  }

  select(position, on) {
    if (on) this.selected.add(position);
    else this.selected.delete(position);
  }

  unselect() {
    this.selected.clear();
    this.refresh();
    this.spans.find((span) => span.tabIndex === 0)?.focus();
  }

  onClick(event) {
    const span = event.target.closest(".token");
    if (!span || !this.editable) return;
    const position = Number(span.dataset.position);
    const on = !this.selected.has(position);
    // With Shift, everything from the last clicked token to this one.
    const from = event.shiftKey && this.anchor < this.spans.length ? this.anchor : position;
    for (let i = Math.min(from, position); i <= Math.max(from, position); i++) this.select(i, from === position ? on : true);
    this.anchor = position;
    this.focus(span);
    this.refresh();
  }

  onKey(event) {
    const span = event.target.closest(".token");
    if (!span || !this.editable) return;
    const position = Number(span.dataset.position);
    const goals = {
      ArrowLeft: () => this.spans[position - 1],
      ArrowRight: () => this.spans[position + 1],
      ArrowUp: () => this.neighbour(span, -1),
      ArrowDown: () => this.neighbour(span, 1),
      Home: () => this.spans[0],
      End: () => this.spans.at(-1),
    };
    if (event.key === "Enter" || event.key === " ") {
      this.select(position, !this.selected.has(position));
      this.anchor = position;
      this.refresh();
    } else if (event.key in goals) {
      const goal = goals[event.key]();
      if (goal) this.focus(goal);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  focus(span) {
    for (const other of this.spans) if (other.tabIndex === 0) other.tabIndex = -1;
    span.tabIndex = 0;
    span.focus();
  }

  /** The nearest token on the line above (-1) or below (1). */
  neighbour(span, direction) {
    const here = span.getBoundingClientRect();
    let best = null;
    let least = Infinity;
    for (const other of this.spans) {
      const box = other.getBoundingClientRect();
      const down = (box.top - here.top) * direction;
      const distance = down * 1000 + Math.abs(box.left - here.left);
      if (down > 4 && distance < least) [best, least] = [other, distance];
    }
    return best;
  }
}

function modelLabel({ id, process, num_parameters: parameters }) {
  const size = parameters >= 1e6 ? `${Math.round(parameters / 1e6)}M` : `${Math.round(parameters / 1e3)}k`;
  return `${id} · ${process === "none" ? "autoregressive" : process} · ${size}`;
}

function tooltip({ piece, since, given, probability }, total) {
  if (piece === null) return "masked";
  if (given) return "given";
  if (since === 0) return "noise";
  return `step ${since} of ${total}` + (probability === null ? "" : ` · probability ${probability.toFixed(3)}`);
}

function number(value, digits) {
  return value == null ? "–" : value.toFixed(digits);
}
