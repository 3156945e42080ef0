"""The steps of the schema, oldest first: name -> statements."""

from __future__ import annotations

from speclen.store.schema.first_tables import (
    ACCEPTANCE,
    CONTEXTS,
    DECISIONS,
    DRIFT_EVENTS,
    LATENCY_CELLS,
    LEARNED_STATES,
    PREDICTION_WINDOWS,
    PROFILE_CELLS,
    PROFILES,
    STEP_REPORTS,
    STORE_EVENTS,
    WORKERS,
)
from speclen.store.schema.first_views import (
    BUCKET,
    CURRENT_CHOICE,
    DECISION_HISTORY,
    LEARNED_TABLE,
    PREDICTION_ERROR,
    WORKER_HEALTH,
)
from speclen.store.schema.plans import CHANGES as PLANS
from speclen.store.schema.plans import PLANNED_DECISIONS
from speclen.store.schema.prompts import BARE_STEPS, DRAFT_PROMPTS, NEW_ROWS
from speclen.store.schema.seen import CHANGES as SEEN
from speclen.store.schema.sums import CHANGES as SUMS

DRIFT_EVENTS_2 = """\
CREATE TABLE drift_events (
  -- Part of what was learned was forgotten: a detector fired, or a context's numbers had left the representable.
  drift_event_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  factor TEXT NOT NULL CHECK (factor IN ('latency', 'acceptance', 'reset')),
  statistic REAL NOT NULL CHECK (abs(statistic) < 1e300),
  detail TEXT NOT NULL,
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),
  detected_at REAL NOT NULL CHECK (detected_at >= 0)
) STRICT"""

STORE_EVENTS_2 = """\
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
) STRICT"""

CONTEXT_LIMITS = """\
CREATE TABLE context_limits (
  -- The limits of every context, from when it was made and each time it was widened: a replay widens it there, too.
  context_limits_id INTEGER PRIMARY KEY,
  context_id INTEGER NOT NULL REFERENCES contexts,
  max_batch_size INTEGER NOT NULL CHECK (max_batch_size BETWEEN 1 AND 4096),
  max_speculation_length INTEGER NOT NULL CHECK (max_speculation_length BETWEEN 0 AND 64),
  after_group_id INTEGER NOT NULL CHECK (after_group_id >= 0),  -- last group of step_reports learned from before it
  added_at REAL NOT NULL CHECK (added_at >= 0)
) STRICT"""

WORKER_HEALTH_2 = WORKER_HEALTH.replace(
    "w.applied_seq AS durable_seq",
    "coalesce(json_extract(w.missing_ranges, '$[0][0]') - 1, w.applied_seq) AS durable_seq",
)


def _made_anew(table: str, create: str, columns: str) -> tuple[str, ...]:
    """Statements that give a table another definition and keep its rows."""
    return (
        f"ALTER TABLE {table} RENAME TO {table}_before",
        create,
        f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table}_before",
        f"DROP TABLE {table}_before",
    )


DRIFT_EVENTS_3 = DRIFT_EVENTS_2.replace(
    "numbers had left the representable.",
    "numbers had left the representable,\n  -- or a worker turned out to be unlike the others.",
).replace("'acceptance', 'reset')", "'acceptance', 'reset', 'worker')")

DRIFT_EVENT_COLUMNS = "drift_event_id, context_id, factor, statistic, detail, after_group_id, detected_at"

# For current_choice and for the history of one bucket.
DECISIONS_BY_BUCKET = "CREATE INDEX decisions_by_bucket ON decisions (context_id, batch_min, decision_id)"

CHOICES = f"""\
CREATE VIEW choices AS
-- current_choice for a terminal: at most 100 columns wide, one row per context and bucket.
SELECT
  c.context_id AS context,  -- as `speclen explain --context` takes it
  substr(substr(x.target, 1, instr(x.target || '#', '#') - 1) || ' + '
    || substr(x.draft, 1, instr(x.draft || '#', '#') - 1), 1, 30) AS models,
  {BUCKET.format(t="c")} AS batch,
  c.speculation_length AS length,
  round(1000 * c.step_s / c.expected_tokens, 2) AS ms_per_token,
  round((plain.step_s / plain.expected_tokens) / (c.step_s / c.expected_tokens), 2) AS speedup,  -- over length 0
  c.num_steps
FROM latency_cells AS c
JOIN contexts AS x USING (context_id)
LEFT JOIN latency_cells AS plain
  ON plain.context_id = c.context_id AND plain.batch_min = c.batch_min AND plain.speculation_length = 0
WHERE c.is_best
ORDER BY c.context_id, c.batch_min"""

STEPS: dict[str, tuple[str, ...]] = {
    "m001_tables": (
        CONTEXTS,
        WORKERS,
        PROFILES,
        PROFILE_CELLS,
        ACCEPTANCE,
        LATENCY_CELLS,
        LEARNED_STATES,
        DECISIONS,
        DECISIONS_BY_BUCKET,
        DRIFT_EVENTS,
        STEP_REPORTS,
    ),
    "m002_views": (LEARNED_TABLE, CURRENT_CHOICE, DECISION_HISTORY, WORKER_HEALTH),
    "m003_prediction_error": (PREDICTION_WINDOWS, PREDICTION_ERROR),
    "m004_store_events": (STORE_EVENTS,),
    "m005_resets": (
        *_made_anew(
            "drift_events",
            DRIFT_EVENTS_2,
            DRIFT_EVENT_COLUMNS,
        ),
        *_made_anew("store_events", STORE_EVENTS_2, "store_event_id, kind, num_rows, detail, happened_at"),
        CONTEXT_LIMITS,
        "DROP VIEW worker_health",
        WORKER_HEALTH_2,
    ),
    "m006_choices": (CHOICES,),
    "m007_unlike_workers": _made_anew("drift_events", DRIFT_EVENTS_3, DRIFT_EVENT_COLUMNS),
    "m008_seen": SEEN,
    "m009_sums": SUMS,
    "m010_plans": PLANS,
    "m011_draft_prompts": DRAFT_PROMPTS,
    "m012_new_rows": NEW_ROWS,
    "m013_planned_decisions": PLANNED_DECISIONS,
    "m014_bare_steps": BARE_STEPS,
}
