// One column: a model, the text it writes, token by token, and the marks that send tokens back to it.

import { cancelJob, stream } from "./api.js";
import { Story } from "./story.js";

const WHY_NOT = "No marking here: this model writes from left to right, and cannot fill in the middle.";
const MASK_WIDTH = 4; // characters, while nobody knows what will stand there

export class Column {
  /** `changed()` is called when a column starts, stops or is marked; `chosen(column)` when it has another model; `rewrite(column)` by its button. */
  constructor(index, models, { changed, chosen, rewrite }) {
    this.root = document.getElementById("column").content.firstElementChild.cloneNode(true);
    this.root.dataset.testid = `column-${index}`;
    this.models = models;
    this.changed = changed;
    this.story = null;
    this.at = 0;
    this.choice = null; // the finished text, as the server gave it
    this.marked = new Set();
    this.rewrites = 0;
    this.spans = [];
    this.entries = []; // what each span shows now
    this.fresh = [];

    this.select = this.part("model");
    this.select.id = `model-${index}`;
    this.root.querySelector("label").htmlFor = this.select.id;
    for (const model of models) this.select.append(new Option(describe(model), model.id));
    this.select.selectedIndex = Math.min(index, models.length - 1);
    this.select.addEventListener("change", () => {
      this.clear();
      chosen(this);
      changed();
    });

    this.text = this.part("text");
    this.text.setAttribute("aria-label", `Text ${index + 1}`);
    this.text.addEventListener("click", (event) => this.onClick(event));
    this.text.addEventListener("mousedown", (event) => {
      if (event.shiftKey && this.editable) event.preventDefault(); // marks a range, selects no text
    });
    this.text.addEventListener("keydown", (event) => this.onKey(event));
    this.part("rewrite").addEventListener("click", () => rewrite(this));
    this.part("unmark").addEventListener("click", () => this.unmark());
    this.clear();
  }

  part(name) {
    return this.root.querySelector(`[data-testid="${name}"]`);
  }

  get model() {
    return this.models.find((model) => model.id === this.select.value);
  }

  get busy() {
    return this.controller !== undefined;
  }

  /** Back to an empty page, which shows what is to come. */
  clear() {
    this.cancel();
    this.story = null;
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
    this.marked.clear();
    this.spans = [];
    this.entries = [];
    this.fresh = [];
    this.text.replaceChildren();
  }

  // Writing

  /** Streams one text. The old one stays until the new one begins. Resolves to whether it was finished. */
  async run(path, body, expected) {
    this.cancel();
    const controller = new AbortController();
    this.controller = controller;
    let begun = false;
    this.setState("waiting", "waiting");
    this.refresh();
    this.changed();
    try {
      for await (const { event, data } of stream(path, body, controller.signal)) {
        if (event === "start") {
          this.job = data.id;
          this.setState("waiting", data.position > 0 ? `waiting, ${data.position} before it` : "waiting");
        } else if (event === "frame") {
          if (!begun) this.begin(new Story(expected));
          begun = true;
          this.story.add(data, data.texts[0]);
          this.showStats({ evaluations: data.evaluations[0], seconds: data.seconds });
          if (data.step === 0) this.show(0);
        } else if (event === "done") {
          if (!begun) this.begin(new Story(expected));
          this.finish(data);
        }
      }
      if (!this.choice) throw new Error("The connection ended before the text was finished.");
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
        this.changed();
      }
    }
  }

  begin(story) {
    this.story = story;
    this.choice = null;
    this.reset();
    this.setState("running", "writing …");
    this.refresh();
    this.changed();
  }

  finish({ choices, usage }) {
    this.choice = choices[0];
    this.story.finish(this.choice.pieces);
    this.entries = []; // the scale of colours may have changed with the number of steps
    this.show(this.at);
    this.showStats({ evaluations: this.choice.evaluations, seconds: usage.seconds, entropy: this.choice.entropy });
  }

  cancel() {
    if (!this.busy) return;
    this.controller.abort();
    if (this.job) cancelJob(this.job);
  }

  // Showing

  show(at) {
    const step = Math.floor(at);
    const over = this.choice && step >= this.story.last;
    this.at = at;
    for (const span of this.fresh) span.classList.remove("fresh");
    this.fresh = [];
    for (let i = 0; i < this.story.length; i++) {
      const entry = this.story.entry(i, step);
      const span = (this.spans[i] ??= this.newSpan(i));
      if (entry !== this.entries[i]) this.dress(span, i, entry);
      this.entries[i] = entry;
      if (!over && entry?.since === step && step > 0 && entry.piece !== null) {
        span.classList.add("fresh");
        this.fresh.push(span);
      }
    }
    for (const span of this.spans.splice(this.story.length)) span.remove();
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
    span.hidden = entry === undefined;
    if (!entry) return;
    const { piece, probability, since, given } = entry;
    const masked = piece === null;
    span.textContent = piece ?? "";
    span.dataset.step = since;
    span.classList.toggle("mask", masked);
    span.classList.toggle("given", given);
    span.classList.toggle("noise", !masked && !given && since === 0);
    span.classList.toggle("unknown", !masked && since > 0 && probability === null);
    span.style.setProperty("--when", this.story.when(entry).toFixed(3));
    span.style.setProperty("--sure", (probability ?? 0).toFixed(3));
    span.style.setProperty("--chars", masked ? Math.max(1, this.story.future(position, entry)?.length ?? MASK_WIDTH) : 0);
    span.title = explain(entry, this.story.total);
  }

  showStats({ evaluations, seconds, entropy } = {}) {
    this.part("nfe").textContent = number(evaluations, 0);
    this.part("seconds").textContent = number(seconds, 2);
    this.part("entropy").textContent = entropy == null ? "–" : `${number(entropy, 2)} nats`;
  }

  setState(state, words) {
    this.root.dataset.state = state;
    this.part("state").textContent = words;
  }

  // Marking

  /** Tokens can be marked once the text is finished and its end is shown. */
  get editable() {
    return Boolean(this.choice) && !this.busy && this.model.process !== "none" && this.at >= this.story.last;
  }

  refresh() {
    const why = this.model.process === "none" ? WHY_NOT : null;
    const editable = this.editable;
    const rewrite = this.part("rewrite");
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
      span.classList.toggle("marked", this.marked.has(i));
      if (editable) {
        span.tabIndex = span === stop ? 0 : -1;
        span.setAttribute("role", "option");
        span.setAttribute("aria-selected", this.marked.has(i));
      } else {
        for (const name of ["tabindex", "role", "aria-selected"]) span.removeAttribute(name);
      }
    });
    const count = this.marked.size;
    rewrite.disabled = !editable || count === 0;
    rewrite.title = why ?? (count ? "" : "Mark tokens first, by clicking them or by Enter");
    rewrite.textContent = count ? `Rewrite the marked tokens (${count})` : "Rewrite the marked tokens";
    this.part("unmark").hidden = !editable || count === 0;
    this.part("hint").classList.toggle("whole", Boolean(why));
    this.part("hint").textContent = why ?? (editable && count === 0 ? "Click words you do not like." : "");
  }

  mark(position, on) {
    if (on) this.marked.add(position);
    else this.marked.delete(position);
  }

  unmark() {
    this.marked.clear();
    this.refresh();
    this.spans.find((span) => span.tabIndex === 0)?.focus();
  }

  onClick(event) {
    const span = event.target.closest(".token");
    if (!span || !this.editable) return;
    const position = Number(span.dataset.position);
    const on = !this.marked.has(position);
    // With Shift, everything from the last clicked token to this one.
    const from = event.shiftKey && this.anchor < this.spans.length ? this.anchor : position;
    for (let i = Math.min(from, position); i <= Math.max(from, position); i++) this.mark(i, from === position ? on : true);
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
      this.mark(position, !this.marked.has(position));
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

function describe({ id, process, parameters }) {
  const size = parameters >= 1e6 ? `${Math.round(parameters / 1e6)}M` : `${Math.round(parameters / 1e3)}k`;
  return `${id} · ${process === "none" ? "left to right" : process} · ${size}`;
}

function explain({ piece, since, given, probability }, total) {
  if (piece === null) return "still hidden";
  if (given) return "given";
  if (since === 0) return "noise, to be replaced";
  return `step ${since} of ${total}` + (probability === null ? "" : ` · probability ${probability.toFixed(3)}`);
}

function number(value, digits) {
  return value == null ? "–" : value.toFixed(digits);
}
