"""What only the notebooks need: a drawn data set, figures, comparisons, the planner. It may import all else.

Read `captioned_shapes` first: the data set, and the detector that judges images of it.
"""
