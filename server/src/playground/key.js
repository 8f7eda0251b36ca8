// The API key, stored until the tab is closed and sent with each request. Knows nothing of the page, which receives
// the event `keywanted` on the window when a request was refused for lack of a key.

const NAME = "tidegate-key";

let inMemory = ""; // for browsers that forbid storage

/** The stored key, or "". */
export function keptKey() {
  try { return sessionStorage.getItem(NAME) ?? ""; } catch { return inMemory; }
}

/** Stores a key for this tab; "" removes it. */
export function keepKey(key) {
  inMemory = key;
  try { sessionStorage.setItem(NAME, key); } catch { /* it is in memory */ }
}

/** Calls `fetch` with the key. */
export async function send(path, request = {}) {
  const key = keptKey();
  // Other characters cannot occur in a key or in a header.
  const fits = /^[\x21-\x7e]+$/.test(key);
  const headers = fits ? { ...request.headers, authorization: `Bearer ${key}` } : request.headers;
  const response = await fetch(path, { ...request, headers });
  if (response.status === 401) dispatchEvent(new Event("keywanted"));
  return response;
}

/** Downloads the file at `path`; a plain link could not send the key. */
export async function download(path, name) {
  const response = await send(path);
  if (!response.ok) return response;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  return response;
}
