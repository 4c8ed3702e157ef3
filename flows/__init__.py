"""Prefect flows around the pipeline."""
