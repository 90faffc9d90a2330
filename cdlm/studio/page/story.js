// How one text came to be: for every position, what stood there from which step on.

export class Story {
  /** `given` says which positions of frame 0 (its pieces) are given rather than noise. */
  constructor(expected, given) {
    this.positions = []; // position -> [{step, since, piece, probability, given}]; step: shown from; since: drawn at
    this.last = 0; // the last step that has arrived
    this.expected = expected; // steps to come, where the server does not say
    this.steps = null;
    this.given = given;
  }

  get length() {
    return this.positions.length;
  }

  /** The steps of the whole story, as far as is known. */
  get total() {
    return Math.max(this.steps ?? this.expected, this.last, 1);
  }

  add({ step, steps }, { pieces, changed }) {
    const drawn = new Map(changed);
    const given = this.length === 0 ? this.given(pieces) : null;
    pieces.forEach((piece, i) => {
      const history = (this.positions[i] ??= []);
      const before = history.at(-1);
      if (!before || drawn.has(i)) {
        const since = drawn.has(i) || given === null ? step : 0;
        history.push({ step, since, piece, probability: drawn.get(i) ?? null, given: since === 0 && Boolean(given?.[i]) });
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
