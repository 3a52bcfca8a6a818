"""Readers of raw data: Parquet, WebDataset tars, image folders; filters on their columns."""
