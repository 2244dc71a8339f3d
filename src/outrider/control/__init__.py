"""How much to speculate. So far: a fixed number of drafts, chosen by the caller."""
