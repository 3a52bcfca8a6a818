"""What only the notebooks need: the drawn data set, figures, published numbers, the planner, comparisons. Nothing else
in helpers imports it.
"""
