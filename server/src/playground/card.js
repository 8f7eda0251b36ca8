// The card of the selected turn: what it added, its names, its forks, and what can be done with it.

import { pieceOf, readBeginning } from "./story.js";
import { snapshotPath } from "./sessions.js";
import { nameOf } from "./shelf.js";
import { title } from "./tree.js";

/** Number of characters of each author that the card shows; more do not fit into its line. */
const EXCERPT = 160;

export function spanOf({ text, made }) {
  const span = document.createElement("span");
  if (made) span.className = "made";
  span.textContent = text;
  return span;
}

function linkTo(id, text) {
  const link = document.createElement("a");
  link.href = `#${id}`;
  link.textContent = text;
  return link;
}

/** Returns a file name for a turn of a session. */
export function fileName(session, node) {
  const words = `${nameOf(session)} ${title(node)}`.normalize("NFC");
  return `${words.replace(/[^\p{L}\p{N}\p{M}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 100)}.tidegate`;
}

export class Card {
  constructor() {
    for (const id of ["turn-card", "turn-title", "turn-facts", "turn-text", "turn-names", "rewind", "fork", "read", "download"]) {
      this[id.replace(/-(.)/g, (_, letter) => letter.toUpperCase())] = document.getElementById(id);
    }
  }

  /** Shows a node of the tree, or nothing. `known` are the messages that the page already has. */
  show(session, node, forks, known) {
    this.node = node;
    this.turnCard.hidden = !node;
    if (!node) return;
    const { turn } = node;
    this.turnTitle.textContent = title(node);
    this.turnFacts.textContent = this.facts(turn).join(", ");
    this.names(session, turn, forks);
    this.excerpt(session, node, known);
    this.rewind.textContent = turn.head ? "You are here" : "Rewind here";
    this.download.removeAttribute("href");
    if (turn.kept && turn.tokens > 0) this.download.href = snapshotPath(this.home(session), turn.version);
    this.download.download = fileName(session, node);
  }

  /** The session in which the server finds this version. */
  home(session) { return this.node.turn.elsewhere ? this.node.turn.session : session.id; }

  facts(turn) {
    const facts = [`${turn.tokens.toLocaleString()} tokens`];
    if (turn.prompt_tokens || turn.completion_tokens) facts.push(`${turn.prompt_tokens} read`, `${turn.completion_tokens} written`);
    facts.push(new Date(turn.time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }));
    if (!turn.kept) facts.push("state no longer stored");
    return facts;
  }

  /** The label, the tags, and links to the conversations before and after. */
  names(session, turn, forks) {
    const names = [];
    if (turn.label) names.push(["Label", turn.label]);
    for (const tag of turn.tags) names.push(["Tag", tag]);
    if (turn.elsewhere) names.push(["Written in", linkTo(turn.session, "another conversation")]);
    const origin = session.forked_from;
    if (origin?.version === turn.version) names.push(["Forked from", linkTo(origin.session, "another conversation")]);
    for (const fork of forks) names.push(["Fork", linkTo(fork.id, nameOf(fork))]);
    const items = names.map(([kind, name]) => {
      const item = document.createElement("li");
      item.append(`${kind} `, name);
      return item;
    });
    this.turnNames.replaceChildren(...items);
    this.turnNames.hidden = items.length === 0;
  }

  async excerpt(session, node, known) {
    const { turn } = node;
    const added = known.filter((message) => message.version === turn.version && message.content);
    if (turn.tokens === 0) return this.note("Nothing has been read yet.");
    if (added.length) return this.pieces(added.map(pieceOf));
    this.note("…");
    try {
      const pieces = await readBeginning(this.home(session), turn, node.parent?.turn);
      if (this.node === node) this.pieces(pieces);
    } catch (error) {
      const words = error.code === "text_not_kept" ? "The server has not kept the text of this turn." : `The text cannot be read: ${error.message}.`;
      if (this.node === node) this.note(words);
    }
  }

  pieces(pieces) {
    const short = pieces.map(({ text, made }) => ({ text: text.length > EXCERPT ? `${text.slice(0, EXCERPT)}…` : text, made }));
    this.turnText.replaceChildren(...short.map(spanOf));
    this.turnText.classList.remove("unknown");
  }

  note(words) {
    this.turnText.textContent = words;
    this.turnText.classList.add("unknown");
  }

  /** Updates the buttons to what is possible now. */
  refresh(busy) {
    const turn = this.node?.turn;
    this.rewind.disabled = busy || !turn?.kept || turn.head;
    this.fork.disabled = !turn?.kept; // also during a turn: it forks the last commit
    this.read.disabled = !turn?.tokens;
  }

  focus() { [this.rewind, this.fork, this.read, this.download].find((button) => !button.disabled)?.focus(); }
}
