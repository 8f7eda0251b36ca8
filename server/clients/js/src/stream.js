// The answer of a turn, as it is generated. A stream survives disconnects and restarts of the server.

import { ConnectionFailed, NotFound, StreamDiverged, TidegateError, apiError, errorOf } from './errors.js';
import { replyOf } from './turn.js';

export class Stream {
  #transport;
  #call;
  #turn;
  #ended;
  #id = null;
  #lastEvent = null;
  // Position of the current response in `text`; less than its length while a turn repeats from its beginning.
  #place = 0;
  #begun = false;
  #done = false;
  #answer = {};
  #tools = new Map();
  text = '';

  constructor(transport, call, ended) {
    this.#transport = transport;
    this.#turn = this.#call = { ...call, timeout: false };
    this.#ended = ended;
  }

  /** The result of the turn. Throws until the stream has ended. */
  get reply() {
    if (!this.#done || !this.#answer.choices) throw new TidegateError('the stream has not ended');
    const tool_calls = [...this.#tools.keys()].sort((a, b) => a - b).map((index) => this.#tools.get(index));
    const message = { role: 'assistant', content: this.text, tool_calls };
    return replyOf({ ...this.#answer, choices: [{ ...this.#answer.choices[0], text: this.text, message }] });
  }

  async *[Symbol.asyncIterator]() {
    // A second iteration would begin in the middle of the text.
    if (this.#begun) throw new TidegateError('a stream can be iterated over once; `text` has what has arrived');
    this.#begun = true;
    try {
      for (let attempt = 0; !this.#done; attempt += 1) {
        let failure;
        try {
          const response = await this.#transport.once(this.#call);
          if (response.ok) {
            this.#id = response.headers.get('x-stream-id') ?? this.#id;
            for await (const piece of this.#read(response)) {
              attempt = 0;
              yield piece;
            }
            if (this.#done) break;
            throw new ConnectionFailed('the stream ended early');
          }
          failure = response;
        } catch (error) {
          if (!(error instanceof ConnectionFailed)) throw error;
          failure = error;
        }
        const call = this.#call;
        if (failure instanceof ConnectionFailed) this.#broken();
        else if (this.#refused(failure.status)) continue;
        const wait = this.#transport.pause(call, attempt, failure);
        if (wait === null) throw failure instanceof ConnectionFailed ? failure : await errorOf(failure);
        await this.#transport.sleep(wait);
      }
      this.#ended?.(this.reply);
    } finally {
      await this.close();
    }
  }

  /** Ends the turn with the text so far, if it is still running. Leaving a `for await` loop early does this too. */
  async close() {
    if (this.#done || this.#id === null) return;
    const id = this.#id;
    this.#id = null;
    try {
      await this.#transport.send({ method: 'DELETE', path: `/v1/streams/${id}` }, () => undefined);
    } catch (error) {
      if (!(error instanceof NotFound || error instanceof ConnectionFailed)) throw error;
    }
  }

  /** Prepares to resume after a lost connection. The server keeps the events of the stream and continues the turn. */
  #broken() {
    if (this.#id === null) {
      this.#place = 0;
      return;
    }
    const headers = this.#lastEvent === null ? {} : { 'last-event-id': this.#lastEvent };
    this.#call = { ...this.#turn, method: 'GET', path: `/v1/streams/${this.#id}`, headers, body: undefined };
  }

  /**
   * Returns whether to send the turn again after an error: the stream is gone, for example after a server restart. The
   * idempotency key makes this safe: a committed turn is repeated from its record, any other runs again.
   */
  #refused(status) {
    if (this.#id === null || (status !== 404 && status !== 410)) return false;
    this.#call = this.#turn;
    this.#id = this.#lastEvent = null;
    this.#place = 0;
    return true;
  }

  async *#read(response) {
    const decoder = new TextDecoder();
    const reader = response.body.getReader();
    let buffer = '';
    let id = null;
    try {
      for (;;) {
        const { done, value } = await reader.read().catch((error) => {
          this.#turn.signal?.throwIfAborted();
          throw new ConnectionFailed(`the stream broke: ${error}`, { cause: error });
        });
        if (done) return;
        const lines = (buffer + decoder.decode(value, { stream: true })).split('\n');
        buffer = lines.pop();
        for (const line of lines) {
          const [, name, data] = /^([^:]*):? ?(.*?)\r?$/s.exec(line);
          if (name === 'id') id = data;
          if (name !== 'data') continue;
          const piece = this.#event(data);
          this.#lastEvent = id;
          if (piece) yield piece;
        }
      }
    } finally {
      await reader.cancel().catch(() => {});
    }
  }

  /** Reads an event and returns the new part of its text. */
  #event(data) {
    if (data === '[DONE]') {
      this.#done = true;
      return '';
    }
    const { choices = [], ...rest } = JSON.parse(data);
    if (rest.error) throw apiError(null, rest);
    for (const [name, value] of Object.entries(rest)) if (value !== null) this.#answer[name] = value;
    let text = '';
    for (const choice of choices) {
      if (choice.finish_reason) this.#answer.choices = [choice];
      for (const delta of choice.delta?.tool_calls ?? []) this.#merge(delta);
      text += this.#unseen(choice.text ?? choice.delta?.content ?? '');
    }
    return text;
  }

  #unseen(piece) {
    const seen = this.text.slice(this.#place, this.#place + piece.length);
    if (!piece.startsWith(seen)) {
      throw new StreamDiverged(`the repeated turn has ${JSON.stringify(piece)} where ${JSON.stringify(seen)} was read`);
    }
    this.#place += piece.length;
    this.text += piece.slice(seen.length);
    return piece.slice(seen.length);
  }

  #merge({ index, id, function: part = {} }) {
    const call = this.#tools.get(index) ?? { type: 'function', function: { name: '', arguments: '' } };
    // The first part of a call. A repeated turn sends it again, which starts the call over.
    if (id) Object.assign(call, { id, function: { name: part.name ?? '', arguments: '' } });
    call.function.arguments += part.arguments ?? '';
    this.#tools.set(index, call);
  }
}
