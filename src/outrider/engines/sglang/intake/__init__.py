"""What enters a server: every field of a request is checked before SGLang reads it."""
