// The text of a version and who wrote what: read from the server or, where it keeps no text, from this browser's copies.

import { readMessages, readText } from "./sessions.js";
import { copied } from "./texts.js";

/** Number of tokens shown at first, counted from the end: a page with megabytes of text is slow. */
export const SHOWN_AT_FIRST = 50_000;

/** The most tokens that the server returns at once. */
const MOST_TOKENS = 1_000_000;

/** Number of messages that are told apart, counted from the end. */
const MOST_MESSAGES = 2_000;

/** What is shown of a version: `pieces` of text with their authors, the same text as `messages`, how many first tokens
 *  are `skipped`, whether the server has `kept` the text, and if not, the newest version `missing` from this browser. */
export function emptyStory(version = null) { return { version, pieces: [], messages: [], skipped: 0, kept: true, missing: null }; }

export const pieceOf = ({ role, content }) => ({ text: content ?? "", made: role === "assistant" });

/** Reads the story of a turn of session `id`, with at most the last `most` tokens. `turns` maps versions to turns. */
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

/** Reads the beginning of what a turn added to its parent, as pieces: enough to fill a line. */
export async function readBeginning(id, turn, parent) {
  const start = parent?.tokens ?? Math.max(0, turn.tokens - turn.prompt_tokens - turn.completion_tokens);
  const answer = Math.min(start + (turn.prompt_tokens ?? 0), turn.tokens);
  const part = async (from, to, made) => ({ text: to > from ? (await readText(id, turn.version, from, Math.min(to, from + 64))).text : "", made });
  return Promise.all([part(start, answer, false), part(answer, turn.tokens, true)]);
}

/**
 * Splits a text into pieces by author. The text ends with the last of `messages` but may begin in the middle of them. Text
 * between messages comes from the chat template. Searches backward, so that a short message is found in its place.
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

/** Returns the last index of `content` within the first `end` characters of `text`, or -1. */
function placeOf(text, content, end) {
  return content && content.length <= end ? text.lastIndexOf(content, end - content.length) : -1;
}
