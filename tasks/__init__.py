"""Prefect tasks: a decorator (retries, cache, persistence) around one call into grpo_core each.

They take and return plain JSON documents: configs, URLs and small records, never models or tensors.
Importing this package loads neither Prefect nor MLflow nor torch; its modules do when they are needed.
"""
