// One turn of a session: sends its request, reads its stream, and after a stop keeps exactly what the page showed. Knows
// nothing of the page.

import { explained, getSession, rewindTo } from "./sessions.js";
import { complete } from "./sse.js";

/** How long a stopped turn may take to end, and how often the page asks. */
const END_TRIES = 100;
const END_MS = 60;

export class Turn {
  /** `typed` is what the person wrote for this turn. */
  constructor(typed) {
    this.typed = typed;
    this.session = null; // as it was before the turn
    this.version = null; // the version that the turn will create
    this.tokens = 0; // of the conversation
    this.info = null; // what the server says of the session once it has stored the turn
  }

  /** Yields the parts of the answer. */
  async *run(session, request, signal) {
    Object.assign(this, { session, request, tokens: session.tokens });
    try {
      for await (const part of complete(request, signal, this.headers)) {
        this.version = part.version ?? this.version;
        this.info = part.session ?? this.info;
        this.tokens += part.tokens + part.promptTokens;
        yield part;
      }
    } catch (error) {
      throw explained(error);
    }
  }

  get headers() { return { "if-match": this.session.version }; }

  /**
   * Called after the run has failed. If it was stopped or the stream broke, the server has rolled it back; this repeats it
   * up to what the page showed. The seed is the same, and so is the text.
   */
  async keep(failure, arrivals) {
    const isBroken = failure.name === "AbortError" || failure.status === 0 || failure.status === 200;
    if (!this.session || !isBroken || (this.info && arrivals.isWhole)) return;
    this.info = null;
    const { id, version } = this.session;
    if (await this.ended() === this.version) await rewindTo(id, version); // it had ended already, with more text
    if (arrivals.tokens === 0) return;
    const request = { ...this.request, max_tokens: arrivals.tokens };
    for await (const part of complete(request, undefined, this.headers)) this.info = part.session ?? this.info;
  }

  /** Waits until nothing runs in the session, and returns its version. */
  async ended() {
    for (let tries = 0; ; tries += 1) {
      const now = await getSession(this.session.id);
      if (!now.in_use || tries === END_TRIES) return now.version;
      await new Promise((resolve) => { setTimeout(resolve, END_MS); });
    }
  }
}
