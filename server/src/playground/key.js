// The API key of a server that wants one: kept until the tab is closed, and sent with each request. Knows nothing of the
// page, which hears `keywanted` on the window when a request was refused for want of it.

const NAME = "tidegate-key";

let inMemory = ""; // for browsers that forbid storage

/** The key that is kept, or "". */
export function keptKey() {
  try { return sessionStorage.getItem(NAME) ?? ""; } catch { return inMemory; }
}

/** Keeps a key for this tab; "" forgets it. */
export function keepKey(key) {
  inMemory = key;
  try { sessionStorage.setItem(NAME, key); } catch { /* it is in memory */ }
}

/** `fetch` from the server, with the key. */
export async function send(path, request = {}) {
  const key = keptKey();
  // Nothing else fits into a header, and no key is made of it.
  const fits = /^[\x21-\x7e]+$/.test(key);
  const headers = fits ? { ...request.headers, authorization: `Bearer ${key}` } : request.headers;
  const response = await fetch(path, { ...request, headers });
  if (response.status === 401) dispatchEvent(new Event("keywanted"));
  return response;
}

/** Hands the file at `path` to the person: a link alone could not bring the key. */
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
