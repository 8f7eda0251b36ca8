// A conversation that the server stores as a session: its turns and what a person can do with them. The address after
// `#` names it: nothing for the sheet alone, `conversation` for a new one, `ses_…` for an existing one.

import { keptKey } from "./key.js";
import { Level } from "./level.js";
import { deleteSession, downloadSnapshot, explained, forkFrom, getSession, getTurns, newSession, rewindTo, setMetadata, snapshotPath } from "./sessions.js";
import { Shelf, nameOf } from "./shelf.js";
import { complete } from "./sse.js";
import { forget, keep, recall, story } from "./texts.js";
import { Tree, title } from "./tree.js";

const NEW = "conversation";

export class Conversation {
  /** `desk` is the playground, which provides the sheet, the status line and the buttons. */
  constructor(desk) {
    this.desk = desk;
    const ids = ["session-name", "session-delete", "turn-card", "turn-title", "turn-facts", "turn-text", "rewind", "fork",
      "download", "missing", "settings", "delete-dialog", "delete-what"];
    for (const id of ids) this[id.replace(/-(.)/g, (_, letter) => letter.toUpperCase())] = document.getElementById(id);
    this.way = document.querySelector(".modes a:last-child");
    this.placeholder = desk.sheet.write.placeholder;
    this.on = false;
    this.session = null; // the server's last description; null until something is written
    this.turns = new Map();
    this.selected = null;
    this.running = null; // the turn being generated
    this.sheetPieces = []; // the separate sheet, while a conversation is open
    this.visit = 0;
    this.tree = new Tree((version, wantsButtons) => this.select(version, wantsButtons));
    this.level = new Level();
    this.shelf = new Shelf((error) => this.fail(error));
    this.listen();
  }

  listen() {
    addEventListener("hashchange", () => this.follow());
    document.addEventListener("visibilitychange", () => this.look());
    this.desk.sheet.onFixed = () => this.desk.say("The model has already read this text. To change it, rewind to an earlier turn.");
    this.rewind.addEventListener("click", () => this.act(() => this.goTo(this.selected)));
    this.fork.addEventListener("click", () => this.act(() => this.branchOff(this.selected)));
    this.download.addEventListener("click", (event) => {
      if (!keptKey()) return; // the link itself suffices
      event.preventDefault();
      this.act(() => downloadSnapshot(this.session.id, this.selected));
    });
    this.sessionName.addEventListener("change", () => this.act(() => this.rename(this.sessionName.value.trim())));
    this.sessionName.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
        event.preventDefault(); // otherwise it would generate
        this.sessionName.blur();
      }
    });
    this.sessionDelete.addEventListener("click", () => {
      this.deleteWhat.textContent = `“${nameOf(this.session)}” and its ${this.turns.size} versions will be deleted permanently. Forks of it stay.`;
      this.deleteDialog.showModal();
    });
    this.deleteDialog.addEventListener("close", () => {
      if (this.deleteDialog.returnValue === "delete") this.act(() => this.remove());
      this.deleteDialog.returnValue = "";
    });
  }

  get head() { return this.session && this.turns.get(this.session.version); }
  get isEmpty() { return !this.session || this.session.tokens === 0; }
  get canTakeBack() { return Boolean(this.head && this.turns.get(this.head.parent)?.kept); }
  get canRepeat() { return this.canTakeBack && recall(this.head.version) !== null; }

  /** What this page shows, as in its address. */
  get place() { return this.on ? this.session?.id ?? NEW : ""; }

  /** Opens what the address names. */
  async follow() {
    const hash = location.hash.slice(1);
    const isOurs = hash === "" || hash === NEW || hash.startsWith("ses_");
    if (!isOurs) return this.resetAddress(); // a link within the page, which has already worked
    const visit = ++this.visit;
    this.desk.running?.abort();
    await this.desk.ended;
    if (visit !== this.visit || (hash === this.place && this.on === (hash !== ""))) return;
    this.desk.forgive();
    this.turnTo(hash !== "");
    if (!this.on) return this.desk.refresh();
    this.show(null, []);
    this.showText("");
    try {
      const shelf = this.shelf.load();
      shelf.catch(() => {}); // reported below
      if (hash !== NEW) await this.open(hash, visit);
      await shelf;
    } catch (error) {
      if (visit === this.visit) this.fail(error);
    }
  }

  /** Resets the address to what the page shows. */
  resetAddress() { history.replaceState(null, "", this.place === "" ? location.pathname : `#${this.place}`); }

  turnTo(on) {
    const { sheet } = this.desk;
    if (this.on === on) return;
    if (on) this.sheetPieces = sheet.pieces;
    this.on = on;
    this.session = null;
    document.body.classList.toggle("talking", on);
    for (const link of document.querySelectorAll(".modes a")) {
      if ((link.hash !== "") === on) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (on) this.settings.open = false;
    else {
      document.title = "Tidegate";
      this.missing.hidden = true;
      sheet.write.placeholder = this.placeholder;
      sheet.fixed = 0;
      sheet.set(this.sheetPieces);
      this.desk.say("Ready");
    }
  }

  async open(id, visit) {
    try {
      const [session, turns] = await Promise.all([getSession(id), getTurns(id)]);
      if (visit !== this.visit) return;
      this.show(session, turns);
      this.showText("");
      this.desk.say(this.isEmpty ? "Ready" : "Ready to continue");
    } catch (error) {
      if (visit !== this.visit) return;
      this.resetAddress();
      throw error;
    }
  }

  /** Reloads the open conversation. */
  async reload() {
    const { visit, session } = this;
    if (!session) return;
    const [now, turns] = await Promise.all([getSession(session.id), getTurns(session.id)]);
    if (visit === this.visit) this.show(now, turns);
  }

  /** Called when the page becomes visible again: another page may have continued the conversation. */
  async look() {
    if (!this.on || document.hidden || this.desk.running || !this.session) return;
    const [before, draft] = [this.session.version, this.desk.sheet.fresh];
    try {
      await Promise.all([this.reload(), this.shelf.load()]);
      if (this.session.version !== before && !this.desk.running) this.showText(draft);
    } catch { /* the next action reports the problem */ }
  }

  show(session, turns) {
    this.session = session;
    this.turns = new Map(turns.map((turn) => [turn.version, turn]));
    this.selected = session?.version ?? null;
    this.sessionName.value = session ? session.metadata.name ?? "" : "";
    document.title = session ? `${nameOf(session)} – Tidegate` : "Tidegate";
    this.tree.show(turns, this.selected);
    this.card();
    const path = [];
    for (let at = this.head; at; at = this.turns.get(at.parent)) path.unshift(at.tokens);
    this.level.show(path.length ? path : [0], session?.state_bytes ?? null);
    this.shelf.mark(session?.id ?? null);
    this.way.href = `#${session?.id ?? NEW}`; // the link back from the sheet returns here
    this.desk.refresh();
  }

  /** Writes the conversation onto the sheet, followed by the unsent draft. */
  showText(draft) {
    const { pieces, missing } = this.session ? story(this.session.version, this.turns) : { pieces: [], missing: null };
    const unknown = missing && this.turns.get(missing);
    this.missing.hidden = !missing;
    const what = unknown ? `of the first ${unknown.tokens.toLocaleString()} tokens` : "before this";
    this.missing.textContent = `The text ${what} is not stored: servers store no text, and this browser does not have it. The model's state contains it.`;
    this.desk.sheet.write.placeholder = missing ? "And then…" : this.placeholder;
    this.desk.sheet.show(pieces, draft);
    this.desk.refresh();
  }

  select(version, wantsButtons) {
    this.selected = version;
    this.tree.show([...this.turns.values()], version);
    this.card();
    if (wantsButtons) [this.rewind, this.fork, this.download].find((button) => !button.disabled)?.focus();
  }

  /** Describes the selected turn and what can be done with it. */
  card() {
    const node = this.tree.places.nodes.get(this.selected);
    this.turnCard.hidden = !node;
    if (!node) return;
    const { turn } = node;
    this.turnTitle.textContent = turn.label ? `${title(node)}: ${turn.label}` : title(node);
    const facts = [`${turn.tokens.toLocaleString()} tokens`];
    if (turn.prompt_tokens || turn.completion_tokens) facts.push(`${turn.prompt_tokens} read`, `${turn.completion_tokens} written`);
    facts.push(new Date(turn.time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }));
    if (!turn.kept) facts.push("no longer stored");
    this.turnFacts.textContent = facts.join(", ");
    this.excerpt(turn);
    this.rewind.textContent = turn.head ? "You are here" : "Rewind here";
    this.download.href = turn.kept && turn.tokens > 0 ? snapshotPath(this.session.id, turn.version) : "";
    if (!(turn.kept && turn.tokens > 0)) this.download.removeAttribute("href");
    this.refresh(this.desk.running !== null);
  }

  excerpt(turn) {
    const known = recall(turn.version);
    const spans = (known?.pieces ?? []).map((piece) => {
      const span = document.createElement("span");
      if (piece.made) span.className = "made";
      span.textContent = piece.text.length > 160 ? `${piece.text.slice(0, 160)}…` : piece.text;
      return span;
    });
    if (known) this.turnText.replaceChildren(...spans);
    else this.turnText.textContent = turn.tokens === 0 ? "Nothing has been read yet." : "This version was made elsewhere; the server does not store its text.";
    this.turnText.classList.toggle("unknown", !known);
  }

  /** Updates the buttons to what is possible now. */
  refresh(busy) {
    const turn = this.turns.get(this.selected);
    this.rewind.disabled = busy || !turn?.kept || turn.head;
    this.fork.disabled = !turn?.kept; // also during a turn: it forks the last commit
    this.sessionDelete.disabled = busy || !this.session;
    this.sessionName.disabled = !this.session;
  }

  /** Runs a button's action and reports failures. */
  async act(work) {
    this.desk.forgive();
    try {
      await work();
      return true;
    } catch (error) {
      this.fail(error);
      if (error.status === 404 || error.status === 412) await this.reload().catch(() => {});
      return false;
    }
  }

  fail(error) { this.desk.complain(error); }

  /** Moves the head to `version`. */
  async goTo(version, draft = this.desk.sheet.fresh) {
    await rewindTo(this.session.id, version);
    await this.reload();
    this.showText(draft);
    this.desk.say("Rewound. What you write now starts a new branch; the old one stays.");
    this.shelf.load().catch((error) => this.fail(error));
  }

  async branchOff(version) {
    const name = `${nameOf(this.session).replace(/ \(fork\)$/, "")} (fork)`;
    const session = await forkFrom(this.session.id, version, { ...this.session.metadata, name: name.slice(-512) });
    location.hash = session.id;
  }

  async rename(name) {
    this.session = await setMetadata(this.session.id, { ...this.session.metadata, name });
    await this.shelf.load();
  }

  async remove() {
    const [id, versions] = [this.session.id, [...this.turns.keys()]];
    const related = (one) => one.forked_from?.session === id || this.session.forked_from?.session === one.id
      || (one.forked_from && one.forked_from.session === this.session.forked_from?.session);
    await deleteSession(id);
    // Forks share versions and therefore texts.
    if (!this.shelf.list.some((one) => one.id !== id && related(one))) forget(versions);
    location.hash = NEW;
  }

  /** Undoes the last turn, restoring its typed text as a draft; returns whether that succeeded. */
  takeBack() {
    const typed = recall(this.head.version)?.pieces.find((piece) => !piece.made)?.text ?? "";
    return this.act(async () => {
      await this.goTo(this.head.parent, typed + this.desk.sheet.fresh);
      this.desk.say("Undone; the branch stays in the tree.");
    });
  }

  /** Runs a turn, sending only the new text. Yields the chunks of the answer. */
  async *answer(request, signal) {
    const typed = request.prompt;
    const run = { typed, made: "", tokens: 0, info: null, request, headers: {} };
    this.running = run;
    if (!this.session) await this.begin(typed);
    if (typed === "") delete request.prompt; // continues the model's own text
    Object.assign(request, { session: this.session.id, on_disconnect: "commit" });
    run.tokens = this.session.tokens;
    run.headers = { "if-match": this.session.version, "idempotency-key": randomKey() };
    try {
      for await (const chunk of complete(request, signal, run.headers)) {
        this.note(run, chunk);
        yield chunk;
      }
    } catch (error) {
      throw explained(error);
    }
  }

  async begin(text) {
    const name = text.trim().replace(/\s+/g, " ");
    const session = await newSession(name.length > 60 ? `${name.slice(0, 60).replace(/\s\S*$/, "")}…` : name);
    this.show(session, await getTurns(session.id));
    this.resetAddress();
  }

  note(run, chunk) {
    const choice = chunk.choices?.[0];
    run.made += choice?.text ?? "";
    run.tokens += (choice?.token_ids?.length ?? 0) + (choice?.prompt_token_ids?.length ?? 0);
    run.info = chunk.session ?? run.info;
    this.level.grow(run.tokens);
  }

  /** After a turn, however it ended: stores its text and reloads the conversation. */
  async settle(failure) {
    const run = this.running;
    this.running = null;
    if (!run) return;
    try {
      if (failure && !run.info && isBroken(failure)) await this.recover(run);
      const words = [{ text: run.typed, made: false }, { text: run.made, made: true }];
      if (run.info) keep(run.info.version, run.info.parent, words);
      if (run.info && failure?.name === "AbortError") this.desk.say("Stopped; the text so far is stored.");
      await Promise.all([this.reload(), this.shelf.load()]);
    } catch (error) {
      this.fail(explained(error));
    }
    this.showText(run.info ? "" : run.typed);
  }

  /** After a broken stream: the server commits what it had generated, and returns it when the request is repeated. */
  async recover(run) {
    const { id, version } = this.session;
    let session = await getSession(id);
    for (let tries = 0; session.in_use && tries < 50; tries += 1) {
      await new Promise((resolve) => { setTimeout(resolve, 60); });
      session = await getSession(id);
    }
    if (session.version === version) return; // nothing was committed
    run.made = "";
    for await (const chunk of complete(run.request, AbortSignal.timeout(10_000), run.headers)) this.note(run, chunk);
  }
}

/** Whether the stream broke, so that the outcome of the turn is unknown. */
function isBroken(failure) { return failure.name === "AbortError" || failure.status === 0 || failure.status === 200; }

function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
