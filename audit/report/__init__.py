"""A verdict as text, Markdown, JSON, JUnit XML and HTML."""
