// The errors: one class for each kind, all derived from `TidegateError`.

export class TidegateError extends Error {
  constructor(message, options) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The server could not be reached, or the connection broke and the retries were used up. */
export class ConnectionFailed extends TidegateError {}

/** A turn that ran again after a server crash gave a text that differs from the part already read. */
export class StreamDiverged extends TidegateError {}

/** The server refused a request, or failed. `status` is null for an error in the middle of a stream. */
export class APIError extends TidegateError {
  constructor(status, error = {}, requestId = null) {
    const message = error?.message ?? 'the server gave no reason';
    super(status ? `${message} (${status})` : message);
    this.status = status;
    this.type = error?.type ?? null;
    this.code = error?.code ?? null;
    this.param = error?.param ?? null;
    this.requestId = requestId;
  }
}

export class BadRequest extends APIError {}
export class Unauthorized extends APIError {}
export class Forbidden extends APIError {}
export class NotFound extends APIError {}
export class Conflict extends APIError {}
export class Gone extends APIError {}
export class VersionMismatch extends APIError {}
export class KeyReused extends APIError {}
export class RateLimited extends APIError {}
export class ServerError extends APIError {}

const BY_STATUS = {
  400: BadRequest, 401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone, 412: VersionMismatch,
  422: KeyReused, 429: RateLimited,
};

/** Returns the error for a status and the body of a response. */
export function apiError(status, body, requestId) {
  const inStream = body?.error?.code === 'queue_full' ? RateLimited : APIError;
  const Kind = BY_STATUS[status] ?? (status >= 500 ? ServerError : inStream);
  return new Kind(status, body?.error, requestId);
}

/** Reads a response and returns the error that it describes. */
export async function errorOf(response) {
  const text = await response.text().catch(() => '');
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    body = { error: { message: text.slice(0, 500) } };
  }
  return apiError(response.status, body, response.headers.get('x-request-id'));
}
