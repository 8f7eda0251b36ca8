// A provider for Vercel's `ai`: a language model that keeps one session per conversation and sends only new messages.
//
// The model object itself has no state. Each answer carries a mark in its provider metadata: the session, its version, and
// a digest of all messages up to and including that answer. `ai` returns the mark with the history. A history that begins
// with those messages continues from that version; a history that was edited or never seen is sent whole.

import { APIError, Conflict, Gone, NotFound, Tidegate, VersionMismatch } from './index.js';

const NAME = 'tidegate';

/** Creates the provider: `createTidegate({baseURL})()` is the server's first model, and `('NAME')` the one of that name. */
export function createTidegate({ ttlSeconds, ...options } = {}) {
  const client = new Tidegate(options);
  const languageModel = (modelId = NAME) => new TidegateModel(client, modelId, ttlSeconds);
  const unsupported = (kind) => () => {
    throw new TypeError(`Tidegate has no ${kind} models`);
  };
  return Object.assign((modelId) => languageModel(modelId), {
    specificationVersion: 'v3',
    client,
    languageModel,
    embeddingModel: unsupported('embedding'),
    imageModel: unsupported('image'),
  });
}

class TidegateModel {
  specificationVersion = 'v3';
  provider = NAME;
  supportedUrls = {};
  #client;
  #ttlSeconds;

  constructor(client, modelId, ttlSeconds) {
    this.#client = client;
    this.modelId = modelId;
    this.#ttlSeconds = ttlSeconds;
  }

  async doGenerate(options) {
    const { messages, known, turn, warnings } = await prepare(options);
    for (const place of places(known)) {
      let session;
      try {
        session = await this.#session(place);
        const reply = await session.say(this.#turn(turn, messages, place));
        const providerMetadata = await mark(messages, reply);
        return {
          content: content(reply, providerMetadata),
          finishReason: finishReason(reply),
          usage: usage(reply),
          providerMetadata,
          request: { body: turn },
          response: { id: reply.raw.id, modelId: reply.raw.model, timestamp: new Date(reply.raw.created * 1000) },
          warnings,
        };
      } catch (error) {
        await discard(session, place, error);
        if (!elsewhere(error, place)) throw error;
      }
    }
  }

  async doStream(options) {
    const { messages, known, turn, warnings } = await prepare(options);
    for (const place of places(known)) {
      let session;
      try {
        session = await this.#session(place);
        const stream = session.stream(this.#turn(turn, messages, place));
        const pieces = stream[Symbol.asyncIterator]();
        // Waits for the first piece, because a refusal comes before it.
        const first = await pieces.next();
        const parts = streamParts(first, pieces, stream, messages, warnings);
        return { stream: readable(parts), request: { body: turn } };
      } catch (error) {
        await discard(session, place, error);
        if (!elsewhere(error, place)) throw error;
      }
    }
  }

  async #session({ session, version }) {
    if (session) return this.#client.handle(session);
    const model = this.modelId === NAME ? undefined : this.modelId;
    return this.#client.create({ version, ttlSeconds: this.#ttlSeconds, model });
  }

  #turn(turn, messages, { session, version, count }) {
    const fresh = messages.slice(count);
    // Answers that another model gave, or that were edited, are read like other messages.
    const history = fresh.some(({ role }) => role === 'assistant') ? 'append' : undefined;
    const extra = { ...turn.extra, ...(history && { history }) };
    return { ...turn, messages: fresh, extra, ifVersion: session ? version : undefined };
  }
}

/** Returns what to try, in order: the session itself, a fork of its version, and a new session that reads everything. */
function places(known) {
  const whole = { count: 0 };
  if (!known) return [whole];
  return [known, { version: known.version, count: known.count }, whole];
}

/** Deletes a session that was created for a turn that the server refused, because nothing refers to it. */
async function discard(session, place, error) {
  if (error instanceof APIError && !place.session) await session?.delete().catch(() => {});
}

/** Whether to try the next place: the session has moved on, is busy, or is gone with its versions, and a place is left. */
function elsewhere(error, place) {
  const moved = [Conflict, Gone, NotFound, VersionMismatch].some((kind) => error instanceof kind);
  return moved && place.version !== undefined;
}

/** Converts a request of `ai` into its messages, the mark of those already read, and the turn without messages. */
async function prepare(options) {
  const warnings = [];
  const messages = [];
  const marks = [];
  for (const message of options.prompt) {
    for (const converted of convert(message)) messages.push(converted);
    const found = message.role === 'assistant' && message.content.map((part) => part.providerOptions?.[NAME]).find((m) => m?.session);
    if (found) marks.push({ ...found, count: messages.length });
  }
  let known;
  for (const { digest, ...candidate } of marks.reverse()) {
    if (candidate.count < messages.length && digest === (await digestOf(messages.slice(0, candidate.count)))) {
      known = candidate;
      break;
    }
  }
  const turn = {
    maxTokens: options.maxOutputTokens, temperature: options.temperature, topP: options.topP, topK: options.topK,
    presencePenalty: options.presencePenalty, frequencyPenalty: options.frequencyPenalty, seed: options.seed,
    stop: options.stopSequences, responseFormat: responseFormat(options.responseFormat),
    toolChoice: toolChoice(options.toolChoice), signal: options.abortSignal, ...options.providerOptions?.[NAME],
  };
  for (const tool of options.tools ?? []) {
    if (tool.type === 'function') {
      const { name, description, inputSchema: parameters } = tool;
      (turn.tools ??= []).push({ type: 'function', function: { name, description, parameters } });
    } else {
      warnings.push({ type: 'unsupported', feature: `the tool ${tool.id}` });
    }
  }
  return { messages, known, turn, warnings };
}

/** Converts a message of `ai` into the server's messages; each tool result becomes a message. */
function convert({ role, content }) {
  if (role === 'system') return [{ role, content }];
  if (role === 'tool') {
    return content
      .filter(({ type }) => type === 'tool-result')
      .map(({ toolCallId, output }) => ({ role, tool_call_id: toolCallId, content: toolOutput(output) }));
  }
  const unreadable = content.find(({ type }) => type === 'file');
  if (unreadable) throw new TypeError(`the model reads text only, not ${unreadable.mediaType}`);
  const text = content.filter(({ type }) => type === 'text').map((part) => part.text).join('');
  const calls = content
    .filter(({ type }) => type === 'tool-call')
    .map(({ toolCallId: id, toolName: name, input }) => ({ id, type: 'function', function: { name, arguments: JSON.stringify(input) } }));
  return [{ role, content: text, ...(calls.length ? { tool_calls: calls } : {}) }];
}

function toolOutput({ type, value, reason }) {
  if (type === 'execution-denied') return reason ?? 'denied';
  if (type === 'content') return value.map((part) => part.text ?? '').join('');
  return typeof value === 'string' ? value : JSON.stringify(value);
}

function responseFormat(format) {
  if (format?.type !== 'json') return undefined;
  if (!format.schema) return { type: 'json_object' };
  return { type: 'json_schema', json_schema: { name: format.name ?? 'response', schema: format.schema, strict: true } };
}

function toolChoice(choice) {
  return choice?.type === 'tool' ? { type: 'function', function: { name: choice.toolName } } : choice?.type;
}

async function digestOf(messages) {
  const hash = await crypto.subtle.digest('SHA-256', new TextEncoder().encode(JSON.stringify(messages)));
  return Array.from(new Uint8Array(hash), (byte) => byte.toString(16).padStart(2, '0')).join('');
}

/** Returns the provider metadata of an answer, which is its mark. */
async function mark(messages, reply) {
  const calls = reply.toolCalls.map(({ id, function: { name, arguments: input } }) => ({
    type: 'tool-call', toolCallId: id, toolName: name, input: parsed(input),
  }));
  const answer = convert({ role: 'assistant', content: [{ type: 'text', text: reply.text }, ...calls] });
  const { session, version } = reply;
  return { [NAME]: { session, version, digest: await digestOf([...messages, ...answer]) } };
}

function parsed(input) {
  try {
    return JSON.parse(input);
  } catch {
    return input;
  }
}

function content(reply, providerMetadata) {
  const text = reply.text ? [{ type: 'text', text: reply.text, providerMetadata }] : [];
  const calls = reply.toolCalls.map((call) => ({
    type: 'tool-call', toolCallId: call.id, toolName: call.function.name, input: call.function.arguments, providerMetadata,
  }));
  return [...text, ...calls];
}

const FINISH = { stop: 'stop', length: 'length', tool_calls: 'tool-calls', content_filter: 'content-filter' };

function finishReason({ finishReason: raw }) {
  return { unified: FINISH[raw] ?? 'other', raw: raw ?? undefined };
}

function usage({ promptTokens: total, completionTokens: output, raw }) {
  const cacheRead = raw.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  return {
    inputTokens: { total, noCache: total - cacheRead, cacheRead, cacheWrite: undefined },
    outputTokens: { total: output, text: output, reasoning: undefined },
    raw: raw.usage,
  };
}

async function* streamParts(first, pieces, stream, messages, warnings) {
  yield { type: 'stream-start', warnings };
  const id = '0';
  let began = false;
  try {
    for (let next = first; !next.done; next = await pieces.next()) {
      if (!began) yield { type: 'text-start', id };
      began = true;
      yield { type: 'text-delta', id, delta: next.value };
    }
  } finally {
    // Ends the turn if the reader has stopped early.
    await pieces.return();
  }
  const { reply } = stream;
  const providerMetadata = await mark(messages, reply);
  yield { type: 'response-metadata', id: reply.raw.id, modelId: reply.raw.model, timestamp: new Date(reply.raw.created * 1000) };
  if (began) yield { type: 'text-end', id, providerMetadata };
  for (const part of content(reply, providerMetadata)) if (part.type === 'tool-call') yield part;
  yield { type: 'finish', usage: usage(reply), finishReason: finishReason(reply), providerMetadata };
}

/** Converts the parts into a stream. Canceling it ends the turn. */
function readable(parts) {
  return new ReadableStream({
    async pull(controller) {
      try {
        const { done, value } = await parts.next();
        if (done) controller.close();
        else controller.enqueue(value);
      } catch (error) {
        controller.enqueue({ type: 'error', error });
        controller.close();
      }
    },
    cancel: () => parts.return(),
  });
}
