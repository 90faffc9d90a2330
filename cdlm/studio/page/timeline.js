// The history of one sample: for every position, the tokens that stood there and their steps.

export class Timeline {
  /** `expectedSteps` holds while the server does not say how many steps there will be. */
  constructor(expectedSteps) {
    this.positions = []; // position -> [{step, since, piece, probability, given}]; step: shown from; since: drawn at
    this.last = 0; // the last step that has arrived
    this.expectedSteps = expectedSteps;
    this.numSteps = null;
  }

  get length() {
    return this.positions.length;
  }

  /** The number of steps, as far as is known. */
  get total() {
    return Math.max(this.numSteps ?? this.expectedSteps, this.last, 1);
  }

  /** The first frame says which positions are `given`; whatever else it shows is noise. */
  add({ step, num_steps: numSteps, pieces, changed, token_probs: probs, given = [] }) {
    const drawn = new Map(changed.map((position, i) => [position, probs[i]]));
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
    this.numSteps = numSteps;
  }

  finish(pieces) {
    this.add({ step: this.last, num_steps: this.numSteps, pieces, changed: [], token_probs: [] });
    this.positions.length = pieces.length;
    this.expectedSteps = this.last;
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
