// How one text came to be: for every position, what stood there from which step on.

export class Story {
  constructor(expected) {
    this.positions = []; // position -> [{step, since, piece, probability, given}]; step: shown from; since: drawn at
    this.last = 0; // the last step that has arrived
    this.expected = expected; // steps to come, where the server does not say
    this.steps = null;
  }

  get length() {
    return this.positions.length;
  }

  /** The steps of the whole story, as far as is known. */
  get total() {
    return Math.max(this.steps ?? this.expected, this.last, 1);
  }

  /** The first frame says which positions are `given`; whatever else it shows is noise. */
  add({ step, steps }, { pieces, changed, given = [] }) {
    const drawn = new Map(changed);
    const first = this.length === 0;
    const kept = new Set(given);
    pieces.forEach((piece, i) => {
      const history = (this.positions[i] ??= []);
      const before = history.at(-1);
      if (!before || drawn.has(i)) {
        const since = drawn.has(i) || !first ? step : 0;
        history.push({ step, since, piece, probability: drawn.get(i) ?? null, given: kept.has(i) });
      } else if (before.piece !== piece) {
        // The same token looks different once its neighbours complete a character of several bytes.
        history.push({ ...before, step, piece });
      }
    });
    this.last = step;
    this.steps = steps;
  }

  finish(pieces) {
    this.add({ step: this.last, steps: this.steps }, { pieces, changed: [] });
    this.positions.length = pieces.length;
    this.expected = this.last;
  }

  /** What stands at a position after a step; undefined where the text is not that long yet. */
  entry(position, step) {
    return this.positions[position].findLast((entry) => entry.step <= step);
  }

  /** When a token was drawn, from 0 (first step) to 1 (last step). */
  when(entry) {
    return this.total > 1 ? Math.min(1, Math.max(0, (entry.since - 1) / (this.total - 1))) : 0;
  }

  /** What will stand under a mask, if that is known already. */
  future(position, entry) {
    return this.positions[position].find((later) => later.step > entry.step && later.piece !== null)?.piece ?? null;
  }
}
