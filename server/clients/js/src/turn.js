// Converts turns into requests, and their answers into results.

import { withKey } from './transport.js';

/** Builds the request of a turn. `said` is a user message (a string), or the options themselves. */
export function turnCall(session, said, options = {}, { stream = false, ...more } = {}) {
  const given = typeof said === 'string' ? { ...options, text: said } : { ...said };
  const { text, wait, ifVersion, idempotencyKey, signal, extra, ...fields } = given;
  if ([text, fields.prompt, fields.messages].filter((value) => value !== undefined).length > 1) {
    throw new TypeError('give one of text, messages and prompt');
  }
  let body = { ...wireNames(fields), ...extra, ...more, session };
  if (text !== undefined) body.messages = [{ role: 'user', content: text }];
  if (stream) {
    body = { on_disconnect: 'continue', ...body, stream: true, stream_options: { include_usage: true } };
  }
  const headers = {};
  if (wait !== undefined) headers.prefer = `wait=${Math.ceil(wait)}`;
  if (ifVersion !== undefined) headers['if-match'] = ifVersion;
  const path = body.messages ? '/v1/chat/completions' : '/v1/completions';
  return { method: 'POST', path, body, headers: withKey(headers, idempotencyKey), signal };
}

/** Renames fields as the server does: `maxTokens` becomes `max_tokens`. Leaves out fields that are undefined. */
export function wireNames(fields) {
  const known = Object.entries(fields).filter(([, value]) => value !== undefined);
  return Object.fromEntries(known.map(([name, value]) => [name.replace(/[A-Z]/g, (c) => `_${c.toLowerCase()}`), value]));
}

/** Converts the answer to a turn into its result. */
export function replyOf(answer) {
  // If there are several texts, the one that became the new version.
  const choice = answer.choices.find(({ index }) => index === (answer.session.chosen ?? 0));
  return {
    text: choice.text ?? choice.message?.content ?? '',
    finishReason: choice.finish_reason ?? null,
    session: answer.session.id,
    version: answer.session.version,
    parent: answer.session.parent ?? null,
    tokens: answer.session.tokens ?? 0,
    promptTokens: answer.usage?.prompt_tokens ?? 0,
    completionTokens: answer.usage?.completion_tokens ?? 0,
    meanLogprob: choice.mean_logprob ?? null,
    toolCalls: choice.message?.tool_calls ?? [],
    raw: answer,
  };
}
