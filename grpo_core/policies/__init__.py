"""Policies: what is trained and evaluated, behind one protocol."""
