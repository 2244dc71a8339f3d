"""What SGLang's own sampler emits at each row of a pass."""
