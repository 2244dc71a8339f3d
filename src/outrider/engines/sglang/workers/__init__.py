"""What SGLang's schedulers call: one worker for each version, over a common one."""
