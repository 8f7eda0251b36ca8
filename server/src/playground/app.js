// The playground: one sheet of text that a person and the model write in turn.
// Text from the server reaches the page as text nodes and values only, never as markup.
"use strict";

// ---- Colours. Runs at once, before the body is painted, so that a chosen theme does not flash.

const root = document.documentElement;
const THEME_KEY = "tidegate-theme";
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

function remembered(key) {
  try { return localStorage.getItem(key); } catch { return null; } // storage may be forbidden
}

function showTheme() {
  const chosen = remembered(THEME_KEY) ?? root.dataset.theme;
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  const shade = root.dataset.theme ?? (darkSystem.matches ? "dark" : "light");
  root.dataset.shade = shade;
  const button = document.getElementById("theme");
  button?.setAttribute("aria-label", `Switch to ${shade === "dark" ? "light" : "dark"} colours`);
}

function toggleTheme() {
  const next = root.dataset.shade === "dark" ? "light" : "dark";
  root.dataset.theme = next;
  try { localStorage.setItem(THEME_KEY, next); } catch { /* holds for this visit only */ }
  showTheme();
}

showTheme();
darkSystem.addEventListener("change", showTheme);

// ---- Server-sent events

/** Splits a byte stream into the data of its events; chunks may end anywhere, within a character too. */
class EventReader {
  constructor() {
    this.decoder = new TextDecoder();
    this.rest = "";
    this.data = [];
  }

  /** Takes bytes, returns the data of the events that they complete. */
  push(bytes) {
    this.rest += this.decoder.decode(bytes, { stream: true });
    const events = [];
    // A lone CR at the end may be the first half of CRLF: it waits for the next chunk.
    const line = /\r\n|\n|\r(?!$)/g;
    let from = 0;
    for (let end = line.exec(this.rest); end; end = line.exec(this.rest)) {
      this.take(this.rest.slice(from, end.index), events);
      from = line.lastIndex;
    }
    this.rest = this.rest.slice(from);
    return events;
  }

  take(line, events) {
    if (line === "") {
      if (this.data.length) events.push(this.data.join("\n"));
      this.data = [];
    } else if (line.startsWith("data:")) {
      this.data.push(line.slice(line[5] === " " ? 6 : 5));
    } // comments and other fields carry nothing here
  }
}

/** What the server said went wrong, in words for a person. */
class ApiError extends Error {
  constructor(error, status, retryAfter) {
    super(error?.message || `the server answered ${status}`);
    this.param = error?.param ?? null;
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function apiError(response) {
  let body = null;
  try { body = await response.json(); } catch { /* a proxy's page, say: the status has to do */ }
  return new ApiError(body?.error, response.status, response.headers.get("retry-after"));
}

/** POSTs a completion request and yields each chunk; throws ApiError for an error before or within the stream. */
async function* complete(request, signal) {
  const response = await fetch("/v1/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  if (!response.ok) throw await apiError(response);
  const events = new EventReader();
  const body = response.body.getReader();
  for (let part = await body.read(); !part.done; part = await body.read()) {
    for (const data of events.push(part.value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error, response.status, null);
      yield chunk;
    }
  }
  throw new ApiError({ message: "the stream broke off before its end" }, response.status, null);
}

// ---- The sheet: pieces of text, each a person's or the model's

/** Pieces after `text` replaced what they held; characters that stayed keep their author. */
function edited(pieces, text) {
  const old = pieces.map((piece) => piece.text).join("");
  const shorter = Math.min(old.length, text.length);
  let head = 0;
  while (head < shorter && old[head] === text[head]) head += 1;
  let tail = 0;
  while (tail < shorter - head && old.at(-1 - tail) === text.at(-1 - tail)) tail += 1;
  const typed = { text: text.slice(head, text.length - tail), made: false };
  const result = [...cut(pieces, 0, head), typed, ...cut(pieces, old.length - tail, old.length)];
  return result.filter((piece) => piece.text);
}

function cut(pieces, from, to) {
  let at = 0;
  return pieces.map((piece) => {
    const text = piece.text.slice(Math.max(0, from - at), Math.max(0, to - at));
    at += piece.text.length;
    return { ...piece, text };
  });
}

/** Laying out a long text takes milliseconds, tokens may come each millisecond: so not at every token. */
const REDRAW_MS = 40;

class Sheet {
  constructor() {
    this.write = document.getElementById("prompt");
    this.ink = document.getElementById("ink");
    this.scroller = document.getElementById("sheet");
    this.pieces = [];
    this.drawn = null; // the text node that a run appends to
    this.waiting = ""; // came since the last drawing
    this.drawnAt = 0;
    this.timer = null;
  }

  get text() { return this.pieces.map((piece) => piece.text).join(""); }
  get endsWithRun() { return Boolean(this.pieces.at(-1)?.made); }

  set(pieces) {
    this.pieces = pieces;
    this.drawn = null;
    this.ink.replaceChildren(...pieces.map((piece) => this.span(piece)));
    const text = this.text;
    if (this.write.value !== text) this.write.value = text; // an equal value must not move the caret
  }

  span(piece) {
    const span = document.createElement("span");
    if (piece.made) span.className = "made";
    span.textContent = piece.text;
    return span;
  }

  readInput() { this.set(edited(this.pieces, this.write.value)); }

  begin() {
    this.set([...this.pieces, { text: "", made: true }]);
    this.drawn = this.ink.lastChild.appendChild(document.createTextNode(""));
    this.write.readOnly = true;
    this.ink.classList.add("flowing");
  }

  append(text) {
    this.pieces.at(-1).text += text;
    this.waiting += text;
    const left = this.drawnAt + REDRAW_MS - performance.now();
    if (left <= 0) this.draw();
    else this.timer ??= setTimeout(() => this.draw(), left);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const below = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight;
    this.drawn.appendData(this.waiting);
    this.write.value += this.waiting;
    this.waiting = "";
    this.drawnAt = performance.now();
    if (below < 48) this.scroller.scrollTop = this.scroller.scrollHeight; // follow, unless the reader has gone up
  }

  end() {
    this.draw();
    this.write.readOnly = false;
    this.ink.classList.remove("flowing");
    this.set(this.pieces.filter((piece) => piece.text));
  }

  takeBack() { if (this.endsWithRun) this.set(this.pieces.slice(0, -1)); }
}

// ---- The gauge: counts, and the speed as a water level

class Gauge {
  constructor() {
    for (const id of ["rate", "count", "first", "water", "surface", "tide"]) this[id] = document.getElementById(id);
    this.draw([0.3, 0.34, 0.3, 0.26, 0.3, 0.34, 0.3, 0.26, 0.3], 1); // still water
  }

  start() {
    this.began = performance.now();
    this.tokens = 0;
    this.arrivals = []; // [time in ms, tokens so far], of the last second
    this.levels = [];
    this.firstAt = null;
    for (const figure of [this.rate, this.count, this.first]) figure.textContent = "–";
    this.timer = setInterval(() => this.tick(), 200);
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
    this.count.textContent = this.tokens.toLocaleString();
  }

  tick() {
    const now = performance.now();
    while (this.arrivals.length > 2 && now - this.arrivals[0][0] > 1000) this.arrivals.shift();
    const [from, before] = this.arrivals[0] ?? [now, 0];
    if (this.tokens - before < 2) return;
    this.show((this.tokens - before) * 1000 / (this.lastAt - from));
  }

  show(rate) {
    if (!Number.isFinite(rate)) return;
    this.rate.textContent = rate.toFixed(rate < 10 ? 1 : 0);
    this.levels = [...this.levels, rate].slice(-120);
    this.draw(this.levels.length > 1 ? this.levels : [rate, rate], Math.max(...this.levels) * 1.15);
  }

  /** Ends the run with the server's own count where it gave one, and the mean speed from the first token on. */
  finish(counted) {
    clearInterval(this.timer);
    if (counted !== null) this.tokens = counted;
    if (this.firstAt === null) return;
    this.count.textContent = this.tokens.toLocaleString();
    const mean = (this.tokens - 1) * 1000 / (this.lastAt - this.firstAt);
    if (this.tokens < 2 || !Number.isFinite(mean)) return;
    this.show(mean);
    this.tide.setAttribute("aria-label", `Speed over the run, ${this.rate.textContent} tokens per second on average`);
  }

  draw(levels, full) {
    const step = 600 / (levels.length - 1);
    const points = levels.map((level, i) => [i * step, 40 - 38 * level / full]);
    let path = `M${points[0].join(" ")}`;
    for (let i = 1; i < points.length; i += 1) { // between two points the water eases, as water does
      const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
      const middle = (x0 + x1) / 2;
      path += `C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
    }
    this.surface.setAttribute("d", path);
    this.water.setAttribute("d", `${path}V40H0Z`);
  }
}

function duration(ms) { return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`; }

// ---- The page

const EXAMPLES = [
  "Once upon a time there was a little girl who lived by the sea.",
  "The old lighthouse keeper had not spoken to anyone for a year, when one evening",
  "“Where have you been all night?” said the fox to the hare.",
  "Tom found a small red boat in the garden. He wanted to",
  "It was late in the autumn, and the rain had not ceased since Sunday.",
];

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "repetition_penalty"];

class Playground {
  constructor() {
    const buttons = ["generate", "stop", "again", "back", "clear"];
    for (const id of [...buttons, "error", "status", "spoken", "model", "examples", "settings"]) {
      this[id] = document.getElementById(id);
    }
    this.field = (id) => document.getElementById(id);
    this.seedUsed = document.getElementById("seed-used");
    this.sheet = new Sheet();
    this.gauge = new Gauge();
    this.running = null; // the AbortController of the run in progress
    this.modelName = null;
    this.listen();
    this.offerExamples();
    this.refresh();
    if (matchMedia("(max-width: 46rem)").matches) this.settings.open = false;
    this.findModel();
  }

  listen() {
    document.getElementById("theme").addEventListener("click", toggleTheme);
    document.getElementById("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    this.again.addEventListener("click", () => { this.sheet.takeBack(); this.run(); });
    this.back.addEventListener("click", () => { this.sheet.takeBack(); this.say("Taken back."); this.refresh(); });
    this.clear.addEventListener("click", () => this.wipe());
    this.sheet.write.addEventListener("input", () => { this.sheet.readInput(); this.refresh(); });
    this.seedUsed.addEventListener("click", () => {
      this.field("seed").value = this.seedUsed.textContent;
      this.settings.open = true;
      this.say("Seed kept: the same text and settings give the same answer.");
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      } else if (event.key === "Escape") this.running?.abort();
    });
    for (const slide of document.querySelectorAll(".slide")) {
      const number = this.field(slide.dataset.for);
      slide.addEventListener("input", () => { number.value = slide.value; this.forgive(); });
      number.addEventListener("input", () => { slide.value = number.value; });
    }
    this.settings.addEventListener("input", () => this.forgive());
  }

  offerExamples() {
    const list = document.createElement("ul");
    for (const text of EXAMPLES) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.addEventListener("click", () => {
        this.sheet.set([{ text, made: false }]);
        this.refresh();
        this.run();
      });
      const item = document.createElement("li");
      item.append(button);
      list.append(item);
    }
    this.examples.append(list);
  }

  /** Asks for the model's name, again and again while the server is still loading or away. */
  async findModel() {
    try {
      const response = await fetch("/v1/models");
      if (!response.ok) throw await apiError(response);
      this.modelName = (await response.json()).data[0].id;
      this.model.textContent = this.modelName;
      this.model.dataset.state = "ready";
    } catch (error) {
      this.model.textContent = error instanceof ApiError ? error.message : "the server does not answer";
      this.model.dataset.state = "lost";
      setTimeout(() => this.findModel(), 3000);
    }
  }

  request(seed) {
    const request = { prompt: this.sheet.text, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    if (this.modelName) request.model = this.modelName;
    for (const name of NUMBERS) {
      const value = this.field(name).value;
      if (value !== "") request[name] = Number(value); // the server judges the value: one place knows the bounds
    }
    request.seed = seed;
    const stops = this.field("stop_strings").value.split("\n").filter((line) => line !== "");
    if (stops.length) request.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
    return request;
  }

  async run() {
    if (this.running) return;
    this.forgive();
    if (this.sheet.text === "") {
      this.say("Write a beginning first.");
      this.sheet.write.focus();
      return;
    }
    const typed = this.field("seed").value;
    const seed = typed === "" ? Math.floor(Math.random() * 1e6) : Number(typed);
    const request = this.request(seed);
    this.running = new AbortController();
    this.sheet.begin();
    this.gauge.start();
    this.seedUsed.textContent = String(seed);
    this.say("The gate is open.");
    this.refresh();
    if (document.activeElement === document.body) this.stop.focus({ preventScroll: true });
    let counted = null;
    try {
      counted = await this.read(complete(request, this.running.signal));
    } catch (error) {
      if (error.name === "AbortError") this.say("Stopped.");
      else this.complain(error);
    }
    this.close(counted);
  }

  /** Shows the chunks of a run; returns how many tokens the server counted. */
  async read(chunks) {
    let counted = null;
    for await (const chunk of chunks) {
      const choice = chunk.choices?.[0];
      if (choice) {
        const tokens = choice.token_ids?.length ?? (choice.text ? 1 : 0);
        if (tokens) this.gauge.add(tokens);
        if (choice.text) this.sheet.append(choice.text);
        if (choice.finish_reason) this.say(ending(choice.finish_reason));
      }
      if (chunk.usage) counted = chunk.usage.completion_tokens;
    }
    return counted;
  }

  close(counted) {
    const written = this.sheet.pieces.at(-1).text;
    this.running = null;
    this.gauge.finish(counted);
    this.sheet.end();
    const onStop = document.activeElement === this.stop;
    this.refresh();
    if (onStop) this.generate.focus({ preventScroll: true });
    this.spoken.textContent = written;
  }

  wipe() {
    this.sheet.set([]);
    this.forgive();
    this.spoken.textContent = "";
    this.say("The gate is shut.");
    this.refresh();
    this.sheet.write.focus();
  }

  say(text) { this.status.textContent = text; }

  complain(error) {
    let text = error instanceof ApiError ? error.message : "the server cannot be reached";
    if (error.status === 429 || error.status === 503) {
      const wait = Number(error.retryAfter);
      text += wait > 0 ? `; try again in ${wait} s` : "; try again in a moment";
    }
    this.error.textContent = `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
    this.error.hidden = false;
    this.say("The gate is shut.");
    const field = error.param && this.settings.querySelector(`#${CSS.escape(error.param === "stop" ? "stop_strings" : error.param)}`);
    if (field) {
      field.setAttribute("aria-invalid", "true");
      this.settings.open = true;
    }
  }

  forgive() {
    this.error.hidden = true;
    this.error.textContent = "";
    for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  }

  /** Brings buttons and examples in line with what can be done now. */
  refresh() {
    const busy = this.running !== null;
    const empty = this.sheet.text === "";
    document.body.classList.toggle("running", busy);
    this.generate.disabled = busy;
    this.stop.disabled = !busy;
    this.again.disabled = this.back.disabled = busy || !this.sheet.endsWithRun;
    this.clear.disabled = busy || empty;
    this.seedUsed.disabled = busy || this.seedUsed.textContent === "–";
    this.examples.hidden = busy || !empty;
    this.generate.textContent = this.sheet.endsWithRun && !busy ? "Continue" : "Generate";
  }
}

function ending(reason) {
  if (reason === "length") return "Paused at the most tokens asked for. Continue?";
  if (reason === "stop") return "The text ended here.";
  return `Ended: ${reason}.`;
}

document.addEventListener("DOMContentLoaded", () => { showTheme(); new Playground(); });
