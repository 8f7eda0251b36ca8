-- What one model's servers share. Ids are the server's own and are compared by their bytes. What clients write is bytea,
-- because it may hold a zero byte, which text cannot.

-- Each transaction that writes locks the row of its owner first, so that the writes of one owner follow each other and the
-- counters below never need a lock of their own.
CREATE TABLE owners (
    owner bytea PRIMARY KEY,
    -- Sessions, and the number of the next one.
    sessions bigint NOT NULL DEFAULT 0,
    next bigint NOT NULL DEFAULT 0,
    -- Sessions that keep more than their head, and responses: what can be evicted.
    evictable bigint NOT NULL DEFAULT 0,
    -- Versions that anything keeps, and the bytes of their objects.
    versions bigint NOT NULL DEFAULT 0,
    live bigint NOT NULL DEFAULT 0,
    -- Bytes of receipts and of texts.
    receipts bigint NOT NULL DEFAULT 0,
    texts bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- Has a row once a server has begun to use the tables. Before, no object may be there, because none could be named.
CREATE TABLE begun (
    at timestamptz NOT NULL
);

-- The bytes of all owners and of the garbage are the sum of these rows. Each connection adds to a row of its own, so that
-- commits do not wait for each other, and reading the sum takes no time that grows with the owners.
CREATE TABLE used (
    stripe integer PRIMARY KEY,
    bytes bigint NOT NULL
) WITH (fillfactor = 10);

CREATE TABLE sessions (
    id text COLLATE "C" PRIMARY KEY,
    owner bytea NOT NULL,
    -- Order of creation among the owner's.
    number bigint NOT NULL,
    -- Unix seconds.
    created bigint NOT NULL,
    updated bigint NOT NULL,
    -- Unix milliseconds.
    used bigint NOT NULL,
    -- Seconds.
    ttl bigint,
    ends bigint GENERATED ALWAYS AS (
        CASE WHEN ttl < 4000000000000000 THEN used + ttl * 1000 WHEN ttl IS NOT NULL THEN 9223372036854775807 END
    ) STORED,
    head text COLLATE "C" NOT NULL,
    -- Position of the next version; versions kept, and listed without their objects.
    next bigint NOT NULL,
    kept bigint NOT NULL,
    known bigint NOT NULL,
    -- JSON objects; NULL for an empty one.
    metadata bytea,
    tags bytea,
    forked_from text COLLATE "C",
    forked_from_version text COLLATE "C"
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX sessions_by_number ON sessions (owner, number);
CREATE INDEX sessions_by_end ON sessions (ends, id) WHERE ends IS NOT NULL;
-- The order of eviction.
CREATE INDEX sessions_by_use ON sessions (owner, used, id) WHERE kept > 1;

CREATE TABLE versions (
    id text COLLATE "C" PRIMARY KEY,
    -- Empty for the claim of an object that no version had: it keeps a late commit from adding that version.
    owner bytea NOT NULL,
    parent text COLLATE "C",
    tokens bigint NOT NULL,
    -- Unix milliseconds.
    time bigint NOT NULL,
    label bytea,
    kind text NOT NULL,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    bytes bigint NOT NULL,
    seed bigint,
    kept_by bigint NOT NULL,
    known_by bigint NOT NULL,
    -- A JSON list; NULL for an empty one.
    origin bytea,
    session text COLLATE "C"
) WITH (fillfactor = 80);

CREATE TABLE lineage (
    session text COLLATE "C" NOT NULL,
    position bigint NOT NULL,
    version text COLLATE "C" NOT NULL,
    kept boolean NOT NULL,
    PRIMARY KEY (session, position)
);
-- A session keeps few of the versions that it lists.
CREATE INDEX lineage_kept ON lineage (session, position) WHERE kept;

CREATE TABLE responses (
    id text COLLATE "C" PRIMARY KEY,
    owner bytea NOT NULL,
    version text COLLATE "C" NOT NULL,
    ends bigint NOT NULL,
    body bytea NOT NULL
);
CREATE INDEX responses_by_end ON responses (ends, id);
CREATE INDEX responses_by_owner ON responses (owner, ends, id);

CREATE TABLE receipts (
    owner bytea NOT NULL,
    key bytea NOT NULL,
    ends bigint NOT NULL,
    -- What it counts towards the budgets.
    bytes bigint NOT NULL,
    answer bytea NOT NULL,
    PRIMARY KEY (owner, key)
);
CREATE INDEX receipts_by_end ON receipts (ends, owner, key);

CREATE TABLE texts (
    id text COLLATE "C" PRIMARY KEY,
    owner bytea NOT NULL,
    parent text COLLATE "C",
    -- Its version, if that is listed, and the texts that continue it.
    refs bigint NOT NULL,
    tokens bigint NOT NULL,
    messages bigint NOT NULL,
    -- What it counts towards the budgets.
    bytes bigint NOT NULL,
    content bytea NOT NULL
) WITH (fillfactor = 90);
CREATE INDEX texts_dead ON texts (owner, id) WHERE refs = 0;

-- Objects that nothing points to any more, and that may still exist.
CREATE TABLE garbage (
    id text COLLATE "C" PRIMARY KEY,
    bytes bigint NOT NULL
);

-- The servers that use the index, and when each was alive, by the clock of the database.
CREATE TABLE servers (
    id text COLLATE "C" PRIMARY KEY,
    seen timestamptz NOT NULL
) WITH (fillfactor = 10);

-- The sessions that servers work on.
CREATE TABLE leases (
    session text COLLATE "C" PRIMARY KEY,
    server text COLLATE "C" NOT NULL
);

-- Streams that another server can compute again.
CREATE TABLE streams (
    id text PRIMARY KEY,
    owner bytea NOT NULL,
    -- Who writes it; NULL if nobody does.
    server text COLLATE "C",
    ends bigint NOT NULL,
    -- Whether its turn has ended; of one that was only given up, another server must find the record.
    ended boolean NOT NULL DEFAULT false,
    record bytea NOT NULL
);
CREATE INDEX streams_by_end ON streams (ends);
CREATE INDEX ended_streams_by_owner ON streams (owner, ends) WHERE ended;
