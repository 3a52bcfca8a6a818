"""In: a folder of latents. Out: its rows, as Arrow tables, in an order that any number of workers resumes exactly.

Read `plan` first (which rows make which step), then `read` (how they get to the workers, by Ray Data).
To copy: `plan` needs `manifest`, `schema` and `storage`; `read` adds `parquet`, `runtime.throttle` and Ray.
"""
