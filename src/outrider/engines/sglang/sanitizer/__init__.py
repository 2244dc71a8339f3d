"""The KV sanitizer: every slot that is read is checked to hold its reader's text."""
