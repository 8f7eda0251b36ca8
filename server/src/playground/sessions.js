// Sessions on the server: one function for each request, its refusals in a person's words. Knows nothing of the page.

import { download, send } from "./key.js";
import { apiError, reached } from "./sse.js";

/** What a refusal means for the one who reads it; the server's own words where they say it all. */
const WORDS = {
  session_in_use: "another page or program is writing in this conversation; try again in a moment",
  idempotency_key_in_use: "the last turn has not ended yet; try again in a moment",
  version_mismatch: "this conversation has moved on elsewhere, so nothing was written; the tree now shows where it is",
  no_store: "this server keeps no sessions, so there is nothing to keep a conversation in",
};

const GONE = {
  session: "this conversation is not on the server any more: it was deleted, or its time was up",
  version: "this version is not kept any more: a session keeps its newest versions alone",
};

/** The error with words that fit a conversation; any other as it is. */
export function explained(error) {
  const words = error.status === 404 ? GONE[error.param] : WORDS[error.code];
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

const at = (id) => `/v1/sessions/${encodeURIComponent(id)}`;

/** A page of the list, the newest first: `{ data, has_more, last_id }`. */
export const listSessions = (after) =>
  ask("GET", `/v1/sessions?limit=50${after ? `&after=${encodeURIComponent(after)}` : ""}`);

export const newSession = (name) => ask("POST", "/v1/sessions", { metadata: { name } });
export const getSession = (id) => ask("GET", at(id));
export const getTurns = async (id) => (await ask("GET", `${at(id)}/turns`)).data;
export const deleteSession = (id) => ask("DELETE", at(id));
export const setMetadata = (id, metadata) => ask("PATCH", at(id), { metadata });
export const rewindTo = (id, version) => ask("POST", `${at(id)}/rewind`, { version });
export const forkFrom = async (id, version, metadata) =>
  (await ask("POST", `${at(id)}/fork`, { version, metadata })).data[0];

/** Where the bytes of a version are. */
export const snapshotPath = (id, version) => `${at(id)}/snapshot?version=${encodeURIComponent(version)}`;

/** Hands the bytes of a version to the person as a file. */
export async function downloadSnapshot(id, version) {
  const file = download(snapshotPath(id, version), `${version}.tidegate`);
  const response = await reached(file, "the server cannot be reached");
  if (!response.ok) throw explained(await apiError(response));
}

/** A new session from the bytes of a snapshot. */
export const upload = (file) => ask("POST", "/v1/snapshots", file, "application/octet-stream");
