// The texts of conversations, stored in this browser, because the server stores states and no text. Each version has the
// pieces that it added, and the version before it.

const PREFIX = "tidegate-text-";

/** Most characters stored: browsers allow a page about five million bytes, at two per character. */
const MAX_CHARACTERS = 1_500_000;

/** Stores what `version` added to `parent`, removing the oldest texts if necessary. */
export function keep(version, parent, pieces) {
  const words = pieces.filter((piece) => piece.text).map((piece) => [piece.text, piece.made ? 1 : 0]);
  const entry = JSON.stringify({ at: Date.now(), parent, words });
  try {
    makeRoom(MAX_CHARACTERS - entry.length);
    localStorage.setItem(PREFIX + version, entry);
  } catch { /* storage is forbidden or full: the page then shows that it has no text */ }
}

/** The stored text of a version as `{ parent, pieces }`, or null. */
export function recall(version) {
  try {
    const entry = JSON.parse(localStorage.getItem(PREFIX + version));
    return entry && { parent: entry.parent, pieces: entry.words.map(([text, made]) => ({ text, made: made === 1 })) };
  } catch { return null; }
}

/** Removes the texts of these versions. */
export function forget(versions) {
  try { for (const version of versions) localStorage.removeItem(PREFIX + version); } catch { /* nothing is stored */ }
}

/**
 * The text up to `version` as pieces. If an earlier part is not stored, `missing` is the newest version without text, and
 * the pieces are those after it. `turns` maps versions to turns.
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
