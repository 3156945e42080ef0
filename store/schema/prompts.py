"""What the draft model's prompts took: a column of the step m011."""

from __future__ import annotations

CHANGES = (
    # Seconds that the draft model was fed prompts for since the report before; a part of what the steps took, or of the
    # time between them.
    "ALTER TABLE step_reports ADD COLUMN draft_prompt_s REAL NOT NULL DEFAULT 0 CHECK (draft_prompt_s >= 0)",
)
