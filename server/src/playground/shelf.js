// The list of a person's conversations, and uploading a snapshot.

import { listSessions, upload, setMetadata } from "./sessions.js";

/** Returns a conversation's name, or a substitute if it has none. */
export function nameOf(session) { return session.metadata.name || `Unnamed, ${session.id.slice(4, 10)}`; }

export class Shelf {
  /** `onError` is called with errors. */
  constructor(onError) {
    for (const id of ["sessions", "sessions-none", "sessions-more", "upload", "upload-file", "open-id"]) {
      this[id.replace(/-(.)/g, (_, letter) => letter.toUpperCase())] = document.getElementById(id);
    }
    this.onError = onError;
    this.list = [];
    this.current = null;
    this.next = null; // cursor of the next page
    this.upload.addEventListener("click", () => this.uploadFile.click());
    this.uploadFile.addEventListener("change", () => this.bring());
    this.sessionsMore.addEventListener("click", () => this.load(this.next).catch(onError));
    this.openId.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // otherwise it would generate
      this.follow();
    });
    this.openId.addEventListener("input", (event) => { if (event.inputType === "insertFromPaste") this.follow(); });
  }

  /** Reloads the list, or loads the page after `after`. */
  async load(after = null) {
    const page = await listSessions(after);
    this.list = after ? [...this.list, ...page.data] : page.data;
    this.next = page.next;
    this.draw();
  }

  /** Opens the conversation whose id or link was entered. */
  follow() {
    const id = /ses_[0-9a-f]{32}/.exec(this.openId.value)?.[0];
    this.openId.setAttribute("aria-invalid", String(!id));
    if (!id) return;
    this.openId.value = "";
    location.hash = id;
  }

  /** Marks the open conversation. */
  mark(id) {
    this.current = id;
    this.draw();
  }

  draw() {
    const now = Date.now() / 1000;
    this.sessions.replaceChildren(...this.list.map((session) => this.row(session, now)));
    this.sessionsNone.hidden = this.list.length > 0;
    this.sessionsMore.hidden = this.next === null;
  }

  row(session, now) {
    const link = document.createElement("a");
    link.href = `#${session.id}`;
    if (session.id === this.current) link.setAttribute("aria-current", "true");
    const name = document.createElement("span");
    name.className = "session-name";
    name.textContent = nameOf(session);
    const facts = document.createElement("span");
    facts.className = "session-facts";
    const fork = session.forked_from ? "fork, " : "";
    facts.textContent = `${fork}${session.tokens.toLocaleString()} tokens, ${ago(now - session.updated)}`;
    link.append(name, facts);
    const item = document.createElement("li");
    item.append(link);
    return item;
  }

  /** Uploads the chosen file into a new conversation and opens it. */
  async bring() {
    const [file] = this.uploadFile.files;
    if (!file) return;
    this.upload.disabled = true;
    try {
      const session = await upload(file);
      const name = file.name.replace(/\.tidegate$/, "").slice(0, 120);
      if (!session.metadata.name) await setMetadata(session.id, { ...session.metadata, name });
      location.hash = session.id;
    } catch (error) {
      if (error.param === "snapshot") error.message = `“${file.name}” is not a snapshot of this model: ${error.message}`;
      if (error.status === 413) error.message = `“${file.name}” is larger than any snapshot of this model`;
      this.onError(error);
    } finally {
      this.upload.disabled = false;
      this.uploadFile.value = ""; // allows choosing the same file again
    }
  }
}

function ago(seconds) {
  if (seconds < 60) return "now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(Date.now() - seconds * 1000).toLocaleDateString();
}
