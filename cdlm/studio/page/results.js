// The tab "Results": what an evaluation measured, as two plots and a table.

import { get } from "./api.js";
import { draw, format, marker } from "./plots.js";

const $ = (id) => document.getElementById(id);
const hidden = new Set();

export async function startResults() {
  let sections = [];
  try {
    sections = (await get("/v1/results")).sections;
  } catch (error) {
    if (error.status !== 404) throw error;
  }
  $("results-none").hidden = sections.length > 0;
  $("results-some").hidden = sections.length === 0;
  if (sections.length === 0) return;

  sections.forEach(({ judge, protocol, length }, i) => {
    $("results-judge").append(new Option(`${judge} · ${protocol} · ${length} tokens`, i));
  });
  const series = [...new Set(sections.flatMap((section) => names(section.rows)))]; // one colour for each model, whatever the judge
  const section = () => sections[$("results-judge").value];
  const choose = () => {
    fillSteps(section().rows);
    show(section(), series);
  };
  $("results-judge").addEventListener("change", choose);
  $("results-steps").addEventListener("change", () => show(section(), series));
  drawLegend(series, () => show(section(), series));
  choose();
}

/** A row's series: its model, and its precision unless that is fp64. */
function seriesOf(row) {
  return row.precision && row.precision !== "fp64" ? `${row.model} (${row.precision})` : row.model;
}

function names(rows) {
  return [...new Set(rows.map(seriesOf))];
}

function drawLegend(series, changed) {
  $("results-legend").replaceChildren(
    ...series.map((name, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet";
      button.setAttribute("aria-pressed", "true");
      button.dataset.testid = `series-${name}`;
      button.append(marker(index), name);
      button.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        button.setAttribute("aria-pressed", !hidden.has(name));
        changed();
      });
      return button;
    }),
  );
}

/** Offers the steps of the rows; begins with those that have the most rows. */
function fillSteps(rows) {
  const counts = new Map();
  for (const { steps } of rows) if (steps !== null) counts.set(steps, (counts.get(steps) ?? 0) + 1);
  const most = Math.max(...counts.values());
  const options = [...counts.keys()].sort((a, b) => a - b);
  $("results-steps").replaceChildren(new Option("all", "all"), ...options.map((steps) => new Option(steps, steps)));
  $("results-steps").value = options.find((steps) => counts.get(steps) === most) ?? "all";
}

function show({ rows }, series) {
  const visible = rows.filter((row) => !hidden.has(seriesOf(row)));
  const steps = $("results-steps").value;
  draw($("frontier-plot"), {
    label: "Perplexity over entropy",
    x: { title: "entropy (nats)", log: false },
    y: { title: "perplexity", log: true },
    lines: lines(
      visible.filter((row) => row.entropy !== null && (steps === "all" || row.steps === null || row.steps === Number(steps))),
      series,
      (row) => `${seriesOf(row)} ${row.steps}`,
      (row) => row.entropy,
    ),
  });
  const plain = visible.filter((row) => row.control === "plain");
  draw($("steps-plot"), {
    label: "Perplexity over steps",
    x: { title: "steps", log: true, ticks: [...new Set(plain.map(stepsOf))].sort((a, b) => a - b) },
    y: { title: "perplexity", log: true },
    lines: lines(plain, series, seriesOf, stepsOf),
  });
  $("results-table").tBodies[0].replaceChildren(...visible.map(tableRow));
}

/** A model without steps, such as an autoregressive one, is drawn at its NFE. */
function stepsOf(row) {
  return row.steps ?? row.nfe;
}

function lines(rows, series, key, x) {
  const groups = new Map();
  for (const row of rows) groups.set(key(row), [...(groups.get(key(row)) ?? []), row]);
  return [...groups.values()].map((group) => ({
    series: series.indexOf(seriesOf(group[0])),
    points: group
      .map((row) => ({ x: x(row), y: row.ppl, low: row.ppl_interval[0], high: row.ppl_interval[1], words: words(row) }))
      .sort((a, b) => a.x - b.x),
  }));
}

function words(row) {
  const steps = row.steps === null ? `NFE ${format(row.nfe)}` : `${row.steps} steps`;
  const entropy = row.entropy?.toFixed(2) ?? "–";
  return [`${seriesOf(row)}, ${steps}, ${row.control}`, `perplexity ${format(row.ppl)}`, `entropy ${entropy} nats`];
}

function tableRow(row) {
  const [low, high] = row.ppl_interval;
  const interval = `${format(low)} – ${format(high)}`;
  const cells = [row.model, row.steps ?? "–", row.control, format(row.ppl), interval, row.entropy?.toFixed(2) ?? "–",
    format(row.nfe), row.precision ?? "–", row.num_samples ?? "–"];
  const line = document.createElement("tr");
  line.append(...cells.map((cell) => Object.assign(document.createElement("td"), { textContent: cell })));
  return line;
}
