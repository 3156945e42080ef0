"""What was seen, beside what is believed: columns and views of the step m008."""

from __future__ import annotations

from speclen.store.schema.first_views import BUCKET, CURRENT_CHOICE, LEARNED_TABLE

# Reports of a context within which a cell counts as lately seen: some minutes of one worker.
LATELY = 10_000

NEW_COLUMNS = (
    # Accepted runs by class of request: {"greedy": [...], "hot": [...]}; NULL where they were not told apart.
    "ALTER TABLE step_reports ADD COLUMN class_histograms TEXT "
    "CHECK (class_histograms IS NULL OR json_valid(class_histograms))",
    "ALTER TABLE latency_cells ADD COLUMN observed_step_s REAL "
    "CHECK (observed_step_s IS NULL OR (observed_step_s > 0 AND observed_step_s < 1e6))",
    "ALTER TABLE latency_cells ADD COLUMN num_reports_since INTEGER CHECK (num_reports_since >= 0)",
)

LEARNED_TABLE_2 = LEARNED_TABLE.replace(
    """ AS updated_at
""",
    """ AS updated_at,
  1000 * c.observed_step_s AS observed_step_ms,  -- mean of the num_steps steps; NULL without any
  c.num_reports_since  -- reports of the context since the newest of them
""",
)

CURRENT_CHOICE_2 = CURRENT_CHOICE.replace(
    "AS speedup,  -- over length 0\n",
    f"""AS speedup,  -- over length 0
  coalesce(plain.num_reports_since < {LATELY}, 0) AS speedup_was_seen,  -- 0: length 0 was not played lately
""",
)

CHOICES_2 = f"""\
CREATE VIEW choices AS
-- current_choice for a terminal: at most 100 columns wide, one row per context and range of batch sizes with one length.
WITH best AS (
  SELECT
    c.context_id, c.batch_min, c.batch_max, c.speculation_length, c.num_steps,
    1000 * c.step_s / c.expected_tokens AS ms,
    1000 * plain.step_s / plain.expected_tokens AS plain_ms,
    row_number() OVER (PARTITION BY c.context_id ORDER BY c.batch_min)
      - row_number() OVER (PARTITION BY c.context_id, c.speculation_length ORDER BY c.batch_min) AS stretch
  FROM latency_cells AS c
  LEFT JOIN latency_cells AS plain
    ON plain.context_id = c.context_id AND plain.batch_min = c.batch_min AND plain.speculation_length = 0
  WHERE c.is_best
), c AS (
  SELECT
    context_id, min(batch_min) AS batch_min, max(batch_max) AS batch_max, speculation_length,
    sum(ms * (num_steps + 1)) / sum(num_steps + 1) AS ms,  -- as often as played
    sum(plain_ms * (num_steps + 1)) / sum(ms * (num_steps + 1)) AS speedup,
    sum(num_steps) AS num_steps
  FROM best GROUP BY context_id, speculation_length, stretch
)
SELECT
  c.context_id AS context,  -- as `speclen explain --context` takes it
  substr(substr(x.target, 1, instr(x.target || '#', '#') - 1) || ' + '
    || substr(x.draft, 1, instr(x.draft || '#', '#') - 1), 1, 30) AS models,
  {BUCKET.format(t="c")} AS batch,
  c.speculation_length AS length,
  round(c.ms, 2) AS ms_per_token,
  round(c.speedup, 2) AS speedup,  -- over length 0
  c.num_steps
FROM c JOIN contexts AS x USING (context_id)
ORDER BY c.context_id, c.batch_min"""

CHANGES = (
    *NEW_COLUMNS,
    "DROP VIEW learned_table",
    LEARNED_TABLE_2,
    "DROP VIEW current_choice",
    CURRENT_CHOICE_2,
    "DROP VIEW choices",
    CHOICES_2,
)
