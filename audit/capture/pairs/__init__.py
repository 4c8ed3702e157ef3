"""Models of two streams: source and prefix, two towers, and streams that attend to each other."""
