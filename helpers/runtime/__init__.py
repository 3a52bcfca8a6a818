"""Support at run time: connecting to Ray, metrics, profiling, progress, faults."""
