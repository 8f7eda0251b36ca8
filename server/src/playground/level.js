// The chart of a conversation's size: its tokens, which grow, and its state, which does not.

/** Bytes of one head's state for D = d = 64, as in the shipped model: 2 D (d + 1) + 1 numbers of 4 bytes. */
const HEAD_BYTES = (2 * 64 * 65 + 1) * 4;

/** Number of tokens whose keys and values take as many bytes at the same precision: the count above divided by 2 d. */
const SAME_AS_TOKENS = 65;

const WIDTH = 272;
const HEIGHT = 84;

/** Returns the bytes of a key-value cache of this many tokens, or null if the state does not have the known shape. */
export function cacheBytes(tokens, stateBytes) {
  return stateBytes > 0 && stateBytes % HEAD_BYTES === 0 ? Math.round(tokens / SAME_AS_TOKENS * stateBytes) : null;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let [size, unit] = [count, 0];
  while (size >= 1000 && unit < units.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${size < 10 && unit > 0 ? size.toFixed(1) : Math.round(size).toLocaleString()} ${units[unit]}`;
}

export class Level {
  constructor() {
    const ids = { total: "tokens-total", state: "state-bytes", note: "level-note", chart: "level", rise: "rise", ridge: "ridge", line: "line" };
    for (const [name, id] of Object.entries(ids)) this[name] = document.getElementById(id);
    this.show([0], null);
  }

  /** `tokens` after each turn from the first to the last; `stateBytes` from the server, or null if unknown. */
  show(tokens, stateBytes) {
    this.tokens = tokens;
    this.bytes = stateBytes;
    this.draw(tokens.at(-1));
  }

  /** Updates the chart during a turn. */
  grow(tokens) { this.draw(tokens); }

  draw(now) {
    const known = this.bytes !== null;
    this.total.textContent = known ? now.toLocaleString() : "–";
    this.state.textContent = known ? bytes(this.bytes) : "–";
    this.state.title = known ? `${this.bytes.toLocaleString()} bytes` : "";
    this.state.dataset.bytes = known ? String(this.bytes) : "";
    const cache = known ? cacheBytes(now, this.bytes) : null;
    this.note.textContent = this.words(now, cache);
    this.chart.setAttribute("aria-label", known ? `Tokens have grown to ${now}; the state has stayed at ${bytes(this.bytes)}` : "No conversation yet");

    const steps = now === this.tokens.at(-1) ? this.tokens : [...this.tokens, now];
    const heights = steps.length > 1 ? steps : [0, ...steps];
    // Heights are in tokens. If the shape is known, both lines share one scale; otherwise the state's line is merely level.
    const max = Math.max(1, ...heights);
    const level = cache === null ? max / 3 : SAME_AS_TOKENS;
    const full = Math.max(max, level) * 1.12;
    const y = (value) => HEIGHT - (HEIGHT - 2) * value / full;
    const step = WIDTH / (heights.length - 1);
    const ridge = `M${heights.map((value, i) => `${i * step} ${y(value)}`).join("L")}`;
    this.ridge.setAttribute("d", ridge);
    this.rise.setAttribute("d", `${ridge}V${HEIGHT}H0Z`);
    this.line.setAttribute("d", known ? `M0 ${y(level)}H${WIDTH}` : "");
  }

  words(now, cache) {
    if (this.bytes === null) return "Write something, and see which of the two grows.";
    if (cache === null) return "The state has the same size for any number of tokens. The two lines have separate scales.";
    if (now === 0) return "The state has the same size before the first token and after the millionth.";
    const than = now < SAME_AS_TOKENS ? "still less than the state" : "and growing";
    return `A key-value cache of these tokens would take about ${bytes(cache)}, ${than} (an estimate for this model’s shape, at the state’s precision).`;
  }
}
