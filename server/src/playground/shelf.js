// The list of a person's conversations, and uploading a snapshot.

import { listSessions, upload, setMetadata } from "./sessions.js";

/** A conversation's name, or a substitute if it has none. */
export function nameOf(session) { return session.metadata.name || `Unnamed, ${session.id.slice(4, 10)}`; }

export class Shelf {
  /** `onError` is called with errors. */
  constructor(onError) {
    for (const id of ["sessions", "sessions-none", "sessions-more", "upload", "upload-file"]) {
      this[id.replace(/-(.)/g, (_, letter) => letter.toUpperCase())] = document.getElementById(id);
    }
    this.onError = onError;
    this.list = [];
    this.current = null;
    this.last = null; // cursor of the next page
    this.upload.addEventListener("click", () => this.uploadFile.click());
    this.uploadFile.addEventListener("change", () => this.bring());
    this.sessionsMore.addEventListener("click", () => this.load(this.last).catch(onError));
  }

  /** Reloads the list, or loads the page after `after`. */
  async load(after = null) {
    const page = await listSessions(after);
    this.list = after ? [...this.list, ...page.data] : page.data;
    this.last = page.has_more ? page.last_id : null;
    this.draw();
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
    this.sessionsMore.hidden = this.last === null;
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
      await setMetadata(session.id, { name: file.name.replace(/\.tidegate$/, "").slice(0, 120) });
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
