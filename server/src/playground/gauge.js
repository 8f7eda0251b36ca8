// The gauge: token counts, and the speed drawn as a water level.

/** The shortest time over which the page measures a speed, because tokens arrive in groups. */
const MEASURABLE_MS = 200;

export class Gauge {
  constructor() {
    const ids = { rate: "rate", total: "count", first: "first", water: "water", surface: "surface", tide: "tide" };
    for (const [name, id] of Object.entries(ids)) this[name] = document.getElementById(id);
    this.draw([0.3, 0.34, 0.3, 0.26, 0.3, 0.34, 0.3, 0.26, 0.3], 1); // still water
  }

  start() {
    this.began = performance.now();
    this.tokens = 0;
    this.arrivals = []; // [time in ms, tokens so far] of the last second
    this.levels = [];
    this.firstAt = null;
    this.decodeMs = null;
    for (const figure of [this.rate, this.total, this.first]) figure.textContent = "–";
    this.timer = setInterval(() => this.tick(), MEASURABLE_MS);
  }

  add(tokens) {
    const now = performance.now();
    if (this.firstAt === null) {
      this.firstAt = now;
      this.first.textContent = duration(now - this.began);
    }
    this.tokens += tokens;
    this.lastAt = now;
    this.arrivals.push([now, this.tokens]);
    this.total.textContent = this.tokens.toLocaleString();
  }

  /** Sets the number of tokens, as the server or the page has counted them. */
  count(tokens) { this.tokens = tokens; }

  /** Sets the server's time for the tokens after the first. */
  time({ decode_ms: decodeMs }) { this.decodeMs = decodeMs; }

  tick() {
    const now = performance.now();
    while (this.arrivals.length > 2 && now - this.arrivals[0][0] > 1000) this.arrivals.shift();
    const [from, before] = this.arrivals[0] ?? [now, 0];
    if (now - from >= MEASURABLE_MS) this.show((this.tokens - before) * 1000 / (now - from));
  }

  show(rate) {
    if (!Number.isFinite(rate)) return;
    this.rate.textContent = rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString();
    this.levels = [...this.levels, rate].slice(-120);
    this.draw(this.levels.length > 1 ? this.levels : [rate, rate], Math.max(...this.levels) * 1.15);
  }

  /** Ends the run: shows the mean speed after the first token, by the server's clock or else by the arrival times. */
  finish() {
    clearInterval(this.timer);
    if (this.firstAt === null) return;
    this.total.textContent = this.tokens.toLocaleString();
    const ms = this.decodeMs ?? this.lastAt - this.firstAt;
    if (this.tokens < 2 || (this.decodeMs === null && ms < MEASURABLE_MS)) return;
    this.show((this.tokens - 1) * 1000 / ms);
    this.tide.setAttribute("aria-label", `Speed over the run, ${this.rate.textContent} tokens per second on average`);
  }

  draw(levels, full) {
    const step = 600 / (levels.length - 1);
    const points = levels.map((level, i) => [i * step, 40 - 38 * level / full]);
    let path = `M${points[0].join(" ")}`;
    for (let i = 1; i < points.length; i += 1) { // smooth curves between points
      const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
      const middle = (x0 + x1) / 2;
      path += `C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
    }
    this.surface.setAttribute("d", path);
    this.water.setAttribute("d", `${path}V40H0Z`);
  }
}

function duration(ms) { return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`; }
