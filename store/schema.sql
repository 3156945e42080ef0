-- The schema of a speclen database, executed once on a new file. Raise APPLICATION_ID in connection.py when it changes.
-- CHECKs exclude implausible values and leave room for rounding. Nullable JSON must allow NULL explicitly: json_valid(NULL)
-- is 0 before SQLite 3.41.
-- Seconds end in _s, times that end in _at are seconds since 1970 (UTC), counts begin with num_. An arm is a speculation
-- length (tokens of the draft model) with or without n-grams; columns named arm have it in words. A batch range is
-- batch_min to batch_max; columns named batch_bucket have it as text.

CREATE TABLE contexts (
  -- Everything that step times depend on.
  context_id INTEGER PRIMARY KEY,
  target TEXT NOT NULL CHECK (target <> ''),
  draft TEXT NOT NULL,
  device TEXT NOT NULL CHECK (device <> ''),
  dtype TEXT NOT NULL CHECK (dtype <> ''),
  engine_fingerprint TEXT NOT NULL,  -- digest of everything else in the engine that changes step times
  max_batch_size INTEGER NOT NULL CHECK (max_batch_size BETWEEN 1 AND 4096),
  max_speculation_length INTEGER NOT NULL CHECK (max_speculation_length BETWEEN 0 AND 64),
  ngram INTEGER NOT NULL CHECK (ngram IN (0, 1)),  -- 1: some of its workers support n-grams
  decision_version INTEGER NOT NULL CHECK (decision_version >= 0),  -- grows with every change of an arm in use
  created_at REAL NOT NULL CHECK (created_at >= 0),
  updated_at REAL NOT NULL CHECK (updated_at >= 0),
  context TEXT GENERATED ALWAYS AS (  -- its name in the views
    target || ' + ' || draft || ' on ' || device || ', ' || dtype
    || CASE engine_fingerprint WHEN '' THEN '' ELSE ' [' || engine_fingerprint || ']' END),
  UNIQUE (target, draft, device, dtype, engine_fingerprint)
) STRICT;

CREATE TABLE workers (
  -- The newest incarnation (epoch) of every worker, and how far its reports have arrived.
  worker_key INTEGER PRIMARY KEY,
  worker_id TEXT NOT NULL UNIQUE CHECK (length(worker_id) BETWEEN 1 AND 128),
  epoch INTEGER NOT NULL CHECK (epoch >= 0),
  context_id INTEGER NOT NULL REFERENCES contexts,
  address TEXT NOT NULL,
  policy TEXT NOT NULL,  -- adaptive follows the table; profile and arms (fixed:4, none, n-gram) do not
  max_batch_size INTEGER NOT NULL CHECK (max_batch_size BETWEEN 1 AND 4096),
  max_speculation_length INTEGER NOT NULL CHECK (max_speculation_length BETWEEN 0 AND 64),
  ngram INTEGER NOT NULL CHECK (ngram IN (0, 1)),
  applied_seq INTEGER NOT NULL CHECK (applied_seq >= 0),  -- reports of this epoch up to here are in the estimates
  missing_ranges TEXT NOT NULL CHECK (json_valid(missing_ranges)),  -- [[first, last], ...] below applied_seq: not arrived
  num_reports INTEGER NOT NULL CHECK (num_reports >= 0),  -- learned from, over all epochs
  num_repeated INTEGER NOT NULL CHECK (num_repeated >= 0),  -- duplicates, ignored
  num_missing INTEGER NOT NULL CHECK (num_missing >= 0),  -- skipped by gaps in seq
  num_refused INTEGER NOT NULL CHECK (num_refused >= 0),  -- implausible
  registered_at REAL NOT NULL CHECK (registered_at >= 0),
  last_seen_at REAL NOT NULL CHECK (last_seen_at >= 0)
) STRICT;

CREATE TABLE profiles (
  -- Imported offline profiles.
  profile_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  source TEXT NOT NULL,
  survival TEXT NOT NULL CHECK (json_valid(survival)),  -- entry i: P(draft tokens 0..i all accepted)
  num_survival_rows TEXT NOT NULL CHECK (json_valid(num_survival_rows)),  -- samples behind each entry
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),  -- last group of step_reports processed before it
  imported_at REAL NOT NULL CHECK (imported_at >= 0)
) STRICT;

CREATE TABLE profile_cells (
  -- Mean step time by batch size and speculation length of a profile, without n-grams.
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
  -- Survival by draft position, for every context.
  context_id INTEGER NOT NULL REFERENCES contexts,
  position INTEGER NOT NULL CHECK (position BETWEEN 1 AND 64),  -- 1 is the first draft token
  survival REAL NOT NULL CHECK (survival >= 0 AND survival < 1.001),  -- P(positions 1..position all accepted)
  num_trials REAL NOT NULL CHECK (num_trials >= 0 AND num_trials < 1e300),  -- effective sample size, after forgetting
  updated_at REAL NOT NULL CHECK (updated_at >= 0),
  PRIMARY KEY (context_id, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE arm_estimates (
  -- The estimate of every cell (arm at a batch range) of a context. For reading, use the view learned_table.
  context_id INTEGER NOT NULL REFERENCES contexts,
  batch_min INTEGER NOT NULL CHECK (batch_min BETWEEN 1 AND 4096),
  batch_max INTEGER NOT NULL CHECK (batch_max BETWEEN batch_min AND 4096),
  speculation_length INTEGER NOT NULL CHECK (speculation_length BETWEEN 0 AND 64),
  ngram INTEGER NOT NULL CHECK (ngram IN (0, 1)),
  arm TEXT NOT NULL,
  step_s REAL NOT NULL CHECK (step_s > 0 AND step_s < 1e200),  -- expected wall time of a whole step
  expected_tokens REAL NOT NULL CHECK (expected_tokens > 0.9 AND expected_tokens < 66),  -- per sequence and step, bonus included
  ms_per_token_low REAL NOT NULL CHECK (ms_per_token_low >= 0),  -- 95% interval
  ms_per_token_high REAL NOT NULL CHECK (ms_per_token_high >= ms_per_token_low AND ms_per_token_high < 1e200),
  num_steps INTEGER NOT NULL CHECK (num_steps >= 0),  -- usable samples, without forgetting
  observed_step_s REAL CHECK (observed_step_s > 0 AND observed_step_s < 1e200),  -- mean of the newest samples; NULL: none
  source TEXT NOT NULL CHECK (source IN ('profile', 'online', 'both', 'prior')),
  is_best INTEGER NOT NULL CHECK (is_best IN (0, 1)),  -- 1: in use
  updated_at REAL NOT NULL CHECK (updated_at >= 0),
  ms_per_token REAL GENERATED ALWAYS AS (1000 * step_s / expected_tokens),  -- per sequence
  half_width REAL GENERATED ALWAYS AS ((ms_per_token_high - ms_per_token_low) / 2 / ms_per_token),  -- of the interval, relative to ms_per_token
  PRIMARY KEY (context_id, batch_min, speculation_length, ngram)
) STRICT, WITHOUT ROWID;

CREATE TABLE learned_states (
  -- The estimator's state of a context, as JSON. A restarted controller continues from it.
  context_id INTEGER PRIMARY KEY REFERENCES contexts,
  state BLOB NOT NULL CHECK (length(state) > 0),
  updated_at REAL NOT NULL CHECK (updated_at >= 0)
) STRICT;

CREATE TABLE decisions (
  -- Every change of an arm in use.
  decision_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  batch_min INTEGER NOT NULL CHECK (batch_min BETWEEN 1 AND 4096),
  batch_max INTEGER NOT NULL CHECK (batch_max BETWEEN batch_min AND 4096),
  decision_version INTEGER NOT NULL CHECK (decision_version >= 0),
  previous_speculation_length INTEGER CHECK (previous_speculation_length BETWEEN 0 AND 64),  -- NULL: the first arm
  previous_ngram INTEGER CHECK (previous_ngram IN (0, 1)),
  previous_arm TEXT,
  speculation_length INTEGER NOT NULL CHECK (speculation_length BETWEEN 0 AND 64),
  ngram INTEGER NOT NULL CHECK (ngram IN (0, 1)),
  arm TEXT NOT NULL,
  previous_ms_per_token REAL CHECK (previous_ms_per_token > 0 AND previous_ms_per_token < 1e200),
  ms_per_token REAL CHECK (ms_per_token > 0 AND ms_per_token < 1e200),  -- both estimates are from the same moment
  reason TEXT NOT NULL,
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),  -- last group of step_reports processed before it
  decided_at REAL NOT NULL CHECK (decided_at >= 0)
) STRICT;

CREATE INDEX decisions_of_context ON decisions (context_id, decision_id, batch_min, batch_max);

CREATE TABLE trials (
  -- Measured comparisons of the learned arm with the baseline's: neighbouring blocks of steps of one worker.
  trial_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  worker_key INTEGER NOT NULL REFERENCES workers,
  batch_size REAL NOT NULL CHECK (batch_size >= 1 AND batch_size <= 4096),  -- mean over the trial's steps
  learned_speculation_length INTEGER NOT NULL CHECK (learned_speculation_length BETWEEN 0 AND 64),
  learned_ngram INTEGER NOT NULL CHECK (learned_ngram IN (0, 1)),
  baseline_speculation_length INTEGER NOT NULL CHECK (baseline_speculation_length BETWEEN 0 AND 64),
  baseline_ngram INTEGER NOT NULL CHECK (baseline_ngram IN (0, 1)),
  log_time REAL NOT NULL CHECK (abs(log_time) < 50),  -- log of (step time of the learned arm / of the baseline's)
  learned_tokens REAL NOT NULL CHECK (learned_tokens > 0 AND learned_tokens < 1e12),  -- since the previous trial, or in evaluated outputs
  learned_sequences REAL NOT NULL CHECK (learned_sequences > 0 AND learned_sequences < 1e12),  -- steps of sequences that generated them
  baseline_tokens REAL NOT NULL CHECK (baseline_tokens > 0 AND baseline_tokens < 1e12),
  baseline_sequences REAL NOT NULL CHECK (baseline_sequences > 0 AND baseline_sequences < 1e12),
  gain REAL NOT NULL CHECK (gain > 0 AND gain < 1e30),  -- tokens per second of the learned arm / of the baseline's, of this trial
  lost_s REAL NOT NULL CHECK (abs(lost_s) < 1e9),  -- seconds that the trial is expected to have cost; noise can make it negative
  num_steps INTEGER NOT NULL CHECK (num_steps >= 0),  -- at these batch sizes since the previous trial
  is_baseline_used INTEGER NOT NULL CHECK (is_baseline_used IN (0, 1)),  -- 1: the learned arm was tried
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),  -- last group of step_reports processed before it ended
  ended_at REAL NOT NULL CHECK (ended_at >= 0)
) STRICT;

CREATE INDEX trials_by_time ON trials (ended_at);

CREATE TABLE holds (
  -- Arms that a person holds at batch ranges, whatever is learned.
  context_id INTEGER PRIMARY KEY REFERENCES contexts,
  holds TEXT NOT NULL CHECK (json_valid(holds)),  -- [[batch_min, batch_max, arm], ...]; null for the baseline's arms
  held_at REAL NOT NULL CHECK (held_at >= 0)
) STRICT;

CREATE TABLE step_reports (
  -- Raw reports in the order in which they were processed; only the newest are kept. This key is the only index: the
  -- high-water mark in workers excludes duplicates, and every further index would slow down each insert.
  report_id INTEGER PRIMARY KEY,
  group_id INTEGER NOT NULL CHECK (group_id >= 1),  -- reports processed in one call share it
  context_id INTEGER NOT NULL REFERENCES contexts,
  worker_key INTEGER NOT NULL REFERENCES workers,
  epoch INTEGER NOT NULL CHECK (epoch >= 0),
  seq INTEGER NOT NULL CHECK (seq >= 1),
  batch_size INTEGER NOT NULL CHECK (batch_size BETWEEN 1 AND 4096),  -- sequences that decoded
  speculation_length INTEGER NOT NULL CHECK (speculation_length BETWEEN 0 AND 64),  -- with ngram: the arm of the step
  ngram INTEGER NOT NULL CHECK (ngram IN (0, 1)),
  latency_s REAL NOT NULL CHECK (latency_s > 0 AND latency_s <= 3600),  -- wall time of the whole step
  accepted_histogram TEXT NOT NULL CHECK (json_valid(accepted_histogram)),  -- entry j: sequences that accepted exactly j
  num_accepted_tokens INTEGER NOT NULL CHECK (num_accepted_tokens BETWEEN 0 AND batch_size * max(speculation_length, 8 * ngram)),
  mean_context_length REAL NOT NULL CHECK (mean_context_length >= 0 AND mean_context_length < 1e9),
  decision_version INTEGER NOT NULL CHECK (decision_version >= 0),
  flags TEXT NOT NULL,  -- reasons why the step is not a usable sample ('prefill catch_up'); empty: it is one
  probe_id INTEGER NOT NULL CHECK (probe_id >= 0),  -- 0: the arm came from the table
  class_histograms TEXT CHECK (class_histograms IS NULL OR json_valid(class_histograms)),  -- {"greedy": [...], ...}; NULL: all are greedy
  num_drafted_sequences INTEGER NOT NULL CHECK (num_drafted_sequences BETWEEN 0 AND batch_size),
  num_verified_tokens INTEGER NOT NULL CHECK (num_verified_tokens BETWEEN 0 AND batch_size * 65),
  draft_prefill_s REAL NOT NULL CHECK (draft_prefill_s BETWEEN 0 AND 1e6),  -- since the previous report
  num_new_sequences INTEGER NOT NULL CHECK (num_new_sequences >= 0),  -- admitted when the step began
  num_unobserved_sequences INTEGER NOT NULL  -- not in the histogram
    CHECK (num_unobserved_sequences >= 0 AND num_unobserved_sequences < batch_size),
  -- [[class, num_output_tokens, num_tokens, [steps], [drafted], [verified]], ...]; NULL: none
  evaluations TEXT CHECK (evaluations IS NULL OR json_valid(evaluations)),
  received_at REAL NOT NULL CHECK (received_at >= 0),
  arm TEXT GENERATED ALWAYS AS (CASE
    WHEN NOT ngram THEN CASE speculation_length WHEN 0 THEN 'plain' ELSE 'draft ' || speculation_length END
    ELSE 'n-gram' || CASE speculation_length WHEN 0 THEN '' ELSE ' else draft ' || speculation_length END END)
) STRICT;

CREATE TABLE prediction_windows (
  -- Predicted against observed times, by minute: the usable samples at the arm in use, and the table before them.
  context_id INTEGER NOT NULL REFERENCES contexts,
  window_start INTEGER NOT NULL CHECK (window_start >= 0),  -- a whole minute, seconds since 1970, UTC
  batch_min INTEGER NOT NULL CHECK (batch_min BETWEEN 1 AND 4096),
  batch_max INTEGER NOT NULL CHECK (batch_max BETWEEN batch_min AND 4096),
  num_steps INTEGER NOT NULL CHECK (num_steps >= 1),
  num_tokens REAL NOT NULL CHECK (num_tokens > 0 AND num_tokens < 1e300),  -- per sequence, bonus included
  observed_s REAL NOT NULL CHECK (observed_s > 0 AND observed_s < 1e300),
  predicted_s REAL NOT NULL CHECK (predicted_s > 0 AND predicted_s < 1e300),  -- for these tokens
  PRIMARY KEY (window_start, context_id, batch_min)
) STRICT, WITHOUT ROWID;

CREATE TABLE context_limits (
  -- The limits of every context when it was created and each time it was widened, for replays.
  context_limits_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  max_batch_size INTEGER NOT NULL CHECK (max_batch_size BETWEEN 1 AND 4096),
  max_speculation_length INTEGER NOT NULL CHECK (max_speculation_length BETWEEN 0 AND 64),
  ngram INTEGER NOT NULL CHECK (ngram IN (0, 1)),
  first_survival TEXT NOT NULL,  -- JSON: chance of acceptance by position, taken from another context of the pair; [] if none
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),  -- last group of step_reports processed before it
  added_at REAL NOT NULL CHECK (added_at >= 0)
) STRICT;

CREATE TABLE store_events (
  -- Losses: raw rows dropped while the disk was full (reports_dropped), rows that violated this schema (rows_refused),
  -- stored states that could not be used (state_set_aside), commits that were acknowledged as durable and are missing from
  -- the file (commits_missing).
  store_event_id INTEGER PRIMARY KEY,
  kind TEXT NOT NULL CHECK (kind IN ('reports_dropped', 'rows_refused', 'state_set_aside', 'commits_missing')),
  num_rows INTEGER NOT NULL CHECK (num_rows >= 1),
  detail TEXT NOT NULL,
  happened_at REAL NOT NULL CHECK (happened_at >= 0),
  content BLOB  -- the state that was set aside
) STRICT;

CREATE TABLE drift_events (
  -- A change of acceptance was detected, an internal error reset a context, or a worker was isolated from the others.
  drift_event_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  factor TEXT NOT NULL CHECK (factor IN ('acceptance', 'worker', 'reset')),
  statistic REAL NOT NULL CHECK (abs(statistic) < 1e300),
  detail TEXT NOT NULL,
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),
  detected_at REAL NOT NULL CHECK (detected_at >= 0)
) STRICT;

CREATE VIEW learned_table AS
-- One row per context, batch range and arm: everything that was learned, readable without a join.
SELECT
  x.context,
  CASE a.batch_min WHEN a.batch_max THEN '' || a.batch_min ELSE a.batch_min || '-' || a.batch_max END AS batch_bucket,
  a.batch_min,
  a.batch_max,
  a.arm,
  a.speculation_length,
  a.ngram,
  a.expected_tokens,  -- per sequence and step, bonus included
  1000 * a.step_s AS step_ms,
  a.ms_per_token,  -- per sequence
  a.expected_tokens / a.step_s AS tokens_per_s,  -- per sequence; times the batch size for the whole batch
  a.ms_per_token_low,  -- 95% interval
  a.ms_per_token_high,
  plain.ms_per_token / a.ms_per_token AS speedup,  -- times faster than plain decoding
  a.num_steps,
  a.source,
  a.is_best,
  strftime('%Y-%m-%d %H:%M:%f', a.updated_at, 'unixepoch') AS updated_at,
  1000 * a.observed_step_s AS observed_step_ms,  -- mean of the newest usable samples; NULL: none
  a.context_id,  -- as `speclen explain --context` takes it
  -- 1: within 5% of the arm in use, and the samples cannot tell them apart. Every interval includes the uncertainty of the
  -- level, which all arms of a context share; the rest is the uncertainty of the difference from the arm in use.
  a.is_best OR coalesce(abs(a.ms_per_token / best.ms_per_token - 1) <= 0.05
    AND (a.ms_per_token / best.ms_per_token - 1) * (a.ms_per_token / best.ms_per_token - 1)
      <= a.half_width * a.half_width - speed.half_width * speed.half_width, 0)
    AS is_equal
FROM arm_estimates AS a
JOIN contexts AS x USING (context_id)
JOIN (SELECT context_id, min(half_width) AS half_width FROM arm_estimates GROUP BY context_id) AS speed USING (context_id)
LEFT JOIN arm_estimates AS best ON best.context_id = a.context_id AND best.batch_min = a.batch_min AND best.is_best
LEFT JOIN arm_estimates AS plain ON plain.context_id = a.context_id AND plain.batch_min = a.batch_min
  AND plain.speculation_length = 0 AND NOT plain.ngram
ORDER BY a.context_id, a.batch_min, a.ngram, a.speculation_length;

CREATE VIEW current_choice AS
-- One row per context and batch range: the arm in use, its speedup over plain decoding, and the newest reason.
SELECT
  t.context,
  t.batch_bucket,
  t.batch_min,
  t.batch_max,
  t.arm,
  t.speculation_length,
  t.ngram,
  t.ms_per_token,
  t.ms_per_token_low,
  t.ms_per_token_high,
  t.speedup * t.ms_per_token AS plain_ms_per_token,
  t.speedup,
  t.num_steps,
  x.decision_version,
  d.reason,
  strftime('%Y-%m-%d %H:%M:%f', d.decided_at, 'unixepoch') AS decided_at
FROM learned_table AS t
JOIN contexts AS x USING (context_id)
LEFT JOIN decisions AS d ON d.decision_id = (
  SELECT decision_id FROM decisions AS e
  WHERE e.context_id = t.context_id AND t.batch_min BETWEEN e.batch_min AND e.batch_max
  ORDER BY decision_id DESC LIMIT 1)
WHERE t.is_best
ORDER BY t.context_id, t.batch_min;

CREATE VIEW choices AS
-- The learned table for people: neighbouring batch ranges with the same arm in use, or with equal arms, merged into one row.
-- The arm shown is that of the batch range with the most samples. Within a row the speedup differs by at most a quarter, and
-- ms per token by half. Figures are means over the merged ranges, weighted by the samples of all arms in each.
WITH RECURSIVE
sizes AS (
  SELECT b.*, row_number() OVER (PARTITION BY b.context_id ORDER BY b.batch_min) AS place, seen.num_seen
  FROM learned_table AS b
  JOIN (SELECT context_id, batch_min, sum(num_steps) AS num_seen FROM arm_estimates GROUP BY context_id, batch_min) AS seen
    USING (context_id, batch_min)
  WHERE b.is_best
),
walk AS (  -- from the smallest size up; a row extends while the arm at its first size equals the one in use
  SELECT context_id, place, place AS first FROM sizes WHERE place = 1
  UNION ALL
  SELECT s.context_id, s.place, iif(e.is_equal AND e.ms_per_token BETWEEN f.ms_per_token / 1.5 AND f.ms_per_token * 1.5
    AND coalesce(e.speedup BETWEEN f.speedup / 1.25 AND f.speedup * 1.25, 1), w.first, s.place)
  FROM walk AS w
  JOIN sizes AS f ON f.context_id = w.context_id AND f.place = w.first
  JOIN sizes AS s ON s.context_id = w.context_id AND s.place = w.place + 1
  LEFT JOIN learned_table AS e ON e.context_id = w.context_id AND e.batch_min = s.batch_min AND e.arm = f.arm
),
most AS (  -- the arm in use where a row has the most samples
  SELECT w.context_id, w.first, s.arm,
    row_number() OVER (PARTITION BY w.context_id, w.first ORDER BY s.num_seen DESC, s.place) AS number
  FROM walk AS w JOIN sizes AS s ON s.context_id = w.context_id AND s.place = w.place
),
last_steps AS (
  SELECT context_id, batch_min, max(window_start) AS last_step FROM prediction_windows GROUP BY context_id, batch_min
),
parts AS (
  SELECT t.*, f.batch_min AS range_min, s.num_seen, s.num_seen + 1e-6 AS weight,
    shorter.ms_per_token AS shorter, longer.ms_per_token AS longer,
    (SELECT max(last_step) FROM last_steps AS l WHERE l.context_id = t.context_id
      AND l.batch_min BETWEEN t.batch_min AND t.batch_max) AS last_step
  FROM walk AS w
  JOIN sizes AS f ON f.context_id = w.context_id AND f.place = w.first
  JOIN sizes AS s ON s.context_id = w.context_id AND s.place = w.place
  JOIN most AS m ON m.context_id = w.context_id AND m.first = w.first AND m.number = 1
  JOIN learned_table AS t ON t.context_id = w.context_id AND t.batch_min = s.batch_min AND t.arm = m.arm
  LEFT JOIN learned_table AS shorter ON shorter.context_id = t.context_id AND shorter.batch_min = t.batch_min
    AND shorter.ngram = t.ngram AND shorter.speculation_length = t.speculation_length - 1
  LEFT JOIN learned_table AS longer ON longer.context_id = t.context_id AND longer.batch_min = t.batch_min
    AND longer.ngram = t.ngram AND longer.speculation_length = t.speculation_length + 1
),
ranges AS (
  SELECT context_id, context, range_min AS batch_min, max(batch_max) AS batch_max, arm,
    sum(ms_per_token * weight) / sum(weight) AS ms_per_token,
    sum(ms_per_token_low * weight) / sum(weight) AS ms_per_token_low,
    sum(ms_per_token_high * weight) / sum(weight) AS ms_per_token_high,
    sum(speedup * weight) / sum(iif(speedup IS NULL, NULL, weight)) AS speedup,
    sum(num_seen) AS num_steps,
    sum(shorter * weight) / sum(weight) AS shorter, sum(longer * weight) / sum(weight) AS longer,
    max(last_step) AS last_step, max(updated_at) AS updated_at
  FROM parts GROUP BY context_id, range_min
)
SELECT
  context_id,  -- as `speclen explain --context` takes it
  CASE batch_min WHEN batch_max THEN '' || batch_min ELSE batch_min || '-' || batch_max END AS batch_bucket,
  batch_min,
  batch_max,
  arm,
  (SELECT group_concat(other, ' = ') FROM (
    SELECT o.arm AS other FROM learned_table AS o
    WHERE o.context_id = r.context_id AND o.batch_min BETWEEN r.batch_min AND r.batch_max AND o.arm <> r.arm
    GROUP BY o.arm HAVING min(o.is_equal) ORDER BY min(o.ngram), min(o.speculation_length))) AS equal_arms,  -- NULL: none
  ms_per_token,  -- per sequence
  ms_per_token_low,  -- 95% interval
  ms_per_token_high,
  speedup,  -- times faster than plain decoding
  num_steps,  -- usable samples at these batch sizes, of all arms
  strftime('%Y-%m-%d %H:%M', last_step, 'unixepoch') AS last_step_at,  -- minute of the newest sample
  shorter AS shorter_ms_per_token,  -- the arm with one draft token less; NULL: none
  longer AS longer_ms_per_token,  -- with one more
  updated_at,
  context
FROM ranges AS r
ORDER BY context_id, batch_min;

CREATE VIEW decision_history AS
-- Every change of an arm in use, newest first, with both estimates of that moment.
SELECT
  strftime('%Y-%m-%d %H:%M:%f', d.decided_at, 'unixepoch') AS decided_at,
  x.context,
  CASE d.batch_min WHEN d.batch_max THEN '' || d.batch_min ELSE d.batch_min || '-' || d.batch_max END AS batch_bucket,
  d.batch_min,
  d.batch_max,
  d.previous_arm,
  d.arm,
  d.previous_speculation_length,
  d.previous_ngram,
  d.speculation_length,
  d.ngram,
  d.previous_ms_per_token,
  d.ms_per_token,
  d.reason,
  d.decision_version
FROM decisions AS d JOIN contexts AS x USING (context_id)
ORDER BY d.decision_id DESC;

CREATE VIEW gain AS
-- By hour and batch range (1, 2, 3-4, 5-8, ...): learned arms compared with the baseline. `speclen gain` has intervals.
WITH
bounds(batch_min, batch_max) AS (
  SELECT 1, 1 UNION ALL SELECT batch_max + 1, 2 * batch_max FROM bounds WHERE batch_max < 4096),
sums AS (
  SELECT
    t.context_id, b.batch_min, b.batch_max, CAST(t.ended_at / 3600 AS INTEGER) * 3600 AS hour_start,
    count(*) AS num_trials,
    sum(t.num_steps) AS num_steps,
    sum(t.lost_s) AS lost_s,
    sum(t.is_baseline_used) AS num_with_baseline_used,
    avg(t.gain) AS mean,
    1 / avg(1 / t.gain) AS harmonic_mean
  FROM trials AS t JOIN bounds AS b ON round(t.batch_size) BETWEEN b.batch_min AND b.batch_max
  GROUP BY 1, 2, 3, 4)
SELECT
  strftime('%Y-%m-%d %H:00', s.hour_start, 'unixepoch') AS hour,
  x.context,
  CASE s.batch_min WHEN s.batch_max THEN '' || s.batch_min ELSE s.batch_min || '-' || s.batch_max END AS batch_bucket,
  s.batch_min,
  s.batch_max,
  (s.mean + s.harmonic_mean) / 2 AS gain,  -- tokens per second of the learned arms / of the baseline
  s.num_trials,
  s.num_with_baseline_used,  -- trials during which the baseline was in use
  s.num_steps,  -- steps at these batch sizes, including those of trials
  s.lost_s  -- seconds that the trials are expected to have cost
FROM sums AS s JOIN contexts AS x USING (context_id)
ORDER BY s.hour_start, s.context_id, s.batch_min;

CREATE VIEW worker_health AS
-- One row per worker: time since its last message, how far its reports are on disk, and what was lost.
SELECT
  w.worker_id,
  CASE
    WHEN (julianday('now') - 2440587.5) * 86400.0 - w.last_seen_at <= 60 THEN 'live'
    WHEN (julianday('now') - 2440587.5) * 86400.0 - w.last_seen_at <= 3600 THEN 'quiet'
    ELSE 'stale'
  END AS status,  -- seen within a minute, within an hour, or longer ago
  round((julianday('now') - 2440587.5) * 86400.0 - w.last_seen_at, 1) AS seconds_since_seen,
  x.context,
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

CREATE VIEW prediction_error AS
-- By minute and batch range: predicted and observed ms per token of the steps of that minute.
SELECT
  strftime('%Y-%m-%d %H:%M', w.window_start, 'unixepoch') AS minute,
  x.context,
  CASE w.batch_min WHEN w.batch_max THEN '' || w.batch_min ELSE w.batch_min || '-' || w.batch_max END AS batch_bucket,
  w.batch_min,
  w.batch_max,
  w.num_steps,
  1000 * w.predicted_s / w.num_tokens AS predicted_ms_per_token,
  1000 * w.observed_s / w.num_tokens AS observed_ms_per_token,
  100 * (w.predicted_s / w.observed_s - 1) AS error_percent,  -- above 0: faster than predicted
  w.window_start  -- the minute in seconds since 1970; filtering by it is fast
FROM prediction_windows AS w JOIN contexts AS x USING (context_id)
ORDER BY w.window_start, w.context_id, w.batch_min;
