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

/** A server. The address and the key are by default those of the environment: TIDEGATE_BASE_URL, TIDEGATE_API_KEY. */
export class Tidegate {
  #transport;

  constructor(options) {
    this.#transport = new Transport(options);
  }

  #handle(info) {
    return new Session(this, this.#transport, info);
  }

  /** Creates a session: empty, from what it should read first, or from a version of another session. */
  async create({ text, tokens, messages, version, seed, metadata, ttlSeconds, label } = {}) {
    const body = wireNames({ text, tokens, messages, version, seed, metadata, ttlSeconds, label });
    return this.#handle(await this.#transport.send({ method: 'POST', path: '/v1/sessions', body, headers: withKey() }));
  }

  /** An existing session. */
  async session(id) {
    return this.#handle(await this.#transport.send({ method: 'GET', path: `/v1/sessions/${encodeURIComponent(id)}` }));
  }

  /** An existing session, without asking the server for it. */
  handle(id, version = undefined) {
    return this.#handle({ id, version });
  }

  /** Your sessions that match all that is given, the newest first. */
  async *sessions({ order = 'desc', metadata = {}, label, tag, forkedFrom } = {}) {
    const wanted = Object.entries(metadata).map(([key, value]) => [`metadata[${key}]`, value]);
    let page = [];
    for (let after; after !== null; ) {
      const fields = Object.entries(wireNames({ limit: 100, order, after, label, tag, forkedFrom }));
      const path = `/v1/sessions?${new URLSearchParams([...fields, ...wanted])}`;
      const found = await this.#transport.send({ method: 'GET', path });
      // A page late, because the next one begins after a session that the caller may delete.
      for (const info of page) yield this.#handle(info);
      page = found.data;
      after = found.next;
    }
    for (const info of page) yield this.#handle(info);
  }

  /** Creates a session from a file that `save` has returned. */
  async load(snapshot) {
    // The route has no idempotency keys.
    const call = { method: 'POST', path: '/v1/snapshots', body: snapshot, repeatable: false };
    return this.#handle(await this.#transport.send(call));
  }
}
