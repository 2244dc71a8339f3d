"""SGLang's arguments: what they mean here, what is refused, and what memory they reserve."""
