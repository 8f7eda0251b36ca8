// Client for Tidegate: conversations that the server keeps, forks, rewinds and moves.

import { Session } from './session.js';
import { Transport, withKey } from './transport.js';
import { wireNames } from './turn.js';

export {
  APIError, BadRequest, Conflict, ConnectionFailed, Forbidden, Gone, KeyReused, NotFound, RateLimited, ServerError,
  StreamDiverged, TidegateError, Unauthorized, VersionMismatch,
} from './errors.js';
export { Session } from './session.js';
export { Stream } from './stream.js';

/** A server. The address and the key default to the environment variables TIDEGATE_BASE_URL and TIDEGATE_API_KEY. */
export class Tidegate {
  #transport;

  constructor(options) {
    this.#transport = new Transport(options);
  }

  #handle(info) {
    return new Session(this, this.#transport, info);
  }

  /** Creates a session: empty, from text, tokens or messages to read first, or from a version of another session. */
  async create({ text, tokens, messages, version, seed, metadata, ttlSeconds, label, model } = {}) {
    const body = wireNames({ text, tokens, messages, version, seed, metadata, ttlSeconds, label, model });
    return this.#handle(await this.#transport.send({ method: 'POST', path: '/v1/sessions', body, headers: withKey() }));
  }

  /** Returns an existing session, read from the server. */
  async session(id) {
    return this.#handle(await this.#transport.send({ method: 'GET', path: `/v1/sessions/${encodeURIComponent(id)}` }));
  }

  /** Returns a handle to an existing session, without a request to the server. */
  handle(id, version = undefined) {
    return this.#handle({ id, version });
  }

  /** Yields your sessions that match all given filters, newest first by default. */
  async *sessions({ order = 'desc', metadata = {}, label, tag, forkedFrom, model } = {}) {
    const wanted = Object.entries(metadata).map(([key, value]) => [`metadata[${key}]`, value]);
    let page = [];
    for (let after; after !== null; ) {
      const fields = Object.entries(wireNames({ limit: 100, order, after, label, tag, forkedFrom, model }));
      const path = `/v1/sessions?${new URLSearchParams([...fields, ...wanted])}`;
      const found = await this.#transport.send({ method: 'GET', path });
      // Yields a page only after fetching the next one, whose cursor is a session that the caller may delete.
      for (const info of page) yield this.#handle(info);
      page = found.data;
      after = found.next;
    }
    for (const info of page) yield this.#handle(info);
  }

  /** Creates a session from a file that `save` returned. */
  async load(snapshot, { model } = {}) {
    const path = model === undefined ? '/v1/snapshots' : `/v1/snapshots?${new URLSearchParams({ model })}`;
    // This route does not support idempotency keys.
    const call = { method: 'POST', path, body: snapshot, repeatable: false };
    return this.#handle(await this.#transport.send(call));
  }
}
