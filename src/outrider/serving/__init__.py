"""The served step: what a serving engine runs around each pass of the target. Knows no engine."""
