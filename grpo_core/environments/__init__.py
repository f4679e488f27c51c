"""Environments: sources of problems with a verifiable reward."""
