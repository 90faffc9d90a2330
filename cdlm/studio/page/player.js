// Plays several samples on one slider. Each column keeps its own place while frames arrive; scrubbing joins them.

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Player {
  constructor(columns, { scrub, play, readout }) {
    Object.assign(this, { columns, scrub, play, readout });
    this.playing = false;
    this.live = false; // following frames as they arrive
    scrub.addEventListener("input", () => this.seek(Number(scrub.value)));
    play.addEventListener("click", () => (this.playing ? this.pause() : this.start()));
  }

  get shown() {
    return this.columns().filter((column) => column.timeline);
  }

  get last() {
    return Math.max(0, ...this.shown.map((column) => column.timeline.last));
  }

  /** Begin at the start and keep up with what arrives. */
  follow() {
    this.live = true;
    this.run();
  }

  start() {
    this.live = false;
    if (this.shown.every((column) => column.at >= column.timeline.last)) for (const column of this.shown) column.show(0);
    this.run();
  }

  run() {
    if (!this.playing) {
      this.playing = true;
      let before = performance.now();
      const tick = (now) => {
        if (!this.playing) return;
        this.advance(Math.max(0, now - before) / 1000);
        before = now;
        requestAnimationFrame(tick);
      };
      requestAnimationFrame(tick);
    }
    this.refresh();
  }

  pause() {
    this.playing = false;
    this.refresh();
  }

  advance(seconds) {
    const distance = this.live && still.matches ? Infinity : seconds * this.rate();
    for (const column of this.shown) {
      const next = Math.min(column.timeline.last, column.at + distance);
      if (next !== column.at) column.show(next);
    }
    const over = this.shown.every((column) => column.at >= column.timeline.last);
    if (over && !this.columns().some((column) => column.busy)) this.playing = false;
    this.refresh();
  }

  /** Steps a second: slow enough to see few steps, fast enough not to wait for many. */
  rate() {
    const totals = this.shown.map((column) => column.timeline.total);
    return Math.max(2.5, Math.min(...totals) / 5, Math.max(...totals) / 10);
  }

  seek(step) {
    this.playing = false;
    for (const column of this.shown) column.show(Math.min(step, column.timeline.last));
    this.refresh();
  }

  nudge(by) {
    if (this.shown.length) this.seek(Math.min(this.last, Math.max(0, this.place() + by)));
  }

  place() {
    return Math.floor(Math.max(0, ...this.shown.map((column) => column.at)));
  }

  refresh() {
    const none = this.shown.length === 0;
    this.scrub.disabled = this.play.disabled = none;
    this.scrub.max = this.last;
    this.scrub.value = this.place();
    const total = Math.max(1, ...this.shown.map((column) => column.timeline.total));
    this.readout.textContent = none ? "no sample yet" : `step ${this.place()} of ${total}`;
    this.scrub.setAttribute("aria-valuetext", this.readout.textContent);
    this.play.classList.toggle("playing", this.playing);
    this.play.setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }
}
