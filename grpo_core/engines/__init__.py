"""Engines compute hidden states: the written-out decoder of known architectures, and transformers' own forward."""
