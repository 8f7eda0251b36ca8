// The texts of conversations, kept in this browser: the server keeps states, whose size is constant, and no text.
// Each version has the pieces that it added, and the version before it.

const PREFIX = "tidegate-text-";

/** Most characters kept in all: browsers give a page about five million bytes, at two a character. */
const MOST = 1_500_000;

/** What `version` added to `parent`; the oldest texts make room. */
export function keep(version, parent, pieces) {
  const words = pieces.filter((piece) => piece.text).map((piece) => [piece.text, piece.made ? 1 : 0]);
  const entry = JSON.stringify({ at: Date.now(), parent, words });
  try {
    makeRoom(MOST - entry.length);
    localStorage.setItem(PREFIX + version, entry);
  } catch { /* storage is forbidden, or full of other things: the page then says that it has no text */ }
}

/** What is known of a version: `{ parent, pieces }`, or null. */
export function recall(version) {
  try {
    const entry = JSON.parse(localStorage.getItem(PREFIX + version));
    return entry && { parent: entry.parent, pieces: entry.words.map(([text, made]) => ({ text, made: made === 1 })) };
  } catch { return null; }
}

/** No more of these versions. */
export function forget(versions) {
  try { for (const version of versions) localStorage.removeItem(PREFIX + version); } catch { /* nothing is kept */ }
}

/**
 * The text up to `version`, and the newest version on the way whose text is not here, if there is one: the pieces are
 * those after it. `turns` is a map from versions to turns.
 */
export function story(version, turns) {
  const parts = [];
  for (let at = version; at; ) {
    if (turns.get(at)?.tokens === 0) break; // nothing has been read yet
    const entry = recall(at);
    if (!entry) return { pieces: parts.flat(), missing: at };
    parts.unshift(entry.pieces);
    at = entry.parent;
  }
  return { pieces: parts.flat(), missing: null };
}

function makeRoom(most) {
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
    if (size <= most) return;
    localStorage.removeItem(key);
    size -= length;
  }
}
