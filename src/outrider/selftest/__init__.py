"""`outrider selftest`: proves the Triton kernels on this machine, and measures them.

`run` is the command. `attention`, `verification` and `checks` compare kernels with float64 and
plain torch, `bitwise` compares rows with themselves; `bench` measures `contenders` by the clock of
`timing`; `report` and `plots` write the page. Importing this package imports nothing heavy.
"""
