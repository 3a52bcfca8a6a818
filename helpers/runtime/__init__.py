"""In: a Ray address, a folder that one driver may write to. Out: a connected session, leases, a progress line.

Every stage uses it. Read `session` first.
To copy: `lease`, `progress` and `retries` need `storage` at most; `session` needs `storage`.
"""
