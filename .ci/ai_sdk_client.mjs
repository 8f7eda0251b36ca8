// The Vercel `ai` package with its OpenAI-compatible provider against a running server: text with and without streaming,
// from chat and from completions, structured outputs, and errors.
//
//     node ai_sdk_client.mjs http://127.0.0.1:8080/v1       (with `ai` installed next to this file)

import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, generateObject, generateText, jsonSchema, streamText } from 'ai';

const baseURL = process.argv[2];
const provider = createOpenAICompatible({ name: 'tidegate', baseURL, apiKey: 'none', includeUsage: true });
const name = (await (await fetch(`${baseURL}/models`)).json()).data[0].id;

for (const [kind, model] of Object.entries({ chat: provider(name), completion: provider.completionModel(name) })) {
  const request = { model, prompt: 'Tell me of a fox.', maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
  const whole = await generateText(request);
  assert.ok(whole.text.trim(), kind);
  assert.ok(['length', 'stop'].includes(whole.finishReason), whole.finishReason);
  assert.ok(whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0, JSON.stringify(whole.usage));

  const stream = streamText(request);
  let pieces = 0;
  let text = '';
  for await (const piece of stream.textStream) {
    text += piece;
    pieces += 1;
  }
  assert.equal(text, whole.text, kind);
  assert.ok(pieces > 4, `${kind}: the text came in ${pieces} pieces`);
  assert.equal(await stream.finishReason, whole.finishReason);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);

  await assert.rejects(generateText({ ...request, temperature: 9 }), (error) => {
    assert.ok(APICallError.isInstance(error), `${error}`);
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /temperature/);
    return !error.isRetryable;
  });
}
const schema = jsonSchema({
  type: 'object',
  properties: { size: { enum: ['small', 'large'] } },
  required: ['size'],
  additionalProperties: false,
});
const structured = createOpenAICompatible({ name: 'tidegate', baseURL, apiKey: 'none', supportsStructuredOutputs: true });
const { object } = await generateObject({ model: structured(name), schema, prompt: 'How large is a fox?', maxRetries: 0 });
assert.ok(['small', 'large'].includes(object.size), JSON.stringify(object));

console.log('Vercel ai: chat and completions, the same with and without streaming; a structured output; errors');
