"""The paced device: a made-up accelerator under a real SGLang server.

Scheduler, HTTP, cache bookkeeping and everything of Outrider are real. Only a model's pass is made
up: it costs no host time, it is done when a published cost model says so, and whoever reads its
result waits. Answers come from recorded texts. `plugin` puts it into a server; docs/paced.md says
what it can show and what not.
"""
