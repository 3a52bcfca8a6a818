"""In: a folder of latents. Out: its rows as Arrow tables, in the same order on any number of workers and when resumed.

Read `plan` first (which rows make which step), then `read` (how they get to the workers, by Ray Data). `schema` has
the columns, `manifest` what a folder says of itself.
"""
