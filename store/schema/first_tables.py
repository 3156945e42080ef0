"""The tables that the first steps of the schema make."""

from __future__ import annotations

CONTEXTS = """\
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
  updated_at REAL NOT NULL CHECK (updated_at >= 0),
  UNIQUE (target, draft, device, dtype, engine_fingerprint)
) STRICT"""

WORKERS = """\
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
) STRICT"""

PROFILES = """\
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
) STRICT"""

PROFILE_CELLS = """\
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
) STRICT, WITHOUT ROWID"""

ACCEPTANCE = """\
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
) STRICT, WITHOUT ROWID"""

LATENCY_CELLS = """\
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
  updated_at REAL NOT NULL CHECK (updated_at >= 0),
  PRIMARY KEY (context_id, batch_min, speculation_length)
) STRICT, WITHOUT ROWID"""

LEARNED_STATES = """\
CREATE TABLE learned_states (
  -- The estimator's own state, from which a restarted controller goes on. JSON.
  scope TEXT NOT NULL CHECK (scope IN ('context', 'pair')),
  key TEXT NOT NULL CHECK (key <> ''),  -- context_id, or ["target", "draft"]
  state TEXT NOT NULL CHECK (json_valid(state)),
  updated_at REAL NOT NULL CHECK (updated_at >= 0),
  PRIMARY KEY (scope, key)
) STRICT"""

DECISIONS = """\
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
) STRICT"""

DRIFT_EVENTS = """\
CREATE TABLE drift_events (
  -- A detector fired and part of what was learned was forgotten.
  drift_event_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  factor TEXT NOT NULL CHECK (factor IN ('latency', 'acceptance')),
  statistic REAL NOT NULL CHECK (abs(statistic) < 1e300),
  detail TEXT NOT NULL,
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),
  detected_at REAL NOT NULL CHECK (detected_at >= 0)
) STRICT"""

STEP_REPORTS = """\
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
) STRICT"""

PREDICTION_WINDOWS = """\
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
) STRICT, WITHOUT ROWID"""

STORE_EVENTS = """\
CREATE TABLE store_events (
  -- What the store gave up: raw rows dropped while the disk was full, rows that broke a rule above.
  store_event_id INTEGER PRIMARY KEY,
  kind TEXT NOT NULL CHECK (kind IN ('reports_dropped', 'rows_refused')),
  num_rows INTEGER NOT NULL CHECK (num_rows >= 1),
  detail TEXT NOT NULL,
  happened_at REAL NOT NULL CHECK (happened_at >= 0)
) STRICT"""
