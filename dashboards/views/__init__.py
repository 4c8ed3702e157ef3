"""The pages, one module each: load, draw, and nothing else."""
