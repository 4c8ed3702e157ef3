"""Planted shifts: pairs of checkpoints whose shift is known, and what each method makes of them.

From many small bases harmless fine-tunings, fine-tunings that learn a shortcut, and everything in between
(interpolated weights) are made for real; `make benchmark-shift` measures how often the replicate test
alarms on the first and finds the second, and writes SHIFT.md and audit/false_alarms.json.

families, vision, text → bases (trainings, cached) → truth (causal), maps (the product's) → rates →
summary → page.
"""
