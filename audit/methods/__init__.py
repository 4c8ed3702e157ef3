"""How attention becomes a map; pure torch mathematics on tensors."""
