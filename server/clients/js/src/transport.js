// Requests and their retries. A request is `{method, path, body, headers, repeatable, signal, timeout}`.

import { ConnectionFailed, errorOf } from './errors.js';

const RETRIED = new Set([408, 409, 429, 500, 502, 503, 504]);
// Statuses after which the server has certainly done nothing.
const REFUSED_EARLY = new Set([409, 429, 503]);
const LONGEST_WAIT = 60;

export class Transport {
  constructor({ baseURL, apiKey, maxRetries = 2, timeout = 600_000, fetch, sleep } = {}) {
    const environment = globalThis.process?.env ?? {};
    const url = baseURL ?? environment.TIDEGATE_BASE_URL ?? 'http://127.0.0.1:8080';
    const key = apiKey ?? environment.TIDEGATE_API_KEY;
    this.url = url.replace(/\/+$/, '').replace(/\/v1$/, '');
    this.headers = key ? { authorization: `Bearer ${key}` } : {};
    this.maxRetries = maxRetries;
    this.timeout = timeout;
    this.fetch = fetch ?? globalThis.fetch.bind(globalThis);
    this.sleep = sleep ?? ((seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000)));
  }

  /** Makes one attempt. Rejects with a `ConnectionFailed`, or with the reason of `signal`. */
  async once({ method, path, body, headers = {}, signal, timeout = true }) {
    const bytes = body instanceof Uint8Array || body instanceof ArrayBuffer || body instanceof Blob;
    const type = body === undefined ? {} : { 'content-type': bytes ? 'application/octet-stream' : 'application/json' };
    const limits = [signal, timeout ? AbortSignal.timeout(this.timeout) : undefined].filter(Boolean);
    try {
      return await this.fetch(this.url + path, {
        method,
        headers: { ...this.headers, ...type, ...headers },
        body: body === undefined || bytes ? body : JSON.stringify(body),
        signal: limits.length ? AbortSignal.any(limits) : undefined,
      });
    } catch (error) {
      signal?.throwIfAborted();
      throw new ConnectionFailed(`no answer from ${this.url}: ${error?.cause?.message ?? error}`, { cause: error });
    }
  }

  /** Sends a request, retries it where that can help, and reads the answer with `read`. Throws the error of a refusal. */
  async send(call, read = (response) => response.json()) {
    for (let attempt = 0; ; attempt += 1) {
      let failure;
      try {
        const response = await this.once(call);
        if (response.ok) {
          return await read(response);
        }
        // An earlier attempt, whose answer was lost, has deleted it.
        if (call.method === 'DELETE' && response.status === 404 && attempt > 0) return undefined;
        failure = response;
      } catch (error) {
        call.signal?.throwIfAborted();
        failure = error instanceof ConnectionFailed ? error : new ConnectionFailed(`the answer broke: ${error}`, { cause: error });
      }
      const wait = this.pause(call, attempt, failure);
      if (wait === null) throw failure instanceof ConnectionFailed ? failure : await errorOf(failure);
      await failure.body?.cancel?.();
      await this.sleep(wait);
    }
  }

  /** Returns the seconds to wait before the next attempt, or null if a retry cannot help or could repeat an effect. */
  pause(call, attempt, failure) {
    if (attempt >= this.maxRetries) return null;
    const repeatable = call.repeatable ?? true;
    const backoff = Math.min(0.5 * 2 ** attempt, 8) * (0.75 + Math.random() / 4);
    if (failure instanceof ConnectionFailed) {
      const unsent = ['ECONNREFUSED', 'ENOTFOUND', 'UND_ERR_CONNECT_TIMEOUT'].includes(failure.cause?.cause?.code);
      return repeatable || unsent ? backoff : null;
    }
    if (failure.headers.get('x-should-retry') === 'false' || !RETRIED.has(failure.status)) return null;
    if (!repeatable && !REFUSED_EARLY.has(failure.status)) return null;
    const asked = failure.headers.get('retry-after');
    const wait = asked === null || asked === '' ? NaN : Number(asked);
    // Jitter on top, so that clients that were refused together do not all return together.
    return wait >= 0 && wait <= LONGEST_WAIT ? wait + Math.random() / 4 : backoff;
  }
}

/** Returns the headers with an idempotency key. */
export function withKey(headers = {}, key = undefined) {
  return { ...headers, 'idempotency-key': key ?? `js-${crypto.randomUUID()}` };
}
