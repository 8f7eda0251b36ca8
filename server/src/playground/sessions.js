// Sessions on the server: one function per request, with errors explained for people. Knows nothing of the page.

import { download, send } from "./key.js";
import { apiError, reached } from "./sse.js";

/** Explanations of errors; for others the server's message suffices. */
const WORDS = {
  session_in_use: "another page or program is writing in this conversation; try again in a moment",
  version_mismatch: "this conversation was continued elsewhere, so nothing was written; the tree now shows its current state",
  session_changed: "this conversation was continued elsewhere meanwhile, so nothing was written; look at the tree, and send it again",
  no_store: "this server stores no sessions, so conversations are not available",
  text_not_kept: "the server has not kept the text of this version",
};

const GONE = {
  session: "this conversation no longer exists: it was deleted or has expired",
  version: "this version is no longer stored: a session keeps only its newest versions",
};

/** Replaces the message of an error that has an explanation here. */
export function explained(error) {
  const words = WORDS[error.code] ?? (error.status === 404 ? GONE[error.param] : undefined);
  if (words) error.message = words;
  return error;
}

async function ask(method, path, body, type = "application/json") {
  const sent = { method };
  if (body !== undefined) {
    sent.headers = { "content-type": type };
    sent.body = type === "application/json" ? JSON.stringify(body) : body;
  }
  const response = await reached(send(path, sent), "the server cannot be reached");
  if (!response.ok) throw explained(await apiError(response));
  return response.json();
}

/** Returns a path with those parameters that have a value. */
function path(base, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null);
  return given.length ? `${base}?${new URLSearchParams(given)}` : base;
}

const at = (id) => `/v1/sessions/${encodeURIComponent(id)}`;

/** Returns a page of the list, newest first: `{ data, has_more, next }`. */
export const listSessions = (after) => ask("GET", path("/v1/sessions", { limit: 50, after }));

export const listForks = async (id) => (await ask("GET", path("/v1/sessions", { limit: 100, forked_from: id }))).data;
export const newSession = (metadata) => ask("POST", "/v1/sessions", { metadata });
export const getSession = (id) => ask("GET", at(id));
export const deleteSession = (id) => ask("DELETE", at(id));
export const setMetadata = (id, metadata) => ask("PATCH", at(id), { metadata });
export const rewindTo = (id, version) => ask("POST", `${at(id)}/rewind`, { version });
export const forkFrom = async (id, version, metadata) =>
  (await ask("POST", `${at(id)}/fork`, { version, metadata })).data[0];

/** Returns a range of tokens as text: `{ text, start, end, total }`. */
export const readText = (id, version, start, end) => ask("GET", path(`${at(id)}/text`, { version, start, end }));

/** Returns a range of messages: `{ data, start, end, total }`. */
export const readMessages = (id, version, start, end) => ask("GET", path(`${at(id)}/messages`, { version, start, end }));

/** Returns the versions of a session, preceded by their ancestors from other sessions, which are marked `elsewhere`. */
export async function getTurns(id) {
  const { data } = await ask("GET", `${at(id)}/turns`);
  const listed = new Set(data.map((turn) => turn.version));
  const first = data.find((turn) => turn.parent && !listed.has(turn.parent));
  if (!first) return data;
  const lineage = await ask("GET", path(`${at(id)}/lineage`, { version: first.version, limit: 1000 }));
  const before = lineage.data.filter((one) => one.session && !listed.has(one.version)).reverse();
  return [...before.map((one) => ({ ...one, head: false, elsewhere: true })), ...data];
}

/** The address of a version's snapshot file. */
export const snapshotPath = (id, version) => path(`${at(id)}/snapshot`, { version });

/** Downloads a version as a snapshot file. */
export async function downloadSnapshot(id, version, name) {
  const response = await reached(download(snapshotPath(id, version), name), "the server cannot be reached");
  if (!response.ok) throw explained(await apiError(response));
}

/** Creates a session from a snapshot file. */
export const upload = (file) => ask("POST", "/v1/snapshots", file, "application/octet-stream");
