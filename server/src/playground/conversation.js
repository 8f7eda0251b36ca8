// A conversation that the server stores as a session: its turns and what a person can do with them. The address after
// `#` names it: nothing for the sheet alone, `conversation` for a new one, `ses_…` or `session=ses_…` for an existing one.

import { Card, fileName, spanOf } from "./card.js";
import { Chat } from "./chat.js";
import { Level } from "./level.js";
import { Reader } from "./reader.js";
import { remember, remembered } from "./remember.js";
import { deleteSession, downloadSnapshot, explained, forkFrom, getSession, getTurns, listForks, newSession, rewindTo, setMetadata } from "./sessions.js";
import { Shelf, nameOf } from "./shelf.js";
import { SHOWN_AT_FIRST, emptyStory, isKept, pieceOf, readStory } from "./story.js";
import { forget, keep } from "./texts.js";
import { Tree, title } from "./tree.js";
import { Turn } from "./turn.js";

const NEW = "conversation";

export class Conversation {
  /** `desk` is the playground, which provides the sheet, the status line and the buttons. */
  constructor(desk) {
    this.desk = desk;
    const ids = ["session-name", "session-delete", "missing", "missing-text", "earlier", "settings", "views", "delete-dialog",
      "delete-what", "to-conversation"];
    for (const id of ids) this[id.replace(/-(.)/g, (_, letter) => letter.toUpperCase())] = document.getElementById(id);
    this.placeholder = desk.sheet.write.placeholder;
    this.on = false;
    this.session = null; // the server's last description; null until something is written
    this.turns = new Map();
    this.forks = new Map(); // from versions to the sessions that were forked from them
    this.story = emptyStory(); // of the current version
    this.shown = SHOWN_AT_FIRST; // tokens of it that are shown
    this.selected = null;
    this.running = null; // the turn being generated
    this.hasTemplate = false; // whether the model can chat
    this.wanted = remembered("view"); // "chat", or anything else for text
    this.sheetPieces = []; // the separate sheet, while a conversation is open
    this.visit = 0;
    this.tree = new Tree((version, wantsButtons) => this.select(version, wantsButtons));
    this.card = new Card();
    this.level = new Level();
    this.reader = new Reader();
    this.chat = new Chat(desk.sheet);
    this.shelf = new Shelf((error) => this.fail(error));
    this.listen();
  }

  listen() {
    addEventListener("hashchange", () => this.follow());
    document.addEventListener("visibilitychange", () => this.look());
    this.desk.sheet.onFixed = () => this.desk.say("The model has already read this text. To change it, rewind to an earlier turn.");
    this.card.rewind.addEventListener("click", () => this.act(() => this.goTo(this.selected)));
    this.card.fork.addEventListener("click", () => this.act(() => this.branchOff(this.selected)));
    this.card.read.addEventListener("click", () => this.act(() => this.read()));
    this.card.download.addEventListener("click", (event) => {
      event.preventDefault(); // a plain link could send no key, and the server would name the file
      const { node } = this.card;
      this.act(() => downloadSnapshot(this.card.home(this.session), node.turn.version, fileName(this.session, node)));
    });
    this.earlier.addEventListener("click", () => this.act(async () => {
      this.shown *= 4;
      await this.readAgain();
      this.display(this.desk.sheet.fresh);
    }));
    for (const button of this.views.querySelectorAll("button")) {
      button.addEventListener("click", () => this.act(() => this.turnView(button.value)));
    }
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
  get chats() { return this.on && this.hasTemplate && this.wanted === "chat"; }
  get canTakeBack() { return Boolean(this.head && this.turns.get(this.head.parent)?.kept); }
  get canRepeat() { return this.canTakeBack && (this.typed !== "" || this.head.prompt_tokens === 0); }

  /** The text that the person wrote in the last turn. */
  get typed() {
    const own = this.story.messages.filter((message) => message.version === this.head.version && message.role !== "assistant");
    return own.map((message) => message.content ?? "").join("");
  }

  /** The address of what this page shows, after `#`. */
  get place() { return this.on ? this.session?.id ?? NEW : ""; }

  /** Called when the model is known: only one with a template can chat. */
  offerChat(hasTemplate) {
    this.hasTemplate = hasTemplate;
    this.views.hidden = !hasTemplate;
    if (this.on && !this.desk.running) this.display(this.desk.sheet.fresh);
  }

  /** Opens what the address names. */
  async follow() {
    const hash = location.hash.slice(1).replace(/^session=/, "");
    const isOurs = hash === "" || hash === NEW || hash.startsWith("ses_");
    if (!isOurs) return this.resetAddress(); // a link within the page, which has already worked
    const visit = ++this.visit;
    this.desk.halt();
    await this.desk.ended;
    if (visit !== this.visit || (hash === this.place && this.on === (hash !== ""))) return;
    this.desk.forgive();
    this.turnTo(hash !== "");
    if (hash === NEW) this.wanted = remembered("view");
    if (!this.on) return this.desk.refresh();
    this.show(null, [], []);
    this.display(hash === NEW ? this.desk.takeDraft(NEW) : "");
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
    for (const link of document.querySelectorAll(".modes a[href*='#']")) {
      if ((link.hash !== "") === on) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (on) this.settings.open = false;
    else {
      document.title = "Tidegate";
      document.body.classList.remove("chatting");
      this.missing.hidden = true;
      sheet.write.placeholder = this.placeholder;
      sheet.fixed = 0;
      this.chat.show([]);
      sheet.set(this.sheetPieces);
      this.desk.say("Ready");
    }
  }

  async open(id, visit) {
    try {
      const [session, turns, forks] = await this.fetch(id);
      const story = await readStory(id, turns.find((turn) => turn.head), new Map(turns.map((turn) => [turn.version, turn])));
      if (visit !== this.visit) return;
      this.wanted = session.metadata.view ?? "text";
      this.shown = SHOWN_AT_FIRST;
      this.story = story;
      this.show(session, turns, forks);
      this.display(this.desk.takeDraft(id));
      this.resetAddress();
      this.desk.say("Ready");
    } catch (error) {
      if (visit !== this.visit) return;
      this.resetAddress();
      throw error;
    }
  }

  fetch(id) { return Promise.all([getSession(id), getTurns(id), listForks(id)]); }

  /** Reloads the open conversation, and its text if that has changed elsewhere. */
  async reload() {
    const { visit, session } = this;
    if (!session) return;
    const found = await this.fetch(session.id);
    if (visit !== this.visit) return;
    this.show(...found);
    if (this.story.version !== this.session.version) await this.readAgain();
  }

  /** Reads the text of the current version again. */
  async readAgain() {
    const { visit, session } = this;
    const story = session ? await readStory(session.id, this.head, this.turns, this.shown) : emptyStory();
    if (visit === this.visit) this.story = story;
  }

  /** Shows the current state, because another page may have changed the conversation. */
  async look() {
    if (!this.on || document.hidden || this.desk.running || !this.session) return;
    const before = this.session.version;
    try {
      await Promise.all([this.reload(), this.shelf.load()]);
      if (this.session.version !== before && !this.desk.running) this.display(this.desk.sheet.fresh);
    } catch { /* the next action reports the problem */ }
  }

  show(session, turns, forks) {
    this.session = session;
    this.turns = new Map(turns.map((turn) => [turn.version, turn]));
    this.forks = Map.groupBy(forks, (fork) => fork.forked_from.version);
    if (!session) this.story = emptyStory();
    this.sessionName.value = session ? session.metadata.name ?? "" : "";
    document.title = session ? `${nameOf(session)} – Tidegate` : "Tidegate";
    this.select(session?.version ?? null, false);
    const path = [];
    for (let at = this.head; at; at = this.turns.get(at.parent)) path.unshift(at.tokens);
    this.level.show(path.length ? path : [0], session?.state_bytes ?? null);
    this.shelf.mark(session?.id ?? null);
    this.toConversation.href = `#${session?.id ?? NEW}`; // the link back from the sheet returns here
    this.desk.refresh();
  }

  /** Shows the text as a sheet or as messages, followed by the unsent draft. */
  display(draft) {
    const { sheet } = this.desk;
    document.body.classList.toggle("chatting", this.chats);
    for (const button of this.views.querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String((button.value === "chat") === this.chats));
    }
    this.note();
    sheet.write.placeholder = this.chats ? "Write a message" : this.story.missing ? "And then…" : this.placeholder;
    this.chat.show(this.chats ? this.story.messages : []);
    sheet.show(this.chats ? [] : this.story.pieces, draft);
    this.desk.refresh();
  }

  /** Says which part of the text is not shown, and why. */
  note() {
    const { kept, skipped, missing } = this.story;
    const count = (tokens) => `the first ${tokens.toLocaleString()} tokens`;
    const unknown = this.turns.get(missing);
    this.missing.hidden = kept && skipped === 0;
    this.earlier.hidden = skipped === 0;
    if (skipped) this.missingText.textContent = `This page does not show ${count(skipped)}. `;
    else if (missing) {
      this.missingText.textContent = `The server keeps no text of this conversation, and this browser has no copy of ${unknown ? count(unknown.tokens) : "its beginning"}. The model’s state contains them.`;
    } else this.missingText.textContent = "The server keeps no text of this conversation. You see this browser’s copy; other browsers have none.";
  }

  /** Changes between text and chat; a new conversation keeps the choice. */
  async turnView(view) {
    this.wanted = view;
    remember("view", view);
    const draft = this.desk.sheet.fresh;
    await this.readAgain(); // messages that were just written have no text of the template yet
    this.display(draft);
    this.desk.sheet.write.focus({ preventScroll: true });
  }

  select(version, wantsButtons) {
    this.selected = version;
    this.tree.show([...this.turns.values()], version, this.forks);
    const node = this.tree.places.nodes.get(version);
    this.card.show(this.session, node, this.forks.get(version) ?? [], this.story.messages);
    this.refresh(this.desk.running !== null);
    this.tree.reveal(version);
    if (wantsButtons) this.card.focus();
  }

  /** Shows the whole text of the selected version. */
  async read() {
    const { node } = this.card;
    const { pieces, kept, skipped } = await readStory(this.card.home(this.session), node.turn, this.turns);
    const first = skipped ? [`… (${skipped.toLocaleString()} tokens before)\n`] : [];
    const contents = pieces.length ? [...first, ...pieces.map(spanOf)] : [kept ? "" : "The server has not kept the text of this version."];
    this.reader.open(`${nameOf(this.session)}: ${title(node)}`, contents);
  }

  /** Updates the buttons to what is possible now. */
  refresh(busy) {
    this.card.refresh(busy);
    this.sessionDelete.disabled = busy || !this.session;
    this.sessionName.disabled = !this.session;
    for (const button of this.views.querySelectorAll("button")) button.disabled = busy;
  }

  /** Runs a button's action and reports failures. */
  async act(work) {
    this.desk.forgive();
    try {
      await work();
      return true;
    } catch (error) {
      this.fail(error);
      if (error.status === 404 || error.status === 412) await this.look();
      return false;
    }
  }

  fail(error) { this.desk.complain(error); }

  /** Moves the head to `version`. */
  async goTo(version, draft = this.desk.sheet.fresh) {
    await rewindTo(this.session.id, version);
    await this.reload();
    this.display(draft);
    this.desk.say("Rewound. What you write now starts a new branch; the old one stays.");
    this.shelf.load().catch((error) => this.fail(error));
  }

  async branchOff(version) {
    const name = `${nameOf(this.session).replace(/ \(fork\)$/, "")} (fork)`;
    const session = await forkFrom(this.card.home(this.session), version, { ...this.session.metadata, name: name.slice(-512) });
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
    // Forks share versions and therefore this browser's copies.
    if (!this.shelf.list.some((one) => one.id !== id && related(one))) forget(versions);
    location.hash = NEW;
  }

  /** Undoes the last turn, restoring its typed text as a draft; returns whether that succeeded. */
  takeBack() {
    const typed = this.typed;
    return this.act(async () => {
      await this.goTo(this.head.parent, typed + this.desk.sheet.fresh);
      this.desk.say("Undone; the branch stays in the tree.");
    });
  }

  /** Turns a request, whose prompt is only the new text, into a turn of this conversation. */
  prepare({ prompt, ...request }) {
    const turn = this.session ? { ...request, session: this.session.id } : request;
    if (this.chats) return { messages: prompt ? [{ role: "user", content: prompt }] : [], ...turn };
    return prompt ? { prompt, ...turn } : turn; // without a prompt, the model continues its own text
  }

  /** Runs a turn. Yields the parts of the answer. */
  async *answer(request, signal) {
    const turn = this.running = new Turn(request.prompt);
    if (!this.session) await this.begin(turn.typed);
    for await (const part of turn.run(this.session, this.prepare(request), signal)) {
      this.level.grow(turn.tokens);
      yield part;
    }
  }

  async begin(text) {
    const words = text.trim().replace(/\s+/g, " ");
    const name = words.length > 60 ? `${words.slice(0, 60).replace(/\s\S*$/, "")}…` : words;
    const session = await newSession(this.chats ? { name, view: "chat" } : { name });
    this.show(session, await getTurns(session.id), []);
    this.resetAddress();
  }

  /** After a turn, however it ended: shows what the server has stored. `arrivals` is the text that the page showed. */
  async settle(failure, arrivals) {
    const turn = this.running;
    this.running = null;
    if (!turn) return;
    try {
      if (failure) await turn.keep(failure, arrivals);
      if (turn.info) await this.add(turn, arrivals.text);
      await Promise.all([this.reload(), this.shelf.load()]);
    } catch (error) {
      this.fail(explained(error));
    }
    this.display(turn.info ? "" : turn.typed);
  }

  /** Adds a turn's messages to the story. */
  async add({ typed, info }, answer) {
    const messages = [{ role: "user", content: typed }, { role: "assistant", content: answer }].filter((message) => message.content);
    const added = messages.map((message) => ({ ...message, version: info.version }));
    const last = this.story.messages.at(-1);
    if (typed === "" && last?.role === "assistant") last.content = (last.content ?? "") + answer; // which goes on
    else this.story.messages.push(...added);
    this.story.pieces.push(...added.map(pieceOf));
    this.story.version = info.version;
    if (info.tokens === 0 || await isKept(info.id, info.version)) return;
    keep(info.version, info.parent, added);
    this.story.kept = false;
  }
}
