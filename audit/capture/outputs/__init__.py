"""What is read of an output: rows, predictions, and the score that a method explains."""
