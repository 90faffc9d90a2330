// The tab "Sudoku": grids fill in step by step, two samplers side by side, with a puzzle of one's own.

import { get, post } from "./api.js";
import { announce, hideError, showError } from "./notices.js";
import { Player } from "./player.js";
import { enter, setAttributes } from "./settings.js";

const MAIN = ["steps", "order", "step_size", "temperature"]; // always visible; all other settings on demand
const FIRST = [{ steps: "8", order: "random" }, { steps: "8", order: "grid", step_size: "equal" }]; // where the columns begin
const EMPTY = ".";
const $ = (id) => document.getElementById(id);

export async function startSudoku() {
  const [{ data: models }, limits, service] = await Promise.all(["/v1/sudoku/models", "/v1/limits", "/openapi.json"].map(get));
  const fields = Object.entries(service.components.schemas.SudokuRequest.properties);
  const properties = Object.fromEntries(fields.filter(([, field]) => "x-default" in field)); // the settings of the sampler
  const puzzle = new Puzzle($("sudoku-puzzle"));
  const columns = [0, 1].map((index) => new SudokuColumn(index, properties, () => player.refresh()));
  const active = () => ($("sudoku-two").checked ? columns : columns.slice(0, 1));
  const player = new Player(active, { scrub: $("sudoku-scrub"), play: $("sudoku-play"), readout: $("sudoku-value") });
  $("sudoku-columns").append(...columns.map((column) => column.root));
  for (const size of [...new Set(models.map((model) => model.size))].sort()) $("sudoku-size").append(new Option(`${size} × ${size}`, size));
  drawScale();

  function resize() {
    const size = Number($("sudoku-size").value);
    puzzle.resize(size);
    for (const column of columns) column.resize(size, models.filter((model) => model.size === size));
    player.refresh();
  }

  function refresh() {
    columns[1].root.hidden = !$("sudoku-two").checked;
    $("sudoku-columns").classList.toggle("two", $("sudoku-two").checked);
    player.refresh();
  }

  async function generate() {
    hideError();
    announce("Generating …");
    $("sudoku-generate").disabled = true;
    const common = { size: Number($("sudoku-size").value), seed: Number($("sudoku-seed").value), n: limits.max_samples };
    if (!puzzle.blank) common.puzzle = puzzle.text;
    const chosen = active();
    const outcomes = await Promise.allSettled(chosen.map((column) => column.run(common)));
    $("sudoku-generate").disabled = false;
    const failures = new Set(outcomes.filter(({ reason }) => reason).map(({ reason }) => reason.message));
    if (failures.size) {
      showError([...failures].join("\n"));
      return;
    }
    announce(chosen.map((column) => column.verdict()).join(" "));
    if (matchMedia("(max-width: 60rem)").matches) $("sudoku-play").closest(".stage").scrollIntoView({ block: "start" });
    player.follow();
  }

  $("sudoku-settings").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  $("sudoku-size").addEventListener("change", resize);
  $("sudoku-two").addEventListener("change", refresh);
  $("sudoku-clear").addEventListener("click", () => puzzle.fill(""));
  $("sudoku-dice").addEventListener("click", () => enter($("sudoku-seed"), Math.floor(Math.random() * 1e6)));
  resize();
  refresh();
  $("sudoku-generate").disabled = false;
  await generate();
}

/** Boxes are as square as possible, and at least as wide as high. */
function boxHeight(side) {
  return Math.max(...Array.from({ length: Math.floor(Math.sqrt(side)) }, (_, i) => i + 1).filter((height) => side % height === 0));
}

/** An empty table of side * side cells with the edges of the boxes; returns the cells. */
function drawBoard(table, side) {
  const height = boxHeight(side);
  const width = side / height;
  table.style.setProperty("--side", side);
  const rows = Array.from({ length: side }, (_, row) => {
    const line = document.createElement("tr");
    for (let column = 0; column < side; column++) {
      const cell = line.insertCell();
      cell.classList.toggle("left-edge", column > 0 && column % width === 0);
      cell.classList.toggle("top-edge", row > 0 && row % height === 0);
    }
    return line;
  });
  const body = document.createElement("tbody");
  body.append(...rows);
  table.replaceChildren(body);
  return [...table.querySelectorAll("td")];
}

/** The grid into which givens are typed. */
class Puzzle {
  constructor(table) {
    this.table = table;
    table.addEventListener("beforeinput", (event) => {
      if (event.data && event.inputType === "insertText") {
        event.preventDefault();
        this.type(this.inputs.indexOf(event.target), event.data);
      }
    });
    table.addEventListener("input", (event) => this.type(this.inputs.indexOf(event.target), event.target.value));
    table.addEventListener("keydown", (event) => this.onKey(event));
    table.addEventListener("paste", (event) => {
      event.preventDefault();
      this.paste(event.clipboardData.getData("text"));
    });
  }

  resize(side) {
    this.side = side;
    this.inputs = drawBoard(this.table, side).map((cell, i) => {
      const input = document.createElement("input");
      Object.assign(input, { type: "text", inputMode: "numeric", maxLength: 2, tabIndex: i === 0 ? 0 : -1 });
      input.setAttribute("aria-label", `Row ${Math.floor(i / side) + 1}, column ${(i % side) + 1}`);
      input.addEventListener("focus", () => this.focus(i));
      cell.append(input);
      return input;
    });
  }

  get text() {
    return this.inputs.map((input) => input.value || EMPTY).join("");
  }

  get blank() {
    return this.inputs.every((input) => input.value === "");
  }

  fill(text) {
    this.inputs.forEach((input, i) => (input.value = this.digit(text[i] ?? "")));
  }

  digit(symbol) {
    return symbol >= "1" && symbol <= String(this.side) ? symbol : "";
  }

  /** The last symbol that was typed; anything but a digit empties the cell. */
  type(index, text) {
    this.inputs[index].value = this.digit(text.slice(-1));
  }

  paste(text) {
    const symbols = [...text].filter((symbol) => !/[\s|/]/.test(symbol));
    if (symbols.length === this.inputs.length) this.fill(symbols);
    else showError(`A puzzle of this size has ${this.inputs.length} cells (${symbols.length} were pasted).`);
  }

  focus(index) {
    this.inputs.forEach((input, i) => (input.tabIndex = i === index ? 0 : -1));
  }

  onKey(event) {
    const index = this.inputs.indexOf(event.target);
    const column = index % this.side;
    const moves = {
      ArrowLeft: column > 0 ? -1 : 0,
      ArrowRight: column < this.side - 1 ? 1 : 0,
      ArrowUp: -this.side,
      ArrowDown: this.side,
    };
    if (index < 0 || !(event.key in moves)) return;
    const target = this.inputs[index + moves[event.key]];
    target?.focus();
    target?.select();
    event.preventDefault();
  }
}

/** One sampler: a model with its settings, and its grids. It has what `Player` needs. */
class SudokuColumn {
  constructor(index, properties, onChange) {
    this.root = $("sudoku-column").content.firstElementChild.cloneNode(true);
    this.root.dataset.testid = `sudoku-column-${index}`;
    this.index = index;
    this.onChange = onChange;
    this.busy = false;
    this.at = 0;
    this.menu = this.part("model");
    this.menu.id = `sudoku-model-${index}`;
    this.root.querySelector("label").htmlFor = this.menu.id;
    this.inputs = new Map(Object.entries(properties).map(([name, property]) => [name, this.control(name, property)]));
    for (const [name, value] of Object.entries(FIRST[index])) this.inputs.get(name).value = value;
    this.part("samples").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this.choose(Number(button.dataset.index));
    });
  }

  part(name) {
    return this.root.querySelector(`[data-testid="${name}"]`);
  }

  /** A select or a box for a setting; empty where it is not given. */
  control(name, property) {
    const type = property.anyOf.find((each) => each.type !== "null");
    const field = document.createElement("label");
    field.className = "field";
    field.title = property.description;
    const label = document.createElement("span");
    label.textContent = name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");
    const input = document.createElement(type.enum ? "select" : "input");
    input.id = `sudoku-${name.replaceAll("_", "-")}-${this.index}`;
    if (type.enum) input.append(new Option("the model’s", ""), ...type.enum.map((value) => new Option(value, value)));
    else setAttributes(input, type);
    input.placeholder = "the model’s";
    input.dataset.kind = type.type;
    field.append(label, input);
    this.part(MAIN.includes(name) ? "controls" : "more").append(field);
    return input;
  }

  /** The settings that are given. */
  given() {
    const filled = [...this.inputs].filter(([, input]) => input.value !== "");
    return Object.fromEntries(filled.map(([name, input]) => [name, input.type === "number" ? Number(input.value) : input.value]));
  }

  resize(side, models) {
    this.side = side;
    this.menu.replaceChildren(...models.map(({ model }) => new Option(model === "exact" ? "exact denoiser" : model, model)));
    this.response = this.timeline = null;
    this.cells = drawBoard(this.part("board"), side);
    for (const cell of this.cells) cell.classList.add("masked");
    for (const name of ["summary", "verdict"]) this.part(name).textContent = "";
    this.part("samples").replaceChildren();
  }

  async run(common) {
    this.busy = true;
    this.root.setAttribute("aria-busy", "true");
    try {
      this.response = await post("/v1/sudoku", { ...common, model: this.menu.value, ...this.given() });
    } finally {
      this.busy = false;
      this.root.removeAttribute("aria-busy");
    }
    if (this.response.size !== this.side) return; // another size was chosen meanwhile
    this.part("summary").textContent = this.response.summary;
    this.part("samples").replaceChildren(
      ...this.response.grids.map(({ index, valid }) => {
        const button = document.createElement("button");
        button.type = "button";
        button.dataset.index = index;
        button.textContent = `${index + 1} ${valid ? "✓" : "✗"}`;
        button.setAttribute("aria-label", `Sample ${index + 1}, ${valid ? "valid" : "not valid"}`);
        return button;
      }),
    );
    this.choose(0);
    this.show(0);
  }

  /** Show another sample, at its end. */
  choose(index) {
    this.grid = this.response.grids[index];
    this.timeline = { last: this.grid.states.length - 1, total: this.grid.states.length - 1 };
    for (const button of this.part("samples").children) button.setAttribute("aria-pressed", Number(button.dataset.index) === index);
    this.show(this.timeline.last);
    this.onChange();
  }

  show(at) {
    const step = Math.floor(at);
    const { states, conflicts } = this.grid;
    const { puzzle } = this.response;
    this.at = at;
    this.cells.forEach((cell, i) => {
      const symbol = states[step][i];
      const since = lastChange(states, step, i);
      const given = puzzle !== null && puzzle[i] !== EMPTY;
      const masked = symbol === EMPTY;
      const conflict = conflicts[step].includes(i);
      cell.textContent = masked ? "" : symbol;
      const classes = { masked, given, conflict, drawn: !masked && since > 0, noise: !masked && !given && since === 0, fresh: since === step && step > 0 && step < this.timeline.last };
      for (const [name, on] of Object.entries(classes)) cell.classList.toggle(name, on);
      cell.style.setProperty("--when", this.timeline.last > 1 ? ((since - 1) / (this.timeline.last - 1)).toFixed(3) : 0);
      cell.title = masked ? "masked" : `${given ? "given" : since ? `step ${since} of ${this.timeline.last}` : "noise"}${conflict ? " · in conflict" : ""}`;
    });
    this.part("verdict").textContent = this.verdict();
  }

  verdict() {
    const { grids, valid, distinct } = this.response;
    const step = Math.floor(this.at);
    const wrong = this.grid.conflicts[step].length;
    const now = wrong ? `${wrong} cells in conflict` : step < this.timeline.last ? "no conflict yet" : "a valid grid";
    return `Sample ${this.grid.index + 1}: ${now}. Valid ${valid} of ${grids.length}, distinct ${distinct}, NFE ${this.grid.nfe}.`;
  }
}

/** The step, up to a given one, that gave a cell its value; 0 if it had that from the start. */
function lastChange(states, step, cell) {
  while (step > 0 && states[step][cell] === states[step - 1][cell]) step--;
  return step;
}

function drawScale() {
  const swatches = Array.from({ length: 12 }, (_, i) => {
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.setProperty("--when", i / 11);
    return swatch;
  });
  $("sudoku-scale").replaceChildren(...swatches);
}
