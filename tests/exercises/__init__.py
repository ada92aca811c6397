"""The usual wrong answers to each chapter's exercises: `WRONG` of ch01, ch02, ...

WRONG maps an exercise's number to (misconception, source of the whole solution cell) pairs.
"""
