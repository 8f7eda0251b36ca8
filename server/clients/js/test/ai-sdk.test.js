// The provider with Vercel's `ai`: one session per conversation, however its history is stored, branched or edited.

import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';

import { Output, generateText, jsonSchema, streamText, tool } from 'ai';
import { BadRequest } from 'tidegate';
import { createTidegate } from 'tidegate/ai-sdk';
import { startServer } from './server.js';

const QUESTIONS = ['Tell me of a fox.', 'And then?', 'What did the crow say?'];
let server;
before(async () => {
  server = await startServer();
});
after(() => server.end());

let owners = 0;
function connect(options = {}) {
  owners += 1;
  return createTidegate({ baseURL: server.url, apiKey: `owner-${owners}`, ...options });
}

async function sessions({ client }) {
  const found = [];
  for await (const session of client.sessions()) found.push(session);
  return found;
}

const user = (content) => ({ role: 'user', content });
const request = (provider, messages, more = {}) => ({
  model: provider(), messages, maxOutputTokens: 12, temperature: 0, maxRetries: 0, ...more,
});
const mark = (result) => result.providerMetadata.tidegate;

/** Asks all questions in turn; returns the history and the results. */
async function talk(provider) {
  const history = [];
  const results = [];
  for (const question of QUESTIONS) {
    history.push(user(question));
    results.push(await generateText({ ...request(provider, history), system: 'You tell tales.' }));
    history.push(...results.at(-1).response.messages);
  }
  return { history, results };
}

test('a conversation is one session that reads new messages alone', async () => {
  const provider = connect();
  const { results } = await talk(provider);
  const [session, ...others] = await sessions(provider);
  assert.deepEqual(others, []);
  const versions = (await session.turns()).slice(1).map(({ version }) => version);
  assert.deepEqual(versions, results.map((result) => mark(result).version));
  const alone = await generateText(request(provider, [user(QUESTIONS[2])]));
  assert.ok(results[2].usage.inputTokens <= alone.usage.inputTokens + 3, JSON.stringify(results[2].usage));
  assert.ok(results[2].text && ['length', 'stop'].includes(results[2].finishReason));
});

test('a model is chosen by its name', async () => {
  const provider = connect();
  const ask = (name) => generateText({ ...request(provider, [user(QUESTIONS[0])]), model: provider(name) });
  assert.ok((await ask('tidegate-tiny')).text);
  await assert.rejects(ask('other'), /`other` does not exist/);
});

test('branches, edits and deletions of a history are answered right', async () => {
  const provider = connect();
  const { history, results } = await talk(provider);
  const system = 'You tell tales.';
  const again = await generateText({ ...request(provider, history.slice(0, 5)), system });
  assert.equal(again.text, results[2].text);
  assert.notEqual(mark(again).session, mark(results[2]).session);
  const branch = await provider.client.session(mark(again).session);
  assert.equal((await branch.turns()).at(-1).parent, mark(results[1]).version);

  const stored = JSON.parse(JSON.stringify(history));
  const next = await generateText({ ...request(provider, [...stored, user('Why?')]), system });
  assert.equal(mark(next).session, mark(results[2]).session);
  const edited = await generateText({ ...request(provider, [...history, user('Why?')]), system: 'You tell jokes.' });
  assert.equal((await provider.client.session(mark(edited).session)).info.forked_from, null);
  assert.ok(edited.usage.inputTokens > next.usage.inputTokens + 20);
  const foreign = [...history.slice(0, 4), user('Who?'), { role: 'assistant', content: 'A hen.' }, user('Why?')];
  const late = await generateText({ ...request(provider, foreign), system });
  const turns = await (await provider.client.session(mark(late).session)).turns();
  assert.ok(turns.some(({ version }) => version === mark(results[1]).version));

  for (const session of await sessions(provider)) await session.delete();
  const anew = await generateText({ ...request(provider, [...history, user('Why?')]), system });
  assert.ok(anew.usage.inputTokens > next.usage.inputTokens + 20);
});

test('streams have the same answers, and are continued', async () => {
  const provider = connect();
  const history = [user(QUESTIONS[0])];
  const whole = await generateText(request(provider, history));
  const stream = streamText(request(provider, history));
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  assert.ok(pieces.length > 4);
  assert.equal(pieces.join(''), whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  const { messages } = await stream.response;
  const follow = await generateText(request(provider, [...history, ...messages, user('And then?')]));
  assert.equal(mark(follow).session, (await stream.providerMetadata).tidegate.session);
});

test('a stream that is aborted keeps its text so far', async () => {
  // Retries until the session is free, which is once the turn has ended.
  const provider = connect({ maxRetries: 60 });
  const abort = new AbortController();
  const long = { maxOutputTokens: 100_000, abortSignal: abort.signal, providerOptions: { tidegate: { extra: { ignore_eos: true } } } };
  for await (const _ of streamText(request(provider, [user('Tell me.')], long)).textStream) abort.abort();
  const [session] = await sessions(provider);
  await session.append({ text: ' and' });
  const [, turn] = await session.turns();
  assert.ok(turn.completion_tokens > 0 && turn.completion_tokens < 100_000, JSON.stringify(turn));
});

test('tools, structured outputs and errors', async () => {
  const provider = connect();
  const schema = jsonSchema({ type: 'object', properties: { size: { enum: ['small', 'large'] } }, required: ['size'] });
  const more = { maxOutputTokens: 60, output: Output.object({ schema }) };
  const { output } = await generateText(request(provider, [user('How large is a fox?')], more));
  assert.ok(['small', 'large'].includes(output.size));

  const tools = { size: tool({ description: 'How large?', inputSchema: schema, execute: async ({ size }) => size }) };
  const called = await generateText(request(provider, [user('A fox?')], { maxOutputTokens: 60, tools, toolChoice: 'required' }));
  assert.equal(called.finishReason, 'tool-calls');
  assert.ok(['small', 'large'].includes(called.toolCalls[0].input.size));
  const history = [user('A fox?'), ...called.response.messages, user('Thank you.')];
  const answer = await generateText(request(provider, history));
  assert.equal(mark(answer).session, mark(called).session);
  const streamed = streamText(request(provider, [user('A fox?')], { maxOutputTokens: 60, tools, toolChoice: 'required' }));
  assert.deepEqual((await streamed.toolCalls)[0].input, called.toolCalls[0].input);

  await assert.rejects(generateText(request(provider, [user('x')], { temperature: 9 })), BadRequest);
});

test('a refused first turn leaves no session', async () => {
  const provider = connect();
  await assert.rejects(generateText(request(provider, [user('x')], { temperature: 9 })), BadRequest);
  assert.deepEqual(await sessions(provider), []);
  await streamText(request(provider, [user('x')], { temperature: 9, onError: () => {} })).consumeStream();
  assert.deepEqual(await sessions(provider), []);
});

test('further fields of a call are sent', async () => {
  const bodies = [];
  const noting = (url, options) => {
    if (url.endsWith('completions')) bodies.push(JSON.parse(options.body));
    return fetch(url, options);
  };
  const provider = connect({ fetch: noting });
  const more = { providerOptions: { tidegate: { extra: { user: 'fox' } } } };
  const first = await generateText(request(provider, [user('A fox?')], more));
  const foreign = [user('Who?'), { role: 'assistant', content: 'A hen.' }, user('Why?')];
  await generateText(request(provider, [user('A fox?'), ...first.response.messages, ...foreign], more));
  assert.deepEqual(bodies.map(({ user, history }) => [user, history]), [['fox', undefined], ['fox', 'append']]);
});
