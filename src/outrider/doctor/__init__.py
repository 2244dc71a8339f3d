"""Will it work? What two models, a machine and a server say before anything is loaded.

* `finding`: what a check says, and how bad it is
* `model`: a model read from its files: shapes, sizes, limits, never the weights themselves
* `tokens`, `pair`, `memory`: the checks of two models: same tokens, cost and limits, what it takes
* `machine`: what is installed here, and whether the hosts are those that we know
* `server`: what a running server says of itself
* `known_bad`: faults of others that were read or seen, as data
* `run`: the command
"""
