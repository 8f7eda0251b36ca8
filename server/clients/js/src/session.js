// A conversation that the server keeps.

import { Stream } from './stream.js';
import { withKey } from './transport.js';
import { replyOf, turnCall, wireNames } from './turn.js';

export class Session {
  #client;
  #transport;

  constructor(client, transport, info) {
    this.#client = client;
    this.#transport = transport;
    this.info = info;
    this.id = info.id;
    /** The latest version that this client has seen. */
    this.version = info.version;
  }

  #path(rest = '', params = {}) {
    const query = new URLSearchParams(wireNames(params)).toString();
    return `/v1/sessions/${encodeURIComponent(this.id)}${rest}${query && '?'}${query}`;
  }

  async #update(call) {
    this.info = await this.#transport.send(call);
    this.version = this.info.version;
    return this.info;
  }

  #read(rest, params) {
    return this.#transport.send({ method: 'GET', path: this.#path(rest, params) });
  }

  async #reply(call) {
    const reply = replyOf(await this.#transport.send(call));
    this.version = reply.version;
    return reply;
  }

  /** Says a text and returns the answer. `{prompt}` continues plain text; with neither, the last answer continues. */
  async say(said, options) {
    return this.#reply(turnCall(this.id, said, options));
  }

  /** Like `say`, but streams: iterate over the result for its text; its `reply` then has what `say` returns. */
  stream(said, options) {
    return new Stream(this.#transport, turnCall(this.id, said, options, { stream: true }), (reply) => {
      this.version = reply.version;
    });
  }

  /** Like `say`, but generates `n` answers at once and keeps the one with the highest log probability per token. */
  async bestOf(n, said, options) {
    return this.#reply(turnCall(this.id, said, options, { n, keep: 'best' }));
  }

  /** Appends `{text}`, `{tokens}` or `{messages}` without generating an answer; returns the number of tokens read. */
  async append({ text, tokens, messages, label }) {
    const body = wireNames({ text, tokens, messages, label });
    const info = await this.#update({ method: 'POST', path: this.#path('/append'), body, headers: withKey() });
    return info.appended_tokens;
  }

  /** Creates `n` independent copies of the current version, or of another one. */
  async fork(n = 1, { version, metadata, ttlSeconds } = {}) {
    const body = wireNames({ n, version, metadata, ttlSeconds });
    const answer = await this.#transport.send({ method: 'POST', path: this.#path('/fork'), body, headers: withKey() });
    return answer.data.map((info) => new Session(this.#client, this.#transport, info));
  }

  /** Moves the session back to a version, given by its id or a tag. Later turns stay in `turns`. */
  async rewind(version) {
    await this.#update({ method: 'POST', path: this.#path('/rewind'), body: { version } });
  }

  /** Returns the conversation as a file that any server with the same model can load. */
  async save({ version } = {}) {
    const call = { method: 'GET', path: this.#path('/snapshot', { version }) };
    return this.#transport.send(call, async (response) => new Uint8Array(await response.arrayBuffer()));
  }

  /** Continues from a file that `save` returned. The turns so far stay in `turns`. */
  async load(snapshot, options) {
    const loaded = await this.#client.load(snapshot, options);
    try {
      await this.rewind(loaded.version);
    } finally {
      await loaded.delete();
    }
  }

  /** Returns the text of the conversation, or only of its tokens from `start` up to but not including `end`. */
  async text({ version, start, end } = {}) {
    return (await this.#read('/text', { version, start, end })).text;
  }

  /** Returns the conversation as token ids. */
  async tokens({ version, start, end } = {}) {
    return (await this.#read('/tokens', { version, start, end })).tokens;
  }

  /** Returns the conversation as messages, each with the version that added it. */
  async messages({ version, start, end } = {}) {
    return (await this.#read('/messages', { version, start, end })).data;
  }

  /** Returns all versions, oldest first. */
  async turns() {
    return (await this.#read('/turns')).data;
  }

  /** Returns a version's ancestors, across forks; with `other` (a session or version), also their common ancestor. */
  async lineage({ version, other } = {}) {
    return this.#read('/lineage', { version, with: other });
  }

  /** Compares two texts word by word. Each is given as a version, a tag or a session; `to` defaults to the head. */
  async diff(from, to) {
    return this.#read('/diff', { from, to });
  }

  /** Returns the tags, which are names of versions. */
  async tags() {
    return (await this.#read('/tags')).data;
  }

  /** Tags a version, by default the current one. The server keeps tagged versions. */
  async tag(name, version = this.version) {
    await this.#transport.send({ method: 'PUT', path: this.#path(`/tags/${encodeURIComponent(name)}`), body: { version } });
  }

  /** Removes a tag. */
  async untag(name) {
    const path = this.#path(`/tags/${encodeURIComponent(name)}`);
    await this.#transport.send({ method: 'DELETE', path }, () => undefined);
  }

  /** Changes `metadata`, `ttlSeconds` (null: no expiry) or `label`. */
  async update(changes) {
    return this.#update({ method: 'PATCH', path: this.#path(), body: wireNames(changes) });
  }

  /** Reads the session from the server again. */
  async refresh() {
    return this.#update({ method: 'GET', path: this.#path() });
  }

  /** Deletes the session. Its forks stay. */
  async delete() {
    await this.#transport.send({ method: 'DELETE', path: this.#path() }, () => undefined);
  }
}
