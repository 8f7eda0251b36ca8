// The served model's name, and whether the server responds, which is checked every second while the page is visible.

import { keptKey, send } from "./key.js";
import { ApiError, apiError, reached } from "./sse.js";

const EVERY_MS = 1000;
const LOST_EVERY_MS = 3000;

/** A server that takes longer for this small request counts as gone. */
const PATIENCE_MS = 1800;

async function get(path) {
  const response = await reached(send(path, { signal: AbortSignal.timeout(PATIENCE_MS) }), "the server does not respond");
  if (!response.ok) throw await apiError(response);
  return response.json();
}

export class Health {
  /** `onModel` is called with the model and its properties, as llama.cpp's server gives them, whenever the server appears. */
  constructor(onModel) {
    this.line = document.getElementById("model");
    this.onModel = onModel;
    this.model = null;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.check(); });
    this.check();
  }

  async check() {
    clearTimeout(this.timer);
    this.timer = null;
    const turn = this.turn = {};
    let failure = null;
    try {
      if (this.model) await get("/health");
      else await this.load();
    } catch (error) {
      failure = error;
    }
    if (turn !== this.turn) return; // a later check has begun
    if (failure) this.model = null;
    this.show(failure);
    // Without a key, checking again is useless; entering a key starts a check.
    if (failure?.status !== 401 && !document.hidden) this.timer = setTimeout(() => this.check(), failure ? LOST_EVERY_MS : EVERY_MS);
  }

  async load() {
    const [{ data: [model] }, props] = await Promise.all([get("/v1/models"), get("/props")]);
    this.model = model;
    this.onModel(model, props);
  }

  show(failure) {
    this.line.dataset.state = failure ? "lost" : "ready";
    this.line.textContent = failure ? this.words(failure) : this.model.id;
  }

  words(failure) {
    if (failure.status === 401 && keptKey() === "") return "This server requires an API key";
    const words = failure instanceof ApiError ? failure.message : "the server does not respond";
    return words.charAt(0).toUpperCase() + words.slice(1);
  }
}
