/** A message in OpenAI's format. */
export interface Message {
  role: 'system' | 'developer' | 'user' | 'assistant' | 'tool';
  content: string | Array<{ type: 'text'; text: string }>;
  tool_calls?: ToolCall[];
  tool_call_id?: string;
}

export interface ToolCall {
  id: string;
  type: 'function';
  function: { name: string; arguments: string };
}

/** Options of a turn. Other request fields of the server go into `extra`. */
export interface TurnOptions {
  maxTokens?: number;
  temperature?: number;
  topP?: number;
  topK?: number;
  minP?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  seed?: number;
  stop?: string | string[];
  regex?: string;
  responseFormat?: Record<string, unknown>;
  tools?: Array<Record<string, unknown>>;
  toolChoice?: string | Record<string, unknown>;
  label?: string;
  /** What happens to the turn after a disconnect. */
  onDisconnect?: 'rollback' | 'commit' | 'continue';
  /** Seconds to wait for a session in use; fractions are rounded up. */
  wait?: number;
  /** The server refuses the turn unless this is the session's current version. */
  ifVersion?: string;
  /** Default: a new key, so that a retry never runs a turn twice. */
  idempotencyKey?: string;
  signal?: AbortSignal;
  extra?: Record<string, unknown>;
}

/** A turn without a plain string: messages, a prompt to read verbatim, or neither, so that the last answer continues. */
export interface Turn extends TurnOptions {
  messages?: Message[];
  prompt?: string;
}

/** The result of a turn, sent after the server has committed it. */
export interface Reply {
  text: string;
  finishReason: string | null;
  session: string;
  /** The version that the turn created. */
  version: string;
  /** The version that the turn started from. */
  parent: string | null;
  /** Number of tokens of the whole conversation. */
  tokens: number;
  promptTokens: number;
  completionTokens: number;
  /** With `bestOf`: the mean log probability per token of the text that was kept. */
  meanLogprob: number | null;
  toolCalls: ToolCall[];
  /** The server's JSON answer; for a stream, its last events merged. */
  raw: any;
}

export interface SessionInfo {
  id: string;
  version: string;
  tokens: number;
  metadata: Record<string, string>;
  [field: string]: unknown;
}

/** The difference between two texts, after the tokens that both begin with. */
export interface SessionDiff {
  from: string;
  to: string;
  common_tokens: number;
  common_ancestor: string | null;
  changes: Array<{ op: 'equal' | 'delete' | 'insert'; text: string }>;
  [field: string]: unknown;
}

export interface ClientOptions {
  /** Default: TIDEGATE_BASE_URL, or http://127.0.0.1:8080. */
  baseURL?: string;
  /** Default: TIDEGATE_API_KEY. */
  apiKey?: string;
  /** Default: 2. */
  maxRetries?: number;
  /** Timeout of a request in milliseconds; streams have none. Default: ten minutes. */
  timeout?: number;
  fetch?: typeof fetch;
  /** Called to wait this many seconds between attempts. */
  sleep?: (seconds: number) => Promise<unknown> | unknown;
}

export interface Start {
  text?: string;
  tokens?: number[];
  messages?: Message[];
  /** A version of another session. */
  version?: string;
  seed?: number;
  metadata?: Record<string, string>;
  ttlSeconds?: number;
  label?: string;
  /** With several models on the server; default: its first. A version needs the model that made it. */
  model?: string;
}

export interface Filters {
  order?: 'asc' | 'desc';
  metadata?: Record<string, string>;
  label?: string;
  tag?: string;
  /** Id of a session. */
  forkedFrom?: string;
  /** With several models on the server; default: its first. */
  model?: string;
}

/** A server. */
export class Tidegate {
  constructor(options?: ClientOptions);
  create(start?: Start): Promise<Session>;
  session(id: string): Promise<Session>;
  /** Returns a handle to an existing session, without a request to the server. */
  handle(id: string, version?: string): Session;
  /** Yields your sessions that match all given filters, newest first by default. */
  sessions(filters?: Filters): AsyncGenerator<Session, void, undefined>;
  /** Creates a session from a file that `save` returned. */
  load(snapshot: Uint8Array | ArrayBuffer | Blob, options?: { model?: string }): Promise<Session>;
}

export interface Range {
  version?: string;
  start?: number;
  end?: number;
}

/** A conversation that the server keeps. */
export class Session {
  private constructor();
  readonly id: string;
  /** The latest version that this client has seen. */
  version: string;
  info: SessionInfo;
  say(text: string, options?: TurnOptions): Promise<Reply>;
  say(turn?: Turn): Promise<Reply>;
  stream(text: string, options?: TurnOptions): Stream;
  stream(turn?: Turn): Stream;
  /** Like `say`, but generates `n` answers at once and keeps the one with the highest log probability per token. */
  bestOf(n: number, text: string, options?: TurnOptions): Promise<Reply>;
  bestOf(n: number, turn?: Turn): Promise<Reply>;
  append(text: { text?: string; tokens?: number[]; messages?: Message[]; label?: string }): Promise<number>;
  fork(n?: number, options?: { version?: string; metadata?: Record<string, string>; ttlSeconds?: number }): Promise<Session[]>;
  /** Moves the session back to a version, given by its id or a tag. */
  rewind(version: string): Promise<void>;
  save(options?: { version?: string }): Promise<Uint8Array>;
  load(snapshot: Uint8Array | ArrayBuffer | Blob, options?: { model?: string }): Promise<void>;
  text(range?: Range): Promise<string>;
  tokens(range?: Range): Promise<number[]>;
  messages(range?: Range): Promise<Array<Message & { version: string }>>;
  turns(): Promise<Array<Record<string, any>>>;
  lineage(options?: { version?: string; other?: string }): Promise<Record<string, any>>;
  diff(from: string, to?: string): Promise<SessionDiff>;
  tags(): Promise<Array<Record<string, any>>>;
  tag(name: string, version?: string): Promise<void>;
  untag(name: string): Promise<void>;
  update(changes: { metadata?: Record<string, string>; ttlSeconds?: number | null; label?: string }): Promise<SessionInfo>;
  refresh(): Promise<SessionInfo>;
  delete(): Promise<void>;
}

/**
 * The answer of a turn, as it is generated. It can be iterated over once. Leaving the loop early ends the turn and keeps
 * the text so far. A planned restart of the server may also end it, with the finish reason `length`; `say()` continues it.
 */
export class Stream implements AsyncIterable<string> {
  private constructor();
  readonly text: string;
  /** The result of the turn; throws until the stream has ended. */
  readonly reply: Reply;
  [Symbol.asyncIterator](): AsyncGenerator<string, void, undefined>;
  close(): Promise<void>;
}

export class TidegateError extends Error {}
export class ConnectionFailed extends TidegateError {}
export class StreamDiverged extends TidegateError {}
export class APIError extends TidegateError {
  /** Null for an error in the middle of a stream. */
  readonly status: number | null;
  readonly type: string | null;
  readonly code: string | null;
  readonly param: string | null;
  readonly requestId: string | null;
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
