// Requests to the server, and the events that it streams back. Knows nothing of the page.

import { send } from "./key.js";

/** Splits a byte stream into the data of its events; chunks may end anywhere, within a character too. */
export class EventReader {
  constructor() {
    this.decoder = new TextDecoder();
    this.rest = "";
    this.data = [];
  }

  /** Takes bytes, returns the data of the events that they complete. */
  push(bytes) {
    this.rest += this.decoder.decode(bytes, { stream: true });
    const events = [];
    // A lone CR at the end may be the first half of CRLF: it waits for the next chunk.
    const line = /\r\n|\n|\r(?!$)/g;
    let from = 0;
    for (let end = line.exec(this.rest); end; end = line.exec(this.rest)) {
      this.take(this.rest.slice(from, end.index), events);
      from = line.lastIndex;
    }
    this.rest = this.rest.slice(from);
    return events;
  }

  take(line, events) {
    if (line === "") {
      if (this.data.length) events.push(this.data.join("\n"));
      this.data = [];
    } else if (line.startsWith("data:")) {
      this.data.push(line.slice(line[5] === " " ? 6 : 5));
    } // comments and other fields carry nothing here
  }
}

/** What the server said went wrong, in words for a person. */
export class ApiError extends Error {
  constructor(error, status, retryAfter) {
    super(error?.message || `the server answered ${status}`);
    this.param = error?.param ?? null;
    this.code = error?.code ?? null;
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** The error that a response that is not ok carries. */
export async function apiError(response) {
  let body = null;
  try { body = await response.json(); } catch { /* a proxy's page, say: the status has to do */ }
  return new ApiError(body?.error, response.status, response.headers.get("retry-after"));
}

/** Awaits a step of the network, whose failures are TypeErrors; they become an ApiError with `message`. */
export async function reached(step, message) {
  try {
    return await step;
  } catch (error) {
    throw error instanceof TypeError ? new ApiError({ message }, 0, null) : error;
  }
}

/** POSTs a completion request and yields each chunk; throws ApiError for an error before or within the stream. */
export async function* complete(request, signal, headers = {}) {
  const sent = send("/v1/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify(request),
    signal,
  });
  const response = await reached(sent, "the server cannot be reached");
  if (!response.ok) throw await apiError(response);
  const broken = "the stream broke off before its end";
  const events = new EventReader();
  const body = response.body.getReader();
  try {
    for (let part = await reached(body.read(), broken); !part.done; part = await reached(body.read(), broken)) {
      for (const data of events.push(part.value)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error, response.status, null);
        yield chunk;
      }
    }
  } finally {
    body.cancel().catch(() => {}); // lets the connection go; a stream that has failed is gone already
  }
  throw new ApiError({ message: broken }, response.status, null);
}
