"""The work queues that `bench/queues.py` compares: one module each, behind the interface of `bench.contenders.system`.

Each is used as the documentation of its Python client recommends, with one process that publishes and another that
consumes.
"""
