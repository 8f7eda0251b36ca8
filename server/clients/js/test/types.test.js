// The type declarations: `tsc` accepts code that uses them.

import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { test } from 'node:test';
import { fileURLToPath } from 'node:url';

test('the types are those of the code and of `ai`', async () => {
  const compiler = join(dirname(createRequire(import.meta.url).resolve('typescript/package.json')), 'bin', 'tsc');
  const file = fileURLToPath(new URL('types.ts', import.meta.url));
  const flags = ['--noEmit', '--strict', '--skipLibCheck', '--module', 'nodenext', '--target', 'es2024', '--lib', 'es2024,dom,dom.asynciterable', '--types', ''];
  const { status, stdout } = spawnSync(process.execPath, [compiler, ...flags, file], { encoding: 'utf8' });
  assert.equal(status, 0, stdout);

  // All declared methods exist, and no others.
  const declared = ['say', 'stream', 'bestOf', 'append', 'fork', 'rewind', 'save', 'load', 'text', 'tokens', 'messages', 'turns',
    'lineage', 'diff', 'tags', 'tag', 'untag', 'update', 'refresh', 'delete'];
  const { Session } = await import('tidegate');
  assert.deepEqual(Object.getOwnPropertyNames(Session.prototype).filter((name) => name !== 'constructor').sort(), declared.sort());
});
