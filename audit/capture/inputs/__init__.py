"""From probes to tensors whose positions know their characters, pixels or seconds."""
