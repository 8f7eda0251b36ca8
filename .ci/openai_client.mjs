// The official `openai` package for Node against a running server: completions, chat, streaming, errors, and
// responses.
//
//     node openai_client.mjs http://127.0.0.1:8080/v1       (with `openai` installed next to this file)

import assert from 'node:assert/strict';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none', timeout: 120_000 });
const model = (await client.models.list()).data[0].id;

const prompt = { model, prompt: 'Once upon a time', max_tokens: 24, temperature: 0 };
const whole = await client.completions.create(prompt);
let text = '';
for await (const chunk of await client.completions.create({ ...prompt, stream: true })) {
  text += chunk.choices[0]?.text ?? '';
}
assert.equal(text, whole.choices[0].text);

const chat = { model, messages: [{ role: 'user', content: 'Tell me of a fox.' }], max_tokens: 24, temperature: 0 };
const answer = await client.chat.completions.create(chat);
assert.equal(answer.choices[0].message.role, 'assistant');
const runner = client.chat.completions.stream({ ...chat, stream_options: { include_usage: true } });
const pieces = [];
runner.on('content', (piece) => pieces.push(piece));
const streamed = await runner.finalChatCompletion();
assert.equal(streamed.choices[0].message.content, answer.choices[0].message.content);
assert.equal(pieces.join(''), answer.choices[0].message.content);
assert.equal(streamed.usage.completion_tokens, answer.usage.completion_tokens);

await assert.rejects(client.completions.create({ ...prompt, temperature: 9 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, 'temperature');
  assert.equal(error.type, 'invalid_request_error');
  return Boolean(error.requestID);
});
await assert.rejects(client.completions.create({ ...prompt, model: 'gpt-x' }), OpenAI.NotFoundError);
const long = { model, prompt: 'On and on', max_tokens: 1_000_000, ignore_eos: true };
await assert.rejects(client.completions.create(long, { timeout: 300, maxRetries: 0 }), OpenAI.APIConnectionTimeoutError);
const abandoned = await client.completions.create({ ...long, stream: true });
for await (const chunk of abandoned) {
  if (chunk.choices.length) break; // ends the request, and the server frees its slot
}

const fields = { model, max_output_tokens: 24, temperature: 0 };
const first = await client.responses.create({ input: 'Tell me of a fox.', instructions: 'Be brief.', ...fields });
assert.ok(first.output_text.trim());
assert.equal(first.usage.total_tokens, first.usage.input_tokens + first.usage.output_tokens);

const followUp = { input: 'And then?', previous_response_id: first.id, ...fields };
const second = await client.responses.create(followUp);
assert.ok(second.usage.input_tokens > first.usage.total_tokens);
assert.ok(second.usage.input_tokens - second.usage.input_tokens_details.cached_tokens < 12);

let number = 0;
let last;
text = '';
for await (const event of await client.responses.create({ ...followUp, stream: true })) {
  assert.equal(event.sequence_number, number++);
  if (event.type === 'response.output_text.delta') text += event.delta;
  last = event;
}
assert.equal(text, second.output_text);
assert.ok(['response.completed', 'response.incomplete'].includes(last.type));
assert.equal(last.response.output[0].content[0].text, text);

const final = await client.responses.stream(followUp).finalResponse();
assert.equal(final.output[0].content[0].text, text);

const read = await client.responses.retrieve(second.id);
assert.deepEqual(read.output, second.output);
assert.equal(read.previous_response_id, first.id);
await client.responses.delete(first.id);
await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
await assert.rejects(client.responses.create(followUp), { status: 404, param: 'previous_response_id' });
await assert.rejects(client.responses.create({ ...fields, input: 'x', tools: [{ type: 'web_search' }] }), {
  status: 400,
  param: 'tools',
});

console.log('openai for Node: completions, chat, errors, timeouts; responses created, streamed, continued, retrieved and deleted');
