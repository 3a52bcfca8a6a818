"""In: a Ray address, a folder that one driver may write to. Out: a connected session, leases, a progress line.

Support that every stage uses. Read `session` first; `lease`, `progress` and `retries` copy alone with `storage`.
"""
