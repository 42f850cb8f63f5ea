-- The tables. One statement after another, each ending in a semicolon at the end of a line; `schema.py` applies them.
--
-- A table that is there already is brought up to date behind its CREATE, by statements that change nothing the second
-- time (ADD COLUMN IF NOT EXISTS, with a default that is right for old rows). They stay for ever and are never undone:
-- a database of any earlier version becomes one of this version by applying the file.
--
-- All data tables are plain MergeTree: every record of the log is a row (or several), none is ever replaced, and views
-- say which ones count. `kafka_topic`, `kafka_partition` and `kafka_offset` name the record a row came from.
--
-- * non_replicated_deduplication_window: the sink inserts fixed offset ranges under a token; a range inserted again
--   after a crash is left out by ClickHouse. Without the window a plain MergeTree forgets tokens at once.
-- * No TTL: a replayed old topic must not vanish on insert.
-- * Token arrays are plain ZSTD: T64 and Delta make token ids larger, for they have no numeric locality.
-- * Not safe against power loss (no fsync_after_insert): the log is the durable copy, and can be read again.

CREATE TABLE IF NOT EXISTS schema_version (
    version UInt32,
    applied_at DateTime64(3) DEFAULT now64(3)
) ENGINE = MergeTree ORDER BY version
SETTINGS non_replicated_deduplication_window = 100;

-- What was asked for: one row per record of `tasks`; a task published twice has two.
CREATE TABLE IF NOT EXISTS tasks (
    run LowCardinality(String),
    `group` String,
    sample UInt32,
    samples UInt32,
    attempt UInt32,
    source LowCardinality(String),
    visit UInt32,
    row UInt64,
    payload String CODEC(ZSTD(1)),
    payload_digest String,
    family LowCardinality(String),
    seed UInt64,
    admission Nullable(UInt64),
    start_by DateTime64(3),
    due_at DateTime64(3),                      -- start_by and the time budgets of all stages
    horizon UInt32,
    temperature Float64,
    min_version UInt64,
    redrive_of String,
    published_at DateTime64(3),
    kafka_topic LowCardinality(String),
    kafka_partition UInt32,
    kafka_offset UInt64
) ENGINE = MergeTree ORDER BY (run, `group`, sample, kafka_partition, kafka_offset)
SETTINGS non_replicated_deduplication_window = 10000;

-- How samples ended: one row per record of `trajectories`, also those that do not count (see `accepted`).
CREATE TABLE IF NOT EXISTS trajectories (
    run LowCardinality(String),
    `group` String,
    sample UInt32,
    samples UInt32,
    attempt UInt32,
    source LowCardinality(String),
    visit UInt32,
    row UInt64,
    payload_digest String,
    family LowCardinality(String),
    seed UInt64,
    admission Nullable(UInt64),
    outcome LowCardinality(String),            -- completed, failed, cancelled, expired
    reward Float64,                            -- shaped; 0 unless completed (in `accepted`, NULL)
    success Float64,                           -- unshaped, in [0, 1]; 0 unless completed (in `accepted`, NULL)
    truncated UInt8,
    components Map(LowCardinality(String), Float64),
    failure_kind LowCardinality(String),
    boundary LowCardinality(String),
    cause String CODEC(ZSTD(1)),
    stop LowCardinality(String),
    stage LowCardinality(String),
    backend LowCardinality(String),
    tokenizer_digest LowCardinality(String),
    verdict String CODEC(ZSTD(1)),             -- JSON
    turns UInt32,
    invalid_turns UInt32,
    tokens UInt64,
    sampled_tokens UInt64,
    segments UInt32,
    min_version UInt64,                        -- lowest and highest version of the weights that sampled it
    max_version UInt64,
    began_at DateTime64(3),
    ended_at DateTime64(3),
    tail Array(Int32) CODEC(ZSTD(1)),          -- tokens after the last turn: what the environment said last
    content String,                            -- SHA-256 of the record's uncompressed bytes
    published_at DateTime64(3),
    kafka_topic LowCardinality(String),
    kafka_partition UInt32,
    kafka_offset UInt64
) ENGINE = MergeTree ORDER BY (run, `group`, sample, kafka_offset)
SETTINGS non_replicated_deduplication_window = 10000;

-- One row per turn of a record of `trajectories`; tokens, mask and log-probs are those of the turn.
CREATE TABLE IF NOT EXISTS turns (
    run LowCardinality(String),
    `group` String,
    sample UInt32,
    attempt UInt32,
    turn UInt32,
    sampled UInt32,                            -- index in `tokens` of the first sampled one
    segment UInt32,
    valid UInt8,
    action String CODEC(ZSTD(1)),
    turn_reward Float64,                       -- process reward, beside the shaped one in `trajectories`; 0 if none
    finish LowCardinality(String),
    version UInt64,                            -- highest version of the weights that sampled in it
    temperature Float64,
    began_at DateTime64(3),
    generated_at DateTime64(3),
    ended_at DateTime64(3),
    tokens Array(Int32) CODEC(ZSTD(1)),
    mask Array(UInt8) CODEC(ZSTD(1)),
    logprobs Array(Float32) CODEC(ZSTD(1)),
    kafka_topic LowCardinality(String),
    kafka_partition UInt32,
    kafka_offset UInt64
) ENGINE = MergeTree ORDER BY (run, `group`, sample, kafka_offset, turn)
SETTINGS non_replicated_deduplication_window = 10000, index_granularity = 256;

-- Since version 4. What the turns of rows that are there already earned is in the log alone.
ALTER TABLE turns ADD COLUMN IF NOT EXISTS turn_reward Float64 AFTER action;

-- What happened to samples inside the stages.
CREATE TABLE IF NOT EXISTS events (
    run LowCardinality(String),
    `group` String,
    sample UInt32,
    attempt UInt32,
    stage LowCardinality(String),
    kind LowCardinality(String),
    at DateTime64(3),
    took_ms UInt64,
    waited_ms UInt64,
    detail String CODEC(ZSTD(1)),
    worker LowCardinality(String),
    kafka_topic LowCardinality(String),
    kafka_partition UInt32,
    kafka_offset UInt64
) ENGINE = MergeTree ORDER BY (run, stage, at)
SETTINGS non_replicated_deduplication_window = 10000;

-- What the trainer wrote down: one row per record of `decisions`, also fenced ones (see `placed`).
CREATE TABLE IF NOT EXISTS decisions (
    run LowCardinality(String),
    kind LowCardinality(String),               -- started, step, dropped, version, ended, branch, evaluated, alarm
    epoch UInt64,
    step UInt64,                               -- of a branch: the last one that stays
    position UInt64,                           -- next offset of `trajectories` when it was made
    `group` String,                            -- of a dropped group
    reason LowCardinality(String),
    version UInt64,
    members UInt32,
    digest String,
    advantage_digest String,
    body String CODEC(ZSTD(1)),                -- the rest, as JSON
    published_at DateTime64(3),
    kafka_topic LowCardinality(String),
    kafka_partition UInt32,
    kafka_offset UInt64
) ENGINE = MergeTree ORDER BY (run, kafka_offset)
SETTINGS non_replicated_deduplication_window = 10000;

-- The samples that a decision names, each with what it decided for them.
CREATE TABLE IF NOT EXISTS decision_samples (
    run LowCardinality(String),
    epoch UInt64,
    step UInt64,
    place LowCardinality(String),              -- trained, buffered, filtered, stale, incomplete, unused
    `group` String,
    sample UInt32,
    trajectory_offset UInt64,                  -- the record it says was accepted
    reward Float64,                            -- as used in the step; 0 unless trained
    content String,                            -- SHA-256 of that record, if trained
    kafka_topic LowCardinality(String),
    kafka_partition UInt32,
    kafka_offset UInt64                        -- of the decision
) ENGINE = MergeTree ORDER BY (run, `group`, sample, kafka_offset)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE TABLE IF NOT EXISTS metrics (
    run LowCardinality(String),
    service LowCardinality(String),
    name LowCardinality(String),
    value Float64 CODEC(ZSTD(1)),
    at DateTime64(3) CODEC(Delta, ZSTD(1)),
    step UInt64 CODEC(ZSTD(1)),
    labels Map(LowCardinality(String), String),
    kafka_topic LowCardinality(String),
    kafka_partition UInt32,
    kafka_offset UInt64 CODEC(Delta, ZSTD(1))
) ENGINE = MergeTree ORDER BY (run, name, at)
SETTINGS non_replicated_deduplication_window = 10000;

-- What could not be handled: the original bytes and why. `source_*` is where the record lay first.
CREATE TABLE IF NOT EXISTS dead (
    source_topic LowCardinality(String),
    source_partition UInt32,
    source_offset UInt64,
    stage LowCardinality(String),
    kind LowCardinality(String) DEFAULT headers['x-kind'],   -- what it died of: a failure's kind, poison, conflict ...
    cause String CODEC(ZSTD(1)),
    subject String,                            -- run/group/sample, when the headers say so
    key String,
    value String CODEC(ZSTD(1)),
    headers Map(String, String),
    published_at DateTime64(3),
    kafka_topic LowCardinality(String),
    kafka_partition UInt32,
    kafka_offset UInt64
) ENGINE = MergeTree ORDER BY (source_topic, source_partition, source_offset)
SETTINGS non_replicated_deduplication_window = 10000;

-- Since version 2. Rows that are there already answer with what their headers say.
ALTER TABLE dead ADD COLUMN IF NOT EXISTS kind LowCardinality(String) DEFAULT headers['x-kind'] AFTER stage;

-- How far the sink is: rows of all offsets below `position` are stored. Read max(position).
CREATE TABLE IF NOT EXISTS positions (
    topic LowCardinality(String),
    partition UInt32,
    position UInt64,
    stored_at DateTime64(3) DEFAULT now64(3)
) ENGINE = ReplacingMergeTree(position) ORDER BY (topic, partition)
SETTINGS non_replicated_deduplication_window = 100;

-- The record that counts for each sample, as schemas/arbiter.py rules: the first one in the log among those with the
-- digest of the group's first one. What was not completed has no grade, so an average is that of the graded ones.
CREATE OR REPLACE VIEW accepted AS
SELECT * REPLACE (
    if(outcome = 'completed', reward, NULL) AS reward,
    if(outcome = 'completed', success, NULL) AS success
)
FROM trajectories
WHERE (run, `group`, sample, kafka_offset) IN (
    SELECT run, `group`, sample, min(kafka_offset)
    FROM trajectories
    WHERE (run, `group`, payload_digest) IN (
        SELECT run, `group`, argMin(payload_digest, kafka_offset) FROM trajectories GROUP BY run, `group`
    )
    GROUP BY run, `group`, sample
);

-- Records that speak of another task under an id that was taken.
CREATE OR REPLACE VIEW conflicts AS
SELECT * FROM trajectories
WHERE (run, `group`, payload_digest) NOT IN (
    SELECT run, `group`, argMin(payload_digest, kafka_offset) FROM trajectories GROUP BY run, `group`
);

-- Where each sample of a run is, by the rules of schemas/dispositions.py, and what contradicts them.
--
-- `..._end` are the end offsets of a topic's partitions, in order; rows at or beyond them are left out, so that the
-- answer is about one moment. An empty array leaves nothing out. `now_ms` is when an open sample is overdue.
-- A bucket other than open and unread is always named by a row; a sample that no row places is `unaccounted`.
CREATE OR REPLACE VIEW placed AS
WITH
    admitted_samples AS (
        SELECT `group`, sample, max(due_at) AS due
        FROM tasks
        WHERE run = {run:String}
            AND (empty({tasks_end:Array(UInt64)}) OR kafka_offset < {tasks_end:Array(UInt64)}[kafka_partition + 1])
        GROUP BY `group`, sample
    ),
    terminal AS (
        SELECT `group`, sample, payload_digest, outcome, stage, kafka_offset
        FROM trajectories
        WHERE run = {run:String}
            AND (
                empty({trajectories_end:Array(UInt64)})
                OR kafka_offset < {trajectories_end:Array(UInt64)}[kafka_partition + 1]
            )
    ),
    ended AS (
        SELECT
            `group`,
            sample,
            argMin(outcome, kafka_offset) AS outcome,
            -- A replay brings outcomes of tasks that another run admitted: each brings its sample along.
            argMin(stage, kafka_offset) = 'replay' AS is_brought,
            min(kafka_offset) AS offset
        FROM terminal
        WHERE (`group`, payload_digest) IN (
            SELECT `group`, argMin(payload_digest, kafka_offset) FROM terminal GROUP BY `group`
        )
        GROUP BY `group`, sample
    ),
    decided AS (
        SELECT kind, epoch, step, position, `group`, reason, version, digest, advantage_digest, kafka_offset
        FROM decisions
        WHERE run = {run:String}
            AND (
                empty({decisions_end:Array(UInt64)})
                OR kafka_offset < {decisions_end:Array(UInt64)}[kafka_partition + 1]
            )
    ),
    -- A decision counts if no other trainer started between its own start and itself. The log may hold one record
    -- twice after a lost acknowledgement: the repeat says nothing new.
    (SELECT groupArray(kafka_offset) FROM decided WHERE kind = 'started') AS starts,
    live AS (
        SELECT kind, step, position, first_offset AS kafka_offset
        FROM (
            SELECT kind, step, position, min(kafka_offset) AS first_offset
            FROM decided
            WHERE kind != 'started'
                AND has(starts, epoch)
                AND epoch < kafka_offset
                AND NOT arrayExists(start -> start > epoch AND start < kafka_offset, starts)
            GROUP BY kind, epoch, step, position, `group`, reason, version, digest, advantage_digest
        )
    ),
    -- A branch undoes the steps behind the one it names: their samples are rolled back, and their groups stay closed.
    (SELECT groupArray((kafka_offset, step)) FROM live WHERE kind = 'branch') AS branches,
    -- The last step, or the end, says what waits and up to where the trainer has accounted for everything. That of an
    -- undone step stands until the next one: what waited then still waits.
    (SELECT max(kafka_offset) FROM live WHERE kind IN ('step', 'ended')) AS last_account,
    (SELECT argMax(position, kafka_offset) FROM live WHERE kind IN ('step', 'ended')) AS accounted_to,
    named AS (
        SELECT
            `group`,
            sample,
            uniqExactIf(kafka_offset, place NOT IN ('buffered', 'unused')) AS settled,
            argMin(
                if(
                    place = 'trained' AND arrayExists(b -> b.1 > kafka_offset AND b.2 < step, branches),
                    'rolled_back',
                    place
                ),
                (place IN ('buffered', 'unused'), kafka_offset)
            ) AS named_place,
            argMin(trajectory_offset, (place IN ('buffered', 'unused'), kafka_offset)) AS named_offset
        FROM decision_samples
        WHERE run = {run:String}
            AND kafka_offset IN (SELECT kafka_offset FROM live)
            AND (place NOT IN ('buffered', 'unused') OR kafka_offset = last_account)
        GROUP BY `group`, sample
    ),
    joined AS (
        SELECT
            `group`,
            sample,
            max(is_admitted) AS is_admitted,
            max(due) AS due_at,
            max(is_ended) AS is_ended,
            max(outcome) AS outcome,
            max(offset) AS offset,
            max(settled) AS settled,
            max(place) AS place,
            max(named_offset) AS named_offset
        FROM (
            SELECT `group`, sample, 1 AS is_admitted, due, 0 AS is_ended, '' AS outcome, 0 AS offset,
                0 AS settled, '' AS place, 0 AS named_offset
            FROM admitted_samples
            UNION ALL
            SELECT `group`, sample, is_brought, toDateTime64(0, 3), 1, outcome, offset, 0, '', 0 FROM ended
            UNION ALL
            SELECT `group`, sample, 0, toDateTime64(0, 3), 0, '', 0, settled, named_place, named_offset FROM named
        )
        GROUP BY `group`, sample
    )
SELECT
    `group`,
    sample,
    is_admitted,
    offset,
    multiIf(
        NOT is_ended, 'open',
        outcome != 'completed', outcome,
        place != '', place,
        offset >= accounted_to, 'unread',
        'unaccounted'
    ) AS bucket,
    arrayFilter(text -> text != '', [
        if(is_admitted, '', '(a) has a record or a decision, but no task admitted it'),
        if(bucket = 'open' AND is_admitted AND toUnixTimestamp64Milli(due_at) < {now_ms:Int64},
            concat('(a) open past its time, ', toString(due_at)), ''),
        if(place != '' AND (NOT is_ended OR outcome != 'completed' OR named_offset != offset),
            concat('(b) ', place, ' names offset ', toString(named_offset), '; ',
                if(is_ended, concat('accepted is a ', outcome, ' record at ', toString(offset)),
                    'no record is accepted')), ''),
        if(bucket = 'unaccounted',
            concat('(c) read at offset ', toString(offset), ', but no decision names it'), ''),
        if(settled > 1, concat('(d) in ', toString(settled), ' live decisions'), '')
    ]) AS violations
FROM joined;

-- One line that must add up, over everything stored for a run. 90 s after its time an open sample should have been
-- expired by the reaper.
CREATE OR REPLACE VIEW conservation AS
SELECT
    countIf(is_admitted) AS admitted,
    countIf(is_admitted AND bucket = 'open') AS open,
    countIf(is_admitted AND bucket = 'failed') AS failed,
    countIf(is_admitted AND bucket = 'cancelled') AS cancelled,
    countIf(is_admitted AND bucket = 'expired') AS expired,
    countIf(is_admitted AND bucket = 'buffered') AS buffered,
    countIf(is_admitted AND bucket = 'trained') AS trained,
    countIf(is_admitted AND bucket = 'filtered') AS filtered,
    countIf(is_admitted AND bucket = 'stale') AS stale,
    countIf(is_admitted AND bucket = 'incomplete') AS incomplete,
    countIf(is_admitted AND bucket = 'rolled_back') AS rolled_back,
    countIf(is_admitted AND bucket = 'unread') AS unread,
    countIf(is_admitted AND bucket = 'unused') AS unused,
    countIf(notEmpty(violations)) AS violations,
    (open + failed + cancelled + expired + buffered + trained + filtered + stale + incomplete + rolled_back
        + unread + unused = admitted) AND violations = 0 AS conserved
FROM placed(
    run = {run:String},
    tasks_end = [],
    trajectories_end = [],
    decisions_end = [],
    now_ms = toUnixTimestamp64Milli(now64(3)) - 90000
);
