// What this browser keeps across reloads: settings for all tabs ("local"), unsent text for one tab ("session").

const PREFIX = "tidegate-";

/** The stored value, or null. */
export function remembered(name, kind = "local") {
  try { return JSON.parse(globalThis[`${kind}Storage`].getItem(PREFIX + name)); } catch { return null; }
}

export function remember(name, value, kind = "local") {
  try { globalThis[`${kind}Storage`].setItem(PREFIX + name, JSON.stringify(value)); } catch { /* storage is forbidden or full: a reload then forgets */ }
}
