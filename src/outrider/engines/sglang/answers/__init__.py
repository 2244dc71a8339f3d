"""What a server returns: chunks of a stream, and what an answer says about drafts."""
