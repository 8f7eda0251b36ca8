// Sessions on the server: one function per request, with errors explained for people. Knows nothing of the page.

import { download, send } from "./key.js";
import { apiError, reached } from "./sse.js";

/** Explanations of errors; for others the server's message suffices. */
const WORDS = {
  session_in_use: "another page or program is writing in this conversation; try again in a moment",
  idempotency_key_in_use: "the last turn is still running; try again in a moment",
  version_mismatch: "this conversation was continued elsewhere, so nothing was written; the tree now shows its current state",
  no_store: "this server stores no sessions, so conversations are not available",
};

const GONE = {
  session: "this conversation no longer exists: it was deleted or has expired",
  version: "this version is no longer stored: a session keeps only its newest versions",
};

/** Replaces the message of an error that has an explanation here. */
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

/** A page of the list, newest first: `{ data, has_more, last_id }`. */
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

/** The address of a version's snapshot file. */
export const snapshotPath = (id, version) => `${at(id)}/snapshot?version=${encodeURIComponent(version)}`;

/** Downloads a version as a snapshot file. */
export async function downloadSnapshot(id, version) {
  const file = download(snapshotPath(id, version), `${version}.tidegate`);
  const response = await reached(file, "the server cannot be reached");
  if (!response.ok) throw explained(await apiError(response));
}

/** Creates a session from a snapshot file. */
export const upload = (file) => ask("POST", "/v1/snapshots", file, "application/octet-stream");
