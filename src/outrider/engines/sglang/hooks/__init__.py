"""What SGLang is hooked by: what all versions get, and what one version needs."""
