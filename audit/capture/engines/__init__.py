"""One stack: attention, gradients or contributions folded into rows, each engine with its derivation."""
