"""The SGLang versions that Outrider knows: a contract and an adapter for each.

To add a version that differs little from the newest one:

1. Here: a contract, which may take over the tables of another one, and an adapter, which may be a
   subclass of another one. Add the contract to `contract.CONTRACTS`, behind all others.
2. In `plugin.HOOKS`: the adapter and what it is hooked by. Without differences that is the hooks of
   the newest version; they name the worker.
3. A list in `requirements/` for `scripts/setup-sglang-beside`, and a stage in `.ci/run`. The tests
   in `tests/engines/sglang` then run on it. Docs name a version when they do.

The contract is compared with the installed SGLang when OUTRIDER is chosen. If a name is missing or
has changed, the server stops and lists it. `tests/engines/test_contracts.py` checks that a contract
has all names that are imported.
"""
