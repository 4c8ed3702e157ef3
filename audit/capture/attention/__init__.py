"""How attention is seen in a running model, computed again where a kernel gives none, and checked."""
