// A scatter plot with lines, drawn as SVG: axes, series with their own colour and shape, a tip for the point nearest to the pointer.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 12, right: 16, bottom: 44, left: 70 };
const REACH = 28; // pixels from the pointer within which a point is found
const SHAPES = [
  "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
  "M-4-4h8v8h-8z",
  "M0-5.5l5 9h-10z",
  "M0-5.8l5.8 5.8l-5.8 5.8l-5.8-5.8z",
  "M0 5.5l5-9h-10z",
  "M-1.7-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
];

function make(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** A small drawing of a series' marker, for the legend. */
export function marker(index) {
  const svg = make("svg", { viewBox: "-8 -8 16 16", width: 16, height: 16, "aria-hidden": "true" });
  svg.append(make("path", { d: SHAPES[index % SHAPES.length], class: `mark series-${index % 8}` }));
  return svg;
}

/**
 * Draws into `holder`, and again whenever its width changes.
 * plot: {label, x: {title, log, ticks?}, y: {title, log}, lines: [{series, points: [{x, y, low?, high?, words: [..]}]}]}
 */
export function draw(holder, plot) {
  holder.observer?.disconnect();
  holder.observer = new ResizeObserver(() => paint(holder, plot));
  holder.observer.observe(holder);
}

function paint(holder, { label, x, y, lines }) {
  const width = holder.clientWidth;
  if (width === 0) return;
  const height = Math.round(Math.min(420, Math.max(280, width * 0.7)));
  const points = lines.flatMap((line) => line.points.map((point) => ({ ...point, series: line.series })));
  if (points.length === 0) {
    const empty = document.createElement("p");
    empty.className = "hint";
    empty.textContent = "Nothing to show: every model is hidden, or no row fits.";
    holder.replaceChildren(empty);
    return;
  }
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;

  const toX = scale(points.map((p) => p.x), x, MARGIN.left, width - MARGIN.right);
  const toY = scale(points.flatMap((p) => [p.y, p.low ?? p.y, p.high ?? p.y]), y, height - MARGIN.bottom, MARGIN.top);
  svg.append(axes(toX, toY, x, y, width, height));

  for (const line of lines) {
    const style = `series-${line.series % 8}`;
    const path = line.points.map((p) => `${toX(p.x).toFixed(1)} ${toY(p.y).toFixed(1)}`).join("L");
    if (line.points.length > 1) svg.append(make("path", { d: `M${path}`, class: `line ${style}` }));
    for (const p of line.points) {
      if (p.low == null || p.high == null) continue;
      svg.append(make("line", { x1: toX(p.x), x2: toX(p.x), y1: toY(p.low), y2: toY(p.high), class: `whisker ${style}` }));
    }
  }
  points.sort((a, b) => a.x - b.x || a.y - b.y);
  const marks = points.map((point, i) => {
    const mark = make("path", {
      d: SHAPES[point.series % SHAPES.length],
      transform: `translate(${toX(point.x).toFixed(1)} ${toY(point.y).toFixed(1)})`,
      class: `mark series-${point.series % 8}`,
      tabindex: i === 0 ? 0 : -1,
      role: "img",
      "aria-label": point.words.join(", "),
    });
    mark.addEventListener("focus", () => show(i));
    mark.addEventListener("blur", hide);
    return mark;
  });
  svg.append(...marks);
  holder.replaceChildren(svg, tip);

  let current = -1;
  function show(i) {
    hide();
    current = i;
    marks[i].classList.add("on");
    tip.replaceChildren(...points[i].words.map((words) => Object.assign(document.createElement("div"), { textContent: words })));
    tip.hidden = false;
    const left = toX(points[i].x);
    const top = toY(points[i].y);
    tip.style.left = `${Math.min(Math.max(0, left - tip.offsetWidth / 2), width - tip.offsetWidth)}px`;
    tip.style.top = `${top > tip.offsetHeight + 14 ? top - tip.offsetHeight - 12 : top + 14}px`;
  }
  function hide() {
    marks[current]?.classList.remove("on");
    current = -1;
    tip.hidden = true;
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const distance = (p) => Math.hypot(toX(p.x) - (event.clientX - box.left), toY(p.y) - (event.clientY - box.top));
    const nearest = points.reduce((best, p, i) => (distance(p) < distance(points[best]) ? i : best), 0);
    if (distance(points[nearest]) > REACH) hide();
    else if (nearest !== current) show(nearest);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("keydown", (event) => {
    const here = marks.indexOf(document.activeElement);
    const goal = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: marks.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (here < 0 || !marks[goal]) return;
    marks[here].setAttribute("tabindex", -1);
    marks[goal].setAttribute("tabindex", 0);
    marks[goal].focus();
    event.preventDefault();
  });
}

function scale(values, { log }, from, to) {
  const turn = log ? Math.log10 : (v) => v;
  let low = turn(Math.min(...values));
  let high = turn(Math.max(...values));
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  low -= room;
  high += room;
  const place = (value) => from + ((turn(value) - low) / (high - low)) * (to - from);
  const back = log ? (v) => 10 ** v : (v) => v;
  place.range = [back(low), back(high)];
  return place;
}

function axes(toX, toY, x, y, width, height) {
  const group = make("g", { class: "axes", "aria-hidden": "true" });
  const bottom = height - MARGIN.bottom;
  const count = Math.max(3, Math.floor((width - MARGIN.left) / 48));
  for (const value of x.ticks ? spread(x.ticks, count) : ticks(toX.range, x.log, count)) {
    group.append(make("line", { x1: toX(value), x2: toX(value), y1: MARGIN.top, y2: bottom }));
    group.append(make("text", { x: toX(value), y: bottom + 17, "text-anchor": "middle" }, format(value)));
  }
  for (const value of ticks(toY.range, y.log, 6)) {
    group.append(make("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: toY(value), y2: toY(value) }));
    group.append(make("text", { x: MARGIN.left - 8, y: toY(value) + 4, "text-anchor": "end" }, format(value)));
  }
  const middle = (MARGIN.top + bottom) / 2;
  const across = (MARGIN.left + width - MARGIN.right) / 2;
  group.append(make("text", { x: across, y: height - 6, "text-anchor": "middle", class: "title" }, x.title));
  group.append(make("text", { transform: `translate(11 ${middle}) rotate(-90)`, "text-anchor": "middle", class: "title" }, y.title));
  return group;
}

/** Round numbers inside a range, about `count` of them. */
function ticks([low, high], log, count) {
  if (log) {
    const all = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k++) for (const m of [1, 2, 5]) all.push(m * 10 ** k);
    const inside = all.filter((value) => value >= low && value <= high);
    const powers = inside.filter((value) => Number.isInteger(Math.log10(value)));
    if (inside.length > count && powers.length > 2) return powers;
    if (inside.length > 2) return inside;
  }
  const rough = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 2.5, 5, 10].find((m) => m * unit >= rough);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(10)));
}

function spread(values, count) {
  const every = Math.ceil(values.length / count);
  return values.filter((_, i) => i % every === 0);
}

export function format(value) {
  if (value == null) return "–";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}
