// This browser's copies of texts that the server does not keep (`--keep-text off`). Each version has the messages that it
// added, and the version before it.

const PREFIX = "tidegate-text-";

/** The most characters stored: browsers allow a page about five million bytes, at two per character. */
const MAX_CHARACTERS = 1_500_000;

/** Stores what `version` added to `parent`, removing the oldest texts if necessary. */
export function keep(version, parent, messages) {
  const words = messages.map(({ role, content }) => [content, role === "assistant" ? 1 : 0]);
  const entry = JSON.stringify({ at: Date.now(), parent, words });
  try {
    makeRoom(MAX_CHARACTERS - entry.length);
    localStorage.setItem(PREFIX + version, entry);
  } catch { /* storage is forbidden or full: the page then shows that it has no text */ }
}

/** Removes the texts of these versions. */
export function forget(versions) {
  try { for (const version of versions) localStorage.removeItem(PREFIX + version); } catch { /* nothing is stored */ }
}

/**
 * Returns the messages up to `version`. If an earlier part is not stored, `missing` is the newest version without a copy,
 * and the messages are those after it. `turns` maps versions to turns.
 */
export function copied(version, turns) {
  const parts = [];
  for (let at = version; at; ) {
    if (turns.get(at)?.tokens === 0) break; // nothing has been read yet
    const entry = recall(at);
    if (!entry) return { messages: parts.flat(), missing: at };
    const from = at;
    parts.unshift(entry.words.map(([content, made]) => ({ role: made ? "assistant" : "user", content, version: from })));
    at = entry.parent;
  }
  return { messages: parts.flat(), missing: null };
}

function recall(version) {
  try { return JSON.parse(localStorage.getItem(PREFIX + version)); } catch { return null; }
}

function makeRoom(max) {
  const entries = [];
  let size = 0;
  for (let i = 0; i < localStorage.length; i += 1) {
    const key = localStorage.key(i);
    if (!key.startsWith(PREFIX)) continue;
    const value = localStorage.getItem(key);
    size += value.length;
    entries.push([Number(/^\{"at":(\d+)/.exec(value)?.[1] ?? 0), key, value.length]);
  }
  entries.sort(([a], [b]) => a - b);
  for (const [, key, length] of entries) {
    if (size <= max) return;
    localStorage.removeItem(key);
    size -= length;
  }
}
