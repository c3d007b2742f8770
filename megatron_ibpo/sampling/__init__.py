"""From prompts to scored, corrected groups: a stream over engines and verifiers."""
