// The model's text on its way to the page. Laying out a long text takes milliseconds, and tokens may arrive every
// millisecond, so the page is updated at most every 40 ms.

const REDRAW_MS = 40;

export class Arrivals {
  /** `show` adds text to the page. */
  constructor(show) {
    this.show = show;
    this.start();
  }

  start() {
    this.text = ""; // shown so far
    this.tokens = 0; // those of that text
    this.waiting = "";
    this.waitingTokens = 0;
    this.hiddenTokens = 0; // tokens after the waiting text that have given no text yet, such as half a character
    this.shownAt = 0;
    this.stopped = false;
    this.timer = null;
  }

  add(text, tokens) {
    this.hiddenTokens += tokens;
    if (text === "") return;
    this.waiting += text;
    this.waitingTokens += this.hiddenTokens;
    this.hiddenTokens = 0;
    if (this.stopped) return;
    const left = this.shownAt + REDRAW_MS - performance.now();
    if (left <= 0) this.flush();
    else this.timer ??= setTimeout(() => this.flush(), left);
  }

  /** Shows all that has arrived, unless the run was stopped. */
  flush() {
    clearTimeout(this.timer);
    this.timer = null;
    if (this.stopped || this.waiting === "") return;
    this.show(this.waiting);
    this.text += this.waiting;
    this.tokens += this.waitingTokens;
    this.waiting = "";
    this.waitingTokens = 0;
    this.shownAt = performance.now();
  }

  /** From now on the page shows nothing more of this run. */
  stop() {
    this.stopped = true;
    clearTimeout(this.timer);
  }

  /** Whether the page shows all text that has arrived. */
  get isWhole() { return this.waiting === ""; }
}
