"""Plans that copy: columns, a table and views of the steps m010 and m013."""

from __future__ import annotations

from speclen.store.schema.first_views import BUCKET, CONTEXT, DECISION_HISTORY
from speclen.store.schema.seen import LATELY

_COPIED = "ADD COLUMN max_copied_tokens INTEGER NOT NULL DEFAULT 0 CHECK (max_copied_tokens BETWEEN 0 AND 64)"

NEW_COLUMNS = (
    # What copying did in a step whose plan copies: {"plan": [draft_length, copy_min_match, copy_max_tokens,
    # draft_after_copy], "searched": ..., "drafting": ..., "verified": ...,
    # "runs": [[match, proposed, accepted, rows], ...]}.
    "ALTER TABLE step_reports ADD COLUMN copying TEXT CHECK (copying IS NULL OR json_valid(copying))",
    # Most tokens that a row can copy in one step; 0: it cannot.
    f"ALTER TABLE contexts {_COPIED}",
    f"ALTER TABLE workers {_COPIED}",
    f"ALTER TABLE context_limits {_COPIED}",
    # In words, such as "copy>=3 up to 8, else draft 2"; NULL where the length is all.
    "ALTER TABLE decisions ADD COLUMN previous_plan TEXT",
    "ALTER TABLE decisions ADD COLUMN plan TEXT",
)

PLAN_ESTIMATES = """\
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
) STRICT, WITHOUT ROWID"""

PLAN_TABLE = f"""\
CREATE VIEW plan_table AS
-- The plans that copy beside the lengths of learned_table: per context and bucket the one in use and the best others.
SELECT
  {CONTEXT} AS context,
  {BUCKET.format(t="p")} AS batch_bucket,
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
ORDER BY p.context_id, p.batch_min, p.place"""

# What is played: a plan where one is best, else the best length. p: plan_estimates, c: latency_cells.
_PLAYED = (
    """coalesce(p.plan, CASE c.speculation_length WHEN 0 THEN 'plain' ELSE 'draft ' || c.speculation_length END)"""
)
_MS = "1000 * coalesce(p.step_s / p.expected_tokens, c.step_s / c.expected_tokens)"
_PLAN = """LEFT JOIN plan_estimates AS p ON p.context_id = c.context_id AND p.batch_min = c.batch_min AND p.is_best"""

CURRENT_CHOICE_3 = f"""\
CREATE VIEW current_choice AS
-- One row per context and bucket: what is played, what it gains over plain decoding, and why it was chosen.
SELECT
  {CONTEXT} AS context,
  {BUCKET.format(t="c")} AS batch_bucket,
  c.batch_min,
  c.batch_max,
  coalesce(p.speculation_length, c.speculation_length) AS speculation_length,
  {_MS} AS ms_per_token,
  1000 * plain.step_s / plain.expected_tokens AS plain_ms_per_token,  -- at length 0
  (1000 * plain.step_s / plain.expected_tokens) / ({_MS}) AS speedup,  -- over length 0
  coalesce(plain.num_reports_since < {LATELY}, 0) AS speedup_was_seen,  -- 0: length 0 was not played lately
  c.num_steps,
  x.decision_version,
  d.reason,
  strftime('%Y-%m-%d %H:%M:%f', d.decided_at, 'unixepoch') AS decided_at,
  {_PLAYED} AS plan  -- in words
FROM latency_cells AS c
JOIN contexts AS x USING (context_id)
{_PLAN}
LEFT JOIN latency_cells AS plain
  ON plain.context_id = c.context_id AND plain.batch_min = c.batch_min AND plain.speculation_length = 0
LEFT JOIN decisions AS d ON d.decision_id = (
  SELECT max(decision_id) FROM decisions AS e WHERE e.context_id = c.context_id AND e.batch_min = c.batch_min)
WHERE c.is_best
ORDER BY c.context_id, c.batch_min"""

CHOICES_3 = f"""\
CREATE VIEW choices AS
-- current_choice for a terminal: one row per context and range of batch sizes with one length, or one plan where rows copy.
WITH played AS (
  SELECT
    c.context_id, c.batch_min, c.batch_max, coalesce(p.speculation_length, c.speculation_length) AS speculation_length,
    c.num_steps, {_PLAYED} AS plan, {_MS} AS ms,
    1000 * plain.step_s / plain.expected_tokens AS plain_ms
  FROM latency_cells AS c
  {_PLAN}
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
  {BUCKET.format(t="c")} AS batch,
  CASE WHEN c.plan LIKE 'copy%' THEN c.plan ELSE c.speculation_length END AS length,  -- or the plan in words
  round(c.ms, 2) AS ms_per_token,
  round(c.speedup, 2) AS speedup,  -- over length 0
  c.num_steps
FROM c JOIN contexts AS x USING (context_id)
ORDER BY c.context_id, c.batch_min"""

CHANGES = (
    *NEW_COLUMNS,
    PLAN_ESTIMATES,
    PLAN_TABLE,
    "DROP VIEW current_choice",
    CURRENT_CHOICE_3,
    "DROP VIEW choices",
    CHOICES_3,
)

PLANNED_DECISIONS = (
    "DROP VIEW decision_history",
    # A plan is NULL where the length is all.
    DECISION_HISTORY.replace("  d.decision_version\n", "  d.decision_version,\n  d.previous_plan,\n  d.plan\n"),
)
