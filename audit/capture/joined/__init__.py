"""An image that a model reads among its text, or in windows: stacks composed with what joins them."""
