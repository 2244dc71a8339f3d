"""The attention backend `outrider`, and attention over slots for heads."""
