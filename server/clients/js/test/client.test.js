// Sessions through the client: turns, forks, versions, files, errors, lost answers and broken streams.

import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';

import { BadRequest, ConnectionFailed, KeyReused, NotFound, RateLimited, StreamDiverged, Tidegate, TidegateError, VersionMismatch } from 'tidegate';
import { Transport } from '../src/transport.js';
import { cutting, losing, startServer } from './server.js';

const TALE = 'Once upon a time there was';
let server;
before(async () => {
  server = await startServer();
});
after(() => server.end());

let owners = 0;
/** Returns a client with its own owner, so that tests do not see each other's sessions. Its retries do not wait. */
function connect(options = {}) {
  owners += 1;
  return new Tidegate({ baseURL: server.url, apiKey: `owner-${owners}`, sleep: () => {}, ...options });
}

async function collect(pieces) {
  const found = [];
  for await (const piece of pieces) found.push(piece);
  return found;
}

test('a session may name its model', async () => {
  const client = connect();
  const session = await client.create({ model: 'tidegate-tiny' });
  assert.deepEqual((await collect(client.sessions({ model: 'tidegate-tiny' }))).map(({ id }) => id), [session.id]);
  const missing = { name: 'NotFound', message: /`other` does not exist/ };
  await assert.rejects(client.create({ model: 'other' }), missing);
  await assert.rejects(collect(client.sessions({ model: 'other' })), missing);
});

test('a turn continues the session', async () => {
  const session = await connect().create({ text: TALE, seed: 1 });
  const start = session.version;
  const reply = await session.say({ prompt: ' a fox', maxTokens: 12 });
  assert.equal(reply.parent, start);
  assert.equal(session.version, reply.version);
  const again = await connect().create({ text: TALE, seed: 1 });
  const whole = await again.say({ prompt: ' a fox', maxTokens: 24 });
  assert.equal(reply.text + (await session.say({ maxTokens: 12 })).text, whole.text);
  const said = await session.say('And then?', { maxTokens: 4 });
  assert.equal(said.raw.object, 'chat.completion');
  await assert.rejects(session.say('x', { prompt: 'x' }), TypeError);
});

test('a stream has the text of the turn', async () => {
  const session = await connect().create({ text: TALE, seed: 1 });
  const [fork] = await session.fork();
  const stream = session.stream({ prompt: ' a fox', maxTokens: 16 });
  const pieces = await collect(stream);
  assert.ok(pieces.length > 4);
  assert.equal(pieces.join(''), stream.reply.text);
  assert.equal(stream.reply.text, (await fork.say({ prompt: ' a fox', maxTokens: 16 })).text);
  assert.equal(session.version, (await session.refresh()).version);
  const text = 'fox\u2028crow\u0085hare';
  assert.equal((await collect(session.stream({ prompt: 'x', maxTokens: 40, regex: text }))).join(''), text);
});

test('leaving a stream ends the turn with its text so far', async () => {
  const session = await connect().create({ text: TALE });
  for await (const _ of session.stream({ prompt: ' a fox', maxTokens: 100_000, extra: { ignore_eos: true } })) break;
  await session.say({ prompt: ' and', maxTokens: 1, wait: 60 });
  const [, left] = await session.turns();
  assert.ok(left.completion_tokens > 0 && left.completion_tokens < 100_000, JSON.stringify(left));
});

test('forks are independent, and a rewind goes back', async () => {
  const client = connect();
  const session = await client.create({ text: TALE });
  const start = session.version;
  const forks = await session.fork(2, { metadata: { tale: 'fox' } });
  assert.deepEqual(forks.map(({ info }) => info.metadata), [{ tale: 'fox' }, { tale: 'fox' }]);
  const first = await session.say({ prompt: ' a fox', maxTokens: 8, seed: 1 });
  await session.rewind(start);
  assert.equal((await session.say({ prompt: ' a fox', maxTokens: 8, seed: 1 })).text, first.text);
  assert.deepEqual((await session.turns()).map(({ parent }) => parent), [null, start, start]);
  assert.equal((await collect(client.sessions())).length, 3);
  await forks[0].delete();
  await assert.rejects(client.session(forks[0].id), NotFound);
  assert.ok((await session.append({ text: ' and so on' })) > 0);
  assert.equal((await session.update({ ttlSeconds: 60 })).ttl_seconds, 60);
});

test('a file continues elsewhere', async () => {
  const client = connect();
  const session = await client.create({ text: TALE, seed: 1 });
  const file = await session.save();
  const expected = (await session.say({ prompt: ' a fox', maxTokens: 8 })).text;
  const loaded = await connect().load(file);
  assert.equal((await loaded.say({ prompt: ' a fox', maxTokens: 8 })).text, expected);
  await session.load(file);
  assert.equal((await session.say({ prompt: ' a fox', maxTokens: 8 })).text, expected);
  assert.equal((await collect(client.sessions())).length, 1);
});

test('the best of several answers stays, and a conversation can be read', async () => {
  const session = await connect().create({ text: TALE, seed: 1 });
  const start = session.version;
  await session.tag('start');
  const reply = await session.bestOf(4, { prompt: ' a fox', maxTokens: 8 });
  assert.equal(reply.parent, start);
  assert.equal(await session.text(), `${TALE} a fox${reply.text}`);
  assert.equal((await session.tokens()).length, reply.tokens);
  assert.deepEqual((await session.messages()).map(({ role }) => role), ['user', 'user', 'assistant']);
  assert.deepEqual((await session.tags()).map(({ name }) => name), ['start']);
  await session.rewind('start');
  assert.equal(session.version, start);
  assert.deepEqual((await session.lineage({ version: reply.version })).data.map(({ version }) => version), [reply.version, start]);
  assert.deepEqual((await session.diff('start', reply.version)).changes, [{ op: 'insert', text: ` a fox${reply.text}` }]);
  await session.untag('start');
  assert.deepEqual(await session.tags(), []);
});

test('errors have classes that say what was wrong', async () => {
  const session = await connect().create();
  await assert.rejects(session.say('x', { temperature: 9 }), (error) => {
    assert.ok(error instanceof BadRequest && error.name === 'BadRequest');
    assert.deepEqual([error.status, error.param], [400, 'temperature']);
    return error.requestId !== null;
  });
  await assert.rejects(session.say('x', { ifVersion: 'ver_00000000000000000000000000000000' }), VersionMismatch);
  await session.say('x', { maxTokens: 1, idempotencyKey: 'once' });
  await assert.rejects(session.say('y', { maxTokens: 1, idempotencyKey: 'once' }), KeyReused);
  await assert.rejects(new Tidegate({ baseURL: 'http://127.0.0.1:9', maxRetries: 0 }).create(), ConnectionFailed);
});

test('what is sent again runs once', async () => {
  const seen = [];
  const client = connect({ fetch: losing((url, { method }) => method === 'POST' && url.includes('completions'), 2, seen) });
  const session = await client.create({ text: TALE });
  const reply = await session.say({ prompt: ' a fox', maxTokens: 8 });
  assert.deepEqual((await session.turns()).slice(1).map(({ version }) => version), [reply.version]);
  assert.equal(seen.length, 3);
  assert.equal(new Set(seen.map((headers) => headers['idempotency-key'])).size, 1);

  const uploads = connect({ fetch: losing((url) => url.includes('snapshots'), 1) });
  await assert.rejects(uploads.load(await session.save()), ConnectionFailed);
  assert.equal((await collect(uploads.sessions())).length, 1, 'an upload has no idempotency key');
  const deleting = connect({ fetch: losing((_, { method }) => method === 'DELETE', 1) });
  await (await deleting.create()).delete();
  assert.deepEqual(await collect(deleting.sessions()), []);
});

test('waits follow the server', () => {
  const transport = new Transport({ baseURL: 'http://server' });
  const refusal = (status, headers = {}) => new Response(null, { status, headers });
  const turn = {};
  const wait = transport.pause(turn, 0, refusal(429, { 'retry-after': '7' }));
  assert.ok(wait >= 7 && wait <= 7.25);
  assert.ok(transport.pause(turn, 1, refusal(503)) <= 1);
  assert.equal(new Set(Array.from({ length: 9 }, () => transport.pause(turn, 1, refusal(503)))).size, 9, 'jitter');
  for (const never of [refusal(400), refusal(412), refusal(507), refusal(429, { 'x-should-retry': 'false' })]) {
    assert.equal(transport.pause(turn, 0, never), null);
  }
  assert.equal(transport.pause(turn, 2, refusal(503)), null);
  assert.equal(transport.pause({ repeatable: false }, 0, refusal(500)), null);
  assert.equal(transport.pause({ repeatable: false }, 0, new ConnectionFailed('lost')), null);
});

test('a stream goes on after disconnects', async () => {
  const expected = await (await connect().create({ text: TALE, seed: 1 })).say({ prompt: ' a fox', maxTokens: 40 });
  const seen = [];
  const session = await connect({ fetch: cutting([3, 0, 1, 5], { seen }) }).create({ text: TALE, seed: 1 });
  const stream = session.stream({ prompt: ' a fox', maxTokens: 40 });
  assert.equal((await collect(stream)).join(''), expected.text);
  assert.equal(stream.reply.tokens, expected.tokens);
  assert.equal((await session.turns()).length, 2);
  assert.deepEqual(seen, ['POST all', 'GET 2', 'GET 2', 'GET 3', 'GET 8']);
});

test('a stream survives a crash of the server', async () => {
  const own = await startServer();
  try {
    const expected = await (await connect({ baseURL: own.url }).create({ text: TALE, seed: 1 })).say({ prompt: ' a', maxTokens: 60 });
    const then = async () => {
      await own.kill();
      await own.start();
    };
    const session = await connect({ baseURL: own.url, fetch: cutting([3], { then }) }).create({ text: TALE, seed: 1 });
    assert.equal((await collect(session.stream({ prompt: ' a', maxTokens: 60 }))).join(''), expected.text);
    assert.equal((await session.turns()).length, 2);
  } finally {
    await own.end();
  }
});

test('a repeated turn with another text is an error, and so is one within a stream', async () => {
  const chunk = (text) => `data: {"choices": [{"index": 0, "text": "${text}", "finish_reason": null}]}\n\n`;
  const bodies = [chunk('a fox'), chunk('a crow')];
  const faked = (answer) => new Tidegate({ baseURL: 'http://server', sleep: () => {}, fetch: async () => new Response(answer()) });
  await assert.rejects(collect(faked(() => bodies.shift()).handle('ses').stream({ prompt: 'x' })), StreamDiverged);
  const failed = faked(() => 'data: {"error": {"message": "deleted", "code": "session_deleted", "param": null}}\n\n');
  await assert.rejects(collect(failed.handle('ses').stream({ prompt: 'x' })), { code: 'session_deleted', status: null });
});

test('sessions can be deleted while they are listed', async () => {
  const client = connect();
  for (let i = 0; i < 2; i += 1) await (await client.create()).fork(64);
  let deleted = 0;
  for await (const session of client.sessions()) {
    await session.delete();
    deleted += 1;
  }
  assert.equal(deleted, 130);
  assert.deepEqual(await collect(client.sessions()), []);
});

test('a handle without a version names the current one, and waits are whole seconds', async () => {
  const prefer = [];
  const noting = (url, options) => {
    if (options.headers.prefer) prefer.push(options.headers.prefer);
    return fetch(url, options);
  };
  const client = connect({ fetch: noting });
  const session = await client.create({ text: TALE });
  await client.handle(session.id).tag('start');
  assert.deepEqual((await session.tags()).map(({ version }) => version), [session.version]);
  await session.say({ prompt: ' a fox', maxTokens: 1, wait: 0.5 });
  assert.deepEqual(prefer, ['wait=1']);
});

test('a stream is iterated over once, and a full queue within it is a rate limit', async () => {
  const stream = (await connect().create({ text: TALE })).stream({ prompt: ' a fox', maxTokens: 4 });
  await collect(stream);
  await assert.rejects(collect(stream), (error) => error instanceof TidegateError && /once/.test(error.message));
  const full = () => new Response('data: {"error": {"message": "full", "code": "queue_full"}}\n\n');
  await assert.rejects(collect(connect({ fetch: full }).handle('ses').stream('x')), RateLimited);
});
