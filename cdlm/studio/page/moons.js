// The tab "Two moons": the smallest "language", texts of two tokens, x and y, moving from noise to data.

import { get } from "./api.js";
import { hideError, showError } from "./notices.js";

const POINTS = 600;
const NEAR = 1; // bins from a data point within which a point counts as on the moons
const PROCESS = {
  masked: "Masked: a coordinate is unknown, then known for good. Points of which one coordinate is known wait on its axis.",
  uniform: "Uniform: every point starts at a random place, and either coordinate may be redrawn on the way.",
};
const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");

export async function startMoons() {
  const answers = new Map(); // what the server said, by process and steps
  let moons = null;
  let at = 0; // the frame shown; between two frames while it moves
  let playing = false;
  let asked = 0;

  async function load() {
    const path = `/v1/moons?process=${$("moons-process").value}&steps=${$("moons-steps").value}&points=${POINTS}&seed=0`;
    const mine = ++asked;
    $("moons-process-text").textContent = PROCESS[$("moons-process").value];
    if (!answers.has(path)) {
      $("moons-value").textContent = "drawing …";
      const answer = await get(path);
      answers.set(path, { ...answer, near: neighbourhood(answer) });
    }
    if (mine !== asked) return; // something else was chosen meanwhile
    moons = answers.get(path);
    $("moons-scrub").max = moons.frames.length - 1;
    $("moons-scrub").disabled = $("moons-play").disabled = false;
    at = still.matches ? moons.frames.length - 1 : 0;
    if (still.matches) show();
    else play();
  }

  function play() {
    const last = moons.frames.length - 1;
    if (at >= last) at = 0;
    const seconds = Math.min(6, 1.2 * last + 0.4);
    if (!playing) {
      playing = true;
      let before = performance.now();
      const tick = (now) => {
        if (!playing) return;
        at = Math.min(moons.frames.length - 1, at + (Math.max(0, now - before) / 1000 / seconds) * last);
        before = now;
        playing = at < moons.frames.length - 1;
        show();
        if (playing) requestAnimationFrame(tick);
      };
      requestAnimationFrame(tick);
    }
    show();
  }

  function pause() {
    playing = false;
    at = Math.round(at);
    show();
  }

  function show() {
    if (!moons) return;
    const last = moons.frames.length - 1;
    const step = Math.floor(at);
    paint(moons, at);
    $("moons-scrub").value = step;
    $("moons-value").textContent = `step ${step} of ${last}`;
    $("moons-scrub").setAttribute("aria-valuetext", $("moons-value").textContent);
    $("moons-play").classList.toggle("playing", playing);
    $("moons-play").setAttribute("aria-label", playing ? "Pause" : "Play");
    const whole = moons.frames[step].filter(([x, y]) => x !== null && y !== null);
    const on = whole.filter(([x, y]) => moons.near.has(x * moons.bins + y)).length;
    const share = Math.round((100 * on) / whole.length);
    $("moons-share").textContent = whole.length ? `${share} % of the complete points lie on the moons` : "No point is complete yet";
  }

  const reload = () => {
    playing = false;
    hideError();
    load().catch((error) => {
      $("moons-value").textContent = "";
      showError(error.message);
    });
  };
  $("moons-process").addEventListener("change", reload);
  $("moons-steps").addEventListener("change", reload);
  $("moons-play").addEventListener("click", () => (playing ? pause() : play()));
  $("moons-scrub").addEventListener("input", () => {
    playing = false;
    at = Number($("moons-scrub").value);
    show();
  });
  new ResizeObserver(show).observe($("moons-canvas"));
  new MutationObserver(show).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  reload();
}

/** The bins near a data point. */
function neighbourhood({ data, bins }) {
  const near = new Set();
  for (const [x, y] of data) for (let i = -NEAR; i <= NEAR; i++) for (let j = -NEAR; j <= NEAR; j++) near.add((x + i) * bins + y + j);
  return near;
}

function paint({ data, frames, bins }, at) {
  const canvas = $("moons-canvas");
  const size = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  canvas.width = canvas.height = Math.round(size * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);

  const edge = 14; // room for the axes on which half-known points wait
  const unit = (size - 2 * edge) / bins;
  const place = (x, y) => [edge + (x + 0.5) * unit, size - edge - (y + 0.5) * unit];
  const radius = Math.max(1.3, unit * 0.32);

  pen.fillStyle = getComputedStyle($("moons-data")).backgroundColor;
  pen.globalAlpha = 0.28;
  data.forEach(([x, y], i) => dot(pen, ...place(x + jitter(2 * i), y + jitter(2 * i + 1)), radius));

  pen.fillStyle = getComputedStyle($("moons-points")).backgroundColor;
  const from = Math.floor(at);
  const part = ease(at - from);
  frames[from].forEach((point, i) => {
    const a = whereabouts(point, i, place, size, edge, bins);
    const b = part > 0 ? whereabouts(frames[from + 1][i], i, place, size, edge, bins) : a;
    pen.globalAlpha = a.alpha + part * (b.alpha - a.alpha);
    dot(pen, a.x + part * (b.x - a.x), a.y + part * (b.y - a.y), radius);
  });
}

/** Where a point is drawn: on an axis if only one coordinate is known, at a place of its own if none is. */
function whereabouts([x, y], i, place, size, edge, bins) {
  if (x === null && y === null) {
    const [left, top] = place(hash(2 * i) * (bins - 1), hash(2 * i + 1) * (bins - 1));
    return { x: left, y: top, alpha: 0.16 };
  }
  const [left, top] = place((x ?? 0) + jitter(2 * i), (y ?? 0) + jitter(2 * i + 1));
  if (y === null) return { x: left, y: size - edge / 2, alpha: 0.45 };
  if (x === null) return { x: edge / 2, y: top, alpha: 0.45 };
  return { x: left, y: top, alpha: 0.8 };
}

function dot(pen, x, y, radius) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}

function ease(part) {
  return part * part * (3 - 2 * part);
}

/** A fixed pseudo-random number in [0, 1) for a whole number. */
function hash(i) {
  let h = Math.imul(i + 1, 0x9e3779b1);
  h = Math.imul(h ^ (h >>> 15), 0x85ebca6b);
  return ((h ^ (h >>> 13)) >>> 0) / 2 ** 32;
}

/** Spreads points over their bin. */
function jitter(i) {
  return 0.8 * (hash(i + 7919) - 0.5);
}
