// The text of a version and who wrote what: read from the server or, where it keeps no text, from this browser's copies.

import { readMessages, readText } from "./sessions.js";
import { copied } from "./texts.js";

/** Tokens shown at first, from the end back: a page with megabytes of text is slow. */
export const SHOWN_AT_FIRST = 50_000;

/** The most that the server returns at once. */
const MOST_TOKENS = 1_000_000;

/** Messages that are told apart, from the end back. */
const MOST_MESSAGES = 2_000;

/** What is shown of a version: `pieces` of text with their authors, the same as `messages`, how many of the first tokens are
 *  left out, whether the server keeps the text, and if not, the newest version of which this browser has no copy. */
export function emptyStory(version = null) { return { version, pieces: [], messages: [], skipped: 0, kept: true, missing: null }; }

export const pieceOf = ({ role, content }) => ({ text: content ?? "", made: role === "assistant" });

/** The story of a turn of session `id`, with at most the last `most` tokens. `turns` maps versions to turns. */
export async function readStory(id, turn, turns, most = SHOWN_AT_FIRST) {
  if (turn.tokens === 0) return emptyStory(turn.version);
  const skipped = Math.max(0, turn.tokens - Math.min(most, MOST_TOKENS));
  try {
    const [{ text }, messages] = await Promise.all([readText(id, turn.version, skipped), lastMessages(id, turn.version)]);
    return { ...emptyStory(turn.version), pieces: authored(text, messages), messages, skipped };
  } catch (error) {
    if (error.code !== "text_not_kept") throw error;
    const { messages, missing } = copied(turn.version, turns);
    return { ...emptyStory(turn.version), pieces: messages.map(pieceOf), messages, kept: false, missing };
  }
}

async function lastMessages(id, version) {
  const { total } = await readMessages(id, version, 0, 0);
  return total === 0 ? [] : (await readMessages(id, version, Math.max(0, total - MOST_MESSAGES), total)).data;
}

/** Whether the server keeps the text of a version. */
export async function isKept(id, version) {
  try {
    await readText(id, version, 0, 0);
    return true;
  } catch (error) {
    if (error.code === "text_not_kept") return false;
    throw error;
  }
}

/** The beginning of what a turn added to its parent, as pieces; for one line. */
export async function readBeginning(id, turn, parent) {
  const start = parent?.tokens ?? Math.max(0, turn.tokens - turn.prompt_tokens - turn.completion_tokens);
  const answer = Math.min(start + (turn.prompt_tokens ?? 0), turn.tokens);
  const part = async (from, to, made) => ({ text: to > from ? (await readText(id, turn.version, from, Math.min(to, from + 64))).text : "", made });
  return Promise.all([part(start, answer, false), part(answer, turn.tokens, true)]);
}

/**
 * Splits a text into pieces by the messages of which it ends. It may begin in the middle of them. What lies between
 * messages was written by the chat template. Searches from the end back, so that a short message is found in its place.
 */
export function authored(text, messages) {
  const pieces = [];
  let end = text.length;
  for (const message of [...messages].reverse()) {
    // A template may have trimmed a message.
    const found = [message.content, message.content?.trim()].map((content) => [content, placeOf(text, content, end)])
      .find(([, at]) => at >= 0);
    if (!found) continue;
    const [content, at] = found;
    pieces.unshift({ text: content, made: message.role === "assistant" }, { text: text.slice(at + content.length, end), made: false });
    end = at;
  }
  pieces.unshift({ text: text.slice(0, end), made: false });
  return pieces.filter((piece) => piece.text);
}

/** Where `content` stands last in the first `end` characters of `text`, or -1. */
function placeOf(text, content, end) {
  return content && content.length <= end ? text.lastIndexOf(content, end - content.length) : -1;
}
