"""What prompts cost beside the steps that decode: columns of the steps m011, m012 and m014."""

from __future__ import annotations

DRAFT_PROMPTS = (
    # Seconds that the draft model was fed prompts for since the report before; a part of what the steps took, or of the
    # time between them.
    "ALTER TABLE step_reports ADD COLUMN draft_prompt_s REAL NOT NULL DEFAULT 0 CHECK (draft_prompt_s >= 0)",
)

NEW_ROWS = (
    # Rows that sequences got as the step began, summed over the steps: they waited for it with their first tokens.
    "ALTER TABLE step_reports ADD COLUMN num_new_rows INTEGER NOT NULL DEFAULT 0 CHECK (num_new_rows >= 0)",
)

BARE_STEPS = (
    # step_s without the shares of prompts, as single steps are told; NULL in rows of before.
    "ALTER TABLE latency_cells ADD COLUMN bare_step_s REAL "
    "CHECK (bare_step_s IS NULL OR (bare_step_s > 0 AND bare_step_s < 1e6))",
)
