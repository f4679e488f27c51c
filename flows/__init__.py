"""Prefect flows: chains of tasks, nothing else. One file per flow; `jobs.py` is what they share."""
