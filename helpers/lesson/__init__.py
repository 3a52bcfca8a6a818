"""In: what the other stages made. Out: what only the notebooks need: a drawn data set, figures, comparisons, plans.

Read `captioned_shapes` first, the data set; it is copied with `storage` alone. `figures` is copied with
`evaluation.drawing`, `generation` with `evaluation.scores` and `sample`, `planner` with nearly everything.
"""
