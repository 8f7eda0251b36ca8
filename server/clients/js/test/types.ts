// Uses the type declarations; `tsc --strict` must accept this file, except for the marked line.

import { generateText } from 'ai';
import { NotFound, Tidegate, type Reply } from 'tidegate';
import { createTidegate } from 'tidegate/ai-sdk';

export async function uses(): Promise<Reply> {
  const client = new Tidegate({ baseURL: 'http://127.0.0.1:8080', maxRetries: 3 });
  const session = await client.create({ text: 'Once', metadata: { tale: 'fox' } });
  for await (const piece of session.stream({ prompt: ' upon', maxTokens: 4 })) piece.toUpperCase();
  const [fork] = await session.fork(2);
  await fork?.load(await session.save());
  await session.rewind((await session.turns())[0]?.version);
  // @ts-expect-error: a session has an id, which is text
  session.id.toFixed();
  await session.text({ start: 1 }).catch((error) => error instanceof NotFound && error.code);
  const { text } = await generateText({ model: createTidegate({ ttlSeconds: 60 })(), prompt: 'Hello' });
  return session.bestOf(2, text, { temperature: 1 });
}
