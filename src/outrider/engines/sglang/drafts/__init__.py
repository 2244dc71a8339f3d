"""Draft models and heads, whose states are in the target's slots."""
