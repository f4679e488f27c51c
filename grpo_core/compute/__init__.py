"""What a job needs and whether it may start, before anything is loaded."""
