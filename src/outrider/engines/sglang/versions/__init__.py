"""The SGLang versions that Outrider knows: a contract and an adapter for each."""
