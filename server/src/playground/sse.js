// Requests to the server, and the events that it streams. Knows nothing of the page.

import { send } from "./key.js";

/** Splits a byte stream into the data of its events. Chunks may end anywhere, even within a character. */
export class EventReader {
  constructor() {
    this.decoder = new TextDecoder();
    this.rest = "";
    this.data = [];
  }

  /** Adds bytes and returns the data of the events that they complete. */
  push(bytes) {
    this.rest += this.decoder.decode(bytes, { stream: true });
    const events = [];
    // A CR at the end may be half of CRLF, so it waits for the next chunk.
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
    } // comments and other fields are not used
  }
}

/** An error reported by the server. */
export class ApiError extends Error {
  constructor(error, status, retryAfter) {
    super(error?.message || `the server answered ${status}`);
    this.param = error?.param ?? null;
    this.code = error?.code ?? null;
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Returns the error of an unsuccessful response. */
export async function apiError(response) {
  let body = null;
  try { body = await response.json(); } catch { /* not JSON, for example a proxy's page: the status must suffice */ }
  return new ApiError(body?.error, response.status, response.headers.get("retry-after"));
}

/** Awaits a network operation. Turns its failures, which are TypeErrors, into an ApiError with `message`. */
export async function reached(step, message) {
  try {
    return await step;
  } catch (error) {
    throw error instanceof TypeError ? new ApiError({ message }, 0, null) : error;
  }
}

/** Reads a chunk of either of the two formats. */
function partOf(chunk) {
  const choice = chunk.choices?.[0] ?? {};
  return {
    text: choice.text ?? choice.delta?.content ?? "",
    tokens: choice.token_ids?.length ?? 0,
    promptTokens: (choice.prompt_token_ids ?? chunk.prompt_token_ids)?.length ?? 0,
    ending: choice.finish_reason ?? null,
    timings: choice.timings ?? null,
    usage: chunk.usage ?? null,
    session: chunk.session ?? null,
  };
}

/**
 * Sends a completion request, or a chat request if it has messages, and yields each part of the answer. The first part of a
 * turn has the version that it will create. Throws ApiError for an error before or within the stream.
 */
export async function* complete(request, signal, headers = {}) {
  const path = "messages" in request ? "/v1/chat/completions" : "/v1/completions";
  const sent = send(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body: JSON.stringify(request),
    signal,
  });
  const response = await reached(sent, "the server cannot be reached");
  if (!response.ok) throw await apiError(response);
  yield { ...partOf({}), version: response.headers.get("x-session-version") };
  const broken = "the stream ended too early";
  const events = new EventReader();
  const body = response.body.getReader();
  try {
    for (let part = await reached(body.read(), broken); !part.done; part = await reached(body.read(), broken)) {
      for (const data of events.push(part.value)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error, response.status, null);
        yield partOf(chunk);
      }
    }
  } finally {
    body.cancel().catch(() => {}); // frees the connection; a failed stream is already closed
  }
  throw new ApiError({ message: broken }, response.status, null);
}
