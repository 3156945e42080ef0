-- The schema of a speclen database, for reading. Written by `python -m speclen.store.schema.migrations > store/schema.sql`.
-- Seconds end in _s, times that end in _at are seconds since 1970 (UTC), counts begin with num_.

CREATE TABLE contexts (
  -- What step times depend on. Acceptance depends on (target, draft) alone.
  context_id INTEGER PRIMARY KEY,
  target TEXT NOT NULL CHECK (target <> ''),
  draft TEXT NOT NULL,
  device TEXT NOT NULL CHECK (device <> ''),
  dtype TEXT NOT NULL CHECK (dtype <> ''),
  engine_fingerprint TEXT NOT NULL,  -- digest of whatever else in the engine changes step times
  max_batch_size INTEGER NOT NULL CHECK (max_batch_size BETWEEN 1 AND 4096),
  max_speculation_length INTEGER NOT NULL CHECK (max_speculation_length BETWEEN 0 AND 64),
  decision_version INTEGER NOT NULL CHECK (decision_version >= 0),  -- grows with every change of any choice
  created_at REAL NOT NULL CHECK (created_at >= 0),  -- every *_at: seconds since 1970, UTC
  updated_at REAL NOT NULL CHECK (updated_at >= 0), max_copied_tokens INTEGER NOT NULL DEFAULT 0 CHECK (max_copied_tokens BETWEEN 0 AND 64),
  UNIQUE (target, draft, device, dtype, engine_fingerprint)
) STRICT;

CREATE TABLE workers (
  -- The newest life (epoch) of every worker and how far it was heard.
  worker_key INTEGER PRIMARY KEY,
  worker_id TEXT NOT NULL UNIQUE CHECK (length(worker_id) BETWEEN 1 AND 128),
  epoch INTEGER NOT NULL CHECK (epoch >= 0),
  context_id INTEGER NOT NULL REFERENCES contexts,
  address TEXT NOT NULL,
  policy TEXT NOT NULL,  -- what the worker does with the table: adaptive, profile, fixed:4, none, copy, plan
  max_batch_size INTEGER NOT NULL CHECK (max_batch_size BETWEEN 1 AND 4096),
  max_speculation_length INTEGER NOT NULL CHECK (max_speculation_length BETWEEN 0 AND 64),
  applied_seq INTEGER NOT NULL CHECK (applied_seq >= 0),  -- reports of this epoch up to here are in the estimates
  missing_ranges TEXT NOT NULL CHECK (json_valid(missing_ranges)),  -- [[first, last], ...] below applied_seq: not seen
  num_reports INTEGER NOT NULL CHECK (num_reports >= 0),  -- learned from, all epochs together
  num_repeated INTEGER NOT NULL CHECK (num_repeated >= 0),  -- recognised as repetitions and ignored
  num_missing INTEGER NOT NULL CHECK (num_missing >= 0),  -- skipped by gaps in seq
  num_refused INTEGER NOT NULL CHECK (num_refused >= 0),  -- not plausible
  registered_at REAL NOT NULL CHECK (registered_at >= 0),
  last_seen_at REAL NOT NULL CHECK (last_seen_at >= 0)
, max_copied_tokens INTEGER NOT NULL DEFAULT 0 CHECK (max_copied_tokens BETWEEN 0 AND 64)) STRICT;

CREATE TABLE profiles (
  -- Offline profiles, as imported.
  profile_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  source TEXT NOT NULL,
  as_prior INTEGER NOT NULL CHECK (as_prior IN (0, 1)),  -- 1: measured elsewhere, a starting point only
  survival TEXT NOT NULL CHECK (json_valid(survival)),  -- entry i: P(draft tokens 0..i all accepted)
  num_survival_rows TEXT NOT NULL CHECK (json_valid(num_survival_rows)),  -- rows behind each entry
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),  -- last group of step_reports learned from before it
  imported_at REAL NOT NULL CHECK (imported_at >= 0)
) STRICT;

CREATE TABLE profile_cells (
  -- Mean step time by batch size and length, as measured for a profile.
  profile_id INTEGER NOT NULL REFERENCES profiles,
  batch_size INTEGER NOT NULL CHECK (batch_size BETWEEN 1 AND 4096),
  speculation_length INTEGER NOT NULL CHECK (speculation_length BETWEEN 0 AND 64),
  step_s REAL NOT NULL CHECK (step_s > 0 AND step_s <= 3600),  -- mean wall time of a whole step
  step_s_stderr REAL NOT NULL CHECK (step_s_stderr >= 0 AND step_s_stderr <= 3600),
  num_steps INTEGER NOT NULL CHECK (num_steps >= 1),
  mean_context_length REAL NOT NULL CHECK (mean_context_length >= 0 AND mean_context_length < 1e9),
  PRIMARY KEY (profile_id, batch_size, speculation_length)
) STRICT, WITHOUT ROWID;

CREATE TABLE acceptance (
  -- Survival per draft position of a pair: shared by all hardware, with a correction per band of batch sizes.
  target TEXT NOT NULL,
  draft TEXT NOT NULL,
  batch_min INTEGER NOT NULL CHECK (batch_min >= 0),  -- 0 and 0: the estimate shared by all bands
  batch_max INTEGER NOT NULL CHECK (batch_max >= batch_min),
  position INTEGER NOT NULL CHECK (position BETWEEN 1 AND 64),  -- 1 is the first draft token
  survival REAL NOT NULL CHECK (survival BETWEEN 0 AND 1),  -- P(positions 1..position all accepted)
  num_trials REAL NOT NULL CHECK (num_trials >= 0 AND num_trials < 1e15),  -- rows behind it, after forgetting
  updated_at REAL NOT NULL CHECK (updated_at >= 0),
  PRIMARY KEY (target, draft, batch_min, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE latency_cells (
  -- What is believed about each length in each bucket of a context. The view learned_table is made for reading.
  context_id INTEGER NOT NULL REFERENCES contexts,
  batch_min INTEGER NOT NULL CHECK (batch_min BETWEEN 1 AND 4096),
  batch_max INTEGER NOT NULL CHECK (batch_max BETWEEN batch_min AND 4096),
  speculation_length INTEGER NOT NULL CHECK (speculation_length BETWEEN 0 AND 64),
  step_s REAL NOT NULL CHECK (step_s > 0 AND step_s < 1e6),  -- expected wall time of a whole step
  expected_tokens REAL NOT NULL CHECK (expected_tokens BETWEEN 1 AND 65),  -- per row and step, from acceptance
  ms_per_token_low REAL NOT NULL CHECK (ms_per_token_low >= 0),  -- 95% interval
  ms_per_token_high REAL NOT NULL CHECK (ms_per_token_high >= ms_per_token_low AND ms_per_token_high < 1e12),
  num_steps INTEGER NOT NULL CHECK (num_steps >= 0),
  source TEXT NOT NULL CHECK (source IN ('profile', 'online', 'both', 'prior')),
  is_best INTEGER NOT NULL CHECK (is_best IN (0, 1)),
  updated_at REAL NOT NULL CHECK (updated_at >= 0), observed_step_s REAL CHECK (observed_step_s IS NULL OR (observed_step_s > 0 AND observed_step_s < 1e6)), num_reports_since INTEGER CHECK (num_reports_since >= 0), bare_step_s REAL CHECK (bare_step_s IS NULL OR (bare_step_s > 0 AND bare_step_s < 1e6)),
  PRIMARY KEY (context_id, batch_min, speculation_length)
) STRICT, WITHOUT ROWID;

CREATE TABLE learned_states (
  -- The estimator's own state, from which a restarted controller goes on. JSON.
  scope TEXT NOT NULL CHECK (scope IN ('context', 'pair')),
  key TEXT NOT NULL CHECK (key <> ''),  -- context_id, or ["target", "draft"]
  state TEXT NOT NULL CHECK (json_valid(state)),
  updated_at REAL NOT NULL CHECK (updated_at >= 0),
  PRIMARY KEY (scope, key)
) STRICT;

CREATE TABLE decisions (
  -- Every change of a bucket's choice.
  decision_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  batch_min INTEGER NOT NULL CHECK (batch_min BETWEEN 1 AND 4096),
  batch_max INTEGER NOT NULL CHECK (batch_max BETWEEN batch_min AND 4096),
  decision_version INTEGER NOT NULL CHECK (decision_version >= 0),
  previous_length INTEGER CHECK (previous_length BETWEEN 0 AND 64),  -- NULL: the first choice
  speculation_length INTEGER NOT NULL CHECK (speculation_length BETWEEN 0 AND 64),
  previous_ms_per_token REAL CHECK (previous_ms_per_token > 0 AND previous_ms_per_token < 1e12),
  ms_per_token REAL CHECK (ms_per_token > 0 AND ms_per_token < 1e12),  -- both estimates are of the same moment
  reason TEXT NOT NULL,
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),  -- last group of step_reports learned from before it
  decided_at REAL NOT NULL CHECK (decided_at >= 0)
, previous_plan TEXT, plan TEXT) STRICT;

CREATE INDEX decisions_by_bucket ON decisions (context_id, batch_min, decision_id);

CREATE TABLE step_reports (
  -- Raw reports in the order in which they were learned from; only the newest are kept. No index but this key: the
  -- high-water mark in workers keeps repetitions out, and every further index would slow each report down.
  report_id INTEGER PRIMARY KEY,
  group_id INTEGER NOT NULL CHECK (group_id >= 1),  -- reports learned from in one call share it
  context_id INTEGER NOT NULL REFERENCES contexts,
  worker_key INTEGER NOT NULL REFERENCES workers,
  epoch INTEGER NOT NULL CHECK (epoch >= 0),
  seq INTEGER NOT NULL CHECK (seq >= 1),
  batch_size INTEGER NOT NULL CHECK (batch_size BETWEEN 1 AND 4096),  -- decoding rows
  speculation_length INTEGER NOT NULL CHECK (speculation_length BETWEEN 0 AND 64),  -- actually used
  latency_s REAL NOT NULL CHECK (latency_s > 0 AND latency_s <= 3600),  -- wall time of the whole step
  accepted_histogram TEXT NOT NULL CHECK (json_valid(accepted_histogram)),  -- entry j: rows that accepted exactly j
  num_accepted_tokens INTEGER NOT NULL CHECK (num_accepted_tokens BETWEEN 0 AND batch_size * speculation_length),
  mean_context_length REAL NOT NULL CHECK (mean_context_length >= 0 AND mean_context_length < 1e9),
  decision_version INTEGER NOT NULL CHECK (decision_version >= 0),
  probe_id INTEGER NOT NULL CHECK (probe_id >= 0),  -- 0: the table's own choice
  flags TEXT NOT NULL,  -- why the step must not teach ('prefill catch_up'), empty for an ordinary one
  received_at REAL NOT NULL CHECK (received_at >= 0)
, class_histograms TEXT CHECK (class_histograms IS NULL OR json_valid(class_histograms)), num_steps INTEGER NOT NULL DEFAULT 1 CHECK (num_steps BETWEEN 1 AND 65536), latency_sd_s REAL CHECK (latency_sd_s IS NULL OR latency_sd_s >= 0), copying TEXT CHECK (copying IS NULL OR json_valid(copying)), draft_prompt_s REAL NOT NULL DEFAULT 0 CHECK (draft_prompt_s >= 0), num_new_rows INTEGER NOT NULL DEFAULT 0 CHECK (num_new_rows >= 0)) STRICT;

CREATE TABLE prediction_windows (
  -- Predicted against observed, by minute: what the estimates stored before each commit said of the commit's reports.
  context_id INTEGER NOT NULL REFERENCES contexts,
  window_start INTEGER NOT NULL CHECK (window_start >= 0),  -- a whole minute, seconds since 1970, UTC
  batch_min INTEGER NOT NULL CHECK (batch_min BETWEEN 1 AND 4096),
  batch_max INTEGER NOT NULL CHECK (batch_max BETWEEN batch_min AND 4096),
  speculation_length INTEGER NOT NULL CHECK (speculation_length BETWEEN 0 AND 64),
  num_steps INTEGER NOT NULL CHECK (num_steps >= 1),  -- flagged steps are left out
  sum_step_s REAL NOT NULL CHECK (sum_step_s > 0 AND sum_step_s < 1e300),
  sum_tokens REAL NOT NULL CHECK (sum_tokens > 0 AND sum_tokens < 1e300),  -- per row, bonus included
  sum_predicted_step_s REAL NOT NULL CHECK (sum_predicted_step_s > 0 AND sum_predicted_step_s < 1e300),
  sum_predicted_tokens REAL NOT NULL CHECK (sum_predicted_tokens > 0 AND sum_predicted_tokens < 1e300),
  PRIMARY KEY (window_start, context_id, batch_min, speculation_length)
) STRICT, WITHOUT ROWID;

CREATE VIEW prediction_error AS
-- By minute and bucket: ms per token that the estimates promised for the steps of that minute, and what they took.
SELECT
  strftime('%Y-%m-%d %H:%M', w.window_start, 'unixepoch') AS minute,
  x.target || ' + ' || x.draft || ' on ' || x.device || ', ' || x.dtype
    || CASE x.engine_fingerprint WHEN '' THEN '' ELSE ' [' || x.engine_fingerprint || ']' END AS context,
  CASE w.batch_min WHEN w.batch_max THEN '' || w.batch_min ELSE w.batch_min || '-' || w.batch_max END AS batch_bucket,
  w.batch_min,
  max(w.batch_max) AS batch_max,
  sum(w.num_steps) AS num_steps,
  1000 * sum(w.sum_predicted_step_s) / sum(w.sum_predicted_tokens) AS predicted_ms_per_token,
  1000 * sum(w.sum_step_s) / sum(w.sum_tokens) AS observed_ms_per_token,
  100 * ((sum(w.sum_predicted_step_s) / sum(w.sum_predicted_tokens)) / (sum(w.sum_step_s) / sum(w.sum_tokens)) - 1)
    AS error_percent,  -- above 0: faster than promised
  w.window_start  -- the minute in seconds since 1970: WHERE window_start > ... is quick however much there is
FROM prediction_windows AS w JOIN contexts AS x USING (context_id)
GROUP BY w.window_start, w.context_id, w.batch_min
ORDER BY w.window_start, w.context_id, w.batch_min;

CREATE TABLE store_events (
  -- What was given up: raw rows dropped while the disk was full (reports_dropped), rows that broke a rule above
  -- (rows_refused), stored states that could not be used (state_set_aside), commits that the file no longer has
  -- although they were told durable (commits_missing).
  store_event_id INTEGER PRIMARY KEY,
  kind TEXT NOT NULL CHECK (kind IN ('reports_dropped', 'rows_refused', 'state_set_aside', 'commits_missing')),
  num_rows INTEGER NOT NULL CHECK (num_rows >= 1),
  detail TEXT NOT NULL,
  content TEXT,  -- of a state that was set aside, as it was found
  happened_at REAL NOT NULL CHECK (happened_at >= 0)
) STRICT;

CREATE TABLE context_limits (
  -- The limits of every context, from when it was made and each time it was widened: a replay widens it there, too.
  context_limits_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  max_batch_size INTEGER NOT NULL CHECK (max_batch_size BETWEEN 1 AND 4096),
  max_speculation_length INTEGER NOT NULL CHECK (max_speculation_length BETWEEN 0 AND 64),
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),  -- last group of step_reports learned from before it
  added_at REAL NOT NULL CHECK (added_at >= 0)
, max_copied_tokens INTEGER NOT NULL DEFAULT 0 CHECK (max_copied_tokens BETWEEN 0 AND 64)) STRICT;

CREATE VIEW worker_health AS
-- One row per worker: when it was last heard, how far its reports are on disk, and what went wrong on the way.
SELECT
  w.worker_id,
  CASE
    WHEN (julianday('now') - 2440587.5) * 86400.0 - w.last_seen_at <= 60 THEN 'live'
    WHEN (julianday('now') - 2440587.5) * 86400.0 - w.last_seen_at <= 3600 THEN 'quiet'
    ELSE 'stale'
  END AS status,  -- heard within a minute, within an hour, or longer ago
  round((julianday('now') - 2440587.5) * 86400.0 - w.last_seen_at, 1) AS seconds_since_seen,
  x.target || ' + ' || x.draft || ' on ' || x.device || ', ' || x.dtype
    || CASE x.engine_fingerprint WHEN '' THEN '' ELSE ' [' || x.engine_fingerprint || ']' END AS context,
  w.address,
  w.policy,
  w.epoch,
  coalesce(json_extract(w.missing_ranges, '$[0][0]') - 1, w.applied_seq) AS durable_seq,
  w.num_reports,
  w.num_repeated,
  w.num_missing,
  w.num_refused,
  strftime('%Y-%m-%d %H:%M:%f', w.registered_at, 'unixepoch') AS registered_at,
  strftime('%Y-%m-%d %H:%M:%f', w.last_seen_at, 'unixepoch') AS last_seen_at
FROM workers AS w JOIN contexts AS x USING (context_id)
ORDER BY w.last_seen_at DESC;

CREATE TABLE drift_events (
  -- Part of what was learned was forgotten: a detector fired, or a context's numbers had left the representable,
  -- or a worker turned out to be unlike the others.
  drift_event_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  factor TEXT NOT NULL CHECK (factor IN ('latency', 'acceptance', 'reset', 'worker')),
  statistic REAL NOT NULL CHECK (abs(statistic) < 1e300),
  detail TEXT NOT NULL,
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),
  detected_at REAL NOT NULL CHECK (detected_at >= 0)
) STRICT;

CREATE VIEW learned_table AS
-- One row per context, bucket and length: all that was learned, readable without a join.
SELECT
  x.target || ' + ' || x.draft || ' on ' || x.device || ', ' || x.dtype
    || CASE x.engine_fingerprint WHEN '' THEN '' ELSE ' [' || x.engine_fingerprint || ']' END AS context,
  CASE c.batch_min WHEN c.batch_max THEN '' || c.batch_min ELSE c.batch_min || '-' || c.batch_max END AS batch_bucket,
  c.batch_min,
  c.batch_max,
  c.speculation_length,
  c.expected_tokens,  -- per row and step, bonus included
  1000 * c.step_s AS step_ms,
  1000 * c.step_s / c.expected_tokens AS ms_per_token,  -- per row
  c.expected_tokens / c.step_s AS tokens_per_s,  -- per row; times the batch size for the whole batch
  c.ms_per_token_low,  -- 95% interval
  c.ms_per_token_high,
  c.num_steps,
  c.source,
  c.is_best,
  strftime('%Y-%m-%d %H:%M:%f', c.updated_at, 'unixepoch') AS updated_at,
  1000 * c.observed_step_s AS observed_step_ms,  -- mean of the num_steps steps; NULL without any
  c.num_reports_since  -- reports of the context since the newest of them
FROM latency_cells AS c JOIN contexts AS x USING (context_id)
ORDER BY c.context_id, c.batch_min, c.speculation_length;

CREATE TABLE plan_estimates (
  -- The best plans that copy, by context and bucket: place 0 is the one in use, if one is. Lengths are in latency_cells.
  context_id INTEGER NOT NULL REFERENCES contexts,
  batch_min INTEGER NOT NULL CHECK (batch_min BETWEEN 1 AND 4096),
  batch_max INTEGER NOT NULL CHECK (batch_max BETWEEN batch_min AND 4096),
  place INTEGER NOT NULL CHECK (place BETWEEN 0 AND 9),
  plan TEXT NOT NULL,  -- in words, as `speclen worker --plan` reads them
  speculation_length INTEGER NOT NULL CHECK (speculation_length BETWEEN 0 AND 64),  -- of the draft model
  step_s REAL NOT NULL CHECK (step_s > 0 AND step_s < 1e6),
  expected_tokens REAL NOT NULL CHECK (expected_tokens >= 1 AND expected_tokens <= 200),  -- per row and step, bonus included
  ms_per_token_low REAL NOT NULL CHECK (ms_per_token_low >= 0),
  ms_per_token_high REAL NOT NULL CHECK (ms_per_token_high >= ms_per_token_low),
  is_best INTEGER NOT NULL CHECK (is_best IN (0, 1)),  -- 1: in use, before the length that latency_cells calls best
  updated_at REAL NOT NULL CHECK (updated_at >= 0),
  PRIMARY KEY (context_id, batch_min, place)
) STRICT, WITHOUT ROWID;

CREATE VIEW plan_table AS
-- The plans that copy beside the lengths of learned_table: per context and bucket the one in use and the best others.
SELECT
  x.target || ' + ' || x.draft || ' on ' || x.device || ', ' || x.dtype
    || CASE x.engine_fingerprint WHEN '' THEN '' ELSE ' [' || x.engine_fingerprint || ']' END AS context,
  CASE p.batch_min WHEN p.batch_max THEN '' || p.batch_min ELSE p.batch_min || '-' || p.batch_max END AS batch_bucket,
  p.batch_min,
  p.batch_max,
  p.plan,
  p.speculation_length,
  p.expected_tokens,  -- per row and step, bonus included
  1000 * p.step_s AS step_ms,
  1000 * p.step_s / p.expected_tokens AS ms_per_token,  -- per row
  p.expected_tokens / p.step_s AS tokens_per_s,  -- per row; times the batch size for the whole batch
  p.ms_per_token_low,  -- 95% interval
  p.ms_per_token_high,
  p.is_best,
  strftime('%Y-%m-%d %H:%M:%f', p.updated_at, 'unixepoch') AS updated_at
FROM plan_estimates AS p JOIN contexts AS x USING (context_id)
ORDER BY p.context_id, p.batch_min, p.place;

CREATE VIEW current_choice AS
-- One row per context and bucket: what is played, what it gains over plain decoding, and why it was chosen.
SELECT
  x.target || ' + ' || x.draft || ' on ' || x.device || ', ' || x.dtype
    || CASE x.engine_fingerprint WHEN '' THEN '' ELSE ' [' || x.engine_fingerprint || ']' END AS context,
  CASE c.batch_min WHEN c.batch_max THEN '' || c.batch_min ELSE c.batch_min || '-' || c.batch_max END AS batch_bucket,
  c.batch_min,
  c.batch_max,
  coalesce(p.speculation_length, c.speculation_length) AS speculation_length,
  1000 * coalesce(p.step_s / p.expected_tokens, c.step_s / c.expected_tokens) AS ms_per_token,
  1000 * plain.step_s / plain.expected_tokens AS plain_ms_per_token,  -- at length 0
  (1000 * plain.step_s / plain.expected_tokens) / (1000 * coalesce(p.step_s / p.expected_tokens, c.step_s / c.expected_tokens)) AS speedup,  -- over length 0
  coalesce(plain.num_reports_since < 10000, 0) AS speedup_was_seen,  -- 0: length 0 was not played lately
  c.num_steps,
  x.decision_version,
  d.reason,
  strftime('%Y-%m-%d %H:%M:%f', d.decided_at, 'unixepoch') AS decided_at,
  coalesce(p.plan, CASE c.speculation_length WHEN 0 THEN 'plain' ELSE 'draft ' || c.speculation_length END) AS plan  -- in words
FROM latency_cells AS c
JOIN contexts AS x USING (context_id)
LEFT JOIN plan_estimates AS p ON p.context_id = c.context_id AND p.batch_min = c.batch_min AND p.is_best
LEFT JOIN latency_cells AS plain
  ON plain.context_id = c.context_id AND plain.batch_min = c.batch_min AND plain.speculation_length = 0
LEFT JOIN decisions AS d ON d.decision_id = (
  SELECT max(decision_id) FROM decisions AS e WHERE e.context_id = c.context_id AND e.batch_min = c.batch_min)
WHERE c.is_best
ORDER BY c.context_id, c.batch_min;

CREATE VIEW choices AS
-- current_choice for a terminal: one row per context and range of batch sizes with one length, or one plan where rows copy.
WITH played AS (
  SELECT
    c.context_id, c.batch_min, c.batch_max, coalesce(p.speculation_length, c.speculation_length) AS speculation_length,
    c.num_steps, coalesce(p.plan, CASE c.speculation_length WHEN 0 THEN 'plain' ELSE 'draft ' || c.speculation_length END) AS plan, 1000 * coalesce(p.step_s / p.expected_tokens, c.step_s / c.expected_tokens) AS ms,
    1000 * plain.step_s / plain.expected_tokens AS plain_ms
  FROM latency_cells AS c
  LEFT JOIN plan_estimates AS p ON p.context_id = c.context_id AND p.batch_min = c.batch_min AND p.is_best
  LEFT JOIN latency_cells AS plain
    ON plain.context_id = c.context_id AND plain.batch_min = c.batch_min AND plain.speculation_length = 0
  WHERE c.is_best
), best AS (
  SELECT *,
    row_number() OVER (PARTITION BY context_id ORDER BY batch_min)
      - row_number() OVER (PARTITION BY context_id, plan ORDER BY batch_min) AS stretch
  FROM played
), c AS (
  SELECT
    context_id, min(batch_min) AS batch_min, max(batch_max) AS batch_max, plan,
    max(speculation_length) AS speculation_length,
    sum(ms * (num_steps + 1)) / sum(num_steps + 1) AS ms,  -- as often as played
    sum(plain_ms * (num_steps + 1)) / sum(ms * (num_steps + 1)) AS speedup,
    sum(num_steps) AS num_steps
  FROM best GROUP BY context_id, plan, stretch
)
SELECT
  c.context_id AS context,  -- as `speclen explain --context` takes it
  substr(substr(x.target, 1, instr(x.target || '#', '#') - 1) || ' + '
    || substr(x.draft, 1, instr(x.draft || '#', '#') - 1), 1, 30) AS models,
  CASE c.batch_min WHEN c.batch_max THEN '' || c.batch_min ELSE c.batch_min || '-' || c.batch_max END AS batch,
  CASE WHEN c.plan LIKE 'copy%' THEN c.plan ELSE c.speculation_length END AS length,  -- or the plan in words
  round(c.ms, 2) AS ms_per_token,
  round(c.speedup, 2) AS speedup,  -- over length 0
  c.num_steps
FROM c JOIN contexts AS x USING (context_id)
ORDER BY c.context_id, c.batch_min;

CREATE VIEW decision_history AS
-- Every change of a choice, newest first, with both estimates of that moment.
SELECT
  strftime('%Y-%m-%d %H:%M:%f', d.decided_at, 'unixepoch') AS decided_at,
  x.target || ' + ' || x.draft || ' on ' || x.device || ', ' || x.dtype
    || CASE x.engine_fingerprint WHEN '' THEN '' ELSE ' [' || x.engine_fingerprint || ']' END AS context,
  CASE d.batch_min WHEN d.batch_max THEN '' || d.batch_min ELSE d.batch_min || '-' || d.batch_max END AS batch_bucket,
  d.batch_min,
  d.batch_max,
  d.previous_length,
  d.speculation_length,
  d.previous_ms_per_token,
  d.ms_per_token,
  d.reason,
  d.decision_version,
  d.previous_plan,
  d.plan
FROM decisions AS d JOIN contexts AS x USING (context_id)
ORDER BY d.decision_id DESC;
