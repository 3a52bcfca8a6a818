"""What only the lessons need: figures, published numbers, the drawn data set, the builder of tiny-sd."""
