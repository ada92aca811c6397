"""Exercises: handing out the notebooks without their solutions, and grading what comes back."""
