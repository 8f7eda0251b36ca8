// The sheet: pieces of text, each written by a person or the model, and their display.
// Text reaches the page as text nodes and values only, never as markup.

/** Returns the pieces after an edit to `text`; unchanged characters keep their author. */
export function edited(pieces, text) {
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

export class Sheet {
  constructor() {
    this.write = document.getElementById("prompt");
    this.ink = document.getElementById("ink");
    this.scroller = document.getElementById("sheet");
    this.pieces = [];
    this.fixed = 0; // leading characters that the model has read: a conversation can be rewound, but not edited
    this.onFixed = () => {}; // called after an attempt to edit them
    this.drawn = null; // the text node to which a run appends
    this.write.addEventListener("beforeinput", (event) => {
      if (this.write.selectionStart >= this.fixed || event.inputType.startsWith("history")) return;
      event.preventDefault();
      this.onFixed();
    });
  }

  get text() { return this.pieces.map((piece) => piece.text).join(""); }
  /** The text after the fixed part. */
  get fresh() { return this.text.slice(this.fixed); }

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

  readInput() {
    const fixed = this.text.slice(0, this.fixed);
    if (this.write.value.startsWith(fixed)) return this.set(edited(this.pieces, this.write.value));
    this.set(this.pieces); // undoes an edit that `beforeinput` did not prevent, such as deleting the last fixed character
    this.onFixed();
  }

  /** Shows a conversation's text, followed by the unsent draft. */
  show(pieces, draft) {
    this.fixed = 0;
    const text = pieces.map((piece) => piece.text).join("");
    this.set([...pieces, ...(draft ? [{ text: draft, made: false }] : [])]);
    this.fixed = text.length;
    this.toEnd();
  }

  toEnd() { this.scroller.scrollTop = this.text || this.scroller.querySelector(".message") ? this.scroller.scrollHeight : 0; }

  /** Changes the page and shows its new end, unless the reader has scrolled up. */
  follow(change) {
    const below = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight;
    change();
    if (below < 48) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  begin() {
    this.set([...this.pieces, { text: "", made: true }]);
    this.drawn = this.ink.lastChild.appendChild(document.createTextNode(""));
    this.ink.classList.add("flowing");
    this.lock(true);
  }

  append(text) {
    this.pieces.at(-1).text += text;
    this.follow(() => {
      this.drawn.appendData(text);
      this.write.value += text;
    });
  }

  end() {
    this.ink.classList.remove("flowing");
    this.lock(false);
    this.set(this.pieces.filter((piece) => piece.text));
  }

  lock(locked) { this.write.readOnly = locked; }

  takeBack() { if (this.endsWithRun) this.set(this.pieces.slice(0, -1)); }
}
