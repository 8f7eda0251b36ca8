// A server for the tests: the program named by TIDEGATE_BIN, with the shipped model, on a free port.

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

/** Starts a server that can be killed and started again at the same address, with the same sessions. */
export async function startServer() {
  const socket = createServer().listen(0, '127.0.0.1');
  await once(socket, 'listening');
  const { port } = socket.address();
  await new Promise((closed) => socket.close(closed));
  const folder = mkdtempSync(join(tmpdir(), 'tidegate-'));
  const server = {
    url: `http://127.0.0.1:${port}`,
    async start() {
      const arguments_ = ['serve', '--device', 'cpu', '--port', `${port}`, '--data-dir', folder];
      server.process = spawn(process.env.TIDEGATE_BIN, arguments_, { stdio: 'ignore' });
      for (let i = 0; i < 600; i += 1) {
        if (server.process.exitCode !== null) break;
        if (await fetch(`${server.url}/ready`).then(({ ok }) => ok, () => false)) return;
        await new Promise((resolve) => setTimeout(resolve, 100));
      }
      throw new Error('the server did not become ready');
    },
    async kill() {
      server.process.kill('SIGKILL');
      if (server.process.signalCode === null) await once(server.process, 'exit');
    },
    async end() {
      await server.kill();
      rmSync(folder, { recursive: true });
    },
  };
  await server.start();
  return server;
}

/** Returns a `fetch` that loses the answers to the first `count` requests that `chosen` selects. Adds the headers of all
 *  selected requests to `seen`. */
export function losing(chosen, count, seen = []) {
  return async (url, options) => {
    const response = await fetch(url, options);
    if (!chosen(url, options)) return response;
    seen.push(options.headers);
    if (seen.length > count) return response;
    await response.arrayBuffer();
    throw new TypeError('the answer is lost');
  };
}

/** Returns a `fetch` that cuts each stream after a number of events, one number per stream. Calls `then` at each cut. */
export function cutting(events, { seen = [], then = async () => {} } = {}) {
  return async (url, options) => {
    const response = await fetch(url, options);
    if (!response.headers.get('content-type')?.includes('event-stream')) return response;
    seen.push(`${options.method} ${options.headers['last-event-id'] ?? 'all'}`);
    if (!events.length) return response;
    const left = events.shift();
    return new Response(cut(response.body.getReader(), left, then), { headers: response.headers });
  };
}

/** Passes on a stream up to a cut. Reads only on demand, so that the client has read everything before the cut. */
function cut(reader, left, then) {
  let rest = '';
  return new ReadableStream(
    {
      async pull(controller) {
        if (left < 0) {
          await reader.cancel();
          await then();
          controller.error(new TypeError('cut'));
          return;
        }
        const { done, value } = await reader.read();
        if (done) {
          controller.close();
          return;
        }
        rest += new TextDecoder().decode(value);
        const events = rest.split('\n\n');
        // Cuts in the middle of an event.
        const now = events.length > left ? [...events.slice(0, left), events[left].slice(0, 7)].join('\n\n') : rest;
        left = events.length > left ? -1 : left - (events.length - 1);
        rest = left < 0 ? '' : events.at(-1);
        controller.enqueue(new TextEncoder().encode(left < 0 ? now : now.slice(0, now.length - rest.length)));
      },
    },
    { highWaterMark: 0 },
  );
}
