"""The views that the first steps of the schema make, and how views write contexts and buckets."""

from __future__ import annotations

# How a context is written in every view (contexts AS x), and a bucket of table t: "4" or "5-8".
CONTEXT = """x.target || ' + ' || x.draft || ' on ' || x.device || ', ' || x.dtype
    || CASE x.engine_fingerprint WHEN '' THEN '' ELSE ' [' || x.engine_fingerprint || ']' END"""
BUCKET = "CASE {t}.batch_min WHEN {t}.batch_max THEN '' || {t}.batch_min ELSE {t}.batch_min || '-' || {t}.batch_max END"

# Seconds since 1970 with a fraction, in a way that the sqlite3 shells of older systems understand, too.
NOW = "(julianday('now') - 2440587.5) * 86400.0"

LEARNED_TABLE = f"""\
CREATE VIEW learned_table AS
-- One row per context, bucket and length: all that was learned, readable without a join.
SELECT
  {CONTEXT} AS context,
  {BUCKET.format(t="c")} AS batch_bucket,
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
  strftime('%Y-%m-%d %H:%M:%f', c.updated_at, 'unixepoch') AS updated_at
FROM latency_cells AS c JOIN contexts AS x USING (context_id)
ORDER BY c.context_id, c.batch_min, c.speculation_length"""

CURRENT_CHOICE = f"""\
CREATE VIEW current_choice AS
-- One row per context and bucket: the length in use, what it gains over plain decoding, and why it was chosen.
SELECT
  {CONTEXT} AS context,
  {BUCKET.format(t="c")} AS batch_bucket,
  c.batch_min,
  c.batch_max,
  c.speculation_length,
  1000 * c.step_s / c.expected_tokens AS ms_per_token,
  1000 * plain.step_s / plain.expected_tokens AS plain_ms_per_token,  -- at length 0
  (plain.step_s / plain.expected_tokens) / (c.step_s / c.expected_tokens) AS speedup,  -- over length 0
  c.num_steps,
  x.decision_version,
  d.reason,
  strftime('%Y-%m-%d %H:%M:%f', d.decided_at, 'unixepoch') AS decided_at
FROM latency_cells AS c
JOIN contexts AS x USING (context_id)
LEFT JOIN latency_cells AS plain
  ON plain.context_id = c.context_id AND plain.batch_min = c.batch_min AND plain.speculation_length = 0
LEFT JOIN decisions AS d ON d.decision_id = (
  SELECT max(decision_id) FROM decisions AS e WHERE e.context_id = c.context_id AND e.batch_min = c.batch_min)
WHERE c.is_best
ORDER BY c.context_id, c.batch_min"""

DECISION_HISTORY = f"""\
CREATE VIEW decision_history AS
-- Every change of a choice, newest first, with both estimates of that moment.
SELECT
  strftime('%Y-%m-%d %H:%M:%f', d.decided_at, 'unixepoch') AS decided_at,
  {CONTEXT} AS context,
  {BUCKET.format(t="d")} AS batch_bucket,
  d.batch_min,
  d.batch_max,
  d.previous_length,
  d.speculation_length,
  d.previous_ms_per_token,
  d.ms_per_token,
  d.reason,
  d.decision_version
FROM decisions AS d JOIN contexts AS x USING (context_id)
ORDER BY d.decision_id DESC"""

PREDICTION_ERROR = f"""\
CREATE VIEW prediction_error AS
-- By minute and bucket: ms per token that the estimates promised for the steps of that minute, and what they took.
SELECT
  strftime('%Y-%m-%d %H:%M', w.window_start, 'unixepoch') AS minute,
  {CONTEXT} AS context,
  {BUCKET.format(t="w")} AS batch_bucket,
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
ORDER BY w.window_start, w.context_id, w.batch_min"""

WORKER_HEALTH = f"""\
CREATE VIEW worker_health AS
-- One row per worker: when it was last heard, how far its reports are on disk, and what went wrong on the way.
SELECT
  w.worker_id,
  CASE
    WHEN {NOW} - w.last_seen_at <= 60 THEN 'live'
    WHEN {NOW} - w.last_seen_at <= 3600 THEN 'quiet'
    ELSE 'stale'
  END AS status,  -- heard within a minute, within an hour, or longer ago
  round({NOW} - w.last_seen_at, 1) AS seconds_since_seen,
  {CONTEXT} AS context,
  w.address,
  w.policy,
  w.epoch,
  w.applied_seq AS durable_seq,
  w.num_reports,
  w.num_repeated,
  w.num_missing,
  w.num_refused,
  strftime('%Y-%m-%d %H:%M:%f', w.registered_at, 'unixepoch') AS registered_at,
  strftime('%Y-%m-%d %H:%M:%f', w.last_seen_at, 'unixepoch') AS last_seen_at
FROM workers AS w JOIN contexts AS x USING (context_id)
ORDER BY w.last_seen_at DESC"""
