"""In: a folder of latents. Out: its rows as Arrow tables, in the same order on any number of workers and when resumed.

Read `plan` first (which rows make which step), then `read` (how they get to the workers, by Ray Data). To reuse `plan`,
copy it with `manifest`, `schema` and `storage`. `read` also needs `parquet` and Ray.
"""
