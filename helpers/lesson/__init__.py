"""What only the lessons need: figures, published numbers, the drawn data set."""
